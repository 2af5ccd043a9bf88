"""What each rank will hold for certain, before anything is started: the static memory of the DeepSpeed engine.

Bytes as measured on live engines (DeepSpeed 0.19, torch 2.13, AdamW), P parameters, N ranks, bf16 compute:

    stage   weights   gradients              when accumulated in fp32           masters, moments
    0       2P        2P                     (refused)                          4P, 8P
    1       2P        2P                     2P, and a whole buffer 4P beside   4P/N, 8P/N
    2       2P        2P/N                   4P/N instead                       4P/N, 8P/N
    3       2P/N      2P/N                   4P/N instead                       4P/N, 8P/N

With bf16 masters the last column is 2P/N, 4P/N. fp16 compute holds the same, but ZeRO-0 is refused, and ZeRO-1 that
accumulates in fp32 lets go of its fp16 gradients: 4P instead, no buffer beside. With fp32 compute, weights and
gradients take 4 bytes; ZeRO-0 updates the weights themselves, ZeRO-1 to 3 keep a clone of their partition as masters.

Not counted here: activations, logits and the gradient of the head (4 · vocab_size · d_model) that the loss forms beside
them, ZeRO-3's gathered layers, communication buckets, the fp32 copy of a gradient partition that `step()` makes for a
moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import Compute, RecipeError
from pretrain.engine import refusal

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Part:
    """One kind of tensor a rank holds: its size in bytes, and the formula it comes from."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Budget:
    """The static memory of one rank, part by part: weights, gradients, accumulation buffer, masters, moments."""

    stage: int
    world_size: int
    parameters: int
    parts: tuple[Part, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def bytes_per_parameter(self) -> float:
        return self.total_bytes / self.parameters


def static_budget(
    parameters: int, stage: int, world_size: int, master: str, accumulate: str, compute: Compute = "bf16"
) -> Budget:
    """The static bytes each rank holds under ZeRO `stage` on `world_size` ranks.

    A partition is the largest rank's: parameters / ranks, rounded up. RecipeError, with the reason, where the engine
    cannot hold the combination (`engine.refusal`), since there is then nothing to count.
    """
    reason = refusal(stage, compute, master, accumulate)
    if reason is not None:
        raise RecipeError(reason)

    weight, state = BYTES[compute], BYTES[master]
    # The ZeRO-1 engine of bf16 keeps its gradients and sums them in a second buffer; the others keep only the sums.
    beside = stage == 1 and compute == "bf16" and accumulate == "fp32"
    gradient = weight if beside else BYTES[accumulate]
    updates_weights_in_place = compute == "fp32" and stage == 0

    def part(name: str, bytes_each: int, partitioned: bool) -> Part:
        held = -(-parameters // world_size) if partitioned else parameters
        if not bytes_each:
            return Part(name, 0, "0")
        return Part(name, bytes_each * held, f"{bytes_each}P/{world_size}" if partitioned else f"{bytes_each}P")

    return Budget(
        stage,
        world_size,
        parameters,
        (
            part("weights", weight, stage == 3),
            part("gradients", gradient, stage >= 2),
            part("accumulation buffer", BYTES[accumulate] if beside else 0, False),
            part("masters", 0 if updates_weights_in_place else state, stage >= 1),
            part("moments", 2 * state, stage >= 1),
        ),
    )
