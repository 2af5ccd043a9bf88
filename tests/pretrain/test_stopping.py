"""Stopping well: the wish and its agreement by arithmetic, then real ranks with real signals in every phase."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.stopping
import pretrain.train
from data_pipeline.loader import Loader
from pretrain.batching import BatchPlan, steps_of
from pretrain.checkpoint import list_checkpoints, verify
from pretrain.config import parse_recipe
from pretrain.engine import TrainingEngine, process_group
from pretrain.metrics import Report, read_metrics
from pretrain.resolve import resolve
from pretrain.run_directory import RunDirectory
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints
from pretrain.step import train_step
from pretrain.stopping import (
    Deadline,
    Poll,
    StopAgreedError,
    Stopping,
    StopRequest,
    StopWantedError,
    first_reason,
    heeding,
)
from tests.pretrain.recipe import recipe
from tests.pretrain.test_accumulation import build_model, config_of, micro_batches
from tests.pretrain.test_resume import assert_same_checkpoint, tensors_of
from tests.ranks import root, run_ranks

Tables = Callable[..., dict[str, Any]]


# ---------------------------------------------------------------- the wish of one rank


def test_a_wish_stays_and_tells_its_first_reason(tmp_path: Path) -> None:
    request = StopRequest(tmp_path / "stop")
    assert not request.wanted()
    request.stop_file.touch()
    assert request.wanted()
    request.stop_file.unlink()
    request._note(signal.SIGTERM, None)
    assert request.wanted()
    assert request.reason == f"the file {tmp_path / 'stop'}"
    request._note(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        request._note(signal.SIGINT, None)


def test_the_reason_of_another_rank_is_told_as_such() -> None:
    assert first_reason([None, "SIGTERM"]) == "SIGTERM on rank 1"
    assert first_reason(["SIGUSR1", "SIGTERM"]) == "SIGUSR1"


def test_a_deadline_leaves_time_to_save_and_for_the_step_before() -> None:
    now = [0.0]
    deadline = Deadline(1000.0, first_save_bytes=4e9, clock=lambda: now[0])  # 40 s at 100 MB/s, half as much again
    request = StopRequest(Path("nowhere"), deadline)
    now[0] = 934.9
    assert not request.wanted(before_step=True)
    deadline.measured_step(20.0)
    assert request.wanted(before_step=True)
    now[0], request.reason = 935.1, None
    assert request.wanted()
    assert request.reason == "--max-minutes"
    deadline.measured_save(10.0)
    request.reason = None
    assert not request.wanted()
    deadline.save_in_flight = lambda: True  # it has to end first: 965 is what two of them leave
    now[0] = 965.1
    assert request.wanted()
    deadline.save_in_flight, request.reason = lambda: False, None
    assert not request.wanted()
    now[0] = 980.1
    assert request.wanted()


def test_a_save_that_takes_half_of_the_grace_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(RunDirectory(tmp_path), recipe(), active=True)
    report.saved(15.0, 30.0)
    report.saved(99.0, None)
    assert capsys.readouterr().err == ""
    report.saved(15.5, 30.0)
    report.saved(15.5, 30.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: saving took 15.5 s, more than half of the 30 s between")
    report = Report(RunDirectory(tmp_path), recipe(), active=True)
    report.saved(7.5, 30.0, waits_for_another=True)
    assert capsys.readouterr().err == ""
    report.saved(7.6, 30.0, waits_for_another=True)
    told = "warning: saving took 7.6 s, which a stop may have to await and then to do again, more than half of the 30 s"
    assert capsys.readouterr().err.startswith(told)


class Slow:
    """Micro-batches of which the third is long in coming."""

    def __init__(self) -> None:
        self.given = 0

    def ready(self, seconds: float) -> bool:
        return self.given < 2

    def __next__(self) -> int:
        self.given += 1
        return self.given


def test_whoever_waits_for_data_asks_itself(tmp_path: Path) -> None:
    request = StopRequest(tmp_path / "stop")
    request.stop_file.touch()
    batches = heeding(Slow(), request)
    assert [next(batches), next(batches)] == [1, 2], "what is there is given out, wish or not"
    with pytest.raises(StopWantedError):
        next(batches)


# What a run does until its ranks have met, and then.
WAITING = """
import pathlib, sys, time
from pretrain.stopping import StopRequest
stop = StopRequest(pathlib.Path("nowhere"))
stop.install()
if sys.argv[1] == "together":
    stop.begin()
print("ready", flush=True)
if sys.argv[1] == "alone":
    time.sleep(3600)
while not stop.wanted():
    time.sleep(0.01)
sys.exit(f"noted {stop.reason}")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_before_the_ranks_have_met_a_signal_ends_the_process_then_it_is_noted(number: signal.Signals) -> None:
    for phase, code, says in (
        ("alone", 0, f"stopped by {number.name} before the run began\n"),
        ("together", 1, f"noted {number.name}\n"),
    ):
        argv = [sys.executable, "-c", WAITING, phase]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root())
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (code, says)


