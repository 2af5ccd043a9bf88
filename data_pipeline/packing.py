"""How rows of seq_len slots (a slot: an input and its target) are made of documents, as arithmetic: three packings.

``concat``: windows over the stream, which cut documents wherever a window ends. Attention crosses their ends.

``concat_masked``: the same windows in the same order, but attention stays within a document and positions restart with
it. EOS stands at each document's end and nowhere else, so a new segment begins *at* every EOS among the inputs: there
it is the context of the document that follows, as generation begins with EOS as its context too. The target at that
slot is the document's first token, which is so predicted from EOS alone, and its own EOS is the target of its last
token, still in its segment. So every target is predicted from its own document, and none has to be left out. A window
that begins within a document begins with a segment that lacks what came before.

``best_fit``: rows of whole documents (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", ICML), masked
as above. A document of L tokens, its EOS included, takes L slots: its tokens as targets, and as inputs the EOS before
it and its first L - 1 tokens. One longer than seq_len is cut into full rows and one remainder, the only cuts there
are; a later piece has the token before it as context. Best fit decreasing: longest pieces first, each into the row with
the least room that still holds it, else into a new one. Slots left over are padding: inputs EOS, targets ignored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_pipeline.order import PackingMode
from data_pipeline.shards import Split
from data_pipeline.stream import TokenStream

Int64Array = npt.NDArray[np.int64]


def number_documents(inputs: Int64Array, eos_id: int) -> Int64Array:
    """Which document each input belongs to, counted from 0 along its row: (rows, seq_len), a new one at every EOS."""
    numbers: Int64Array = np.cumsum(inputs == eos_id, axis=1)
    return numbers


# ---------------------------------------------------------------- best fit decreasing


@dataclass(frozen=True)
class PackedRows:
    """Pieces of a stream by row: row r holds pieces firsts[r] to firsts[r + 1] - 1.

    The targets of piece p are tokens starts[p] to starts[p] + sizes[p] - 1. Rows follow the first token in them, pieces
    of a row the stream. int64 (pieces,), (pieces,) and (rows + 1,).
    """

    starts: Int64Array
    sizes: Int64Array
    firsts: Int64Array


class Move(NamedTuple):
    """`rows` rows with `room` free slots each (seq_len: new ones) take `each` pieces of `size` slots each."""

    size: int
    room: int
    rows: int
    each: int


def pack_best_fit(split: Split, seq_len: int) -> PackedRows:
    """The rows of a split. O(n log n) in its documents, which are read from the .idx files alone; see the docstring.

    Of rows with equal room the one that came to it first is taken, of equal pieces the one first in the stream.
    Memory: some 60 bytes a document, and 16 for each full row of a long one.
    """
    starts, sizes = _pieces(split, seq_len)
    rows = _assign(sizes, seq_len)
    count = int(rows.max(initial=-1)) + 1
    first_piece = np.full(count, len(rows))
    np.minimum.at(first_piece, rows, np.arange(len(rows)))
    numbers = np.empty(count, np.int64)
    numbers[np.argsort(first_piece)] = np.arange(count)
    rows = numbers[rows]
    by_row = np.argsort(rows, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    return PackedRows(starts[by_row], sizes[by_row], firsts)


def best_fit_moves(counts: Mapping[int, int], seq_len: int) -> Iterator[Move]:
    """Best fit decreasing by numbers alone, from how many pieces there are of each size, in moves of many at a time.

    A row with the least room that holds a piece goes on taking pieces of that size until it holds no more: after the
    first its room is less still. So all rows of one room can be filled at once. That leaves fewer moves than
    3 x sizes x log2(seq_len), however many pieces there are: each move that empties a room more than halves it.
    """
    with_room: Counter[int] = Counter()  # rows by their free slots, full ones left out
    rooms: list[int] = []  # those that occur, ascending
    for size in sorted(counts, reverse=True):
        left = counts[size]
        while left:
            place = bisect_left(rooms, size)
            is_new = place == len(rooms)
            room = seq_len if is_new else rooms[place]
            each = min(room // size, left)
            rows = left // each if is_new else min(left // each, with_room[room])
            yield Move(size, room, rows, each)
            left -= rows * each
            if not is_new:
                with_room[room] -= rows
                if not with_room[room]:
                    rooms.pop(place)
            rest = room - each * size
            if rest:
                if not with_room[rest]:
                    insort(rooms, rest)
                with_room[rest] += rows


def _pieces(split: Split, seq_len: int) -> tuple[Int64Array, Int64Array]:
    """First target and number of targets of every piece, in the order of the stream."""
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for begins, ends in _documents(split):
        counts = -(-(ends - begins) // seq_len)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts.append(np.repeat(begins, counts) + number * seq_len)
        sizes.append(np.minimum(np.repeat(ends, counts) - starts[-1], seq_len))
    return np.concatenate(starts), np.concatenate(sizes)


def _assign(sizes: Int64Array, seq_len: int) -> Int64Array:
    """The row of every piece, rows numbered as they are begun."""
    by_size = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    waiting: defaultdict[int, deque[Int64Array]] = defaultdict(deque)  # by room, blocks of row numbers
    begun = placed = 0
    for move in best_fit_moves(_counted(sizes), seq_len):
        if move.room == seq_len:
            taken = np.arange(begun, begun + move.rows)
            begun += move.rows
        else:
            taken = _take(waiting[move.room], move.rows)
        pieces = by_size[placed : placed + move.rows * move.each]
        rows[pieces] = np.repeat(taken, move.each)
        placed += len(pieces)
        waiting[move.room - move.each * move.size].append(taken)
    return rows


def _counted(sizes: Int64Array) -> Counter[int]:
    values, times = np.unique(sizes, return_counts=True)
    return Counter(dict(zip(values.tolist(), times.tolist(), strict=True)))


def _take(blocks: deque[Int64Array], count: int) -> Int64Array:
    """The first `count` numbers of a queue of blocks."""
    taken = [np.empty(0, np.int64)]
    while count:
        block = blocks.popleft()
        if len(block) > count:
            blocks.appendleft(block[count:])
        taken.append(block[:count])
        count -= len(taken[-1])
    return np.concatenate(taken)


def _documents(split: Split) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Begins and ends of all documents in the stream, a shard at a time."""
    stream, start = TokenStream(split), 0
    for shard in split.shards:
        ends = stream.document_ends(start, start + shard.tokens)
        yield np.concatenate([[start], ends[:-1]]), ends
        start += shard.tokens
        stream.close()  # an index is needed once


