"""Token files of other projects, in and out, ids unchanged: Megatron's indexed datasets, nanoGPT's and llm.c's .bin.

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

import fcntl
import glob
import hashlib
import itertools
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt
import orjson

from data_pipeline.durable import file_sha256, sync_folder, write_file
from data_pipeline.filters import is_validation
from data_pipeline.shards import (
    COLLECTION_FORMAT,
    DATASET_FORMAT,
    FORMAT_VERSION,
    LEDGER_NAME,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_FOLDER,
    Collection,
    DataFormatError,
    ShardInfo,
    ShardWriter,
    SplitName,
    TokenStream,
    open_collection,
    render_manifest,
)
from tokenizer.codec import Codec, TokenizerError

Format = Literal["megatron", "nanogpt", "llmc"]
FORMATS: tuple[Format, ...] = get_args(Format)
EosPlace = Literal["first", "last"]
EOS_PLACES: tuple[EosPlace, ...] = get_args(EosPlace)
CONVERSION_NAME = "conversion.json"
SHARD_TOKENS = 1 << 25
LLMC_FILE_TOKENS = 100_000_000
MAX_DOCUMENT_TOKENS = 1 << 24

_CHUNK_TOKENS = 1 << 20
_INDEX_DOCUMENTS = 1 << 16
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLMC_HEADER_BYTES = 256 * 4
_LLMC_VERSIONS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_NANOGPT_NAMES: dict[SplitName, str] = {"train": "train.bin", "validation": "val.bin"}
_LLMC_NAMES: dict[SplitName, str] = {"train": "train", "validation": "val"}

Ids = npt.NDArray[np.integer[Any]]
OnBytes = Callable[[int], None]


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """A hidden folder that gets the name `out` when the block ends well, and goes when it does not.

    A killed run leaves it behind; the next run of the same `out` clears it, which its lock allows to one run only.
    """
    out = out.absolute()
    if out.exists() or out.is_symlink():
        raise DataFormatError(f"{out}: exists already; choose another --out")
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataFormatError(f"{out}: another `convert` is writing there; wait for it to end") from None
        try:
            for leftover in partial.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            for folder in (partial, *(entry for entry in partial.rglob("*") if entry.is_dir())):
                sync_folder(folder)
            partial.rename(out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- in: documents out of foreign files


@dataclass(frozen=True)
class _Document:
    """One document's ids without EOS, the number of the file that it ends in, and what was changed to have it."""

    ids: Ids
    file: int
    notes: tuple[str, ...] = ()


class _Reader:
    """The documents of the files of one split, in order. `files` is what was read, for the provenance."""

    files: list[Path]

    def documents(self, eos_id: int) -> Iterator[_Document]:
        raise NotImplementedError


class _FlatReader(_Reader):
    """Files of tokens without an index: nanoGPT and llm.c. All of them are one row, cut at EOS."""

    def __init__(self, form: Format, paths: Sequence[Path], eos: EosPlace) -> None:
        self.files = [file for path in paths for file in _matches(path)]
        self._eos_leads = eos == "first"
        self._layouts = [_flat_layout(form, file) for file in self.files]

    def documents(self, eos_id: int) -> Iterator[_Document]:
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
                    yield _Document(np.concatenate([*parts, ids[low:end]]), number)
                    parts, length, low = [], 0, end + 1
                parts.append(ids[low:])
                length += len(ids) - low
                if length > MAX_DOCUMENT_TOKENS:
                    raise DataFormatError(
                        f"{path}: no EOS ({eos_id}) in more than {MAX_DOCUMENT_TOKENS:,} tokens: is it the EOS of the "
                        "tokenizer that these files were made with?"
                    )
        if self._eos_leads:
            yield _Document(np.concatenate(parts), len(self.files) - 1)
        elif length:
            yield _Document(np.concatenate(parts), len(self.files) - 1, ("eos_added",))

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
        head = file.read(_LLMC_HEADER_BYTES)
    if len(head) < _LLMC_HEADER_BYTES:
        raise DataFormatError(f"{path}: {size} bytes are too few for llm.c's header of {_LLMC_HEADER_BYTES}")
    magic, version, tokens = struct.unpack_from("<3i", head)
    if magic not in _LLMC_VERSIONS or version != _LLMC_VERSIONS[magic][0]:
        known = " or ".join(f"{known} version {version}" for known, (version, _) in _LLMC_VERSIONS.items())
        raise DataFormatError(f"{path}: not llm.c's: begins with magic {magic}, version {version}, not {known}")
    kind = _LLMC_VERSIONS[magic][1]
    expected = _LLMC_HEADER_BYTES + tokens * np.dtype(kind).itemsize
    if size != expected or tokens < 1:
        raise DataFormatError(f"{path}: {size:,} bytes, but its header says {tokens:,} tokens, {expected:,} bytes")
    return kind, _LLMC_HEADER_BYTES, tokens


