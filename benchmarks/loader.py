"""How fast the loader gives batches, as a ratio to numpy alone: a memory-mapped row of the same tokens, sliced.

Both build the same arrays, inputs and targets in int64, of the same windows in the same order. The reference is told
the windows beforehand and has each source's tokens in one flat file; the loader computes the order, reads the shards,
announces windows to the system and hands batches from thread to thread. Files are in the page cache in both cases.

    python benchmarks/loader.py
    python benchmarks/loader.py --corpus my/texts --seq-len 2048 --batch-size 16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from data_pipeline.corpus import Document, find_files, plan_units, read_piece
from data_pipeline.loader import Loader
from data_pipeline.order import Address, Permutation, SampleOrder
from data_pipeline.prepare import Options, prepare
from data_pipeline.shards import open_collection
from data_pipeline.stream import TokenStream
from tokenizer.train import train

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "data_pipeline" / "sample_corpus"
TRAINING_BYTES = 1_000_000
LOCATED = 100_000

Int64Array = npt.NDArray[np.int64]
Flat = npt.NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=SAMPLE, help="folder of .jsonl, .jsonl.gz or .jsonl.zst files")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a micro-batch")
    parser.add_argument("--batches", type=int, default=1000, help="micro-batches in one repetition")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(options, Path(folder))
    print(json.dumps(report, indent=2) if options.json else to_text(report))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    streams = make_streams(options.corpus, options.vocab_size, folder)
    order = SampleOrder(
        seed=1, seq_len=options.seq_len, tokens={name: stream.tokens for name, stream in streams.items()}
    )
    samples = range(options.batches * options.batch_size)
    addresses = [order.locate(sample) for sample in samples]
    flat = {name: flat_file(stream, options.vocab_size, folder / name) for name, stream in streams.items()}

    def ours() -> Iterator[tuple[Int64Array, Int64Array]]:
        with Loader(
            order, streams, rank=0, world_size=1, micro_batch_size=options.batch_size,
            gradient_accumulation_steps=1, first_sample=0,
        ) as loader:  # fmt: skip
            for _ in range(options.batches):
                batch = next(loader)
                yield batch.inputs, batch.targets

    def reference() -> Iterator[tuple[Int64Array, Int64Array]]:
        return gather(flat, addresses, options.seq_len, options.batch_size)

    for mine, theirs in zip(ours(), reference(), strict=True):
        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            sys.exit("the two gave different batches: nothing to compare")
    tokens = len(samples) * options.seq_len
    seconds: dict[str, list[float]] = {"ours": [], "reference": []}
    for _ in range(options.repetitions):
        seconds["ours"].append(seconds_of(ours))
        seconds["reference"].append(seconds_of(reference))
    ours_rate, reference_rate = (tokens / statistics.median(times) for times in seconds.values())
    return {
        "corpus": options.corpus.name,
        "sources": {name: stream.tokens for name, stream in streams.items()},
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "batches": options.batches,
        "repetitions": options.repetitions,
        "ratio": ours_rate / reference_rate,
        "ratios_of_repetitions": [theirs / mine for mine, theirs in zip(*seconds.values(), strict=True)],
        "loader_tokens_per_second": ours_rate,
        "memmap_tokens_per_second": reference_rate,
        "locate_microseconds": locate_microseconds(order, options.repetitions),
        "permutation_many_microseconds": permutation_microseconds(options.repetitions),
        "cpus": os.cpu_count(),
        "numpy": np.__version__,
    }


def make_streams(corpus: Path, vocab_size: int, folder: Path) -> dict[str, TokenStream]:
    """The training split of every jsonl file in a folder, each a source, through a tokenizer trained on them."""
    files = sorted(path for path in corpus.iterdir() if ".jsonl" in path.name)
    if not files:
        sys.exit(f"error: {corpus} has no .jsonl, .jsonl.gz or .jsonl.zst file")

    def texts() -> Iterator[str]:
        for file in files:
            for unit in plan_units(find_files(str(file)).files, unit_bytes=2**62):
                for piece in unit:
                    yield from (item.text for item in read_piece(piece, "text") if isinstance(item, Document))

    train(texts(), folder / "tokenizer", vocab_size=vocab_size, sample_bytes=TRAINING_BYTES)
    inputs = {path.name.split(".")[0]: [path] for path in files}
    prepare(inputs, folder / "tokenizer", folder / "data", Options(), workers=os.cpu_count() or 1)
    sources = open_collection(folder / "data").sources
    return {name: TokenStream(source.splits["train"]) for name, source in sources.items()}


def flat_file(stream: TokenStream, vocab_size: int, path: Path) -> Flat:
    """All tokens of a stream in one file without a header, mapped."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    with path.open("wb") as file:
        for start in range(0, stream.tokens, 2**20):
            file.write(stream.read(start, min(start + 2**20, stream.tokens)).astype(dtype).tobytes())
    return np.memmap(path, dtype, mode="r")


def gather(
    flat: dict[str, Flat], addresses: list[Address], seq_len: int, batch_size: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    for first in range(0, len(addresses), batch_size):
        inputs = np.empty((batch_size, seq_len), np.int64)
        targets = np.empty((batch_size, seq_len), np.int64)
        for row, address in enumerate(addresses[first : first + batch_size]):
            start = address.window * seq_len
            window = flat[address.source][start : start + seq_len + 1]
            inputs[row] = window[:-1]
            targets[row] = window[1:]
        yield inputs, targets


def seconds_of(batches: Callable[[], Iterator[object]]) -> float:
    started = time.perf_counter()
    for _ in batches():
        pass
    return time.perf_counter() - started


def locate_microseconds(order: SampleOrder, repetitions: int) -> float:
    def locate_all() -> Iterator[Address]:
        return map(order.locate, range(LOCATED))

    return statistics.median(seconds_of(locate_all) for _ in range(repetitions)) / LOCATED * 1e6


def permutation_microseconds(repetitions: int) -> float:
    """Of one index, where numpy permutes many at once: what locating whole blocks could cost at best."""
    permutation, indices = Permutation(10_000_000, key=1), np.arange(LOCATED)
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        permutation.many(indices)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / LOCATED * 1e6


def to_text(report: dict[str, Any]) -> str:
    low, high = min(report["ratios_of_repetitions"]), max(report["ratios_of_repetitions"])
    sources = ", ".join(f"{name} {tokens:,}" for name, tokens in report["sources"].items())
    return "\n".join(
        [
            f"tokens of the sources   {sources}",
            f"batches                 {report['batches']:,} of {report['batch_size']} × {report['seq_len']} tokens, "
            f"{report['repetitions']} repetitions of both, in turn; medians",
            f"loader                  {report['loader_tokens_per_second'] / 1e6:,.1f} M tokens/s",
            f"numpy memmap alone      {report['memmap_tokens_per_second'] / 1e6:,.1f} M tokens/s",
            f"ratio                   {report['ratio']:.2f} (repetitions {low:.2f} to {high:.2f})",
            f"order.locate            {report['locate_microseconds']:.1f} µs a sample",
            f"Permutation.many        {report['permutation_many_microseconds']:.3f} µs an index",
        ]
    )


if __name__ == "__main__":
    main()
