"""Exact duplicates within a source: of documents with the same text the first in the order of input is kept.

Two passes, whatever the workers and machines. First each unit leaves a 16-byte hash of every document that the other
filters let through. When all units of a source have theirs, the hashes are compared and each unit gets the list of its
documents to drop, with the place of the first of their kind; tokenizing then reads the unit a second time.

Everything lies in `.prepare/duplicates/` until the collection is whole::

    NAME-00000.hashes    32 bytes a document, in runs of 2^20 documents, each run sorted by hash
    NAME-00000.json      the receipt: written last, with the SHA-256 of the hashes and of the input
    NAME/                the lists, 16 bytes a duplicate, sorted; renamed into place when all are written
    NAME/00000.repeats

Memory: hashes are compared in as many rounds as it takes, 2^22 documents at a time, about 100 bytes each.
"""

from __future__ import annotations

import os
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.corpus import Document, Dropped
from data_pipeline.durable import file_sha256, publish, sync_folder, temporary_name, write_file
from data_pipeline.shards import PLAN_FORMAT, PLAN_PATH, DataFormatError, read_manifest, render_manifest
from data_pipeline.unit import Options, PieceReading, PrepareError, Progress, StopWork, Unit, Workplace, pass_filters

HASHES_FORMAT = "zerohalf-hashes"
_KEY = b"zerohalf-duplicate-1"
_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4"), ("piece", "<u4"), ("position", "<u8")])
_REPEAT = np.dtype([("number", "<u4"), ("first_file", "<u4"), ("first_position", "<u8")])
_RUN_DOCUMENTS = 1 << 20
_ROUND_DOCUMENTS = 1 << 22
_REPORT_BYTES = 1 << 20

Rows = npt.NDArray[Any]


def duplicates_folder(place: Workplace) -> Path:
    """Where hashes and lists are kept until the collection is whole."""
    return place.state / "duplicates"


# ---------------------------------------------------------------- first pass: hashes of a unit


