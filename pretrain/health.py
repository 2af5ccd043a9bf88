"""What is wrong with a run, and what is done about it: one kind of alarm for all that is watched.

    alarm = monitor.raise_alarm(step, "attention_logit", value, threshold, "layer 3, head 1")
    monitor.is_over("attention_logit")

Whoever watches something says so here, with numbers that are equal on all ranks: the recipe's policy decides what is
done, on every rank the same. An alarm stays on until it is over; meanwhile no checkpoint counts as healthy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pretrain.config import HealthTable

Condition = Literal[
    "non_finite", "loss_spike", "grad_norm_spike", "skipped_steps",
    "update_ratio", "attention_logit", "dead_units", "rank_mismatch", "late_rank", "hang",
]  # fmt: skip
Action = Literal["warn", "skip", "stop", "roll_back"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
GRAVITY: tuple[Action, ...] = ("stop", "roll_back", "skip", "warn")
# What says nothing of the weights: a checkpoint meanwhile is as good as any.
HARMLESS: frozenset[Condition] = frozenset({"skipped_steps", "late_rank", "hang"})
# What is over with the processes that showed it: each start gives all ranks the same weights.
OF_PROCESSES: frozenset[Condition] = frozenset({"rank_mismatch", "late_rank", "hang"})


@dataclass(frozen=True)
class Alarm:
    """One condition at one step."""

    step: int  # the optimizer step, as metrics count them: the first is 1
    condition: Condition
    value: float | None  # what was measured; None or not finite where there is no such number
    threshold: float | None  # what it may be
    action: Action
    detail: str  # where, and of what: a few words for people

    def to_dict(self) -> dict[str, Any]:
        """As a record of metrics.jsonl has it, `step` apart."""
        values = asdict(self)
        del values["step"]
        return values

    def told(self) -> dict[str, Any]:
        """As status.json has it: numbers that JSON has none for are null."""
        values = asdict(self)
        return {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in values.items()}

    def line(self) -> str:
        """For people, in one line."""
        value = "" if self.value is None else f" {self.value:.6g}"
        limit = "" if self.threshold is None else f" (above {self.threshold:.6g})"
        return f"alarm: step {self.step}: {self.condition}{value}{limit}: {self.detail}; action: {self.action}"


class TrainingDivergedError(RuntimeError):
    """An alarm that ends the run. Raised on all ranks; the message is one line with the remedy."""


class Monitor:
    """Turns what was found into alarms, by the recipe's policies. Every rank has one and tells it the same."""

    def __init__(
        self,
        table: HealthTable,
        tell: Callable[[Alarm], None] = lambda alarm: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`tell` records an alarm; `say` has its line, unless it only goes on and nothing is done about it.

        Both may be called from a thread that watches for a hang.
        """
        self.table = table
        self.on: set[Condition] = set()
        self._raised: list[Alarm] = []
        self._tell = tell
        self._say = say

    def raise_alarm(
        self, step: int, condition: Condition, value: float | None, threshold: float | None, detail: str
    ) -> Action | None:
        """Something is wrong: the action that the recipe asks for, None where it is off. The loop carries it out."""
        policy = getattr(self.table, condition)
        if policy == "off":
            return None
        alarm = Alarm(step, condition, value, threshold, policy, detail)
        is_news = condition not in self.on or policy != "warn"
        self.on.add(condition)
        self._tell(alarm)
        if is_news:
            self._raised.append(alarm)
            self._say(alarm.line())
        return alarm.action

    def goes_on(self, stored: Iterable[Condition]) -> None:
        """Behind a checkpoint: what was on when it was saved still is, as far as anybody looks at it."""
        self.on = {one for one in stored if one not in OF_PROCESSES and getattr(self.table, one) != "off"}

    def is_over(self, condition: Condition) -> None:
        """It was looked at again, and is as it should be."""
        self.on.discard(condition)

    def take(self) -> list[Alarm]:
        """The new alarms since this was last asked, those whose action is the gravest first."""
        taken, self._raised = self._raised, []
        return sorted(taken, key=lambda alarm: GRAVITY.index(alarm.action))

    @property
    def stopping(self) -> Alarm | None:
        """The first of the alarms not yet taken that ends the run."""
        return next((alarm for alarm in self._raised if alarm.action == "stop"), None)

    @property
    def harm(self) -> list[str]:
        """What is on that makes a checkpoint of now no healthy one, by name."""
        return sorted(self.on - HARMLESS)
