"""Which samples an optimizer step reads, by arithmetic, also where the global batch grows on the way.

Samples count on from step to step, so what a step reads follows from its number and from the sizes of the steps before
it: nothing is stored, and a resumed run goes on with the sample behind its last step's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Steps:
    """The steps of a run, from 0, as consecutive ranges of its samples.

    Each (until_samples, size) of the ramp, in order, has steps of `size` samples up to sample number `until_samples`
    (exclusive); behind them steps have `global_batch_size`. ValueError where a part is not made of whole steps.
    """

    global_batch_size: int
    ramp: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        begin = 0
        for until, size in self.ramp:
            samples = until - begin
            if samples <= 0:
                raise ValueError(f"until_samples must increase, {until} follows {begin}")
            if samples % size:
                near = begin + samples // size * size
                ends = f"{near} or {near + size}" if near > begin else f"{near + size}"
                raise ValueError(
                    f"the {samples} samples from {begin} until {until} are no whole steps of {size}: "
                    f"set until_samples to {ends}"
                )
            begin = until

    @classmethod
    def from_json(cls, global_batch_size: int, ramp: Sequence[Sequence[int]]) -> Steps:
        """What a checkpoint says, its ramp as a list of lists. ValueError or TypeError where they are none."""
        if not all(len(part) == 2 and min(part) > 0 for part in ramp):
            raise ValueError("a ramp is a list of [until_samples, global_batch_size]")
        return cls(global_batch_size, tuple((until, size) for until, size in ramp))

    def behind(self, past: Steps, samples: int) -> Steps:
        """The steps of `past` for the first `samples` samples, whole steps of it, and from there on these.

        What these say of the samples before is not looked at. ValueError where a part of their ramp that goes on behind
        them is, from there on, no longer made of whole steps.
        """
        later = tuple((until, size) for until, size in self.ramp if until > samples)
        return Steps(self.global_batch_size, (*past.parts(samples), *later))

    @cached_property
    def _parts(self) -> list[tuple[int, int, int]]:
        """First step, first sample and size of the steps of each part; the last one has no end."""
        step, sample, parts = 0, 0, []
        for until, size in self.ramp:
            parts.append((step, sample, size))
            step, sample = step + (until - sample) // size, until
        return [*parts, (step, sample, self.global_batch_size)]

    def size(self, step: int) -> int:
        """How many samples a step reads."""
        return len(self.samples(step))

    def samples(self, step: int) -> range:
        """The numbers of the samples that a step reads. ValueError for a step below 0."""
        if step < 0:
            raise ValueError(f"step {step} does not exist")
        first_step, first_sample, size = self._parts[bisect_right(self._parts, step, key=lambda part: part[0]) - 1]
        begin = first_sample + (step - first_step) * size
        return range(begin, begin + size)

    def samples_before(self, step: int) -> int:
        """How many samples the first `step` steps read."""
        return self.samples(step).start

    def step_of(self, sample: int) -> int:
        """The step that reads a sample. ValueError for a sample below 0."""
        if sample < 0:
            raise ValueError(f"sample {sample} does not exist")
        first_step, first_sample, size = self._parts[bisect_right(self._parts, sample, key=lambda part: part[1]) - 1]
        return first_step + (sample - first_sample) // size

    def told(self, samples: int | None = None) -> str:
        """The sizes in words, of the first `samples` samples or of all: "4 until sample 16, then 8"."""
        parts = self.parts(max(1, samples)) if samples is not None else [*self.ramp, (0, self.global_batch_size)]
        words = [f"{size} until sample {end:,}" for end, size in parts[:-1]]
        return ", then ".join([*words, str(parts[-1][1])])

    def parts(self, samples: int) -> list[tuple[int, int]]:
        """The ramp of the first `samples` samples: equal sizes side by side are one part, and the last ends there.

        Runs whose parts are equal read the same samples in each step up to there.
        """
        parts: list[tuple[int, int]] = []
        for _, begin, size in self._parts:
            if begin >= samples or (parts and parts[-1][1] == size):
                continue
            if parts:
                parts[-1] = begin, parts[-1][1]
            parts.append((samples, size))
        return parts