# ---------------------------------------------------------------- what a packing costs


@dataclass(frozen=True)
class PackingFigures:
    """What one epoch of a source reads, and what it does to its documents.

    tokens_dropped: never a target; tokens_padded: slots without one; documents_cut: not whole in one row. A document
    longer than seq_len is cut by any packing; `documents_too_long` counts those.
    """

    rows: int
    seq_len: int
    documents: int
    tokens: int
    documents_cut: int
    documents_too_long: int
    tokens_padded: int
    tokens_dropped: int

    @property
    def cut_share(self) -> float:
        return self.documents_cut / self.documents if self.documents else 0.0

    @property
    def padded_share(self) -> float:
        """Of all slots."""
        return self.tokens_padded / (self.rows * self.seq_len) if self.rows else 0.0

    @property
    def dropped_share(self) -> float:
        return self.tokens_dropped / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, float | int]:
        """All of them, ready for JSON."""
        shares = {name: getattr(self, name) for name in ("cut_share", "padded_share", "dropped_share")}
        return {**asdict(self), **shares}

    def to_text(self) -> str:
        """One line for people."""
        return (
            f"{self.rows:,} rows of {self.seq_len:,}; {self.documents_cut:,} of {self.documents:,} documents cut"
            f" ({self.cut_share:.2%}), {self.tokens_padded:,} tokens padded ({self.padded_share:.3%} of the slots),"
            f" {self.tokens_dropped:,} of {self.tokens:,} dropped"
        )


def measure_packing(split: Split, seq_len: int, packing: PackingMode) -> PackingFigures:
    """The figures of a split under a packing, counted on its document ends; no plan is needed.

    Both packings by windows have the same. Cost: every .idx is read.
    """
    windows = max(0, (split.tokens - 1) // seq_len)
    counts: Counter[int] = Counter()
    cut = too_long = 0
    for begins, ends in _documents(split):
        lengths = ends - begins
        long = lengths > seq_len
        too_long += int(long.sum())
        counts += _counted(np.where(long, lengths % seq_len, lengths))
        counts[seq_len] += int((lengths[long] // seq_len).sum())
        # The target at position p of the stream stands in window (p - 1) // seq_len; position 0 is context only.
        first, last = ((np.maximum(edge, 1) - 1) // seq_len for edge in (begins, ends - 1))
        cut += int(((first != last) | (last >= windows)).sum())
    documents, tokens = split.documents, split.tokens
    if packing == "best_fit":
        del counts[0]
        rows = sum(move.rows for move in best_fit_moves(counts, seq_len) if move.room == seq_len)
        return PackingFigures(rows, seq_len, documents, tokens, too_long, too_long, rows * seq_len - tokens, 0)
    return PackingFigures(windows, seq_len, documents, tokens, cut, too_long, 0, tokens - windows * seq_len)
