"""What each rank will hold, before anything is started: by arithmetic, part by part, each part naming its formula.

Parts follow from what DeepSpeed 0.19's engines allocate (zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py,
fp16/unfused_optimizer.py) and from what a pass through the model holds (model/activations.py). A moment of a run is
several scenes, one of which holds most: the loss, the first or the last block's backward, the reduction of gradients,
the gradient's cast inside the step. The budget has the parts of the largest scene of each moment.

benchmarks/memory.py and tests/pretrain/test_memory.py hold the sums against live engines; docs/memory.md says where
each formula comes from. LEGEND names the symbols; those of the model's own parts are in activations.LEGEND. No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from model import activations
from model.accounting import EMBEDDINGS, is_matrix, parameter_shapes
from model.block_activations import Pass
from model.config import ModelConfig
from pretrain.batching import BatchPlan
from pretrain.config import Compute, RecipeError, RunConfig
from pretrain.resolve import is_torchs, refusal, zero_stage

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

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

Moment = Literal["start", "forward", "backward", "step", "evaluation", "saving"]
Place = Literal["device", "host"]
Device = Literal["cpu", "cuda"]
PLACES: tuple[Place, ...] = ("device", "host")
MOMENTS: tuple[Moment, ...] = ("start", "forward", "backward", "step", "evaluation", "saving")

# DeepSpeed's own, where the JSON is silent.
DEFAULT_BUCKET = 500_000_000
WHOLE_BUCKET = 500_000_000  # engine.py: MEMORY_OPT_ALLREDUCE_SIZE, which no key sets
DEFAULT_PERSISTENCE, DEFAULT_PREFETCH, DEFAULT_LIVE, DEFAULT_SUB_GROUP = 100_000, 50_000_000, 10**9, 10**9
ALIGNMENT = 2  # elements a rank, of a flat group (nccl_start_alignment_factor)
# pretrain/adamw.py: elements updated at once where torch's fused kernel does not, and bytes it takes for each.
PIECE = {"cpu": 2**16, "cuda": 2**24}
PIECE_BYTES = 24
QUANTIZED_BLOCK = 256  # pretrain/eight_bit.py: moments of 8 bits that share an fp32 scale


@dataclass(frozen=True)
class Part:
    """One kind of tensor a rank holds: its size in bytes, the formula it comes from, where and when it lives.

    `static`: held between the engine's calls, however large a micro-batch is. `state`: of that the training state, so
    weights, gradients and their sums, masters, moments and compensation; the rest are buckets and buffers.
    """

    name: str
    bytes: int
    formula: str
    place: Place = "device"
    moments: tuple[Moment, ...] = MOMENTS
    static: bool = False
    state: bool = False

    @property
    def lives(self) -> str:
        """When, for people."""
        if set(self.moments) == set(MOMENTS):
            return "always"
        return "after start" if set(self.moments) == set(MOMENTS[1:]) else ", ".join(self.moments)


@dataclass(frozen=True)
class Budget:
    """The memory of one rank, part by part."""

    parts: tuple[Part, ...]

    def parts_at(self, moment: Moment, place: Place = "device") -> tuple[Part, ...]:
        """The parts that live in the largest scene of `moment`."""
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
        """Of the device: the training state and what else is held between the engine's calls."""
        return sum(part.bytes for part in self.parts if part.static and part.place == "device")

    @property
    def state_bytes(self) -> int:
        """Of the device: the training state alone."""
        return sum(part.bytes for part in self.parts if part.state and part.place == "device")


Scene = Sequence[Part]


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
    engine = _engine(_Facts.of(config, deepspeed, world_size, compute, device))
    later = engine.f.later
    buffers = [_of_model(one, True) for one in activations.buffers(config.model)]
    held = [*engine.held(), *engine.copied()]
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
    engine: _Engine, config: RunConfig, world_size: int, compute: Compute, device: Device, later: bool
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


# ---------------------------------------------------------------- what all engines count with


