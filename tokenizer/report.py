"""How good a tokenizer is on given texts: how few tokens it needs, what it can't spell, what it loses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenizer.codec import SPACE_MARK, Codec

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class SourceReport:
    """Counts for one source. Bytes are UTF-8 bytes of text; words are what stands between white space (no measure for
    Chinese).
    """

    name: str
    documents: int
    text_bytes: int
    characters: int
    words: int
    tokens: int
    byte_tokens: int
    pieces_known: int
    used: npt.NDArray[np.bool_]  # (vocab_size,): which learned pieces occurred
    space_mark_documents: int  # hold a literal U+2581, which comes back as a space
    round_trip_failures: int  # documents that come back changed for any other reason

    def figures(self) -> dict[str, object]:
        """What the report prints, JSON-able. A ratio over nothing is None."""
        return {
            "name": self.name,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "tokens": self.tokens,
            "bytes_per_token": _ratio(self.text_bytes, self.tokens),
            "tokens_per_word": _ratio(self.tokens, self.words),
            "tokens_per_character": _ratio(self.tokens, self.characters),
            "byte_fallback_rate": _ratio(self.byte_tokens, self.tokens),
            "pieces_used": int(self.used.sum()),
            "vocabulary_used": _ratio(int(self.used.sum()), self.pieces_known),
            "space_mark_documents": self.space_mark_documents,
            "round_trip_failures": self.round_trip_failures,
        }


def report(codec: Codec, name: str, texts: Iterable[str]) -> SourceReport:
    """Encode and decode every text of one source. Memory: a megabyte of text and its ids at a time, or one longer
    document.

    Raises TokenizerError for a lone surrogate.
    """
    is_byte = np.array([codec.is_byte(token_id) for token_id in range(codec.vocab_size)])
    is_learned = ~is_byte
    is_learned[list(codec.control_ids.values())] = False
    counts = np.zeros(codec.vocab_size, dtype=np.int64)
    documents = text_bytes = characters = words = space_marks = failures = 0
    for batch in _batches(texts):
        for text, ids in zip(batch, codec.encode_documents(batch), strict=True):
            documents += 1
            text_bytes += len(text.encode("utf-8"))
            characters += len(text)
            words += len(text.split())
            space_marks += SPACE_MARK in text
            failures += codec.decode(ids) != text.replace(SPACE_MARK, " ")
            np.add.at(counts, ids, 1)
    return SourceReport(
        name=name,
        documents=documents,
        text_bytes=text_bytes,
        characters=characters,
        words=words,
        tokens=int(counts.sum()),
        byte_tokens=int(counts[is_byte].sum()),
        pieces_known=int(is_learned.sum()),
        used=(counts > 0) & is_learned,
        space_mark_documents=space_marks,
        round_trip_failures=failures,
    )


def total(reports: Sequence[SourceReport]) -> SourceReport:
    """All sources as one. A piece counts as used when any source used it."""
    return SourceReport(
        name="all",
        documents=sum(one.documents for one in reports),
        text_bytes=sum(one.text_bytes for one in reports),
        characters=sum(one.characters for one in reports),
        words=sum(one.words for one in reports),
        tokens=sum(one.tokens for one in reports),
        byte_tokens=sum(one.byte_tokens for one in reports),
        pieces_known=reports[0].pieces_known,
        used=np.logical_or.reduce([one.used for one in reports]),
        space_mark_documents=sum(one.space_mark_documents for one in reports),
        round_trip_failures=sum(one.round_trip_failures for one in reports),
    )


def table(reports: Sequence[SourceReport]) -> str:
    """The figures as aligned columns, a source a line."""
    head = [
        "source",
        "documents",
        "MB",
        "bytes/token",
        "tokens/word",
        "tokens/char",
        "byte fallback",
        "vocabulary used",
        "changed",
    ]
    rows = [head]
    for one in reports:
        figures = one.figures()
        rows.append(
            [
                one.name,
                str(one.documents),
                f"{one.text_bytes / 1e6:.2f}",
                *(
                    _number(figures[key], ".3f")
                    for key in ("bytes_per_token", "tokens_per_word", "tokens_per_character")
                ),
                *(_number(figures[key], ".2%") for key in ("byte_fallback_rate", "vocabulary_used")),
                str(one.round_trip_failures),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float) else "-"


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
