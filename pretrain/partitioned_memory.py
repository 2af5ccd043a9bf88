"""What DeepSpeed's engines hold that cut gradients or weights into partitions: ZeRO-1, 2 and 3. No torch.

From DeepSpeed 0.19's zero/stage_1_and_2.py and zero/stage3.py; docs/memory.md says which lines.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from pretrain.engine_memory import Bf16, Engine, Replicated, gloo_copy, gloo_gather
from pretrain.memory_parts import Part, Scene
from pretrain.memory_sizes import RankSizes

# DeepSpeed's own, where the JSON is silent.
DEFAULT_PERSISTENCE, DEFAULT_PREFETCH, DEFAULT_LIVE = 100_000, 50_000_000, 10**9


class Flat(Engine):
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
        gather = gloo_gather(f)
        if self.compact:
            return [norm, [*sums, *([cast] if casts else []), *self.temporaries()], gather]
        # The views of the vectors' gradients keep the matrices' in memory until their own group is updated.
        return [
            norm,
            [*sums, flat, *([cast] if casts else [])],
            [*sums, cast if casts else flat, *self.temporaries()],
            gather,
        ]


class Partitioned(Engine):
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
        return gloo_copy(self.f, "gathered weights", self.f.weight * self.f.largest, f"{self.f.weight}·l")

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
        return [*parts, *gloo_copy(f, "it", full, f"{f.sent}·min(B, g)")]

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
        return [[*parts, *gloo_copy(f, "it", f.sent * f.largest, f"{f.sent}·l")]]

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
        return [*self.resting(), again, *gloo_copy(self.f, "it", size, f"{self.f.weight}·l")]


def engine_of(facts: RankSizes) -> Engine:
    if facts.stage == 0:
        return Replicated(facts)
    if facts.stage == 3:
        return Partitioned(facts)
    # DeepSpeed's engine.py, _do_optimizer_sanity_check.
    if (facts.stage, facts.compute, facts.summed, facts.place("offload_optimizer")) == (1, "bf16", 4, "device"):
        return Bf16(facts)
    return Flat(facts)
