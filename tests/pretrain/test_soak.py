"""Long tests: `make soak`. A full disk, compiled blocks, and the 0.5b recipe itself."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pretrain.checkpoint import list_checkpoints, verify
from pretrain.config import load_recipe, parse_recipe
from pretrain.metrics import Report, read_metrics
from pretrain.plan import plan
from pretrain.runtime import Ranks
from pretrain.train import train
from tests.pretrain.test_resume import train_case
from tests.ranks import root, run_ranks

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_compiled_blocks_train_as_others_do(
    stage: int, tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The same losses within rounding, under checkpointing, evaluation and resume too."""
    records = {}
    for compiled in (False, True):
        tables = tiny_recipe(
            deepspeed={"config": f"ds_configs/zero{stage}.json"},
            precision={"compute": "fp32"},
            schedule={"max_steps": 8},
        )
        path = tmp_path / str(compiled)
        assert run_ranks(2, train_case, {**tables, "compile": compiled}, path) == ["finished", "finished"]
        records[compiled] = [record["loss"] for record in read_metrics(path / "metrics.jsonl")]
    assert records[True] == pytest.approx(records[False], rel=1e-5)


def saving_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> tuple[str, list[str]]:
    """How a run ends, and what it said."""
    said: list[str] = []
    with mock.patch.object(Report, "say", lambda report, message: said.append(message)):
        try:
            return train(parse_recipe(tables), path, ranks), said
        except OSError as error:
            return str(error), said


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kilobytes", [300, 2500, 7000, 14000])
def test_a_disk_that_is_full_while_saving(
    kilobytes: int, asynchronous: bool, tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A small file system of its own (mounting it wants root) that holds all of the run: each save that does not fit is
    told of in one line, and training goes on; that the last one does not is an error. What was saved is whole, and
    with more room the same command goes on from it."""
    path = tmp_path / "small"
    path.mkdir()
    tables = tiny_recipe(
        schedule={"max_steps": 12},
        checkpoint={"every_steps": 2, "keep_last": 9, "asynchronous": asynchronous},
        evaluation={"every_steps": 100},
    )
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(path)], check=True)
    try:
        ((message, said),) = run_ranks(1, saving_case, tables, path / "run")
        assert "the disk is full" in message or "No space left" in message
        there = list_checkpoints(path / "run" / "checkpoints")
        for checkpoint in there:
            verify(checkpoint)
        assert not list((path / "run").glob("checkpoints/*.partial"))
        if any("was not saved" in line for line in said):
            assert message.endswith("start the same command again")
            assert "nothing was saved at step-00000012, the checkpoints before it are whole" in message
            assert [record["step"] for record in read_metrics(path / "run" / "metrics.jsonl")] == list(range(1, 13))
            failed = [line for line in said if "was not saved" in line]
            assert len(failed) + len(there) == 5
            assert all("the disk is full" in line and "training goes on" in line for line in failed)
        print(f"{kilobytes} kB, asynchronous {asynchronous}: {len(there)} saved; {message}")
        subprocess.run(["mount", "-o", "remount,size=64m", str(path)], check=True)
        ((message, said),) = run_ranks(1, saving_case, tables, path / "run")
        assert message == "finished"
        assert any(f"resumed from {there[-1]}" in line for line in said) if there else True
    finally:
        subprocess.run(["umount", str(path)], check=True)


def half_billion_case(ranks: Ranks, name: str, overrides: list[str], path: Path) -> str:
    return train(load_recipe(root() / "pretrain" / "recipes" / f"{name}.toml", overrides), path, ranks)


@pytest.mark.parametrize("name, ranks", [("0.5b", 1), ("0.5b", 2), ("0.5b-bf16-master", 2)])
def test_the_reference_recipe_trains(name: str, ranks: int, collection: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Three steps of short sequences: the loss falls from ln(vocab); wants 20 GB of memory and 8 GB of disk."""
    overrides = [
        f"data.path={collection}", f"data.tokenizer={tokenizer}", "model.seq_len=128", "batch.global_batch_size=4",
        "batch.micro_batch_size=1", "schedule.max_steps=3", "schedule.warmup_steps=1", "evaluation.max_tokens=128",
        "logging.tensorboard=false", "checkpoint.keep_last=1",
    ]  # fmt: skip
    path = tmp_path / "run"
    assert run_ranks(ranks, half_billion_case, name, overrides, path)[0] == "finished"
    records = read_metrics(path / "metrics.jsonl")
    losses = [record["loss"] for record in records]
    assert 10.3 < losses[0] < 11.0
    assert losses[2] < losses[1] < losses[0]
    static = plan(load_recipe(root() / "pretrain" / "recipes" / f"{name}.toml", overrides), ranks)
    row = next(row for row in static.rows if row.stage == static.stage and row.accumulate == "fp32")
    assert row.budget is not None
    peak = records[-1]["peak_memory_bytes"]
    print(f"{name} on {ranks}: static {row.budget.total_bytes / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, losses {losses}")
    assert peak > row.budget.total_bytes
