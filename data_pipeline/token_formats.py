"""Token files of other projects, read and laid out: Megatron's indexed datasets, nanoGPT's and llm.c's .bin.

All numbers little-endian. What is written here is read by the projects' own code, and the other way round.

Megatron (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py): two files of one prefix. ``.bin`` holds the
tokens of all sequences in a row, nothing else. ``.idx``: 9 bytes ``MMIDIDX\\0\\0``; u64 version 1; u8 code of the
token's type (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16; 6 and 7 are floats); u64 S sequences; u64 D
document indices; S int32 lengths in tokens; S int64 byte offsets into .bin; D int64 indices, 0 first: document i is
the sequences from index i up to index i+1; in multimodal sets S int8 modes follow. Ids are uint16 where the
vocabulary is below 65,500, else int32. Documents end with EOS if they were made with ``--append-eod``. Here one
document is one sequence, EOS included.

nanoGPT (karpathy/nanoGPT, data/openwebtext/prepare.py): ``train.bin`` and ``val.bin``, uint16 tokens and nothing else;
each document is followed by EOS.

llm.c (karpathy/llm.c, dev/data/data_common.py, dev/data/fineweb.py): 256 int32 (magic 20240520, version 1, number of
tokens), then uint16 tokens; or magic 20240801, version 7, then uint32 tokens ("llama-3"). Each document is preceded by
EOS. A file is cut anywhere, so the files of a split are one row; the number of tokens is an int32, so each holds fewer
than 2^31.

In the last two only EOS tells documents apart. In our files EOS ends each document: where it leads, the first one goes
and one is set behind the last document, and back again on the way out.
"""

from __future__ import annotations

import glob
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from data_pipeline.shards import DataFormatError

Format = Literal["megatron", "nanogpt", "llmc"]
FORMATS: tuple[Format, ...] = get_args(Format)
EosPlace = Literal["first", "last"]
EOS_PLACES: tuple[EosPlace, ...] = get_args(EosPlace)
MAX_DOCUMENT_TOKENS = 1 << 24
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LLMC_VERSIONS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
LLMC_HEADER_BYTES = 256 * 4

_CHUNK_TOKENS = 1 << 20
_INDEX_DOCUMENTS = 1 << 16
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\0\0"

Ids = npt.NDArray[np.integer[Any]]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ForeignDocument:
    """One document's ids without EOS, the number of the file that it ends in, and what was changed to have it."""

    ids: Ids
    file: int
    notes: tuple[str, ...] = ()


class ForeignReader(Protocol):
    """The documents of the files of one split, in order. `files` is what is read."""

    files: list[Path]

    def documents(self, eos_id: int) -> Iterator[ForeignDocument]: ...


class FlatReader:
    """Files of tokens without an index: nanoGPT and llm.c. All of them are one row, cut at EOS."""

    def __init__(self, form: Format, paths: Sequence[Path], eos: EosPlace) -> None:
        self.files = [file for path in paths for file in _matches(path)]
        self._eos_leads = eos == "first"
        self._layouts = [_flat_layout(form, file) for file in self.files]

    def documents(self, eos_id: int) -> Iterator[ForeignDocument]:
        parts: list[Ids] = []
        length = 0
        expects_eos = self._eos_leads
        for number, path in enumerate(self.files):
            for row in self._chunks(number):
                ids = row
                if expects_eos:
                    if int(ids[0]) != eos_id:
                        raise DataFormatError(f"{path}: begins with id {ids[0]}, not with EOS {eos_id}: say --eos last")
                    ids, expects_eos = ids[1:], False
                low = 0
                for end in np.flatnonzero(ids == eos_id).tolist():
                    yield ForeignDocument(np.concatenate([*parts, ids[low:end]]), number)
                    parts, length, low = [], 0, end + 1
                parts.append(ids[low:])
                length += len(ids) - low
                if length > MAX_DOCUMENT_TOKENS:
                    raise DataFormatError(
                        f"{path}: no EOS ({eos_id}) in more than {MAX_DOCUMENT_TOKENS:,} tokens: is it the EOS of the "
                        "tokenizer that these files were made with?"
                    )
        if self._eos_leads:
            yield ForeignDocument(np.concatenate(parts), len(self.files) - 1)
        elif length:
            yield ForeignDocument(np.concatenate(parts), len(self.files) - 1, ("eos_added",))

    def _chunks(self, number: int) -> Iterator[Ids]:
        kind, offset, tokens = self._layouts[number]
        with self.files[number].open("rb") as file:
            file.seek(offset)
            while tokens:
                ids = _read_tokens(file, self.files[number], kind, min(tokens, _CHUNK_TOKENS))
                tokens -= len(ids)
                yield ids


