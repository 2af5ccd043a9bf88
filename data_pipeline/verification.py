"""Is a collection what it says? Its manifests and headers; every byte; some documents, tokenized once more."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.origins import Lost, Origin, find_origins
from data_pipeline.packing_plan import check_plans
from data_pipeline.shards import (
    CRC_BLOCK_BYTES,
    HEADER_BYTES,
    LEDGER_NAME,
    PLAN_FORMAT,
    PLAN_PATH,
    SPLITS,
    Collection,
    DataFormatError,
    ShardInfo,
    SplitName,
    check_sha256,
    open_collection,
    read_index,
    read_manifest,
)
from data_pipeline.stream import TokenStream
from tokenizer.codec import Codec


def verify_collection(path: Path | str, *, full: bool, on_bytes: Callable[[int], None] | None = None) -> Collection:
    """Quick checks (`open_collection`, and the plan that `prepare` left), or with `full` every byte.

    Full: CRC32 of every token block, document ends ascending, EOS at each end and nowhere else, the largest id,
    SHA-256 of every file; packing plans, in which each token stands once. DataFormatError names the first fault.
    `on_bytes` hears of the bytes of tokens read.
    """
    collection = open_collection(path)
    if (collection.path / PLAN_PATH).exists():
        read_manifest(collection.path / PLAN_PATH, PLAN_FORMAT)
    if full:
        for source in collection.sources.values():
            check_sha256(source.path / LEDGER_NAME, source.manifest["ledger"]["sha256"])
            for split in source.splits.values():
                for shard in split.shards:
                    verify_shard(shard, collection.eos_id, on_bytes)
        check_plans(collection)
    return collection


def verify_shard(shard: ShardInfo, eos_id: int, on_bytes: Callable[[int], None] | None = None) -> None:
    """Read every byte of a shard and check it; see `verify_collection`. Memory: two blocks and the index."""
    ends, crcs = read_index(shard.idx_path)
    digest = hashlib.sha256()
    position, largest = 0, 0
    with shard.bin_path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
        for block, expected in enumerate(crcs):
            raw = file.read(CRC_BLOCK_BYTES)
            if zlib.crc32(raw) != expected:
                raise DataFormatError(f"{shard.bin_path}: token block {block} is damaged (its CRC32 does not match)")
            digest.update(raw)
            ids = np.frombuffer(raw, f"<u{shard.token_bytes}")
            first, last = np.searchsorted(ends, [position, position + len(ids)], side="right")
            if not np.array_equal(np.flatnonzero(ids == eos_id) + position + 1, ends[first:last]):
                raise DataFormatError(
                    f"{shard.bin_path}: EOS does not stand exactly at the document ends in token block {block}"
                )
            largest = max(largest, int(ids.max()))
            position += len(ids)
            if on_bytes is not None:
                on_bytes(len(raw))
    if largest != shard.largest_id:
        raise DataFormatError(f"{shard.bin_path}: the largest id is {largest}, the header says {shard.largest_id}")
    if digest.hexdigest() != shard.bin_sha256:
        raise DataFormatError(f"{shard.bin_path}: SHA-256 is not the one in the manifest")
    check_sha256(shard.idx_path, shard.idx_sha256)


# ---------------------------------------------------------------- against the source documents


@dataclass(frozen=True)
class SampleReport:
    """How many documents were found in their source files with the same ids, and why the others were not compared."""

    equal: int
    lost: dict[str, int]

    def describe_lost(self) -> str:
        """One line: how many could not be compared, and because of which files."""
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self.lost.items())
        total = sum(self.lost.values())
        return f"{self.equal} documents equal their source, but {total} cannot be compared: {reasons}"


def verify_sample(collection: Collection, codec: Codec, count: int, *, seed: int = 0) -> SampleReport:
    """Read `count` documents, drawn by `seed`, from their source files again, tokenize them and compare the ids.

    Cost: the unit of work (`--unit-bytes` of input) of each one drawn is read. Documents whose file is gone or has
    changed are reported, not skipped. DataFormatError: ids that differ, or a collection that has no source text.
    """
    splits = [(source, split) for source in collection.sources.values() for split in SPLITS]
    total = sum(source.splits[split].documents for source, split in splits)
    drawn = sorted(random.Random(seed).sample(range(total), min(count, total)))
    wanted: dict[str, dict[SplitName, list[int]]] = defaultdict(dict)
    first = 0
    for source, split in splits:
        documents = source.splits[split].documents
        wanted[source.name][split] = [number - first for number in drawn if first <= number < first + documents]
        first += documents
    equal, lost = 0, Counter[str]()
    for name, numbers in wanted.items():
        source = collection.sources[name]
        streams = {split: TokenStream(source.splits[split]) for split in SPLITS}
        for split, number, found in find_origins(source, numbers):
            if isinstance(found, Lost):
                lost[found.reason] += 1
                continue
            where = f"{source.path}, {split} document {number}"
            _compare_ids(streams[split], number, found, codec, where)
            equal += 1
    return SampleReport(equal, dict(lost))


def _compare_ids(stream: TokenStream, number: int, origin: Origin, codec: Codec, where: str) -> None:
    stored = stream.read(*stream.document(number)).tolist()
    (ids,) = codec.encode_documents([origin.text])
    fresh = [*ids.tolist(), codec.eos_id]
    if stored != fresh:
        place = next((i for i, pair in enumerate(zip(stored, fresh, strict=False)) if pair[0] != pair[1]), None)
        fault = (
            f"{len(stored)} ids are stored, its text gives {len(fresh)}"
            if place is None
            else f"id {place} is {stored[place]}, its text gives {fresh[place]}"
        )
        raise DataFormatError(f"{where} is not what {origin.path}:{origin.position} gives: {fault}")
