"""Is a step's loss or gradient as it should be: finite, and no spike beside the last healthy steps.

A spike is told by a robust z-score. Of the last healthy steps m is the median and s = 1.4826 · median |x − m|, which of
normal numbers is their standard deviation, and which a few wild ones do not move (Huber and Ronchetti, Robust
Statistics, section 1.2): z = (x − m) / s. Losses are taken as they are, gradient norms by their logarithm, since they
differ by factors. Where hardly anything varies s has a floor, one percent of the median loss or a factor of 1.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from pretrain.config import HealthTable
from pretrain.health import Condition, Monitor

LOSS_FLOOR = 0.01  # of the median
LOG_NORM_FLOOR = 0.1


class Window:
    """The last healthy values of one number."""

    def __init__(self, size: int, values: list[float] | None = None, outside: int = 0) -> None:
        self.values = deque(values or (), maxlen=size)
        self.outside = outside  # spikes in a row, up to now

    def limit(self, z: float, *, logarithmic: bool) -> float | None:
        """The largest value that is no spike; None as long as half a window of values is lacking."""
        assert self.values.maxlen is not None
        if len(self.values) < self.values.maxlen // 2:
            return None
        values = [math.log(value) for value in self.values] if logarithmic else [*self.values]
        middle = median(values)
        floor = LOG_NORM_FLOOR if logarithmic else LOSS_FLOOR * abs(middle)
        spread = max(1.4826 * median(abs(value - middle) for value in values), floor)
        top = middle + z * spread
        return math.exp(min(top, 700.0)) if logarithmic else top

    def add(self, value: float, *, spikes: bool) -> None:
        """Take a value in, unless it spikes. A level that lasts as long as the window is no spike: begin anew."""
        assert self.values.maxlen is not None
        self.outside = self.outside + 1 if spikes else 0
        if self.outside >= self.values.maxlen:
            self.values.clear()
            self.outside = 0
        elif not spikes and math.isfinite(value) and value > 0:
            self.values.append(value)


class Finding(NamedTuple):
    """What is wrong with a step."""

    condition: Condition
    value: float
    threshold: float | None
    detail: str


class Judge:
    """Judges every step of a run. On all ranks alike, by numbers that are equal on all of them."""

    def __init__(self, table: HealthTable, monitor: Monitor, stored: Mapping[str, Any] | None = None) -> None:
        """`stored`: what `to_dict` gave when the checkpoint was saved that the run goes on from."""
        stored = stored or {}
        self.table = table
        self.monitor = monitor
        outside = stored.get("spikes_in_a_row", {})
        self.losses = Window(table.window_steps, stored.get("losses"), int(outside.get("loss", 0)))
        self.norms = Window(table.window_steps, stored.get("grad_norms"), int(outside.get("grad_norm", 0)))
        self.unmoved = int(stored.get("skipped_in_a_row", 0))  # steps in a row that updated nothing

    def to_dict(self) -> dict[str, Any]:
        """What a later start needs to judge as this one would, JSON-able."""
        return {
            "losses": [*self.losses.values],
            "grad_norms": [*self.norms.values],
            "spikes_in_a_row": {"loss": self.losses.outside, "grad_norm": self.norms.outside},
            "skipped_in_a_row": self.unmoved,
        }

    def findings(self, loss: float, norm: float, *, overflowed: bool = False) -> list[Finding]:
        """What is wrong with a step of this loss and gradient norm, before it counts.

        `overflowed`: the gradient left fp16's range, which is no fault; its norm is none.
        """
        found = []
        if not math.isfinite(loss) or not (overflowed or math.isfinite(norm)):
            return [
                Finding("non_finite", norm if math.isfinite(loss) else loss, None, f"loss {loss}, gradient norm {norm}")
            ]
        if self.table.loss_spike != "off":
            limit = self.losses.limit(self.table.spike_z, logarithmic=False)
            if limit is not None and loss > limit:
                found.append(Finding("loss_spike", loss, limit, self._beside(self.losses)))
        if self.table.grad_norm_spike != "off" and not overflowed:
            limit = self.norms.limit(self.table.spike_z, logarithmic=True)
            if limit is not None and norm > limit:
                found.append(Finding("grad_norm_spike", norm, limit, self._beside(self.norms)))
        return found

    def _beside(self, window: Window) -> str:
        return f"median {median(window.values):.6g} of the last {len(window.values)} healthy steps"

    def allows(self, loss: float, norm: float) -> bool:
        """Whether a step may update the weights: whatever is wrong with it is at most warned of."""
        policies = {getattr(self.table, found.condition) for found in self.findings(loss, norm)}
        return policies <= {"off", "warn"}

    def judge(self, step: int, loss: float, norm: float, *, updated: bool, overflowed: bool) -> None:
        """Raise the alarms of a step that was made, and take its numbers in."""
        found = {one.condition: one for one in self.findings(loss, norm, overflowed=overflowed)}
        watched: tuple[Condition, ...] = ("non_finite", "loss_spike", "grad_norm_spike")
        for condition in watched:
            if condition in found:
                self.monitor.raise_alarm(step, *found[condition])
            else:
                self.monitor.is_over(condition)
        if "non_finite" not in found:
            self.losses.add(loss, spikes="loss_spike" in found)
            if not overflowed:
                self.norms.add(norm, spikes="grad_norm_spike" in found)
        self.unmoved = 0 if updated else self.unmoved + 1
        most = self.table.skipped_in_a_row
        if self.unmoved and self.unmoved % most == 0:
            detail = "steps in a row updated nothing"
            self.monitor.raise_alarm(step, "skipped_steps", self.unmoved, most - 1, detail)
        elif not self.unmoved:
            self.monitor.is_over("skipped_steps")
