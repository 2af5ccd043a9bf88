"""The characters of a sample: how often each occurs, how many get a piece, and what a normalisation takes away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from tokenizer.codec import SPACE_MARK

NORMALIZATIONS = ("identity", "nfkc")
CODE_POINTS = 0x110000

# SentencePiece accepts 0.98 to 1. Above 0.9995 the alphabet fills with characters that hardly occur.
LOWEST_COVERAGE, HIGHEST_COVERAGE = 0.98, 0.9995

EXAMPLES = 3
_BATCH_BYTES = 1_000_000


@dataclass
class CharacterCounts:
    """What `count_characters` found. `counts` is of the text as the trainer sees it: after normalisation, U+2581 as a
    space.
    """

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CODE_POINTS, dtype=np.int64))
    texts: int = 0
    changed_texts: int = 0
    changed_characters: dict[str, int] = field(default_factory=dict)  # that are replaced wherever they stand; how often
    counting_seconds: float = 0.0  # of a CPU, so that other work on the machine hardly matters

    def alphabet_size(self, coverage: float, required: str) -> int:
        """How many characters get a piece of their own: the fewest that make up `coverage` of the text, and the
        required ones.
        """
        occurring = np.flatnonzero(self.counts)
        by_count = occurring[np.argsort(-self.counts[occurring], kind="stable")]
        covered = np.cumsum(self.counts[by_count]) / max(self.counts.sum(), 1)
        chosen = by_count[: int(np.searchsorted(covered, coverage)) + 1]
        return len(set(chosen.tolist()) | {ord(character) for character in required})

    def fitting_coverage(self, max_characters: int, required: str) -> float:
        """The default coverage: the highest that needs at most `max_characters`, within the two limits."""
        if self.alphabet_size(HIGHEST_COVERAGE, required) <= max_characters:
            return HIGHEST_COVERAGE
        covered = np.sort(self.counts)[::-1][: max_characters - len(required)].sum() / self.counts.sum()
        return max(LOWEST_COVERAGE, int(covered * 10_000) / 10_000)  # rounded down: a readable number

    def loss(self) -> str:
        """What the normalisation takes from the sample, in one line with numbers and examples."""
        examples = ", ".join(
            f"{count} × U+{ord(character):04X} {character if character.isprintable() else ''}".rstrip()
            for character, count in list(self.changed_characters.items())[:EXAMPLES]
        )
        return (
            f"nfkc does not give texts back as they were: it changes {self.changed_texts} of {self.texts} texts of the "
            f"sample and replaces {sum(self.changed_characters.values())} characters"
            + (f" ({examples})" if examples else "")
            + "; identity loses nothing"
        )


def normalizer(name: str) -> Callable[[str], str] | None:
    """SentencePiece's own function, None for identity.

    Its nfkc is Unicode's of a later version than Python's: line breaks, tabs and runs of spaces stay, while other
    spaces (U+00A0, U+3000) become plain ones. Its nmt_nfkc, the library's default, would turn line breaks into spaces.
    """
    if name == "identity":
        return None
    rule = sentencepiece.SentencePieceNormalizer(
        rule_name=name, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )
    normalize: Callable[[str], str] = rule.normalize
    return normalize


def count_characters(pieces: Iterable[bytes], normalize: Callable[[str], str] | None) -> CharacterCounts:
    """Count the characters of UTF-8 texts, before and after normalisation. Memory: a few megabytes at a time."""
    result = CharacterCounts()
    original = result.counts if normalize is None else np.zeros(CODE_POINTS, dtype=np.int64)
    for batch in _batches(pieces):
        texts = [piece.decode("utf-8") for piece in batch]
        result.texts += len(texts)
        result.counting_seconds += _count("".join(texts), original)
        if normalize is not None:
            normalized = [text if text.isascii() else normalize(text) for text in texts]  # ASCII never changes
            result.changed_texts += sum(old != new for old, new in zip(texts, normalized, strict=True))
            _count("".join(normalized), result.counts)
    result.counts[ord(" ")] += result.counts[ord(SPACE_MARK)]  # one piece stands for both
    result.counts[ord(SPACE_MARK)] = 0
    if normalize is not None:
        occurring = {chr(code): int(original[code]) for code in np.flatnonzero(original)}
        changed = {character: count for character, count in occurring.items() if normalize(character) != character}
        result.changed_characters = dict(sorted(changed.items(), key=lambda item: (-item[1], item[0])))
    return result


def _count(text: str, counts: npt.NDArray[np.int64]) -> float:
    """Add the characters of a text to `counts`, and say how many seconds of a CPU that took."""
    started_at = time.thread_time()
    codes: npt.NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    found = np.bincount(codes)  # as long as the highest code asks: a table of all would take longer than the text
    counts[: len(found)] += found
    return time.thread_time() - started_at


def _batches(pieces: Iterable[bytes]) -> Iterable[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
