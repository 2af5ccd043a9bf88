"""A rank that hangs: found by a thread beside its training, which writes down where every thread of the rank stands.

When one rank hangs all of them stand still, the others in a collective that waits for it, so each writes its own stacks
at about the same time, and the first rank tells which ones wait for nobody: those hang. The run isn't ended here: the
collective's own time limit does that, or whatever was waited for comes after all.

A thread that holds Python's lock without ever giving it back keeps this one from running too: such a rank writes
nothing, and is the one whose stacks are missing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pretrain.run_directory import now

if TYPE_CHECKING:
    from pretrain.alive import SignOfLife
    from pretrain.engine import TrainingEngine
    from pretrain.health import Monitor

LOOKS = 10  # in the seconds that make a hang
LONGEST_LOOK_SECONDS = 5.0
# Files and functions in which a rank waits for the others, whatever library it got there by.
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
SYNCHRONISING = frozenset({"sum_over_ranks", "barrier", "gather", "broadcast"})


@dataclass(frozen=True)
class Progress:
    """How far a rank is: a hang is where all of this stays the same."""

    step: int  # that is being made
    doing: str
    signs: object = None


@dataclass(frozen=True)
class Hang:
    """`seconds` without a sign of getting on, and where ranks stood."""

    step: int  # the one that is not made
    seconds: float
    detail: str


class Stillness:
    """How long a rank has stood still, by looks at it now and then."""

    def __init__(self, progress: Progress, at: float, most_seconds: float) -> None:
        """No look counts for more than `most_seconds`: a machine that slept, or was stopped, did not hang meanwhile."""
        self.seconds = 0.0  # since it last got on
        self.longest_seconds = 0.0  # that it stood still and got on again
        self._seen, self._at, self._most_seconds = progress, at, most_seconds

    def look(self, progress: Progress, at: float) -> bool:
        """Whether it got on since the look before."""
        before, self._at = self._at, at
        if progress == self._seen:
            self.seconds += min(at - before, self._most_seconds)
            return False
        self.longest_seconds, self.seconds, self._seen = max(self.longest_seconds, self.seconds), 0.0, progress
        return True


class Watchdog:
    """One rank's. Entered, it watches until it is left."""

    def __init__(
        self,
        progress: Callable[[], Progress],
        folder: Path,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        seconds: float,
        found: Callable[[Hang], None] = lambda hang: None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """It hangs where `progress` stays the same for `seconds` more than it ever did before.

        `found` is called on the thread of each rank, on the first one with what all of them wrote; `over` when it gets
        on again.
        """
        self._progress, self._folder = progress, folder
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._seconds = seconds
        self._found, self._over = found, over
        self._look_seconds = min(seconds / LOOKS, LONGEST_LOOK_SECONDS)
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        still = Stillness(self._progress(), time.monotonic(), 2 * self._look_seconds)
        hangs = False
        while not self._ended.wait(self._look_seconds):
            progress = self._progress()
            if still.look(progress, time.monotonic()):
                if hangs:
                    self._over()
                hangs = False
            elif not hangs and self._is_hang(progress, still):
                hangs = True
                self._hangs(progress, still.seconds)

    def _is_hang(self, progress: Progress, still: Stillness) -> bool:
        """It stood for too long; or the first rank did, and this one stands as well."""
        if still.seconds >= self._seconds + still.longest_seconds:
            return True
        return self._rank > 0 and still.seconds >= self._seconds / 2 and self._path(progress.step, 0).exists()

    def _path(self, step: int, rank: int) -> Path:
        return stacks_path(self._folder, step, self._attempt, rank)

    def _hangs(self, progress: Progress, stood: float) -> None:
        step, path = progress.step, self._path(progress.step, self._rank)
        waits, place = _where(self._main)
        head = {
            "rank": self._rank, "host": platform.node(), "pid": os.getpid(), "at": now(), "step": step,
            "doing": progress.doing, "stands_seconds": round(stood, 1),
            "waits_for_other_ranks": waits, "in": place,
        }  # fmt: skip
        with suppress(OSError):  # a disk that is full, or does not answer, is perhaps what hangs
            path.parent.mkdir(exist_ok=True)
            with path.open("w") as file:
                file.write(json.dumps(head) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        if self._rank == 0:
            others = [self._path(step, rank) for rank in range(1, self._world_size)]
            for _ in range(LOOKS):  # they write theirs as they see this one's
                if all(other.exists() for other in others) or self._ended.wait(self._look_seconds):
                    break
        self._found(Hang(step, stood, self._told(step, head, path)))

    def _told(self, step: int, own: dict[str, object], path: Path) -> str:
        heads = [own]
        if self._rank == 0:
            heads = [own if rank == 0 else _head(self._path(step, rank)) or {"rank": rank}
                     for rank in range(self._world_size)]  # fmt: skip
        silent = [head["rank"] for head in heads if "in" not in head]
        hanging = [head for head in heads if head.get("waits_for_other_ranks") is False]
        told = [f"rank {one['rank']} on {one['host']} {one['doing']}, and stands in {one['in']}" for one in hanging[:3]]
        if silent:
            told.append(f"{_numbered(silent)} wrote no stacks here (stopped, stuck outside Python, or elsewhere)")
        if not told:
            told.append("every rank waits for another" if self._rank == 0 else f"rank {self._rank} waits for others")
        return f"no sign of getting on for {own['stands_seconds']} s: {'; '.join(told)}; stacks: {path.parent}"


def watching_for_hangs(
    life: SignOfLife, engine: TrainingEngine, folder: Path, monitor: Monitor
) -> AbstractContextManager[object]:
    """A Watchdog that tells the monitor; signs of getting on are those of `life`, and every micro-step."""
    table, ranks = monitor.table, engine.ranks
    if table.hang == "off":
        return nullcontext()

    def progress() -> Progress:
        step = (life.state.global_step if life.state is not None else 0) + 1
        return Progress(step, life.doing, (life.signs, engine.micro_steps))

    def found(hang: Hang) -> None:
        monitor.raise_alarm(hang.step, "hang", hang.seconds, table.hang_seconds, hang.detail)

    def over() -> None:
        monitor.is_over("hang")

    return Watchdog(
        progress, folder, attempt=life.attempt, rank=ranks.rank, world_size=ranks.world_size,
        seconds=table.hang_seconds, found=found, over=over,
    )  # fmt: skip


def stacks_path(folder: Path, step: int, attempt: int, rank: int) -> Path:
    return folder / f"step-{step:08d}-attempt-{attempt}-rank-{rank:05d}.stacks.txt"


def _numbered(ranks: Iterable[object]) -> str:
    named = list(map(str, ranks))
    shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
    return f"rank{'s' if len(named) > 1 else ''} {shown}"


def _head(path: Path) -> dict[str, object] | None:
    with suppress(OSError, ValueError), path.open() as file:
        head = json.loads(file.readline())
        return head if isinstance(head, dict) else None
    return None


def _where(thread: int | None) -> tuple[bool, str]:
    """Whether a thread waits for other ranks, and its innermost place that is no library's."""
    frame = sys._current_frames().get(thread or 0)
    waits, place = False, None
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        waits = waits or any(part in file.replace(os.sep, "/") for part in COLLECTIVES) or function in SYNCHRONISING
        if place is None and not _of_a_library(frame):
            place = f"{Path(file).name}:{frame.f_lineno} ({function})"
        frame = frame.f_back
    return waits, place or "no Python code"


def _of_a_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return "site-packages" in file or file.startswith((f"{sys.base_prefix}{os.sep}lib", "<"))
