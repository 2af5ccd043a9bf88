"""Documents isolated by masks: no bit of one reaches another, and each is read as if it stood alone behind an EOS."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from model import kernels, transformer
from model.cache import KVCache
from model.config import ModelConfig
from model.kernels import attend
from model.masks import Mask, block_mask, boolean_mask, compiled_flex_attention, document_mask
from model.positions import Places, RotaryEmbedding, one_text, positions_within_documents, within_documents
from model.transformer import Transformer
from tests.model.conftest import lively, random_ids, seeded

EOS = 2
LENGTHS = [11, 1, 20, 8]  # of the documents of a row, the EOS before each included
BORDERS = [0, 11, 12, 32, 40]


def row_of_documents(config: ModelConfig, seed: int = 7) -> tuple[Tensor, Tensor]:
    """(2, 40) ids and document numbers: in both rows documents of LENGTHS, each behind its EOS."""
    ids_bt = random_ids(config, 2, 40, seed=seed).clamp(min=EOS + 1)
    ids_bt[:, BORDERS[:-1]] = EOS
    return ids_bt, (ids_bt == EOS).cumsum(dim=1)


def test_another_document_changes_no_bit(tiny: Transformer) -> None:
    """Every document exchanged in turn: all others keep their logits bit for bit; without masks later ones don't."""
    ids_bt, documents_bt = row_of_documents(tiny.config)
    other_bt, _ = row_of_documents(tiny.config, seed=8)
    with torch.no_grad():
        isolated_btv, plain_btv = tiny(ids_bt, documents_bt=documents_bt), tiny(ids_bt)
        for number, (start, stop) in enumerate(itertools.pairwise(BORDERS)):
            changed_bt = ids_bt.clone()
            changed_bt[:, start:stop] = other_bt[:, start:stop]
            now_btv, now_plain_btv = tiny(changed_bt, documents_bt=documents_bt), tiny(changed_bt)
            rest_t = torch.ones(40, dtype=torch.bool)
            rest_t[start:stop] = False
            assert torch.equal(now_btv[:, rest_t], isolated_btv[:, rest_t]), number
            if LENGTHS[number] > 1:
                assert (now_btv - isolated_btv)[:, start + 1 : stop].abs().max() > 1e-3
                assert stop == 40 or (now_plain_btv - plain_btv)[:, stop:].abs().max() > 1e-3


@pytest.mark.parametrize("border", [1, 63, 64, 65, 511, 512, 700])
def test_nor_over_the_blocks_of_the_kernel(border: int) -> None:
    """Attention over 900 tokens, the first document's queries, keys and values exchanged."""
    generator = seeded(border)
    mask = document_mask((torch.arange(900) >= border).long()[None])
    rows = [torch.randn(1, heads, 900, 64, generator=generator) for heads in (4, 2, 2)]
    before = attend(*rows, mask, grouped=True)
    for row_bhtk in rows:
        row_bhtk[:, :, :border] = torch.randn(row_bhtk[:, :, :border].shape, generator=generator) * 30
    after = attend(*rows, mask, grouped=True)
    assert torch.equal(before[:, :, border:], after[:, :, border:])
    assert not torch.equal(before[:, :, :border], after[:, :, :border])


def test_a_document_in_a_row_reads_as_it_does_alone(tiny: Transformer) -> None:
    ids_bt, documents_bt = row_of_documents(tiny.config)
    with torch.no_grad():
        logits_btv, plain_btv = tiny(ids_bt, documents_bt=documents_bt), tiny(ids_bt)
        for start, stop in itertools.pairwise(BORDERS):
            alone_btv = tiny(ids_bt[:, start:stop])
            scale = alone_btv.abs().max()
            assert (logits_btv[:, start:stop] - alone_btv).abs().max() < 1e-5 * scale
            assert start == 0 or (plain_btv[:, start:stop] - alone_btv).abs().max() > 1e-3 * scale


def only_masked(documents_bt: Tensor) -> Places:
    return one_text(documents_bt.shape[1])


