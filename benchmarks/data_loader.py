"""How fast the loader gives batches, as ratios to numpy alone: memory-mapped rows of the same tokens, sliced.

Both build the same arrays, inputs and targets in int64, of the same windows in the same order. The reference is told
the windows beforehand and has each source's tokens in one flat file; the loader computes the order, reads the shards,
announces windows to the system and hands batches from thread to thread. Warm: all these windows have been read before,
and the reference's pages are mapped already. Cold: the system has forgotten the files before each measurement.

And what a training step waits for its batch: the time in `next(loader)` beside real steps of a preset on this CPU. An
accelerator's step is shorter: so also the tokens a second up to which a rank that reads nothing ahead, and waits for
every batch while it is made, would wait for a hundredth of its time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.data_pages import drop_pages
from benchmarks.data_tokens import VOCAB_SIZE, random_collection
from data_pipeline.loader import Loader
from data_pipeline.order import Address, Permutation, SampleOrder
from data_pipeline.shards import Collection, token_width
from data_pipeline.stream import TokenStream

SHARES = {"chinese": 0.3, "code": 0.2, "english": 0.5}  # of the tokens
LOCATED = 100_000
COLD_SHARE_HELD = 0.01  # of the pages, at most, or nothing is called cold

Int64Array = npt.NDArray[np.int64]
Batches = Iterator[tuple[Int64Array, Int64Array]]
Way = Callable[[range], Batches]  # the batches of these samples


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--loader-megabytes", type=float, default=400, help="of tokens, twice (default 400)")
    parser.add_argument("--batches", type=int, default=1000, help="warm micro-batches in one repetition (default 1000)")
    parser.add_argument("--cold-batches", type=int, default=250, help="cold ones in one repetition (default 250)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default 3)")
    parser.add_argument("--preset", default="mini", help="what is trained in them (default mini)")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tokens = {name: int(share * options.loader_megabytes * 1e6 / 2) for name, share in SHARES.items()}
    collection = random_collection(folder / "random", tokens, options.seed)
    bench = LoaderBench(collection, folder, options.seq_len, options.batch_size, options.seed)
    warm = bench.warm(options.batches, options.repetitions)
    return {
        "sources": tokens,
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "repetitions": options.repetitions,
        "warm": warm,
        "cold": bench.cold(options.cold_batches, options.repetitions),
        "step": bench.step(options.preset, options.steps, warm["loader_tokens_per_second"]),
        "locate_microseconds": locate_microseconds(bench.order, options.repetitions),
        "permutation_many_microseconds": permutation_microseconds(options.repetitions),
        "numpy": np.__version__,
    }


class LoaderBench:
    """A collection, and the same tokens in one flat file a source."""

    def __init__(self, collection: Collection, folder: Path, seq_len: int, batch_size: int, seed: int) -> None:
        self.splits = {name: source.splits["train"] for name, source in collection.sources.items()}
        self.seq_len, self.batch_size = seq_len, batch_size
        tokens = {name: split.tokens for name, split in self.splits.items()}
        self.order = SampleOrder(seed=seed, seq_len=seq_len, tokens=tokens)
        self.flat = {name: flat_file(TokenStream(split), folder / name) for name, split in self.splits.items()}

    def ours(self, samples: range) -> Batches:
        with self.loader(samples.start, self.batch_size) as loader:
            for _ in range(len(samples) // self.batch_size):
                batch = next(loader)
                yield batch.inputs, batch.targets

    def loader(self, first_sample: int, batch_size: int) -> Loader:
        return Loader(
            self.order, {name: TokenStream(split) for name, split in self.splits.items()}, rank=0, world_size=1,
            micro_batch_size=batch_size, gradient_accumulation_steps=1, first_sample=first_sample,
        )  # fmt: skip

    def reference(self, addresses: list[Address], flat: Mapping[str, npt.NDArray[Any]]) -> Batches:
        for first in range(0, len(addresses), self.batch_size):
            inputs = np.empty((self.batch_size, self.seq_len), np.int64)
            targets = np.empty((self.batch_size, self.seq_len), np.int64)
            for row, address in enumerate(addresses[first : first + self.batch_size]):
                start = address.window * self.seq_len
                window = flat[address.source][start : start + self.seq_len + 1]
                inputs[row] = window[:-1]
                targets[row] = window[1:]
            yield inputs, targets

    def mapped(self) -> dict[str, npt.NDArray[Any]]:
        return {name: np.memmap(path, f"<u{token_width(VOCAB_SIZE)}", "r") for name, path in self.flat.items()}

    def addresses(self, samples: range) -> list[Address]:
        return [self.order.locate(sample) for sample in samples]

    def warm(self, batches: int, repetitions: int) -> dict[str, Any]:
        samples, flat = range(batches * self.batch_size), self.mapped()
        addresses = self.addresses(samples)
        assert_same(self.ours(samples), self.reference(addresses, flat))  # which makes all of it warm
        seconds: dict[str, list[float]] = {"ours": [], "reference": []}
        for _ in range(repetitions):
            seconds["ours"].append(seconds_of(self.ours(samples)))
            seconds["reference"].append(seconds_of(self.reference(addresses, flat)))
        return self._rates(seconds, batches)

    def cold(self, batches: int, repetitions: int) -> dict[str, Any]:
        """New windows in every repetition, the same on both sides; `ratio` is None where files cannot be cold."""
        seconds: dict[str, list[float]] = {"ours": [], "reference": []}
        held = [0.0]
        for number in range(repetitions):
            first = number * batches * self.batch_size
            samples = range(first, first + batches * self.batch_size)
            addresses = self.addresses(samples)
            for name in ("ours", "reference") if number % 2 else ("reference", "ours"):
                held.append(self.forget())
                if name == "ours":
                    seconds[name].append(seconds_of(self.ours(samples)))
                else:
                    seconds[name].append(seconds_of(self.reference(addresses, self.mapped())))
        report = self._rates(seconds, batches) | {"pages_held": max(held)}
        return report if report["pages_held"] <= COLD_SHARE_HELD else report | {"ratio": None}

    def forget(self) -> float:
        """Make all files cold; returns the share of pages that are still in memory."""
        shards = [shard.bin_path for split in self.splits.values() for shard in split.shards]
        return max(drop_pages(shards), drop_pages(self.flat.values()))

    def _rates(self, seconds: dict[str, list[float]], batches: int) -> dict[str, Any]:
        tokens = batches * self.batch_size * self.seq_len
        ours, reference = (tokens / statistics.median(times) for times in seconds.values())
        return {
            "batches": batches,
            "ratio": ours / reference,
            "ratios_of_repetitions": [theirs / mine for mine, theirs in zip(*seconds.values(), strict=True)],
            "loader_tokens_per_second": ours,
            "memmap_tokens_per_second": reference,
        }

    def step(self, preset: str, steps: int, loader_tokens_per_second: float) -> dict[str, Any]:
        """Time spent in `next(loader)` beside forward and backward of a preset on one row of tokens."""
        import torch

        from model.config import preset_named
        from model.transformer import Transformer

        config = preset_named(preset)
        model = Transformer(config)
        waited, whole = [], []
        with self.loader(0, batch_size=1) as loader:
            for _ in range(steps + 1):  # the first step, which makes buffers, is left out
                started = time.perf_counter()
                batch = next(loader)
                waited.append(time.perf_counter() - started)
                inputs, targets = (
                    torch.from_numpy(part[:, : config.seq_len] % config.vocab_size)
                    for part in (batch.inputs, batch.targets)
                )
                found = model(inputs, targets)
                (found.loss_sum / inputs.numel()).backward()
                model.zero_grad()
                whole.append(time.perf_counter() - started)
        return {
            "preset": preset,
            "tokens": min(self.seq_len, config.seq_len),
            "waited_microseconds": statistics.median(waited[1:]) * 1e6,
            "longest_wait_microseconds": max(waited[1:]) * 1e6,
            "step_seconds": statistics.median(whole[1:]),
            "share": sum(waited[1:]) / sum(whole[1:]),
            "share_without_reading_ahead": self.seq_len / loader_tokens_per_second / statistics.median(whole[1:]),
            "hundredth_up_to_tokens_per_second": loader_tokens_per_second / 100,
        }


def flat_file(stream: TokenStream, path: Path) -> Path:
    """All tokens of a stream in one file without a header."""
    with path.open("wb") as file, closing(stream):
        for start in range(0, stream.tokens, 2**20):
            file.write(stream.read(start, min(start + 2**20, stream.tokens)).tobytes())
    return path


def assert_same(ours: Batches, reference: Batches) -> None:
    for mine, theirs in zip(ours, reference, strict=True):
        if not all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            sys.exit("error: the two gave different batches: nothing to compare")


def seconds_of(batches: Iterator[object]) -> float:
    started = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - started


def locate_microseconds(order: SampleOrder, repetitions: int) -> float:
    return statistics.median(seconds_of(map(order.locate, range(LOCATED))) for _ in range(repetitions)) / LOCATED * 1e6


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
    sources = ", ".join(f"{name} {tokens:,}" for name, tokens in report["sources"].items())
    lines = [f"tokens of the sources   {sources}"]
    for name in ("warm", "cold"):
        one = report[name]
        low, high = min(one["ratios_of_repetitions"]), max(one["ratios_of_repetitions"])
        ratio = f"{one['ratio']:.2f} × numpy memmap" if one["ratio"] is not None else "files cannot be cold here"
        held = f"; {one['pages_held']:.1%} of the pages were in memory at the start" if name == "cold" else ""
        lines.append(
            f"{name}                    {ratio}: {one['loader_tokens_per_second'] / 1e6:,.1f} M tokens/s"
            f" against {one['memmap_tokens_per_second'] / 1e6:,.1f} (repetitions {low:.2f} to {high:.2f});"
            f" {one['batches']:,} batches of {report['batch_size']} × {report['seq_len']} tokens,"
            f" {report['repetitions']} repetitions of both, in turn; medians{held}"
        )
    step = report["step"]
    lines += [
        f"waiting for a batch     {step['share']:.4%} of a step of {step['preset']} on {step['tokens']} tokens"
        f" ({step['step_seconds']:.2f} s on this CPU): {step['waited_microseconds']:.0f} µs,"
        f" the longest {step['longest_wait_microseconds']:.0f} µs",
        f"nothing read ahead      {step['share_without_reading_ahead']:.4%} of it; 1 % at"
        f" {step['hundredth_up_to_tokens_per_second'] / 1e6:.2f} M tokens/s a rank",
        f"order.locate            {report['locate_microseconds']:.1f} µs a sample",
        f"Permutation.many        {report['permutation_many_microseconds']:.3f} µs an index",
    ]
    return "\n".join(lines)
