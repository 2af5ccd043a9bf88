"""Documents out of files: .txt (a document a file), .jsonl (plain, .gz, .zst: a document a line), .parquet (a row).

Every file, line or row gives exactly one `Document` or one `Dropped` with its reason: documents in = documents out +
drops. Faults of a document are drops; faults of a file that leave its end in doubt (compressed data cut short, a
damaged Parquet file, a file that cannot be read) raise `CorpusError`, possibly after thousands of good documents were
given: publish nothing of a file before its iterator has ended.

Lines end at ``\\n`` and nowhere else. The text is given as it stands: nothing is normalised, stripped or repaired.
This module is a leaf: it imports nothing of ours, so that the tokenizer's command line may use it alone.
"""

from __future__ import annotations

import glob
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

Kind = Literal["txt", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
SUFFIXES: dict[str, Kind] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".parquet": "parquet",
}
MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
_READ_BYTES = 1 << 20
_COMPRESSED_READ_BYTES = 1 << 14  # small, since one piece can inflate a thousandfold
_PARQUET_ROWS = 256

OnBytes = Callable[[int], None]


class CorpusError(ValueError):
    """Input that is missing, of an unknown kind, damaged or cut short. One line: which file, what, what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it stood: file, and line or row counted from 1 (1 for a whole .txt file)."""

    text: str
    path: str
    position: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """One document that could not be had, and why.

    Reasons: empty_file, empty_text, blank_line, invalid_utf8, nul_byte, bad_json, extra_data, not_an_object,
    missing_text, null_text, non_string_text, lone_surrogate, too_long.
    """

    path: str
    position: int
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Piece:
    """A file, or the lines of a plain .jsonl file that start at byte `start` or later and before `stop`."""

    path: Path
    kind: Kind
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Listing:
    """The files found for an input, in reading order, and those passed over in folders because of their kind."""

    files: list[Path]
    ignored: list[Path]


# ---------------------------------------------------------------- finding files


def file_kind(path: Path) -> Kind | None:
    """What kind of corpus file this name stands for, or None."""
    name = path.name.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def find_files(inputs: Path | str | Iterable[Path | str]) -> Listing:
    """The corpus files behind files, folders (searched to the bottom, hidden files left out) and glob patterns.

    Inputs keep their order; the files of one folder or pattern are sorted by name, byte by byte; a file named twice
    counts once. CorpusError: a path or pattern that matches nothing, a file of unknown kind, a folder without any.
    """
    files: dict[Path, Path] = {}
    ignored: list[Path] = []
    for one in [inputs] if isinstance(inputs, Path | str) else inputs:
        found, passed_over = _expand(Path(one))
        for file in found:
            files.setdefault(file.resolve(), file)
        ignored += passed_over
    if not files:
        raise CorpusError("no input was given")
    return Listing(list(files.values()), ignored)