def only_restarted(documents_bt: Tensor, window: int | None) -> Mask:
    tokens = documents_bt.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def test_positions_alone_isolate_nothing(tiny: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "document_mask", only_restarted)
    with pytest.raises(AssertionError):
        test_another_document_changes_no_bit(tiny)


def test_positions_of_rope_are_relative_but_are_restarted_all_the_same(
    tiny: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention sees differences of positions alone, so the masks decide: what restarts only keeps the angles small."""
    ids_bt, documents_bt = row_of_documents(tiny.config)
    restarted_btv = tiny(ids_bt, documents_bt=documents_bt)
    monkeypatch.setattr(transformer, "within_documents", only_masked)
    running_btv = tiny(ids_bt, documents_bt=documents_bt)
    assert not torch.equal(running_btv, restarted_btv)
    assert (running_btv - restarted_btv).abs().max() < 1e-4 * restarted_btv.abs().max()


def test_positions_begin_again_with_every_number() -> None:
    documents_bt = torch.tensor([[0, 0, 0, 1, 1, 5, 6, 6], [4, 4, 4, 4, 4, 4, 4, 4]])
    assert positions_within_documents(documents_bt).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8))]
    rotary = RotaryEmbedding(8, 8, 10000.0)
    for table_b1td, plain_td in zip(
        rotary.rotation(within_documents(documents_bt)), rotary.rotation(one_text(8)), strict=True
    ):
        assert table_b1td.shape == (2, 1, 8, 4)
        assert torch.equal(table_b1td[0, 0], plain_td[[0, 1, 2, 0, 1, 0, 0, 1]])
        assert torch.equal(table_b1td[1, 0], plain_td)


def test_the_mask_by_hand() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1]]))
    assert isinstance(mask, Tensor)
    assert mask.int().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]]


def test_one_document_is_a_row_without_masks(tiny: Transformer) -> None:
    ids_bt = random_ids(tiny.config, 2, 30)
    with torch.no_grad():
        same_btv, plain_btv = tiny(ids_bt, documents_bt=torch.zeros_like(ids_bt)), tiny(ids_bt)
    assert (same_btv - plain_btv).abs().max() < 1e-5 * plain_btv.abs().max()


def test_the_mask_is_made_once_for_all_layers(tiny: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(transformer, "document_mask", lambda *given: calls.append(1) or document_mask(*given))
    ids_bt, documents_bt = row_of_documents(tiny.config)
    tiny(ids_bt, documents_bt=documents_bt)
    assert len(calls) == 1
    tiny(ids_bt)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["selective", "every-2", "full"])
def test_checkpointed_gradients_are_equal_bit_for_bit(tiny_config: ModelConfig, mode: str) -> None:
    model = lively(Transformer(tiny_config))
    ids_bt, documents_bt = row_of_documents(tiny_config)
    targets_bt = random_ids(tiny_config, 2, 40, seed=8)
    targets_bt[:, 36:] = -100

    def gradients() -> list[Tensor]:
        loss = model(ids_bt, targets_bt, documents_bt=documents_bt)
        assert loss.token_count == 72
        return list(torch.autograd.grad(loss.loss_sum, list(model.parameters())))

    plain = gradients()
    model.activation_checkpointing = mode
    assert all(map(torch.equal, gradients(), plain))


def test_bf16_stays_close(tiny_config: ModelConfig) -> None:
    model = Transformer(tiny_config, seeded(0))
    ids_bt, documents_bt = row_of_documents(tiny_config)
    exact = model(ids_bt, ids_bt, documents_bt=documents_bt).loss_sum.item()
    model.bfloat16()
    loss_sum = model(ids_bt, ids_bt, documents_bt=documents_bt).loss_sum
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(exact, rel=1e-3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_what_cannot_be_is_refused(tiny: Transformer) -> None:
    ids_bt, documents_bt = row_of_documents(tiny.config)
    with pytest.raises(ValueError, match="a cache holds one document"):
        tiny(ids_bt, cache=KVCache(tiny.config, batch_size=2, max_tokens=40), documents_bt=documents_bt)
    long_bt = torch.zeros(1, 49, dtype=torch.int64)
    with pytest.raises(ValueError, match="position 48 is past the model's seq_len = 48"):
        tiny(long_bt, documents_bt=long_bt)


# ---------------------------------------------------------------- the block mask of GPUs, as far as a CPU goes


@pytest.fixture
def forgotten() -> Iterator[None]:
    compiled_flex_attention.cache_clear()
    yield
    compiled_flex_attention.cache_clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_block_mask_gives_what_the_booleans_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention not compiled, which on a CPU has no backward pass."""
    monkeypatch.setattr(kernels, "compiled_flex_attention", lambda: flex_attention)
    generator = seeded(1)
    q_bhtk, k_bhtk, v_bhtk = (torch.randn(2, heads, 300, 64, generator=generator) for heads in (4, 2, 2))
    documents_bt = (torch.rand(2, 300, generator=generator) < 0.03).cumsum(dim=1)
    documents_bt[1] = torch.arange(300) // 150
    with torch.no_grad():
        ours = attend(q_bhtk, k_bhtk, v_bhtk, block_mask(documents_bt), grouped=True)
        theirs = attend(q_bhtk, k_bhtk, v_bhtk, document_mask(documents_bt), grouped=True)
        causal = attend(q_bhtk, k_bhtk, v_bhtk, None, grouped=True)
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - causal).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("make_mask", [boolean_mask, block_mask])
def test_a_row_has_the_loss_and_the_gradients_of_its_documents_apart(
    tiny: Transformer, monkeypatch: pytest.MonkeyPatch, make_mask: Callable[[Tensor], Mask]
) -> None:
    """Under SDPA's mask and flex_attention's, whose backward pass runs on a CPU too if one doesn't ask first."""
    monkeypatch.setattr(transformer, "document_mask", make_mask)
    monkeypatch.setattr(kernels, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    ids_bt, documents_bt = row_of_documents(tiny.config)
    targets_bt = random_ids(tiny.config, 2, 40, seed=8)
    targets_bt[:, 30:34] = -100
    parameters = list(tiny.parameters())
    apart = [tiny(ids_bt[:, a:b], targets_bt[:, a:b]).loss_sum for a, b in itertools.pairwise(BORDERS)]
    packed = tiny(ids_bt, targets_bt, documents_bt=documents_bt).loss_sum
    unmasked = tiny(ids_bt, targets_bt).loss_sum
    expected = torch.autograd.grad(sum(apart), parameters)
    assert packed.item() == pytest.approx(sum(apart).item(), rel=1e-6)
    assert unmasked.item() != pytest.approx(sum(apart).item(), rel=1e-3)
    for ours, theirs in zip(torch.autograd.grad(packed, parameters), expected, strict=True):
        assert (ours - theirs).norm() < 5e-6 * theirs.norm()


@pytest.mark.usefixtures("forgotten")
def test_where_flex_attention_fails_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with pytest.warns(UserWarning, match=r"flex_attention does not run here \(NotImplementedError: .*slower way"):
        assert compiled_flex_attention() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled_flex_attention() is None


def wrong(mutate: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A flex_attention with a backward pass that gives SDPA's numbers under a mask, changed."""

    def attend_so(q: Tensor, k: Tensor, v: Tensor, *, block_mask: object, enable_gqa: bool) -> Tensor:
        documents_bt = torch.arange(256).div(90, rounding_mode="floor").expand(2, -1)
        mask = document_mask(documents_bt)
        return mutate(attend(q, k, v, mask, grouped=enable_gqa))

    return attend_so


def gradients_lost(out: Tensor) -> Tensor:
    out.register_hook(lambda gradient: gradient * float("nan"))
    return out


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    "mutate, is_taken", [(lambda out: out, True), (lambda out: out * 1.2, False), (gradients_lost, False)]
)
def test_it_is_taken_only_where_its_numbers_are_right(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[Tensor], Tensor], is_taken: bool
) -> None:
    stand_in = wrong(mutate)
    monkeypatch.setattr(torch, "compile", lambda function: stand_in)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert (compiled_flex_attention() is stand_in) == is_taken
    assert any("does not run here" in str(one.message) for one in caught) != is_taken
