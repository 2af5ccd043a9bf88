"""How far a run is, for the person who watches: a bar on a terminal, else plain lines; and when it will be done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from pretrain.clock import warm_up_steps

RECENT = 200  # steps whose mean is the pace of those to come


class ProgressView:
    """What is said, on standard error. On a terminal the newest figures stand below a bar, and lines go above it."""

    def __init__(self, steps: int, *, active: bool) -> None:
        """`steps` of the whole run. One that is not `active` (of another rank than the first) says nothing."""
        self._active = active
        self._steps = steps
        self._live: Live | None = None

    def open(self) -> None:
        """On a terminal, show the bar; until then, and elsewhere, there are lines."""
        if self._active and sys.stderr.isatty():
            share = TextColumn("{task.percentage:.1f} %")
            self._bar = Progress(TextColumn("step {task.completed}/{task.total}"), BarColumn(), share)
            self._task = self._bar.add_task("train", total=self._steps)
            self._live = Live(self._bar, console=Console(stderr=True), refresh_per_second=4)
            self._live.start()

    @property
    def is_live(self) -> bool:
        """Whether figures are shown behind every step, due or not."""
        return self._live is not None

    def say(self, message: str) -> None:
        """One line."""
        if self._live is not None:
            self._live.console.print(message, markup=False, highlight=False)
        elif self._active:
            print(message, file=sys.stderr, flush=True)

    def step(self, step: int, figures: Sequence[str], *, due: bool) -> None:
        """A step was made; in a log it is told where that is `due`."""
        if self._live is not None:
            self._bar.update(self._task, completed=step)
            self._live.update(Group(self._bar, Text("  ".join(figures))))
        elif due:
            self.say(f"step {step}/{self._steps}  {'  '.join(figures)}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def format_duration(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


# ---------------------------------------------------------------- the time left


@dataclass
class Repeated:
    """Something that a run does every so many steps, and at its end: an evaluation, a save."""

    every_steps: int
    guess: Callable[[], float] = lambda: 0.0  # seconds, while none was measured
    seconds: list[float] = field(default_factory=list)
    done_step: int = -1  # behind which it was last done

    def was_done(self, step: int, seconds: float) -> None:
        self.done_step = step
        self.seconds.append(seconds)

    def left(self, step: int, end: int) -> int:
        """How many are still to come once `step` is made, the one behind it too if that was not done yet."""
        done = step if self.done_step >= step else step - 1
        if done >= end:
            return 0
        return end // self.every_steps - done // self.every_steps + (end % self.every_steps != 0)

    def seconds_left(self, step: int, end: int) -> float:
        counted = self.seconds[1:] or self.seconds  # in the first one something may be compiled
        each = sum(counted) / len(counted) if counted else self.guess()
        return each * self.left(step, end)


class Pace:
    """How fast the steps of an attempt are, once they are steady (`clock.warm_up_steps`), and so the time left.

    Steps count by their samples, whose number may grow on the way. To a step belongs what was done between it and the
    one before (logs, plots), but no evaluation, save or pause.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._samples: list[int] = []

    def add(self, seconds: float, samples: int) -> None:
        self._seconds.append(seconds)
        self._samples.append(samples)

    @property
    def steps(self) -> int:
        return len(self._seconds)

    @property
    def seconds_a_sample(self) -> float:
        """NaN before the first step."""
        if not self._seconds:
            return float("nan")
        beginning = slice(2 * RECENT)  # warm-up ends long before
        paces = [seconds / samples for seconds, samples in zip(self._seconds[beginning], self._samples, strict=False)]
        counted = slice(max(warm_up_steps(paces), len(self._seconds) - RECENT), None)
        return sum(self._seconds[counted]) / sum(self._samples[counted])

    def seconds_left(self, samples: int, step: int, end: int, repeated: Sequence[Repeated] = ()) -> float:
        """Until `end`, with `samples` still to learn from behind `step`."""
        return self.seconds_a_sample * samples + sum(one.seconds_left(step, end) for one in repeated)