class _MegatronReader(_Reader):
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

    def documents(self, eos_id: int) -> Iterator[_Document]:
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
                    yield _Document(ids[low:end], number, notes)
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
        if version != 1 or code not in _MEGATRON_TYPES:
            raise DataFormatError(f"{idx_path}: version {version}, token type {code}: 1 and whole numbers are known")
        lengths_at = _MEGATRON_HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        expected = documents_at + 8 * indices
        if size not in (expected, expected + sequences) or indices < 1:
            raise DataFormatError(f"{idx_path}: {size:,} bytes, but its header says {expected:,}")
        kind = np.dtype(_MEGATRON_TYPES[code])
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


# ---------------------------------------------------------------- in: a collection


def import_tokens(
    form: Format,
    train: Mapping[str, Sequence[Path]],
    validation: Mapping[str, Sequence[Path]],
    tokenizer: Path,
    out: Path,
    *,
    eos: EosPlace | None = None,
    validation_fraction: float = 0.0,
    on_bytes: OnBytes | None = None,
) -> Collection:
    """Make the collection `out`, one data set a source, of the token files of another project.

    The tokenizer must be the one the ids were made with: every id is checked against its vocabulary, documents are
    ended by its EOS. With `validation_fraction` documents are held out of `train` by the hash of their decoded text,
    as `prepare` does. Text sizes are counted on the decoded text: exact for a tokenizer that gives every text back
    (those of `tokenizer train` do, but for a U+2581, counted as the space it has become).
    Memory: one document of at most 2^24 tokens, and two blocks. DataFormatError, TokenizerError: nothing is left then.
    """
    if validation and validation_fraction:
        raise DataFormatError("--validation names files to hold out: leave --validation-fraction away")
    if not 0 <= validation_fraction < 1:
        raise DataFormatError(f"a validation fraction of {validation_fraction} is not in [0, 1)")
    if form == "megatron" and eos is not None:
        raise DataFormatError("--eos is for files without an index; Megatron's say where documents end")
    codec = Codec.load(tokenizer)
    eos = eos or ("first" if form == "llmc" else "last")
    readers: dict[str, dict[SplitName, _Reader]] = {name: {} for name in sorted({*train, *validation})}
    named: tuple[tuple[SplitName, Mapping[str, Sequence[Path]]], ...] = (("train", train), ("validation", validation))
    if unnamed := sorted(validation.keys() - train.keys()):
        raise DataFormatError(f"source {unnamed[0]!r} has --validation files and no --train files")
    for split, sources in named:
        for name, paths in sources.items():
            readers[name][split] = _MegatronReader(paths) if form == "megatron" else _FlatReader(form, paths, eos)
    options = {"converted_from": form, "eos": eos, "validation_fraction": validation_fraction}
    with _whole_or_nothing(out) as folder:
        codec.copy_to(folder / TOKENIZER_FOLDER)
        hashes = {}
        for name, splits in readers.items():
            work = _Import(folder / name, codec, validation_fraction, on_bytes or (lambda count: None))
            content = render_manifest(work.run(splits, {"name": name, "options": options}))
            write_file(folder / name / MANIFEST_NAME, content)
            hashes[name] = {"manifest_sha256": hashlib.sha256(content).hexdigest()}
        files = {path.name: file_sha256(path) for path in sorted((folder / TOKENIZER_FOLDER).iterdir())}
        collection = {
            "format": COLLECTION_FORMAT,
            "version": FORMAT_VERSION,
            "tokenizer": {**_tokenizer_facts(codec), "files": files},
            "sources": hashes,
        }
        write_file(folder / MANIFEST_NAME, render_manifest(collection))
        open_collection(folder)
    return open_collection(out)


def _tokenizer_facts(one: Codec | Collection) -> dict[str, Any]:
    return {"fingerprint": one.fingerprint, "vocab_size": one.vocab_size, "eos_id": one.eos_id}


