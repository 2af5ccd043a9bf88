"""How good tokenizers are on texts they have not seen: how few tokens they need, what they can't spell, what they lose.

Several tokenizers read the same text side by side. Facts of the text (bytes, words) are counted once; what each
tokenizer makes of it is one count an id, out of which every figure follows, and one comparison a document of the text
with what comes back.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenizer.candidates import Candidate
from tokenizer.codec import SPACE_MARK, TokenizerError
from tokenizer.model_file import PieceType

RENYI_ALPHA = 2.5
EXAMPLES = 10  # of tokens: the longest, the most frequent, those never seen
CHANGED_EXAMPLES = 5

_BATCH_CHARACTERS = 1 << 20
_SHOWN_CHARACTERS = 40

# From this share of characters on, white space says nothing about words, and tokens are measured per character.
_UNSPACED_SHARE = 0.1
# Scripts written without spaces between words: first and last character of each block.
_UNSPACED_BLOCKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x312F),  # radicals, punctuation, kana, bopomofo
    (0x31A0, 0x4DBF),  # more of them, Han extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # compatibility Han
    (0xFF00, 0xFF9F),  # full-width forms, half-width kana
    (0x20000, 0x323AF),  # Han extensions B to H
)


class Placed(NamedTuple):
    """A text and where it stood, for people: file and line."""

    text: str
    place: str


@dataclass(frozen=True)
class Changed:
    """A document that did not come back, and the first difference."""

    place: str
    character: int  # counted from 0
    expected: str
    got: str


@dataclass(eq=False)
class Usage:
    """What one tokenizer made of one source."""

    candidate: Candidate
    counts: npt.NDArray[np.int64]  # (V,): how often each id occurred
    space_mark_documents: int = 0  # came back changed in this alone: a literal U+2581 had become a space
    round_trip_failures: int = 0  # came back changed otherwise
    changed: list[Changed] = field(default_factory=list)  # the first of them

    @classmethod
    def empty(cls, candidate: Candidate) -> Usage:
        return cls(candidate, np.zeros(candidate.vocab_size, dtype=np.int64))

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def add(self, batch: Sequence[Placed]) -> None:
        """Encode a batch, count, decode, compare."""
        documents = list(self.candidate.encode([document.text for document in batch]))
        ids = np.concatenate(documents).astype(np.int64)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        for (text, place), got in zip(batch, self.candidate.decode(documents), strict=True):
            if got == text:
                continue
            if got == text.replace(SPACE_MARK, " "):
                self.space_mark_documents += 1
                continue
            self.round_trip_failures += 1
            if len(self.changed) < CHANGED_EXAMPLES:
                pairs = zip(text, got, strict=False)
                start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(got)))
                stop = start + _SHOWN_CHARACTERS
                self.changed.append(Changed(place, start, text[start:stop], got[start:stop]))

    def of_type(self, kind: PieceType) -> int:
        """How many tokens are of this type."""
        return int(self.counts[self.candidate.types == kind].sum())

    def byte_characters(self) -> int:
        """How many characters were spelled by byte pieces: bytes that begin a UTF-8 sequence."""
        byte_ids = np.flatnonzero(self.candidate.types == PieceType.BYTE)
        begins = [token_id for token_id in byte_ids if self.candidate.spelling[token_id][0] & 0xC0 != 0x80]
        return int(self.counts[begins].sum())

    def never_seen(self) -> npt.NDArray[np.int64]:
        """The learned pieces that did not occur, lowest id first: of BPE, those learned first."""
        return np.flatnonzero((self.candidate.types == PieceType.NORMAL) & (self.counts == 0))

    def most_frequent(self) -> list[int]:
        """The ids that occurred most often, which weigh most in the Rényi efficiency."""
        ranked = np.argsort(-self.counts, kind="stable")[:EXAMPLES]
        return [token_id for token_id in ranked.tolist() if self.counts[token_id]]

    def longest(self) -> list[tuple[int, int]]:
        """(length in characters, id) of the longest tokens that occurred; the more frequent first among equals."""
        not_text = (PieceType.BYTE, PieceType.CONTROL, PieceType.UNKNOWN)
        seen = np.flatnonzero((self.counts > 0) & ~np.isin(self.candidate.types, not_text)).tolist()
        lengths = [(len(self.candidate.spelling[one].decode("utf-8", "replace")), one) for one in seen]
        return sorted(lengths, key=lambda one: (-one[0], -self.counts[one[1]], one[1]))[:EXAMPLES]


@dataclass(eq=False)
class Source:
    """One source: what its text is, and what each tokenizer made of it. Bytes are UTF-8 bytes of text, words what
    stands between white space.
    """

    name: str
    usages: list[Usage]
    documents: int = 0
    text_bytes: int = 0
    characters: int = 0
    words: int = 0
    unspaced_characters: int = 0  # of scripts written without spaces between words
    all_spaced: bool = True  # a sum of sources is measured in words only if each of them is

    def add(self, batch: Sequence[Placed]) -> None:
        for text, place in batch:
            self.text_bytes += _utf8_length(text, place)
            self.words += len(text.split())
        whole = "".join(document.text for document in batch)
        self.documents += len(batch)
        self.characters += len(whole)
        if not whole.isascii():
            self.unspaced_characters += int(_is_unspaced()[np.frombuffer(whole.encode("utf-32-le"), "<u4")].sum())
        for usage in self.usages:
            usage.add(batch)

    @property
    def unit(self) -> str:
        """ "word" for text written with spaces between words, else "character"."""
        spaced = self.unspaced_characters < _UNSPACED_SHARE * max(self.characters, 1)
        return "word" if spaced and self.all_spaced else "character"


def judge(candidates: Sequence[Candidate], name: str, documents: Iterable[Placed]) -> Source:
    """Have every candidate encode and decode every document of one source.

    Memory: a million characters and their ids at a time, or one longer document. Raises TokenizerError for a lone
    surrogate.
    """
    source = Source(name, [Usage.empty(candidate) for candidate in candidates])
    for batch in _batches(documents):
        source.add(batch)
    return source


def total(sources: Sequence[Source]) -> Source:
    """All sources as one."""
    usages = []
    for together in zip(*(source.usages for source in sources), strict=True):
        usages.append(
            Usage(
                candidate=together[0].candidate,
                counts=np.sum([usage.counts for usage in together], axis=0),
                space_mark_documents=sum(usage.space_mark_documents for usage in together),
                round_trip_failures=sum(usage.round_trip_failures for usage in together),
                changed=[change for usage in together for change in usage.changed][:CHANGED_EXAMPLES],
            )
        )
    return Source(
        name="all",
        usages=usages,
        documents=sum(source.documents for source in sources),
        text_bytes=sum(source.text_bytes for source in sources),
        characters=sum(source.characters for source in sources),
        words=sum(source.words for source in sources),
        unspaced_characters=sum(source.unspaced_characters for source in sources),
        all_spaced=all(source.unit == "word" for source in sources if source.documents),
    )


def renyi_efficiency(counts: npt.NDArray[np.int64], alpha: float = RENYI_ALPHA) -> float | None:
    """How evenly a text uses a vocabulary: 1 when all ids are equally frequent, 0 when only one occurs.

    H_a(p) / log |V| with H_a(p) = log(sum of p_i^a) / (1 - a), p_i the share of id i among the tokens, |V| the number
    of all ids, those never seen included; for a = 1 the limit, Shannon's entropy. Zouhar et al. 2023, "Tokenization
    and the Noiseless Channel" (ACL), found a = 2.5 to go best with translation quality; Cognetta et al. 2024, "Two
    Counterexamples to Tokenization and the Noiseless Channel", show that it can be raised without any gain. `counts`
    is (V,), alpha above 0. None where there is nothing to measure: no token, or a single id.
    """
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}: must be above 0")
    if len(counts) < 2 or not counts.any():
        return None
    shares = counts[counts > 0] / counts.sum()
    if alpha == 1:
        entropy = -float(np.sum(shares * np.log(shares)))
    else:
        entropy = float(np.log(np.sum(shares**alpha))) / (1 - alpha)
    return max(entropy, 0.0) / float(np.log(len(counts)))  # rounding may give -0.0 for a single id


# ---------------------------------------------------------------- as data


def as_data(sources: Sequence[Source]) -> dict[str, object]:
    """The whole report, JSON-able, the same for the same text: what `--json` prints."""
    return {
        "tokenizers": [
            {
                "name": usage.candidate.name,
                "kind": usage.candidate.kind,
                "fingerprint": usage.candidate.fingerprint,
                "vocab_size": usage.candidate.vocab_size,
                "pieces_learned": _learned(usage.candidate),
                "no_byte_fallback": usage.candidate.no_byte_fallback,
            }
            for usage in sources[0].usages
        ],
        "sources": [source_figures(source) for source in sources],
        "all": source_figures(total(sources)),
    }


def source_figures(source: Source) -> dict[str, object]:
    """Facts of one source's text, and under "results" the figures of each tokenizer."""
    return {
        "name": source.name,
        "documents": source.documents,
        "text_bytes": source.text_bytes,
        "characters": source.characters,
        "words": source.words,
        "unspaced_characters": source.unspaced_characters,
        "unit": source.unit,
        "results": [figures(source, usage) for usage in source.usages],
    }


