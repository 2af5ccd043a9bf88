"""One unit of work: some files, or a range of one, become at most one shard a split, a ledger, and a receipt.

What a unit gives depends on its files and the options alone, so it may be done by any process, twice, or again after
a kill. The receipt is written last; without a valid one the unit counts as not done.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from data_pipeline.corpus import (
    CorpusError,
    Document,
    Dropped,
    FileFacts,
    LongDocument,
    Piece,
    TxtDocuments,
    as_txt_documents,
    count_lines,
    lines_before,
    read_piece,
)
from data_pipeline.durable import file_sha256, publish, temporary_name, write_file
from data_pipeline.filters import Filter, LengthFilter, Remark, held_out, is_validation, loss
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
from tokenizer.codec import BATCH_BYTES, Codec, UncutTextError

RECEIPT_FORMAT = "zerohalf-receipt"
_MOST = 2**62
_BATCH_DOCUMENTS = 1 << 14


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
    deduplicate: bool = False

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
            LengthFilter(self.min_chars, self.max_chars)
        except ValueError as error:
            raise PrepareError(str(error)) from None

    def record(self) -> dict[str, Any]:
        """As manifests keep them. What came later than their first version stands there only where it is chosen."""
        later = {"txt_documents": "file", "deduplicate": False}
        return {name: value for name, value in asdict(self).items() if name not in later or value != later[name]}

    def filters(self) -> list[Filter]:
        """The filters that these options ask for, in order, made for one unit. Duplicates are dropped behind them."""
        return [LengthFilter(self.min_chars, self.max_chars)] if self.min_chars or self.max_chars is not None else []


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


# ---------------------------------------------------------------- reading


@dataclass
class PieceReading:
    """One piece on its way through: its items, each once, and then the record of what was read.

    CorpusError: a damaged file, or one that changed meanwhile.
    """

    piece: Piece
    facts: FileFacts
    options: Options
    progress: Progress
    strict: bool

    def __post_init__(self) -> None:
        self._items, self._sha256 = 0, ""

    def __iter__(self) -> Iterator[Document | Dropped]:
        """PrepareError: with `strict`, a document that could not be read."""

        def hear(count: int) -> None:
            self.progress.add(input_bytes=count)

        items, position, digest = 0, 0, hashlib.sha256()
        for item in read_piece(self.piece, self.options.text_field, hear, on_raw=digest.update):
            items, position = items + 1, item.position
            if self.strict and isinstance(item, Dropped):
                raise PrepareError(f"{self._where(item)}: {item.reason} {item.detail}".rstrip() + " (--strict)")
            yield item
            del item  # it may be long
        self._sha256 = digest.hexdigest()
        self._items = items - (items > 0 and position == 0)  # an empty file holds nothing

    def record(self) -> dict[str, Any]:
        """For the provenance: which bytes these were, and how many lines, blocks, rows or files."""
        piece, facts = self.piece, self.facts
        if FileFacts.of(piece) != facts:
            raise CorpusError(f"{facts.path}: the file changed while it was read; let it rest and start again")
        stop = facts.size if piece.stop is None else piece.stop
        record = {"path": facts.path, "start": piece.start, "stop": piece.stop, "items": self._items}
        if piece.txt_documents == "block" and piece.stop is not None:  # blocks don't say how many lines they are
            record["lines"] = count_lines(piece)
        return {**record, "bytes": stop - piece.start, "sha256": self._sha256}

    def _where(self, item: Dropped) -> str:
        """File and line, the line counted from the file's start at the cost of reading up to it."""
        return f"{item.path}:{item.position + lines_before(self.piece)}"


def pass_filters(document: Document, filters: Sequence[Filter]) -> Document | Remark:
    """The document behind all filters, or the first reason to drop it."""
    for passes in filters:
        passed = passes(document)
        if isinstance(passed, Remark):
            return passed
        document = passed
    return document


# ---------------------------------------------------------------- tokenizing