def _matches(path: Path) -> list[Path]:
    """The file of this name, or the files of this pattern, sorted."""
    if path.is_file():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
    if not found:
        raise DataFormatError(f"{path}: no such file")
    return [file for file in found if file.is_file()]


def _flat_layout(form: Format, path: Path) -> tuple[str, int, int]:
    """(type of a token, bytes before the first one, number of tokens) of a file."""
    size = path.stat().st_size
    if form == "nanogpt":
        if size % 2 or not size:
            raise DataFormatError(f"{path}: {size:,} bytes are no row of uint16 tokens")
        return "<u2", 0, size // 2
    with path.open("rb") as file:
        head = file.read(LLMC_HEADER_BYTES)
    if len(head) < LLMC_HEADER_BYTES:
        raise DataFormatError(f"{path}: {size} bytes are too few for llm.c's header of {LLMC_HEADER_BYTES}")
    magic, version, tokens = struct.unpack_from("<3i", head)
    if magic not in LLMC_VERSIONS or version != LLMC_VERSIONS[magic][0]:
        known = " or ".join(f"{known} version {version}" for known, (version, _) in LLMC_VERSIONS.items())
        raise DataFormatError(f"{path}: not llm.c's: begins with magic {magic}, version {version}, not {known}")
    kind = LLMC_VERSIONS[magic][1]
    expected = LLMC_HEADER_BYTES + tokens * np.dtype(kind).itemsize
    if size != expected or tokens < 1:
        raise DataFormatError(f"{path}: {size:,} bytes, but its header says {tokens:,} tokens, {expected:,} bytes")
    return kind, LLMC_HEADER_BYTES, tokens


