"""Long work seen from outside, reading and training: a bar on a terminal, in a log a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from tokenizer.training_process import Progress
from tokenizer.training_report import duration

LINE_EVERY_SECONDS = 10.0


@contextmanager
def reading_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Give a function that hears how many bytes of files were read: a bar on stderr, else a line every ten seconds."""
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total_bytes)
            yield lambda count: bar.advance(task, count)
        return

    started_at = said_at = time.monotonic()
    done_bytes = 0

    def hear(count: int) -> None:
        nonlocal done_bytes, said_at
        done_bytes += count
        now = time.monotonic()
        if now - said_at >= LINE_EVERY_SECONDS:
            said_at, rate = now, done_bytes / (now - started_at)
            left_seconds = (total_bytes - done_bytes) / max(rate, 1)
            print(
                f"{what}: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB of files, "
                f"{rate / 1e6:.1f} MB/s, {left_seconds:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield hear


class Display(Protocol):
    """Where lines for people and the progress go."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def show(self, progress: Progress) -> None:
        """How far the training is now."""


@contextmanager
def training_progress() -> Iterator[Display]:
    """A display on stderr."""
    if sys.stderr is not None and sys.stderr.isatty():  # None as `2>&-` leaves it
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.close()
    else:
        yield _Lines()


class _Clock:
    """Time since the first look, and what is left by the share done."""

    def __init__(self) -> None:
        self._started_at: float | None = None

    def read(self, share: float) -> str:
        now = time.monotonic()
        self._started_at = now if self._started_at is None else self._started_at
        gone = now - self._started_at
        left = f", about {duration(gone / share * (1 - share))} left" if share >= 0.05 and gone >= 1 else ""
        return f"{duration(gone)}{left}"


class _Lines:
    def __init__(self) -> None:
        self._clock = _Clock()
        self._said_at: float | None = None

    def say(self, line: str) -> None:
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        time_line = self._clock.read(progress.share)
        now = time.monotonic()
        self._said_at = now if self._said_at is None else self._said_at
        if now - self._said_at >= LINE_EVERY_SECONDS:
            self._said_at = now
            self.say(f"training: {progress.share:.0%}, {progress.stage}, {time_line}")


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._clock = _Clock()
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._task = self._bars.add_task("", total=1.0)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def show(self, progress: Progress) -> None:
        self._bars.start()  # not before there is something to show: the bar of the reading comes first
        description = f"{progress.stage}, {self._clock.read(progress.share)}"
        self._bars.update(self._task, completed=progress.share, description=description.replace("[", "\\["))

    def close(self) -> None:
        self._bars.stop()
