"""The first batch costs the same wherever reading begins and however many tokens there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data_startup import mark, probe_in_new_process
from benchmarks.data_tokens import sparse_collection
from data_pipeline.shards import HEADER_BYTES

SEQ_LEN, BATCH = 2048, 4
SHARDS = 100


def start(folder: Path, tokens: int, *samples: int) -> list[dict]:
    """The costs of the first batch at each sample, in fresh processes, of so many tokens in SHARDS sparse shards."""
    collection = sparse_collection(folder, tokens, shard_tokens=tokens // SHARDS)
    assert len(collection.sources["sparse"].splits["train"].shards) == SHARDS
    costs = []
    for sample in samples:
        expected = mark(collection, SEQ_LEN, range(sample, sample + BATCH))
        costs.append(probe_in_new_process(collection.path, sample, SEQ_LEN, BATCH))
        assert costs[-1]["sha256"] == expected, f"the windows of sample {sample} hold other tokens"
    return costs


def test_the_first_batch_of_ten_billion_tokens_costs_what_that_of_ten_million_costs(tmp_path: Path) -> None:
    """By files opened and bytes read, at the start and in the third epoch: headers, manifests, a few windows. An index
    (80 MB here) or more than some windows of tokens (20 GB) would show.
    """
    far = int(2.7 * (10**10 // SEQ_LEN))
    (small,) = start(tmp_path / "small", 10**7, 0)
    first, resumed = start(tmp_path / "large", 10**10, 0, far)
    headers = 2 * SHARDS * HEADER_BYTES
    for cost in (first, resumed):
        assert cost["files_opened"] == pytest.approx(small["files_opened"], abs=2 * SHARDS)
        assert cost["bytes_read"] == pytest.approx(small["bytes_read"], abs=1_000_000)
        assert cost["bytes_read"] < 3 * headers + 5_000_000
        assert cost["grown_bytes"] < 100_000_000
        assert cost["seconds"] < 30  # milliseconds, on a machine that has nothing else to do
