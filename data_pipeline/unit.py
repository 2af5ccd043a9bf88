"""One unit of work: some files, or a range of one, become at most one shard a split, a ledger, and a receipt.

What a unit gives depends on its files and the options alone, so it may be done by any process, twice, or again after
a kill. The receipt is written last; without a valid one the unit counts as not done.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from data_pipeline.corpus import (
    CorpusError,
    Document,
    Dropped,
    FileFacts,
    Piece,
    TxtDocuments,
    as_txt_documents,
    count_lines,
    lines_before,
    read_piece,
)
from data_pipeline.durable import file_sha256, publish, temporary_name, write_file
from data_pipeline.filters import LengthFilter, Remark, is_validation, losses
from data_pipeline.shards import (
    SPLITS,
    DataFormatError,
    ShardInfo,
    ShardWriter,
    SplitName,
    check_shard,
    read_manifest,
    render_manifest,
)
from tokenizer.codec import Codec

RECEIPT_FORMAT = "zerohalf-receipt"
_MOST = 2**62
_BATCH_CHARS = 1 << 20
_BATCH_DOCUMENTS = 4096


class PrepareError(ValueError):
    """Work that cannot be started, continued or finished as asked. One line: what, the facts, what to do."""


@dataclass(frozen=True)
class Options:
    """What decides the content of a collection, beside its inputs and its tokenizer."""

    text_field: str = "text"
    validation_fraction: float = 0.02
    min_chars: int = 0
    max_chars: int | None = None
    unit_bytes: int = 64 * 1024 * 1024
    txt_documents: TxtDocuments = "file"

    def __post_init__(self) -> None:
        as_txt_documents(self.txt_documents)
        if not 0 <= self.validation_fraction < 1:
            raise PrepareError(f"a validation fraction of {self.validation_fraction} is not in [0, 1)")
        if self.unit_bytes < 1:
            raise PrepareError(
                f"units of {self.unit_bytes} bytes are too small; take 1 or more (64 MiB is the default)"
            )
        for name in ("unit_bytes", "min_chars", "max_chars"):
            if (getattr(self, name) or 0) > _MOST:  # the plan keeps it as a number of 64 bits
                raise PrepareError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} is too large; take {_MOST} or less"
                )
        try:
            self.text_field.encode("utf-8")
        except UnicodeEncodeError:
            raise PrepareError(f"--text-field {self.text_field!a} is not UTF-8, so no document has it") from None
        try:
            self.length_filter()
        except ValueError as error:
            raise PrepareError(str(error)) from None

    def record(self) -> dict[str, Any]:
        """As manifests keep them. What came later than their first version stands there only where it is chosen."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("txt_documents", "file")}

    def length_filter(self) -> LengthFilter:
        """The filter these options ask for."""
        return LengthFilter(self.min_chars, self.max_chars)


@dataclass(frozen=True)
class Unit:
    """One unit of one source. `number` names its shards."""

    source: str
    number: int
    pieces: tuple[Piece, ...]
    facts: tuple[FileFacts, ...]

    @property
    def stem(self) -> str:
        return f"{self.source}-{self.number:05d}"

    @property
    def input_bytes(self) -> int:
        """How many bytes of files this unit reads."""
        return sum(
            (facts.size if piece.stop is None else piece.stop) - piece.start
            for piece, facts in zip(self.pieces, self.facts, strict=True)
        )


@dataclass(frozen=True)
class Workplace:
    """Where a collection is made: data in `out`, receipts and locks in `out/.prepare` until the work is whole."""

    out: Path

    @property
    def state(self) -> Path:
        return self.out / ".prepare"

    @property
    def receipts(self) -> Path:
        return self.state / "receipts"

    def source(self, name: str) -> Path:
        return self.out / name

    def receipt(self, unit: Unit) -> Path:
        return self.receipts / f"{unit.stem}.json"

    def ledger(self, unit: Unit) -> Path:
        return self.receipts / f"{unit.stem}.ledger.jsonl"


class Progress(Protocol):
    """Hears what was done, and says when to stop."""

    def add(self, *, input_bytes: int = 0, text_bytes: int = 0, tokens: int = 0) -> None: ...

    def stopped(self) -> bool: ...


class StopWork(Exception):  # noqa: N818 - not an error: another unit failed first
    """Raised inside a unit when the whole work is to stop."""


def valid_receipt(place: Workplace, unit: Unit, codec: Codec) -> dict[str, Any] | None:
    """The receipt of a unit whose output stands whole (sizes and headers checked), or None: do it (again)."""
    try:
        receipt, _ = read_manifest(place.receipt(unit), RECEIPT_FORMAT)
        if receipt["source"] != unit.source or len(receipt["pieces"]) != len(unit.pieces):
            return None
        for shard in receipt_shards(place, receipt).values():
            check_shard(shard, codec.fingerprint, codec.vocab_size, codec.eos_id)
        return receipt if file_sha256(place.ledger(unit)) == receipt["ledger_sha256"] else None
    except (DataFormatError, FileNotFoundError):
        return None


def receipt_shards(place: Workplace, receipt: dict[str, Any]) -> dict[SplitName, ShardInfo]:
    """The shards a receipt tells of, by split."""
    folder = place.source(receipt["source"])
    return {
        split: ShardInfo.from_json(folder, receipt["shards"][split]) for split in SPLITS if split in receipt["shards"]
    }


