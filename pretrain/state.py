"""Where a run is, and what its last step measured: what a checkpoint's state.json tells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

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
    overflowed: bool = False  # in fp16, so that the gradient was left out: its norm says nothing of the weights
    heldout_loss: float | None = None  # of all sources, nats per token; None where this step was not evaluated

    def to_dict(self, *, finite: bool) -> dict[str, float | bool | None]:
        """`finite`: all weights, masters and moments are. JSON has no infinity: what is not finite is null."""
        figures = {"loss": self.loss, "grad_norm": self.grad_norm, "heldout_loss": self.heldout_loss}
        told = {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
        excused = {"grad_norm"} if self.overflowed else set()
        sound = all(name in told or value is None or name in excused for name, value in figures.items())
        return {**{name: told.get(name) for name in figures}, "healthy": finite and sound}
