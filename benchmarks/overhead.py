"""What our training loop costs beside a bare one: the same model, batches, arithmetic, in the same process.

    python benchmarks/overhead.py [--tokens N]... [--stage N]... [--preset mini] [--blocks N] [--quick] [--json]

Ours is `pretrain.train.train` itself on one rank: loader, DeepSpeed's engine, metrics, TensorBoard, signs of life, and
whatever else a run has between two evaluations or saves. The bare loop is what one writes by hand: bf16 weights, fp32
masters, torch's fused AdamW, clipping, no DeepSpeed, batches that are there already. They take turns in blocks of a few
steps; the bare one learns from the batches that ours has just learnt from, and their losses must be the same, or
nothing is printed. A ratio is the median over pairs of neighbouring blocks, so that what else the machine does
meanwhile meets both; the one of CPU seconds, which such work hardly touches, stands beside it.

Data wait is the part of ours that `next(batches)` takes. Ends with 1 where the ratio of CPU seconds is above the limits
below, or data wait above 1 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from benchmarks.freed_memory import make_data
from data_pipeline.loader import Batch
from model.transformer import Transformer
from pretrain import train as trainer
from pretrain.config import RunConfig, load_recipe
from pretrain.optimizer import parameter_groups
from pretrain.runtime import Ranks

ROOT = Path(__file__).resolve().parents[1]
STAGES = (0, 1, 2)
# Tokens of a step: how much longer a step of ours may be.
LIMITS = {8192: 1.05, 2048: 1.12}
DATA_WAIT_AT_MOST = 0.01
# Relative: in bf16 two orders of the same sums differ, and each update passes it on, so that it grows.
LOSS_TOLERANCE, LATER_TOLERANCE = 0.002, 0.02
FIRST_STEPS = 10


# ---------------------------------------------------------------- the bare loop


class BareLoop:
    """Mixed precision as one writes it by hand, of one micro-batch a step."""

    def __init__(self, config: RunConfig) -> None:
        self.model = Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))
        self.model.loss_chunk_tokens = config.memory.loss_chunk_tokens
        self.clipping = config.optimizer.clipping_norm
        groups = parameter_groups(self.model, config.optimizer)
        self.weights: list[Tensor] = [weight for group in groups for weight in group["params"]]  # type: ignore[attr-defined]
        masters = {weight: weight.detach().clone() for weight in self.weights}
        self.masters = list(masters.values())
        for weight in self.weights:
            weight.data = weight.data.bfloat16()
        for group in groups:
            group["params"] = [masters[weight] for weight in group["params"]]  # type: ignore[attr-defined]
        table = config.optimizer
        self.optimizer = torch.optim.AdamW(groups, betas=(table.beta1, table.beta2), eps=table.eps, fused=True)

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        """The loss of a step, nats per token, before its update."""
        loss = self.model(inputs, targets)
        mean = loss.loss_sum / loss.token_count
        mean.backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clipping)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        return float(mean.detach())


# ---------------------------------------------------------------- in turn


@dataclass(frozen=True)
class Seconds:
    """What a block of steps took."""

    wall: float
    cpu: float  # of all threads of the process

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Seconds) -> Seconds:
        return Seconds(self.wall - start.wall, self.cpu - start.cpu)


class Turns:
    """Stands in the place of `train_step` in our loop, which so stops for the bare loop's turn behind each block."""

    def __init__(self, bare: BareLoop, block_steps: int) -> None:
        self.bare = bare
        self.block_steps = block_steps
        self.ours: list[Seconds] = []
        self.theirs: list[Seconds] = []
        self.steps: list[float] = []  # seconds of each block that `train_step` took, the rest of the loop left out
        self.waits: list[float] = []
        self.worst_loss, self.worst_later = 0.0, 0.0  # of the first steps, and of all
        self._compared = 0
        self._taken: list[tuple[Batch, float, float]] = []  # batch, rate and our loss
        self._step_seconds = self._waited = 0.0
        self._began: Seconds | None = None

    def train_step(self, engine: Any, batches: Iterator[Batch], plan: Any, lr: float, **others: Any) -> Any:
        if len(self._taken) == self.block_steps or self._began is None:
            self._take_turns()
        started = time.perf_counter()
        taken: list[Batch] = []
        result = real_train_step(engine, self._watched(batches, taken), plan, lr, **others)
        self._step_seconds += time.perf_counter() - started
        self._taken.append((taken[0], lr, result.loss))
        return result

    def _watched(self, batches: Iterator[Batch], taken: list[Batch]) -> Iterator[Batch]:
        while True:
            started = time.perf_counter()
            batch = next(batches)
            self._waited += time.perf_counter() - started
            taken.append(batch)
            yield batch

    def _take_turns(self) -> None:
        start = Seconds.now()
        if self._began is not None:
            self.ours.append(start.since(self._began))
            self.steps.append(self._step_seconds)
            self.waits.append(self._waited)
            losses = [
                self.bare.step(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), lr)
                for batch, lr, _ in self._taken
            ]
            self.theirs.append(Seconds.now().since(start))
            for loss, (_, _, ours) in zip(losses, self._taken, strict=True):
                self.worst_later = max(self.worst_later, abs(loss - ours) / ours)
                self._compared += 1
                if self._compared <= FIRST_STEPS:
                    self.worst_loss = self.worst_later
        self._taken = []
        self._step_seconds = self._waited = 0.0
        self._began = Seconds.now()


