"""A bounded, seeded sample of a stream of texts: what a tokenizer is trained on.

Texts come in pieces of at most `MAX_CHARACTERS`, cut where no token would grow across, so that one huge document
neither fills the sample nor falls to the trainer's length limit. Each piece draws a random key; the sample is the
pieces with the smallest keys that fit the budget, which is a uniform sample of a stream of unknown length in one
pass. The pieces with the largest keys are kept apart, so that the tokenizer can be measured on text of the same
mixture that it has not seen. A text under 10 MB that fits is used whole.
"""

from __future__ import annotations

import ctypes
import heapq
import random
from collections.abc import Iterator
from typing import NamedTuple

from tokenizer.codec import TokenizerError

MAX_CHARACTERS = 16_384
MIN_SAMPLE_BYTES = 100_000
MAX_WEIGHT = 1_000.0
HELD_OUT_BYTES = 2_000_000
HELD_OUT_SHARE = 0.01  # of a sample that took all the text
MIN_SPARING_BYTES = 10_000_000  # a smaller one needs every word

# SentencePiece marks unknown characters with U+2585 while it trains and skips every sentence that contains one.
# Cutting the character out keeps the rest of the document; byte fallback encodes it later like any other rare
# character.
TRAINER_RESERVED = "\u2585"


class Weighted(NamedTuple):
    """A text that counts `weight` times: 2 twice, 0.5 half of its pieces at random, 1 like the bare text."""

    text: str
    weight: float
    source: int = 0  # number of the source it came from, for the figures of each


def check_weight(weight: float) -> None:
    """Raise TokenizerError for a weight that is no sensible number of times to count a text."""
    if not 0 < weight <= MAX_WEIGHT:
        raise TokenizerError(f"weight {weight:g} must be above 0 and at most {MAX_WEIGHT:g}")


class _Piece(NamedTuple):
    key: float  # negated in the sample: heapq pops the smallest, we evict the largest
    place: int
    content: bytes
    source: int


