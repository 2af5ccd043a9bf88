"""RoPE beyond its trained length: transformers' frequencies, and one meaning of "the text's length" on every way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model import rope_scaling
from model.cache import KVCache
from model.config import ModelConfig, ModelConfigError
from model.generate import Sampling, generate, probabilities
from model.positions import DynamicRotaryEmbedding, Places, RotaryEmbedding, build_positions, lengths_of_texts, one_text
from model.transformer import Transformer
from model.verify import check_cache
from tests.model.conftest import lively, random_ids, seeded

SCALED = {"rope_scaling_factor": 4.0, "rope_original_seq_len": 12}  # of tiny_config's 48 positions
KINDS = ["linear", "dynamic", "yarn"]


def their_config(kind: str, head_dim: int, base: float, factor: float, trained: int, longest: int) -> LlamaConfig:
    """transformers reads the trained length of "dynamic" from max_position_embeddings."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": base, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = trained
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=trained if kind == "dynamic" else longest,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("head_dim, base", [(64, 10000.0), (128, 10000.0), (128, 1e6), (32, 500.0)])
@pytest.mark.parametrize("factor, trained", [(4.0, 2048), (1.5, 100), (40.0, 4096), (8.0, 33)])
def test_frequencies_and_factor_equal_transformers(head_dim: int, base: float, factor: float, trained: int) -> None:
    longest = int(trained * factor)
    for kind, ours in (
        ("linear", rope_scaling.linear(head_dim, base, factor)),
        ("yarn", rope_scaling.yarn(head_dim, base, factor, trained)),
    ):
        theirs, _ = ROPE_INIT_FUNCTIONS[kind](their_config(kind, head_dim, base, factor, trained, longest), "cpu")
        assert (ours - theirs).abs().max() < 1e-6
        assert ((ours - theirs) / ours).abs().max() < 1e-5  # theirs are fp32
    for length in (1, trained - 1, trained, trained + 1, longest):
        config = their_config("dynamic", head_dim, base, factor, trained, longest)
        theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
        raised = rope_scaling.dynamic_base(head_dim, base, factor, max(1.0, length / trained))
        ours = rope_scaling.plain(head_dim, raised)
        assert (ours - theirs).abs().max() < 1e-6
        assert ((ours - theirs) / ours).abs().max() < 1e-5


@pytest.mark.parametrize("factor", [1.0, 2.0, 40.0])
def test_the_attention_factor_equals_transformers(tiny_config: ModelConfig, factor: float) -> None:
    for kind in KINDS:
        config = replace(tiny_config, rope_scaling=kind, rope_scaling_factor=factor, rope_original_seq_len=12)
        _, theirs = ROPE_INIT_FUNCTIONS[kind](their_config(kind, 64, 10000.0, factor, 12, 48), "cpu")
        assert rope_scaling.attention_factor(config) == pytest.approx(theirs, abs=1e-6)
        assert (theirs == 1) == (kind != "yarn" or factor == 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [5, 12, 13, 48])
def test_the_tables_of_a_pass_equal_transformers(tiny_config: ModelConfig, kind: str, tokens: int) -> None:
    """YaRN's factor included, and the base of "dynamic" at the length of the pass."""
    config = replace(tiny_config, rope_scaling=kind, **SCALED)
    x_btd = torch.zeros(1, tokens, config.d_model)
    _, (cos_td, sin_td) = build_positions(config)(x_btd, one_text(tokens))
    theirs = LlamaRotaryEmbedding(their_config(kind, 64, 10000.0, 4.0, 12, 48))
    their_cos, their_sin = theirs(x_btd, torch.arange(tokens)[None])
    assert (cos_td - their_cos[0, :, :32]).abs().max() < 1e-5  # their angles are fp32
    assert (sin_td - their_sin[0, :, :32]).abs().max() < 1e-5


def slowest_pair_kept(head_dim: int, base: float, factor: float, trained: int) -> Tensor:
    scaled = original_yarn(head_dim, base, factor, trained)
    scaled[-1] = rope_scaling.plain(head_dim, base)[-1]
    return scaled


