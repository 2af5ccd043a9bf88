from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.accounting import kv_cache_bytes_per_token
from model.attention import Attention
from model.cache import KVCache
from model.config import PRESETS, ModelConfig
from model.kernels import attend
from model.masks import causal_mask
from model.positions import rope_tables
from tests.model import reference
from tests.model.conftest import seeded


def distance_from_numpy(config: ModelConfig) -> float:
    attention = Attention(config, layer=0).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.3, generator=seeded(parameter.numel()))
    x_btd = torch.randn(1, 11, config.d_model, dtype=torch.float64, generator=seeded(0))
    rotation = tuple(table.double() for table in rope_tables(config.head_dim, 11, config.rope_base))
    weights = [getattr(attention, f"{name}_proj").weight.detach().numpy() for name in "qkvo"]
    expected = reference.attention(x_btd[0].numpy(), *weights, config)
    return float(np.abs(attention(x_btd, rotation)[0].detach().numpy() - expected).max())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_against_numpy(tiny_config: ModelConfig, kv_heads: int) -> None:
    config = ModelConfig(**{**tiny_config.to_dict(), "n_kv_heads": kv_heads})
    assert distance_from_numpy(config) < 1e-5


def interleaved_heads(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The wrong expansion: kv heads 0 1 0 1 for query heads 0 1 2 3."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **settings: object) -> Tensor:
        times = q.shape[1] // k.shape[1]
        return original(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), **settings)

    return attend


def unmasked(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **settings: object) -> Tensor:
        return original(q, k, v, **settings)

    return attend


@pytest.mark.parametrize("mutant", [interleaved_heads, unmasked])
def test_the_numpy_comparison_catches_mutants(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Callable[..., Tensor]]
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", mutant(F.scaled_dot_product_attention))
    assert distance_from_numpy(tiny_config) > 0.01


def test_the_mask_aligns_the_last_query_with_the_last_key() -> None:
    assert causal_mask(4, 4, torch.device("cpu")) is None
    mask = causal_mask(2, 5, torch.device("cpu"))
    assert mask is not None
    assert mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 5, torch.device("cpu")) is None


@pytest.mark.parametrize("mask", [None, torch.tensor([[[[True, True, False, True, True, False, False]]]])])
def test_one_query_attends_alike_grouped_by_key_value_head(mask: Tensor | None) -> None:
    """The heads of one token as queries of their key/value head, against keys and values copied for every head."""
    q_bhtk, k_bhtk, v_bhtk = (torch.randn(3, *shape, 64, generator=seeded(1)) for shape in ((8, 1), (2, 7), (2, 7)))
    copied_bhtk = (x_bhtk.repeat_interleave(4, dim=1) for x_bhtk in (k_bhtk, v_bhtk))
    expected_bhtk = F.scaled_dot_product_attention(q_bhtk, *copied_bhtk, attn_mask=mask)
    out_bhtk = attend(q_bhtk, k_bhtk, v_bhtk, mask, grouped=True)
    assert out_bhtk.shape == q_bhtk.shape
    assert float((out_bhtk - expected_bhtk).abs().max()) < 1e-6


def test_the_cache_holds_kv_heads_only_and_gives_views(tiny_config: ModelConfig) -> None:
    cache = KVCache(tiny_config, batch_size=2, max_tokens=10, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 3 * 2 * 64 * 2 * 10 * 2
    chunk_bhtk = torch.ones(2, 2, 4, 64)
    keys_bhtk, values_bhtk = cache.append(1, chunk_bhtk, 2 * chunk_bhtk)
    assert keys_bhtk.shape == (2, 2, 4, 64)
    assert keys_bhtk.untyped_storage().data_ptr() == cache.held[0].untyped_storage().data_ptr()
    assert values_bhtk.unique().tolist() == [2.0]
    assert cache.lengths == [0, 0]
    cache.advance(4)
    with pytest.raises(ValueError, match="11 tokens do not fit a KV cache of 10"):
        cache.append(1, torch.ones(2, 2, 7, 64), torch.ones(2, 2, 7, 64))


def test_a_cache_takes_its_own_number_of_rows(tiny_config: ModelConfig) -> None:
    cache = KVCache(tiny_config, batch_size=2, max_tokens=9)
    one_row = torch.zeros(1, tiny_config.n_kv_heads, 3, tiny_config.head_dim)
    with pytest.raises(ValueError, match="a KV cache of 2 rows is given 1"):
        cache.append(0, one_row, one_row)


def test_rows_of_the_cache_have_their_own_lengths(tiny_config: ModelConfig) -> None:
    cache = KVCache(tiny_config, batch_size=3, max_tokens=9)
    assert cache.is_even
    cache.advance(5)
    cache.cut([5, 0, 2])
    assert (cache.lengths, cache.longest, cache.is_even) == ([5, 0, 2], 5, False)
    assert cache.positions(2).tolist() == [[5, 6], [0, 1], [2, 3]]
    mask_b1tj = cache.mask(2)
    assert mask_b1tj is not None
    assert mask_b1tj.int()[:, 0].tolist() == [
        [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
        [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]],
        [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]],
    ]
    new_bhtk = torch.arange(1.0, 7.0).view(3, 1, 2, 1).expand(3, 2, 2, 64)
    keys_bhjk, values_bhjk = cache.append(2, new_bhtk, -new_bhtk)
    assert keys_bhjk[:, 1, :, 63].tolist() == [[0, 0, 0, 0, 0, 1, 2], [3, 4, 0, 0, 0, 0, 0], [0, 0, 5, 6, 0, 0, 0]]
    assert torch.equal(values_bhjk, -keys_bhjk)
    assert keys_bhjk.untyped_storage().data_ptr() == cache.held[0].untyped_storage().data_ptr()
    assert not cache.held[0][:2].any()
    cache.advance(2)
    assert cache.lengths == [7, 2, 4]
    cache.cut([2, 2, 2])
    assert cache.is_even
    assert cache.positions(1).tolist() == [[2], [2], [2]]


@pytest.mark.parametrize("lengths", [[4, 2], [3], [3, 2, 1], [-1, 2]])
def test_rows_are_cut_to_what_they_have(tiny_config: ModelConfig, lengths: list[int]) -> None:
    cache = KVCache(tiny_config, batch_size=2, max_tokens=9)
    cache.advance(3)
    cache.cut([3, 2])
    with pytest.raises(ValueError, match=r"rows of \[3, 2\] tokens cannot be cut to"):
        cache.cut(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_cache_are_the_formulas(dtype: torch.dtype) -> None:
    config = PRESETS["mini"]
    cache = KVCache(config, batch_size=3, max_tokens=50, dtype=dtype)
    assert cache.nbytes == 3 * 50 * kv_cache_bytes_per_token(config, dtype.itemsize)
    assert cache.nbytes * 4 == 3 * 50 * kv_cache_bytes_per_token(config, dtype.itemsize, kv_heads=config.n_heads)
