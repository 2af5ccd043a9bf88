"""A split read as one row of tokens, whatever the shards it lies in.

Tokens are read with pread, not through a memory map: a file cut while it is in use then gives an error, not SIGBUS.
Linux can be asked for what is in memory and nothing else (RWF_NOWAIT): one call reads it, or says that it is on disk.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.open_files import OpenFiles
from data_pipeline.shards import HEADER_BYTES, DataFormatError, Split, read_index

Int64Array = npt.NDArray[np.int64]
Tokens: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_INDEXES_KEPT = 64


class TokenStream:
    """A split as one row of tokens, over the ends of shards and documents. Safe to use from several threads.

    Files are opened when they are read, and few are open at a time, see `open_files`; an index is read when it is first
    asked for.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.tokens = split.tokens
        self.documents = split.documents
        self._starts = _running_sum([shard.tokens for shard in split.shards])
        self._first_documents = _running_sum([shard.documents for shard in split.shards])
        self._width = split.shards[0].token_bytes if split.shards else 2
        self.dtype = np.dtype(f"<u{self._width}")
        self._paths = [str(shard.bin_path) for shard in split.shards]
        self._files = OpenFiles()
        self._ends: OrderedDict[int, Int64Array] = OrderedDict()
        self._lock = threading.Lock()
        self._without_waiting = getattr(os, "RWF_NOWAIT", 0)  # 0: this system cannot

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens start to stop (exclusive), shape (stop - start,), in the width they are stored in: uint16 or uint32.

        ValueError outside 0 <= start <= stop <= tokens; DataFormatError when a file has been cut meanwhile.
        """
        self._parts(start, stop)  # refuses what is outside
        row: Tokens = np.empty(stop - start, self.dtype)
        self.read_into(start, row)
        return row

    def read_into(self, start: int, row: Tokens) -> None:
        """Fill `row`, contiguous and of `dtype`, with the tokens from `start` on. Errors as `read`."""
        filled = 0
        for number, low, high in self._parts(start, start + len(row)):
            part = row[filled : filled + high - low]
            size = self._files.get(self._paths[number]).read_into(part.data, HEADER_BYTES + low * self._width)
            if size != part.nbytes:
                path = self.split.shards[number].bin_path
                raise DataFormatError(f"{path}: cut since it was opened: {size} of {part.nbytes} bytes read")
            filled += high - low

    def try_read_into(self, start: int, row: Tokens) -> bool:
        """`read_into` if that needs no disk; else False, and the system is asked to fetch what is missing."""
        parts = self._parts(start, start + len(row))
        if len(parts) == 1 and self._without_waiting:
            ((number, low, _),) = parts
            file, offset = self._files.get(self._paths[number]), HEADER_BYTES + low * self._width
            try:
                if file.read_into(row.data, offset, self._without_waiting) == row.nbytes:
                    return True
            except BlockingIOError:
                pass  # it lies on disk alone
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
                self._without_waiting = 0  # this filesystem cannot
        self.will_need(start, start + len(row))
        return False

    def will_need(self, start: int, stop: int) -> None:
        """Ask the system to fetch this range from disk in the background, where it knows how."""
        width = self._width
        for number, low, high in self._parts(start, stop):
            self._files.get(self._paths[number]).will_need((high - low) * width, HEADER_BYTES + low * width)

    def document_ends(self, start: int, stop: int) -> Int64Array:
        """The positions e, start < e <= stop, one past an EOS: ascending int64, counted over the whole stream."""
        found = []
        for number, low, high in self._parts(start, stop):
            ends = self._shard_ends(number)
            first, last = np.searchsorted(ends, [low, high], side="right")
            found.append(ends[first:last] + self._starts[number])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document(self, number: int) -> tuple[int, int]:
        """Where document `number` (from 0) starts and ends in the stream, its EOS included. ValueError outside."""
        if not 0 <= number < self.documents:
            raise ValueError(f"document {number} does not exist; this split has {self.documents:,} (0 is the first)")
        shard = bisect_right(self._first_documents, number) - 1
        ends, local = self._shard_ends(shard), number - self._first_documents[shard]
        low = int(ends[local - 1]) if local else 0
        return self._starts[shard] + low, self._starts[shard] + int(ends[local])

    def document_at(self, position: int) -> int:
        """The number of the document that holds the token at `position`. ValueError outside the stream."""
        if not 0 <= position < self.tokens:
            raise ValueError(f"position {position} does not exist; this split has {self.tokens:,} tokens")
        shard = bisect_right(self._starts, position) - 1
        local = np.searchsorted(self._shard_ends(shard), position - self._starts[shard], side="right")
        return self._first_documents[shard] + int(local)

    def close(self) -> None:
        """Close all files; the stream opens them again when it is read again."""
        self._files.close()
        with self._lock:
            self._ends.clear()

    def __del__(self) -> None:
        self.close()

    def _parts(self, start: int, stop: int) -> Sequence[tuple[int, int, int]]:
        """(shard, low, high) for each shard that holds part of the range; low and high within the shard.

        ValueError outside the stream.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"tokens {start} to {stop} are outside a stream of {self.tokens}")
        if start == stop:
            return ()
        number = bisect_right(self._starts, start) - 1
        base = self._starts[number]
        if stop <= self._starts[number + 1]:  # as nearly always
            return ((number, start - base, stop - base),)
        parts = []
        while start < stop:
            base, end = self._starts[number], min(stop, self._starts[number + 1])
            if start < end:
                parts.append((number, start - base, end - base))
            start, number = end, number + 1
        return parts

    def _shard_ends(self, number: int) -> Int64Array:
        with self._lock:
            if number not in self._ends:
                while len(self._ends) >= _INDEXES_KEPT:
                    self._ends.popitem(last=False)
                self._ends[number] = read_index(self.split.shards[number].idx_path)[0]
            self._ends.move_to_end(number)
            return self._ends[number]


def _running_sum(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