@dataclass(frozen=True)
class _Facts:
    """Sizes and settings of one rank, bytes of the dtypes: weight, master, moment, accumulated and communicated."""

    stage: int
    compute: Compute
    ranks: int
    groups: tuple[tuple[int, ...], ...]  # elements of the parameters of each of the optimizer's groups
    hidden: bool  # the first group has another optimizer's states
    zero: Mapping[str, Any]
    optimizer: str
    fused: bool
    compensated: bool
    largest_matrix: tuple[int, ...]  # of those that Muon orthogonalizes
    block: int  # elements of a block's matrices
    embedding: int
    tied: bool
    runs_again: bool
    weight: int
    master: int
    moment: int
    summed: int
    sent: int
    later: bool  # an update, in any part of the batch ramp, has several micro-steps
    asynchronous: bool  # checkpoints are written from a copy
    device: Device

    @classmethod
    def of(
        cls, config: RunConfig, deepspeed: Mapping[str, Any], ranks: int, compute: Compute, device: Device
    ) -> _Facts:
        precision = config.precision
        table, plan = config.optimizer, BatchPlan.from_config(config, ranks)
        sizes = [config.batch.global_batch_size, *(part.global_batch_size for part in config.batch.ramp)]
        groups, has_hidden = _groups(config.model, table.name, table.decay_embeddings)
        names = parameter_shapes(replace(config.model, n_layers=1))
        matrices = [shape for name, shape in names.items() if name.startswith("layers.") and is_matrix(name, shape)]
        return cls(
            stage=zero_stage(deepspeed),
            compute=compute,
            ranks=ranks,
            groups=groups,
            hidden=has_hidden,
            zero=deepspeed["zero_optimization"],
            optimizer=config.optimizer.name,
            fused=is_torchs(config),
            compensated=precision.compensation == "kahan",
            largest_matrix=max(matrices, key=math.prod),
            block=sum(map(math.prod, matrices)),
            embedding=config.model.vocab_size * config.model.d_model,
            tied=config.model.tied,
            runs_again=config.memory.activation_checkpointing != "none",
            weight=BYTES[compute],
            master=BYTES[precision.master],
            moment=BYTES[precision.moments_dtype],
            summed=BYTES[precision.accumulate],
            sent=BYTES[deepspeed.get("communication_data_type", compute)],
            later=max(sizes) > plan.sequences_per_micro_step,
            asynchronous=config.checkpoint.asynchronous,
            device=device,
        )

    @cached_property
    def parameters(self) -> int:
        return sum(map(sum, self.groups))

    @property
    def bucket(self) -> int:
        return int(self.zero.get("reduce_bucket_size", DEFAULT_BUCKET))

    @cached_property
    def partitions(self) -> tuple[int, ...]:
        """Elements of a rank's part of each group: flat, aligned and cut (ZeRO-1, 2), or of each tensor (ZeRO-3)."""
        if self.stage == 0:
            return tuple(map(sum, self.groups))
        if self.stage == 3:
            return tuple(sum(-(-size // self.ranks) for size in group) for group in self.groups)
        unit = ALIGNMENT * self.ranks
        return tuple(-(-sum(group) // unit) * ALIGNMENT for group in self.groups)

    @property
    def partition(self) -> int:
        return sum(self.partitions)

    @property
    def updated(self) -> int:
        """Elements updated at once: a group's part of a partition, or what sub_group_size cuts off it."""
        largest = max(self.partitions)
        if self.stage != 3:
            return largest
        return min(largest, int(self.zero.get("sub_group_size", DEFAULT_SUB_GROUP)) + self.largest_piece)

    @cached_property
    def largest(self) -> int:
        return max(map(max, self.groups))

    @cached_property
    def largest_piece(self) -> int:
        """Of one tensor in one rank's partition."""
        if self.stage == 3:
            return -(-self.largest // self.ranks)
        return max(piece for _, _, piece in self._pieces())

    @property
    def owned(self) -> int:
        """The elements of all tensors that a rank's partition has any of, whole; the largest rank's."""
        return max(self._owned)

    @property
    def owned_least(self) -> int:
        return min(self._owned)

    @cached_property
    def _owned(self) -> list[int]:
        totals = [0] * self.ranks
        for rank, size, _ in self._pieces():
            totals[rank] += size
        return totals

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Of each tensor in a flat group: a rank that has elements of it, the tensor's elements, and the rank's."""
        for group, part in zip(self.groups, self.partitions, strict=True):
            for size, end in zip(group, accumulate(group), strict=True):
                for rank in range((end - size) // part, (end - 1) // part + 1):
                    yield rank, size, min(end, (rank + 1) * part) - max(end - size, rank * part)

    @property
    def contiguous(self) -> bool:
        """Whether a bucket is one buffer, made beforehand."""
        is_flat_and_offloaded = self.stage < 3 and self.place("offload_optimizer") == "host"
        return bool(self.zero.get("contiguous_gradients", True)) or is_flat_and_offloaded

    @property
    def alone(self) -> bool:
        """Whether no gradient is reduced, since there is no other rank (one_rank.py)."""
        return self.ranks == 1 and self.stage < 3 and self.place("offload_optimizer") == "device"

    def place(self, key: Literal["offload_optimizer", "offload_param"]) -> Place:
        """Where states or weights are: in main memory if they are offloaded."""
        section = self.zero.get(key)
        offloaded = isinstance(section, Mapping) and section.get("device", "none") != "none"
        return "host" if offloaded else "device"


@functools.lru_cache(maxsize=16)
def _groups(model: ModelConfig, optimizer: str, decay_embeddings: bool) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Elements of the parameters by group, as `optimizer.parameter_groups` has them, and whether hidden matrices are
    a group of their own, the first one.
    """
    apart = optimizer != "adamw"
    hidden: list[int] = []
    decayed: list[int] = []
    rest: list[int] = []
    for name, shape in parameter_shapes(model).items():
        matrix = is_matrix(name, shape)
        if apart and matrix and name.startswith("layers."):
            group = hidden
        else:
            group = decayed if matrix and (decay_embeddings or name not in EMBEDDINGS) else rest
        group.append(math.prod(shape))
    return tuple(tuple(group) for group in (hidden, decayed, rest) if group), apart


# ---------------------------------------------------------------- the engines


class _Engine:
    """What one of DeepSpeed's engines holds; each method gives parts, `held` those that are always there."""

    def __init__(self, facts: _Facts) -> None:
        self.f = facts

    def held(self) -> list[Part]:
        raise NotImplementedError

    def starting(self) -> list[Scene]:
        """While model and engine are built. All else that is held is among it, but for the model's buffers.

        The model is drawn in fp32, a tied one with a head that the embedding then replaces, and cast a parameter at a
        time; on a GPU's machine that is main memory's. Then it is whole on the device.
        """
        f = self.f
        place: Place = "device" if f.device == "cpu" else "host"
        drawn = [Part("model in fp32", 4 * f.parameters, "4·P", place)]
        if f.tied:
            drawn.append(Part("head, before it is tied", 4 * f.embedding, "4·l", place))
        elif f.weight != 4:
            drawn.append(Part("a parameter, cast", f.weight * f.largest, f"{f.weight}·l", place))
        return [drawn, [self._whole()], *self.building()]

    def _whole(self) -> Part:
        return Part("whole model", self.f.weight * self.f.parameters, f"{self.f.weight}·P")

    def building(self) -> list[Scene]:
        """Of that the engine's own."""
        raise NotImplementedError

    def first(self) -> list[Part]:
        """What is held before the optimizer has a state: moments, momentum and compensation come in the first step."""
        return [part for part in self.held() if part not in self.state(masters=False)]

    def gathered(self, backward: bool = False) -> list[Part]:
        """Beside them while the model runs."""
        return []

    def gathering(self) -> list[Part]:
        """Beside those for a moment."""
        return []

    def between_micro_steps(self) -> list[Part]:
        """Beside them between the micro-steps of one update."""
        raise NotImplementedError

    def sums(self) -> list[Part]:
        """Beside them between the last backward of an update and its step."""
        return self.between_micro_steps()

    def resting(self) -> list[Part]:
        """Beside them between two calls of the engine, when most."""
        return self.between_micro_steps() if self.f.later else self.sums()

    def growing(self, gradients: int, later: bool) -> list[Part]:
        """Beside them in a backward pass, of which so many parameters have their gradient; `later`: earlier
        micro-batches have theirs.
        """
        raise NotImplementedError

    def reducing(self, later: bool) -> list[Scene]:
        """At the end of the last backward of an update."""
        raise NotImplementedError

    def stepping(self) -> list[Scene]:
        """In the update."""
        raise NotImplementedError

    def saving(self) -> Scene:
        """While a checkpoint is made, and at once written unless it is copied."""
        f = self.f
        if f.asynchronous:
            return []
        return [Part("copy of the weights, first rank", f.weight * f.parameters, f"{f.weight}·P", "host")]

    def copied(self) -> list[Part]:
        """The room of what is written while training goes on (snapshot.py), kept from the first step on."""
        f = self.f
        if not f.asynchronous:
            return []
        place: Place = "device" if f.device == "cpu" else "host"
        weights, symbol = (f.partition * f.ranks, "Q") if f.stage in (1, 2) else (f.parameters, "P")
        return [
            self._static("copy of weights, first rank", f.weight, weights, place, symbol),
            *(
                replace(part, name=f"copy of {part.name}", place=place, state=False)
                for part in self.state(self.has_masters)
            ),
        ]

    @property
    def has_masters(self) -> bool:
        """Whether there are masters beside the weights."""
        return True

    def state(self, masters: bool = True) -> list[Part]:
        """Masters, moments and compensation, where they are."""
        f, place = self.f, self.state_place
        parts = []
        if masters:
            parts.append(self._state("masters", f.master, f.partition, place))
        kept = {"muon": "momentum", "adamw8bit": "8-bit moments"}.get(f.optimizer) if f.hidden else None
        of_hidden = f.partitions[0] if kept else 0
        parts.append(self._state("moments", 2 * f.moment, f.partition - of_hidden, place))
        if kept == "momentum":
            parts.append(self._state("momentum of hidden matrices", f.moment, of_hidden, place))
        elif kept:
            scales = 2 * 4 * -(-of_hidden // QUANTIZED_BLOCK)
            parts.append(
                Part(
                    "8-bit moments of hidden matrices", 2 * of_hidden + scales, f"2·(1 + 4/{QUANTIZED_BLOCK})·p",
                    place, static=True, state=True,
                )
            )  # fmt: skip
        if f.compensated:
            parts.append(self._state("compensation", f.master, f.partition, place))
        return parts

    @property
    def state_place(self) -> Place:
        return self.f.place("offload_optimizer")

    def _zeros(self, count: int, symbol: str) -> list[Part]:
        """Gradients that the masters get at the start; those in main memory stay, and are among what is held."""
        f = self.f
        on_device = self.state_place == "device"
        return [Part("gradients of zeros", f.master * count, f"{f.master}·{symbol}")] if on_device else []

    def temporaries(self) -> list[Part]:
        """Of the optimizer's own arithmetic."""
        f = self.f
        if f.fused or self.state_place == "host":
            return []
        parts = [
            Part(
                "a piece being updated", PIECE_BYTES * min(PIECE[f.device], f.updated),
                f"{PIECE_BYTES}·min({PIECE[f.device]}, u)",
            )
        ]  # fmt: skip
        if f.optimizer == "muon":
            rows, columns = f.largest_matrix
            smaller = min(rows, columns)
            parts.append(
                Part("orthogonalization", 8 * rows * columns + 6 * smaller**2, "8·rows·columns + 6·min(rows, columns)²")
            )
        return parts

    def _state(self, name: str, each: int, count: int, place: Place = "device", symbol: str = "p") -> Part:
        return replace(self._static(name, each, count, place, symbol), state=True)

    def _static(self, name: str, each: int, count: int, place: Place = "device", symbol: str = "p") -> Part:
        return Part(name, each * count, f"{each}·{symbol}", place, static=True)

    def _flat_copy(self, tensors: Sequence[int], bucket: int, each: int) -> int:
        """Bytes of the largest flat copy of neighbouring tensors, each as many as it takes to pass `bucket`."""
        most = run = count = 0
        for size in tensors:
            run, count = run + size, count + 1
            if run > bucket:
                most, run, count = max(most, run if count > 1 else 0), 0, 0
        return each * max(most, run if count > 1 else 0)


class _Replicated(_Engine):
    """ZeRO-0: in fp32 the optimizer's own parameters, in bf16 fp16/unfused_optimizer.py."""

    @property
    def in_place(self) -> bool:
        return self.f.weight == 4

    @property
    def has_masters(self) -> bool:
        return not self.in_place

    def held(self) -> list[Part]:
        return [self._state("weights", self.f.weight, self.f.parameters, symbol="P"), *self.state(self.has_masters)]

    def between_micro_steps(self) -> list[Part]:
        return [self._state("gradients", self.f.weight, self.f.parameters, symbol="P")]

    def growing(self, gradients: int, later: bool) -> list[Part]:
        if later:
            return self.between_micro_steps()
        return [Part("gradients so far", self.f.weight * gradients, f"{self.f.weight}·g")]

    def reducing(self, later: bool) -> list[Scene]:
        f = self.f
        if f.alone:
            return [self.between_micro_steps()]
        flat = self._flat_copy([size for group in f.groups for size in group], WHOLE_BUCKET, f.weight)
        return [[*self.between_micro_steps(), Part("gradients in one piece", flat, f"{f.weight}·P")]]

    def building(self) -> list[Scene]:
        """DeepSpeed takes a step on zero gradients, unless it computes in fp32."""
        return [self.first()] if self.in_place else [[*self.held(), *scene] for scene in self.stepping()]

    def stepping(self) -> list[Scene]:
        f = self.f
        if self.in_place:
            return [[*self.between_micro_steps(), *self.temporaries()]]
        cast = Part("gradients in fp32", 4 * f.parameters, "4·P")
        return [[*self.between_micro_steps(), cast, *self.temporaries()]]


class _Bf16(_Replicated):
    """ZeRO-1, bf16 with sums in fp32: bf16_optimizer.py. Gradients stay whole, and are added to a whole fp32 buffer."""

    def held(self) -> list[Part]:
        f, whole = self.f, self.f.partition * self.f.ranks
        return [
            self._state("weights", f.weight, whole, symbol="Q"),
            self._state("accumulation buffer", f.summed, whole, symbol="Q"),
            *self.state(),
        ]

    def building(self) -> list[Scene]:
        return [self.first()]

    def reducing(self, later: bool) -> list[Scene]:
        f = self.f
        if f.alone:
            return [self.between_micro_steps()]
        groups = [part * f.ranks for part in f.partitions]
        flat = self._flat_copy(groups, WHOLE_BUCKET, f.summed)
        scene = [*self.between_micro_steps(), Part("sums in one piece", flat, f"{f.summed}·Q")]
        if f.sent != f.summed:
            sent = f.sent * (flat // f.summed or max(groups))
            scene.append(Part("sums as they are sent", sent, f"{f.sent}·Q"))
        return [scene]

    def stepping(self) -> list[Scene]:
        return [
            [*self.between_micro_steps(), *self.temporaries()],
            [*self.between_micro_steps(), *_gloo_gather(self.f)],
        ]


class _Flat(_Engine):
    """ZeRO-1 and 2: zero/stage_1_and_2.py."""

    @property
    def compact(self) -> bool:
        """Whether fp32 sums of a low-precision model lie in one flat partition; else they are whole tensors."""
        return self.f.summed == 4 and self.f.weight != 4

    @property
    def staged(self) -> int:
        """Bytes of a number in the bucket."""
        return self.f.summed if self.f.stage == 1 and self.compact else self.f.weight

    def held(self) -> list[Part]:
        f = self.f
        parts = [self._state("weights", f.weight, f.partition * f.ranks, symbol="Q"), *self.state()]
        if self.state_place == "host":
            parts += [
                self._static("gradients for the optimizer", f.master, f.partition, "host"),
                self._static("weights for the copy back", f.weight, f.partition, "host"),
                self._static("buffer for a gradient", f.weight, f.largest, symbol="l"),
                self._static("buffer for a gradient, main memory", f.weight, f.largest, "host", "l"),
            ]
        return parts

    def building(self) -> list[Scene]:
        """A GPU without room for a flat copy beside the model has it made in main memory."""
        f = self.f
        scenes: list[Scene] = [[*self.first(), *self._zeros(f.partition, "p")]]
        if f.device == "cpu":
            flat = Part("flat copy of a group", f.weight * max(f.partitions) * f.ranks, f"{f.weight}·u·N")
            scenes.append([self._whole(), flat])
        return scenes

    def sums(self) -> list[Part]:
        """Gradients behind a reduction."""
        f = self.f
        if self.compact:
            return [self._state("gradients", f.summed, f.partition)]
        if self.state_place == "host" and (f.stage == 1 or not f.later):
            return []  # they are where the optimizer reads them
        return [self._state("gradients", f.weight, f.owned, self.state_place, "s")]

    def between_micro_steps(self) -> list[Part]:
        f = self.f
        if f.stage == 2:
            return self.sums()
        return [self._state("gradients", f.summed, f.parameters, symbol="P"), *self.buckets(static=True)]

    def buckets(self, static: bool = False) -> list[Part]:
        f = self.f
        if f.alone:
            return []
        if not f.contiguous:  # gradients stay where they were formed, of ZeRO-1 among all the others
            formed = Part("gradients of a bucket", f.weight * min(f.bucket, f.parameters), f"{f.weight}·min(B, P)")
            return [formed] if f.stage == 2 else []
        count = 2 if f.zero.get("overlap_comm", False) else 1
        return [Part("reduce buckets", count * f.bucket * self.staged, f"{count}·{self.staged}·B", static=static)]

    def growing(self, gradients: int, later: bool) -> list[Part]:
        f = self.f
        earlier = self.between_micro_steps() if later else []
        if not gradients:
            return earlier
        if f.stage == 1:
            if later:
                return earlier
            return [Part("gradients so far", f.summed * gradients, f"{f.summed}·g"), *self.buckets()]
        return [*earlier, *self.buckets(), *self._reduced(gradients, later)]

    def _reduced(self, gradients: int, later: bool) -> list[Part]:
        """Of gradients that a bucket has been sent with: this rank's, and the bucket's flat copy."""
        f = self.f
        if f.alone:
            if not self.compact:
                return [Part("gradients of this micro-batch", f.weight * gradients, f"{f.weight}·g")]
            return [] if later else self.sums()
        if gradients <= f.bucket:
            return []
        full = min(f.bucket, gradients)
        parts = [Part("bucket in one piece", f.weight * full, f"{f.weight}·min(B, g)")]
        if f.sent != f.weight:
            parts.append(Part("bucket as it is sent", f.sent * full, f"{f.sent}·min(B, g)"))
        if not self.compact and self.state_place == "device":
            parts.append(Part("gradients of this micro-batch", f.weight * f.owned, f"{f.weight}·s"))
        elif not later:
            parts += self.sums()
        return parts

    def reducing(self, later: bool) -> list[Scene]:
        f = self.f
        # The largest tensor passes the bucket by, which is full beside it, or there is none.
        beyond = f.largest > f.bucket or (f.alone and self.compact)
        if f.stage == 2:
            alone = [Part("gradient beyond the bucket", f.weight * f.largest, f"{f.weight}·l")] if beyond else []
            cast = [Part("that gradient as it is sent or added", *self._beyond())] if beyond and self.compact else []
            earlier = self.sums() if later else []
            own = self._reduced(f.parameters, later) or ([] if later and self.compact else self.sums())
            copies = [part for part in own if part.name.startswith("bucket ") and not beyond]
            own = [part for part in own if not part.name.startswith("bucket ")]
            return [[*earlier, *self.buckets(), *own, *alone, *cast, *copies]]
        scene = [
            self._state("gradients", f.summed, f.parameters, symbol="P"), *self.buckets(True),
        ]  # fmt: skip
        if self.compact or not f.alone:
            scene += [replace(part, name="gradients of this rank", static=False, state=False) for part in self.sums()]
        if self.compact and f.sent != self.staged and not f.alone:
            most = max(f.largest if beyond else 0, min(f.bucket, f.parameters))
            scene += [
                Part("bucket as it is sent", f.sent * most, f"{f.sent}·max(l, B)"),
                Part("its part, as it is added", 4 * f.largest_piece, "4·l"),
            ]
        return [scene]

    def _beyond(self) -> tuple[int, str]:
        """The copy of a gradient that passes the bucket by."""
        f = self.f
        return (f.sent * f.largest, f"{f.sent}·l") if f.sent != f.weight else (4 * f.largest_piece, "4·l")

    def stepping(self) -> list[Scene]:
        f = self.f
        if self.state_place == "host":
            whole = [Part("sums, as whole tensors", f.summed * f.owned, f"{f.summed}·s")]
            return [[*self.sums(), *(whole if self.compact and f.stage == 1 else [])]]
        sums = self.sums()
        norm = [*sums, Part("a gradient in fp64, for the norm", 8 * f.largest_piece, "8·l")]
        if f.stage == 1 and self.compact:
            others = f.parameters - f.owned_least
            norm.append(Part("sums that are other ranks'", f.summed * others, f"{f.summed}·(P - s)"))
        flat = Part("gradients in one piece", f.summed * f.updated, f"{f.summed}·u")
        cast = Part("gradients as the masters are", f.master * f.updated, f"{f.master}·u")
        casts = f.master != f.summed
        gather = _gloo_gather(f)
        if self.compact:
            return [norm, [*sums, *([cast] if casts else []), *self.temporaries()], gather]
        # The views of the vectors' gradients keep the matrices' in memory until their own group is updated.
        return [
            norm,
            [*sums, flat, *([cast] if casts else [])],
            [*sums, cast if casts else flat, *self.temporaries()],
            gather,
        ]


class _Partitioned(_Engine):
    """ZeRO-3: zero/stage3.py."""

    def held(self) -> list[Part]:
        f = self.f
        weights = f.place("offload_param")
        parts = [
            self._state("weights", f.weight, f.partition, weights),
            self._state("gradients", f.summed, f.partition, self.state_place),
            *([self._static("reduce bucket", f.sent, f.bucket, symbol="B")] if f.contiguous else []),
            *self.state(),
        ]
        if self.state_place == "host":
            parts.append(self._static("gradients for the optimizer", f.master, f.partition, "host"))
        return parts

    def building(self) -> list[Scene]:
        f, later = self.f, ("gradients", "reduce bucket")
        return [
            [*(part for part in self.first() if part.name not in later), *self._zeros(f.updated, "u")],
            [*self.first(), self._one_gathered(), *self.gathering()],  # each parameter in turn, for its hooks
        ]

    def _one_gathered(self) -> Part:
        return Part("one parameter, gathered", self.f.weight * self.f.largest, f"{self.f.weight}·l")

    def resting(self) -> list[Part]:
        """From the end of a step on; the next one cuts them, and so does a checkpoint (`partition_all_parameters`)."""
        return [self._static("small parameters, whole", self.f.weight, self.persistent, symbol="K")]

    @property
    def persistent(self) -> int:
        return sum(self._kept_whole)

    @cached_property
    def _kept_whole(self) -> list[int]:
        zero = self.f.zero
        threshold = int(zero.get("stage3_param_persistence_threshold", DEFAULT_PERSISTENCE))
        room = int(zero.get("stage3_model_persistence_threshold", 2**62))
        kept: list[int] = []
        total = 0
        for size in (size for group in self.f.groups for size in group):
            if size <= threshold and total + size <= room:
                kept.append(size)
                total += size
        return kept

    def gathered(self, backward: bool = False) -> list[Part]:
        f, zero = self.f, self.f.zero
        reuse = int(zero.get("stage3_max_reuse_distance", DEFAULT_LIVE))
        prefetch = int(zero.get("stage3_prefetch_bucket_size", DEFAULT_PREFETCH))
        live = int(zero.get("stage3_max_live_parameters", DEFAULT_LIVE))
        rest = f.parameters - self.persistent
        # A parameter stays from its use in forward to that in backward if no more than `reuse` are used between: the
        # head, and of the blocks those of the last half of it. What is prefetched comes beside them while no more than
        # `live` are there. Backward has a whole block, which stays from when it is run again.
        kept = f.largest + max(0, reuse // 2 - f.largest)
        kept = max(kept, f.block) if backward and f.runs_again else kept
        count = min(rest, kept + min(prefetch, max(0, live - kept)))
        return [*self.resting(), Part("gathered parameters", f.weight * count, f"{f.weight}·G")]

    def gathering(self) -> list[Part]:
        return _gloo(self.f, "gathered weights", self.f.weight * self.f.largest, f"{self.f.weight}·l")

    def between_micro_steps(self) -> list[Part]:
        return []

    def saving(self) -> Scene:
        return [*super().saving(), self._one_gathered()]

    def growing(self, gradients: int, later: bool) -> list[Part]:
        if not gradients:
            return []
        f = self.f
        full = f.sent * min(f.bucket, gradients)
        parts = [Part("bucket in the order of ranks", full, f"{f.sent}·min(B, g)")]
        if not f.contiguous:  # gradients stay where they were formed
            parts.append(Part("gradients of a bucket", f.weight * min(f.bucket, gradients), f"{f.weight}·min(B, g)"))
        return [*parts, *_gloo(f, "it", full, f"{f.sent}·min(B, g)")]

    def reducing(self, later: bool) -> list[Scene]:
        f = self.f
        if f.largest <= f.bucket:
            return [[*self.resting(), *self.growing(f.parameters, later)]]
        parts: list[Part] = [
            *self.resting(),
            Part("its parameter, gathered", f.weight * f.largest, f"{f.weight}·l"),
            Part("gradient beyond the bucket", f.weight * f.largest, f"{f.weight}·l"),
        ]
        if f.sent != f.weight:
            parts.append(Part("that gradient as it is sent", f.sent * f.largest, f"{f.sent}·l"))
        return [[*parts, *_gloo(f, "it", f.sent * f.largest, f"{f.sent}·l")]]

    def stepping(self) -> list[Scene]:
        f = self.f
        if self.state_place == "host":
            return [self._whole_again()]
        flat = Part("gradients in one piece", f.summed * f.updated, f"{f.summed}·u")
        cast = Part("gradients as the masters are", f.master * f.updated, f"{f.master}·u")
        casts = f.master != f.summed
        return [
            [Part("a gradient in fp64, for the norm", 8 * f.largest_piece, "8·l")],
            [flat, *([cast] if casts else [])],
            [cast if casts else flat, *self.temporaries()],
            self._whole_again(),
        ]

    def _whole_again(self) -> Scene:
        """At the end of a step, one small parameter after another."""
        size = self.f.weight * max(self._kept_whole, default=0)
        again = Part("a small parameter, gathered", size, f"{self.f.weight}·l")
        return [*self.resting(), again, *_gloo(self.f, "it", size, f"{self.f.weight}·l")]


def _engine(facts: _Facts) -> _Engine:
    if facts.stage == 0:
        return _Replicated(facts)
    if facts.stage == 3:
        return _Partitioned(facts)
    # DeepSpeed's engine.py, _do_optimizer_sanity_check.
    if (facts.stage, facts.compute, facts.summed, facts.place("offload_optimizer")) == (1, "bf16", 4, "device"):
        return _Bf16(facts)
    return _Flat(facts)


def _gloo(f: _Facts, what: str, size: int, formula: str) -> list[Part]:
    """What gloo takes beside, on CPUs; NCCL works in place."""
    return [Part(f"gloo's copy of {what}", size, formula)] if f.device == "cpu" and f.ranks > 1 else []


def _gloo_gather(f: _Facts) -> list[Part]:
    """When a flat group of weights is gathered."""
    return _gloo(f, "gathered weights", f.weight * max(f.partitions) * f.ranks, f"{f.weight}·u·N")
