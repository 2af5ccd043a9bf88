import numpy as np
import pytest
import torch

from model.feedforward import SwiGLU
from tests.model import reference
from tests.model.conftest import seeded


def test_against_numpy() -> None:
    swiglu = SwiGLU(24, 56).double()
    x = torch.randn(9, 24, dtype=torch.float64, generator=seeded(0))
    weights = [layer.weight.detach().numpy() for layer in (swiglu.gate_proj, swiglu.up_proj, swiglu.down_proj)]
    np.testing.assert_allclose(swiglu(x).detach().numpy(), reference.swiglu(x.numpy(), *weights), atol=1e-13)


def test_the_gate_by_hand() -> None:
    swiglu = SwiGLU(1, 1)
    with torch.no_grad():
        for layer, value in ((swiglu.gate_proj, 2.0), (swiglu.up_proj, 3.0), (swiglu.down_proj, 0.5)):
            layer.weight.fill_(value)
    assert swiglu(torch.ones(1, 1)).item() == pytest.approx(0.5 * 3 * 2 / (1 + np.exp(-2)))


def test_gradients_are_those_of_the_formula() -> None:
    swiglu = SwiGLU(3, 5).double()
    x = torch.randn(2, 3, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: swiglu(x), (x, *swiglu.parameters()))


def test_backward_keeps_the_gate_and_what_it_lets_pass_but_not_silu() -> None:
    swiglu, kept = SwiGLU(8, 100), []
    x = torch.randn(4, 8, generator=seeded(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(x)
    wide = [tensor for tensor in kept if tensor.shape == (4, 100)]
    assert len(wide) == 3  # gate, up, and the input of the last matrix