# ---------------------------------------------------------------- the agreement of all


def test_ranks_ask_each_other_at_the_same_calls_about_once_a_second() -> None:
    """Two ranks, threads here, whose micro-steps take 2 and 6 ms: the questions follow from both together."""
    meeting = threading.Barrier(2)
    given: list[list[float]] = [[], []]
    asked: list[list[int]] = [[], []]

    def rank(number: int, wish_from: float) -> None:
        now, calls = [0.0], [0]
        request = mock.Mock(wanted=lambda before_step: now[0] >= wish_from)

        def sum_over_ranks(*values: float) -> list[float]:
            given[number] = [float(value) for value in values]
            meeting.wait()
            summed = [a + b for a, b in zip(*given, strict=True)]
            meeting.wait()
            asked[number].append(calls[0])
            return summed

        poll = Poll(Stopping(request, sum_over_ranks), clock=lambda: now[0])
        while calls[0] < 2000:
            calls[0] += 1
            now[0] += (0.002, 0.006)[number]
            try:
                poll()
            except StopAgreedError:
                return

    threads = [threading.Thread(target=rank, args=(number, (99.0, 4.5)[number])) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked[0] == asked[1]
    assert asked[0][:5] == [1, 3, 7, 15, 31]
    gaps = [second - first for first, second in zip(asked[0], asked[0][1:], strict=False)]
    assert set(gaps[7:]) <= {249, 250}, "4 ms a call on the mean of both"
    assert asked[0][-2] * 0.006 < 4.5 <= asked[0][-1] * 0.006


# ---------------------------------------------------------------- an accumulation that is dropped


# stage, precision.compute, accumulate, sections of zero_optimization
DROPPED: list[tuple[int, str, str, dict[str, Any]]] = [
    (0, "fp32", "fp32", {}), (0, "bf16", "bf16", {}), (1, "bf16", "bf16", {}), (1, "bf16", "fp32", {}),
    (2, "bf16", "fp32", {}), (3, "bf16", "fp32", {}), (2, "bf16", "fp32", {"offload_optimizer": {"device": "cpu"}}),
]  # fmt: skip


def dropping_case(ranks: Ranks, folder: Path) -> list[str]:
    """Of each kind of engine: saved behind its first step, behind micro-steps of the second that are then dropped,
    and behind the second step made anew; beside an engine that was never asked to stop."""
    with process_group(torch.device("cpu")), mock.patch.object(pretrain.stopping, "POLL_SECONDS", 0.0):
        for number, (stage, compute, accumulate, sections) in enumerate(DROPPED):
            config = config_of(compute=compute, accumulate=accumulate, master="fp32")
            zero: dict[str, Any] = {"stage": stage, **sections}
            resolved = resolve({"zero_optimization": zero}, config, ranks.world_size)
            for way in ("dropped", "whole"):
                engine = TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu"))
                plans = [
                    BatchPlan.from_config(config, ranks.world_size).of_step(step, steps_of(config.batch))
                    for step in range(2)
                ]
                path = folder / str(number) / way
                train_step(engine, micro_batches(ranks), plans[0], lr=1e-2)
                engine.save(path / "first")
                if way == "dropped":
                    wishes = iter([False, False, False, True])  # before the step, behind its first micro-steps
                    request = mock.Mock(wanted=lambda before_step, wishes=wishes: next(wishes))
                    stopping = Stopping(request, engine.sum_over_ranks)
                    with pytest.raises(StopAgreedError):
                        train_step(engine, micro_batches(ranks, 8), plans[1], lr=1e-3, stopping=stopping)
                    assert next(wishes, None) is None, "it stopped elsewhere"
                    engine.save(path / "behind")
                train_step(engine, micro_batches(ranks, 8), plans[1], lr=1e-3)
                engine.save(path / "second")
    return []


def assert_same_files(first: Path, second: Path, where: object) -> None:
    """Every value of DeepSpeed's files equal, tensors to the last bit."""
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        ours, theirs = (torch.load(folder / name, weights_only=False) for folder in (first, second))
        assert len(tensors_of(ours)) > 3
        for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert torch.equal(a, b), (where, name)
        assert plain(ours) == plain(theirs), (where, name)


def plain(value: Any) -> Any:
    """What is no tensor in nested containers, objects by their attributes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {str(key): plain(value[key]) for key in value}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else value


def test_a_dropped_accumulation_leaves_the_last_whole_step(tmp_path: Path) -> None:
    """Saved then, it is what was saved behind that step; and training goes on as if nothing had been dropped."""
    run_ranks(2, dropping_case, tmp_path)
    for number, kind in enumerate(DROPPED):
        dropped, whole = tmp_path / str(number) / "dropped", tmp_path / str(number) / "whole"
        assert_same_files(dropped / "first", dropped / "behind", kind)
        assert_same_files(dropped / "second", whole / "second", kind)


# ---------------------------------------------------------------- whole runs, real signals, every phase


@dataclass(frozen=True)
class Moment:
    """Where one rank is asked to stop: within the nth call of a method, which every rank calls equally often."""

    owner: type
    method: str
    call: int
    rank: int
    way: signal.Signals | None  # None: the stop file
    step: int  # the last whole one then
    reason: str


MOMENTS = {  # of four steps with four micro-steps each, evaluated behind 2 and 4, saved behind 3 and 4
    "the first accumulation": Moment(TrainingEngine, "forward", 2, 1, signal.SIGTERM, 0, "SIGTERM on rank 1"),
    "an accumulation": Moment(TrainingEngine, "forward", 11, 1, signal.SIGUSR1, 2, "SIGUSR1 on rank 1"),
    "an evaluation": Moment(TrainingEngine, "forward_only", 3, 0, signal.SIGINT, 2, "SIGINT"),
    "a save": Moment(Checkpoints, "save", 1, 1, signal.SIGTERM, 3, "SIGTERM on rank 1"),
    "waiting for data": Moment(Loader, "ready", 10, 1, signal.SIGTERM, 2, "SIGTERM on rank 1"),
    "the last evaluation": Moment(TrainingEngine, "forward_only", 19, 0, None, 4, "the file {}/stop"),
}


@contextmanager
def asked_at(moment: Moment, ranks: Ranks, path: Path) -> Iterator[None]:
    original, calls = getattr(moment.owner, moment.method), 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        if moment.owner is Loader and calls < moment.call and not original(*arguments):
            return False  # a micro-batch counts once, however often it is asked for
        calls += 1
        if calls == moment.call and ranks.rank == moment.rank:
            if moment.way is None:
                (path / "stop").touch()
            else:
                os.kill(os.getpid(), moment.way)
        if moment.owner is Loader and calls >= moment.call and ranks.rank == moment.rank:
            return False  # nothing comes any more
        return original(*arguments)

    with mock.patch.object(moment.owner, moment.method, counted):
        yield


def phases_case(ranks: Ranks, tables: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """A run that is never asked to stop, and one for each moment: how they end, and how when they are started again."""
    config, found = parse_recipe(tables), []
    with (
        process_group(torch.device("cpu")),  # DeepSpeed can't be started twice in a process: one for all runs
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
        mock.patch.object(pretrain.stopping, "POLL_SECONDS", 0.0),
        mock.patch.object(pretrain.stopping, "WAIT_SECONDS", 0.01),
    ):
        pretrain.train.train(config, folder / "whole", ranks)
        for name, moment in MOMENTS.items():
            path = folder / name
            with asked_at(moment, ranks, path):
                first = pretrain.train.train(config, path, ranks, command="do it again")
            ranks.barrier()
            if ranks.is_first:
                shutil.copytree(path, folder / f"{name}, stopped")
            ranks.barrier()
            found.append((first, pretrain.train.train(config, path, ranks)))
    return found


def receipts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(receipt.read_text()) for receipt in sorted((path / "receipts").iterdir())]


def test_asked_in_any_phase_all_ranks_stop_behind_the_last_whole_step(tiny_recipe: Tables, tmp_path: Path) -> None:
    tables = tiny_recipe(
        batch={"micro_batch_size": 1},
        schedule={"max_steps": 4},
        evaluation={"every_steps": 2},
        checkpoint={"every_steps": 3, "keep_last": 9},
    )
    ended = run_ranks(2, phases_case, tables, tmp_path)
    assert ended == [[("stopped", "finished")] * len(MOMENTS)] * 2
    (*_, last) = list_checkpoints(tmp_path / "whole" / "checkpoints")
    measured = {kind: figures(tmp_path / "whole", kind) for kind in ("train", "evaluation")}
    assert [len(records) for records in measured.values()] == [4, 6]
    for name, moment in MOMENTS.items():
        stopped, resumed = tmp_path / f"{name}, stopped", tmp_path / name
        checkpoints = list_checkpoints(stopped / "checkpoints")
        assert [path.name for path in checkpoints][-1:] == ([f"step-{moment.step:08d}"] if moment.step else []), name
        for path in checkpoints:
            verify(path)
        for rank, receipt in enumerate(receipts(stopped)):
            told = {"rank": rank, "world_size": 2, "attempt": 1, "state": "stopped", "resume": "do it again"}
            told |= {"global_step": moment.step, "reason": moment.reason.format(resumed)}
            assert receipt == {**receipt, **told}, name
        assert [receipt["state"] for receipt in receipts(resumed)] == ["finished"] * 2
        assert {kind: figures(resumed, kind) for kind in measured} == measured, name
        (*_, end) = list_checkpoints(resumed / "checkpoints")
        if name == "the last evaluation":  # that it knows no held-out loss is the one difference
            assert_same_files(last / "engine", end / "engine", name)
        else:
            assert_same_checkpoint(last, end)


def figures(path: Path, kind: str) -> list[tuple[Any, ...]]:
    records = read_metrics(path / "metrics.jsonl", kind)
    return [(record["step"], record.get("source"), record["loss"], record.get("grad_norm")) for record in records]
