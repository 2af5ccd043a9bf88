"""Normalisation: what keeps the residual stream at a scale the next layer can read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang & Sennrich 2019, eq. 4).

    The statistics are fp32 whatever the dtype of x: torch's kernel lifts half precision before it squares, and
    rounds once, at the end. Squares summed in bf16 would keep 8 bits of a sum over thousands of terms.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_btd: Tensor) -> Tensor:
        return F.rms_norm(x_btd, self.weight.shape, self.weight, self.eps)
