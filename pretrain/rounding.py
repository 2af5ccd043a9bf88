"""How an update that was computed in fp32 enters weights of 8 bits of mantissa (bf16).

Rounded to the nearest, a weight loses every update below 1/512 of its power of two, always to the same side: at low
learning rates most weights stand still, and weight decay does nothing at all. Two ways not to lose them:

Kahan    (Kahan 1965; for training: Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4.2) a second bf16
         number beside each weight holds what rounding cut off, and goes in with the next update: 16 bits together.
         It is rounded stochastically: to the nearest, it would itself lose updates below 2^-17 of the weight.
Stochastic  (same paper, section 4.1) rounds away from zero as often as the part cut off is large: right on average,
         without a second number.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


def add_nearest(weights: Tensor, update: Tensor) -> None:
    """weights += update, in place, any shape; `update` in fp32."""
    weights.copy_(update.add(weights))


def add_kahan(weights: Tensor, update: Tensor, lost: Tensor, generator: torch.Generator) -> None:
    """weights += update + lost, in place; `lost` becomes what rounding cuts off. `update` in fp32, the rest bf16."""
    update = update.add(lost)
    before = weights.float()
    weights.copy_(before + update)
    lost.copy_(_stochastic(update.sub_(weights.float().sub_(before)), generator))


def add_stochastic(weights: Tensor, update: Tensor, generator: torch.Generator) -> None:
    """weights += update, in place, each sum rounded to one of its two bf16 neighbours; `update` in fp32."""
    weights.copy_(_stochastic(update.add(weights), generator))


def _stochastic(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 → each number's bf16 neighbour above or below, in fp32. What bf16 holds stays, as does NaN.

    bf16 is the upper half of an fp32 number: a random number below 2^16 added to the lower half carries into the upper
    one with probability (lower half) / 2^16. In a NaN it could carry into the sign, and leave a 0.
    """
    chance = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = chance.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(values.isnan(), values, bits.view(torch.float32))


def generator_of(device: torch.device, *key: int) -> torch.Generator:
    """Random numbers that depend on the integers of `key` alone: no state to keep, none to bring back on resume."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(digest, "little"))
    return generator