def ends_not_rounded(head_dim: int, base: float, factor: float, trained: int) -> Tensor:
    """As transformers with truncate = False."""
    pair_d = torch.arange(head_dim // 2).double()
    first, last = (head_dim * np.log(trained / (n * 2 * np.pi)) / (2 * np.log(base)) for n in (32, 1))
    slowed_d = ((pair_d - max(first, 0)) / (last - max(first, 0))).clamp(0, 1)
    kept = rope_scaling.plain(head_dim, base)
    return kept * (1 - slowed_d) + kept / factor * slowed_d


original_yarn = rope_scaling.yarn


@pytest.mark.parametrize(
    "name, mutant",
    [
        ("yarn", slowest_pair_kept),
        ("yarn", ends_not_rounded),
        ("linear", lambda head_dim, base, factor: rope_scaling.plain(head_dim, base) * factor),
        ("dynamic_base", lambda head_dim, base, factor, grown: base * factor * grown),
    ],
)
def test_the_comparison_catches_mutants(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]) -> None:
    monkeypatch.setattr(rope_scaling, name, mutant)
    with pytest.raises(AssertionError):
        test_frequencies_and_factor_equal_transformers(64, 10000.0, 4.0, 2048)


# ---------------------------------------------------------------- the length of a text, where "dynamic" asks for it


@pytest.fixture
def dynamic(tiny_config: ModelConfig) -> Transformer:
    return lively(Transformer(replace(tiny_config, rope_scaling="dynamic", **SCALED))).eval()


@torch.no_grad()
def test_a_short_text_is_read_as_before(tiny: Transformer, dynamic: Transformer) -> None:
    """Bit for bit up to the trained length; beyond it differently, in every token."""
    dynamic.load_state_dict(tiny.state_dict())
    ids_bt = random_ids(tiny.config, 2, 13)
    assert torch.equal(dynamic(ids_bt[:, :12]), tiny(ids_bt[:, :12]))
    assert ((dynamic(ids_bt) - tiny(ids_bt)).abs().amax(dim=-1)[:, 1:] > 1e-5).all()
    assert torch.equal(dynamic(ids_bt[:, :12]), tiny(ids_bt[:, :12]))  # what a long one needed is forgotten


@torch.no_grad()
def test_a_document_in_a_row_is_read_at_its_own_length(dynamic: Transformer) -> None:
    """Documents of 8 (not scaled), 15 and 25 tokens (each by its length), not of the row's 48."""
    ids_bt = random_ids(dynamic.config, 1, 48)
    documents_bt = torch.tensor([0] * 8 + [1] * 15 + [2] * 25)[None]
    logits_btv = dynamic(ids_bt, documents_bt=documents_bt)
    for start, stop in ((0, 8), (8, 23), (23, 48)):
        alone_btv = dynamic(ids_bt[:, start:stop])
        assert (logits_btv[:, start:stop] - alone_btv).abs().max() < 1e-5 * alone_btv.abs().max()


def test_lengths_of_texts_by_hand() -> None:
    positions_bt = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert lengths_of_texts(positions_bt).tolist() == [[3, 3, 3, 1, 4, 4, 4, 4], [8] * 8]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_gives_the_logits_of_the_full_pass(tiny_config: ModelConfig, kind: str) -> None:
    """Of a text of 20 tokens, for which the cache has room, beyond the trained 12; rows of unequal lengths too."""
    model = lively(Transformer(replace(tiny_config, rope_scaling=kind, **SCALED))).eval()
    outcome = check_cache(model, seeded(5))
    assert outcome.passed, outcome.measured


