from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.positions import Places, RotaryEmbedding, one_text, reorder, rope_tables, rotate
from model.transformer import Transformer
from tests.model import reference
from tests.model.conftest import lively, random_ids, seeded


def distance_from_numpy(layout: str) -> float:
    x_td = torch.randn(40, 64, dtype=torch.float64, generator=seeded(0))
    turned = rotate(x_td, *rope_tables(64, 40, 10000.0), layout)
    return float(np.abs(turned.numpy() - reference.rope(x_td.numpy(), 10000.0)).max())


def test_rotation_against_numpy_and_the_other_layout_is_caught() -> None:
    assert distance_from_numpy("rotate_half") < 1e-6
    assert distance_from_numpy("interleaved") > 0.1


def test_the_interleaved_layout_turns_neighbours() -> None:
    """Pair i as the complex number x[2i] + j x[2i + 1], turned by position · base^(-2i/head_dim) (RoFormer, eq. 34)."""
    x_td = torch.randn(40, 64, dtype=torch.float64, generator=seeded(0))
    turned = rotate(x_td, *rope_tables(64, 40, 10000.0), "interleaved").numpy()
    angle = np.arange(40)[:, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    z = (x_td[:, 0::2].numpy() + 1j * x_td[:, 1::2].numpy()) * np.exp(1j * angle)
    assert np.abs(turned[:, 0::2] - z.real).max() < 1e-6
    assert np.abs(turned[:, 1::2] - z.imag).max() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("have, want", [("rotate_half", "interleaved"), ("interleaved", "rotate_half")])
def test_reordered_weights_give_the_same_logits_under_the_other_layout(
    have: str, want: str, tiny_config: ModelConfig
) -> None:
    model, other = (lively(Transformer(replace(tiny_config, rope_layout=layout))).eval() for layout in (have, want))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids_bt = random_ids(tiny_config, 2, 40)
    expected = model(ids_bt)
    assert float((other(ids_bt) - expected).abs().max()) > 0.1  # read across without a word: nonsense
    there = reorder(weights, 64, have=have, want=want)
    other.load_state_dict(there, strict=False)
    assert float((other(ids_bt) - expected).abs().max()) < 1e-5
    changed = {name for name, weight in there.items() if not torch.equal(weight, weights[name])}
    assert changed == {f"layers.{layer}.self_attn.{name}_proj.weight" for layer in range(3) for name in "qk"}
    back = reorder(there, 64, have=want, want=have)
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("layout", ["rotate_half", "interleaved"])
def test_a_shift_of_both_positions_leaves_the_score(layout: str) -> None:
    q, k = torch.randn(2, 1, 128, dtype=torch.float64, generator=seeded(0))
    i = torch.arange(64, dtype=torch.float64)

    def turned(x: Tensor, position: int) -> Tensor:
        angle = (position * 10000.0 ** (-i / 64))[None]
        return rotate(x, angle.cos(), angle.sin(), layout)

    scores = [float(turned(q, 5 + shift) @ turned(k, shift).T) for shift in (0, 1, 17, 300, 2000, 100_000)]
    assert max(scores) - min(scores) < 1e-10
    assert abs(float(turned(q, 6) @ turned(k, 0).T) - scores[0]) > 1e-3


def test_wavelengths() -> None:
    for head_dim, slowest in ((64, 47_117), (128, 54_410)):
        _, sin_td = rope_tables(head_dim, 2, 10000.0)
        wavelength_d = 2 * np.pi / np.arcsin(sin_td[1].double().numpy())
        assert wavelength_d[0] == pytest.approx(2 * np.pi, rel=1e-6)
        assert wavelength_d[-1] == pytest.approx(slowest, abs=1)


def assert_exact(rotary: RotaryEmbedding) -> None:
    """The tables equal float64 angles to fp32's last place at every position, and are what forward gives out."""
    position = np.arange(rotary.seq_len)[:, None]
    angle = position * 10000.0 ** (-np.arange(0, rotary.head_dim, 2) / rotary.head_dim)
    cos_td, sin_td = rotary.rotation(one_text(rotary.seq_len))
    assert cos_td.dtype == sin_td.dtype == torch.float32
    assert np.abs(cos_td.double().numpy() - np.cos(angle)).max() < 6e-8
    assert np.abs(sin_td.double().numpy() - np.sin(angle)).max() < 6e-8


def parent_of(rotary: RotaryEmbedding) -> nn.Module:
    return nn.ModuleDict({"linear": nn.Linear(4, 4), "rotary": rotary})


@pytest.mark.parametrize(
    "cast",
    [nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda module: module.to("cpu", torch.bfloat16)],
    ids=["bfloat16", "half", "double", "to"],
)
def test_tables_stay_exact_through_casts(cast: Callable[[nn.Module], nn.Module]) -> None:
    rotary = RotaryEmbedding(64, 2048, 10000.0)
    parent = parent_of(rotary)
    cast(cast(parent))
    assert parent["linear"].weight.dtype != torch.float32
    assert_exact(rotary)


def test_tables_are_exact_after_the_meta_device() -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(128, 2048, 10000.0)
    assert rotary.cos_td.is_meta
    rotary.bfloat16()
    rotary.to_empty(device="cpu")
    assert_exact(rotary)


def test_tables_are_exact_where_new_tensors_are_made_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3's construction context wraps torch's constructors so that floating tensors come out in half precision."""
    for name in ("arange", "tensor", "empty", "zeros", "ones", "full"):
        original = getattr(torch, name)

        def halved(*args: object, _original: Callable[..., Tensor] = original, **kwargs: object) -> Tensor:
            tensor = _original(*args, **kwargs)
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, halved)
    rotary = RotaryEmbedding(64, 512, 10000.0)
    monkeypatch.undo()
    assert_exact(rotary)


def test_a_cast_behind_the_modules_back_is_refused() -> None:
    rotary = RotaryEmbedding(64, 16, 10000.0)
    rotary.cos_td.data = rotary.cos_td.data.bfloat16()
    with pytest.raises(RuntimeError, match="bfloat16"):
        rotary.rotation(one_text(4))


def test_tables_are_not_saved(tmp_path: Path) -> None:
    assert RotaryEmbedding(64, 16, 10000.0).state_dict() == {}


def test_half_precision_is_rotated_in_fp32() -> None:
    x_td = torch.randn(1, 64, generator=seeded(0)).bfloat16()
    cos_td, sin_td = (table[2047:] for table in rope_tables(64, 2048, 10000.0))
    turned = rotate(x_td, cos_td, sin_td)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x_td.float(), cos_td, sin_td).bfloat16())


def test_positions_past_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="position 16 is past the model's seq_len = 16"):
        RotaryEmbedding(64, 16, 10000.0).rotation(Places(10, 17))


@pytest.mark.parametrize("layout", ["rotate_half", "interleaved"])
def test_gradients_are_those_of_a_rotation(layout: str) -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    cos_td, sin_td = (table.double() for table in rope_tables(8, 5, 100.0))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_td, sin_td, layout), (x,))
