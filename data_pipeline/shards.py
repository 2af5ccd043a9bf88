"""Token files, version 1: write them, open them, check them. The byte layout below is fixed for good.

A data set is a folder of shards; a shard is two files, ``train-00000.bin`` and ``train-00000.idx``.
Every number is little-endian. Both files begin with a header of 4096 bytes:

====== ===== =============================================================================
offset bytes content
====== ===== =============================================================================
0      8     magic: ``ZHTOKENS`` (.bin) or ``ZHTINDEX`` (.idx)
8      4     u32 format version: 1
12     4     u32 byte order mark: 0x01020304 (bytes 04 03 02 01)
16     4     u32 size of this header: 4096
20     4     u32 bytes per token: 2 (uint16) or 4 (uint32)
24     8     u64 tokens in the shard
32     8     u64 documents in the shard
40     8     u64 largest id in the shard
48     8     u64 vocab size of the tokenizer, added tokens included
56     8     u64 id of the end-of-document token (EOS)
64     32    fingerprint of the tokenizer (a raw SHA-256 digest)
96     8     u64 UTF-8 bytes of the source text of the shard's documents
104    8     u64 bytes of tokens under one CRC: 16,777,216
112    4     u32 CRC32 of everything behind the header (.idx only; 0 in .bin)
116    3976  zeros
4092   4     u32 CRC32 of bytes 0 to 4091
====== ===== =============================================================================

``.bin`` goes on with the tokens (page-aligned, nothing behind them). ``.idx`` goes on with ``documents`` u64:
where each document ends, counted in tokens from the shard's start, its EOS included; then one u32 CRC32 for each
16 MiB of token bytes, the last block being shorter. Every document ends with EOS and holds no other EOS.
The token width follows the largest id the tokenizer can give (vocab size - 1), never the data or a file's size.

A collection is a folder of data sets, one a source, made with one tokenizer: see `open_collection`.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import orjson

from data_pipeline.durable import file_sha256, publish, temporary_name

FORMAT_VERSION = 1
HEADER_BYTES = 4096
CRC_BLOCK_BYTES = 16 * 1024 * 1024
COLLECTION_FORMAT = "zerohalf-collection"
DATASET_FORMAT = "zerohalf-dataset"
PLAN_FORMAT = "zerohalf-prepare-plan"
MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
LEDGER_NAME = "ledger.jsonl"
PLAN_PATH = Path(".prepare", "plan.json")

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

_BYTE_ORDER_MARK = 0x01020304
_HEADER = struct.Struct("<8s4I5Q32s2QI")
_CRC = struct.Struct("<I")
_MAGIC = {"bin": b"ZHTOKENS", "idx": b"ZHTINDEX"}
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENDS_KEPT = 1 << 17
_BUFFER_BYTES = 1 << 18

Int64Array = npt.NDArray[np.int64]


class DataFormatError(ValueError):
    """A token file, index or manifest is damaged, cut, missing or of another kind. The message names file and fault."""


def token_width(vocab_size: int) -> int:
    """Bytes per token for a tokenizer whose largest id is vocab_size - 1: 2 up to 65,536 ids, else 4."""
    if not 1 <= vocab_size <= 2**32:
        raise DataFormatError(f"a vocab size of {vocab_size} does not fit token files (1 to {2**32})")
    return 2 if vocab_size <= 2**16 else 4


def is_source_name(name: str) -> bool:
    """Whether a data set of this name can stand beside the tokenizer and the manifest in a collection."""
    return _SOURCE_NAME.fullmatch(name) is not None and name not in (TOKENIZER_FOLDER, MANIFEST_NAME)


# ---------------------------------------------------------------- headers


@dataclass(frozen=True)
class Header:
    """The first 4096 bytes of a .bin or .idx file; see the module's docstring."""

    kind: Literal["bin", "idx"]
    token_bytes: int
    tokens: int
    documents: int
    largest_id: int
    vocab_size: int
    eos_id: int
    fingerprint: str
    text_bytes: int
    payload_crc: int = 0

    def to_bytes(self) -> bytes:
        """The header as it stands in the file, 4096 bytes."""
        head = _HEADER.pack(
            _MAGIC[self.kind], FORMAT_VERSION, _BYTE_ORDER_MARK, HEADER_BYTES, self.token_bytes,
            self.tokens, self.documents, self.largest_id, self.vocab_size, self.eos_id,
            bytes.fromhex(self.fingerprint), self.text_bytes, CRC_BLOCK_BYTES, self.payload_crc,
        )  # fmt: skip
        body = head.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))

    @property
    def file_bytes(self) -> int:
        """The exact size the file must have."""
        size = self.tokens * self.token_bytes
        return HEADER_BYTES + (size if self.kind == "bin" else 8 * self.documents + 4 * -(-size // CRC_BLOCK_BYTES))


def read_header(path: Path, kind: Literal["bin", "idx"]) -> Header:
    """Read and check one header and the file's size against it. DataFormatError names the fault."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DataFormatError(f"{path}: the file is missing") from None
    if len(raw) < HEADER_BYTES:
        raise DataFormatError(f"{path}: {len(raw)} bytes are too few for a header of {HEADER_BYTES}")
    if raw[:8] != _MAGIC[kind]:
        raise DataFormatError(f"{path}: not a .{kind} token file (it begins with {raw[:8]!r})")
    if _CRC.unpack_from(raw, HEADER_BYTES - _CRC.size)[0] != zlib.crc32(raw[: -_CRC.size]):
        raise DataFormatError(f"{path}: the header is damaged (its CRC32 does not match)")
    fields = _HEADER.unpack(raw[: _HEADER.size])
    _, version, mark, header_bytes, token_bytes, tokens, documents, largest_id, vocab_size, eos_id = fields[:10]
    fingerprint, text_bytes, block, payload_crc = fields[10:]
    if version != FORMAT_VERSION or mark != _BYTE_ORDER_MARK or header_bytes != HEADER_BYTES:
        raise DataFormatError(f"{path}: format version {version} is not known; this program reads {FORMAT_VERSION}")
    header = Header(
        kind, token_bytes, tokens, documents, largest_id, vocab_size, eos_id, fingerprint.hex(), text_bytes, payload_crc
    )
    if token_bytes != token_width(header.vocab_size) or block != CRC_BLOCK_BYTES:
        raise DataFormatError(f"{path}: {token_bytes} bytes a token do not fit a vocab size of {header.vocab_size}")
    if size != header.file_bytes:
        raise DataFormatError(f"{path}: {size:,} bytes, but its header says {header.file_bytes:,} (cut or appended to)")
    return header


# ---------------------------------------------------------------- manifests


def render_manifest(content: dict[str, Any]) -> bytes:
    """The only bytes this content has as a manifest: sorted, indented, with a SHA-256 of all other fields."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    rest = {key: value for key, value in content.items() if key != "self_sha256"}
    digest = hashlib.sha256(orjson.dumps(rest, option=options)).hexdigest()
    return orjson.dumps({**rest, "self_sha256": digest}, option=options)


def read_manifest(path: Path, form: str) -> tuple[dict[str, Any], str]:
    """Read a manifest of the given format; returns its content and the SHA-256 of the file. DataFormatError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataFormatError(f"{path}: missing; without it there is no data set (run `prepare` to its end)") from None
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DataFormatError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != form:
        raise DataFormatError(f"{path}: not a manifest of format {form!r}")
    if content.get("version") != FORMAT_VERSION:
        found = content.get("version")
        raise DataFormatError(f"{path}: format version {found!r} is not known; this program reads {FORMAT_VERSION}")
    if render_manifest(content) != raw:
        raise DataFormatError(f"{path}: damaged or edited by hand (it does not match its own SHA-256)")
    return content, hashlib.sha256(raw).hexdigest()


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class ShardInfo:
    """One shard, as the manifest has it. `largest_id` and the counts stand in its headers too."""

    folder: Path
    stem: str
    tokens: int
    documents: int
    text_bytes: int
    largest_id: int
    token_bytes: int
    bin_sha256: str
    idx_sha256: str

    @property
    def bin_path(self) -> Path:
        return self.folder / f"{self.stem}.bin"

    @property
    def idx_path(self) -> Path:
        return self.folder / f"{self.stem}.idx"

    def to_json(self) -> dict[str, Any]:
        """The manifest's record of this shard (all but the folder)."""
        return {
            "name": self.stem, "tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes,
            "largest_id": self.largest_id, "token_bytes": self.token_bytes,
            "bin_sha256": self.bin_sha256, "idx_sha256": self.idx_sha256,
        }  # fmt: skip

    @classmethod
    def from_json(cls, folder: Path, record: dict[str, Any]) -> ShardInfo:
        """The shard a manifest's record describes. KeyError or TypeError: the record is not one."""
        record = dict(record)
        return cls(folder=folder, stem=record.pop("name"), **record)


class ShardWriter:
    """Writes one shard under temporary names; `publish` gives both files their names, `discard` removes them.

    Memory, whatever the shard's size: buffers of two megabytes.
    """

    def __init__(self, folder: Path, stem: str, *, vocab_size: int, eos_id: int, fingerprint: str) -> None:
        if not 0 <= eos_id < vocab_size:
            raise DataFormatError(f"an EOS id of {eos_id} is outside a vocabulary of {vocab_size}")
        self._folder, self._stem = folder, stem
        self._vocab_size, self._eos_id, self._fingerprint = vocab_size, eos_id, fingerprint
        self._width = token_width(vocab_size)
        self._crc, self._block_bytes = 0, 0  # of the token block under way
        self._ends: list[npt.NDArray[Any]] = []  # of documents that are not in the .idx yet
        self._waiting_ends = 0
        self._crcs: list[int] = []
        self._index_crc = 0
        self.tokens, self.documents, self.text_bytes, self._largest = 0, 0, 0, eos_id
        self._bin_path, self._idx_path = (temporary_name(folder / f"{stem}.{kind}") for kind in ("bin", "idx"))
        self._bin, self._idx = (path.open("wb", _BUFFER_BYTES) for path in (self._bin_path, self._idx_path))
        for file in (self._bin, self._idx):
            file.write(bytes(HEADER_BYTES))

    def add(self, ids: npt.ArrayLike, text_bytes: int) -> None:
        """Append one document: its ids (1-D integers, no EOS), which is then closed by EOS, and the size of its text.

        DataFormatError when an id is outside the vocabulary or is EOS.
        """
        row = np.asarray(ids)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise DataFormatError(f"ids must be one row of integers, not {row.dtype} of shape {row.shape}")
        row = np.append(row.astype(np.int64), self._eos_id)
        self.add_documents(row, np.array([len(row)]), text_bytes)

    def add_documents(self, ids: npt.NDArray[Any], ends: npt.NDArray[Any], text_bytes: int) -> None:
        """Append documents: `ids` (tokens,) end to end, EOS closing each; `ends` (documents,), where each ends in
        them, its EOS included; and the size of all their texts. The last document may go on in the
        next call.

        DataFormatError when an id is outside the vocabulary, or EOS stands elsewhere than at the ends.
        """
        if not len(ids):
            return
        low, high = int(ids.min()) if ids.dtype.kind == "i" else 0, int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise DataFormatError(f"id {low if low < 0 else high} is outside a vocabulary of {self._vocab_size}")
        is_eos = ids == self._eos_id
        if np.count_nonzero(is_eos) != len(ends) or not is_eos[ends - 1].all():
            raise DataFormatError(f"a document holds the EOS id {self._eos_id}; only its end may")
        self._largest = max(self._largest, high)
        self._write_tokens(np.ascontiguousarray(ids, f"<u{self._width}").data.cast("B"))
        self._ends.append(ends.astype("<u8") + np.uint64(self.tokens))
        self._waiting_ends += len(ends)
        if self._waiting_ends >= _ENDS_KEPT:
            self._write_ends()
        self.tokens += len(ids)
        self.documents += len(ends)
        self.text_bytes += text_bytes

    def _write_tokens(self, raw: memoryview) -> None:
        """In parts that are still in the CPU's cache."""
        while raw:
            part = raw[: CRC_BLOCK_BYTES - self._block_bytes]
            self._crc = zlib.crc32(part, self._crc)
            self._bin.write(part)
            self._block_bytes += len(part)
            if self._block_bytes == CRC_BLOCK_BYTES:
                self._end_block()
            raw = raw[len(part) :]

    def _end_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc, self._block_bytes = 0, 0

    def _write_ends(self) -> None:
        self._write_index(b"".join(ends.tobytes() for ends in self._ends))
        self._ends, self._waiting_ends = [], 0

    def _write_index(self, raw: bytes) -> None:
        self._index_crc = zlib.crc32(raw, self._index_crc)
        self._idx.write(raw)

    def publish(self) -> ShardInfo:
        """Finish, sync and name both files. The shard exists from the moment its .bin has its name."""
        if self._block_bytes:
            self._end_block()
        self._write_ends()
        self._write_index(np.array(self._crcs, "<u4").tobytes())
        for file, kind, crc in ((self._bin, "bin", 0), (self._idx, "idx", self._index_crc)):
            header = Header(
                kind, self._width, self.tokens, self.documents, self._largest, self._vocab_size, self._eos_id,  # type: ignore[arg-type]
                self._fingerprint, self.text_bytes, crc,
            )  # fmt: skip
            file.seek(0)
            file.write(header.to_bytes())
            file.flush()
            os.fsync(file.fileno())
            file.close()
        info = ShardInfo(
            folder=self._folder, stem=self._stem, tokens=self.tokens, documents=self.documents,
            text_bytes=self.text_bytes, largest_id=self._largest, token_bytes=self._width,
            bin_sha256=file_sha256(self._bin_path), idx_sha256=file_sha256(self._idx_path),
        )  # fmt: skip
        publish(self._idx_path, info.idx_path)
        publish(self._bin_path, info.bin_path)
        return info

    def discard(self) -> None:
        """Close and remove what has no name yet; safe to call at any time."""
        for file, path in ((self._bin, self._bin_path), (self._idx, self._idx_path)):
            with suppress(OSError):  # a full disk, which has been told
                file.close()
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Split:
    """One side of a source: its shards in order, and their sums."""

    shards: list[ShardInfo]
    tokens: int = field(init=False)
    documents: int = field(init=False)
    text_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "documents", "text_bytes"):
            object.__setattr__(self, name, sum(getattr(shard, name) for shard in self.shards))


@dataclass(frozen=True)
class Source:
    """One data set: what one named input became."""

    name: str
    path: Path
    splits: dict[SplitName, Split]
    manifest: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Collection:
    """Data sets made with one tokenizer, ordered by name. `manifest_sha256` stands for all that is in it."""

    path: Path
    fingerprint: str
    vocab_size: int
    eos_id: int
    manifest_sha256: str
    sources: dict[str, Source]

    @property
    def content_sha256(self) -> str:
        """A hash of the tokens alone: equal wherever the inputs lay and whatever they were called when it was made."""
        hashes = {
            name: {split: [shard.bin_sha256 for shard in part.shards] for split, part in source.splits.items()}
            for name, source in self.sources.items()
        }
        return hashlib.sha256(orjson.dumps([self.fingerprint, hashes], option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def streams(self) -> dict[str, str]:
        """Of every source a hash of its training tokens: equal where another collection has the very same ones."""
        shards = {name: source.splits["train"].shards for name, source in self.sources.items()}
        return {
            name: hashlib.sha256(orjson.dumps([shard.bin_sha256 for shard in part])).hexdigest()
            for name, part in shards.items()
        }


def open_collection(path: Path | str) -> Collection:
    """Open a collection after quick checks of everything in it but the tokens themselves.

    Checked: all manifests against their hashes, the tokenizer's files, the size and both headers of every shard
    against the manifest. Cost: two small reads a shard. DataFormatError: one line, with file and fault.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataFormatError(f"{path}: no such folder")
    content, digest = read_manifest(path / MANIFEST_NAME, COLLECTION_FORMAT)
    try:
        tokenizer = content["tokenizer"]
        fingerprint, vocab_size, eos_id = tokenizer["fingerprint"], tokenizer["vocab_size"], tokenizer["eos_id"]
        files, sources = dict(tokenizer["files"]), dict(content["sources"])
        hashes = {name: sources[name]["manifest_sha256"] for name in sorted(sources)}
    except (KeyError, TypeError, ValueError):
        raise DataFormatError(f"{path / MANIFEST_NAME}: a field is missing or of the wrong kind") from None
    for name, expected in files.items():
        check_sha256(path / TOKENIZER_FOLDER / name, expected)
    collection = Collection(path, fingerprint, vocab_size, eos_id, digest, {})
    for name, expected in hashes.items():
        if not is_source_name(name):
            raise DataFormatError(f"{path / MANIFEST_NAME}: {name!r} is not a name for a source")
        collection.sources[name] = _open_source(path / name, name, expected, collection)
    return collection


def check_sha256(path: Path, expected: str) -> None:
    """DataFormatError unless the file is there and has this SHA-256."""
    if not path.is_file():
        raise DataFormatError(f"{path}: the file is missing")
    if (found := file_sha256(path)) != expected:
        raise DataFormatError(f"{path}: damaged or changed: SHA-256 is {found}, the manifest says {expected}")


def _open_source(folder: Path, name: str, expected_sha256: str, collection: Collection) -> Source:
    manifest_path = folder / MANIFEST_NAME
    content, digest = read_manifest(manifest_path, DATASET_FORMAT)
    if digest != expected_sha256:
        raise DataFormatError(f"{manifest_path}: SHA-256 is {digest}, the collection's manifest says {expected_sha256}")
    try:
        splits = {
            split: Split([ShardInfo.from_json(folder, record) for record in content["splits"][split]["shards"]])
            for split in SPLITS
        }
        claimed = {split: content["splits"][split] for split in SPLITS}
        if any(claimed[split][key] != getattr(splits[split], key) for split in SPLITS for key in _SUMS):
            raise DataFormatError(f"{manifest_path}: the sums of a split differ from those of its shards")
        kept = sum(split.documents for split in splits.values())
        if content["documents_read"] != kept + sum(content["dropped"].values()):
            raise DataFormatError(f"{manifest_path}: documents read are not the sum of those kept and those dropped")
    except (KeyError, TypeError):
        raise DataFormatError(f"{manifest_path}: a field is missing or of the wrong kind") from None
    ledger = folder / LEDGER_NAME
    if not ledger.is_file() or ledger.stat().st_size != content.get("ledger", {}).get("bytes"):
        raise DataFormatError(f"{ledger}: missing or not of the size the manifest says")
    for split in splits.values():
        for shard in split.shards:
            check_shard(shard, collection.fingerprint, collection.vocab_size, collection.eos_id)
    return Source(name, folder, splits, content)


_SUMS = ("tokens", "documents", "text_bytes")


def check_shard(shard: ShardInfo, fingerprint: str, vocab_size: int, eos_id: int) -> None:
    """Quick check of one shard: sizes and both headers, against what the manifest and the tokenizer say."""
    for path, kind in ((shard.bin_path, "bin"), (shard.idx_path, "idx")):
        header = read_header(path, kind)  # type: ignore[arg-type]
        if header.fingerprint != fingerprint:
            raise DataFormatError(
                f"{path}: made with tokenizer {header.fingerprint[:12]}, the collection's is {fingerprint[:12]}"
            )
        facts = {
            "tokens": shard.tokens, "documents": shard.documents, "text_bytes": shard.text_bytes,
            "largest_id": shard.largest_id, "token_bytes": shard.token_bytes,
            "vocab_size": vocab_size, "eos_id": eos_id,
        }  # fmt: skip
        for key, value in facts.items():
            if getattr(header, key) != value:
                raise DataFormatError(f"{path}: {key} is {getattr(header, key)}, the manifest says {value}")
        if shard.largest_id >= vocab_size:
            raise DataFormatError(f"{path}: largest id {shard.largest_id} is outside a vocabulary of {vocab_size}")


def read_index(path: Path) -> tuple[Int64Array, npt.NDArray[np.uint32]]:
    """Document ends (int64, one a document) and CRC32 of the token blocks (uint32). DataFormatError when damaged."""
    header = read_header(path, "idx")
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        raw = file.read(header.file_bytes - HEADER_BYTES)
    if zlib.crc32(raw) != header.payload_crc:
        raise DataFormatError(f"{path}: damaged behind its header (CRC32 does not match)")
    ends = np.frombuffer(raw, "<u8", header.documents).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    if header.documents and (lengths.min() < 1 or int(ends[-1]) != header.tokens):
        raise DataFormatError(f"{path}: the document ends do not ascend to {header.tokens}, the number of tokens")
    return ends, np.frombuffer(raw, "<u4", offset=8 * header.documents)
