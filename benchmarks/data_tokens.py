"""Collections of tokens that no text stands behind, as `prepare` would leave them: random ones, and sparse ones of any
size. Headers, sizes and manifests are real; `open_collection` finds no fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.durable import write_file
from data_pipeline.shards import (
    COLLECTION_FORMAT,
    DATASET_FORMAT,
    FORMAT_VERSION,
    HEADER_BYTES,
    LEDGER_NAME,
    MANIFEST_NAME,
    Collection,
    Header,
    ShardInfo,
    ShardWriter,
    Split,
    open_collection,
    render_manifest,
    token_width,
)

VOCAB_SIZE, EOS = 32_000, 2
FINGERPRINT = hashlib.sha256(b"no tokenizer").hexdigest()
DOCUMENT_TOKENS = 1000  # of all documents but the last of a shard
SHARD_TOKENS = 17_000_000  # what `prepare` makes of a unit of 64 MiB, about
WIDTH = token_width(VOCAB_SIZE)

Ids = npt.NDArray[np.uint16]


def random_collection(folder: Path, tokens: Mapping[str, int], seed: int) -> Collection:
    """Sources of so many random tokens each, in documents of a thousand."""
    rng = np.random.default_rng(seed)
    shards = {}
    for name, count in tokens.items():
        (folder / name).mkdir(parents=True)
        shards[name] = [
            _random_shard(folder / name, f"train-{number:05d}", min(SHARD_TOKENS, count - start), rng)
            for number, start in enumerate(range(0, count, SHARD_TOKENS))
        ]
    return _write_manifests(folder, shards)


def sparse_collection(folder: Path, tokens: int, shard_tokens: int = SHARD_TOKENS) -> Collection:
    """One source of so many tokens, all 0, that take no room on a disk: what is not written to a file is a hole."""
    (folder / "sparse").mkdir(parents=True)
    shards = [
        _sparse_shard(folder / "sparse", f"train-{number:05d}", min(shard_tokens, tokens - start))
        for number, start in enumerate(range(0, tokens, shard_tokens))
    ]
    return _write_manifests(folder, {"sparse": shards})


def ids_at(start: int, stop: int) -> Ids:
    """Tokens that say where they stand, (stop - start,): the one at place p of a stream depends on p alone."""
    places = np.arange(start, stop, dtype=np.uint64)
    return (places * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)).astype(np.uint16) % np.uint16(VOCAB_SIZE)


def write_ids(split: Split, start: int, stop: int) -> None:
    """Put `ids_at` into the shards of a split, from place `start` of its stream to `stop`."""
    first = 0  # token of a shard
    for shard in split.shards:
        low, high = max(start, first), min(stop, first + shard.tokens)
        if low < high:
            with shard.bin_path.open("r+b") as file:
                file.seek(HEADER_BYTES + (low - first) * WIDTH)
                file.write(ids_at(low, high).astype(f"<u{WIDTH}").tobytes())
        first += shard.tokens


def _random_shard(folder: Path, stem: str, tokens: int, rng: np.random.Generator) -> ShardInfo:
    writer = ShardWriter(folder, stem, vocab_size=VOCAB_SIZE, eos_id=EOS, fingerprint=FINGERPRINT)
    ids = rng.integers(EOS + 1, VOCAB_SIZE, tokens, np.uint16)
    ends = np.append(np.arange(DOCUMENT_TOKENS, tokens, DOCUMENT_TOKENS), tokens)
    ids[ends - 1] = EOS
    writer.add_documents(ids, ends, text_bytes=4 * tokens)
    return writer.publish()


def _sparse_shard(folder: Path, stem: str, tokens: int) -> ShardInfo:
    documents = -(-tokens // DOCUMENT_TOKENS)
    facts = WIDTH, tokens, documents, VOCAB_SIZE - 1, VOCAB_SIZE, EOS, FINGERPRINT, 4 * tokens
    for header in (Header("bin", *facts), Header("idx", *facts)):
        with (folder / f"{stem}.{header.kind}").open("wb") as file:
            file.write(header.to_bytes())
            file.truncate(header.file_bytes)
    unread = "0" * 64  # hashes are for `verify --full`
    return ShardInfo(folder, stem, tokens, documents, 4 * tokens, VOCAB_SIZE - 1, WIDTH, unread, unread)


def _write_manifests(folder: Path, shards: Mapping[str, Sequence[ShardInfo]]) -> Collection:
    tokenizer = {"fingerprint": FINGERPRINT, "vocab_size": VOCAB_SIZE, "eos_id": EOS, "files": {}}
    sources = {}
    for name, own in shards.items():
        write_file(folder / name / LEDGER_NAME, b"")
        sums = {key: sum(getattr(one, key) for one in own) for key in ("tokens", "documents", "text_bytes")}
        splits = {
            "train": {**sums, "shards": [one.to_json() for one in own]},
            "validation": {**dict.fromkeys(sums, 0), "shards": []},
        }
        content = render_manifest({
            "format": DATASET_FORMAT, "version": FORMAT_VERSION, "name": name, "tokenizer": tokenizer, "splits": splits,
            "documents_read": sums["documents"], "dropped": {}, "ledger": {"bytes": 0},
        })  # fmt: skip
        write_file(folder / name / MANIFEST_NAME, content)
        sources[name] = {"manifest_sha256": hashlib.sha256(content).hexdigest()}
    collection = {"format": COLLECTION_FORMAT, "version": FORMAT_VERSION, "tokenizer": tokenizer, "sources": sources}
    write_file(folder / MANIFEST_NAME, render_manifest(collection))
    return open_collection(folder)