@dataclass
class _Import:
    """One source on its way in: its shards, what was noted of each file."""

    folder: Path
    codec: Codec
    validation_fraction: float
    hear: OnBytes
    writers: dict[SplitName, ShardWriter] = field(default_factory=dict)
    shards: dict[SplitName, list[ShardInfo]] = field(default_factory=lambda: {split: [] for split in SPLITS})

    def run(self, readers: Mapping[SplitName, _Reader], facts: dict[str, Any]) -> dict[str, Any]:
        """Read all, write shards and ledger; returns the content of the source's manifest."""
        self.folder.mkdir()
        notes, ledger, files = Counter[str](), [], []
        for split, reader in readers.items():
            items, per_file = Counter[int](), Counter[tuple[int, str]]()
            before = [(path.stat().st_size, path.stat().st_mtime_ns) for path in reader.files]
            for number, document in enumerate(reader.documents(self.codec.eos_id)):
                self._add(split, document, f"{reader.files[document.file]}: document {number}")
                items[document.file] += 1
                per_file.update((document.file, note) for note in document.notes)
            for (file, note), count in sorted(per_file.items()):
                notes[note] += count
                ledger.append({
                    "path": _shown(reader.files[file]), "position": 0, "kind": "notes", "reason": note,
                    "detail": f"{count} documents",
                })  # fmt: skip
            for number, path in enumerate(reader.files):
                if (path.stat().st_size, path.stat().st_mtime_ns) != before[number]:
                    raise DataFormatError(f"{path}: the file changed while it was read; let it rest and start again")
                files.append({
                    "path": _shown(path), "start": 0, "stop": None, "bytes": path.stat().st_size,
                    "sha256": file_sha256(path), "items": items[number],
                })  # fmt: skip
        for split in list(self.writers):
            self._close(split)
        write_file(self.folder / LEDGER_NAME, b"".join(orjson.dumps(entry) + b"\n" for entry in ledger))
        sums = {
            split: {key: sum(getattr(one, key) for one in shards) for key in ("tokens", "documents", "text_bytes")}
            for split, shards in self.shards.items()
        }
        path = self.folder / LEDGER_NAME
        return {
            "format": DATASET_FORMAT,
            "version": FORMAT_VERSION,
            **facts,
            "tokenizer": _tokenizer_facts(self.codec),
            "splits": {
                split: {**sums[split], "shards": [shard.to_json() for shard in self.shards[split]]} for split in SPLITS
            },
            "documents_read": sum(one["documents"] for one in sums.values()),
            "dropped": {},
            "notes": dict(notes),
            "ledger": {"bytes": path.stat().st_size, "sha256": file_sha256(path)},
            "provenance": {"files": files, "ignored_files": []},
        }

    def _add(self, split: SplitName, document: _Document, where: str) -> None:
        try:
            text = self.codec.decode(document.ids).encode()
        except TokenizerError as error:
            raise DataFormatError(f"{where}: {error}: were these files made with another tokenizer?") from None
        if self.validation_fraction and is_validation(text, self.validation_fraction):
            split = "validation"
        if split not in self.writers:
            self.writers[split] = ShardWriter(
                self.folder, f"{split}-{len(self.shards[split]):05d}", vocab_size=self.codec.vocab_size,
                eos_id=self.codec.eos_id, fingerprint=self.codec.fingerprint,
            )  # fmt: skip
        writer = self.writers[split]
        writer.add(document.ids, len(text))
        self.hear((len(document.ids) + 1) * document.ids.dtype.itemsize)
        if writer.tokens >= SHARD_TOKENS:
            self._close(split)

    def _close(self, split: SplitName) -> None:
        self.shards[split].append(self.writers.pop(split).publish())


