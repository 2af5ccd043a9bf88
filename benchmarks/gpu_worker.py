"""The process that measures for benchmarks/gpu.py: cases on standard input, answers on a descriptor, a JSON line each.

It answers first with what the device is. A case that fails ends it, with the reason as the last line of its log.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_cases import Case
from data_pipeline.loader import Batch
from pretrain.acceleration import multiply_in_tf32
from pretrain.batching import BatchPlan
from pretrain.clock import Clock
from pretrain.config import RunConfig
from pretrain.device_memory import this_device
from pretrain.engine import TrainingEngine, process_group
from pretrain.held import PeakTracker, live_bytes
from pretrain.memory import MOMENTS
from pretrain.retention import Retention
from pretrain.runtime import Ranks, pick_device, seed_everything
from pretrain.saving import Checkpoints, SaveResult
from pretrain.state import Measured, TrainState
from pretrain.step import train_step
from pretrain.train import build_engine

LR = 3e-4
LOSSES_LR = 1e-4  # with LR a difference in the last bit of bf16 is one of 8 % six updates later
LEFT_OVER = {"cuda": 2**27, "cpu": 2**20}  # bytes that a case may leave: workspaces that libraries keep
TOP_KERNELS = 20
CALLS = ("forward", "backward", "step")  # of the engine


def serve(answers: int, work: str) -> None:
    """Measure what is asked for until standard input ends. Checkpoints lie below `work` for a while."""
    ranks = Ranks.from_environment(os.environ)
    device = pick_device(0, ranks.accelerator)
    bench = Bench(device, ranks, Path(work))
    with os.fdopen(answers, "w", buffering=1) as out, process_group(device):
        out.write(json.dumps(facts(device)) + "\n")
        for line in sys.stdin:
            answer = bench.measure(Case(**json.loads(line)))
            out.write(json.dumps(answer) + "\n")


# ---------------------------------------------------------------- the machine


def facts(device: torch.device) -> dict[str, Any]:
    """What is measured on, and what it computes and moves at most, by a product and a copy of our own."""
    on_gpu = device.type == "cuda"
    memory = this_device(1, None if on_gpu else "cpu")
    size = 8192 if on_gpu else 512
    one, other = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    block = torch.empty(2**30 if on_gpu else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    product, copy = (repeated(device, work) for work in (lambda: one @ other, lambda: target.copy_(block)))
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "memory_bytes": memory.total_bytes,
        "matrix_flops_per_second": 2 * size**3 / product,
        "copy_bytes_per_second": 2 * block.numel() / copy,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deepspeed": importlib.metadata.version("deepspeed"),
    }


def repeated(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one `work`, the mean of ten behind three that warm up."""
    for _ in range(3):
        work()
    return timed(device, lambda: [work() for _ in range(10)]) / 10


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until the device has done what `work` asks of it."""
    wait_for(device)
    started = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live_bytes(device)


# ---------------------------------------------------------------- the cases


@dataclass
class Bench:
    """What one process measures, case by case, on one rank."""

    device: torch.device
    ranks: Ranks
    work: Path

    def measure(self, case: Case) -> dict[str, Any]:
        """The figures of a case, and whether it left the device as it found it."""
        torch.compiler.reset()  # else a block compiled for many shapes falls back to none
        seed_everything(1)
        before = held_bytes(self.device)
        gc.collect()
        gc.freeze()  # what is there already, libraries above all, is not looked at again and again
        with ExitStack() as stack:
            found = {"losses": self.losses, "speed": self.speed, "saving": self.saving}[case.kind](case, stack)
        gc.unfreeze()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        left = held_bytes(self.device) - before
        return {**found, "left_bytes": left, "clean": left <= LEFT_OVER[self.device.type]}

    def losses(self, case: Case, stack: ExitStack) -> dict[str, Any]:
        """The loss of each update on one batch that comes again and again, so that it falls fast."""
        training = self.training(case, stack, again=True)
        results = [training.step(LOSSES_LR) for _ in range(case.steps)]
        return {"losses": [one.loss for one in results], "grad_norms": [one.grad_norm for one in results]}

    def speed(self, case: Case, stack: ExitStack) -> dict[str, Any]:
        """Memory in the second update, then the seconds of those behind it."""
        with PeakTracker(self.device) as tracker:
            with tracker.phase("start"):
                training = self.training(case, stack)
            tracker.settle()
            first_seconds = timed(self.device, training.step)
            tracker.settle()
            with training.watched(tracker):
                training.step()
        seconds: list[float] = []
        while len(seconds) < case.steps or sum(seconds) < case.seconds:
            seconds.append(timed(self.device, training.step))
        parts = training.parts()
        predicted, tokens = case.predicted(), training.plan.tokens_per_step
        return {
            "tokens_per_step": tokens,
            "first_step_seconds": first_seconds,
            "step_seconds": statistics.median(seconds),
            "step_seconds_all": seconds,
            "tokens_per_second": tokens / statistics.median(seconds),
            "flops_per_token": case.flops_per_token,
            "parts_seconds": parts,
            "static_predicted_bytes": predicted.static_bytes,
            "static_bytes": max(tracker.settled[1:]),  # behind the first update, when all of it is there
            "moments_predicted_bytes": {m: predicted.at(m) for m in MOMENTS if m in tracker.phases},
            "moments_bytes": tracker.phases,
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None,
            **({"kernels": training.kernels()} if case.profile else {}),
        }

    def saving(self, case: Case, stack: ExitStack) -> dict[str, Any]:
        """For how long saves hold the loop: two asynchronous ones, then the same state at once."""
        training, ended = self.training(case, stack), list[SaveResult]()
        ways = {name: self.checkpoints(name, ended) for name in ("later", "at-once")}
        state, beside, made_room = TrainState(), [], 0.0

        def step() -> Measured:
            result = training.step()
            state.advance(training.plan, result.tokens)
            return Measured(result.loss, result.grad_norm)

        step()
        alone = [timed(self.device, step) for _ in range(case.steps)]
        made_room = timed(self.device, lambda: ways["later"].make_room(training.engine))
        for _ in range(2):
            measured = step()
            wait_for(self.device)
            ways["later"].save(training.engine, state, {}, measured)
            while ways["later"].in_flight:
                beside.append(timed(self.device, step))
                ways["later"].poll()
        ways["at-once"].save(training.engine, state, {}, step())
        failures = [one.failure for one in ended if one.failure is not None]
        if failures:
            raise OSError(failures[0])
        first, later, at_once = ended
        written = list((self.work / "later").glob("step-*/manifest.json"))
        size = sum(entry["bytes"] for entry in json.loads(written[-1].read_text())["files"].values())
        for name in ways:
            shutil.rmtree(self.work / name)
        return {
            "bytes": size,
            "make_room_seconds": made_room,
            "first_held_seconds": first.held_seconds,
            "held_seconds": later.held_seconds,
            "durable_seconds": later.seconds,
            "at_once_seconds": at_once.seconds,
            "step_seconds": statistics.median(alone),
            "step_beside_seconds": statistics.median(beside),
        }

    def checkpoints(self, name: str, ended: list[SaveResult]) -> Checkpoints:
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return Checkpoints(folder, Retention(1), self.ranks, asynchronous=name == "later", on_end=ended.append)

    def training(self, case: Case, stack: ExitStack, *, again: bool = False) -> Training:
        """Model, engine and batches of a case, as a run builds them. `again`: one batch, repeated."""
        config = case.config()
        built: Any = SimpleNamespace(config=config, deepspeed=case.deepspeed())
        multiply_in_tf32(config, case.compute, self.device)
        engine = build_engine(built, self.ranks, self.device)
        stack.callback(engine._engine.destroy)  # its hooks would keep it alive, and what it holds
        return Training(engine, BatchPlan.from_config(config, 1), random_batches(config, again), self.device)


def random_batches(config: RunConfig, again: bool) -> Iterator[Batch]:
    """Micro-batches of random ids, (micro_batch_size, seq_len) each, the same in every process."""
    rows, tokens = config.batch.micro_batch_size, config.model.seq_len
    generator = np.random.default_rng(0)
    ids = generator.integers(0, config.model.vocab_size, (rows, tokens + 1))
    while True:
        yield Batch(inputs=ids[:, :-1].copy(), targets=ids[:, 1:].copy(), samples=np.arange(rows))
        if not again:
            ids = generator.integers(0, config.model.vocab_size, (rows, tokens + 1))


# ---------------------------------------------------------------- one training, watched


@dataclass
class Training:
    """An engine, and what its steps read."""

    engine: TrainingEngine
    plan: BatchPlan
    batches: Iterator[Batch]
    device: torch.device

    def step(self, lr: float = LR) -> Any:
        return train_step(self.engine, self.batches, self.plan, lr)

    @contextmanager
    def watched(self, tracker: PeakTracker) -> Iterator[None]:
        """The most that is held in each of the engine's calls, and what is held between them."""

        def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any) -> Any:
                with tracker.phase(name):
                    outcome = call(*arguments)
                if name != "forward":
                    tracker.settle()
                return outcome

            return wrapped

        for name in CALLS:
            setattr(self.engine, name, wrap(name, getattr(self.engine, name)))
        try:
            yield
        finally:
            for name in CALLS:
                delattr(self.engine, name)  # the class's own is behind it

    def parts(self) -> dict[str, float]:
        """Seconds of one step, part by part, as a run's own clock has them: on a GPU, as it works through them."""
        clock = Clock(self.device)
        with clock.step():
            train_step(self.engine, self.batches, self.plan, LR, clock=clock)
        return {str(part): seconds for part, seconds in clock.step_seconds.items()}

    def kernels(self) -> list[dict[str, Any]]:
        """What one step spends its time in: kernels on a GPU, operations on a CPU; those that take most."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            timed(self.device, self.step)
        seconds = {
            one.key: (1e-6 * (one.self_device_time_total if on_gpu else one.self_cpu_time_total), one.count)
            for one in profiled.key_averages()
        }
        whole = sum(spent for spent, _ in seconds.values())
        top = sorted(seconds.items(), key=lambda item: -item[1][0])[:TOP_KERNELS]
        return [
            {"name": name[:100], "seconds": spent, "share": spent / whole, "calls": count}
            for name, (spent, count) in top
        ]
