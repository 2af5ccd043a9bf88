"""For how long a checkpoint holds training up: saved asynchronously, against saved at once, in the same run.

    python benchmarks/saving.py [--ranks N]... [--stage N] [--rounds N] [--work DIR] [--quick] [--json]

The real engine on CPU ranks, `mini` (36 million parameters) in bf16 with fp32 masters, windows of 256 tokens. In each
round a step is saved twice, at once and asynchronously; then training goes on until the second one is durable, and for
as many steps without a save. Both must have written the same bytes, by their manifests.

Held is what the loop waits for: the check of every number, the copy, ZeRO-3's gathering, the agreement of the ranks.
The ratio is that of medians; the first copy stands apart, since the memory that it takes is touched for the first time
(in a thread, behind the first step).
Ends with 1 where the ratio is above 0.20. --work says on which disk: on a slow one saving at once takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from benchmarks.memory import batches_of
from benchmarks.memory_cases import SHAPES, of_stage
from benchmarks.memory_cases import recipe as memory_recipe
from model.transformer import Transformer
from pretrain.batching import BatchPlan
from pretrain.engine import TrainingEngine, process_group
from pretrain.resolve import resolve
from pretrain.retention import Retention
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints, SaveResult
from pretrain.state import Measured, TrainState
from pretrain.step import train_step
from tests.ranks import run_ranks

CPU = torch.device("cpu")
HELD_AT_MOST = 0.20


@dataclass
class Seconds:
    """What one rank measured, round by round."""

    at_once: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)  # by an asynchronous save
    whole: list[float] = field(default_factory=list)  # until it is durable, without the steps between
    steps_beside: list[float] = field(default_factory=list)  # while it is written
    steps_alone: list[float] = field(default_factory=list)
    bytes: int = 0  # of all ranks' files


def measured_case(ranks: Ranks, shape: str, stage: int, rounds: int, work: Path) -> Seconds:
    config = memory_recipe(SHAPES[shape], 1)
    config = config.model_copy(
        update={"batch": config.batch.model_copy(update={"global_batch_size": ranks.world_size})}
    )
    resolved = resolve(of_stage(stage, SHAPES[shape].buckets_divided_by), config, ranks.world_size)
    plan, batches, state, found = (
        BatchPlan.from_config(config, ranks.world_size),
        batches_of(config),
        TrainState(),
        Seconds(),
    )
    ended: list[SaveResult] = []
    with process_group(CPU):
        model = Transformer(config.model, generator=torch.Generator().manual_seed(1))
        engine = TrainingEngine(model, config, resolved, ranks, CPU)
        ways = [
            Checkpoints(work / name, Retention(1), ranks, asynchronous=name == "later", on_end=ended.append)
            for name in ("at-once", "later")
        ]
        for checkpoints in ways:
            checkpoints.folder.mkdir(exist_ok=True)

        def step() -> Measured:
            result = train_step(engine, batches, plan, lr=1e-4)
            state.advance(plan, result.tokens)
            return Measured(result.loss, result.grad_norm)

        step()
        for checkpoints in ways:
            checkpoints.make_room(engine)
        step()
        for _ in range(rounds):
            measured = step()
            for checkpoints in ways:
                ranks.barrier()
                checkpoints.save(engine, state, {}, measured)
            count = 0
            while ways[1].in_flight:
                found.steps_beside.append(timed(step))
                count += 1
                ways[1].poll()
            found.steps_alone += [timed(step) for _ in range(max(1, count))]
            at_once, later = ended
            ended.clear()
            for result in (at_once, later):
                if result.failure is not None:
                    raise SystemExit(result.failure)
            found.at_once.append(at_once.seconds)
            found.held.append(later.held_seconds)
            found.whole.append(later.seconds)
            manifests = [
                (checkpoints.folder / f"step-{later.step:08d}" / "manifest.json").read_bytes() for checkpoints in ways
            ]
            if manifests[0] != manifests[1]:
                raise SystemExit(f"step {later.step}: the two checkpoints differ")
            found.bytes = sum(entry["bytes"] for entry in json.loads(manifests[0])["files"].values())
    return found


def timed(function: Any) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Found:
    """Of one number of ranks; the rank that is held longest counts. Ratios are of medians."""

    ranks: int
    stage: int
    bytes: int
    at_once_seconds: float
    held_ratio: float  # of the saves behind the first
    first_held_ratio: float
    whole_ratio: float
    step_ratio: float  # of steps while a checkpoint is written to steps without

    @classmethod
    def of(cls, everyones: list[Seconds], stage: int) -> Found:
        slowest = max(everyones, key=lambda one: statistics.median(one.held[1:]))
        at_once = statistics.median(slowest.at_once)
        return cls(
            ranks=len(everyones),
            stage=stage,
            bytes=slowest.bytes,
            at_once_seconds=at_once,
            held_ratio=statistics.median(slowest.held[1:]) / at_once,
            first_held_ratio=slowest.held[0] / slowest.at_once[0],
            whole_ratio=statistics.median(slowest.whole) / at_once,
            step_ratio=statistics.median(slowest.steps_beside) / statistics.median(slowest.steps_alone),
        )

    def to_text(self) -> str:
        name = f"ZeRO-{self.stage}, {self.ranks} rank{'s' if self.ranks > 1 else ' '}"
        return (
            f"{name}  {self.bytes / 1e6:8.1f} MB, at once {self.at_once_seconds:6.2f} s; asynchronously held "
            f"{self.held_ratio:.3f} of that (the first time {self.first_held_ratio:.3f}), durable behind "
            f"{self.whole_ratio:.2f}; steps meanwhile {self.step_ratio:.2f} times as long"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="one or more; 1 and 2 if left out")
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--work", type=Path, help="where checkpoints are written, for a while")
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds; says nothing of `mini`")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or [1, 2]
    options.rounds = 2 if options.quick else max(2, options.rounds)
    return options


def measure(options: argparse.Namespace) -> list[Found]:
    found = []
    for count in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            shape = "small" if options.quick else "mini"
            everyones = run_ranks(count, measured_case, shape, options.stage, options.rounds, Path(work))
        found.append(Found.of(everyones, options.stage))
    return found


def main() -> None:
    options = parse()
    found = measure(options)
    print(
        json.dumps([asdict(one) for one in found], indent=2)
        if options.json
        else "\n".join(one.to_text() for one in found)
    )
    sys.exit(not options.quick and any(one.held_ratio > HELD_AT_MOST for one in found))


if __name__ == "__main__":
    main()
