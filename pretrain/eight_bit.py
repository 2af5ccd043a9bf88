"""AdamW whose moments of the hidden matrices have 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization").

A block of 256 moments has one fp32 scale, its largest magnitude; each moment is the nearest of 256 levels of that
scale. The levels are dense near 0, over seven decades: "dynamic" quantization, section 2.1 there. The first moment has
signed levels, the second one, never negative, twice as fine ones. Embeddings, the output head and vectors keep the
moments of precision.moments, as the paper has it for embeddings: their gradients differ most from row to row.

The step computes in fp32, as AdamW does, with the moments before they are rounded: the first update is AdamW's. It runs
wherever torch does. The levels are those of bitsandbytes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from pretrain.adamw import PIECE, Group, PiecewiseAdamW, State, direction

BLOCK = 256  # moments to a scale; divides PIECE
DECADES = 7


@functools.cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """(256,) the values that a code stands for, ascending, from −1 or 0 to 1."""
    positive = []
    for decade in range(DECADES):
        # A decade of more exponent bits has fewer bits of fraction: 1, 2, … 64 steps, unsigned twice as many.
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float64)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - DECADES))
    found = torch.cat(positive)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    whole = torch.cat([-found, found, ends] if signed else [found, ends])
    return whole.sort().values.float().to(device)


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(n,) fp32 → codes (n,) uint8 and scales (⌈n / BLOCK⌉,) fp32; a block of zeros stays zeros.

    A second moment above 0 gets a level above 0, if not the nearest: as 0 beside a first moment that is none, it would
    leave eps alone to divide by, and the update could be some hundred learning rates. So it is only too small.
    """
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    table = levels(signed, values.device)
    relative = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(values)]
    codes = torch.bucketize(relative, (table[:-1] + table[1:]) / 2, out_int32=True)
    if not signed:
        codes = codes.maximum(values > 0)
    return codes.to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The values that `quantize` gave codes and scales for, as near as they have them."""
    values = levels(signed, codes.device)[codes.int()]
    return values.mul_(scales.repeat_interleave(BLOCK)[: len(codes)])


def decoded(codes: Tensor, scales: Tensor, here: slice, *, signed: bool) -> Tensor:
    """Some of what `dequantize` gives for a whole partition."""
    blocks = torch.arange(here.start, here.stop, device=codes.device) // BLOCK
    return levels(signed, codes.device)[codes[here].int()].mul_(scales[blocks])


class EightBitAdamW(PiecewiseAdamW):
    """PiecewiseAdamW with 8-bit moments for the groups marked "hidden".

    Moments that come from other partitions (elastic.py) stand in the state in fp32 until the first update.
    """

    def new_moments(self, weights: Tensor, group: Group) -> State:
        if not group.get("hidden"):
            return super().new_moments(weights, group)
        state: State = {}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            zeros = torch.zeros_like(weights, dtype=torch.float32).view(-1)
            state[f"{name}_codes"], state[f"{name}_scales"] = quantize(zeros, signed)
        return state

    def update(self, weights: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        if not group.get("hidden"):
            super().update(weights, gradient, state, group)
            return
        step, lr, decay = int(state["step"]), group["lr"], group["weight_decay"]
        add, size = self.adder(weights.device, state), PIECE[weights.device.type]
        came = [state.pop(name).view(-1) for name in ("exp_avg", "exp_avg_sq") if name in state]
        if came:
            state.update(self.new_moments(weights, group))
        flat, gradient, lost = weights.view(-1), gradient.view(-1), state.get("lost", weights).view(-1)
        for low in range(0, len(flat), size):
            here, blocks = slice(low, low + size), slice(low // BLOCK, (low + size) // BLOCK)
            m_codes, m_scales = state["exp_avg_codes"][here], state["exp_avg_scales"][blocks]
            v_codes, v_scales = state["exp_avg_sq_codes"][here], state["exp_avg_sq_scales"][blocks]
            if came:
                m, v = (moment[here].to(weights.device, copy=True) for moment in came)
            else:
                m, v = dequantize(m_codes, m_scales, True), dequantize(v_codes, v_scales, False)
            update = direction(gradient[here], m, v, step, group["betas"], group["eps"])
            m_codes[:], m_scales[:] = quantize(m, True)
            v_codes[:], v_scales[:] = quantize(v, False)
            add(flat[here], update.add_(flat[here], alpha=decay).mul_(-lr), lost[here])
