"""Stopping well: the wish, from wherever it comes, and how all ranks act on it at the same place.

A wish is a signal, a word of `launch run`, the file `stop` in the run directory, or a time that is nearly over
(`--max-minutes`). A handler only notes it. Ranks ask each other at points that all of them pass: in the two sums that
every step needs anyway, and about once a second, by a sum of three numbers, between the micro-steps of an accumulation
and the batches of an evaluation. Whoever waits for data asks itself meanwhile. Then `StopAgreedError` is raised on
every rank at once.

Imports neither torch nor deepspeed: the signals are noted before those are loaded.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_SECONDS = 1.0  # between two questions to all ranks: a sum over them costs some tenths of a millisecond
WAIT_SECONDS = 0.5  # between two looks of a rank that waits for data
# Behind a signal: DeepSpeed's launcher kills its ranks then, torchrun's and SLURM (KillWait) by default as well.
LAUNCHERS_GRACE_SECONDS = 30.0
# Behind the last save: the ranks' Python ends, launchers look once a second.
EXIT_SECONDS = 5.0
WRITTEN_BYTES_PER_SECOND = 1e8  # of a checkpoint, hashes included, where none was measured yet: a slow disk
RECENT = 16  # steps and saves whose slowest is what the next is expected to take


class StopAgreedError(Exception):
    """All ranks have agreed to stop here. Not a fault: the loop catches it, saves what is whole, and ends."""


class StopWantedError(Exception):
    """This rank wants to stop while it waits; the others hear of it in the next sum."""


class Deadline:
    """A time by which a run must be over, and what is expected of the work before it."""

    def __init__(self, at: float, first_save_bytes: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        """`at` in seconds since the epoch; `first_save_bytes` of all ranks' files of a checkpoint."""
        self.at = at
        self._clock = clock
        self._first_save_seconds = first_save_bytes / WRITTEN_BYTES_PER_SECOND
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)
        self.save_in_flight: Callable[[], bool] = lambda: False  # it has to end before the last can begin

    def measured_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def measured_save(self, seconds: float) -> None:
        self._saves.append(seconds)

    def is_near(self, *, before_step: bool) -> bool:
        """Whether a save must begin now to be over in time; `before_step`: whether it must if a step comes first."""
        save = max(self._saves, default=self._first_save_seconds)
        saves = 2 if self.save_in_flight() else 1
        step = max(self._steps, default=0.0) if before_step else 0.0
        return self._clock() + step + 1.5 * save * saves + EXIT_SECONDS >= self.at


class StopRequest:
    """One rank's wish to stop."""

    def __init__(self, stop_file: Path, deadline: Deadline | None = None) -> None:
        self.stop_file = stop_file
        self.deadline = deadline
        self.reason: str | None = None  # of the first wish
        self._interrupted = False
        self._speaks = True
        self._wakeup: socket.socket | None = None

    def install(self, *, speaks: bool = True) -> None:
        """Note signals from here on. Until `begin` they end the process at once, with exit code 0.

        Before the ranks have met there is nothing to save, and whoever waits for the others, within a library, runs no
        handler of Python's: a thread does it. `speaks`: it says so.
        """
        self._speaks = speaks
        woken, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        threading.Thread(target=_end_at_signal, args=(woken, speaks), name="early-signals", daemon=True).start()
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def begin(self) -> None:
        """The ranks have met: from here on all of them stop together."""
        signal.set_wakeup_fd(-1)
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.reason = self.reason or signal.Signals(number).name

    def ask(self, reason: str) -> None:
        """As a signal does, but for the reason: `launch run` asks so. Called on a thread."""
        if self._wakeup is not None:
            if self._speaks:
                os.write(2, f"stopped by {reason} before the run began\n".encode())
            os._exit(0)
        self.reason = self.reason or reason

    def wanted(self, *, before_step: bool = False) -> bool:
        """Whether this rank wants to stop here; `before_step`: where otherwise a step would follow."""
        with suppress(OSError):  # a file system that does not answer asks for nothing
            if self.reason is None and self.stop_file.exists():
                self.reason = f"the file {self.stop_file}"
        if self.reason is None and self.deadline is not None and self.deadline.is_near(before_step=before_step):
            self.reason = "--max-minutes"
        return self.reason is not None


def _end_at_signal(woken: socket.socket, speaks: bool) -> None:
    """Wait for the numbers of signals; none comes any more when the other end is closed."""
    with woken:
        while number := woken.recv(1):
            if number[0] in STOP_SIGNALS:
                if speaks:
                    os.write(2, f"stopped by {signal.Signals(number[0]).name} before the run began\n".encode())
                os._exit(0)


class Stopping:
    """The wishes of all ranks. Its methods are called on all ranks together, but for `wish`."""

    def __init__(self, request: StopRequest | None, sum_over_ranks: Callable[..., list[float]]) -> None:
        """`sum_over_ranks` gives each of its arguments summed over the ranks; without a `request` nobody wishes."""
        self.request = request
        self.sum_over_ranks = sum_over_ranks
        self.between_micro_steps = Poll(self)

    def wish(self, *, before_step: bool = False) -> bool:
        return self.request is not None and self.request.wanted(before_step=before_step)

    def heed(self, wishes: float) -> None:
        """Raise StopAgreedError where the sum of all ranks' wishes says so."""
        if wishes > 0:
            raise StopAgreedError


class Poll:
    """Asks all ranks every POLL_SECONDS or so, when called at a point that all of them pass equally often.

    How many calls lie between two questions follows from the seconds that all ranks together have measured, so that all
    of them ask at the same call. The first call asks.
    """

    def __init__(self, stopping: Stopping, clock: Callable[[], float] = time.monotonic) -> None:
        self._stopping = stopping
        self._clock = clock
        self._interval = self._left = 1
        self._asked_at = clock()

    def __call__(self) -> None:
        """StopAgreedError, on all ranks, where one of them wants to stop."""
        if self._stopping.request is None:
            return
        self._left -= 1
        if self._left:
            return
        passed = self._clock() - self._asked_at
        wishes, seconds, ranks = self._stopping.sum_over_ranks(self._stopping.wish(), passed, 1.0)
        fitting = int(POLL_SECONDS * self._interval * ranks / max(seconds, 1e-6))
        self._interval = self._left = max(1, min(fitting, 2 * self._interval))
        self._asked_at = self._clock()
        self._stopping.heed(wishes)


class Waitable(Protocol[T_co]):
    """What comes when it is ready."""

    def ready(self, seconds: float) -> bool: ...

    def __next__(self) -> T_co: ...


def heeding(batches: Waitable[T_co], request: StopRequest) -> Iterator[T_co]:
    """`batches`, one after the other. StopWantedError where this rank wants to stop and the next one is not there."""
    while True:
        while not batches.ready(WAIT_SECONDS):
            if request.wanted():
                raise StopWantedError
        yield next(batches)


def first_reason(reasons: Iterable[str | None]) -> str:
    """What a run was stopped by, of what its ranks say in their order."""
    told = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    rank, reason = told[0]
    return reason if rank == 0 else f"{reason} on rank {rank}"
