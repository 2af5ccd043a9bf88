"""The loader beside other projects' loaders: the same tokens, windows and batches, shuffled, from local files, warm.

Each runs in a process of its own (data_peer_process.py says how it is set up), with the workers it is given; all take
turns. First everything that a loader gives in an epoch is compared with the windows that there are: what it leaves out
or gives twice is counted, and how well it is shuffled, 1 where any window may follow any other. Then, in each
repetition: an epoch, timed from its first batch on; the time from the data set's folder to the first batch, imports
aside; and the same behind half an epoch, from what a checkpoint of it would hold, where the batch must be the one that
an epoch without a break has there.

A loader that is not installed is named. Those of benchmarks/peers.txt want other versions than ours of what all need:

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/data.py --only peers --peers-python peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_loader import flat_file
from benchmarks.data_peer_process import Digests, Job, digests
from benchmarks.data_tokens import random_collection
from data_pipeline.stream import TokenStream

OURS = "zerohalf"
WITH_OUR_PYTHON = (OURS, "datasets")
WORKERS = {OURS: (0,), "datasets": (0, 2), "streaming": (0, 2), "litdata": (0, 2)}
TAIL = 3  # windows of the last batch: fewer than a batch, to see what becomes of them


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--peers-megabytes", type=float, default=20, help="of tokens (default 20)")
    parser.add_argument("--peers-python", type=Path, help="a Python that has what is in benchmarks/peers.txt")
    parser.add_argument("--peers", nargs="+", choices=WORKERS, default=list(WORKERS), help="these loaders alone")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    batches = int(options.peers_megabytes * 1e6 / 2 / options.seq_len / options.batch_size)
    if batches < 4 or options.batch_size <= TAIL:
        sys.exit(f"error: {batches} batches of {options.batch_size} are too few: at least 4 of {TAIL + 1}")
    windows = batches * options.batch_size + TAIL
    if options.peers_python is not None and not options.peers_python.is_file():
        sys.exit(f"error: --peers-python {options.peers_python}: no such file")
    collection = random_collection(folder / "random", {"tokens": windows * options.seq_len + 1}, options.seed)
    tokens_file = flat_file(TokenStream(collection.sources["tokens"].splits["train"]), folder / "tokens.bin")
    peers: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    try:
        for name in dict.fromkeys([OURS, *options.peers]):
            for workers in WORKERS[name]:
                label = name if name == OURS else f"{name}, {workers} workers"
                job = Job(
                    name, workers, str(tokens_file), str(collection.path), str(folder / f"{name}-{workers}"), windows,
                    options.seq_len, options.batch_size, options.seed,
                )  # fmt: skip
                python = sys.executable if name in WITH_OUR_PYTHON else str(options.peers_python or sys.executable)
                try:
                    peers[label] = Peer(job, python, folder / f"{label}.log")
                except UnusableError as error:
                    absent[label] = str(error)
        expected = digests(peers[OURS].job.rows(0, windows))
        for label in list(peers):
            _attempt(peers, absent, label, lambda peer: peer.prepare(expected, folder / "digests.npy"))
        for _ in range(options.repetitions):
            for label in list(peers):
                _attempt(peers, absent, label, lambda peer: peer.take_turn(batches // 2))
    finally:
        for peer in peers.values():
            peer.close()
    results = {label: peer.result() for label, peer in peers.items()}
    ours = results[OURS]["tokens_per_second"]
    return {
        "windows": windows,
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "repetitions": options.repetitions,
        "loaders": {label: one | {"ratio": ours / one["tokens_per_second"]} for label, one in results.items()},
        "absent": absent,
    }


def _attempt(peers: dict[str, Peer], absent: dict[str, str], label: str, work: Callable[[Peer], None]) -> None:
    """Work with a peer; one that fails takes no further part. Ours must not."""
    try:
        work(peers[label])
    except UnusableError as error:
        if label == OURS:
            sys.exit(f"error: {label}: {error}")
        peers.pop(label).close()
        absent[label] = str(error)


class UnusableError(Exception):
    """A loader that is not installed, or failed: why."""


class Peer:
    """A loader's process, and what has been measured of it."""

    def __init__(self, job: Job, python: str, log: Path) -> None:
        """UnusableError: not installed there."""
        self.job, self.log = job, log
        script = Path(__file__).with_name("data_peer_process.py")
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, "-P", str(script), json.dumps(asdict(job))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.seconds: dict[str, list[float]] = {"epoch": [], "first": [], "resume": []}
        self.facts: dict[str, Any] = {}
        self._answer()

    def prepare(self, expected: Digests, to: Path) -> None:
        """Write the data set; compare what comes out of it with what there is."""
        written = self.ask("write")
        self.ask("check", to=str(to))
        self.order = np.load(to)
        stored = [path for path in Path(self.job.out).rglob("*") if path.is_file()]
        self.facts = {
            "version": written["version"],
            "written_bytes": sum(path.stat().st_size for path in stored),
            "written_seconds": written["seconds"],
            "windows": compare(expected, self.order),
            "shuffled": shuffled(expected, self.order),
            "resumes_exactly": True,
        }

    def take_turn(self, middle: int) -> None:
        """An epoch, a start, and a start behind `middle` batches."""
        epoch = self.ask("epoch")
        self.seconds["epoch"].append(epoch["seconds"] / epoch["batches"])
        self.seconds["first"].append(self.ask("first")["seconds"])
        resumed = self.ask("resume", batches=middle)
        self.seconds["resume"].append(resumed["seconds"])
        there = self.order[middle * self.job.batch_size :][: self.job.batch_size]
        self.facts["resumes_exactly"] &= resumed["digests"] == there.tolist()

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """UnusableError: it failed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its answer says why
            self.process.stdin.write(json.dumps({"do": what, **details}) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": self._last_words()}
        if "absent" in answer or "failed" in answer:
            self.close()
            raise UnusableError(answer.get("absent") or f"failed: {answer['failed']}")
        return answer

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()

    def result(self) -> dict[str, Any]:
        medians = {name: statistics.median(times) for name, times in self.seconds.items()}
        return self.facts | {
            "tokens_per_second": self.job.batch_size * self.job.seq_len / medians["epoch"],
            "first_batch_seconds": medians["first"],
            "resume_seconds": medians["resume"],
        }


def compare(expected: Digests, given: Digests) -> dict[str, int]:
    """How many windows there are that were not given, were given once more, or were given and do not exist."""
    values, counts = np.unique(given, return_counts=True)
    return {
        "missing": int(np.count_nonzero(~np.isin(expected, values))),
        "again": int((counts - 1).sum()),
        "foreign": int(np.count_nonzero(~np.isin(values, expected))),
    }


def shuffled(expected: Digests, given: Digests) -> float:
    """How far apart the windows lie that follow each other, on average: 0 in the order of the text, about 1 when any
    may follow any other. Windows that do not exist are left out.
    """
    ascending = np.argsort(expected)
    found = ascending[np.searchsorted(expected, given[np.isin(given, expected)], sorter=ascending)]
    return float(np.abs(np.diff(found)).mean() - 1) / (len(expected) / 3)


def to_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['windows']:,} windows of {report['seq_len'] + 1} tokens in batches of {report['batch_size']},"
        f" shuffled; {report['repetitions']} repetitions of all, in turn; medians. Ratios are ours to theirs",
        f"{'':<22}{'M tokens/s':>12}{'ratio':>8}{'first batch':>14}{'resumed':>12}  what comes out",
    ]
    for label, one in report["loaders"].items():
        odd = [f"{count:,} windows {what}" for what, count in one["windows"].items() if count]
        said = ", ".join(odd) or "every window once"
        said += f", shuffled {one['shuffled']:.2f}"
        said += "" if one["resumes_exactly"] else "; resumed with another batch"
        lines.append(
            f"{label:<22}{one['tokens_per_second'] / 1e6:>12,.1f}{one['ratio']:>8.1f}"
            f"{one['first_batch_seconds'] * 1e3:>11,.0f} ms{one['resume_seconds'] * 1e3:>9,.0f} ms  {said}"
        )
    lines += [f"{label:<22}not measured: {reason}" for label, reason in report["absent"].items()]
    return "\n".join(lines)
