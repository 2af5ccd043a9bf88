"""What `pretrain.memory.budget` predicts a rank to hold, beside what the real engine holds, on two CPU ranks.

    python benchmarks/memory.py [--model small|mini|0.5b|components] [--stage N]... [--only TEXT] [--seq-len N]
        [--checkpointing MODE] [--steps N] [--quick] [--json]

`components`: a model of every choice that is not Llama's, in bf16 with fp32 masters (memory_cases.py).

Each case is a launch of its own, those of components are one for all: model and engine are built, some updates of two
micro-batches are made, one is measured, then an evaluation and the gathering of weights for a checkpoint. Static: the
storages of all live tensors between the engine's calls, when they are most. Peak: what torch's allocator holds at one
time, from allocations and releases, those inside operations included (pretrain/held.py); the larger rank's. Not the
process's size. fp16 is computed too, of which DeepSpeed must be told that a CPU can.

Ends with 1 where a ratio is outside: static by more than 2 %, the peak of all moments by more than 10 %. `0.5b` needs
up to 17 GB for the two ranks, and some minutes a case. --only takes cases whose name has the text, such as
"zero2 bf16 master bf16 sums bf16"; --steps the updates behind which the measured one comes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from benchmarks.memory_cases import SHAPES, WORLD_SIZE, Case, cases, component_cases
from data_pipeline.loader import Batch
from model.transformer import Transformer
from pretrain.batching import BatchPlan
from pretrain.config import RunConfig
from pretrain.engine import TrainingEngine, process_group
from pretrain.held import PeakTracker
from pretrain.memory import MOMENTS
from pretrain.runtime import Ranks
from pretrain.snapshot import Snapshot
from pretrain.step import train_step
from tests.ranks import run_ranks

STATIC_WITHIN, PEAK_WITHIN = 0.02, 0.10
CPU = torch.device("cpu")
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor", "broadcast")


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds: between the engine's calls, and at most in each moment."""

    static_bytes: int
    moments: dict[str, int]


@dataclass(frozen=True)
class Comparison:
    case: str
    static_predicted: int
    static_measured: int
    moments_predicted: dict[str, int]
    moments_measured: dict[str, int]

    @classmethod
    def of(cls, case: Case, ranks: list[Held]) -> Comparison:
        predicted = case.predicted
        return cls(
            case.name,
            predicted.static_bytes,
            max(rank.static_bytes for rank in ranks),
            {moment: predicted.at(moment) + predicted.at(moment, "host") for moment in MOMENTS},
            {moment: max(rank.moments[moment] for rank in ranks) for moment in MOMENTS},
        )

    @property
    def static_ratio(self) -> float:
        return self.static_predicted / self.static_measured

    @property
    def peak_ratio(self) -> float:
        return max(self.moments_predicted.values()) / max(self.moments_measured.values())

    @property
    def is_within(self) -> bool:
        return abs(self.static_ratio - 1) <= STATIC_WITHIN and abs(self.peak_ratio - 1) <= PEAK_WITHIN

    def line(self) -> str:
        moment = max(self.moments_measured, key=self.moments_measured.__getitem__)
        peaks = max(self.moments_predicted.values()), max(self.moments_measured.values())
        by_moment = " ".join(f"{self.moments_predicted[m] / self.moments_measured[m]:.3f}" for m in MOMENTS)
        return (
            f"{self.case:<36} {self.static_predicted / 1e6:9.1f} {self.static_measured / 1e6:9.1f} "
            f"{self.static_ratio:6.3f}  {peaks[0] / 1e6:9.1f} {peaks[1] / 1e6:9.1f} {self.peak_ratio:6.3f}  "
            f"{moment:<10}  {by_moment}{'' if self.is_within else '  OUTSIDE'}"
        )


HEADER = f"{'MB a rank':<36} {'static':>9} {'measured':>9} {'ratio':>6}  {'peak':>9} {'measured':>9} {'ratio':>6}  " + (
    f"{'moment':<10}  ratio in {', '.join(MOMENTS)}"
)


# ---------------------------------------------------------------- measuring


@contextmanager
def ready_for_fp16() -> Iterator[None]:
    """DeepSpeed finds no fp16 arithmetic on most CPUs, while torch's kernels for it work on all."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        yield


@contextmanager
def waited_for(tracker: PeakTracker) -> Iterator[None]:
    """Behind each collective gloo's threads let go of its tensors before DeepSpeed does, which the tracker sees."""
    from deepspeed.comm.torch import TorchBackend

    def waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            outcome = collective(*arguments, **options)
            if not options.get("async_op", False):
                wait_for_threads()
                tracker.collective_ended()
            return outcome

        return wrapped

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(TorchBackend, name, waiting(getattr(TorchBackend, name))))
        yield


def batches_of(config: RunConfig) -> Iterator[Batch]:
    rows, tokens = config.batch.micro_batch_size, config.model.seq_len
    generator = np.random.default_rng(0)
    while True:
        ids = generator.integers(0, config.model.vocab_size, (rows, tokens + 1))
        yield Batch(inputs=ids[:, :-1].copy(), targets=ids[:, 1:].copy(), samples=np.arange(rows))