def figures(source: Source, usage: Usage) -> dict[str, object]:
    """What one tokenizer made of one source. A ratio over nothing is None, and so is a rate that can't be."""
    candidate, tokens = usage.candidate, usage.tokens
    learned, never_seen = _learned(candidate), usage.never_seen()
    byte_tokens, byte_characters = usage.of_type(PieceType.BYTE), usage.byte_characters()
    has_bytes = candidate.no_byte_fallback is None
    return {
        "tokenizer": candidate.name,
        "tokens": tokens,
        "tokens_to_first": _ratio(tokens, source.usages[0].tokens),
        "bytes_per_token": _ratio(source.text_bytes, tokens),
        "tokens_per_word": _ratio(tokens, source.words),
        "tokens_per_character": _ratio(tokens, source.characters),
        "byte_tokens": byte_tokens if has_bytes else None,
        "byte_fallback_rate": _ratio(byte_tokens, tokens) if has_bytes else None,
        "byte_characters": byte_characters if has_bytes else None,
        "byte_character_rate": _ratio(byte_characters, source.characters) if has_bytes else None,
        "unknown_tokens": usage.of_type(PieceType.UNKNOWN),
        "special_tokens": usage.of_type(PieceType.CONTROL),
        "pieces_used": learned - len(never_seen),
        "vocabulary_used": _ratio(learned - len(never_seen), learned),
        "pieces_never_seen": len(never_seen),
        "never_seen_examples": [spelled(candidate, token_id) for token_id in never_seen[:EXAMPLES].tolist()],
        "most_frequent_tokens": [_token(usage, token_id) for token_id in usage.most_frequent()],
        "longest_tokens": [{**_token(usage, token_id), "characters": length} for length, token_id in usage.longest()],
        "renyi_efficiency": renyi_efficiency(usage.counts),
        "round_trip_failures": usage.round_trip_failures,
        "round_trip_examples": [vars(change) for change in usage.changed],
        "space_mark_documents": usage.space_mark_documents,
    }


