"""What is said of a training: an estimate before it, a measurement after it, and training.md for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizer.codec import SPACE_MARK, Codec, TokenizerError
from tokenizer.report import shown

# Seconds of training for a second of counting the sample's characters: lowest and highest on 7 to 20 MB of English,
# Chinese (the highest) and code, 4,000 to 32,000 pieces, with a margin. Bytes of memory for a byte of the sample: on 1
# to 100 MB of the same.
TIME_RATIOS = {"bpe": (60, 400), "unigram": (500, 3500)}
MEMORY_RATIOS = (13, 27)
BASE_BYTES = 30_000_000

LONGEST = 15
EXAMPLES = 40


@dataclass(frozen=True)
class Measurement:
    """What a tokenizer makes of some text. Bytes are UTF-8 bytes of the text as it was before normalisation."""

    unseen: bool  # the trainer has not seen this text
    text_bytes: int
    tokens: int
    byte_tokens: int

    @property
    def bytes_per_token(self) -> float:
        """The higher, the fewer tokens a text has."""
        return self.text_bytes / self.tokens


@dataclass(frozen=True)
class SourceFigures:
    """What came of one source, for choosing weights."""

    sampled_bytes: int  # weights applied
    measurement: Measurement | None  # None: too little of it to say anything


@dataclass(frozen=True)
class TrainReport:
    """What a training made and out of what. Bytes are UTF-8 bytes of text."""

    folder: Path
    fingerprint: str
    vocab_size: int
    model_type: str
    normalization: str
    split: str
    symbols: dict[str, int]
    documents: int
    text_bytes: int
    sampled_bytes: int
    weighted: bool  # some text counted otherwise than once
    sampled_pieces: int
    cuts: int
    cuts_inside_words: int
    reserved_characters: int
    alphabet: int
    character_coverage: float
    changed_characters: dict[str, int]  # by the normalisation; how often each occurs in the sample
    changed_pieces: int  # of sampled_pieces
    measurement: Measurement
    sources: dict[int, SourceFigures]  # by number; those of which the sample holds something
    read_seconds: float
    train_seconds: float
    peak_bytes: int  # of the training process; that of the caller is the sample's size and little more

    def as_data(self) -> dict[str, object]:
        """All of it, fit for JSON."""
        return {
            **asdict(self),
            "folder": str(self.folder),
            "changed_characters": sum(self.changed_characters.values()),
            "bytes_per_token": self.measurement.bytes_per_token,
        }

    def summary(self) -> str:
        """A few lines for people; training.md says more."""
        measured = self.measurement
        unlike = "" if self.normalization == "identity" else f", {self.normalization}"
        text = "text not trained on" if measured.unseen else "the text trained on"
        weights = ", weights applied" if self.weighted else ""
        symbols = f", {len(self.symbols)} symbols from id 4 on" if self.symbols else ""
        return "\n  ".join(
            [
                f"{self.vocab_size} ids, {self.model_type}{unlike}, fingerprint {self.fingerprint[:12]}{symbols}",
                f"read      {self.documents} documents, {self.text_bytes / 1e6:.2f} MB, in {self.read_seconds:.1f} s",
                f"sampled   {self.sampled_bytes / 1e6:.2f} MB{weights}, trained by {self.split} in "
                f"{self.train_seconds:.1f} s, {self.peak_bytes / 1e6:.0f} MB of memory",
                f"alphabet  {self.alphabet} characters, {self.character_coverage:.2%} of the text; bytes spell others",
                f"cuts      {self.cuts} in long documents, {self.cuts_inside_words} of them inside a word; "
                f"U+2585 cut out {self.reserved_characters} times",
                f"measured  {measured.bytes_per_token:.2f} bytes per token on {measured.text_bytes / 1e6:.2f} MB of "
                f"{text}",
            ]
        )

    def source_summary(self, number: int) -> str:
        """What came of one source, in one line."""
        found = self.sources.get(number, SourceFigures(0, None))
        measured = found.measurement
        ratio = f", {measured.bytes_per_token:.2f} bytes per token" if measured else ""
        return f"{found.sampled_bytes / self.sampled_bytes:.1%} of the text trained on{ratio}"


def estimate(model_type: str, sampled_bytes: int, counting_seconds: float) -> str:
    """How long a training may take and how much memory, in one line. A rough one: the progress gives better ones."""
    low, high = (ratio * counting_seconds for ratio in TIME_RATIOS[model_type])
    least, most = (ratio * sampled_bytes + BASE_BYTES for ratio in MEMORY_RATIOS)
    return (
        f"training on {sampled_bytes / 1e6:.1f} MB: about {duration(low)} to {duration(high)}, "
        f"{_memory(least)} to {_memory(most)} of memory"
    )


def duration(seconds: float) -> str:
    """A length of time for people: 42 s, 2.5 min, 40 min, 2.5 h."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.{1 if seconds < 600 else 0}f} min"
    return f"{seconds / 3600:.1f} h"


