"""Documents out of files, whatever their kind and place; readers/ has a file a format, and this is what others use.

Every file, line, block or row gives exactly one `Document` or one `Dropped` with its reason: documents in = documents
out + drops. Faults of a document are drops; faults of a file that leave its end in doubt (compressed data cut short, a
damaged Parquet file, a file that cannot be read) raise `CorpusError`, possibly after thousands of good documents were
given: publish nothing of a file before its iterator has ended.

The text is given as it stands: nothing is normalised, stripped or repaired. This module and its readers are a leaf:
they import nothing of ours, so that the tokenizer's command line may use them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

from data_pipeline.readers.compression import inflate
from data_pipeline.readers.finding import Listing, find_files
from data_pipeline.readers.huggingface import is_dataset, read_rows
from data_pipeline.readers.items import CorpusError, Document, Dropped, LongDocument, OnBytes, OnRaw, printable
from data_pipeline.readers.jsonl import read_jsonl
from data_pipeline.readers.lines import count_lines, own_lines, split_lines
from data_pipeline.readers.places import (
    COMPRESSED_READ_BYTES,
    KNOWN,
    READ_BYTES,
    ROWS,
    STDIN,
    SUFFIXES,
    FileFacts,
    Found,
    Piece,
    Place,
    TxtDocuments,
    drain,
    file_kind,
    is_address,
    read_chunks,
    shown,
)
from data_pipeline.readers.txt import read_blocks, read_file, read_lines

__all__ = [
    "KNOWN", "STDIN", "CorpusError", "Document", "Dropped", "FileFacts", "Found", "Listing", "LongDocument", "Piece",
    "Place", "TxtDocuments", "as_txt_documents", "count_lines", "file_kind", "find_files", "hear_raw", "is_local",
    "lines_before", "plan_units", "read_documents", "read_piece", "recorded_piece", "shown", "standard_input",
]  # fmt: skip

_STDIN_NAME = "<stdin>"


def is_local(place: Place) -> bool:
    """Whether this is a path of this machine, not an address, a data set's name or standard input."""
    return not (is_address(place) or is_dataset(place))


def as_txt_documents(word: str) -> TxtDocuments:
    """What a word says of .txt files: a document a file, a block or a line. CorpusError: none of these."""
    for mode in get_args(TxtDocuments):
        if word == mode:
            return mode  # type: ignore[no-any-return]
    raise CorpusError(f"{word!r} is no way to cut .txt files; say {', '.join(get_args(TxtDocuments))}")


def standard_input(kind: str, txt_documents: TxtDocuments = "file") -> Found:
    """Standard input as a file to be read once, of a kind such as "jsonl" or "txt.gz".

    CorpusError: there is no such kind.
    """
    if kind not in SUFFIXES.values():
        raise CorpusError(f"{kind!r} is no kind of input; known are {', '.join(dict.fromkeys(SUFFIXES.values()))}")
    name = f"{_STDIN_NAME}.{kind}"
    return Found(Piece(STDIN, kind, txt_documents=txt_documents, name=name), FileFacts(name, 0))


def recorded_piece(path: str, start: int, stop: int | None, txt_documents: TxtDocuments = "file") -> Piece | None:
    """A piece as a manifest's provenance names it, or None where it cannot be read again from that name alone."""
    place: Place = path if is_address(path) else Path(path)
    kind = file_kind(place)
    return Piece(place, kind, start, stop, txt_documents) if kind and not path.startswith(_STDIN_NAME) else None


def lines_before(piece: Piece) -> int:
    """How many lines of the file start before the piece, at the cost of reading up to it."""
    return count_lines(replace(piece, start=0, stop=piece.start)) if piece.start else 0


