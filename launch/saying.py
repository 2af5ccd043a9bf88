"""Words for people on stderr, where perhaps nobody reads any more: a pipe's reader has left, a disk is full, a terminal
is gone. A run must not end for want of a place to print."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TextIO, cast


class _Unfailing:
    """A stream for text; what cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def unfailing(stream: TextIO) -> TextIO:
    """The same, and no word for it raises an OSError."""
    return cast(TextIO, _Unfailing(stream))
