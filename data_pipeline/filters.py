"""A document stays as it is, or goes for a reason that the ledger keeps. Nothing here changes a text.

A filter is a function of a document that gives it back, or the reason to drop it. A unit of work makes its own, so one
may keep count; it sees each document that the filters before it let through, once and in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from data_pipeline.corpus import Document
from data_pipeline.keyed_hash import keyed_hashes
from tokenizer.codec import SPACE_MARK

# The key and the digest decide for good which documents are held out; another key would be another split.
VALIDATION_KEY = b"zerohalf-validation-1"


@dataclass(frozen=True)
class Remark:
    """Why a document was dropped, or what will not survive in it: a reason to count by, and the facts of this case."""

    reason: str
    detail: str = ""


Filter: TypeAlias = Callable[[Document], "Document | Remark"]


@dataclass(frozen=True)
class LengthFilter:
    """Drops documents of fewer than `min_chars` or more than `max_chars` characters (None: no upper bound)."""

    min_chars: int = 0
    max_chars: int | None = None

    def __post_init__(self) -> None:
        if self.min_chars < 0 or (self.max_chars is not None and self.max_chars < max(1, self.min_chars)):
            raise ValueError(f"--min-chars {self.min_chars} and --max-chars {self.max_chars} let no document through")

    def __call__(self, document: Document) -> Document | Remark:
        """The document, or the bound that it breaks."""
        length = document.characters
        if length < self.min_chars:
            return Remark("too_few_chars", f"{length} < {self.min_chars}")
        if self.max_chars is not None and length > self.max_chars:
            return Remark("too_many_chars", f"{length} > {self.max_chars}")
        return document


class DuplicateFilter:
    """Drops the documents of one unit whose text stood in their source before.

    repeats: the number of each among the documents that come here, ascending, and where the first of its kind stood.
    """

    def __init__(self, repeats: Iterable[tuple[int, str]]) -> None:
        self._repeats = iter(repeats)
        self._next = next(self._repeats, None)
        self._seen = 0

    def __call__(self, document: Document) -> Document | Remark:
        """The document, or where its text stood first."""
        number, self._seen = self._seen, self._seen + 1
        if self._next is None or self._next[0] != number:
            return document
        first, self._next = self._next[1], next(self._repeats, None)
        return Remark("duplicate", f"of {first}")


def loss(text: str | bytes) -> Remark | None:
    """What the tokenizer cannot give back of a text that is kept: SentencePiece reads U+2581 as a space."""
    if isinstance(text, str):
        count = text.count(SPACE_MARK) if SPACE_MARK in text else 0  # nearly never; and `in` is quicker
    else:
        count = text.count(SPACE_MARK.encode())
    return Remark("literal_u2581", f"{count} become spaces") if count else None


def is_validation(text: bytes, fraction: float) -> bool:
    """Whether a document (its UTF-8 bytes) is held out: its keyed hash lies in the first `fraction` of all hashes.

    So equal texts fall on one side, in whatever source they stand, and no document changes sides as data grows.
    """
    return held_out([text], fraction)[0]


def held_out(texts: Sequence[bytes], fraction: float) -> list[bool]:
    """`is_validation` of each text."""
    if not fraction:
        return [False] * len(texts)
    sides: list[bool] = (keyed_hashes(texts, VALIDATION_KEY) < np.uint64(math.ceil(fraction * 2.0**64))).tolist()
    return sides