def _shown(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


# ---------------------------------------------------------------- out


def export_tokens(collection: Collection, form: Format, out: Path, *, on_bytes: OnBytes | None = None) -> list[Path]:
    """Write a collection's tokens as another project reads them; returns the files made, below `out`.

    megatron: NAME_train.bin and .idx (and NAME_validation), one document one sequence. nanogpt: NAME/train.bin and
    val.bin. llmc: NAME_train_000000.bin and so on, 100,000,000 tokens each, and NAME_val_000000.bin.
    conversion.json says of what and how; ids are not changed. DataFormatError: a vocabulary that the format has no
    room for.
    """
    if form == "nanogpt" and collection.vocab_size > 2**16:
        raise DataFormatError(
            f"{collection.path}: a vocabulary of {collection.vocab_size:,} ids; nanoGPT reads uint16, so 65,536 at most"
        )
    hear = on_bytes or (lambda count: None)
    record: dict[str, Any] = {}
    with _whole_or_nothing(out) as folder:
        for name, source in collection.sources.items():
            for split in SPLITS:
                stream = TokenStream(source.splits[split])
                if not stream.tokens:
                    continue
                made = _EXPORTS[form](collection, stream, folder, name, split, hear)
                for path in made:
                    record[str(path.relative_to(folder))] = {
                        "source": name, "split": split, "bytes": path.stat().st_size, "sha256": file_sha256(path)
                    }  # fmt: skip
        content = {
            "format": "zerohalf-conversion",
            "version": 1,
            "to": form,
            "collection_manifest_sha256": collection.manifest_sha256,
            "content_sha256": collection.content_sha256,
            "tokenizer": _tokenizer_facts(collection),
            "files": record,
        }
        write_file(folder / CONVERSION_NAME, render_manifest(content))
    return [out / name for name in record]


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_row(file: BinaryIO, stream: TokenStream, start: int, stop: int, kind: str, hear: OnBytes) -> None:
    for low in range(start, stop, _CHUNK_TOKENS):
        ids = stream.read(low, min(low + _CHUNK_TOKENS, stop))
        file.write(ids.astype(kind).tobytes())
        hear(ids.nbytes)


def _export_nanogpt(
    collection: Collection, stream: TokenStream, folder: Path, name: str, split: SplitName, hear: OnBytes
) -> list[Path]:
    path = folder / name / _NANOGPT_NAMES[split]
    with _new_file(path) as file:
        _write_row(file, stream, 0, stream.tokens, "<u2", hear)
    return [path]


def _export_llmc(
    collection: Collection, stream: TokenStream, folder: Path, name: str, split: SplitName, hear: OnBytes
) -> list[Path]:
    magic = 20240520 if collection.vocab_size <= 2**16 else 20240801
    version, kind = _LLMC_VERSIONS[magic]
    paths = []
    for number, start in enumerate(range(0, stream.tokens, LLMC_FILE_TOKENS)):
        stop = min(start + LLMC_FILE_TOKENS, stream.tokens)
        paths.append(folder / f"{name}_{_LLMC_NAMES[split]}_{number:06d}.bin")
        with _new_file(paths[-1]) as file:
            file.write(struct.pack("<3i", magic, version, stop - start).ljust(_LLMC_HEADER_BYTES, b"\0"))
            if start == 0:  # EOS leads here: the last one of the row stands at the front instead
                file.write(np.array([collection.eos_id], kind).tobytes())
            _write_row(file, stream, max(start - 1, 0), stop - 1, kind, hear)
    return paths


def _export_megatron(
    collection: Collection, stream: TokenStream, folder: Path, name: str, split: SplitName, hear: OnBytes
) -> list[Path]:
    code = 8 if collection.vocab_size < 65_500 else 4 if collection.vocab_size <= 2**31 else 5
    kind = _MEGATRON_TYPES[code]
    bin_path, idx_path = (folder / f"{name}_{split}{suffix}" for suffix in (".bin", ".idx"))
    with _new_file(bin_path) as file:
        _write_row(file, stream, 0, stream.tokens, kind, hear)
    with _new_file(idx_path) as file:
        write_megatron_index(file, code, stream.documents, lambda: _end_blocks(stream), idx_path)
    return [bin_path, idx_path]


def _end_blocks(stream: TokenStream) -> Iterator[npt.NDArray[np.int64]]:
    """Where the documents end, counted over the stream, shard by shard."""
    start = 0
    for shard in stream.split.shards:
        yield stream.document_ends(start, start + shard.tokens)
        start += shard.tokens


def write_megatron_index(
    file: BinaryIO, code: int, documents: int, end_blocks: Callable[[], Iterator[npt.NDArray[np.int64]]], path: Path
) -> None:
    """Write the .idx of documents of one sequence each, which end (in tokens) where `end_blocks` says, anew each call.

    DataFormatError: a document of 2^31 tokens or more, whose length the format cannot hold.
    """
    width = np.dtype(_MEGATRON_TYPES[code]).itemsize
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


_EXPORTS: dict[Format, Callable[[Collection, TokenStream, Path, str, SplitName, OnBytes], list[Path]]] = {
    "megatron": _export_megatron,
    "nanogpt": _export_nanogpt,
    "llmc": _export_llmc,
}
