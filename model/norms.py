"""Normalisation: what keeps the residual stream at a scale the next layer can read."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang & Sennrich 2019, eq. 4).

    The statistics are fp32 whatever the dtype of x: half precision is lifted before it is squared, and rounded once, at
    the end. Squares summed in bf16 would keep 8 bits of a sum over thousands of terms.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_btd: Tensor) -> Tensor:
        if x_btd.device.type == "cpu" and torch.is_grad_enabled():  # else its calls cost more than they save
            normed_btd: Tensor = _RMSNormOnCPU.apply(x_btd, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return normed_btd
        return F.rms_norm(x_btd, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) · weight + bias, over the last dimension (Ba et al. 2016, eq. 4).

    The variance is that of the numbers at hand, the mean of squared distances. torch's kernels form both statistics in
    fp32 whatever the dtype of x.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x_btd: Tensor) -> Tensor:
        return F.layer_norm(x_btd, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    """The choice that the config names, over the model's width."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.d_model, config.norm_eps)


class _RMSNormOnCPU(torch.autograd.Function):
    """The same in fewer passes over memory: torch has a fused kernel on GPUs, but on CPUs derives some twenty steps.

    Kept for backward are x as it came and one fp32 number a token.
    """

    @staticmethod
    def forward(ctx: Any, x_btd: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        exact_btd = x_btd.to(torch.promote_types(x_btd.dtype, torch.float32))
        norm_bt1 = torch.linalg.vector_norm(exact_btd, dim=-1, keepdim=True)
        scale_bt1 = norm_bt1.square_().div_(x_btd.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_btd, weight_d, scale_bt1)
        return exact_btd.mul(scale_bt1).mul_(weight_d).to(x_btd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_btd: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x · scale and g = grad · weight: the gradient of x is (g - n · mean(g · n)) · scale."""
        x_btd, weight_d, scale_bt1 = ctx.saved_tensors
        grad_exact_btd = grad_btd.to(scale_bt1.dtype)
        normed_btd = x_btd.to(scale_bt1.dtype).mul(scale_bt1)
        product_nd = (grad_exact_btd * normed_btd).flatten(0, -2)
        mean_bt1 = (product_nd @ weight_d.to(scale_bt1.dtype)).view_as(scale_bt1) / x_btd.shape[-1]
        grad_weight_d = product_nd.sum(0).to(weight_d.dtype)
        del product_nd  # as large as x in fp32; so is what follows
        grad_x_btd = (grad_exact_btd * weight_d).sub_(normed_btd.mul_(mean_bt1)).mul_(scale_bt1)
        return grad_x_btd.to(x_btd.dtype), grad_weight_d, None