class UnitWork:
    """One unit done in two halves: `read` its documents into unnamed shards, then `publish` them with ledger and
    receipt, durably. The second half waits for the disk mostly, so another unit may be read meanwhile.

    Memory: a batch, or one longer document, whose ids come in parts.

    Whatever fails leaves nothing behind.
    """

    def __init__(
        self,
        place: Workplace,
        unit: Unit,
        options: Options,
        codec: Codec,
        filters: Sequence[Filter],
        *,
        strict: bool,
        progress: Progress,
    ) -> None:
        self._place, self._unit, self._options, self._codec = place, unit, options, codec
        self._filters, self._strict, self._progress = filters, strict, progress
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._writers: dict[SplitName, ShardWriter] = {}
        self._counts: dict[str, Counter[str]] = {"dropped": Counter(), "notes": Counter()}
        self._pieces: list[dict[str, Any]] = []
        self._ledger_path = temporary_name(place.ledger(unit))
        self._ledger = self._ledger_path.open("wb")

    def read(self, expected: Sequence[str] | None = None) -> None:
        """Read, filter and tokenize all documents; `expected`: the SHA-256 that the pieces must have.

        CorpusError: a damaged or changed file; PrepareError: with `strict`, a document that could not be read.
        """
        try:
            for number, (piece, facts) in enumerate(zip(self._unit.pieces, self._unit.facts, strict=True)):
                reading = PieceReading(piece, facts, self._options, self._progress, self._strict)
                for item in reading:
                    self._take(number, item)
                    del item  # it may be long
                record = reading.record()
                if expected is not None and expected[number] != record["sha256"]:
                    raise CorpusError(f"{facts.path}: changed since its documents were compared; start anew")
                self._pieces.append(record)
            self._encode()
        except BaseException:
            self.discard()
            raise

    def publish(self) -> dict[str, Any]:
        """Sync and name what was read; returns the receipt, which is written last."""
        place, unit = self._place, self._unit
        try:
            self._ledger.flush()
            os.fsync(self._ledger.fileno())
            self._ledger.close()
            ledger_sha256 = file_sha256(self._ledger_path)
            publish(self._ledger_path, place.ledger(unit))
            receipt: dict[str, Any] = {
                "format": RECEIPT_FORMAT,
                "version": 1,
                "source": unit.source,
                "number": unit.number,
                "pieces": self._pieces,
                "shards": {split: writer.publish().to_json() for split, writer in self._writers.items()},
                "ledger_sha256": ledger_sha256,
                **{kind: dict(counter) for kind, counter in self._counts.items()},
            }
            write_file(place.receipt(unit), render_manifest(receipt))
        finally:
            self.discard()
        return receipt

    def discard(self) -> None:
        """Close and remove what has no name yet; safe to call at any time."""
        with suppress(OSError):  # a full disk, which has been told
            self._ledger.close()
        self._ledger_path.unlink(missing_ok=True)
        for writer in self._writers.values():
            writer.discard()

    def _take(self, piece: int, item: Document | Dropped) -> None:
        if isinstance(item, Dropped):
            self._note("dropped", piece, item, Remark(item.reason, item.detail))
            return
        if self._filters:
            passed = pass_filters(item, self._filters)
            if isinstance(passed, Remark):
                self._note("dropped", piece, item, passed)
                return
            item = passed
        is_long = isinstance(item, LongDocument)
        text = item.utf8 if is_long else item.text
        if remark := loss(text):
            self._note("notes", piece, item, remark)
        if isinstance(text, bytes):
            self._encode()
            try:
                self._encode_long(text)
            except UncutTextError as error:
                self._note("dropped", piece, item, Remark("no_place_to_cut", str(error)))
            return
        raw = text.encode("utf-8")
        self._batch.append(raw)
        self._batch_bytes += len(raw)
        if self._batch_bytes >= BATCH_BYTES or len(self._batch) >= _BATCH_DOCUMENTS:
            self._encode()

    def _note(self, kind: str, piece: int, item: Document | Dropped, remark: Remark) -> None:
        self._counts[kind][remark.reason] += 1
        entry = {"piece": piece, "path": item.path, "position": item.position, "kind": kind, **asdict(remark)}
        self._ledger.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    def _encode(self) -> None:
        """Tokenize the documents that wait, and hand them to their shards, EOS behind each."""
        if self._progress.stopped():
            raise StopWork
        if not self._batch:
            return
        ids, ends = self._codec.encode_batch(self._batch)
        eos = np.array([self._codec.eos_id], ids.dtype)
        rows = [ids[start:stop] for start, stop in pairwise([0, *ends.tolist()])]
        lengths = np.diff(ends.astype(np.int64), prepend=0) + 1
        sizes = np.fromiter(map(len, self._batch), np.int64, len(self._batch))
        is_held_out = np.array(held_out(self._batch, self._options.validation_fraction))
        splits: tuple[tuple[SplitName, Any], ...] = (("train", ~is_held_out), ("validation", is_held_out))
        for split, is_mine in splits:
            mine = np.flatnonzero(is_mine)
            if len(mine):
                parts = [part for number in mine.tolist() for part in (rows[number], eos)]
                self._writer(split).add_documents(
                    np.concatenate(parts), np.cumsum(lengths[mine]), int(sizes[mine].sum())
                )
        self._progress.add(text_bytes=self._batch_bytes, tokens=len(ids) + len(ends))
        self._batch, self._batch_bytes = [], 0

    def _encode_long(self, text: bytes) -> None:
        """Tokenize one document and hand it to its shard, a part of its ids at a time. UncutTextError: see Codec."""
        parts = self._codec.encode_long(text)
        is_held_out = is_validation(text, self._options.validation_fraction)
        writer = self._writer("validation" if is_held_out else "train")
        tokens = 1
        for ids in parts:
            if self._progress.stopped():
                raise StopWork
            writer.add_documents(ids, np.empty(0, np.int64), 0)
            tokens += len(ids)
        writer.add_documents(np.array([self._codec.eos_id]), np.ones(1, np.int64), len(text))
        self._progress.add(text_bytes=len(text), tokens=tokens)

    def _writer(self, split: SplitName) -> ShardWriter:
        if split not in self._writers:
            self._writers[split] = ShardWriter(
                self._place.source(self._unit.source), f"{split}-{self._unit.number:05d}",
                vocab_size=self._codec.vocab_size, eos_id=self._codec.eos_id, fingerprint=self._codec.fingerprint,
            )  # fmt: skip
        return self._writers[split]