def run_unit(
    place: Workplace, unit: Unit, options: Options, codec: Codec, *, strict: bool, progress: Progress
) -> dict[str, Any]:
    """Do one unit and leave its shards, ledger and receipt, durably; returns the receipt.

    CorpusError: a damaged or changed file; PrepareError: with `strict`, a document that could not be read. Nothing of
    the unit has been published then.
    """
    work = _UnitWork(place, unit, options, codec, strict, progress)
    try:
        return work.run()
    finally:
        work.discard()


@dataclass
class _UnitWork:
    place: Workplace
    unit: Unit
    options: Options
    codec: Codec
    strict: bool
    progress: Progress
    writers: dict[SplitName, ShardWriter] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {"dropped": Counter(), "notes": Counter()})
    batch: list[str] = field(default_factory=list)
    batch_chars: int = 0

    def __post_init__(self) -> None:
        self.ledger_path = temporary_name(self.place.ledger(self.unit))

    def run(self) -> dict[str, Any]:
        pieces = []
        with self.ledger_path.open("wb") as self.ledger:
            for number, (piece, facts) in enumerate(zip(self.unit.pieces, self.unit.facts, strict=True)):
                pieces.append(self._read(number, piece, facts))
                if FileFacts.of(piece) != facts:
                    raise CorpusError(f"{facts.path}: the file changed while it was read; let it rest and start again")
            self._encode()
            self.ledger.flush()
            os.fsync(self.ledger.fileno())
        ledger_sha256 = file_sha256(self.ledger_path)
        publish(self.ledger_path, self.place.ledger(self.unit))
        receipt: dict[str, Any] = {
            "format": RECEIPT_FORMAT,
            "version": 1,
            "source": self.unit.source,
            "number": self.unit.number,
            "pieces": pieces,
            "shards": {split: writer.publish().to_json() for split, writer in self.writers.items()},
            "ledger_sha256": ledger_sha256,
            **{kind: dict(counter) for kind, counter in self.counts.items()},
        }
        write_file(self.place.receipt(self.unit), render_manifest(receipt))
        return receipt

    def discard(self) -> None:
        self.ledger_path.unlink(missing_ok=True)
        for writer in self.writers.values():
            writer.discard()

    def _read(self, number: int, piece: Piece, facts: FileFacts) -> dict[str, Any]:
        """Read one piece to its verified end; returns its record for the provenance."""
        too_short_or_long = self.options.length_filter()
        items = 0
        digest = hashlib.sha256()

        def hear(count: int) -> None:
            self.progress.add(input_bytes=count)

        for item in read_piece(piece, self.options.text_field, hear, on_raw=digest.update):
            items += item.position > 0
            if isinstance(item, Dropped):
                if self.strict:
                    raise PrepareError(f"{_where(piece, item)}: {item.reason} {item.detail}".rstrip() + " (--strict)")
                self._note("dropped", number, item, Remark(item.reason, item.detail))
            elif remark := too_short_or_long(item.text):
                self._note("dropped", number, item, remark)
            else:
                for remark in losses(item.text):
                    self._note("notes", number, item, remark)
                self.batch.append(item.text)
                self.batch_chars += len(item.text)
                if self.batch_chars >= _BATCH_CHARS or len(self.batch) >= _BATCH_DOCUMENTS:
                    self._encode()
        stop = facts.size if piece.stop is None else piece.stop
        record = {"path": facts.path, "start": piece.start, "stop": piece.stop, "items": items}
        if piece.txt_documents == "block" and piece.stop is not None:  # blocks don't say how many lines they are
            record["lines"] = count_lines(piece)
        return {**record, "bytes": stop - piece.start, "sha256": digest.hexdigest()}

    def _note(self, kind: str, piece: int, item: Document | Dropped, remark: Remark) -> None:
        self.counts[kind][remark.reason] += 1
        entry = {"piece": piece, "path": item.path, "position": item.position, "kind": kind, **asdict(remark)}
        self.ledger.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    def _encode(self) -> None:
        if self.progress.stopped():
            raise StopWork
        text_bytes, tokens = 0, 0
        for text, ids in zip(self.batch, self.codec.encode_documents(self.batch), strict=True):
            raw = text.encode("utf-8")
            split: SplitName = "validation" if is_validation(raw, self.options.validation_fraction) else "train"
            self._writer(split).add(ids, len(raw))
            text_bytes += len(raw)
            tokens += len(ids) + 1
        self.progress.add(text_bytes=text_bytes, tokens=tokens)
        self.batch, self.batch_chars = [], 0

    def _writer(self, split: SplitName) -> ShardWriter:
        if split not in self.writers:
            self.writers[split] = ShardWriter(
                self.place.source(self.unit.source), f"{split}-{self.unit.number:05d}",
                vocab_size=self.codec.vocab_size, eos_id=self.codec.eos_id, fingerprint=self.codec.fingerprint,
            )  # fmt: skip
        return self.writers[split]


def _where(piece: Piece, item: Dropped) -> str:
    """File and line, the line counted from the file's start at the cost of reading up to it."""
    return f"{item.path}:{item.position + lines_before(piece)}"
