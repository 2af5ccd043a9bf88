"""What one rank writes of a checkpoint, at once or beside training: no rank waits for another here.

A write that fails is an answer and no exception: the others must hear of it, and training can go on without.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from data_pipeline.durable import file_sha256
from pretrain.device_memory import show_size
from pretrain.out_of_memory import is_out_of_memory

T = TypeVar("T")

FULL = "the disk is full"


class Job(Generic[T]):
    """A function at work in a thread of its own, or called at once."""

    def __init__(self, function: Callable[[], T], *, in_thread: bool) -> None:
        self._function: Callable[[], T] | None = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        if in_thread:  # a daemon: a process that ends by an error must not stay for a disk that does not answer
            threading.Thread(target=self._work, name="checkpoint", daemon=True).start()
        else:
            self._work()

    def _work(self) -> None:
        try:
            assert self._function is not None
            self._result.append(self._function())
        except BaseException as error:
            self._error = error  # raised where the result is asked for
        finally:
            self._function = None  # and all that it holds
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """What the function returned, or raised; waits for its end."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


@dataclass(frozen=True)
class Written:
    """What became of one rank's files: by name `bytes` and `sha256`, or why they cannot be used."""

    files: dict[str, dict[str, int | str]]
    failure: str | None
    seconds: float


def write_files(files: Mapping[str, Callable[[Path], None]], folder: Path, abandoned: threading.Event) -> Written:
    """Write each file below `folder`, to the disk itself, and hash it; leave off where that is `abandoned`."""
    started = time.perf_counter()
    receipts: dict[str, dict[str, int | str]] = {}
    failure = None
    for name, write in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            receipts[name] = {"bytes": path.stat().st_size, "sha256": _hash_durable(path)}
        except (OSError, RuntimeError) as error:  # torch, of a file that it could not write
            if is_out_of_memory(error):
                raise
            failure = why(error, path)
        if abandoned.is_set():
            failure = "the run ended before it was written"
        if failure is not None:
            break
    return Written(receipts, failure, time.perf_counter() - started)


def why(error: Exception, path: Path) -> str:
    """What stood against writing `path`, in a few words: the libraries have words of their own, some without a disk."""
    free_bytes = _free_bytes(path)
    free = "" if free_bytes is None else f", {show_size(free_bytes)} free"
    full = isinstance(error, OSError) and is_full(error)
    if full or (free_bytes is not None and free_bytes < 2**20) or "No space left" in str(error):
        return f"{path}: {FULL}{free}"
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path}: {' '.join(told.split())}{free}"


def _free_bytes(path: Path) -> int | None:
    """What is free on the disk of a path that may not exist; None where the disk does not say: it may be gone."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


def is_full(error: OSError) -> bool:
    """Whether there was no room, or a user's share of it is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _hash_durable(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_sha256(path)
