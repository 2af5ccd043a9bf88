"""What each rank will hold, before anything is started: by arithmetic, part by part, each part naming its formula.

Parts follow from what DeepSpeed 0.19's engines allocate (zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py,
fp16/unfused_optimizer.py) and from what a pass through the model holds (model/activations.py). A moment of a run is
several scenes, one of which holds most: the loss, the first or the last block's backward, the reduction of gradients,
the gradient's cast inside the step. The budget has the parts of the largest scene of each moment.

benchmarks/memory.py and tests/pretrain/test_memory.py hold the sums against live engines; docs/memory.md says where
each formula comes from. LEGEND names the symbols; those of the model's own parts are in activations.LEGEND. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from model import activations
from model.scenes import Pass
from pretrain.config import Compute, RecipeError, RunConfig
from pretrain.engine_memory import Engine
from pretrain.memory_parts import MOMENTS, PLACES, Budget, Device, Moment, Part, Place, Scene
from pretrain.memory_sizes import BYTES, RankSizes
from pretrain.partitioned_memory import engine_of
from pretrain.resolve import refusal, zero_stage

__all__ = ["BYTES", "LEGEND", "MOMENTS", "Budget", "Part", "budget"]

LEGEND = {
    "P": "parameters",
    "N": "ranks",
    "p": "parameters of a rank's partition, filled up to what the engine aligns: P/N and a little",
    "Q": "parameters filled up so that N ranks have equal partitions",
    "s": "parameters that have an element in a rank's partition, each counted whole",
    "l": "parameters of the largest tensor, or of a rank's part of it",
    "u": "parameters that are updated at once: the largest group's part of a partition",
    "g": "parameters that have their gradient of this micro-batch by the largest moment of its backward",
    "B": "elements of a bucket: reduce_bucket_size",
    "G": "parameters that ZeRO-3 has gathered, by its reuse distance, prefetch bucket and largest number alive",
    "K": "parameters that are whole on every rank: those up to stage3_param_persistence_threshold",
}


def budget(
    config: RunConfig, deepspeed: Mapping[str, Any], world_size: int, *, compute: Compute, device: Device
) -> Budget:
    """What one of `world_size` ranks holds of `config` under the resolved DeepSpeed JSON (`resolve.resolve`).

    Where ranks differ it is the largest one's. RecipeError, with the reason, where the engine cannot hold the
    combination (`engine.refusal`), since there is then nothing to count.
    """
    precision = config.precision
    reason = refusal(zero_stage(deepspeed), compute, precision.master, precision.accumulate)
    if reason is not None:
        raise RecipeError(reason)
    engine = engine_of(RankSizes.of(config, deepspeed, world_size, compute, device))
    later = engine.f.later
    buffers = [_of_model(one, True) for one in activations.buffers(config.model)]
    grown = [_of_model(one, True) for one in activations.later_buffers(config.model)]
    held = [*grown, *engine.held(), *engine.copied()]
    resting = [*buffers, *held, *engine.resting()]
    merged: dict[Part, list[Moment]] = {part: [] for part in resting}
    running = _scenes(engine, config, world_size, compute, device, later)
    moments = [(moment, [[*buffers, *held, *scene] for scene in scenes]) for moment, scenes in running]
    for moment, scenes in [("start", [[*buffers, *scene] for scene in engine.starting()]), *moments]:
        for place in PLACES:
            for part in max(scenes, key=lambda scene: _bytes_in(scene, place)):
                if part.place == place:
                    known = part if part in resting else replace(part, static=False, state=False)
                    merged.setdefault(known, []).append(moment)
    return Budget(tuple(replace(part, moments=tuple(moments)) for part, moments in merged.items() if part.bytes))


def _bytes_in(scene: Scene, place: Place) -> int:
    return sum(part.bytes for part in scene if part.place == place)


def _scenes(
    engine: Engine, config: RunConfig, world_size: int, compute: Compute, device: Device, later: bool
) -> Iterator[tuple[Moment, list[Scene]]]:
    """What is held at the telling points of each moment, beside what always is."""
    work = Pass(
        micro_batch_size=config.batch.micro_batch_size,
        seq_len=config.model.seq_len,
        compute_bytes=BYTES[compute],
        checkpointing=config.memory.activation_checkpointing,
        loss_chunk_tokens=config.memory.loss_chunk_tokens,
        device=device,
        documents=config.data.packing != "concat",
    )
    gathered, gathered_backward = engine.gathered(), engine.gathered(backward=True)
    earlier = engine.between_micro_steps() if later else []

    def of(moments: Iterable[activations.Moment], beside: Scene) -> list[Scene]:
        return [[*beside, *map(_of_model, moment.held)] for moment in moments]

    yield "forward", of(activations.forward(config.model, work), [*earlier, *gathered])
    backward = list(engine.reducing(later))
    for moment in activations.backward(config.model, work, passing=engine.f.bucket):
        backward += of([moment], [*engine.growing(moment.gradients, later), *gathered_backward])
    yield "backward", backward
    yield "step", list(engine.stepping())
    yield "evaluation", [*of(activations.evaluation(config.model, work), gathered), [*gathered, *engine.gathering()]]
    yield "saving", [engine.saving()]


def _of_model(held: activations.Held, static: bool = False) -> Part:
    return Part(held.name, held.bytes, held.formula, static=static)
