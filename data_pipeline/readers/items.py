"""What every reader gives: one `Document` or one `Dropped` for each line, row, block or file."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
LONG_BYTES = 4 * 1024 * 1024
"""A document longer than this is held as UTF-8 alone: as `str` it may take four bytes a character, and a copy."""
_PART_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r"

OnBytes = Callable[[int], None]
"""Hears how many bytes of a file were consumed since the last call."""
OnRaw = Callable[[bytes], Any]
"""Hears exactly the bytes of a piece, each once and in order (a hash's `update`)."""


class CorpusError(ValueError):
    """Input that is missing, of an unknown kind, damaged or cut short. One line: which file, what, what to do."""


class Document(NamedTuple):  # made once a line, and twice as quickly as a frozen dataclass
    """One text and where it stood: file, and line or row counted from 1 (1 for a whole .txt file)."""

    text: str
    path: str
    position: int

    @property
    def utf8(self) -> bytes:
        """The text's UTF-8 bytes."""
        return self.text.encode("utf-8")

    @property
    def characters(self) -> int:
        """How many characters the text has."""
        return len(self.text)


class LongDocument(Document):
    """A document of more than LONG_BYTES, made by `from_utf8`: it holds `utf8`, and makes `text` when asked."""

    __slots__ = ()

    @classmethod
    def from_utf8(cls, raw: bytes, path: str, position: int) -> LongDocument:
        """`raw`: valid UTF-8."""
        return cls(raw, path, position)  # type: ignore[arg-type]

    @property
    def utf8(self) -> bytes:
        return self[0]  # type: ignore[return-value]

    @property
    def text(self) -> str:
        return str(self.utf8, "utf-8")

    @property
    def characters(self) -> int:
        return sum(map(len, _decoded(self.utf8)))


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


def text_or_drop(text: str, path: str, position: int) -> Document | Dropped:
    """The document, unless there is nothing in it."""
    return Document(text, path, position) if text else Dropped(path, position, "empty_text")


def decode_or_drop(raw: bytes | memoryview, path: str, position: int) -> Document | Dropped:
    """The document that these bytes spell in UTF-8."""
    try:
        if len(raw) <= LONG_BYTES:
            return text_or_drop(str(raw, "utf-8"), path, position)
        for _ in _decoded(raw):
            pass
        return LongDocument.from_utf8(bytes(raw), path, position)
    except UnicodeDecodeError as error:
        return Dropped(path, position, "invalid_utf8", f"byte {error.start}: {error.reason}")


def _decoded(raw: bytes | memoryview) -> Iterator[str]:
    """The text of bytes, a megabyte at a time. UnicodeDecodeError, `start` counted in all of them."""
    start = 0
    while start < len(raw):
        part, is_last = raw[start : start + _PART_BYTES], start + _PART_BYTES >= len(raw)
        try:
            text, used = codecs.utf_8_decode(part, "strict", is_last)
        except UnicodeDecodeError as error:
            error.start += start
            raise
        yield text
        start += used


def is_blank(line: bytes) -> bool:
    """Whether a line holds blanks at most; a long one isn't copied for it."""
    return not (line[:1024].strip(BLANKS) or line.strip(BLANKS))


def too_long(path: str, position: int) -> Dropped:
    """The drop of a line, block or .txt file past the limit, of which nothing was kept."""
    return Dropped(path, position, "too_long", f"more than {MAX_DOCUMENT_BYTES} bytes")


def printable(detail: str) -> str:
    """One short line without half characters."""
    return " ".join(detail.encode("utf-8", "backslashreplace").decode("utf-8").split())[:200]


def find_text(record: dict[str, Any], text_field: str, path: str, position: int) -> str | Dropped:
    """The text of a record, or why there is none.

    `a.b` is the key that is called so, else what `b` finds within the object of key `a`; `a,b` is the key that is
    called so, else the first of `a` and `b` that is there.
    """
    first = _find(record, text_field, path, position)
    if "," in text_field and isinstance(first, Dropped) and first.reason == "missing_text":
        for name in text_field.split(","):
            found = _find(record, name, path, position)
            if not (isinstance(found, Dropped) and found.reason == "missing_text"):
                return found
    return first


def _find(record: dict[str, Any], text_field: str, path: str, position: int) -> str | Dropped:
    value: Any = record
    rest = text_field
    while rest not in value:
        key, dot, after = rest.partition(".")
        if not dot or key not in value:
            detail = f"{text_field!r} is not among {', '.join(value)}"
            return Dropped(path, position, "missing_text", printable(detail))
        value, rest = value[key], after
        if not isinstance(value, dict):
            return _no_text(value, path, position)
    text = value[rest]
    return text if isinstance(text, str) else _no_text(text, path, position)


def _no_text(value: Any, path: str, position: int) -> Dropped:
    if value is None:
        return Dropped(path, position, "null_text")
    return Dropped(path, position, "non_string_text", f"a JSON {type(value).__name__}")
