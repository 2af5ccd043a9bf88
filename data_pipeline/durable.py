"""Files that are whole or not there: written aside, synced, renamed, and the folder synced; and their SHA-256."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROCESS = secrets.token_hex(
    4
)  # process ids are of one machine; a forked process has this of its parent, and its own id


def sync_folder(folder: Path) -> None:
    """Make renames within a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Move a whole, synced file to its name, durably. Both stand in one folder."""
    temporary.replace(final)
    sync_folder(final.parent)


def temporary_name(final: Path) -> Path:
    """A name beside `final` that no reader takes for data and no other process uses, on this machine or another."""
    return final.with_name(f".{final.name}.{os.getpid()}-{_PROCESS}.tmp")


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that at any kill point either the old or the whole new content stands there."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def telling_full_disk(place: Path) -> Iterator[None]:
    """What is written in the block goes to `place`: a full disk is told with this name, since a write knows none."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(f"{place}: {error.strerror}; make room and start again") from None


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hex; `on_bytes` hears of every piece read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_bytes is not None:
                on_bytes(count)
    return digest.hexdigest()
