"""Which checkpoints of a run stay, as arithmetic over what is known of each: nothing is read or removed here.

A checkpoint stays for any of four reasons:

    last      it is one of the `keep_last` newest
    every     its step is a multiple of `keep_every_steps`
    best      it is one of the `keep_best` healthy ones with the lowest held-out loss
    healthy   it is one of the two newest healthy ones, however many others came later

Two, since the newest is known to be healthy by its numbers alone: that a step from it is finite as well, the next save
shows. So a run that stops being finite has, whatever the rule, a checkpoint that it went on from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pretrain.config import CheckpointTable

Reason = Literal["last", "every", "best", "healthy"]


@dataclass(frozen=True)
class Saved:
    """What retention knows of one checkpoint."""

    step: int
    score: float | None = None  # held-out loss of all sources, nats per token; None where none was measured at its step
    healthy: bool = True  # loss, weights and moments are finite, as far as was recorded


def best_first(checkpoints: Sequence[Saved]) -> list[Saved]:
    """The healthy ones that have a score, the lowest first; of equal ones the later."""
    scored = [(one.score, one) for one in checkpoints if one.healthy and one.score is not None]
    finite = [(score, one) for score, one in scored if math.isfinite(score)]
    return [one for _, one in sorted(finite, key=lambda pair: (pair[0], -pair[1].step))]


@dataclass(frozen=True)
class Retention:
    """A rule of what stays. `keep_every_steps` None and `keep_best` 0: no checkpoint stays for that reason."""

    keep_last: int
    keep_every_steps: int | None = None
    keep_best: int = 0

    @classmethod
    def of(cls, table: CheckpointTable) -> Retention:
        """What a recipe lets stay."""
        return cls(table.keep_last, table.keep_every_steps, table.keep_best)

    def reasons(self, checkpoints: Sequence[Saved]) -> dict[int, tuple[Reason, ...]]:
        """By step, in ascending order, why each checkpoint stays; those with no reason may go.

        "healthy" is given only where there is no other reason. Of equal scores the later is better.
        """
        by_step = sorted(checkpoints, key=lambda one: one.step)
        healthy = [one for one in by_step if one.healthy]
        best = best_first(by_step)[: self.keep_best]
        newest = by_step[max(0, len(by_step) - self.keep_last) :]
        reasons: dict[int, tuple[Reason, ...]] = {}
        for one in by_step:
            every = self.keep_every_steps is not None and one.step % self.keep_every_steps == 0
            candidates: tuple[tuple[Reason, bool], ...] = (
                ("last", one in newest),
                ("every", every),
                ("best", one in best),
            )
            reasons[one.step] = tuple(reason for reason, holds in candidates if holds)
        for one in healthy[-2:]:
            reasons[one.step] = reasons[one.step] or ("healthy",)
        return reasons
