from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from model.norms import RMSNorm
from tests.model import reference
from tests.model.conftest import seeded


def plain(x: list[float]) -> Tensor:
    return RMSNorm(len(x), eps=1e-12)(torch.tensor(x))


def test_by_hand() -> None:
    assert plain([1.0, 3.0, 5.0, 7.0]).tolist() == pytest.approx([v / 4.5826 for v in (1, 3, 5, 7)], abs=1e-4)
    assert plain([3.0, 4.0]).tolist() == pytest.approx([0.8485, 1.1314], abs=1e-4)
    assert plain([2.0, -2.0, 2.0, -2.0]).tolist() == pytest.approx([1, -1, 1, -1], abs=1e-6)


@pytest.mark.parametrize("factor", [1e-3, -1.0, 250.0])
def test_scale_invariance(factor: float) -> None:
    x = torch.randn(4, 32, generator=seeded(0))
    norm = RMSNorm(32, eps=1e-12)
    torch.testing.assert_close(norm(factor * x), np.sign(factor) * norm(x), rtol=1e-5, atol=1e-5)


def test_against_numpy() -> None:
    norm = RMSNorm(48, eps=1e-3).double()
    x = torch.randn(5, 48, dtype=torch.float64, generator=seeded(0)) * 0.03
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=seeded(1))
    expected = reference.rms_norm(x.numpy(), norm.weight.detach().numpy(), 1e-3)
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-12)


def rounding_errors(forward: Callable[[RMSNorm, Tensor], Tensor]) -> float:
    """The largest error of a bf16 norm in units of the last place, its weights and inputs being exact in bf16."""
    norm = RMSNorm(1536, eps=1e-5).bfloat16()
    x = (torch.randn(16, 1536, generator=seeded(0)) * 50).bfloat16()
    exact = reference.rms_norm(x.double().numpy(), np.ones(1536), 1e-5)
    error = np.abs(forward(norm, x).detach().double().numpy() - exact)
    return float((error / np.exp2(np.floor(np.log2(np.abs(exact) + 1e-30)) - 7)).max())


def statistics_in_bf16(norm: RMSNorm, x: Tensor) -> Tensor:
    mean = torch.zeros_like(x[..., :1])
    for column in range(x.shape[-1]):
        mean = mean + x[..., column : column + 1] ** 2 / x.shape[-1]
    return x * torch.rsqrt(mean + norm.eps) * norm.weight


def test_statistics_are_fp32_also_after_a_cast_to_bf16() -> None:
    assert rounding_errors(RMSNorm.forward) <= 0.51
    assert rounding_errors(statistics_in_bf16) > 2


def test_gradients_are_those_of_the_formula() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    weight = torch.rand(8, dtype=torch.float64, generator=seeded(1)).requires_grad_()

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        norm = RMSNorm(8, eps=1e-3)
        del norm.weight
        norm.weight = weight  # type: ignore[assignment]
        return norm(x)

    assert torch.autograd.gradcheck(normed, (x, weight))


def test_gradients_in_bf16_are_rounded_once() -> None:
    """Half a unit of bf16's last place, of fp32 gradients of the same numbers."""
    norm = RMSNorm(512, eps=1e-5).bfloat16()
    x = torch.randn(64, 512, generator=seeded(0)).bfloat16().requires_grad_()
    upstream = torch.randn(64, 512, generator=seeded(1)).bfloat16()
    exact, exact_x = RMSNorm(512, eps=1e-5), x.detach().float().requires_grad_()
    for half, full in zip(
        torch.autograd.grad(norm(x), (x, norm.weight), upstream),
        torch.autograd.grad(exact(exact_x), (exact_x, exact.weight), upstream.float()),
        strict=True,
    ):
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), full, rtol=2**-8, atol=1e-6)
