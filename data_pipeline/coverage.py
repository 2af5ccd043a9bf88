"""Does every window come exactly once in each epoch, whatever the number of ranks? Counted, not argued.

All sample numbers that a plan reads go through the order's own arithmetic, in the slices in which the ranks read them,
and each window sets one bit. As many bits as reads: no window twice. As many bits as windows: none left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.loader import samples_of_micro_steps
from data_pipeline.order import MAX_PERIOD, SampleOrder
from data_pipeline.shards import DataFormatError

RANKS = (1, 2, 3, 4)
_SAMPLES_AT_ONCE = 1 << 18

Int64Array = npt.NDArray[np.int64]


class CoverageError(DataFormatError):
    """A window that is read twice in an epoch, or not at all. It would be a fault of the order of data."""


@dataclass(frozen=True)
class Coverage:
    """What one number of ranks reads of a source: `epochs` whole ones, and `windows_begun` of the epoch under way."""

    ranks: int
    source: str
    windows: int
    epochs: int
    windows_begun: int


def prove_coverage(
    order: SampleOrder,
    samples: int,
    *,
    micro_batch_size: int,
    ranks: Sequence[int] = RANKS,
    on_samples: Callable[[int], None] | None = None,
) -> list[Coverage]:
    """Read the first `samples` samples on paper with each number of ranks, and count every source's windows.

    Memory: a bit for each window of an epoch under way. Time: some tenths of a microsecond a sample and number of
    ranks. CoverageError names the ranks, the source and the epoch in which a window is missing or comes twice.
    """
    found = []
    for world_size in ranks:
        counts = {name: _Epochs(name, windows, world_size) for name, windows in order.windows.items() if windows}
        for block in _slices(samples, world_size, micro_batch_size):
            addresses = order.locate_many(block)
            for number, name in enumerate(addresses.names):
                mine = addresses.sources == number
                if mine.any():
                    counts[name].add(addresses.epochs[mine], addresses.windows[mine])
            if on_samples is not None:
                on_samples(len(block))
        found += [one.result() for one in counts.values()]
    return found


def samples_of_an_epoch(order: SampleOrder) -> int:
    """The smallest number of samples after which every source that is read has been gone through at least once."""

    def is_enough(samples: int) -> bool:
        return all(count >= order.windows[name] for name, count in order.counts(samples).items() if name in read)

    read = {name for name in order.windows if order.epochs(MAX_PERIOD)[name] > 0}
    high = 1
    while not is_enough(high):
        high *= 2
    return bisect_left(range(high), True, key=is_enough)


def _slices(samples: int, world_size: int, micro_batch_size: int) -> Iterator[Int64Array]:
    """The sample numbers below `samples` in blocks of whole micro-steps, within each by rank, as loaders read them."""
    at_once = max(1, _SAMPLES_AT_ONCE // (world_size * micro_batch_size))
    micro_steps = -(-samples // (world_size * micro_batch_size))
    for first in range(0, micro_steps, at_once):
        numbers = np.arange(first, min(first + at_once, micro_steps), dtype=np.int64)
        slices = [
            samples_of_micro_steps(numbers, 0, rank, world_size, micro_batch_size).reshape(-1)
            for rank in range(world_size)
        ]
        block = np.concatenate(slices)
        yield block[block < samples]


class _Epochs:
    """The windows of one source that have come, a bit each, for every epoch under way."""

    def __init__(self, name: str, windows: int, ranks: int) -> None:
        self.name, self.windows, self.ranks = name, windows, ranks
        self.whole = 0
        self._open: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}

    def add(self, epochs: Int64Array, windows: Int64Array) -> None:
        for epoch in np.unique(epochs).tolist():
            mine = windows[epochs == epoch]
            reads, bits = self._open.get(epoch) or (0, np.zeros(-(-self.windows // 8), np.uint8))
            np.bitwise_or.at(bits, mine >> 3, np.left_shift(1, mine & 7).astype(np.uint8))
            self._open[epoch] = reads + len(mine), bits
            if reads + len(mine) == self.windows:
                self._check(epoch)
                del self._open[epoch]
                self.whole += 1

    def _check(self, epoch: int) -> int:
        reads, bits = self._open[epoch]
        different = int.from_bytes(bits.tobytes(), "little").bit_count()
        if different != reads or reads > self.windows:
            raise CoverageError(
                f"{self.ranks} ranks, source {self.name}, epoch {epoch}: {reads:,} windows were read and only"
                f" {different:,} of {self.windows:,} are different"
            )
        return reads

    def result(self) -> Coverage:
        """What was read in the end. CoverageError unless all epochs but the last are whole."""
        begun = [self._check(epoch) for epoch in self._open]
        if len(begun) > 1 or any(epoch != self.whole for epoch in self._open):
            raise CoverageError(f"{self.ranks} ranks, source {self.name}: epochs {sorted(self._open)} are not whole")
        return Coverage(self.ranks, self.name, self.windows, self.whole, sum(begun))
