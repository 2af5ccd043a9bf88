"""What each rank will hold, before anything is started: by arithmetic, part by part, each part naming its formula.

No torch here: planning is quick, and the sums are held against live engines (tests/pretrain/test_memory.py,
benchmarks/memory.py; docs/memory.md says where each formula comes from).

Static memory as measured on live engines (DeepSpeed 0.19, torch 2.13, AdamW), P parameters, N ranks, bf16 compute:

    stage   weights   gradients              when accumulated in fp32           masters, moments
    0       2P        2P                     (refused)                          4P, 8P
    1       2P        2P                     2P, and a whole buffer 4P beside   4P/N, 8P/N
    2       2P        2P/N                   4P/N instead                       4P/N, 8P/N
    3       2P/N      2P/N                   4P/N instead                       4P/N, 8P/N

With bf16 masters the last column is 2P/N, 4P/N. fp16 compute holds the same, but ZeRO-0 is refused, and ZeRO-1 that
accumulates in fp32 lets go of its fp16 gradients: 4P instead, no buffer beside. With fp32 compute, weights and
gradients take 4 bytes; ZeRO-0 updates the weights themselves, ZeRO-1 to 3 keep a clone of their partition as masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model.accounting import parameter_count
from pretrain.batching import BatchPlan
from pretrain.config import Compute, RecipeError, RunConfig
from pretrain.engine import refusal, zero_stage

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

Moment = Literal["forward", "backward", "step", "evaluation", "saving"]
Place = Literal["device", "host"]
Device = Literal["cpu", "cuda"]
MOMENTS: tuple[Moment, ...] = ("forward", "backward", "step", "evaluation", "saving")


@dataclass(frozen=True)
class Part:
    """One kind of tensor a rank holds: its size in bytes, the formula it comes from, where and when it lives.

    `static` says that it belongs to the training state: it is there once in every optimizer step, however large a
    micro-batch is. What is not static grows with the micro-batch or lives inside one operation.
    """

    name: str
    bytes: int
    formula: str
    place: Place = "device"
    moments: tuple[Moment, ...] = MOMENTS
    static: bool = False


@dataclass(frozen=True)
class Budget:
    """The memory of one rank, part by part."""

    parts: tuple[Part, ...]

    def parts_at(self, moment: Moment, place: Place = "device") -> tuple[Part, ...]:
        """The parts that live in `moment`."""
        return tuple(part for part in self.parts if part.place == place and moment in part.moments)

    def at(self, moment: Moment, place: Place = "device") -> int:
        """The most bytes held at one time in `moment`."""
        return sum(part.bytes for part in self.parts_at(moment, place))

    def peak_bytes(self, place: Place = "device") -> int:
        """The most bytes held at one time in a whole run."""
        return max(self.at(moment, place) for moment in MOMENTS)

    @property
    def peak_moment(self) -> Moment:
        """When the device holds most."""
        return max(MOMENTS, key=self.at)

    @property
    def static_bytes(self) -> int:
        """Of the device: weights, gradients, masters, moments and what else the training state is."""
        return sum(part.bytes for part in self.parts if part.static and part.place == "device")


def budget(
    config: RunConfig, deepspeed: Mapping[str, Any], world_size: int, *, compute: Compute, device: Device
) -> Budget:
    """What one of `world_size` ranks holds of `config` under the resolved DeepSpeed JSON (`engine.resolve`).

    A partition is the largest rank's. RecipeError, with the reason, where the engine cannot hold the combination
    (`engine.refusal`), since there is then nothing to count.
    """
    stage, precision = zero_stage(deepspeed), config.precision
    reason = refusal(stage, compute, precision.master, precision.accumulate)
    if reason is not None:
        raise RecipeError(reason)
    batch = BatchPlan.from_config(config, world_size)
    parameters = parameter_count(config.model)
    parts = [
        *_training_state(config, stage, parameters, world_size, compute),
        *_buckets(deepspeed["zero_optimization"], stage, parameters, compute),
        *_step(config, stage, parameters, world_size),
        *_activations(config, batch, compute),
        *_saving(parameters, compute, device),
    ]
    return Budget(tuple(part for part in parts if part.bytes))


def _training_state(
    config: RunConfig, stage: int, parameters: int, world_size: int, compute: Compute
) -> Iterator[Part]:
    precision = config.precision
    weight, master, moment = BYTES[compute], BYTES[precision.master], BYTES[precision.moments_dtype]
    # The ZeRO-1 engine of bf16 keeps its gradients and sums them in a second buffer; the others keep only the sums.
    beside = stage == 1 and compute == "bf16" and precision.accumulate == "fp32"
    gradient = weight if beside else BYTES[precision.accumulate]
    in_place = compute == "fp32" and stage == 0
    sums: tuple[Moment, ...] = ("forward", "backward", "step") if config.batch.micro_batch_size else ()

    def part(name: str, bytes_each: int, partitioned: bool, moments: tuple[Moment, ...] = MOMENTS) -> Part:
        held = -(-parameters // world_size) if partitioned else parameters
        formula = f"{bytes_each}P/{world_size}" if partitioned else f"{bytes_each}P"
        return Part(name, bytes_each * held, formula, moments=moments, static=True)

    yield part("weights", weight, stage == 3)
    yield part("gradients", gradient, stage >= 2, sums)
    yield part("accumulation buffer", BYTES[precision.accumulate] if beside else 0, False)
    yield part("masters", 0 if in_place else master, stage >= 1)
    yield part("moments", 2 * moment, stage >= 1)
    yield part("compensation", master if precision.compensation == "kahan" else 0, stage >= 1)


def _buckets(zero: Mapping[str, Any], stage: int, parameters: int, compute: Compute) -> Iterator[Part]:
    if stage >= 1:
        elements = int(zero.get("reduce_bucket_size", 500_000_000))
        count = 2 if stage == 2 and zero.get("overlap_comm", False) else 1
        yield Part(
            "reduce bucket", count * elements * BYTES[compute], f"{count} × {elements} × {BYTES[compute]}",
            moments=("backward",),
        )  # fmt: skip
    if stage == 3:
        live = min(int(zero.get("stage3_max_live_parameters", 10**9)), parameters)
        yield Part(
            "gathered layers", live * BYTES[compute], f"min(stage3_max_live_parameters, P) × {BYTES[compute]}",
            moments=("forward", "backward", "evaluation"),
        )  # fmt: skip


def _step(config: RunConfig, stage: int, parameters: int, world_size: int) -> Iterator[Part]:
    held = -(-parameters // world_size) if stage >= 1 else parameters
    if config.precision.accumulate != config.precision.master:
        each = BYTES[config.precision.master]
        yield Part("gradients cast for the optimizer", held * each, f"{each}P/N", moments=("step",))


def _activations(config: RunConfig, batch: BatchPlan, compute: Compute) -> Iterator[Part]:
    model, tokens = config.model, batch.tokens_per_micro_step
    each = BYTES[compute]
    heads = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    block = tokens * (6 * model.d_model + heads + 4 * model.d_ff) * each
    kept = block if config.memory.activation_checkpointing == "none" else tokens * model.d_model * each
    chunk = min(config.memory.loss_chunk_tokens, tokens) * model.vocab_size * 10
    yield Part("activations", model.n_layers * kept + block, "blocks", moments=("forward", "backward"))
    yield Part("loss", chunk + 4 * model.vocab_size * model.d_model, "10 chunk V + 4 V d", moments=("forward",))
    yield Part("evaluation", 2 * block + chunk, "2 blocks + 10 chunk V", moments=("evaluation",))


def _saving(parameters: int, compute: Compute, device: Device) -> Iterator[Part]:
    place: Place = "host" if device == "cuda" else "device"
    yield Part("copy of the weights", parameters * BYTES[compute], f"{BYTES[compute]}P", place, ("saving",))


# ---------------------------------------------------------------- what `plan` shows of the training state


@dataclass(frozen=True)
class StaticBudget:
    """The training state of one rank, part by part: weights, gradients, accumulation buffer, masters, moments."""

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
) -> StaticBudget:
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

    return StaticBudget(
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
