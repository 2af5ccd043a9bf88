"""Which process may do which units: locks on ranges of a file's bytes, byte n standing for unit n.

The system lets go of them when a process ends, however it ends; they also hold between machines that share a folder,
where its filesystem has POSIX locks (NFS, Lustre, GPFS do; Lustre with the mount option `flock`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.unit import PrepareError, Workplace

_ORPHANS_SECONDS = 10.0


@dataclass(frozen=True)
class Span:
    """Units first to first + count - 1 of all units of the work; count None: all from `first` on."""

    first: int = 0
    count: int | None = None

    def lock(self, descriptor: int, how: int) -> bool:
        """Whether the lock was got. OSError: the filesystem has no locks."""
        if self.count == 0:
            return True
        try:
            fcntl.lockf(descriptor, how, self.count or 0, self.first)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True


ALL = Span()


@contextmanager
def setting_up(place: Workplace) -> Iterator[None]:
    """Only one process at a time writes the plan, makes folders, compares documents; others wait for it."""
    with (place.state / "setup.lock").open("ab") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def doing(place: Workplace, span: Span) -> Iterator[None]:
    """Hold some units against all other processes, once the workers of a killed one are gone as well.

    The workers hold a lock of their own, shared: they end by themselves within a moment of their parent's death.
    PrepareError: somebody else does one of them.
    """
    with (place.state / "lock").open("ab") as lock:
        if not span.lock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
            units = "there" if span == ALL else "some of these units"
            raise PrepareError(f"{place.out}: another `prepare` is writing {units}; wait for it to end")
        deadline = time.monotonic() + _ORPHANS_SECONDS
        with _workers_lock(place).open("ab") as workers:
            while not span.lock(workers.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                if time.monotonic() > deadline:
                    raise PrepareError(f"{place.out}: workers of a run that ended still write there; end them first")
                time.sleep(0.05)
        yield


def hold_as_worker(place: Workplace, span: Span) -> None:
    """Tell `doing` of this worker: until this process ends, nobody else gets these units."""
    span.lock(os.open(_workers_lock(place), os.O_RDONLY), fcntl.LOCK_SH)


def _workers_lock(place: Workplace) -> Path:
    return place.state / "workers.lock"
