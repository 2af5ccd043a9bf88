"""Where a stored document stood: its input file, its line or row, its text as it was read.

No index is kept for this. A unit of work is read again: the documents of its pieces, less those that the ledger says
were dropped, are the unit's documents in order, and the keyed hash of each text says which split it went to. Which
pieces a unit had follows from the counts in the manifest. A file is believed only where the bytes of the piece still
have the SHA-256 that they had then.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from data_pipeline.corpus import CorpusError, Dropped, Piece, hear_raw, read_piece, recorded_piece
from data_pipeline.filters import is_validation
from data_pipeline.shards import LEDGER_NAME, SPLITS, DataFormatError, Source, SplitName


@dataclass(frozen=True)
class Origin:
    """A document in its input: the file as it was given to `prepare`, the line or row from 1, and the text."""

    path: str
    position: int
    text: str


@dataclass(frozen=True)
class Lost:
    """Why a document cannot be found in its input any more: which file, and what is the matter with it."""

    reason: str


@dataclass
class _Piece:
    """A record of `provenance.files`, with the lines of its file before it and what the ledger says of its own."""

    record: dict[str, Any]
    lines_before: int
    drops: int = 0
    dropped: set[int] = field(default_factory=set)  # positions in the file; filled for pieces that are read

    @property
    def last_line(self) -> float:
        """The last position that is this piece's: of a file that was not cut, any."""
        if self.record["stop"] is None:
            return math.inf
        return self.lines_before + int(self.record.get("lines", self.record["items"]))

    @property
    def documents(self) -> int:
        kept: int = self.record["items"] - self.drops
        return kept


@dataclass(frozen=True)
class _Unit:
    """The pieces of one unit that gave documents, and the number of its first document in each split."""

    pieces: list[_Piece]
    first: dict[SplitName, int]
    documents: dict[SplitName, int]


def find_origins(
    source: Source, wanted: Mapping[SplitName, Sequence[int]]
) -> Iterator[tuple[SplitName, int, Origin | Lost]]:
    """The origin of each document asked for by split and number (from 0), in the order of the units.

    Each unit that holds one is read once, up to the last one asked for. DataFormatError: a source that was not made
    from text, or whose manifest and ledger contradict its shards. ValueError: a document that does not exist.
    """
    if "converted_from" in source.manifest["options"]:
        raise DataFormatError(
            f"{source.path}: converted from token files ({source.manifest['options']['converted_from']}), so there is "
            "no text to read again"
        )
    for split, numbers in wanted.items():
        for number in numbers:
            if not 0 <= number < source.splits[split].documents:
                raise ValueError(f"document {number} does not exist; {split} has {source.splits[split].documents:,}")
    chosen = []
    for unit in _units(source):
        asked = {
            split: {n for n in numbers if unit.first[split] <= n < unit.first[split] + unit.documents[split]}
            for split, numbers in wanted.items()
        }
        if any(asked.values()):
            chosen.append((unit, asked))
    _note_dropped(source, [piece for unit, _ in chosen for piece in unit.pieces])
    for unit, asked in chosen:
        yield from _find_in_unit(source, unit, asked)


def _find_in_unit(
    source: Source, unit: _Unit, asked: dict[SplitName, set[int]]
) -> Iterator[tuple[SplitName, int, Origin | Lost]]:
    following = dict(unit.first)
    lost = Lost(f"{source.path}: the source files give fewer documents than were stored")
    try:
        for split, origin in _read_unit(source, unit):
            number = following[split]
            following[split] += 1
            if number in asked.get(split, ()):
                asked[split].remove(number)
                yield split, number, origin
                if not any(asked.values()):
                    return
    except _GoneError as error:
        lost = Lost(str(error))
    for split, numbers in asked.items():
        for number in sorted(numbers):
            yield split, number, lost


class _GoneError(Exception):
    """A piece that is not there, or not as it was."""


