"""A document stays as it is, or goes for a reason that the ledger keeps. Nothing here changes a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from tokenizer.codec import SPACE_MARK

# The key and the digest decide for good which documents are held out; another key would be another split.
VALIDATION_KEY = b"zerohalf-validation-1"


@dataclass(frozen=True)
class Remark:
    """Why a document was dropped, or what will not survive in it: a reason to count by, and the facts of this case."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class LengthFilter:
    """Drops documents of fewer than `min_chars` or more than `max_chars` characters (None: no upper bound)."""

    min_chars: int = 0
    max_chars: int | None = None

    def __post_init__(self) -> None:
        if self.min_chars < 0 or (self.max_chars is not None and self.max_chars < max(1, self.min_chars)):
            raise ValueError(f"--min-chars {self.min_chars} and --max-chars {self.max_chars} let no document through")

    def __call__(self, text: str) -> Remark | None:
        """The reason to drop this text, or None to keep it."""
        if len(text) < self.min_chars:
            return Remark("too_few_chars", f"{len(text)} < {self.min_chars}")
        if self.max_chars is not None and len(text) > self.max_chars:
            return Remark("too_many_chars", f"{len(text)} > {self.max_chars}")
        return None


def losses(text: str) -> Iterator[Remark]:
    """What the tokenizer cannot give back of a text that is kept: SentencePiece reads U+2581 as a space."""
    if count := text.count(SPACE_MARK):
        yield Remark("literal_u2581", f"{count} become spaces")


def is_validation(text: bytes, fraction: float) -> bool:
    """Whether a document (its UTF-8 bytes) is held out: its keyed hash lies in the first `fraction` of all hashes.

    So equal texts fall on one side, in whatever source they stand, and no document changes sides as data grows.
    """
    digest = blake2b(text, digest_size=8, key=VALIDATION_KEY).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