def _memory(size: float) -> str:
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def measure(
    codec: Codec, pieces: Sequence[bytes], normalize: Callable[[str], str] | None, *, unseen: bool
) -> Measurement:
    """Encode and decode UTF-8 texts. Raises TokenizerError when one doesn't come back as its normalisation promises."""
    is_byte = [codec.is_byte(token_id) for token_id in range(codec.vocab_size)]
    texts = [piece.decode("utf-8") for piece in pieces]
    tokens = byte_tokens = 0
    for text, ids in zip(texts, codec.encode_documents(texts), strict=True):
        expected = (normalize(text) if normalize else text).replace(SPACE_MARK, " ")
        if codec.decode(ids) != expected:
            raise TokenizerError(f"the new tokenizer loses text: {text!a:.200} does not come back")
        tokens += len(ids)
        byte_tokens += sum(is_byte[token_id] for token_id in ids.tolist())
    return Measurement(unseen, sum(map(len, pieces)), tokens, byte_tokens)


def training_report(report: TrainReport, description: Mapping[str, Any], codec: Codec) -> str:
    """The text of training.md. `description` is what stands in description.json."""
    sections = [
        ("", _summary(report)),
        ("Text", _text(report, description)),
        ("Vocabulary", _vocabulary(report, codec)),
        ("Measured", _measured(report)),
        ("Cost", _cost(report)),
        ("Options", (f"- `{name}`: {_code(value)}" for name, value in description["options"].items())),
    ]
    parts = ["# Training report\n"]
    for title, lines in sections:
        parts.append("\n".join([*([f"## {title}\n"] if title else []), *lines]) + "\n")
    return "\n".join(parts)


def _summary(report: TrainReport) -> Iterator[str]:
    yield f"A SentencePiece {report.model_type} tokenizer of {report.vocab_size} ids."
    yield f"Fingerprint: `{report.fingerprint}`."
    yield "How it was made is written here for people; programs read description.json."


def _text(report: TrainReport, description: Mapping[str, Any]) -> Iterator[str]:
    yield from _sources(description["corpus"]["provenance"].get("inputs"), report)
    share = report.sampled_bytes / report.text_bytes
    yield f"- read: {report.documents:,} documents, {report.text_bytes:,} bytes"
    yield (
        f"- trained on: {report.sampled_bytes:,} bytes ({share:.1%}) in {report.sampled_pieces:,} pieces, weights "
        "applied"
    )
    whole = report.split == "documents"
    yield f"- split: {'whole documents' if whole else 'lines'}; pieces {'may' if whole else 'never'} hold line breaks"
    yield (
        f"- cuts: {report.cuts:,} in documents over 16,384 characters, {report.cuts_inside_words:,} of them inside a "
        "word; nothing was dropped for its length"
    )
    yield f"- U+2585, which SentencePiece keeps to itself: cut out {report.reserved_characters:,} times"
    if report.normalization == "identity":
        yield "- normalisation: none; text comes back as it was, but U+2581 as a space"
        return
    yield (
        f"- normalisation: {report.normalization}, which changes {report.changed_pieces:,} of "
        f"{report.sampled_pieces:,} pieces for good. Line breaks, tabs and runs of spaces stay. Replaced by other "
        "characters wherever they stand:"
    )
    most = list(report.changed_characters.items())
    for character, count in most[:LONGEST]:
        yield f"  - U+{ord(character):04X} {_code(character)}, {count:,} times"
    if len(most) > LONGEST:
        yield f"  - and {len(most) - LONGEST:,} others, {sum(count for _, count in most[LONGEST:]):,} times"


