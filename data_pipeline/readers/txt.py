"""Plain text: a document a file, a block between blank lines, or a line.

A line's text is without its line break, ``\\n`` or ``\\r\\n``; a block's is without that of its last line. A blank line
holds blanks at most (space, tab, carriage return).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO

from data_pipeline.readers import items
from data_pipeline.readers.items import BLANKS, BOM, Document, Dropped, decode_or_drop, is_blank, too_long
from data_pipeline.readers.lines import split_lines
from data_pipeline.readers.places import Piece, open_seekable


def read_file(piece: Piece, chunks: Iterable[bytes]) -> Iterator[Document | Dropped]:
    """The whole file as one document; nothing of a file past the limit is kept."""
    content, length = BytesIO(), 0
    for chunk in chunks:
        length += len(chunk)
        if length <= items.MAX_DOCUMENT_BYTES:
            content.write(chunk)
        else:
            content = BytesIO()
    if length > items.MAX_DOCUMENT_BYTES:
        yield too_long(piece.shown, 1)
        return
    raw = content.getvalue()
    del content
    raw = raw.removeprefix(BOM)
    yield decode_or_drop(raw, piece.shown, 1)


def read_lines(piece: Piece, lines: Iterable[bytes | int]) -> Iterator[Document | Dropped]:
    """One item a line. Positions count the lines of the piece from 1."""
    shown, position = piece.shown, 0
    for line in lines:  # without `enumerate`, which keeps what it gave last
        position += 1
        if isinstance(line, int):
            yield too_long(shown, position)
            continue
        if position == 1 and piece.start == 0:
            line = line.removeprefix(BOM)
        if is_blank(line):
            yield Dropped(shown, position, "blank_line")
        else:
            yield decode_or_drop(line.removesuffix(b"\r"), shown, position)
        del line


def read_blocks(piece: Piece, chunks: Iterable[bytes]) -> Iterator[Document | Dropped]:
    """One item a block that starts within the piece, however far it goes on behind it.

    `chunks` run from the byte before the piece to the file's end. Positions are those of a block's first line, counted
    among the lines that start within the piece, from 1.
    """
    block = _Block(piece.shown)
    given = 0
    passing = False  # by the lines of a block that began before the piece
    offset = max(piece.start - 1, 0)
    number = -1 if piece.start else 0
    for line in split_lines(chunks):  # without `enumerate`, which keeps what it gave last
        number += 1
        length = line if isinstance(line, int) else len(line)
        if number == 1 and piece.start == 0 and isinstance(line, bytes):
            line = line.removeprefix(BOM)
        blank = isinstance(line, bytes) and is_blank(line)
        behind = piece.stop is not None and offset >= piece.stop
        if number == 0:  # the line that byte start - 1 belongs to
            passing = not (blank and _only_blanks_before(piece))
        elif blank or passing:
            passing = passing and not blank
            if block.lines:
                given += 1
                yield block.end()
            if behind:
                return
        elif behind and not block.lines:
            return
        else:
            block.add(line, number)
        offset += length + 1
        del line
    if block.lines:
        yield block.end()
    elif not given and piece.start == 0 and piece.stop is None:
        yield Dropped(piece.shown, 0, "empty_file", "blank lines alone")


class _Block:
    """The lines of a block so far, and where it began."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.lines = 0
        self._text = BytesIO()  # not a list: a short line would take several times its bytes

    def add(self, line: bytes | int, position: int) -> None:
        if not self.lines:
            self._position, self._length, self._text = position, -1, BytesIO()
        self._length += (line if isinstance(line, int) else len(line)) + 1
        if self._length > items.MAX_DOCUMENT_BYTES or isinstance(line, int):
            self._text = BytesIO()
        else:
            if self.lines:
                self._text.write(b"\n")
            self._text.write(line)
        self.lines += 1

    def end(self) -> Document | Dropped:
        self.lines = 0
        if self._length > items.MAX_DOCUMENT_BYTES:
            return too_long(self.shown, self._position)
        text, self._text = self._text.getvalue(), BytesIO()
        return decode_or_drop(text.removesuffix(b"\r"), self.shown, self._position)


def _only_blanks_before(piece: Piece) -> bool:
    """Whether the line in which a piece starts holds blanks alone before its start."""
    stop = piece.start - 1
    with open_seekable(piece, None) as file:
        while stop:
            start = max(stop - 4096, 0)
            file.seek(start)
            _, newline, tail = file.read(stop - start).rpartition(b"\n")
            if not (newline or start):
                tail = tail.removeprefix(BOM)
            if tail.strip(BLANKS):
                return False
            if newline:
                return True
            stop = start
    return True
