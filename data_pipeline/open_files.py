"""Files kept open for reading: those that all streams and plans of a process have read last, however many there are.

A data set has thousands of shards, and a process may open a thousand files. The ones that have not been read for the
longest time are closed, and opened again when they are wanted.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections import OrderedDict

_MOST = 2048
_OWNERS = itertools.count()
_LOCK = threading.RLock()  # since an owner may be collected, and closed, within any of the lines below
_READ_LAST: OrderedDict[tuple[int, str], OpenFile] = OrderedDict()


class OpenFile:
    """A file open for reading; closed when nobody holds it any longer, so never under a read in another thread."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: str) -> None:
        self._descriptor = -1  # for __del__, where opening fails
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, size: int, offset: int) -> bytes:
        """As os.pread."""
        return os.pread(self._descriptor, size, offset)

    def read_into(self, buffer: memoryview, offset: int, flags: int = 0) -> int:
        """As os.preadv: how many bytes of `buffer` were filled."""
        return os.preadv(self._descriptor, (buffer,), offset, flags)

    def will_need(self, size: int, offset: int) -> None:
        """Ask the system to fetch these bytes in the background, where it knows how."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)


class OpenFiles:
    """The open files of one owner, who finds at a path what stood there when he opened it. For several threads.

    All owners together keep at most half of the files that the process may open, and at most 2,048.
    """

    def __init__(self) -> None:
        self._owner = next(_OWNERS)

    def get(self, path: str) -> OpenFile:
        """The file, opened if it is not. OSError: it cannot be."""
        key = self._owner, path
        with _LOCK:
            file = _READ_LAST.get(key)
            if file is not None:
                _READ_LAST.move_to_end(key)
                return file
            file = _READ_LAST[key] = OpenFile(path)
            while len(_READ_LAST) > _allowed():
                _READ_LAST.popitem(last=False)
            return file

    def close(self) -> None:
        """Close all; those that are wanted again are opened again."""
        with _LOCK:
            for key in list(_READ_LAST):
                if key[0] == self._owner:
                    _READ_LAST.pop(key, None)


def _unlock() -> None:
    """In a forked process, whose parent may have held the lock in another thread."""
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def _allowed() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(_MOST, allowed // 2)) if allowed != resource.RLIM_INFINITY else _MOST