def _sources(inputs: object, report: TrainReport) -> Iterator[str]:
    """What the caller of `train` noted about each source and what came of it, as a table; nothing where it noted none.

    Sources are numbered from 0 in the order in which they were noted.
    """
    if not isinstance(inputs, list) or not inputs:
        return
    columns = list(inputs[0])
    added = ("of the text trained on", "bytes per token", "measured on")
    yield f"| {' | '.join([*(column.replace('_', ' ') for column in columns), *added])} |"
    yield "|---" * (len(columns) + len(added)) + "|"
    for number, source in enumerate(inputs):
        cells = [*(_cell(source.get(column)) for column in columns), *_figures(report, number)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _figures(report: TrainReport, number: int) -> tuple[str, str, str]:
    """Share of the text trained on, bytes per token, and on which text the latter was measured."""
    found = report.sources.get(number, SourceFigures(0, None))
    share = f"{found.sampled_bytes:,} bytes ({found.sampled_bytes / report.sampled_bytes:.1%})"
    if found.measurement is None:
        return share, "-", "too little text"
    seen = "not trained on" if found.measurement.unseen else "trained on"
    return share, f"{found.measurement.bytes_per_token:.3f}", f"{found.measurement.text_bytes:,} bytes {seen}"


def _vocabulary(report: TrainReport, codec: Codec) -> Iterator[str]:
    first = len(codec.control_ids) + len(report.symbols) + 256
    yield "| ids | what |"
    yield "|---|---|"
    for name, token_id in codec.control_ids.items():
        yield f"| {token_id} | {name} |"
    for name, token_id in report.symbols.items():
        yield f"| {token_id} | {_cell(_code(name))} |"
    yield f"| {first - 256} to {first - 1} | the 256 bytes |"
    yield f"| {first} to {report.vocab_size - 1} | learned |"
    yield ""
    yield f"- alphabet: {report.alphabet:,} characters, {report.character_coverage:.2%} of the text; bytes spell others"
    learned = [codec.piece(token_id).replace(SPACE_MARK, " ") for token_id in range(first, report.vocab_size)]
    lengths = Counter(map(len, learned))
    yield f"- lengths in characters: {', '.join(f'{length}: {lengths[length]:,}' for length in sorted(lengths))}"
    yield f"- longest: {_codes(sorted(learned, key=lambda piece: -len(piece))[:LONGEST])}"
    merged = [piece for piece in learned if len(piece) > 1]
    yield f"- first: {_codes(merged[:EXAMPLES])}"
    yield f"- last: {_codes(merged[-EXAMPLES:])}"


def _measured(report: TrainReport) -> Iterator[str]:
    found = report.measurement
    yield (
        f"On {found.text_bytes:,} bytes of the same mixture that the trainer has not seen:"
        if found.unseen
        else f"On {found.text_bytes:,} bytes out of the text trained on, since nothing was left over: a little too "
        "good. `tokenizer report` takes any other text."
    )
    yield ""
    yield f"- bytes per token: {found.bytes_per_token:.3f}"
    yield f"- tokens that are single bytes: {found.byte_tokens / found.tokens:.3%}"
    yield "- round trips: all"


def _cost(report: TrainReport) -> Iterator[str]:
    yield f"- reading and sampling: {report.read_seconds:.1f} s"
    yield f"- training: {report.train_seconds:.1f} s"
    yield f"- most memory of the training process: {report.peak_bytes / 1e6:,.0f} MB"


def _code(value: object) -> str:
    """As code in Markdown, in one line, whatever it holds."""
    text = shown(value) if isinstance(value, str) else str(value)
    runs = re.findall("`+", text)
    if not runs:
        return f"`{text}`"
    fence = "`" * (len(max(runs)) + 1)
    return f"{fence} {text} {fence}"


def _codes(pieces: Sequence[str]) -> str:
    return " ".join(map(_code, pieces))


def _cell(value: object) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    return " ".join((f"{value:,}" if isinstance(value, int) else str(value)).replace("|", "\\|").split())
