"""Positions besides RoPE: none, a table of waves, a learned table; and every choice on every way through a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.positions import (
    Learned,
    Places,
    Positions,
    RotaryEmbedding,
    Sinusoidal,
    build_positions,
    one_text,
    reorder,
    within_documents,
)
from model.transformer import Transformer
from model.verify import check_cache, check_causality
from tests.model.conftest import lively, random_ids, seeded

CHOICES: list[dict[str, Any]] = [
    {"positions": "none"},
    {"positions": "sinusoidal"},
    {"positions": "learned"},
    {"positions": "rope"},
    {"positions": "rope", "rope_layout": "interleaved"},
    *(
        {"rope_scaling": kind, "rope_scaling_factor": 4.0, "rope_original_seq_len": 12}
        for kind in ("linear", "dynamic", "yarn")
    ),
]


def waves(tokens: int, d_model: int) -> np.ndarray:
    """Vaswani et al. 2017, section 3.5, number by number."""
    table = np.zeros((tokens, d_model))
    for position in range(tokens):
        for i in range(d_model // 2):
            table[position, 2 * i] = math.sin(position / 10000 ** (2 * i / d_model))
            table[position, 2 * i + 1] = math.cos(position / 10000 ** (2 * i / d_model))
    return table


def test_sinusoidal_against_the_formula() -> None:
    x_btd = torch.randn(2, 300, 16, dtype=torch.float64, generator=seeded(0))
    placed_btd, rotation = Sinusoidal(16, 300)(x_btd, one_text(300))
    assert rotation == ()
    assert np.abs(placed_btd.numpy() - (4.0 * x_btd.numpy() + waves(300, 16))).max() < 1e-7


def test_sinusoidal_in_bf16_is_rounded_once() -> None:
    """A table cast to bf16 would no longer tell positions past 256 apart in its slow waves."""
    x_btd = torch.randn(1, 400, 16, generator=seeded(0)).bfloat16()
    module = Sinusoidal(16, 400).bfloat16()
    placed_btd, _ = module(x_btd, one_text(400))
    exact_btd = 4.0 * x_btd.double() + torch.from_numpy(waves(400, 16))
    assert placed_btd.dtype == torch.bfloat16
    assert (placed_btd.double() - exact_btd).abs().max() <= exact_btd.abs().max() * 2**-8
    assert module.table_td.dtype == torch.float32


def test_the_tables_of_waves_survive_casts_and_the_meta_device() -> None:
    with torch.device("meta"):
        module = Sinusoidal(16, 300)
    module.half()
    module.to_empty(device="cpu")
    module.bfloat16()
    assert np.abs(module.table_td.double().numpy() - waves(300, 16)).max() < 6e-8
    assert module.state_dict() == {}
    module.table_td.data = module.table_td.data.bfloat16()
    with pytest.raises(RuntimeError, match="bfloat16"):
        module(torch.zeros(1, 3, 16), one_text(3))


def test_learned_adds_its_rows_and_learns_them() -> None:
    module = Learned(4, 10)
    with torch.no_grad():
        module.weight.normal_(generator=seeded(0))
    x_btd = torch.zeros(2, 3, 4)
    placed_btd, rotation = module(x_btd, Places(5, 8))
    assert rotation == ()
    assert torch.equal(placed_btd, module.weight[5:8].expand(2, -1, -1))
    places = within_documents(torch.tensor([[0, 0, 1], [4, 5, 5]]))
    placed_btd, _ = module(x_btd, places)
    assert torch.equal(placed_btd, module.weight[torch.tensor([[0, 1, 0], [0, 0, 1]])])
    placed_btd.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[:, 0].tolist() == [4, 2, 0, 0, 0, 0, 0, 0, 0, 0]


def test_learned_positions_begin_like_the_embedding(tiny_config: ModelConfig) -> None:
    config = replace(tiny_config, positions="learned", init_std=0.05)
    weight = Transformer(config, generator=seeded(2)).positions.weight
    assert weight.shape == (48, 32)
    assert float(weight.detach().std()) == pytest.approx(0.05, rel=0.1)
    assert abs(float(weight.detach().mean())) < 0.01


def test_only_learned_positions_have_parameters(tiny_config: ModelConfig) -> None:
    def names(choice: dict[str, Any]) -> set[str]:
        return {name for name, _ in Transformer(replace(tiny_config, **choice)).named_parameters()}

    llama = names({})
    for choice in CHOICES:
        extra = {"positions.weight"} if choice.get("positions") == "learned" else set()
        assert names(choice) == llama | extra


@pytest.mark.parametrize("kind", ["none", "sinusoidal", "learned", "rope"])
def test_positions_past_the_end_are_refused(tiny_config: ModelConfig, kind: str) -> None:
    module = build_positions(replace(tiny_config, positions=kind))
    with pytest.raises(ValueError, match="position 48 is past the model's seq_len = 48"):
        module(torch.zeros(1, 9, 32), Places(40, 49))


@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_who_knows_the_order_of_the_past(tiny_config: ModelConfig, choice: dict[str, Any]) -> None:
    """One layer, the past in another order: without positions the last token sees the same set, else it does not."""
    model = lively(Transformer(replace(tiny_config, n_layers=1, **choice))).eval()
    ids_bt = random_ids(tiny_config, 1, 20)
    order_t = torch.cat((torch.randperm(19, generator=seeded(3)), torch.tensor([19])))
    moved = float((model(ids_bt[:, order_t])[0, -1] - model(ids_bt)[0, -1]).abs().max())
    assert moved < 1e-5 if choice.get("positions") == "none" else moved > 1e-2


# ---------------------------------------------------------------- every choice, every way


def borders_of(lengths: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_document_in_a_row_reads_as_it_does_alone(tiny_config: ModelConfig, choice: dict[str, Any]) -> None:
    model = lively(Transformer(replace(tiny_config, **choice))).eval()
    lengths = [11, 1, 20, 8]
    ids_bt = random_ids(tiny_config, 2, 40)
    documents_bt = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    logits_btv = model(ids_bt, documents_bt=documents_bt)
    for start, stop in borders_of(lengths):
        alone_btv = model(ids_bt[:, start:stop])
        assert (logits_btv[:, start:stop] - alone_btv).abs().max() < 1e-5 * alone_btv.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_cache_and_causality(tiny_config: ModelConfig, choice: dict[str, Any]) -> None:
    """Read in one chunk, in three, token by token, in rows of unequal lengths; later tokens change the later alone."""
    model = lively(Transformer(replace(tiny_config, **choice))).eval()
    for check in (check_cache, check_causality):
        outcome = check(model, seeded(5))
        assert outcome.passed, outcome.measured


def restarted(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Positions, x_btd: Tensor, places: Places) -> Any:
        return original(self, x_btd, Places(0, places.stop - places.start, length=places.length))

    return forward


@torch.no_grad()
@pytest.mark.parametrize("kind, module", [("sinusoidal", Sinusoidal), ("learned", Learned), ("rope", RotaryEmbedding)])
def test_both_catch_positions_that_restart_in_each_chunk(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, kind: str, module: type[Positions]
) -> None:
    """And documents whose positions run on, where the place is absolute."""
    model = lively(Transformer(replace(tiny_config, positions=kind))).eval()
    original = module.forward
    monkeypatch.setattr(module, "forward", restarted(original))
    assert not check_cache(model, seeded(5)).passed
    if kind != "rope":
        with pytest.raises(AssertionError):
            running_on(tiny_config, monkeypatch, kind, module, original)


def running_on(
    tiny_config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    module: type[Positions],
    original: Callable[..., Any],
) -> None:
    monkeypatch.setattr(module, "forward", lambda self, x, places: original(self, x, one_text(places.stop)))
    test_a_document_in_a_row_reads_as_it_does_alone(tiny_config, {"positions": kind})


@torch.no_grad()
def test_reordering_takes_norms_and_biases_along(tiny_config: ModelConfig) -> None:
    """QK-Norm's weights and the biases of q and k belong to dimensions that change places."""
    config = replace(tiny_config, bias=True, qk_norm=True)
    half, neighbours = (
        lively(Transformer(replace(config, rope_layout=layout))).eval() for layout in ("rotate_half", "interleaved")
    )
    weights = {name: parameter.detach().clone() for name, parameter in half.named_parameters()}
    there = reorder(weights, 64, have="rotate_half", want="interleaved")
    neighbours.load_state_dict(there, strict=False)
    ids_bt = random_ids(config, 2, 40)
    expected = half(ids_bt)
    assert (neighbours(ids_bt) - expected).abs().max() < 1e-5 * expected.abs().max()
    for part in ("q_proj.bias", "q_norm.weight"):
        name = f"layers.0.self_attn.{part}"
        neighbours.load_state_dict({**there, name: weights[name]}, strict=False)
        assert (neighbours(ids_bt) - expected).abs().max() > 1e-3 * expected.abs().max()
    back = reorder(there, 64, have="interleaved", want="rotate_half")
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
