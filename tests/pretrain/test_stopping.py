"""Stopping well: the wish and its agreement by arithmetic, then real ranks with real signals in every phase."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.stopping
import pretrain.train
from pretrain.batching import BatchPlan
from pretrain.engine import TrainingEngine, process_group, resolve
from pretrain.runtime import Ranks
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
from pretrain.train import train_step
from tests.pretrain.test_accumulation import build_model, config_of, micro_batches
from tests.pretrain.test_resume import tensors_of
from tests.ranks import run_ranks

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
    now[0] = 980.1
    assert request.wanted()


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
                plans = [BatchPlan.from_config(config, ranks.world_size, step) for step in range(2)]
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
