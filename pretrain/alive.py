"""A rank's sign of life: RUN/alive/rank-00000.json, written once a second or so by a thread beside the training.

It says who the rank is, at which step, and what it has been doing since when. So whoever watches a run that stands
still sees which machine is gone (its sign grows old) and which rank the others wait for, and `launch stop` finds the
process.

A sign is written in place, in one piece of fixed size, without fsync: it costs some tens of microseconds, and all ranks
together never write more than SIGNS_A_SECOND. What cannot be written is passed over: training goes on.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from pretrain.state import TrainState

T = TypeVar("T")
Doing = Literal["starts", "waits for data", "trains", "evaluates", "saves", "ends"]

INTERVAL_SECONDS = 1.0
SIGNS_A_SECOND = 100  # of all ranks, on a file system that they share
SIGN_BYTES = 384


class SignOfLife:
    """One rank's, from entering to leaving; the last one stays, saying "ends"."""

    def __init__(self, path: Path, *, attempt: int, rank: int, world_size: int) -> None:
        self.state: TrainState | None = None  # what the run counts; the loop changes it
        self.attempt = attempt
        self._path = path
        self._who: dict[str, Any] = {
            "attempt": attempt,
            "rank": rank,
            "host": platform.node(),
            "pid": os.getpid(),
            "start_ticks": start_ticks(),
            "every_seconds": max(INTERVAL_SECONDS, world_size / SIGNS_A_SECOND),
        }
        self._doing: tuple[Doing, float] = ("starts", time.time())
        self.signs = 0  # given so far, by `does` and `goes_on`
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="sign-of-life", daemon=True)

    def __enter__(self) -> SignOfLife:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.does("ends")
        self._ended.set()
        self._thread.join()
        self._write()

    def does(self, what: Doing) -> None:
        self._doing = (what, time.time())
        self.signs += 1

    @property
    def doing(self) -> Doing:
        return self._doing[0]

    def goes_on(self) -> None:
        """It still does what it said last."""
        self.signs += 1

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """`batches`; while the next one is not there, the rank waits for data."""
        while True:
            self.does("waits for data")
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.does("trains")
            yield batch

    def _write_on(self) -> None:
        while not self._ended.wait(self._who["every_seconds"]):
            self._write()

    def _write(self) -> None:
        doing, since = self._doing
        step = None if self.state is None else self.state.global_step
        sign = {**self._who, "step": step, "doing": doing, "since": round(since, 3), "at": round(time.time(), 3)}
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            # Opened and closed each time: that is when network file systems show a change to others.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, json.dumps(sign).ljust(SIGN_BYTES - 1).encode()[: SIGN_BYTES - 1] + b"\n", 0)
            finally:
                os.close(descriptor)


def start_ticks() -> int | None:
    """When this process began, in clock ticks since the machine's start (proc(5)): with its number, it is no other.

    None where the system has no /proc.
    """
    with suppress(OSError):
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return None
