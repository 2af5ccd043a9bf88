"""JSON lines: a document a line, its text in one field."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

import orjson

from data_pipeline.readers import items
from data_pipeline.readers.items import (
    BLANKS,
    BOM,
    Document,
    Dropped,
    LongDocument,
    find_text,
    printable,
    text_or_drop,
    too_long,
)
from data_pipeline.readers.places import Piece

_PART_BYTES = 1 << 20
_LOOKED_AT_BYTES = 64 * 1024 * 1024
"""Why a longer line is no sound JSON is not looked into: Python's parser takes twelve times its bytes."""
_ESCAPE_BYTES = 12  # two surrogates, \\uD83D\\uDE00
_BACKSLASH = ord("\\")
_KEY_ENDS = re.compile(rb"[ \t\r]*:")


def read_jsonl(piece: Piece, lines: Iterable[bytes | int], text_field: str) -> Iterator[Document | Dropped]:
    """One item a line. Positions count the lines of the piece from 1."""
    shown, loads, position = piece.shown, orjson.loads, 0
    for line in lines:  # without `enumerate`, which keeps what it gave last
        position += 1
        if isinstance(line, int):
            yield too_long(shown, position)
            continue
        if position == 1 and piece.start == 0:
            line = line.removeprefix(BOM)
        if len(line) > items.LONG_BYTES:
            item = _read_long(line, shown, position, text_field)
            if item is None and len(line) > _LOOKED_AT_BYTES:
                detail = f"{len(line)} bytes that are no sound JSON object"
                item = Dropped(shown, position, "bad_json", detail)
            if item is not None:
                del line
                yield item
                del item
                continue
        try:
            text = loads(line)[text_field]  # so are nearly all; others are looked at closely
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if text and type(text) is str:
            yield Document(text, shown, position)
        else:
            yield _parse_line(line, shown, position, text_field)


def _read_long(line: bytes, path: str, position: int, text_field: str) -> Document | Dropped | None:
    """What stands in a line of megabytes, made without holding it as `str`, which may take four times its bytes: long
    strings are cut out of the line, and the wanted one is then read a part at a time.

    None: another way must be found; so for all that is no sound JSON.
    """
    cut = _cut_out_strings(line)
    if cut is None:
        return None
    rest, strings = cut
    try:
        record = orjson.loads(rest)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    text = find_text(record, text_field, path, position)
    wanted = BytesIO()
    for name, (start, stop) in strings.items():  # the others must be sound as well
        if not _unescape(line, start, stop, wanted if name == text else None):
            return None
    if text in strings:
        return LongDocument.from_utf8(wanted.getvalue(), path, position)
    return text if isinstance(text, Dropped) else text_or_drop(text, path, position)


def _cut_out_strings(line: bytes) -> tuple[bytes, dict[str, tuple[int, int]]] | None:
    """A line with a name in the place of each long string, and where these strings begin and end (without quotes).

    None: a string has no end, or a long one is a key.
    """
    prefix = secrets.token_hex(16)  # no string of the line is called so
    parts: list[bytes] = []
    strings: dict[str, tuple[int, int]] = {}
    copied = place = 0
    while (start := line.find(b'"', place) + 1) > 0:
        stop = _string_end(line, start)
        if stop is None:
            return None
        place = stop + 1
        if stop - start > _PART_BYTES:
            if _KEY_ENDS.match(line, place):
                return None
            name = f"{prefix}-{len(strings)}"
            strings[name] = start, stop
            parts += line[copied:start], name.encode()
            copied = stop
    return b"".join([*parts, line[copied:]]), strings


def _string_end(line: bytes, start: int) -> int | None:
    """Where the quote stands that ends the JSON string whose content begins at `start`."""
    stop = line.find(b'"', start)
    while stop >= 0:
        before = stop
        while before > start and line[before - 1] == _BACKSLASH:
            before -= 1
        if (stop - before) % 2 == 0:
            return stop
        stop = line.find(b'"', stop + 1)
    return None


def _unescape(line: bytes, start: int, stop: int, out: BytesIO | None) -> bool:
    """Write what bytes start to stop, the content of a JSON string, stand for as UTF-8, a part at a time. False: they
    are not sound.

    A part must not end within an escape, a pair of surrogates or a character: then it is no sound JSON itself, and a
    little shorter it is.
    """
    while start < stop:
        end = min(start + _PART_BYTES, stop)
        for shorter in range(_ESCAPE_BYTES if end < stop else 1):
            try:
                text = orjson.loads(b'"%b"' % line[start : end - shorter])
            except orjson.JSONDecodeError:
                continue
            break
        else:
            return False
        if out is not None:
            out.write(text.encode("utf-8"))
        start = end - shorter
    return True


def _parse_line(line: bytes, path: str, position: int, text_field: str) -> Document | Dropped:
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