class MegatronReader:
    """Prefixes of .bin and .idx. Sequences are read where the index says, in blocks of documents."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._prefixes = [
            prefix.with_name(prefix.name.removesuffix(".idx").removesuffix(".bin"))
            for path in paths
            for prefix in (_matches(path) if any(c in str(path) for c in "*?[") else [path])
        ]
        self._prefixes = list(dict.fromkeys(self._prefixes))
        self.files = [
            prefix.with_name(prefix.name + suffix) for prefix in self._prefixes for suffix in (".bin", ".idx")
        ]
        for file in self.files:
            if not file.is_file():
                raise DataFormatError(f"{file}: no such file; a Megatron data set is a .bin and an .idx of one name")

    def documents(self, eos_id: int) -> Iterator[ForeignDocument]:
        for number in range(0, len(self.files), 2):
            bin_path, idx_path = self.files[number : number + 2]
            for ids, sequences in megatron_documents(bin_path, idx_path):
                notes: tuple[str, ...] = ("sequences_joined",) if sequences > 1 else ()
                if not len(ids) or ids[-1] != eos_id:
                    notes += ("eos_added",)
                else:
                    ids = ids[:-1]
                inner = np.flatnonzero(ids == eos_id)
                if len(inner):
                    notes += ("split_at_eos",)
                low = 0
                for end in [*inner.tolist(), len(ids)]:
                    yield ForeignDocument(ids[low:end], number, notes)
                    low, notes = end + 1, ()


def megatron_documents(bin_path: Path, idx_path: Path) -> Iterator[tuple[Ids, int]]:
    """Each document of an indexed dataset: its ids as they stand in the file, and how many sequences it has.

    Memory: one document and the index of 65,536. DataFormatError: an index that is damaged, of floats, or whose
    sequences do not stand in a row.
    """
    size, bin_size = idx_path.stat().st_size, bin_path.stat().st_size
    with idx_path.open("rb") as index, bin_path.open("rb") as data:
        head = index.read(_MEGATRON_HEADER.size)
        if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
            raise DataFormatError(f"{idx_path}: not the index of a Megatron data set (it begins with {head[:9]!r})")
        _, version, code, sequences, indices = _MEGATRON_HEADER.unpack(head)
        if version != 1 or code not in MEGATRON_TYPES:
            raise DataFormatError(f"{idx_path}: version {version}, token type {code}: 1 and whole numbers are known")
        lengths_at = _MEGATRON_HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        expected = documents_at + 8 * indices
        if size not in (expected, expected + sequences) or indices < 1:
            raise DataFormatError(f"{idx_path}: {size:,} bytes, but its header says {expected:,}")
        kind = np.dtype(MEGATRON_TYPES[code])
        position = 0  # in tokens
        following = 0  # the sequence at which the next document must begin
        for block in range(0, indices - 1, _INDEX_DOCUMENTS):
            index.seek(documents_at + 8 * block)
            borders = _read_tokens(index, idx_path, "<i8", min(_INDEX_DOCUMENTS + 1, indices - block)).tolist()
            steps = np.diff(borders)
            if borders[0] != following or borders[-1] > sequences or (len(steps) and steps.min() < 0):
                raise DataFormatError(f"{idx_path}: its documents do not follow each other (from document {block})")
            index.seek(lengths_at + 4 * following)
            lengths = _read_tokens(index, idx_path, "<i4", borders[-1] - following).astype(np.int64)
            index.seek(pointers_at + 8 * following)
            pointers = _read_tokens(index, idx_path, "<i8", borders[-1] - following)
            starts = position + np.concatenate([[0], np.cumsum(lengths)])
            if (lengths < 0).any() or not np.array_equal(pointers, starts[:-1] * kind.itemsize):
                raise DataFormatError(f"{idx_path}: its sequences do not stand in a row in {bin_path.name}")
            if int(starts[-1]) * kind.itemsize > bin_size:
                raise DataFormatError(f"{bin_path}: {bin_size:,} bytes end before a sequence of its index does")
            data.seek(position * kind.itemsize)
            for low, high in itertools.pairwise(borders):
                count = int(starts[high - following] - starts[low - following])
                if count > MAX_DOCUMENT_TOKENS:
                    raise DataFormatError(
                        f"{bin_path}: a document of {count:,} tokens is longer than the {MAX_DOCUMENT_TOKENS:,} allowed"
                    )
                yield _read_tokens(data, bin_path, kind.str, count), high - low
            position, following = int(starts[-1]), borders[-1]
        if following != sequences or position * kind.itemsize != bin_size:
            raise DataFormatError(
                f"{bin_path}: {bin_size:,} bytes, but the documents of its index end at {position * kind.itemsize:,}"
            )


def _read_tokens(file: BinaryIO, path: Path, kind: str, count: int) -> Ids:
    raw = file.read(count * np.dtype(kind).itemsize)
    if len(raw) != count * np.dtype(kind).itemsize:
        raise DataFormatError(f"{path}: cut while it was read")
    ids: Ids = np.frombuffer(raw, kind)
    return ids


def write_megatron_index(
    file: BinaryIO, code: int, documents: int, end_blocks: Callable[[], Iterator[npt.NDArray[np.int64]]], path: Path
) -> None:
    """Write the .idx of documents of one sequence each, which end (in tokens) where `end_blocks` says, anew each call.

    DataFormatError: a document of 2^31 tokens or more, whose length the format cannot hold.
    """
    width = np.dtype(MEGATRON_TYPES[code]).itemsize
    file.write(_MEGATRON_HEADER.pack(_MEGATRON_MAGIC, 1, code, documents, documents + 1))
    last = 0
    for ends in end_blocks():
        lengths = np.diff(ends, prepend=last)
        if lengths.max(initial=0) >= 2**31:
            raise DataFormatError(f"{path}: a document of {lengths.max():,} tokens does not fit Megatron's int32")
        file.write(lengths.astype("<i4").tobytes())
        last = int(ends[-1]) if len(ends) else last
    last = 0
    for ends in end_blocks():
        file.write((np.concatenate([[last], ends])[:-1] * width).astype("<i8").tobytes())
        last = int(ends[-1]) if len(ends) else last
    for low in range(0, documents + 1, _CHUNK_TOKENS):
        file.write(np.arange(low, min(low + _CHUNK_TOKENS, documents + 1), dtype="<i8").tobytes())
