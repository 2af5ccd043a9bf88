"""Token files of other projects, in and out, ids unchanged: see `token_formats` for how each lays them out.

Megatron keeps documents; in nanoGPT's and llm.c's files only EOS tells them apart. In ours EOS ends each document:
where it leads (llm.c) the first one goes and one is set behind the last document, and back again on the way out.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from data_pipeline.durable import file_sha256, sync_folder, telling_full_disk, write_file
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
    open_collection,
    render_manifest,
)
from data_pipeline.stream import TokenStream
from data_pipeline.token_formats import (
    LLMC_HEADER_BYTES,
    LLMC_VERSIONS,
    MEGATRON_TYPES,
    EosPlace,
    FlatReader,
    ForeignDocument,
    ForeignReader,
    Format,
    MegatronReader,
    write_megatron_index,
)
from tokenizer.codec import Codec, TokenizerError

CONVERSION_NAME = "conversion.json"
SHARD_TOKENS = 1 << 25
LLMC_FILE_TOKENS = 100_000_000

_CHUNK_TOKENS = 1 << 20
_NANOGPT_NAMES: dict[SplitName, str] = {"train": "train.bin", "validation": "val.bin"}
_LLMC_NAMES: dict[SplitName, str] = {"train": "train", "validation": "val"}

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
            fresh = partial / "fresh"  # not `partial` itself: who writes a tokenizer locks the folder it lies in
            fresh.mkdir()
            yield fresh
            for folder in (fresh, *(entry for entry in fresh.rglob("*") if entry.is_dir())):
                sync_folder(folder)
            fresh.rename(out)
            partial.rmdir()
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


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
    (those of `tokenizer train` do if they do not normalise, but for a U+2581, counted as the space it has become).
    Memory: two blocks, and one document of at most 2^24 tokens, 1 GB while it is decoded. DataFormatError,
    TokenizerError: nothing is left then.
    """
    if validation and validation_fraction:
        raise DataFormatError("--validation names files to hold out: leave --validation-fraction away")
    if not 0 <= validation_fraction < 1:
        raise DataFormatError(f"a validation fraction of {validation_fraction} is not in [0, 1)")
    if form == "megatron" and eos is not None:
        raise DataFormatError("--eos is for files without an index; Megatron's say where documents end")
    codec = Codec.load(tokenizer)
    eos = eos or ("first" if form == "llmc" else "last")
    readers: dict[str, dict[SplitName, ForeignReader]] = {name: {} for name in sorted({*train, *validation})}
    named: tuple[tuple[SplitName, Mapping[str, Sequence[Path]]], ...] = (("train", train), ("validation", validation))
    if unnamed := sorted(validation.keys() - train.keys()):
        raise DataFormatError(f"source {unnamed[0]!r} has --validation files and no --train files")
    for split, sources in named:
        for name, paths in sources.items():
            _refuse_what_is_no_file(form, paths)
            readers[name][split] = MegatronReader(paths) if form == "megatron" else FlatReader(form, paths, eos)
            if not readers[name][split].files:  # a pattern that met folders alone
                raise DataFormatError(f"{paths[0]}: is no file; name a file or a pattern of files")
    options = {"converted_from": form, "eos": eos, "validation_fraction": validation_fraction}
    with telling_full_disk(out), _whole_or_nothing(out) as folder:
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


def _refuse_what_is_no_file(form: Format, paths: Sequence[Path]) -> None:
    """DataFormatError for a folder, a device, a name that is empty. A Megatron prefix may be a folder's name too."""
    for path in paths:
        if not path.name or (form != "megatron" and path.exists() and not path.is_file()):
            raise DataFormatError(f"{path}: is no file; name a file or a pattern of files")


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

    def run(self, readers: Mapping[SplitName, ForeignReader], facts: dict[str, Any]) -> dict[str, Any]:
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
        if not any(one["documents"] for one in sums.values()):
            raise DataFormatError(f"source {self.folder.name!r} holds no document ({files[0]['path']})")
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

    def _add(self, split: SplitName, document: ForeignDocument, where: str) -> None:
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
    with telling_full_disk(out), _whole_or_nothing(out) as folder:
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
    version, kind = LLMC_VERSIONS[magic]
    paths = []
    for number, start in enumerate(range(0, stream.tokens, LLMC_FILE_TOKENS)):
        stop = min(start + LLMC_FILE_TOKENS, stream.tokens)
        paths.append(folder / f"{name}_{_LLMC_NAMES[split]}_{number:06d}.bin")
        with _new_file(paths[-1]) as file:
            file.write(struct.pack("<3i", magic, version, stop - start).ljust(LLMC_HEADER_BYTES, b"\0"))
            if start == 0:  # EOS leads here: the last one of the row stands at the front instead
                file.write(np.array([collection.eos_id], kind).tobytes())
            _write_row(file, stream, max(start - 1, 0), stop - 1, kind, hear)
    return paths


def _export_megatron(
    collection: Collection, stream: TokenStream, folder: Path, name: str, split: SplitName, hear: OnBytes
) -> list[Path]:
    code = 8 if collection.vocab_size < 65_500 else 4 if collection.vocab_size <= 2**31 else 5
    kind = MEGATRON_TYPES[code]
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


_EXPORTS: dict[Format, Callable[[Collection, TokenStream, Path, str, SplitName, OnBytes], list[Path]]] = {
    "megatron": _export_megatron,
    "nanogpt": _export_nanogpt,
    "llmc": _export_llmc,
}
