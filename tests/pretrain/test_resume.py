"""Killed and resumed equals never stopped, bit for bit: real ranks, real SIGKILL.

Every stage, dtype and optimizer: test_exact_resume.py. Kills at random moments: tests/launch/test_kill_soak.py.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pretrain.checkpoint import list_checkpoints
from pretrain.config import parse_recipe
from pretrain.metrics import Report, all_records, read_metrics
from pretrain.runtime import Ranks
from pretrain.state import TrainState
from pretrain.train import train
from tests.ranks import Started, live_ranks, run_ranks

Tables = Callable[..., dict[str, Any]]


def train_case(ranks: Ranks, tables: dict[str, Any], path: Path, resume: str = "auto") -> str:
    return train(parse_recipe(tables), path, ranks, resume=resume)


def held_case(ranks: Ranks, tables: dict[str, Any], path: Path, step: int) -> str:
    """Train, and stand still for good once `step` is recorded: whoever kills the run cannot come too late."""
    record = Report.step

    def record_and_stay(self: Report, state: TrainState, **figures: Any) -> None:
        record(self, state, **figures)
        while state.global_step == step:
            signal.pause()

    with mock.patch.object(Report, "step", record_and_stay):
        return train(parse_recipe(tables), path, ranks)


def wait_for_step(path: Path, step: int, running: Callable[[], bool]) -> None:
    """Until the run has recorded `step` or a later one. AssertionError if it ends without."""
    metrics = path / "metrics.jsonl"
    while not (metrics.exists() and any(record["step"] >= step for record in all_records(metrics))):
        assert running(), f"{path} ended before step {step}"
        time.sleep(0.01)


def all_alive(started: Started) -> bool:
    return all(process.is_alive() for process, _ in started)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in value for tensor in tensors_of(value[key])]
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    return []


def assert_same_checkpoint(first: Path, second: Path) -> None:
    """Weights, masters, moments and generator states equal to the last bit; the same state."""
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    assert (first / "weights.safetensors").read_bytes() == (second / "weights.safetensors").read_bytes()
    assert (first / "state.json").read_text() == (second / "state.json").read_text()
    compared = 0
    for name in names:
        if name.endswith(".pt"):
            ours, theirs = (tensors_of(torch.load(folder / name, weights_only=False)) for folder in (first, second))
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b), name
            compared += len(ours)
    assert compared > 3


@pytest.mark.parametrize(
    "stage, master, accumulate",
    [(0, "fp32", "bf16"), (2, "fp32", "fp32"), (3, "bf16", "fp32")],
)
def test_killed_and_resumed_equals_uninterrupted(
    stage: int, master: str, accumulate: str, tiny_recipe: Tables, tmp_path: Path
) -> None:
    tables = tiny_recipe(
        deepspeed={"config": f"ds_configs/zero{stage}.json"}, precision={"master": master, "accumulate": accumulate}
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_ranks(2, train_case, tables, whole) == ["finished", "finished"]

    with live_ranks(2, held_case, tables, killed, 7) as started:
        wait_for_step(killed, 6, lambda: all_alive(started))
    assert list_checkpoints(killed / "checkpoints")[-1].name == "step-00000004"
    assert run_ranks(2, train_case, tables, killed) == ["finished", "finished"]

    records = [record for record in all_records(killed / "metrics.jsonl") if record["kind"] == "train"]
    replayed = {r["step"] for r in records if r["attempt"] == 1} & {r["step"] for r in records if r["attempt"] == 2}
    assert replayed >= {5, 6}, "no step ran twice"
    expected = {r["step"]: r for r in read_metrics(whole / "metrics.jsonl")}
    assert sorted(expected) == list(range(1, 17))
    for record in records:
        for figure in ("loss", "grad_norm", "lr", "tokens"):
            assert record[figure] == expected[record["step"]][figure], (record["attempt"], record["step"], figure)
    held_out = [
        [(r["step"], r["source"], r["loss"]) for r in read_metrics(path / "metrics.jsonl", "evaluation")]
        for path in (whole, killed)
    ]
    assert held_out[0] == held_out[1] != []
    assert_same_checkpoint(list_checkpoints(whole / "checkpoints")[-1], list_checkpoints(killed / "checkpoints")[-1])
    attempts = json.loads((killed / "environment.json").read_text())["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == [1, 2]