def plan_units(files: Sequence[Found], unit_bytes: int) -> list[tuple[Piece, ...]]:
    """Cut files into units of work of about `unit_bytes` each; the cut depends on names and sizes alone.

    A plain file of lines (or blocks) larger than that is cut into byte ranges, each a unit; other files are never cut;
    smaller files are grouped in order. Empty files belong to units too, since their drops must be counted.
    """
    if unit_bytes < 1:
        raise CorpusError(f"a unit of {unit_bytes} bytes is too small")
    units: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    group_bytes = 0
    for piece, facts in files:
        size = facts.size
        cut = piece.is_cuttable and size > unit_bytes
        if group and (cut or group_bytes + size > unit_bytes):
            units.append(tuple(group))
            group, group_bytes = [], 0
        if cut:
            starts = range(0, size, unit_bytes)
            units += [(replace(piece, start=start, stop=min(start + unit_bytes, size)),) for start in starts]
        else:
            group.append(piece)
            group_bytes += size
    return [*units, tuple(group)] if group else units


def read_documents(
    inputs: Place | Iterable[Place], *, text_field: str = "text", txt_documents: TxtDocuments = "file"
) -> Iterator[Document | Dropped]:
    """All documents of inputs as `find_files` takes them, in a fixed order, with bounded memory.

    CorpusError: at once for what `find_files` refuses, while reading for a damaged file; see the module's docstring.
    """
    files = find_files(inputs, txt_documents=txt_documents).files
    return (item for piece, _ in files for item in read_piece(piece, text_field))


def hear_raw(piece: Piece, on_raw: OnRaw) -> None:
    """Let `on_raw` hear each byte of a piece, in order. CorpusError: it cannot be read."""
    try:
        drain(piece, on_raw)
    except OSError as error:
        raise CorpusError(f"{piece.shown}: cannot be read: {printable(error.strerror or str(error))}") from error


def read_piece(
    piece: Piece, text_field: str = "text", on_bytes: OnBytes | None = None, *, on_raw: OnRaw | None = None
) -> Iterator[Document | Dropped]:
    """The documents of one piece. Positions of a byte range count its own lines from 1; every line gives one item.

    `on_bytes` hears how many bytes of the file were consumed since the last call; `on_raw` hears each byte of the piece
    once, in order, by the time the iterator ends.
    """
    try:
        yield from _read(piece, text_field, on_bytes or (lambda count: None), on_raw)
    except OSError as error:
        raise CorpusError(f"{piece.shown}: cannot be read: {printable(error.strerror or str(error))}") from error


def _read(piece: Piece, text_field: str, on_bytes: OnBytes, on_raw: OnRaw | None) -> Iterator[Document | Dropped]:
    """What the reader of the piece's kind gives; those that need a large library are imported when they are needed."""
    if piece.kind == ROWS:
        yield from read_rows(piece, text_field, on_bytes, on_raw)
    elif piece.kind == "parquet":
        from data_pipeline.readers.parquet import read_parquet

        yield from read_parquet(piece, text_field, on_bytes, on_raw)
    elif piece.kind == "arrow":
        from data_pipeline.readers.arrow import read_arrow

        yield from read_arrow(piece, text_field, on_bytes, on_raw)
    else:
        yield from _read_in_order(piece, text_field, on_bytes, on_raw)


def _read_in_order(
    piece: Piece, text_field: str, on_bytes: OnBytes, on_raw: OnRaw | None
) -> Iterator[Document | Dropped]:
    form, _, compression = piece.kind.partition(".")
    chunks = read_chunks(piece, COMPRESSED_READ_BYTES if compression else READ_BYTES, on_bytes, on_raw)
    first = next(chunks, None)
    if first is None:
        yield Dropped(piece.shown, 0, "empty_file")
        return
    chunks = chain([first], chunks)
    if compression:
        chunks = inflate(chunks, compression, piece.shown)
    if form == "jsonl":
        yield from read_jsonl(piece, split_lines(own_lines(piece, chunks)), text_field)
    elif piece.txt_documents == "line":
        yield from read_lines(piece, split_lines(own_lines(piece, chunks)))
    elif piece.txt_documents == "block":
        yield from read_blocks(piece, chunks)
    else:
        yield from read_file(piece, chunks)
