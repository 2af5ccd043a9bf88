"""The loss in chunks beside the plain one: the memory of the process, and the time of a training step.

    python benchmarks/loss.py [--pairs 5] [--layers 1] [--sequences 2] [--chunk-tokens 2048] [--json]

Plain is what one writes first: all logits, cast to fp32, and torch's cross_entropy.

Memory: forward and backward of head and loss at 8 × 2048 tokens and 32,000 ids, of a width at which the logits are
nearly all there is; what the process holds at most beyond what it held before, each kind in a process of its own.
Plain needs some 6.5 GB. Time: a step, forward and backward, of a model with the widths and the vocabulary of `0.5b` and
one of its blocks, so that the head's part of the work is several times what it is there; the two kinds take turns in
one process, and the ratio is the median of the pairs' ratios. The losses and the norms of the gradients must agree, or
nothing is printed. Time is the processor's, in one thread, which others on the machine disturb least. Freed memory is
kept by the process, as in training.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose tokenizer.py is no package

from model.config import PRESETS  # noqa: E402
from model.loss import next_token_loss  # noqa: E402
from model.transformer import Transformer  # noqa: E402
from pretrain.runtime import keep_freed_memory  # noqa: E402

TOKENS, VOCAB_SIZE, WIDTH = 8 * 2048, 32000, 64  # of the measurement of memory
KINDS = ("plain", "chunked")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def plain_loss(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    return F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten(), reduction="sum")


def peak_bytes(kind: str, dtype: torch.dtype, chunk_tokens: int) -> int:
    """Of this process, which has measured nothing yet."""

    def held() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def step(tokens: int) -> None:
        hidden_btd = torch.randn(1, tokens, WIDTH, dtype=dtype, requires_grad=True)
        weight_vd = torch.randn(VOCAB_SIZE, WIDTH, dtype=dtype, requires_grad=True)
        targets_bt = torch.randint(VOCAB_SIZE, (1, tokens))
        if kind == "plain":
            plain_loss(hidden_btd @ weight_vd.T, targets_bt).backward()
        else:
            next_token_loss(hidden_btd, weight_vd, targets_bt, chunk_tokens).loss_sum.backward()

    step(8)  # what the libraries allocate once
    before = held()
    step(TOKENS)
    return held() - before


def measured_apart(kind: str, options: argparse.Namespace) -> int:
    argv = [sys.executable, __file__, "--one", kind, "--dtype", options.dtype]
    done = subprocess.run([*argv, "--chunk-tokens", str(options.chunk_tokens)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {kind} loss: {(done.stderr.splitlines() or ['killed: not enough memory'])[-1]}")
    return int(done.stdout)


def steps(options: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float, float]]]:
    """What makes one step of each kind on one model and batch, and gives its seconds, loss and norm of the gradient."""
    config = replace(PRESETS["0.5b"], n_layers=options.layers)
    model = Transformer(config, torch.Generator().manual_seed(0)).to(DTYPES[options.dtype])
    model.loss_chunk_tokens = options.chunk_tokens
    ids_bt = torch.randint(config.vocab_size, (options.sequences, config.seq_len + 1))
    inputs_bt, targets_bt = ids_bt[:, :-1], ids_bt[:, 1:]
    losses: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: plain_loss(model(inputs_bt), targets_bt),
        "chunked": lambda: model(inputs_bt, targets_bt).loss_sum,
    }

    def timed(kind: str) -> tuple[float, float, float]:
        model.zero_grad()
        started = time.process_time()
        loss = losses[kind]()
        loss.backward()
        seconds = time.process_time() - started
        return seconds, loss.item(), float(torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters()]))

    return {kind: functools.partial(timed, kind) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(peak_bytes(options.one, DTYPES[options.dtype], options.chunk_tokens))
        return
    plain, chunked = (measured_apart(kind, options) for kind in KINDS)

    keep_freed_memory()
    torch.set_num_threads(1)
    kinds = steps(options)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    _, plain_loss_sum, plain_norm = kinds["plain"]()  # warm-up, and the same numbers
    _, loss_sum, norm = kinds["chunked"]()
    if abs(loss_sum / plain_loss_sum - 1) > 1e-4 or abs(norm / plain_norm - 1) > 1e-2:
        raise SystemExit(
            f"error: losses {plain_loss_sum} and {loss_sum}, gradient norms {plain_norm} and {norm} differ"
        )
    for pair in range(options.pairs):
        for kind in KINDS if pair % 2 else reversed(KINDS):
            seconds[kind].append(kinds[kind]()[0])
    plain_s, chunked_s = (seconds[kind] for kind in KINDS)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(chunked_s, plain_s, strict=True))
    medians = statistics.median(plain_s), statistics.median(chunked_s)
    if options.json:
        report = {"plain_bytes": plain, "chunked_bytes": chunked, "seconds": seconds, "time_ratio": ratio}
        print(json.dumps(report, indent=2))
        return
    print(f"memory, {TOKENS:,} tokens × {VOCAB_SIZE:,} ids, {options.dtype}, {options.chunk_tokens:,} a chunk")
    print(f"  plain {plain / 1e9:.2f} GB, chunked {chunked / 1e9:.2f} GB: {plain / chunked:.1f} × less")
    print(
        f"step with {options.layers} of the blocks of 0.5b, {options.sequences} × 2,048 tokens, {options.dtype}, "
        f"{options.chunk_tokens:,} a chunk, {options.pairs} pairs, seconds of one thread"
    )
    print(f"  plain {medians[0]:.2f} s, chunked {medians[1]:.2f} s: {ratio:.3f} × as long")


if __name__ == "__main__":
    main()