real_train_step = trainer.train_step


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Found:
    """Of one size of steps and one ZeRO stage; ratios are ours to the bare loop's, medians of pairs of blocks."""

    tokens: int
    stage: int
    wall_ratio: float
    wall_low: float
    wall_high: float
    cpu_ratio: float
    around_ratio: float  # of ours, what the loop does around `train_step`
    data_wait: float  # of ours
    step_seconds: float
    worst_loss: float  # relative difference, of the first steps
    worst_later: float  # of all
    pairs: int

    @classmethod
    def of(cls, tokens: int, stage: int, turns: Turns) -> Found:
        # The first pair warms both up.
        pairs = list(zip(turns.ours, turns.theirs, strict=True))[1:]
        walls = [ours.wall / theirs.wall for ours, theirs in pairs]
        whole = sum(ours.wall for ours, _ in pairs)
        return cls(
            tokens=tokens,
            stage=stage,
            wall_ratio=statistics.median(walls),
            wall_low=min(walls),
            wall_high=max(walls),
            cpu_ratio=statistics.median(ours.cpu / theirs.cpu for ours, theirs in pairs),
            around_ratio=1 - sum(turns.steps[1:]) / whole,
            data_wait=sum(turns.waits[1:]) / whole,
            step_seconds=statistics.median(ours.wall for ours, _ in pairs) / turns.block_steps,
            worst_loss=turns.worst_loss,
            worst_later=turns.worst_later,
            pairs=len(pairs),
        )

    @property
    def is_within(self) -> bool:
        return self.cpu_ratio <= LIMITS.get(self.tokens, 1e9) and self.data_wait <= DATA_WAIT_AT_MOST

    def line(self) -> str:
        return (
            f"ZeRO-{self.stage}  {self.tokens:6,} tokens a step  {self.wall_ratio:6.3f} wall ({self.wall_low:.2f} to "
            f"{self.wall_high:.2f})  {self.cpu_ratio:6.3f} CPU   around the step {self.around_ratio:.2%}, data wait "
            f"{self.data_wait:.3%}; {self.step_seconds:.3f} s a step, {self.pairs} pairs, losses differ by "
            f"{self.worst_loss:.0e}, at the end {self.worst_later:.0e}"
        )


def measure(tokens: int, stage: int, options: argparse.Namespace, work: Path) -> Found:
    """Run our loop on one rank, with the bare one in turn. SystemExit where their losses differ."""
    seq_len = min(options.seq_len, tokens)
    block_steps = max(1, options.block_tokens // tokens)
    steps = block_steps * (options.blocks + 1) + 1
    config = recipe(options.preset, work, stage, tokens // seq_len, seq_len, steps, options.set)
    turns = Turns(BareLoop(config), block_steps)
    with (
        tempfile.TemporaryDirectory(dir=work) as run,
        mock.patch.object(trainer, "train_step", turns.train_step),
    ):
        trainer.train(config, Path(run), Ranks.from_environment(os.environ))
    found = Found.of(tokens, stage, turns)
    if found.worst_loss > LOSS_TOLERANCE or found.worst_later > LATER_TOLERANCE:
        sys.exit(
            f"error: ZeRO-{stage}, {tokens} tokens: losses differ by {found.worst_loss:.1e} in the first {FIRST_STEPS} "
            f"steps, by {found.worst_later:.1e} later"
        )
    return found


def recipe(
    preset: str, work: Path, stage: int, sequences: int, seq_len: int, steps: int, changes: list[str]
) -> RunConfig:
    """As pretrain/recipes/mini.toml has it, but for the sizes of a step; nothing is evaluated or saved in between."""
    overrides = [
        f"model.preset={preset}", f"model.seq_len={seq_len}",
        f"data.path={work / 'data'}", f"data.tokenizer={work / 'tokenizer'}",
        f"batch.global_batch_size={sequences}", f"batch.micro_batch_size={sequences}",
        f"schedule.max_steps={steps}", "schedule.warmup_steps=2", "schedule.peak_lr=1e-4", "schedule.min_lr=1e-5",
        f"evaluation.every_steps={steps}", f"evaluation.max_tokens={seq_len}", f"checkpoint.every_steps={steps}",
        f"deepspeed.config=ds_configs/zero{stage}.json",
    ]  # fmt: skip
    if stage == 0:
        overrides.append("precision.accumulate=bf16")  # it cannot sum in fp32
    return load_recipe(ROOT / "pretrain" / "recipes" / "mini.toml", [*overrides, *changes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="of a step; default: 2048 and 8192")
    parser.add_argument("--stage", type=int, choices=STAGES, action="append", help="of ZeRO; default: 0, 1 and 2")
    parser.add_argument("--preset", default="mini", help="of the model (default: mini)")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6, help="of each loop, the first left out (default: 6)")
    parser.add_argument("--block-tokens", type=int, default=16384, help="of a block (default: 16384)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the recipe")
    parser.add_argument("--quick", action="store_true", help="two blocks of ZeRO-2 alone")
    parser.add_argument("--work", type=Path, help="folder for the data (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    if options.quick:
        options.blocks, options.stage = 2, options.stage or [2]
    everything = []
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if not (work / "data").exists():
            make_data(work)
        for tokens in options.tokens or LIMITS:
            for stage in options.stage or STAGES:
                with alone() as process:  # DeepSpeed meets its ranks once in a process
                    everything.append(process.submit(measure, tokens, stage, options, work).result())
                if not options.json:
                    print(everything[-1].line(), flush=True)
    if options.json:
        print(json.dumps({**machine(), "found": [asdict(found) for found in everything]}, indent=2))
    sys.exit(0 if all(found.is_within for found in everything) else 1)


def alone() -> ProcessPoolExecutor:
    """One process that begins anew."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
