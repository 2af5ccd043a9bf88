"""The text column of Arrow data: where it is, and each row's text as bytes without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.readers.items import Document, Dropped, decode_or_drop, printable


class Column(NamedTuple):
    """The names that lead to a column, through structs. Where something else is in the way, it ends there: no text."""

    names: list[str]
    is_whole: bool


def find_column(schema: Any, text_field: str) -> Column | str:
    """Where the text is, or why it is nowhere.

    `a.b` is the column of that name, else field `b` of the struct `a`; `a,b` is the column of that name, else the first
    of `a` and `b` that is there.
    """
    first = _find(schema, text_field)
    if "," in text_field and isinstance(first, str):
        others = (_find(schema, name) for name in text_field.split(","))
        return next((found for found in others if isinstance(found, Column)), first)
    return first


def _find(schema: Any, text_field: str) -> Column | str:
    from pyarrow import types

    fields, rest = list(schema), text_field
    names: list[str] = []
    while True:
        known = [field.name for field in fields]
        if known.count(rest) == 1:
            return Column([*names, rest], True)
        key, dot, after = rest.partition(".")
        if not dot or known.count(key) != 1:
            return printable(f"{text_field!r} is not one of the columns {', '.join(known)}")
        names.append(key)
        kind = fields[known.index(key)].type
        if not types.is_struct(kind):
            return Column(names, False)
        fields, rest = list(kind.fields), after


def read_column(batch: Any, where: Column, path: str, rows_before: int) -> Iterator[Document | Dropped]:
    """One item a row of a record batch."""
    from pyarrow import compute

    column = batch.column(batch.schema.get_field_index(where.names[0]))
    for name in where.names[1:]:
        column = compute.struct_field(column, name)  # null where any struct on the way is
    for position, raw in enumerate(_values(column) if where.is_whole else _types(column), rows_before + 1):
        if raw is None:
            yield Dropped(path, position, "null_text")
        elif isinstance(raw, str):
            yield Dropped(path, position, "non_string_text", raw)
        else:
            yield decode_or_drop(raw, path, position)


def _values(column: Any) -> Iterator[memoryview | str | None]:
    """Each value's UTF-8 bytes, None for a null, or the column's type where it does not hold text."""
    from pyarrow import ArrowInvalid, types

    if types.is_dictionary(column.type):  # decoded row by row: one long value may stand in many
        values, indices = list(_values(column.dictionary)), column.indices.to_pylist()
        if not all(index is None or 0 <= index < len(values) for index in indices):
            raise ArrowInvalid(f"an index lies outside of a dictionary of {len(values)} values")
        yield from (None if index is None else values[index] for index in indices)
    elif types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type):
        yield from _strings(column)
    else:
        yield from _types(column)


def _types(column: Any) -> Iterator[str | None]:
    """The column's type for each value that is no null."""
    name = str(column.type)
    return (name if valid else None for valid in column.is_valid().to_pylist())


def _strings(column: Any) -> Iterator[memoryview | None]:
    import pyarrow

    column.validate()
    column = column.cast(pyarrow.large_binary())
    column.validate(full=True)  # offsets ascend within the data; whether that is UTF-8 is asked row by row
    _, offsets, data = column.buffers()
    if not len(column):
        return
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1].tolist()
    view = memoryview(data if data is not None else b"")
    valid = column.is_valid().to_pylist() if column.null_count else None
    for row, start in enumerate(ends[:-1]):
        yield view[start : ends[row + 1]] if valid is None or valid[row] else None