def hash_unit(place: Workplace, unit: Unit, options: Options, *, strict: bool, progress: Progress) -> None:
    """Leave the hashes of a unit's documents and their receipt, durably. Errors: as `UnitWork.read`."""
    final = _hashes_path(place, unit)
    temporary = temporary_name(final)
    filters, pieces, run = options.filters(), [], _Run(0)
    text_bytes = 0
    try:
        with temporary.open("wb") as file:
            for number, (piece, facts) in enumerate(zip(unit.pieces, unit.facts, strict=True)):
                reading = PieceReading(piece, facts, options, progress, strict)
                for item in reading:
                    passed = item if isinstance(item, Dropped) else pass_filters(item, filters)
                    if not isinstance(passed, Document):
                        continue
                    text = passed.utf8
                    run.add(text, number, item.position)
                    text_bytes += len(text)
                    if text_bytes >= _REPORT_BYTES:
                        progress.add(text_bytes=text_bytes)
                        text_bytes = 0
                        if progress.stopped():
                            raise StopWork
                    if len(run) == _RUN_DOCUMENTS:
                        file.write(run.sorted())
                        run = _Run(run.first + len(run))
                pieces.append(reading.record())
            documents = run.first + len(run)
            if documents > 2**32:
                raise PrepareError(
                    f"{unit.pieces[0].shown}: {documents:,} documents in one unit; cut the file in parts"
                )
            progress.add(text_bytes=text_bytes)
            file.write(run.sorted())
            file.flush()
            os.fsync(file.fileno())
        digest = file_sha256(temporary)
        publish(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    receipt = {
        "format": HASHES_FORMAT,
        "version": 1,
        "source": unit.source,
        "number": unit.number,
        "documents": documents,
        "pieces": pieces,
        "sha256": digest,
    }
    write_file(_receipt_path(place, unit), render_manifest(receipt))


class _Run:
    """Hashes and places of some documents, in the order in which they came."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._digests = bytearray()
        self._pieces, self._positions = array("I"), array("Q")

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, text: bytes, piece: int, position: int) -> None:
        self._digests += blake2b(text, digest_size=16, key=_KEY).digest()
        self._pieces.append(piece)
        self._positions.append(position)

    def sorted(self) -> bytes:
        """As they stand in the file: by hash, equal ones in the order of input."""
        rows = np.empty(len(self), _HASH)
        digests = np.frombuffer(self._digests, "<u8").reshape(-1, 2)
        rows["high"], rows["low"] = digests[:, 0], digests[:, 1]
        rows["number"] = np.arange(self.first, self.first + len(self))
        rows["piece"], rows["position"] = self._pieces, self._positions
        return rows[np.lexsort((rows["low"], rows["high"]))].tobytes()


def hashes_receipt(place: Workplace, unit: Unit) -> dict[str, Any] | None:
    """The receipt of a unit whose hashes stand there whole (by size), or None."""
    try:
        receipt, _ = read_manifest(_receipt_path(place, unit), HASHES_FORMAT)
        whole = _hashes_path(place, unit).stat().st_size == receipt["documents"] * _HASH.itemsize
    except (DataFormatError, FileNotFoundError):
        return None
    return receipt if whole and len(receipt["pieces"]) == len(unit.pieces) else None


def _hashes_path(place: Workplace, unit: Unit) -> Path:
    return duplicates_folder(place) / f"{unit.stem}.hashes"


def _receipt_path(place: Workplace, unit: Unit) -> Path:
    return duplicates_folder(place) / f"{unit.stem}.json"


# ---------------------------------------------------------------- between the passes: which documents repeat others


def find_repeats(place: Workplace, source: str, units: Sequence[Unit]) -> None:
    """Compare all hashes of a source and leave each unit's list, durably; nothing is done where they stand already.

    `units`: all of the source, in order, each with its hashes. Only one process at a time may do this.
    """
    folder = duplicates_folder(place) / source
    if folder.exists():
        return
    receipts = []
    for unit in units:
        receipt = hashes_receipt(place, unit)
        if receipt is None:
            raise PrepareError(f"{_hashes_path(place, unit)}: missing or damaged; start again to make it anew")
        if file_sha256(_hashes_path(place, unit)) != receipt["sha256"]:
            _receipt_path(place, unit).unlink()
            raise PrepareError(f"{_hashes_path(place, unit)}: damaged; start again to make it anew")
        receipts.append(receipt)
    partial = duplicates_folder(place) / f".{source}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    files_before, lines_before = _places(receipts)
    rounds = -(-sum(receipt["documents"] for receipt in receipts) // _ROUND_DOCUMENTS)
    for number in range(rounds):
        low, high = (-(-(place_in << 64) // rounds) for place_in in (number, number + 1))
        for unit_number, repeats in _repeats(place, units, low, high, files_before, lines_before):
            with (partial / f"{unit_number:05d}.repeats").open("ab") as file:
                file.write(repeats.tobytes())
    for path in sorted(partial.iterdir()):
        rows = np.fromfile(path, _REPEAT)
        write_file(path, rows[np.argsort(rows["number"])].tobytes())
    partial.rename(folder)
    sync_folder(folder.parent)


def _places(receipts: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """For each unit: how many of the source's files come before its first piece's, and how many lines of that file come
    before that piece."""
    files_before, lines_before = [], []
    files = lines = 0
    for receipt in receipts:
        pieces = receipt["pieces"]
        goes_on = pieces[0]["start"] > 0
        files_before.append(files - goes_on)
        lines_before.append(lines if goes_on else 0)
        files += len(pieces) - goes_on
        lines = lines_before[-1] + pieces[0].get("lines", pieces[0]["items"])
    return np.array(files_before, np.uint32), np.array(lines_before, np.uint64)


def _repeats(
    place: Workplace,
    units: Sequence[Unit],
    low: int,
    high: int,
    files_before: npt.NDArray[np.uint32],
    lines_before: npt.NDArray[np.uint64],
) -> Iterator[tuple[int, Rows]]:
    """Of the documents whose hash's upper half is in [low, high): those that repeat an earlier one, by unit."""
    parts, sizes = [], []
    for unit in units:
        mine = [np.empty(0, _HASH), *_with_hashes(_hashes_path(place, unit), low, high)]
        parts.append(np.concatenate(mine))
        sizes.append(len(parts[-1]))
    rows = np.concatenate(parts)
    unit_of = np.repeat(np.arange(len(units), dtype=np.uint32), sizes)
    order = np.lexsort((rows["low"], rows["high"]))  # stable: equal ones stay in the order of input
    rows, unit_of = rows[order], unit_of[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
    first_of = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    again = np.flatnonzero(~is_first)
    again = again[np.argsort(unit_of[again], kind="stable")]
    firsts = first_of[again]
    repeats = np.empty(len(again), _REPEAT)
    repeats["number"] = rows["number"][again]
    repeats["first_file"] = files_before[unit_of[firsts]] + rows["piece"][firsts]
    repeats["first_position"] = lines_before[unit_of[firsts]] + rows["position"][firsts]
    borders = np.flatnonzero(np.diff(unit_of[again])) + 1
    for part, unit_numbers in zip(np.split(repeats, borders), np.split(unit_of[again], borders), strict=True):
        if len(part):
            yield units[int(unit_numbers[0])].number, part


def _with_hashes(path: Path, low: int, high: int) -> Iterator[Rows]:
    """The rows of a unit whose hash's upper half is in [low, high), a part a run."""
    if not path.stat().st_size:
        return
    rows = np.memmap(path, _HASH, mode="r")
    for start in range(0, len(rows), _RUN_DOCUMENTS):
        run = rows[start : start + _RUN_DOCUMENTS]
        first, last = (bisect_left(run["high"], bound) for bound in (low, high))
        yield np.array(run[first:last])


# ---------------------------------------------------------------- second pass: what a unit drops


def read_repeats(place: Workplace, unit: Unit) -> tuple[Iterator[tuple[int, str]], list[str]]:
    """The documents of a unit to drop, by number, each with the place of the first of its kind; and the SHA-256 that
    the unit's pieces had when they were compared.
    """
    receipt = hashes_receipt(place, unit)
    if receipt is None:
        raise PrepareError(f"{_hashes_path(place, unit)}: missing or damaged; start again to make it anew")
    path = duplicates_folder(place) / unit.source / f"{unit.number:05d}.repeats"
    rows = np.fromfile(path, _REPEAT) if path.exists() else np.empty(0, _REPEAT)
    return _shown(place, unit.source, rows), [piece["sha256"] for piece in receipt["pieces"]]


def _shown(place: Workplace, source: str, rows: Rows) -> Iterator[tuple[int, str]]:
    if not len(rows):
        return
    plan, _ = read_manifest(place.out / PLAN_PATH, PLAN_FORMAT)
    files = [facts["path"] for facts in plan["sources"][source]["files"]]
    for number, file, position in rows:
        yield int(number), f"{files[file]}:{position}"