class Sample:
    """Texts go in with `add`; `hold_out` sets some aside; `pieces` or `drain` gives the sample in the order of the
    stream.

    Memory: `max_bytes` and `HELD_OUT_BYTES` of UTF-8 and about 200 bytes per piece, however much goes in.
    """

    def __init__(self, *, max_bytes: int, seed: int) -> None:
        if max_bytes < MIN_SAMPLE_BYTES:
            raise TokenizerError(f"sample of {max_bytes} bytes is too small; give at least {MIN_SAMPLE_BYTES}")
        self.max_bytes = max_bytes
        self.documents = 0
        self.text_bytes = 0
        self.sampled_bytes = 0
        self.cuts = 0
        self.cuts_inside_words = 0
        self.reserved_characters = 0
        self.weighted = False  # some text counted otherwise than once
        self._random = random.Random(seed)
        self._heap: list[_Piece] = []
        self._left: list[_Piece] = []  # out of the sample, with the largest keys
        self._left_bytes = 0
        self._places = 0
        self._limit = 1.0

    def add(self, text: str, weight: float = 1.0, source: int = 0) -> None:
        """Offer one document. Raises UnicodeEncodeError for a lone surrogate, before anything of it is counted."""
        check_weight(weight)
        self.text_bytes += len(text.encode("utf-8"))
        self.documents += 1
        self.weighted |= weight != 1
        whole, fraction = divmod(weight, 1.0)
        self.reserved_characters += text.count(TRAINER_RESERVED)
        for part in text.split(TRAINER_RESERVED):
            for piece in self._cut(part):
                content = piece.encode("utf-8")
                for _ in range(int(whole) + (self._random.random() < fraction)):
                    self._offer(content, source)

    def hold_out(self) -> list[tuple[int, bytes]]:
        """Text that is not in the sample, and the number of its source, at most `HELD_OUT_BYTES`, in the order of the
        stream: call it once, when all has been added.

        It comes from what the sample has no room for. Where that is less than a hundredth of a sample of at least
        `MIN_SPARING_BYTES`, the rest of the hundredth is taken out of the sample. Text that the sample holds too, as a
        copy or because it weighs more than once, is left out, so the list may be empty.
        """
        wanted = min(HELD_OUT_BYTES, int(self.sampled_bytes * HELD_OUT_SHARE))
        if self._left_bytes < wanted and self.sampled_bytes >= MIN_SPARING_BYTES:
            self.max_bytes = self.sampled_bytes - (wanted - self._left_bytes)
            self._evict()
        sampled = {piece.content for piece in self._heap}
        left, self._left = sorted(self._left, key=lambda piece: piece.place), []
        return [(piece.source, piece.content) for piece in left if piece.content not in sampled]

    def pieces(self) -> Iterator[bytes]:
        """The sample as UTF-8, in the order in which it was added."""
        for piece in sorted(self._heap, key=lambda piece: piece.place):
            yield piece.content

    def by_source(self) -> dict[int, list[bytes]]:
        """What `pieces` gives, by the number of the source; let go of it before `drain`."""
        pieces: dict[int, list[bytes]] = {}
        for piece in sorted(self._heap, key=lambda piece: (piece.source, piece.place)):
            pieces.setdefault(piece.source, []).append(piece.content)
        return pieces

    def some(self, max_bytes: int) -> list[bytes]:
        """Every so many pieces of the sample, so that about `max_bytes` come together."""
        return every_so_many(list(self.pieces()), max_bytes)

    def drain(self) -> Iterator[bytes]:
        """What `pieces` gives, each forgotten as soon as it is given. The system has the memory back at the end."""
        self._heap.sort(key=lambda piece: piece.place, reverse=True)
        while self._heap:
            yield self._heap.pop().content
        _give_back_memory()

    def __len__(self) -> int:
        return len(self._heap)

    def _cut(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > MAX_CHARACTERS:
            end = _last_boundary(text, start + MAX_CHARACTERS // 2, start + MAX_CHARACTERS)
            self.cuts += 1
            if end is None:
                self.cuts_inside_words += 1
                end = start + MAX_CHARACTERS
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _offer(self, content: bytes, source: int) -> None:
        key = self._random.random()
        self._places += 1
        if key >= self._limit:
            self._leave(_Piece(key, self._places, content, source))
            return
        heapq.heappush(self._heap, _Piece(-key, self._places, content, source))
        self.sampled_bytes += len(content)
        self._evict()

    def _evict(self) -> None:
        while self.sampled_bytes > self.max_bytes:
            evicted = heapq.heappop(self._heap)
            self._limit = -evicted.key
            self.sampled_bytes -= len(evicted.content)
            self._leave(evicted._replace(key=-evicted.key))

    def _leave(self, piece: _Piece) -> None:
        heapq.heappush(self._left, piece)
        self._left_bytes += len(piece.content)
        while self._left_bytes > HELD_OUT_BYTES:
            self._left_bytes -= len(heapq.heappop(self._left).content)


def every_so_many(pieces: list[bytes], max_bytes: int) -> list[bytes]:
    """Some of the pieces at equal distances, so that about `max_bytes` come together."""
    return pieces[:: max(-(-sum(map(len, pieces)) // max_bytes), 1)]


def _give_back_memory() -> None:
    """glibc keeps what was freed for later, if it is not told that there is no later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _last_boundary(text: str, start: int, end: int) -> int | None:
    """Where to cut within [start, end): before the last line break, else before the last space. Runs of either stay
    whole: a piece of the vocabulary may begin with several line breaks or spaces, and none ends inside such a run and
    goes on behind it.
    """
    for mark in ("\n", " "):
        place = text.rfind(mark, start, end)
        while place > start and text[place - 1] == mark:
            place -= 1
        if place > start:
            return place
    return None