def _expand(path: Path) -> tuple[list[Path], list[Path]]:
    if path.is_dir():
        inside = [
            Path(folder, name)
            for folder, folders, names in os.walk(path, onerror=_refuse_unreadable)
            if not _drop_hidden(folders)
            for name in names
            if not name.startswith(".")
        ]
        files = sorted((file for file in inside if file_kind(file) and file.is_file()), key=os.fsencode)
        if not files:
            raise CorpusError(f"{_shown(path)}: the folder holds no file of a known kind ({', '.join(SUFFIXES)})")
        return files, sorted((file for file in inside if not file_kind(file)), key=os.fsencode)
    if path.exists():
        if not path.is_file():
            raise CorpusError(f"{path}: not a regular file")
        if file_kind(path) is None:
            raise CorpusError(f"{path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        return [path], []
    if any(character in str(path) for character in "*?["):
        matches = sorted((Path(name) for name in glob.glob(str(path), recursive=True)), key=os.fsencode)  # noqa: PTH207
        files = [match for match in matches if match.is_file() and file_kind(match)]
        if not files:
            raise CorpusError(f"{path}: the pattern matches no file of a known kind ({', '.join(SUFFIXES)})")
        return files, [match for match in matches if match.is_file() and not file_kind(match)]
    raise CorpusError(f"{path}: no such file or folder")


def _drop_hidden(folders: list[str]) -> bool:
    """Keep os.walk out of hidden folders, by changing its list in place; always False."""
    folders[:] = [name for name in folders if not name.startswith(".")]
    return False


def _refuse_unreadable(error: OSError) -> None:
    raise CorpusError(f"{error.filename}: {error.strerror}")


# ---------------------------------------------------------------- units of work


def plan_units(files: Sequence[Path], unit_bytes: int) -> list[tuple[Piece, ...]]:
    """Cut files into units of work of about `unit_bytes` on disk each; the cut depends on names and sizes alone.

    A plain .jsonl file larger than that is cut into byte ranges, each a unit; files of other kinds are never cut;
    smaller files are grouped in order. Empty files belong to units too, since their drops must be counted.
    """
    if unit_bytes < 1:
        raise CorpusError(f"a unit of {unit_bytes} bytes is too small")
    units: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    group_bytes = 0
    for file in files:
        kind, size = file_kind(file), file.stat().st_size
        if kind is None:
            raise CorpusError(f"{file}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        cut = kind == "jsonl" and size > unit_bytes
        if group and (cut or group_bytes + size > unit_bytes):
            units.append(tuple(group))
            group, group_bytes = [], 0
        if cut:
            units += [
                (Piece(file, kind, start, min(start + unit_bytes, size)),) for start in range(0, size, unit_bytes)
            ]
        else:
            group.append(Piece(file, kind))
            group_bytes += size
    return [*units, tuple(group)] if group else units


# ---------------------------------------------------------------- reading


def read_documents(
    inputs: Path | str | Iterable[Path | str], *, text_field: str = "text"
) -> Iterator[Document | Dropped]:
    """All documents of files, folders and glob patterns, in a fixed order, with bounded memory.

    CorpusError: at once for what `find_files` refuses, while reading for a damaged file; see the module's docstring.
    """
    files = find_files(inputs).files
    return (
        item for unit in plan_units(files, unit_bytes=2**62) for piece in unit for item in read_piece(piece, text_field)
    )


def read_piece(piece: Piece, text_field: str = "text", on_bytes: OnBytes | None = None) -> Iterator[Document | Dropped]:
    """The documents of one piece. Positions of a byte range count its own lines from 1; every line gives one item.

    `on_bytes` hears how many bytes of the file were consumed since the last call.
    """
    hear = on_bytes or (lambda count: None)
    path = _shown(piece.path)
    try:
        if piece.path.stat().st_size == 0:
            yield Dropped(path, 0, "empty_file")
        elif piece.kind == "txt":
            yield _read_txt(piece.path, hear)
        elif piece.kind == "parquet":
            yield from _read_parquet(piece.path, text_field, hear)
        else:
            for position, line in enumerate(_lines(piece, hear), 1):
                yield _parse_line(line, path, position, text_field)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {_printable(error.strerror or str(error))}") from error


def _shown(path: Path) -> str:
    """A file's name for people and JSON, also where its bytes are not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _printable(detail: str) -> str:
    """One short line without half characters."""
    return " ".join(detail.encode("utf-8", "backslashreplace").decode("utf-8").split())[:200]


def _text_or_drop(text: str, path: str, position: int) -> Document | Dropped:
    return Document(text, path, position) if text else Dropped(path, position, "empty_text")


def _decode_or_drop(raw: bytes, path: str, position: int) -> Document | Dropped:
    try:
        return _text_or_drop(raw.decode("utf-8"), path, position)
    except UnicodeDecodeError as error:
        return Dropped(path, position, "invalid_utf8", f"byte {error.start}: {error.reason}")


def _too_long(path: str, position: int) -> Dropped:
    return Dropped(path, position, "too_long", f"more than {MAX_DOCUMENT_BYTES} bytes")


def _read_txt(path: Path, hear: OnBytes) -> Document | Dropped:
    with path.open("rb") as file:
        raw = file.read(MAX_DOCUMENT_BYTES + 1)
    hear(path.stat().st_size)
    if len(raw) > MAX_DOCUMENT_BYTES:
        return _too_long(_shown(path), 1)
    return _decode_or_drop(raw.removeprefix(b"\xef\xbb\xbf"), _shown(path), 1)


# ---------------------------------------------------------------- lines


def _lines(piece: Piece, hear: OnBytes) -> Iterator[bytes | None]:
    """Lines without their ``\\n``; None for one longer than MAX_DOCUMENT_BYTES, of which nothing is kept."""
    with piece.path.open("rb") as file:
        if piece.kind == "jsonl.gz":
            yield from _split(_inflate(piece.path, file, hear, _gzip_member, zlib.error, b"\0"))
        elif piece.kind == "jsonl.zst":
            import zstandard

            yield from _split(_inflate(piece.path, file, hear, _zstd_frame, zstandard.ZstdError, b""))
        elif piece.start == 0 and piece.stop is None:
            yield from _split(_plain(file, hear))
        else:
            yield from _range_lines(file, piece, hear)


def _plain(file: BinaryIO, hear: OnBytes) -> Iterator[bytes]:
    while data := file.read(_READ_BYTES):
        hear(len(data))
        yield data


def _range_lines(file: BinaryIO, piece: Piece, hear: OnBytes) -> Iterator[bytes | None]:
    """The lines that start within the range. The one under way at its start belongs to the range before."""
    position = piece.start
    if position:
        file.seek(position - 1)
        while (head := file.readline(_READ_BYTES)) and not head.endswith(b"\n"):
            pass
        position = file.tell()
    stop = os.fstat(file.fileno()).st_size if piece.stop is None else piece.stop
    file.seek(position)
    for line, length in _split_counted(_plain(file, lambda count: None), at_start=position == 0):
        if position >= stop:
            return
        hear(length)
        yield line
        position += length


def _split(chunks: Iterator[bytes]) -> Iterator[bytes | None]:
    return (line for line, _ in _split_counted(chunks, at_start=True))


def _split_counted(chunks: Iterator[bytes], *, at_start: bool) -> Iterator[tuple[bytes | None, int]]:
    """(line or None, its length in the file) with cost linear in the bytes, however long a line is."""
    parts: list[bytes] = []
    length = 0
    for chunk in chunks:
        position = 0
        while (end := chunk.find(b"\n", position)) >= 0:
            length += end - position
            parts.append(chunk[position:end])
            yield _join(parts, length, at_start), length + 1
            parts, length, position, at_start = [], 0, end + 1, False
        length += len(chunk) - position
        if length > MAX_DOCUMENT_BYTES:
            parts = []
        else:
            parts.append(chunk[position:])
    if length:
        yield _join(parts, length, at_start), length


def _join(parts: list[bytes], length: int, at_start: bool) -> bytes | None:
    if length > MAX_DOCUMENT_BYTES:
        return None
    line = parts[0] if len(parts) == 1 else b"".join(parts)
    return line.removeprefix(b"\xef\xbb\xbf") if at_start else line


# ---------------------------------------------------------------- compressed files


def _gzip_member() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstd_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()


def _inflate(
    path: Path, file: BinaryIO, hear: OnBytes, start_member: Callable[[], Any], fault: type[Exception], padding: bytes
) -> Iterator[bytes]:
    """What all gzip members or zstd frames of a file hold; CorpusError unless the last one reached its verified end."""
    members, member = 0, None
    try:
        while data := file.read(_COMPRESSED_READ_BYTES):
            hear(len(data))
            while data:
                if member is None:
                    if members and not (data := data.lstrip(padding)):
                        break
                    members, member = members + 1, start_member()
                yield member.decompress(data)
                data = member.unused_data
                if member.eof:
                    member = None
    except fault as error:
        raise CorpusError(f"{_shown(path)}: the compressed data is damaged ({error}); fetch the file again") from None
    if member is not None:
        raise CorpusError(f"{_shown(path)}: the compressed data is cut short; fetch the file again")


# ---------------------------------------------------------------- JSON


def _parse_line(line: bytes | None, path: str, position: int, text_field: str) -> Document | Dropped:
    if line is None:
        return _too_long(path, position)
    doubtful = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        doubtful = True
        record = _parse_doubtful(line, path, position, str(error))
        if isinstance(record, Dropped):
            return record
    if not isinstance(record, dict):
        return Dropped(path, position, "not_an_object", f"a JSON {type(record).__name__}")
    if text_field not in record:
        return Dropped(path, position, "missing_text", _printable(f"{text_field!r} is not among {', '.join(record)}"))
    text = record[text_field]
    if text is None:
        return Dropped(path, position, "null_text")
    if not isinstance(text, str):
        return Dropped(path, position, "non_string_text", f"a JSON {type(text).__name__}")
    if doubtful and not _is_encodable(text):
        return Dropped(path, position, "lone_surrogate", "an escape \\uD800 to \\uDFFF without its other half")
    return _text_or_drop(text, path, position)


def _parse_doubtful(line: bytes, path: str, position: int, complaint: str) -> Any:
    """What Python's parser, which also takes NaN and lone surrogates, makes of a line; else why it is dropped.

    Only lines that orjson refuses come here, so its slowness costs nothing.
    """
    if not line.strip(b" \t\r"):
        return Dropped(path, position, "blank_line")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Dropped(path, position, "invalid_utf8", f"byte {error.start}: {error.reason}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = "nul_byte" if "\0" in text else "extra_data" if error.msg == "Extra data" else "bad_json"
        return Dropped(path, position, reason, f"column {error.colno}: {error.msg}")
    except (RecursionError, ValueError):
        return Dropped(path, position, "bad_json", complaint)


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------- Parquet


def _read_parquet(path: Path, text_field: str, hear: OnBytes) -> Iterator[Document | Dropped]:
    import pyarrow
    from pyarrow import parquet

    shown, size, told = _shown(path), path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            rows = file.metadata.num_rows
            if rows == 0:
                yield Dropped(shown, 0, "empty_file", "no rows")
            names = file.schema_arrow.names
            if names.count(text_field) != 1:
                fields = _printable(f"{text_field!r} is not one of the columns {', '.join(names)}")
                yield from (Dropped(shown, row, "missing_text", fields) for row in range(1, rows + 1))
                return
            position = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_field]):
                for raw in _column_bytes(batch.column(text_field)):
                    position += 1
                    if isinstance(raw, bytes):
                        yield _decode_or_drop(raw, shown, position)
                    else:
                        yield Dropped(shown, position, "null_text" if raw is None else "non_string_text", raw or "")
                hear(size * position // rows - told)
                told = size * position // rows
            if position != rows:
                raise CorpusError(f"{shown}: {position} rows were read, but the file says {rows}; fetch it again")
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{shown}: damaged or not a Parquet file ({_printable(str(error))})") from None


def _column_bytes(column: Any) -> Iterator[bytes | str | None]:
    """Each value as UTF-8 bytes, None for a null, or the column's type as a string where it does not hold text."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = any(
        check(column.type)
        for check in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    )
    values = column.cast(pyarrow.large_binary()) if is_text else column
    for value in values:
        yield value.as_py() if is_text else str(column.type) if value.is_valid else None
