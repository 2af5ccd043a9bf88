"""Where input lies (a path, an address that fsspec opens, standard input), what kind it is, and its bytes in order."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from data_pipeline.readers.items import CorpusError, OnBytes, OnRaw, printable

Place = Path | str  # a path of this machine; else an address with a scheme, or STDIN
TxtDocuments = Literal["file", "block", "line"]

STDIN = "-"
COMPRESSIONS = ("gz", "zst", "xz", "bz2")
_LINE_FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl"}
SUFFIXES = {
    **_LINE_FORMATS,
    **{f"{suffix}.{how}": f"{kind}.{how}" for suffix, kind in _LINE_FORMATS.items() for how in COMPRESSIONS},
    ".parquet": "parquet",
    ".arrow": "arrow",
}
KNOWN = f"{', '.join(_LINE_FORMATS)} (each also with .{', .'.join(COMPRESSIONS)}), .parquet, .arrow"
ROWS = "rows"  # the kind of files that only the `datasets` library reads

READ_BYTES = 1 << 17  # small enough to stay in the CPU's cache while it is parsed
COMPRESSED_READ_BYTES = 1 << 18
# What says that a remote file is the one it was, the strongest first; each filesystem of fsspec gives some of them.
_IDENTITIES = ("sha256", "blob_id", "ETag", "etag", "md5", "md5Hash", "Content-MD5", "Digest", "checksum", "version_id",
               "mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")  # fmt: skip


@dataclass(frozen=True)
class DatasetFile:
    """One data file of a Hugging Face dataset that only `datasets` can read: which dataset, and the file's number."""

    address: str
    number: int


@dataclass(frozen=True)
class Piece:
    """A file, or the lines or blocks of a plain text file that start at byte `start` or later and before `stop`.

    `name` is what ledgers and provenance call it, where that is not its path; `tag` is what it is known by, where
    that is not its time.
    """

    path: Place
    kind: str
    start: int = 0
    stop: int | None = None
    txt_documents: TxtDocuments = "file"
    name: str | None = None
    tag: str | None = None
    dataset: DatasetFile | None = None

    @property
    def shown(self) -> str:
        """The file's name for people and JSON, also where its bytes are not valid UTF-8."""
        return self.name or shown(self.path)

    @property
    def is_cuttable(self) -> bool:
        """Whether documents can be found from any byte on: in plain files of lines or blocks."""
        return self.kind == "jsonl" or (self.kind == "txt" and self.txt_documents != "file")


@dataclass(frozen=True)
class FileFacts:
    """What must not change of an input file while work on it goes on, be it over several runs.

    A path of this machine has `mtime_ns`; other places have a `tag` (ETag, checksum or time) where they give one.
    """

    path: str
    size: int
    mtime_ns: int | None = None
    tag: str | None = None

    @classmethod
    def of(cls, piece: Piece, *, listed: bool = False) -> FileFacts:
        """The facts as they are now, or as a listing just told them. OSError, CorpusError: the file is gone."""
        if isinstance(piece.path, Path):
            stat = piece.path.stat()
            return cls(piece.shown, stat.st_size, None if piece.tag else stat.st_mtime_ns, piece.tag)
        with remote(piece.path) as (filesystem, name):
            if not listed:
                filesystem.invalidate_cache()
            info = filesystem.info(name)
        size = info.get("size")
        if not isinstance(size, int):
            raise CorpusError(f"{piece.shown}: no size is given for it; fetch it to a file, or pipe it in")
        key = next((key for key in _IDENTITIES if info.get(key) is not None), None)
        return cls(piece.shown, size, tag=None if key is None else f"{key}={info[key]}")

    def record(self) -> dict[str, Any]:
        """As the plan keeps it: what is known alone."""
        return {key: value for key, value in vars(self).items() if value is not None}


class Found(NamedTuple):
    """A whole file of input and what it was when it was found."""

    piece: Piece
    facts: FileFacts


def shown(place: Place) -> str:
    """A place as text that is valid UTF-8; of an address without user and query, where passwords and keys stand."""
    text = os.fsencode(place).decode("utf-8", "backslashreplace")
    return re.sub(r"(?<=://)[^/@]*@|\?.*", "", text) if is_address(place) else text


def is_address(place: Place) -> bool:
    """Whether a string names something else than a path: `scheme://…` or standard input."""
    return isinstance(place, str) and (place == STDIN or re.match(r"[a-z][a-z0-9+.-]*://", place) is not None)


def file_kind(place: Place) -> str | None:
    """What kind of corpus file this name stands for, or None."""
    name = shown(place).lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


# ---------------------------------------------------------------- bytes


def read_chunks(piece: Piece, chunk_bytes: int, on_bytes: OnBytes, on_raw: OnRaw | None) -> Iterator[bytes]:
    """The file from the byte before the piece (does a line begin with it?) to its end; take as many as are needed.

    `on_bytes` and `on_raw` hear of the bytes of the piece alone.
    """
    position = max(piece.start - 1, 0)
    with _open(piece.path) as file:
        if position:
            file.seek(position)
        while chunk := file.read(chunk_bytes):
            stop = len(chunk) if piece.stop is None else max(piece.stop - position, 0)
            if own := chunk[max(piece.start - position, 0) : stop]:
                on_bytes(len(own))
                if on_raw:
                    on_raw(own)
            position += len(chunk)
            yield chunk


def drain(piece: Piece, on_raw: OnRaw) -> None:
    """Let `on_raw` hear the whole of a piece."""
    position = max(piece.start - 1, 0)
    for chunk in read_chunks(piece, READ_BYTES, lambda count: None, on_raw):
        position += len(chunk)
        if piece.stop is not None and position >= piece.stop:
            return


@contextmanager
def open_seekable(piece: Piece, on_raw: OnRaw | None) -> Iterator[BinaryIO]:
    """The whole file, open for reading anywhere: itself if it is local, else a nameless copy in the temporary folder.

    Formats that are read from their end would fetch a remote file piecemeal, and twice where it is to be hashed.
    """
    if isinstance(piece.path, Path):
        if on_raw:
            drain(piece, on_raw)
        with piece.path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as copy:
        for chunk in read_chunks(piece, READ_BYTES, lambda count: None, on_raw):
            copy.write(chunk)
        copy.flush()
        copy.seek(0)
        yield copy


@contextmanager
def _open(place: Place) -> Iterator[Any]:
    if isinstance(place, Path):
        with place.open("rb") as file:
            yield file
    elif place == STDIN:
        if sys.stdin is None:  # as `<&-` leaves it
            raise CorpusError("standard input is closed; name a file")
        yield sys.stdin.buffer
    else:
        with remote(place) as (filesystem, name), filesystem.open(name, "rb") as file:
            yield file


@contextmanager
def remote(address: str) -> Iterator[tuple[Any, str]]:
    """The fsspec filesystem of an address, and the file's name there; whatever goes wrong there is a CorpusError."""
    import fsspec

    try:
        yield fsspec.core.url_to_fs(address)
    except CorpusError:
        raise
    except ImportError as error:  # a filesystem whose package is not installed
        raise CorpusError(f"{shown(address)}: {printable(str(error))}") from None
    except FileNotFoundError:
        raise CorpusError(f"{shown(address)}: no such file or folder") from None
    except Exception as error:  # each filesystem has its own classes of errors
        what = printable(str(error)) or type(error).__name__
        raise CorpusError(f"{shown(address)}: cannot be read: {what}") from None