def _token(usage: Usage, token_id: int) -> dict[str, object]:
    return {"id": token_id, "text": spelled(usage.candidate, token_id), "count": int(usage.counts[token_id])}


def spelled(candidate: Candidate, token_id: int) -> str:
    """The text of an id; bytes that are no whole character show as \\xNN."""
    return candidate.spelling[token_id].decode("utf-8", "backslashreplace")


# ---------------------------------------------------------------- for people


_HEADS = (
    ("", "source"),
    ("", "documents"),
    ("", "MB"),
    ("", "tokenizer"),
    ("", "tokens"),
    ("tokens", "to first"),
    ("bytes/", "token"),
    ("tokens/", "word"),
    ("tokens/", "char"),
    ("byte", "tokens"),
    ("chars", "by bytes"),
    ("pieces", "used"),
    ("never", "seen"),
    ("Rényi", f"{RENYI_ALPHA}"),
    ("", "changed"),
)


def table(sources: Sequence[Source]) -> str:
    """The figures as aligned columns: a source a line, and within it a tokenizer a line."""
    several = len(sources[0].usages) > 1
    rows = [list(line) for line in zip(*_HEADS, strict=True)]
    for source in sources:
        for place, usage in enumerate(source.usages):
            one = figures(source, usage)
            about_text = [source.name, str(source.documents), f"{source.text_bytes / 1e6:.2f}"]
            per_word = one["tokens_per_word"] if source.unit == "word" else None
            per_character = one["tokens_per_character"] if source.unit == "character" else None
            rows.append(
                [
                    *(about_text if place == 0 else ["", "", ""]),
                    usage.candidate.name,
                    str(usage.tokens),
                    _number(one["tokens_to_first"], ".3f"),
                    *(_number(value, ".3f") for value in (one["bytes_per_token"], per_word, per_character)),
                    *(_number(one[key], ".2%") for key in ("byte_fallback_rate", "byte_character_rate")),
                    _number(one["vocabulary_used"], ".1%"),
                    str(one["pieces_never_seen"]),
                    _number(one["renyi_efficiency"], ".3f"),
                    str(usage.round_trip_failures),
                ]
            )
    if not several:  # no names of tokenizers, no ratios between them
        rows = [row[:3] + row[4:5] + row[6:] for row in rows]
    left = {0, 3} if several else {0}
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - _width(cell))
            cells.append(cell + space if column in left else space + cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def remarks(whole: Source) -> str:
    """What the table can't hold, over all sources: why a rate is missing, what was lost and where, the longest tokens
    and the pieces never seen.
    """
    lines = []
    for usage in whole.usages:
        candidate, one = usage.candidate, figures(whole, usage)
        lines.append(f"\n{candidate.name}: {candidate.kind}, {candidate.vocab_size} ids, {_learned(candidate)} learned")
        if candidate.no_byte_fallback:
            lines.append(f"  no rate of byte tokens: {candidate.no_byte_fallback}")
        if one["unknown_tokens"]:
            lines.append(f"  UNKNOWN: {one['unknown_tokens']} tokens stand for text that is lost")
        if one["special_tokens"]:
            lines.append(f"  SPECIAL: text became a special id {one['special_tokens']} times")
        if usage.space_mark_documents:
            lines.append(f"  U+2581 stood in {usage.space_mark_documents} documents and came back as a space")
        if usage.round_trip_failures:
            lines.append(f"  CHANGED: {usage.round_trip_failures} of {whole.documents} documents came back changed")
            lines += [
                f"    {change.place}, character {change.character}: {shown(change.expected)} became {shown(change.got)}"
                for change in usage.changed
            ]
        else:
            lines.append(f"  round trips: all {whole.documents} documents came back")
        frequent = ", ".join(
            f"{_shown_token(candidate, token_id)} {usage.counts[token_id] / usage.tokens:.1%}"
            for token_id in usage.most_frequent()
        )
        lines.append(f"  most frequent: {frequent}")
        lines.append("  longest:")
        lines += [
            f"    {length:5} characters, {usage.counts[token_id]} times: {_shown_token(candidate, token_id)}"
            for length, token_id in usage.longest()
        ]
        never_seen = usage.never_seen()
        if len(never_seen):
            some = " ".join(_shown_token(candidate, token_id) for token_id in never_seen[:EXAMPLES].tolist())
            lines.append(f"  never seen: {len(never_seen)} learned pieces, the first: {some}")
    return "\n".join(lines)


def shown(text: str) -> str:
    """A text in one line: spaces as U+2423, what can't be seen escaped, its end left out when it is long."""
    visible = repr(text[:_SHOWN_CHARACTERS]).replace(" ", "\u2423")
    return visible + ("…" if len(text) > _SHOWN_CHARACTERS else "")


def _shown_token(candidate: Candidate, token_id: int) -> str:
    try:
        return shown(candidate.spelling[token_id].decode("utf-8"))
    except UnicodeDecodeError:  # a part of a character, in byte-level vocabularies
        return repr(candidate.spelling[token_id])


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float) else "-"


def _width(text: str) -> int:
    """Columns of a terminal: two for the wide characters of East Asia, none for a combining mark."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


# ---------------------------------------------------------------- counting


def _batches(documents: Iterable[Placed]) -> Iterator[list[Placed]]:
    batch: list[Placed] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _utf8_length(text: str, place: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{place}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start} has no UTF-8 form; "
            "drop or replace it"
        ) from error


@cache
def _is_unspaced() -> npt.NDArray[np.bool_]:
    """For each code point, whether it is of a script written without spaces between words."""
    table = np.zeros(0x110000, dtype=np.bool_)
    for first, last in _UNSPACED_BLOCKS:
        table[first : last + 1] = True
    return table


def _learned(candidate: Candidate) -> int:
    return int((candidate.types == PieceType.NORMAL).sum())


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