def _read_unit(source: Source, unit: _Unit) -> Iterator[tuple[SplitName, Origin]]:
    """The documents of a unit in the order in which they were written, each with its split."""
    options = source.manifest["options"]
    for piece in unit.pieces:
        path = piece.record["path"]
        try:
            corpus_piece = _corpus_piece(piece.record, options)
            _refuse_changed(corpus_piece, piece.record)
            for item in read_piece(corpus_piece, options["text_field"]):
                position = item.position + piece.lines_before
                if isinstance(item, Dropped) or position in piece.dropped:
                    continue
                held_out = is_validation(item.utf8, options["validation_fraction"])
                yield "validation" if held_out else "train", Origin(path, position, item.text)
        except CorpusError as error:
            raise _GoneError(str(error)) from None


def _corpus_piece(record: dict[str, Any], options: Mapping[str, Any]) -> Piece:
    mode = options.get("txt_documents", "file")
    piece = recorded_piece(record["path"], record["start"], record["stop"], mode)
    if piece is None:
        raise _GoneError(f"{record['path']} cannot be read a second time")
    return piece


def _refuse_changed(piece: Piece, record: dict[str, Any]) -> None:
    digest, size = hashlib.sha256(), 0

    def hear(raw: bytes) -> None:
        nonlocal size
        digest.update(raw)
        size += len(raw)

    hear_raw(piece, hear)
    if (size, digest.hexdigest()) != (record["bytes"], record["sha256"]):
        raise _GoneError(f"{piece.shown} has changed since it was tokenized")


# ---------------------------------------------------------------- units, out of manifest and ledger


def _units(source: Source) -> Iterator[_Unit]:
    """All units that gave documents. Their pieces stand in the manifest in the order of the units, without a border:
    it is where the documents of the pieces add up to those of the unit's shards."""
    stored: dict[int, dict[SplitName, int]] = defaultdict(lambda: dict.fromkeys(SPLITS, 0))
    for split in SPLITS:
        for shard in source.splits[split].shards:
            stored[_unit_number(shard.stem)][split] = shard.documents
    pieces = iter([piece for piece in _pieces(source) if piece.documents])
    first = dict.fromkeys(SPLITS, 0)
    for number in sorted(stored):
        documents = stored[number]
        missing, mine = sum(documents.values()), []
        while missing > 0 and (piece := next(pieces, None)):
            mine.append(piece)
            missing -= piece.documents
        if missing:
            raise DataFormatError(
                f"{source.path}: the documents of the input files do not add up to those of shard {number}"
            )
        yield _Unit(mine, dict(first), documents)
        first = {split: first[split] + documents[split] for split in SPLITS}


def _unit_number(stem: str) -> int:
    match = re.fullmatch(r"(?:train|validation)-(\d+)", stem)
    if match is None:
        raise DataFormatError(f"{stem}: not the name of a shard that `prepare` gives")
    return int(match[1])


def _pieces(source: Source) -> list[_Piece]:
    """The pieces of the input in order, each with the number of its documents that the ledger says were dropped."""
    lines: dict[str, int] = defaultdict(int)
    pieces = []
    for record in source.manifest["provenance"]["files"]:
        pieces.append(_Piece(record, lines[record["path"]]))
        lines[record["path"]] += record.get("lines", record["items"])
    for piece, _ in _drops(source, pieces):
        piece.drops += 1
    return pieces


def _note_dropped(source: Source, pieces: list[_Piece]) -> None:
    for piece, position in _drops(source, pieces):
        piece.dropped.add(position)


def _drops(source: Source, pieces: list[_Piece]) -> Iterator[tuple[_Piece, int]]:
    """Every drop in these pieces, with its position in the file. Empty files, at position 0, gave no item to drop."""
    by_path: dict[str, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        by_path[piece.record["path"]].append(piece)
    with (source.path / LEDGER_NAME).open("rb") as ledger:
        for line in ledger:
            entry = orjson.loads(line)
            if entry["kind"] != "dropped":
                continue
            for piece in by_path.get(entry["path"], ()):
                if piece.lines_before < entry["position"] <= piece.last_line:
                    yield piece, entry["position"]
