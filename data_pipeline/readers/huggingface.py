"""Hugging Face data sets by name: `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`, a name of the hub or a local folder.

The `datasets` library says which data files a split has, and on the hub at which commit. Files of kinds that are
known here are read by our own readers, which notice a cut and count every line; only the others (csv, JSON arrays,
WebDataset, …) are streamed through the library, a file at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_pipeline.readers.items import (
    CorpusError,
    Document,
    Dropped,
    OnBytes,
    OnRaw,
    find_text,
    printable,
    text_or_drop,
)
from data_pipeline.readers.places import (
    ROWS,
    DatasetFile,
    FileFacts,
    Piece,
    Place,
    drain,
    file_kind,
    is_address,
    shown,
)

_PREFIX = "hf:"
_SAME_AS_OURS = ("arrow", "json", "parquet", "text")  # modules of `datasets` whose files hold what ours read from them
_SILENTLY_CUT = (".zst", ".zstd", ".lz4", ".zip")  # fsspec unpacks these without noticing a missing end


def is_dataset(place: Place) -> bool:
    """Whether this names a data set; `hf://…` is an address of a file on the hub."""
    return isinstance(place, str) and place.startswith(_PREFIX) and not is_address(place)


def find_dataset(address: str) -> list[Piece]:
    """The data files of one split, in the library's order. CorpusError: no such data set, config or split."""
    builder, files = _resolve(address)
    ours = type(builder).__module__.split(".")[-1] in _SAME_AS_OURS
    kinds = [file_kind(file) for file in files]
    if ours and all(kinds):
        return [Piece(file, kind) for file, kind in zip(files, kinds, strict=True) if kind]
    for file in files:
        if shown(file).lower().endswith(_SILENTLY_CUT):
            raise CorpusError(f"{shown(file)}: a cut in such a file would not be noticed; unpack it first")
    return [Piece(file, ROWS, dataset=DatasetFile(address, number)) for number, file in enumerate(files)]


def read_rows(piece: Piece, text_field: str, on_bytes: OnBytes, on_raw: OnRaw | None) -> Iterator[Document | Dropped]:
    """One item a row of a data file, as the library streams it."""
    assert piece.dataset is not None, "find_dataset made this piece"
    address, number = piece.dataset.address, piece.dataset.number
    if on_raw:
        drain(piece, on_raw)
    builder, files = _resolve(address)
    if files[number : number + 1] != [piece.path]:
        raise CorpusError(f"{shown(address)}: its data files have changed; start again")
    with _library(address):
        stream = builder.as_streaming_dataset(_parse(address)[2])
        if stream.num_shards != len(files):
            raise CorpusError(f"{shown(address)}: `datasets` does not read its files one by one; convert it to Parquet")
        rows = iter(stream.shard(len(files), number))
    position = 0
    while True:
        with _library(address):
            row = next(rows, None)
        if row is None:
            break
        position += 1
        text = find_text(row, text_field, piece.shown, position)
        yield text if isinstance(text, Dropped) else text_or_drop(text, piece.shown, position)
    if not position:
        yield Dropped(piece.shown, 0, "empty_file", "no rows")
    on_bytes(FileFacts.of(piece).size)


def _parse(address: str) -> tuple[str, str | None, str]:
    name, _, rest = address.removeprefix(_PREFIX).partition(":")
    config, _, split = rest.partition(":")
    if not name or ":" in split:
        raise CorpusError(f"{shown(address)}: not of the form hf:NAME[@REVISION][:CONFIG[:SPLIT]]")
    return name, config or None, split or "train"


def _resolve(address: str) -> tuple[Any, list[Place]]:
    """The library's builder, and the data files of the split."""
    import datasets

    name, config, split = _parse(address)
    if Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists():
        raise CorpusError(f"{shown(name)}: saved by `save_to_disk`; give the folder itself, without hf:")
    revision = None
    if not Path(name).exists():
        name, _, revision = name.partition("@")
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each of its attempts; the last counts
    with _library(address):
        builder = datasets.load_dataset_builder(name, config, revision=revision or None)
        by_split = dict(builder.config.data_files or {})
    if split not in by_split:
        known = ", ".join(map(str, by_split)) or "no data files at all"
        raise CorpusError(f"{shown(address)}: there is no split {split!r}; it has {known}")
    return builder, [file if is_address(file) else Path(file) for file in map(str, by_split[split])]


@contextmanager
def _library(address: str) -> Iterator[None]:
    """What goes wrong inside of the library, which raises of everything, is about this data set."""
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:
        what = printable(str(error)) or type(error).__name__
        raise CorpusError(f"{shown(address)}: `datasets` cannot read it: {what}") from None
