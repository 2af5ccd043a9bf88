"""The feed-forward half of a block: each token on its own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig

# GELU in the form of GPT-2's weights, x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Hendrycks & Gimpel 2016,
# section 2): within 5e-4 of x · Φ(x) everywhere, and not the same.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): three matrices (Shazeer 2020, eq. 6).

    The gate decides, dimension by dimension, how much of `up` passes; at equal parameters it beats the two-matrix
    form with ReLU or GELU.
    """

    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        out_btd: Tensor = self.down_proj(_gated(self.gate_proj(x_btd), self.up_proj(x_btd)))
        return out_btd


def _gated(gate_btf: Tensor, up_btf: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # a Function of our own takes longer to call than a single token to compute
        return F.silu(gate_btf).mul_(up_btf)
    product_btf: Tensor = _Gated.apply(gate_btf, up_btf)  # type: ignore[no-untyped-call]
    return product_btf


class _Gated(torch.autograd.Function):
    """silu(gate) · up, of which backward keeps the two factors: silu(gate) as well would be a third tensor as large."""

    @staticmethod
    def forward(ctx: Any, gate_btf: Tensor, up_btf: Tensor) -> Tensor:
        ctx.save_for_backward(gate_btf, up_btf)
        return F.silu(gate_btf).mul_(up_btf)

    @staticmethod
    def backward(ctx: Any, grad_btf: Tensor) -> tuple[Tensor, Tensor]:
        gate_btf, up_btf = ctx.saved_tensors
        grad_gate_btf: Tensor = torch.ops.aten.silu_backward(grad_btf * up_btf, gate_btf)
        return grad_gate_btf, F.silu(gate_btf).mul_(grad_btf)


class FeedForward(nn.Module):
    """down(activation(up(x))): two matrices (Vaswani et al. 2017, eq. 2, with ReLU)."""

    def __init__(self, d_model: int, d_ff: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_btd: Tensor) -> Tensor:
        out_btd: Tensor = self.down_proj(self.activation(self.up_proj(x_btd)))
        return out_btd


def build_feedforward(config: ModelConfig) -> nn.Module:
    """The choice that the config names."""
    if config.ffn == "swiglu":
        return SwiGLU(config.d_model, config.d_ff, config.bias)
    return FeedForward(config.d_model, config.d_ff, config.bias, config.ffn)
