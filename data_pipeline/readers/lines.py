"""Bytes to lines. Lines end at ``\\n`` and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO

from data_pipeline.readers import items
from data_pipeline.readers.places import READ_BYTES, Piece, read_chunks


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes | int]:
    """Lines without their ``\\n``, at a cost linear in the bytes; of one longer than MAX_DOCUMENT_BYTES its length.

    Memory: a chunk, and the line under way once; a line that was given is not kept.
    """
    begun, length = BytesIO(), 0  # of the line under way; nothing of it once it is too long
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if length:
                begun.write(chunk[start:end])
                line = [_line(begun, length + end - start)]
                begun, length = BytesIO(), 0
                yield line.pop()
            else:
                yield chunk[start:end]
            start = end + 1
        length += len(chunk) - start
        if length <= items.MAX_DOCUMENT_BYTES:
            begun.write(chunk[start:])
        else:
            begun = BytesIO()
    if length:
        yield _line(begun, length)


def _line(content: BytesIO, length: int) -> bytes | int:
    return content.getvalue() if length <= items.MAX_DOCUMENT_BYTES else length


def own_lines(piece: Piece, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Of the bytes from one before a piece to the file's end, those of the lines that start within the piece.

    They begin behind the first ``\\n`` at byte start - 1 or later, and end with the first at byte stop - 1 or later.
    """
    position = max(piece.start - 1, 0)
    begun = piece.start == 0
    for chunk in chunks:
        begin = 0
        if not begun:
            begin = chunk.find(b"\n") + 1
            begun = begin > 0
            if piece.stop is not None and position + (begin or len(chunk)) >= piece.stop:
                return
        if begun:
            if piece.stop is not None and (last := piece.stop - 1 - position) < len(chunk):
                end = chunk.find(b"\n", max(last, 0))
                if end >= 0:
                    yield chunk[begin : end + 1]
                    return
            yield chunk[begin:]
        position += len(chunk)


def count_lines(piece: Piece) -> int:
    """How many lines start within a piece: one behind each ``\n`` that is not its last byte, and the file's first."""
    position, count, ends_line = max(piece.start - 1, 0), 0, False
    for chunk in read_chunks(piece, READ_BYTES, lambda _: None, None):
        own = chunk if piece.stop is None else chunk[: max(piece.stop - position, 0)]
        if not own:
            break
        count += own.count(b"\n") + (position == 0 == piece.start)
        ends_line = own.endswith(b"\n")
        position += len(chunk)
    return count - ends_line
