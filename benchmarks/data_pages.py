"""The system's memory of files: putting it out, and seeing what is still there. Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def drop_pages(paths: Iterable[Path]) -> float:
    """Have the system forget what it has read of these files; returns the share of their pages that it still holds.

    Close to 0 on a disk; 1 where files live in memory (tmpfs). A page that is mapped or not written yet stays: close
    and unmap the files first. No right beyond reading them is needed. What a disk, or the host of a virtual machine,
    remembers by itself is out of reach.
    """
    paths = list(paths)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    held, pages = map(sum, zip(*map(_pages, paths), strict=True))
    return held / max(1, pages)


def _pages(path: Path) -> tuple[int, int]:
    """(pages of a file in memory, all its pages)."""
    size = path.stat().st_size
    if not size:
        return 0, 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        residence = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(residence.ctypes.data)
        )
        del view  # or the map could not be closed
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}", str(path))
        return int(np.count_nonzero(residence & 1)), len(residence)
