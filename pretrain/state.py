"""Where a run is, and what its last step measured: what a checkpoint's state.json tells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.batching import BatchPlan
from pretrain.checkpoint import read_json


@dataclass
class TrainState:
    """Where a run is: all that the loop counts."""

    global_step: int = 0
    consumed_samples: int = 0
    tokens_seen: int = 0

    @classmethod
    def of(cls, checkpoint: Path) -> TrainState:
        """The state that a checkpoint describes."""
        stored = read_json(checkpoint / "state.json")
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})

    def become(self, other: TrainState) -> None:
        """Be where another is: whoever watches this one sees it."""
        self.global_step, self.consumed_samples = other.global_step, other.consumed_samples
        self.tokens_seen = other.tokens_seen

    def advance(self, plan: BatchPlan, tokens: int) -> None:
        """Count one more step, which learnt from `tokens` targets (padding is none)."""
        self.global_step += 1
        self.consumed_samples += plan.global_batch_size
        self.tokens_seen += tokens


@dataclass(frozen=True)
class Measured:
    """What the step before a checkpoint measured, as its state.json tells it."""

    loss: float  # nats per token, before the step's update
    grad_norm: float
    left_out: bool = False  # it updated nothing (an overflow, an alarm), so its numbers say nothing of the weights
    heldout_loss: float | None = None  # of all sources, nats per token; None where this step was not evaluated
    alarms: tuple[str, ...] = ()  # conditions that were on, of those that say something of the weights

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Measured:
        """What a checkpoint told of its step, where that is needed once more."""
        loss, norm = (math.nan if measured.get(name) is None else measured[name] for name in ("loss", "grad_norm"))
        left_out = measured.get("healthy", True) is True and (math.isnan(loss) or math.isnan(norm))
        return cls(loss, norm, left_out, alarms=tuple(measured.get("alarms", ())))

    def to_dict(self, *, finite: bool) -> dict[str, Any]:
        """`finite`: all weights, masters and moments are. JSON has no infinity: what is not finite is null.

        `alarms` only where there are any: such a checkpoint can be resumed from, but is no healthy one.
        """
        figures = {"loss": self.loss, "grad_norm": self.grad_norm, "heldout_loss": self.heldout_loss}
        told = {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
        excused = {"loss", "grad_norm"} if self.left_out else set()
        sound = all(name in told or value is None or name in excused for name, value in figures.items())
        alarms = {"alarms": [*self.alarms]} if self.alarms else {}
        return {**{name: told.get(name) for name in figures}, "healthy": finite and sound, **alarms}
