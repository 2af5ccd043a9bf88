"""How soon the first batch is there: of a small data set and of one of ten billion tokens, at the beginning and far on.

The data sets are sparse files with real headers and manifests, as many shards as `prepare` would have made. A fresh
process opens the collection, makes the order and a loader, and takes one batch; before that the system forgets the
files' pages. The windows of that batch hold known tokens, and must come out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_pages import drop_pages
from benchmarks.data_tokens import SHARD_TOKENS, ids_at, sparse_collection, write_ids
from data_pipeline.loader import Loader
from data_pipeline.order import SampleOrder
from data_pipeline.shards import Collection, open_collection
from data_pipeline.stream import TokenStream

ROOT = Path(__file__).resolve().parents[1]
SEED = 1
FAR_EPOCHS = 2.7  # where a far resume begins
PROBE = """
import json, sys
from pathlib import Path
from benchmarks.data_startup import probe
folder, *numbers = sys.argv[1:]
print(json.dumps(probe(Path(folder), *map(int, numbers))))
"""


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--startup-tokens", type=float, nargs="+", default=[1e7, 1e9, 1e10])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """By tokens of the data set, and by where reading begins: medians of seconds; files opened, bytes read."""
    seq_len, batch_size = options.seq_len, options.batch_size
    report: dict[str, Any] = {"seq_len": seq_len, "batch_size": batch_size, "data_sets": []}
    for tokens in map(int, options.startup_tokens):
        collection = sparse_collection(folder / "sparse", tokens)
        split = collection.sources["sparse"].splits["train"]
        entry: dict[str, Any] = {"tokens": tokens, "shards": len(split.shards)}
        for name, sample in (("first", 0), ("far", int(FAR_EPOCHS * (tokens // seq_len)))):
            expected = mark(collection, seq_len, range(sample, sample + batch_size))
            found = []
            for _ in range(options.repetitions):
                held = drop_pages([path for shard in split.shards for path in (shard.bin_path, shard.idx_path)])
                started = time.perf_counter()
                found.append(probe_in_new_process(collection.path, sample, seq_len, batch_size))
                found[-1] |= {"process_seconds": time.perf_counter() - started, "pages_held": held}
                if found[-1].pop("sha256") != expected:
                    sys.exit(f"error: the batch at sample {sample:,} of {tokens:,} tokens is not what its windows hold")
            entry[name] = {key: statistics.median(one[key] for one in found) for key in found[0]} | {"sample": sample}
        report["data_sets"].append(entry)
        shutil.rmtree(folder / "sparse")
    return report


def mark(collection: Collection, seq_len: int, samples: range) -> str:
    """Write known tokens where the windows of these samples lie; returns the SHA-256 that their batch must have."""
    split = collection.sources["sparse"].splits["train"]
    order = SampleOrder(seed=SEED, seq_len=seq_len, tokens={"sparse": split.tokens})
    rows = []
    for sample in samples:
        start = order.locate(sample).window * seq_len
        write_ids(split, start, start + seq_len + 1)
        rows.append(ids_at(start, start + seq_len + 1).astype(np.int64))
    windows = np.stack(rows)
    return _sha256(windows[:, :-1], windows[:, 1:])


def probe(folder: Path, sample: int, seq_len: int, batch_size: int) -> dict[str, Any]:
    """From a folder's name to the batch that begins at a sample; for a process that does nothing else.

    `files_opened` and `bytes_read` (Linux; else 0) count what all threads did until the loader was closed;
    `grown_bytes` is by how much the most memory held grew.
    """
    opened: list[object] = []
    read_before, held_before = _bytes_read(), _most_memory()
    sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == "open" else None)
    started = time.perf_counter()
    collection = open_collection(folder)
    opened_at = time.perf_counter()
    streams = {name: TokenStream(source.splits["train"]) for name, source in collection.sources.items()}
    order = SampleOrder(seed=SEED, seq_len=seq_len, tokens={name: one.tokens for name, one in streams.items()})
    with Loader(
        order, streams, rank=0, world_size=1, micro_batch_size=batch_size, gradient_accumulation_steps=1,
        first_sample=sample, prefetch=1,
    ) as loader:  # fmt: skip
        batch = next(loader)
        ended = time.perf_counter()
    files_opened = len(opened)
    return {
        "seconds": ended - started,
        "open_seconds": opened_at - started,
        "files_opened": files_opened,
        "bytes_read": _bytes_read() - read_before,
        "grown_bytes": _most_memory() - held_before,
        "sha256": _sha256(batch.inputs, batch.targets),
    }


def probe_in_new_process(folder: Path, *numbers: int) -> dict[str, Any]:
    """`probe`, in a process of its own, run from the project's folder."""
    command = [sys.executable, "-c", PROBE, str(folder), *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: the probe ended with {done.returncode}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _sha256(inputs: np.ndarray, targets: np.ndarray) -> str:
    return hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()


def _bytes_read() -> int:
    """By all read calls of this process so far, from whatever they came."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(counters.read_text().split("rchar: ")[1].split()[0])


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def to_text(report: dict[str, Any]) -> str:
    lines = [
        f"from a folder's name to one batch of {report['batch_size']} × {report['seq_len']} tokens,"
        f" with {SHARD_TOKENS / 1e6:.0f} M tokens a shard; in brackets the whole process, Python's start included"
    ]
    for entry in report["data_sets"]:
        for name in ("first", "far"):
            one = entry[name]
            held = "" if one["pages_held"] < 0.01 else f"; {one['pages_held']:.0%} of its pages were in memory"
            lines.append(
                f"{entry['tokens'] / 1e9:7.2f} G tokens, sample {one['sample']:>12,}   {one['seconds'] * 1e3:7.1f} ms"
                f" [{one['process_seconds'] * 1e3:,.0f} ms], opening {one['open_seconds'] * 1e3:.1f} ms;"
                f" {entry['shards']:,} shards, {one['files_opened']:,.0f} files opened,"
                f" {one['bytes_read'] / 1e6:.1f} MB read{held}"
            )
    return "\n".join(lines)