def measured(ranks: Ranks, case: Case, steps: int = 1) -> Held:
    """What this rank holds in an update behind `steps` others, and in what follows. Inside a process group."""
    config = case.config
    plan = BatchPlan.from_config(config, ranks.world_size)
    batches = batches_of(config)
    gc.collect()
    gc.freeze()  # what was made before is no more looked at
    with PeakTracker(CPU) as tracker, waited_for(tracker):
        with tracker.phase("start"):
            model = Transformer(config.model, generator=torch.Generator().manual_seed(1))
            model.activation_checkpointing = config.memory.activation_checkpointing
            model.loss_chunk_tokens = config.memory.loss_chunk_tokens
            engine: Any = TrainingEngine(model, config, case.deepspeed, ranks, CPU)
        del model
        for _ in range(steps):
            while train_step(engine, batches, plan, lr=1e-3).overflowed:
                pass  # in fp16: no update, so no moments yet
        snapshot = Snapshot(CPU) if config.checkpoint.asynchronous else None
        if snapshot is not None:  # its room is there from the first save on
            copy_of(engine, snapshot)
        tracker.settle()

        def in_phase(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any) -> Any:
                with tracker.phase(name):
                    outcome = call(*arguments)
                if name != "forward":
                    wait_for_threads()
                    tracker.settle()
                return outcome

            return wrapped

        calls = {name: getattr(engine, name) for name in ("forward", "backward", "step")}
        for name, call in calls.items():
            setattr(engine, name, in_phase(name, call))
        first = 1  # behind the earlier steps
        train_step(engine, batches, plan, lr=1e-3)
        last = first + 2 * plan.gradient_accumulation_steps
        batch = next(batches)
        with tracker.phase("evaluation"):
            engine.forward_only(batch.inputs, batch.targets)
        tracker.settle()
        with tracker.phase("saving"):
            if snapshot is not None:
                copy_of(engine, snapshot)
            else:
                if engine.zero_stage == 3:  # as DeepSpeed does before it writes its own files
                    engine._engine.optimizer.checkpoint_event_prologue()
                engine.gather_weights()
    return Held(max(tracker.settled[first:last]), tracker.phases)


def copy_of(engine: TrainingEngine, snapshot: Snapshot) -> None:
    """What an asynchronous save copies."""
    with snapshot.taking():
        engine.files(snapshot)
        engine.gather_weights(snapshot)


def wait_for_threads() -> None:
    """Until no other thread of this process runs: behind a collective, gloo's let go of its tensors."""

    def running(thread: Path) -> bool:
        try:
            return (
                thread.name != str(threading.get_native_id()) and (thread / "stat").read_text().rsplit(")")[1][1] == "R"
            )
        except FileNotFoundError:  # ended meanwhile
            return False

    while any(map(running, Path("/proc/self/task").iterdir())):
        time.sleep(0.001)


def measured_each(ranks: Ranks, chosen: list[Case], steps: int = 1) -> list[Held]:
    with ready_for_fp16(), process_group(CPU):
        return [measured(ranks, case, steps) for case in chosen]


def compared(chosen: list[Case], steps: int = 1) -> list[Comparison]:
    """In one launch."""
    by_rank = run_ranks(WORLD_SIZE, measured_each, chosen, steps)
    return [Comparison.of(case, list(held)) for case, *held in zip(chosen, *by_rank, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--stage", type=int, action="append", choices=range(4), help="one or more; all if left out")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--seq-len", type=int, help="another window than the model's here")
    parser.add_argument("--checkpointing", help="of activations; other than the model's here")
    parser.add_argument("--steps", type=int, default=1, help="updates before the one that is measured")
    parser.add_argument("--quick", action="store_true", help="bf16 with fp32 masters alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = SHAPES[options.model]
    if options.seq_len:
        shape = replace(shape, model={**shape.model, "seq_len": options.seq_len})
    if options.checkpointing:
        shape = replace(shape, checkpointing=options.checkpointing)
    of_components = options.model == "components"
    chosen = [
        case
        for case in (component_cases if of_components else cases)(shape, options.stage or range(4))
        if options.only in case.name and (not options.quick or of_components or "bf16 master fp32" in case.name)
    ]
    if not chosen:
        parser.error(f"no case has {options.only!r} in its name")
    if not options.json:
        print(HEADER)
    found = []
    for launch in [chosen] if of_components else [[case] for case in chosen]:
        comparisons = compared(launch, options.steps)
        found += comparisons
        if not options.json:
            print("\n".join(one.line() for one in comparisons), flush=True)
    if options.json:
        ratios = [{"static_ratio": one.static_ratio, "peak_ratio": one.peak_ratio} for one in found]
        print(json.dumps([{**asdict(one), **ratio} for one, ratio in zip(found, ratios, strict=True)], indent=2))
    else:
        static, peak = ([getattr(one, name) for one in found] for name in ("static_ratio", "peak_ratio"))
        print(
            f"{options.model}, {len(found)} cases: static {min(static):.3f} to {max(static):.3f}, "
            f"peak {min(peak):.3f} to {max(peak):.3f}"
        )
    sys.exit(not all(one.is_within for one in found))


if __name__ == "__main__":
    main()
