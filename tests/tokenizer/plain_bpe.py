"""SentencePiece's BPE in plain Python, as its paper and the sources tell it: an encoder that tests can read, and spoil.

Characters are symbols at first; of all neighbours whose concatenation is a piece, the two with the highest score are
joined, the leftmost of equals; what is no piece in the end is spelled by bytes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from tokenizer.model_file import ModelFile, PieceType

SPACE_MARK = "\u2581"


class PlainBPE:
    """Has the interface of FastBPE. Models: identity, whitespace kept, byte fallback, no user-defined symbols."""

    def __init__(self, model: ModelFile) -> None:
        self.prefix = SPACE_MARK * model.add_dummy_prefix
        self.scores = model.scores.tolist()
        self.ids = {model.pieces[i]: i for i in np.flatnonzero(model.types == PieceType.NORMAL).tolist()}
        self.byte_ids = np.flatnonzero(model.types == PieceType.BYTE).tolist()

    def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        rows = [list(self._encode(text.decode("utf-8"))) for text in texts]
        ids = np.array([token_id for row in rows for token_id in row], dtype=np.uint16)
        return ids, np.cumsum([len(row) for row in rows], dtype=np.uint64)

    def _encode(self, text: str) -> Iterator[int]:
        if not text:
            return
        symbols = list(self.prefix + text.replace(" ", SPACE_MARK))
        after = [*range(1, len(symbols)), -1]
        before = list(range(-1, len(symbols) - 1))
        candidates: list[tuple[float, int, str]] = []

        def consider(left: int) -> None:
            if left >= 0 and after[left] >= 0:
                joined = symbols[left] + symbols[after[left]]
                if joined in self.ids:
                    heapq.heappush(candidates, (-self.scores[self.ids[joined]], left, joined))

        for place in range(len(symbols)):
            consider(place)
        while candidates:
            _, left, joined = heapq.heappop(candidates)
            right = after[left]
            if not symbols[left] or right < 0 or symbols[left] + symbols[right] != joined:
                continue  # one of the two is another by now
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(left)
            consider(before[left])
        for symbol in symbols:
            if symbol in self.ids:
                yield self.ids[symbol]
            else:
                yield from (self.byte_ids[byte] for byte in symbol.encode("utf-8"))


def swap_results(model: ModelFile, one: int, other: int) -> ModelFile:
    """The mutant in which two merges give each other's piece."""
    pieces = list(model.pieces)
    pieces[one], pieces[other] = pieces[other], pieces[one]
    scores = model.scores.copy()
    scores[[one, other]] = scores[[other, one]]  # the order of merges stays
    return dataclasses.replace(model, pieces=pieces, scores=scores)


def swap_scores(model: ModelFile, one: int, other: int) -> ModelFile:
    """The mutant in which two merges have each other's place in the order."""
    scores = model.scores.copy()
    scores[[one, other]] = scores[[other, one]]
    return dataclasses.replace(model, scores=scores)
