"""Parquet files: a document a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_pipeline.readers.columns import find_column, read_column
from data_pipeline.readers.items import CorpusError, Document, Dropped, OnBytes, OnRaw, printable
from data_pipeline.readers.places import Piece, open_seekable

_BATCH_ROWS = 64  # more are not faster; fewer at a time, as a dictionary may hold one long value for many rows
_BATCH_BYTES = 32 * 1024 * 1024
_BUFFER_BYTES = 1 << 20  # column chunks are read through a buffer of this size, not whole


def read_parquet(
    piece: Piece, text_field: str, on_bytes: OnBytes, on_raw: OnRaw | None
) -> Iterator[Document | Dropped]:
    """One item a row, a few megabytes at a time whatever the size of the row groups."""
    import pyarrow
    from pyarrow import parquet

    try:
        with open_seekable(piece, on_raw) as raw:
            size, told, position = raw.seek(0, 2), 0, 0
            if size == 0:
                yield Dropped(piece.shown, 0, "empty_file")
                return
            file = parquet.ParquetFile(
                raw, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
            )
            rows = file.metadata.num_rows
            if rows == 0:
                yield Dropped(piece.shown, 0, "empty_file", "no rows")
            where = find_column(file.schema_arrow, text_field)
            if isinstance(where, str):
                yield from (Dropped(piece.shown, row, "missing_text", where) for row in range(1, rows + 1))
                on_bytes(size)
                return
            column = ".".join(where.names)
            for batch in file.iter_batches(_batch_rows(file.metadata), columns=[column]):
                yield from read_column(batch, where, piece.shown, position)
                position += batch.num_rows
                on_bytes(size * position // rows - told)
                told = size * position // rows
            if position != rows:
                raise CorpusError(f"{piece.shown}: {position} rows were read, but the file says {rows}; fetch it again")
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise CorpusError(f"{piece.shown}: damaged or not a Parquet file ({printable(str(error))})") from None


def _batch_rows(metadata: Any) -> int:
    """Rows to decode at a time, fewer where they are long on average in some row group.

    By the size of all columns: pyarrow aborts the process over damaged statistics when it is asked for one column's.
    """
    rows = _BATCH_ROWS
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        if group.total_byte_size > _BATCH_BYTES:
            rows = min(rows, max(group.num_rows * _BATCH_BYTES // group.total_byte_size, 1))
    return rows
