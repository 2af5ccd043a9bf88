"""Arrow files, as `datasets` and others write them: IPC streams and IPC files, a document a row.

They carry no checksums. A stream that was cut between two of its batches looks whole but for the mark at its end, so
without that mark it counts as cut.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

from data_pipeline.readers.columns import find_column, read_column
from data_pipeline.readers.items import CorpusError, Document, Dropped, OnBytes, OnRaw, printable
from data_pipeline.readers.places import Piece, open_seekable

_FILE_MAGIC = b"ARROW1"
_END_MARK_BYTES = 8
_ROWS = 256
_MAPPED_BYTES = 16 * 1024 * 1024  # so much is read before its pages are given back


def read_arrow(piece: Piece, text_field: str, on_bytes: OnBytes, on_raw: OnRaw | None) -> Iterator[Document | Dropped]:
    """One item a row. The file is mapped, so that batches of any size cost no memory of their own."""
    import pyarrow

    position = told = mapped_bytes = 0
    try:
        with open_seekable(piece, on_raw) as raw:
            size = raw.seek(0, 2)
            if size:
                mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)  # ends with the last batch made of it
                for batch, end in _batches(piece, mapped):
                    batch.validate()
                    where = find_column(batch.schema, text_field)
                    for first in range(0, batch.num_rows, _ROWS):
                        part = batch.slice(first, _ROWS)
                        if isinstance(where, str):
                            rows = range(position + 1, position + part.num_rows + 1)
                            yield from (Dropped(piece.shown, row, "missing_text", where) for row in rows)
                        else:
                            yield from read_column(part, where, piece.shown, position)
                        position += part.num_rows
                        mapped_bytes += part.nbytes
                        if mapped_bytes > _MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
                            mapped.madvise(mmap.MADV_DONTNEED)
                            mapped_bytes = 0
                    on_bytes(end - told)
                    told = end
                on_bytes(size - told)
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise CorpusError(f"{piece.shown}: damaged or not an Arrow file ({printable(str(error))})") from None
    if position == 0:
        yield Dropped(piece.shown, 0, "empty_file", "no rows" if size else "")


def _batches(piece: Piece, mapped: mmap.mmap) -> Iterator[tuple[Any, int]]:
    """Each batch, and where in the file it ended."""
    import pyarrow

    buffer = pyarrow.BufferReader(pyarrow.py_buffer(mapped))
    if mapped[: len(_FILE_MAGIC)] == _FILE_MAGIC:
        return _file_batches(buffer)
    return _stream_batches(piece, buffer)


def _stream_batches(piece: Piece, buffer: Any) -> Iterator[tuple[Any, int]]:
    from pyarrow import ipc

    size = buffer.size()
    with ipc.open_stream(buffer) as reader:
        while True:
            end = buffer.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            yield batch, buffer.tell()
        if not buffer.tell() - end == _END_MARK_BYTES == size - end:
            what = "cut short" if buffer.tell() == size else "followed by something else"
            raise CorpusError(f"{piece.shown}: the Arrow stream is {what}; fetch the file again")


def _file_batches(buffer: Any) -> Iterator[tuple[Any, int]]:
    from pyarrow import ipc

    size = buffer.size()
    with ipc.open_file(buffer) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number), size * (number + 1) // reader.num_record_batches
