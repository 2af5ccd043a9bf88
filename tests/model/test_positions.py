from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.positions import RotaryEmbedding, rope_tables, rotate
from tests.model import reference
from tests.model.conftest import seeded


def neighbours(x_td: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    """The other layout: dimension 2i pairs with 2i + 1."""
    even, odd = x_td[..., 0::2], x_td[..., 1::2]
    return torch.stack((even * cos_td - odd * sin_td, odd * cos_td + even * sin_td), dim=-1).flatten(-2).to(x_td.dtype)


def distance_from_numpy(turn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    x_td = torch.randn(40, 64, dtype=torch.float64, generator=seeded(0))
    turned = turn(x_td, *rope_tables(64, 40, 10000.0))
    return float(np.abs(turned.numpy() - reference.rope(x_td.numpy(), 10000.0)).max())


def test_rotation_against_numpy_and_the_other_layout_is_caught() -> None:
    assert distance_from_numpy(rotate) < 1e-6
    assert distance_from_numpy(neighbours) > 0.1


def test_a_shift_of_both_positions_leaves_the_score() -> None:
    q, k = torch.randn(2, 1, 128, dtype=torch.float64, generator=seeded(0))
    i = torch.arange(64, dtype=torch.float64)

    def turned(x: Tensor, position: int) -> Tensor:
        angle = (position * 10000.0 ** (-i / 64))[None]
        return rotate(x, angle.cos(), angle.sin())

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
    cos_td, sin_td = rotary(0, rotary.seq_len)
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
        rotary(0, 4)


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
        RotaryEmbedding(64, 16, 10000.0)(10, 7)
