"""JSON lines: a document a line, its text in one field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from data_pipeline.readers.items import (
    BLANKS,
    BOM,
    Document,
    Dropped,
    find_text,
    printable,
    text_or_drop,
    too_long,
)
from data_pipeline.readers.places import Piece


def read_jsonl(piece: Piece, lines: Iterable[bytes | int], text_field: str) -> Iterator[Document | Dropped]:
    """One item a line. Positions count the lines of the piece from 1."""
    shown, loads = piece.shown, orjson.loads
    for position, line in enumerate(lines, 1):
        try:
            text = loads(line)[text_field]  # type: ignore[arg-type]  # so are nearly all; others are looked at closely
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if text and type(text) is str:
            yield Document(text, shown, position)
        else:
            if position == 1 and piece.start == 0 and isinstance(line, bytes):
                line = line.removeprefix(BOM)
            yield _parse_line(line, shown, position, text_field)


def _parse_line(line: bytes | int, path: str, position: int, text_field: str) -> Document | Dropped:
    if isinstance(line, int):
        return too_long(path, position)
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
    text = find_text(record, text_field, path, position)
    if isinstance(text, Dropped):
        return text
    if doubtful and not _is_encodable(text):
        return Dropped(path, position, "lone_surrogate", "an escape \\uD800 to \\uDFFF without its other half")
    return text_or_drop(text, path, position)


def _parse_doubtful(line: bytes, path: str, position: int, complaint: str) -> Any:
    """What Python's parser, which also takes NaN and lone surrogates, makes of a line; else why it is dropped.

    Only lines that orjson refuses come here, so its slowness costs nothing.
    """
    if not line.strip(BLANKS):
        return Dropped(path, position, "blank_line")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Dropped(path, position, "invalid_utf8", f"byte {error.start}: {error.reason}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = "nul_byte" if "\0" in text else "extra_data" if error.msg == "Extra data" else "bad_json"
        return Dropped(path, position, reason, printable(f"column {error.colno}: {error.msg}"))
    except (RecursionError, ValueError):
        return Dropped(path, position, "bad_json", printable(complaint))


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