def test_the_cache_check_catches_a_base_that_grows_with_each_token(
    dynamic: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does: keys that were turned by another base stay in the cache."""
    original = DynamicRotaryEmbedding.rotation
    monkeypatch.setattr(
        DynamicRotaryEmbedding, "rotation", lambda self, places: original(self, replace(places, length=places.stop))
    )
    with torch.no_grad():
        assert not check_cache(dynamic, seeded(5)).passed


@torch.no_grad()
def test_a_text_in_a_batch_is_read_and_continued_at_its_own_length(
    dynamic: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that become 9 (not scaled), 14 and 34 tokens, of which the prompts are read together: the angles of each,
    hence its logits, are those it has alone, not those of the longest's room."""
    drawn_from: list[Tensor] = []

    def heard(logits_bv: Tensor, sampling: Sampling) -> Tensor:
        drawn_from.append(logits_bv)
        return probabilities(logits_bv, sampling)

    monkeypatch.setattr("model.generate.probabilities", heard)
    prompts = [random_ids(dynamic.config, 1, size)[0].tolist() for size in (3, 8, 28)]
    lengths = [len(prompt) + 6 for prompt in prompts]
    together = generate(dynamic, prompts, 6)
    assert together == [generate(dynamic, [prompt], 6)[0] for prompt in prompts]
    together_nbv, alone_nbv = (
        torch.stack(drawn_from[:6]),
        torch.cat([torch.stack(drawn_from[6:][n * 6 :][:6]) for n in range(3)], dim=1),
    )
    assert (together_nbv - alone_nbv).abs().max() < 1e-5 * alone_nbv.abs().max()

    cache = KVCache(dynamic.config, batch_size=3, max_tokens=34, text_lengths=lengths)
    for places in (cache.places(28), cache.places(1)):
        assert places.positions_bt is None  # before the rows are cut
    ids_bt = torch.tensor([prompt + [0] * (28 - len(prompt)) for prompt in prompts])
    read_btv = dynamic(ids_bt, cache=cache)
    cache.cut([len(prompt) for prompt in prompts])
    step_btv = dynamic(torch.tensor([[5], [6], [7]]), cache=cache)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        alone = KVCache(dynamic.config, batch_size=1, max_tokens=length)
        for found, expected in (
            (read_btv[row, : len(prompt)], dynamic(torch.tensor([prompt]), cache=alone)[0]),
            (step_btv[row], dynamic(torch.tensor([[5 + row]]), cache=alone)[0]),
        ):
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_texts_that_do_not_fit_a_cache_are_refused(tiny_config: ModelConfig) -> None:
    for lengths in ([9], [9, 11]):
        with pytest.raises(ValueError, match=r"tokens do not fit 2 rows of 10"):
            KVCache(tiny_config, batch_size=2, max_tokens=10, text_lengths=lengths)


# ---------------------------------------------------------------- the tables


@pytest.mark.parametrize("kind", KINDS)
def test_tables_stay_exact_through_casts_and_the_meta_device(tiny_config: ModelConfig, kind: str) -> None:
    config = replace(tiny_config, rope_scaling=kind, **SCALED)
    expected = build_positions(config).rotation(one_text(48))
    with torch.device("meta"):
        rotary = build_positions(config)
    rotary.bfloat16()
    rotary.to_empty(device="cpu")
    rotary.half()
    rotary.rotation(one_text(40))
    found = rotary.bfloat16().rotation(one_text(48))
    assert all(map(torch.equal, found, expected))
    assert found[0].dtype == torch.float32
    assert rotary.state_dict() == {}


def test_tables_are_exact_where_new_tensors_are_made_in_bf16(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [replace(tiny_config, rope_scaling=kind, **SCALED) for kind in KINDS]
    expected = [build_positions(config).rotation(one_text(48)) for config in configs]
    for name in ("arange", "tensor", "empty", "zeros", "ones", "full"):
        original = getattr(torch, name)

        def halved(*args: object, _original: Callable[..., Tensor] = original, **kwargs: object) -> Tensor:
            tensor = _original(*args, **kwargs)
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, halved)
    found = [build_positions(config).rotation(one_text(48)) for config in configs]
    monkeypatch.undo()
    assert all(
        torch.equal(one, other) for pair in zip(found, expected, strict=True) for one, other in zip(*pair, strict=True)
    )


def test_positions_past_the_end_are_refused(dynamic: Transformer) -> None:
    rotary = dynamic.positions
    assert isinstance(rotary, RotaryEmbedding)
    for places in (one_text(49), Places(40, 49, length=60), Places(0, 49, torch.zeros(1, 49, dtype=torch.int64))):
        with pytest.raises(ValueError, match="position 48 is past the model's seq_len = 48"):
            rotary.rotation(places)


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"rope_scaling": "dynamic", "head_dim": 2}, "needs more than the 2 dimensions"),
        ({"rope_scaling": "yarn", "rope_base": 1.0}, "needs a rope_base above 1"),
    ],
)
def test_what_has_no_scale_is_refused(tiny_config: ModelConfig, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        replace(tiny_config, **SCALED, **choice)
