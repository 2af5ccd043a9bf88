"""Where the time of an attempt goes: every moment of it belongs to one part, so the parts add up to the wall.

    with clock.step():
        batch = next(batches)
        clock.lap("data")          # what has passed since the lap before was spent on data
        ...
    with clock.during("save"):
        ...

What no lap claims is "other". Two things are none of the run's doing and stand apart as "paused": that its process was
stopped (SIGSTOP, a debugger), and that the machine slept.

A GPU works behind the host, which is soon ahead of it. So within a step laps are CUDA events, read when the step's loss
has been read, which waits for the GPU anyway: none of this waits for it once more. The last lap of a step gets what
the events leave of the host's time, so a step's parts add up as well.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

Part = Literal["start", "data", "forward", "backward", "optimizer", "evaluation", "save", "other", "paused"]
PARTS: tuple[Part, ...] = get_args(Part)
STEP_PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "other")

TICK_SECONDS = 0.1
PAUSE_SECONDS = 1.0  # shorter ones are noise of a busy machine
IDLE = 0.05  # of a pause at most so much is CPU time of the process

SLOWER = 1.5  # a step that takes so many times the usual one is warm-up, if no usual one came before
MOST_WARM_UP_STEPS = 20


def seconds_now() -> float:
    """Of a clock that goes on while the machine sleeps, where the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.perf_counter()


class Pauses:
    """How long this process has stood still for no reason of its own.

    A thread looks ten times a second. Where the look before is a second or more ago, and the process had no CPU time
    since, it was stopped; one that only waits (for a disk, other ranks, a GPU) still looks.
    """

    def __init__(self, now: Callable[[], float] = seconds_now, cpu: Callable[[], float] = time.process_time) -> None:
        self._now, self._cpu = now, cpu
        self._lock = threading.Lock()
        self.seconds = 0.0  # of all pauses seen so far
        self._seen = (now(), cpu())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> float:
        """Seconds of all pauses so far. From any thread."""
        with self._lock:
            at, cpu = self._now(), self._cpu()
            gap, worked = at - self._seen[0], cpu - self._seen[1]
            if gap >= PAUSE_SECONDS and worked < IDLE * gap and self._thread.is_alive():
                self.seconds += gap
            self._seen = (at, cpu)
            return self.seconds

    def _watch(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.look()


class Clock:
    """One rank's, from its making to now. A context manager: outside of it, pauses are not told apart."""

    def __init__(
        self,
        device: torch.device | None = None,
        now: Callable[[], float] = seconds_now,
        pauses: Pauses | None = None,
    ) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.step_seconds: dict[Part, float] = dict.fromkeys(STEP_PARTS, 0.0)  # of the last step, without pauses
        self._on_gpu = device is not None and device.type == "cuda"
        self._now = now
        self._pauses = pauses or Pauses()
        self._paused = 0.0
        self._began = self._mark = now()
        self._in_step = False
        self._rest: Part = "start"  # what time belongs to that no lap claims
        self._events: list[tuple[Part, Any]] = []

    def __enter__(self) -> Clock:
        self._pauses.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.lap(self._rest)
        self._pauses.__exit__()

    @property
    def wall_seconds(self) -> float:
        """From the beginning to the last lap: the sum of all parts."""
        return self._mark - self._began

    def lap(self, part: Part) -> float:
        """What has passed since the lap before belonged to `part`; its seconds, without pauses."""
        if self._in_step and self._on_gpu:
            self._record(part)
            return 0.0  # not known yet
        return self._split(lambda seconds: {part: seconds})[part]

    def laps(self) -> dict[Part, float]:
        """All parts until now; the rest since the last lap goes where nothing claims it."""
        self.lap(self._rest)
        return dict(self.seconds)

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """What is done inside belongs to `part`, also where it raises."""
        self.lap(self._rest)
        try:
            yield
        finally:
            self.lap(part)

    @contextmanager
    def step(self) -> Iterator[None]:
        """An optimizer step, with laps inside; then `step_seconds` has its parts. Where it raises, it is "other"."""
        self.lap(self._rest)
        self._rest = "other"
        before = dict(self.seconds)
        self._in_step = True
        if self._on_gpu:
            self._events = []
            self._record("other")
        try:
            yield
        finally:
            self._in_step = False
            self._split(self._by_events if self._on_gpu else lambda seconds: {"other": seconds})
            self.step_seconds = {part: self.seconds[part] - before[part] for part in STEP_PARTS}

    @property
    def last_step(self) -> float:
        """Seconds of the last step, pauses left out."""
        return sum(self.step_seconds.values())

    def _split(self, shares: Callable[[float], dict[Part, float]]) -> dict[Part, float]:
        """Add the time since the mark, less what was a pause, to its parts; move the mark."""
        at = self._now()
        passed = at - self._mark
        paused = self._pauses.look() if passed >= PAUSE_SECONDS else self._pauses.seconds
        pause = min(paused - self._paused, passed)
        self._mark, self._paused = at, paused
        self.seconds["paused"] += pause
        found = shares(passed - pause)
        for part, seconds in found.items():
            self.seconds[part] += seconds
        return found

    def _record(self, part: Part) -> None:
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((part, event))

    def _by_events(self, seconds: float) -> dict[Part, float]:
        laps: list[tuple[Part, float]] = []
        for (_, before), (part, event) in pairwise(self._events):
            if not event.query():
                break
            laps.append((part, before.elapsed_time(event) / 1000))
        return fitted(laps, seconds)


def fitted(laps: Sequence[tuple[Part, float]], seconds: float) -> dict[Part, float]:
    """The parts of a step that took `seconds` by the host, out of laps by another clock, the GPU's.

    The last lap has what they leave. Where they come to more (the GPU's clock goes on in a pause, which `seconds` does
    not count), the longest parts give it up.
    """
    parts: dict[Part, float] = dict.fromkeys(STEP_PARTS, 0.0)
    for part, passed in laps:
        parts[part] += passed
    left = seconds - sum(parts.values())
    if left >= 0:
        parts[laps[-1][0] if laps else "other"] += left
        return parts
    for part in sorted(parts, key=lambda one: -parts[one]):
        taken = min(-left, parts[part])
        parts[part] -= taken
        left += taken
    return parts


# ---------------------------------------------------------------- what is usual


def warm_up_steps(paces: Sequence[float]) -> int:
    """How many of an attempt's first steps are not like the rest: compilation, first touches of memory, full caches.

    `paces`: seconds a sample. The first always is, unless it is the only one, and each behind it that takes SLOWER
    times the median of what follows, up to MOST_WARM_UP_STEPS.
    """
    if len(paces) < 2:
        return 0
    for first in range(1, min(len(paces), MOST_WARM_UP_STEPS)):
        usual = statistics.median(paces[first : first + MOST_WARM_UP_STEPS])
        if paces[first] <= SLOWER * usual:
            return first
    return min(len(paces) - 1, MOST_WARM_UP_STEPS)
