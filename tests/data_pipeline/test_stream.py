"""Reading at scale: more shards than files may be open, more bytes than memory, tokens behind 2^32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.shards import HEADER_BYTES, ShardInfo, Split
from data_pipeline.stream import TokenStream
from tests.data_pipeline.test_shards import EOS, flat, random_documents, write

ROOT = Path(__file__).resolve().parents[2]


def run_script(script: str, *arguments: object) -> dict[str, Any]:
    """A script in a process of its own, with its limits and its memory; the JSON that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def sparse_shard(folder: Path, tokens: int, stem: str = "train-00000") -> ShardInfo:
    """A shard of zeros that takes no room on disk; without an index, and what its header would say."""
    info = ShardInfo(folder, stem, tokens, 1, tokens, EOS, 2, "", "")
    with info.bin_path.open("wb") as file:
        file.truncate(HEADER_BYTES + 2 * tokens)
    return info


READ_UNDER_A_LIMIT = """
import json, resource, sys
from pathlib import Path
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from data_pipeline.loader import Loader
from data_pipeline.order import SampleOrder
from data_pipeline.shards import ShardInfo, Split
from data_pipeline.stream import TokenStream

split = Split([ShardInfo.from_json(Path(sys.argv[1]), record) for record in json.load(open(sys.argv[2]))])
streams = {name: TokenStream(split) for name in sys.argv[3].split(",")}
order = SampleOrder(seed=1, seq_len=16, tokens={name: split.tokens for name in streams})
windows = {name: np.zeros((order.windows[name], 17), np.int64) for name in streams}
most = 0
with Loader(order, streams, rank=0, world_size=1, micro_batch_size=8, gradient_accumulation_steps=1,
            first_sample=0) as loader:
    for _ in range(sum(order.windows.values()) // 8 + 1):
        batch = next(loader)
        most = max(most, len(list(Path("/proc/self/fd").iterdir())))
        for row, sample in enumerate(batch.samples.tolist()):
            address = order.locate(sample)
            windows[address.source][address.window] = [*batch.inputs[row], batch.targets[row, -1]]
ends = [len(stream.document_ends(0, stream.tokens)) for stream in streams.values()]
print(json.dumps({"windows": {name: rows.tolist() for name, rows in windows.items()}, "most": most, "ends": ends}))
"""


@pytest.mark.parametrize("sources", [["a"], ["a", "b", "c", "d", "e"]], ids=["1 source", "5 sources"])
def test_200_shards_with_64_files_to_open(tmp_path: Path, sources: list[str]) -> None:
    """As `ulimit -n 64` makes it: the loader reads an epoch of every source, and the whole of the indexes."""
    rng = np.random.default_rng(0)
    parts = [random_documents(rng, 2, longest=60) for _ in range(200)]
    infos = [write(tmp_path, part, stem=f"train-{number:05d}") for number, part in enumerate(parts)]
    (tmp_path / "shards.json").write_text(json.dumps([info.to_json() for info in infos]))
    found = run_script(READ_UNDER_A_LIMIT, tmp_path, tmp_path / "shards.json", ",".join(sources))
    whole = flat([ids for part in parts for ids in part])
    starts = range(0, len(whole) - 16, 16)
    for name in sources:
        assert found["windows"][name] == [whole[start : start + 17].tolist() for start in starts]
    assert found["ends"] == [400] * len(sources)
    assert found["most"] < 60


READ_MUCH = """
import json, re, sys
from pathlib import Path
from data_pipeline.loader import Loader
from data_pipeline.order import SampleOrder
from data_pipeline.shards import ShardInfo, Split
from data_pipeline.stream import TokenStream

def resident(what):
    return int(re.search(what + ":\\\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024

infos = [ShardInfo(Path(sys.argv[1]), f"train-{n:05d}", int(sys.argv[2]), 1, 1, 2, 2, "", "") for n in range(4)]
stream = TokenStream(Split(infos))
order = SampleOrder(seed=1, seq_len=4096, tokens={"a": stream.tokens})
batches = order.windows["a"] // 16
with Loader(order, {"a": stream}, rank=0, world_size=1, micro_batch_size=16, gradient_accumulation_steps=1,
            first_sample=0) as loader:
    for number in range(batches):
        batch = next(loader)
        if number == batches // 10:
            early = resident("VmHWM")
print(json.dumps({"early": early, "peak": resident("VmHWM"), "read": batches * 16 * 4096 * 2}))
"""


def test_memory_does_not_grow_with_what_was_read(tmp_path: Path) -> None:
    """What is resident includes pages of mapped files: reading 400 MB may cost none of them."""
    for number in range(4):
        sparse_shard(tmp_path, 50_000_000, stem=f"train-{number:05d}")
    found = run_script(READ_MUCH, tmp_path, 50_000_000)
    assert found["read"] > 390e6
    assert found["peak"] - found["early"] < 30e6
    assert found["peak"] < 300e6


def test_tokens_behind_2_to_the_32_are_those_that_were_written(tmp_path: Path) -> None:
    """Two shards of 4.5 billion tokens: a place that is taken into 32 bits anywhere reads something else."""
    infos = [sparse_shard(tmp_path, 4_500_000_000, stem=f"train-{number:05d}") for number in range(2)]
    stream = TokenStream(Split(infos))
    for place in (2**31 - 1, 2**32 - 1, 2**32 + 7, 4_500_000_000 - 2, 2**33 + 5, 9_000_000_000 - 3):
        shard, within = divmod(place, 4_500_000_000)
        with infos[shard].bin_path.open("r+b") as file:
            file.seek(HEADER_BYTES + 2 * within)
            file.write(np.array([11, 12, 13], "<u2").tobytes()[: 2 * min(3, 4_500_000_000 - within)])
        found = stream.read(max(0, place - 1), min(place + 3, stream.tokens)).tolist()
        assert found == [0, 11, 12, 0 if place == 4_500_000_000 - 2 else 13]
