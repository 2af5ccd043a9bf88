"""Starts trainer.py, feeds it, follows its log, ends it: the parent's side of a training."""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizer.codec import TokenizerError

_SCRIPT = Path(__file__).with_name("trainer.py")
_CHUNK_BYTES = 1 << 20
_TICK_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """How far a training is. The share is of the time, not of the merges: the first hundred take a third of it."""

    share: float  # 0 to 1
    stage: str


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Trained:
    """A model and what it took to make it."""

    model: bytes
    peak_bytes: int  # of the training process
    seconds: float


class TrainerRefusal(RuntimeError):  # noqa: N818 (a refusal, with SentencePiece's own words)
    """SentencePiece ran and refused."""


def train_apart(
    texts: Iterable[bytes], options: Mapping[str, Any], *, split_lines: bool, on_progress: OnProgress | None = None
) -> Trained:
    """Run SentencePiece's trainer with these options on UTF-8 texts, none empty, in a process of its own.

    The texts are read once, as the process takes them. `on_progress` is called in this thread, at least every half a
    second while the process lives. Raises TrainerRefusal with SentencePiece's message, TokenizerError when the process
    ended without one. The process never outlives this call, nor this process.
    """
    started_at = time.monotonic()
    log = _Log(int(options["vocab_size"]), str(options["model_type"]))
    order = json.dumps({"options": dict(options), "split_lines": split_lines}).encode("ascii") + b"\n"
    # -P: the script's own folder is no place to import from.
    command = [sys.executable, "-P", str(_SCRIPT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            answer = _converse(process, _frames(order, texts), log, on_progress)
            process.wait()
        except BaseException:
            process.kill()
            raise
    head, _, model = answer.partition(b"\n")
    if process.returncode or not head:
        raise _died(process.returncode, log)
    said = json.loads(head)
    if said.get("out_of_memory"):
        raise _died(-signal.SIGKILL, log)
    if "error" in said:
        raise TrainerRefusal(said["error"])
    return Trained(model, said["peak_bytes"], time.monotonic() - started_at)


def _frames(order: bytes, texts: Iterable[bytes]) -> Iterator[bytes]:
    """The whole input of the process, in chunks of about a megabyte."""
    chunk = [order]
    size = len(order)
    for text in texts:
        chunk += (len(text).to_bytes(4, "little"), text)
        size += len(text)
        if size >= _CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    yield b"".join(chunk) + bytes(4)


def _converse(
    process: subprocess.Popen[bytes], frames: Iterator[bytes], log: _Log, on_progress: OnProgress | None
) -> bytes:
    """Write the input and read both outputs, whichever is ready, until the process has closed its outputs."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    answer = bytearray()
    pending = memoryview(next(frames))
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        outputs = {process.stdout, process.stderr}
        for output in outputs:
            selector.register(output, selectors.EVENT_READ)
        while outputs:
            for key, _ in selector.select(_TICK_SECONDS):
                if key.fileobj is process.stdin:
                    try:
                        pending = pending[os.write(key.fd, pending) :] or memoryview(next(frames, b""))
                    except BrokenPipeError:  # the process has ended; why, its end will say
                        pending = memoryview(b"")
                    if not pending:
                        selector.unregister(process.stdin)
                elif not (data := os.read(key.fd, _CHUNK_BYTES)):
                    selector.unregister(key.fileobj)
                    outputs = {output for output in outputs if output is not key.fileobj}
                elif key.fileobj is process.stdout:
                    answer += data
                else:
                    log.take(data)
            if on_progress is not None:
                on_progress(log.progress)
    return bytes(answer)


class _Log:
    """SentencePiece's log as it comes, and how far the training is by it."""

    def __init__(self, vocab_size: int, model_type: str) -> None:
        self.progress = Progress(0.0, "starting")
        self.last_lines: deque[str] = deque(maxlen=5)
        self._rest = b""
        self._vocab_size = vocab_size
        self._merges = vocab_size
        self._rounds = 0
        self._rounds_expected = 0
        self._milestones = _MILESTONES[model_type]

    def take(self, data: bytes) -> None:
        """More of the log. A line may come in parts, and pieces with line breaks make lines that say nothing."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read(line.decode("utf-8", "replace"))

    def _read(self, line: str) -> None:
        if line.strip():
            self.last_lines.append(line.strip())
        for mark, share, stage in self._milestones:
            if re.search(mark, line):
                self._advance(share, stage)
        if found := re.search(r"\] Alphabet size=(\d+)$", line):
            self._merges = max(self._vocab_size - int(found[1]), 2 * _FIRST_MERGES)
        elif found := re.search(r"\] Merged: freq=\d+ merges=(\d+) ", line):
            done = min(int(found[1]), self._merges)
            share = math.log(max(done, _FIRST_MERGES) / _FIRST_MERGES) / math.log(self._merges / _FIRST_MERGES)
            self._advance(_MERGES_FROM + (1 - _MERGES_FROM) * share, f"{done:,} of {self._merges:,} merges")
        elif found := re.search(r"\] EM sub_iter=(\d) size=(\d+) ", line):
            self._read_round(int(found[1]), int(found[2]))

    def _read_round(self, half: int, size: int) -> None:
        """The EM algorithm: each round has two halves, the first twice as long, and leaves three quarters of the
        pieces, until a tenth more than wanted are left.
        """
        self._rounds += half == 0
        left = math.log(max(size / (1.1 * self._vocab_size), 1)) / math.log(4 / 3)
        self._rounds_expected = max(self._rounds, self._rounds - 1 + math.ceil(left))
        share = (self._rounds - (1 / 3 if half == 0 else 0)) / (self._rounds_expected + 1 / 2)
        self._advance(_ROUNDS_FROM + (1 - _ROUNDS_FROM) * share, f"round {self._rounds} of {self._rounds_expected}")

    def _advance(self, share: float, stage: str) -> None:
        self.progress = Progress(max(share, self.progress.share), stage)


# (pattern in the log, share of the time gone when it appears, what goes on from there); measured on 20 and 100 MB of
# English, Chinese and code with 32,000 pieces, two threads, sentencepiece 0.2.3.
_MILESTONES = {
    "bpe": (
        (r"\] Normalizing sentences", 0.01, "counting characters"),
        (r"\] all chars count=", 0.08, "splitting words"),
        (r"\] Tokenizing input sentences", 0.13, "counting words"),
        (r"\] Done! \d", 0.29, "counting pairs"),
        (r"\] Completed \d", 0.99, "finishing"),
    ),
    "unigram": (
        (r"\] Normalizing sentences", 0.01, "counting characters"),
        (r"\] Extracting seed", 0.02, "collecting pieces to choose from"),
        (r"\] Initialized \d", 0.18, "counting words"),
        (r"\] Using \d", 0.19, "first round"),
        (r"\] PruneUnreachable", 0.97, "finishing"),
    ),
}
_FIRST_MERGES = 100
_MERGES_FROM = 0.55  # the share when the first hundred merges are reported; from there it goes with their logarithm
_ROUNDS_FROM = 0.19


def _died(code: int, log: _Log) -> TokenizerError:
    """The error for a process that ended without an answer."""
    stage = log.progress.stage
    if code in (-signal.SIGKILL, -signal.SIGABRT):
        return TokenizerError(
            f"the training process was killed while {stage}, most likely for want of memory: lower --sample-bytes"
        )
    if code < 0:
        return TokenizerError(f"the training process was ended by signal {-code} while {stage}")
    last = log.last_lines[-1] if log.last_lines else "it said nothing"
    return TokenizerError(f"the training process failed with code {code} while {stage}: {last}")
