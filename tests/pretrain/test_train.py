"""A run's ways of ending, and what is refused before it begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.prepare import Options, prepare
from pretrain.checkpoint import list_checkpoints
from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import TrainingDivergedError, read_metrics
from pretrain.runtime import Ranks
from pretrain.train import train
from tests.command_line import run_command
from tests.pretrain.test_resume import all_alive, train_case, wait_for_step
from tests.ranks import live_ranks, results_of, root, run_ranks
from tokenizer.train import train as train_tokenizer

Tables = Callable[..., dict[str, Any]]


def status(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "status.json").read_text())
    return content


@pytest.mark.parametrize("way", ["stop file", "SIGTERM to one rank"])
def test_asked_to_stop_all_ranks_stop_behind_the_same_step(way: str, tiny_recipe: Tables, tmp_path: Path) -> None:
    """The checkpoint describes the last whole step, and the run that resumes reads on from there."""
    endless = 10**6  # steps: only the wish to stop can end it
    tables = tiny_recipe(
        schedule={"max_steps": endless}, checkpoint={"every_steps": endless}, evaluation={"every_steps": endless}
    )
    path = tmp_path / "run"
    with live_ranks(2, train_case, tables, path) as started:
        wait_for_step(path, 3, lambda: all_alive(started))
        if way == "stop file":
            (path / "stop").touch()
        else:
            pid = started[1][0].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        assert results_of(started) == ["stopped", "stopped"]
        assert [process.exitcode for process, _ in started] == [0, 0]
    (checkpoint,) = list_checkpoints(path / "checkpoints")
    steps = [record["step"] for record in read_metrics(path / "metrics.jsonl")]
    assert checkpoint.name == f"step-{steps[-1]:08d}"
    assert status(path) == {**status(path), "state": "stopped", "global_step": steps[-1], "attempt": 1}

    shorter = {**tables, "schedule": {**tables["schedule"], "max_steps": steps[-1] + 2}}
    assert run_ranks(2, train_case, shorter, path) == ["finished", "finished"]
    assert [record["step"] for record in read_metrics(path / "metrics.jsonl")] == list(range(1, steps[-1] + 3))
    assert status(path) == {**status(path), "state": "finished", "attempt": 2}


def diverging_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    try:
        return train(parse_recipe(tables), path, ranks)
    except TrainingDivergedError as error:
        return str(error)


def test_a_number_that_is_not_finite_stops_the_run_before_it_is_saved(tiny_recipe: Tables, tmp_path: Path) -> None:
    """A rate of 1e30 makes the weights infinite; the last healthy checkpoint stays the newest."""
    healthy = tiny_recipe(schedule={"max_steps": 4}, checkpoint={"every_steps": 2}, evaluation={"every_steps": 100})
    path = tmp_path / "run"
    assert run_ranks(1, diverging_case, healthy, path) == ["finished"]
    wild = {**healthy, "schedule": {"peak_lr": 1e30, "min_lr": 1e30, "warmup_steps": 0, "max_steps": 40}}
    (message,) = run_ranks(1, diverging_case, wild, path)
    assert "lower schedule.peak_lr" in message
    assert status(path)["state"] == "failed"
    receipt = json.loads((path / "receipts" / "rank-00000.json").read_text())
    assert (receipt["state"], receipt["attempt"]) == ("failed", 2)
    assert receipt["reason"].endswith(message)
    last = read_metrics(path / "metrics.jsonl")[-1]
    assert None in (last["loss"], last["grad_norm"])
    for checkpoint in list_checkpoints(path / "checkpoints"):
        assert json.loads((checkpoint / "state.json").read_text())["global_step"] < last["step"]


# ---------------------------------------------------------------- bad input, on the command line


def command(recipe: Path, *arguments: str, verb: str = "run") -> subprocess.CompletedProcess[str]:
    return run_command("pretrain", verb, recipe, *arguments)


def cold_command(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`run` by a new Python, which imports all that a run needs: some seconds, where the imports could speak."""
    argv = [sys.executable, "-m", "pretrain", "run", str(recipe), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=root(), check=False)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit 2, one line on stderr that says all of `words`, nothing on stdout."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], (word, lines[0])
    assert done.stdout == ""


@pytest.fixture
def recipe_file(tiny_recipe: Tables, tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(parse_recipe(tiny_recipe(**changes))))
        return path

    return write


def test_faults_of_a_recipe_are_one_line(recipe_file: Callable[..., Path], tmp_path: Path) -> None:
    run = ("--run", str(tmp_path / "run"))
    recipe = recipe_file()
    refused(command(tmp_path / "nowhere.toml", *run), "nowhere.toml", "no such recipe")
    refused(command(recipe, *run, "--set", "schedule.peek_lr=1"), "schedule.peek_lr", "did you mean schedule.peak_lr")
    refused(command(recipe, *run, "--set", "batch.global_batch_size=7"), "7", "multiple", "use 6 or 8")
    refused(cold_command(recipe, *run, "--set", "data.path=nowhere"), "nowhere", "no such folder")
    refused(command(recipe, *run, "--max-minutes", "nan"), "--max-minutes nan: must be more than 0")
    refused(command(recipe, *run, "--set", "model.vocab_size=512"), "model.vocab_size = 512", "1024 or more")
    refused(command(recipe, *run, "--set", "deepspeed.config=ds_configs/zero0.json"), "ZeRO-0", "accumulate")
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing"


def test_another_tokenizer_is_one_line(
    recipe_file: Callable[..., Path], tmp_path: Path, corpus: Path, collection: Path
) -> None:
    texts = [json.loads(line)["text"] for line in (corpus / "english.jsonl").open(encoding="utf-8")][:40]
    train_tokenizer(texts, tmp_path / "other", vocab_size=900)
    recipe = recipe_file(data={"tokenizer": str(tmp_path / "other")})
    refused(command(recipe, "--run", str(tmp_path / "run")), "tokenizer", f"data.tokenizer = {collection}/tokenizer")


def test_damaged_data_is_one_line(
    recipe_file: Callable[..., Path], tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    """A shard cut short; then a manifest that is missing; then nothing held out."""
    data = tmp_path / "data"
    prepare({"english": [corpus / "english.jsonl"]}, tokenizer, data, Options(validation_fraction=0.05))
    recipe = recipe_file(data={"path": str(data)})
    run = ("--run", str(tmp_path / "run"))
    shard = data / "english" / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused(command(recipe, *run), "train-00000.bin", f"{len(whole) - 1:,} bytes", "cut")
    shard.write_bytes(whole)
    (data / "manifest.json").unlink()
    refused(command(recipe, *run), "manifest.json", "prepare")
    prepare({"english": [corpus / "english.jsonl"]}, tokenizer, tmp_path / "all", Options(validation_fraction=0.0))
    refused(command(recipe_file(data={"path": str(tmp_path / "all")}), *run), "none to evaluate on")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fails_behind_the_beginning_is_no_bad_input(
    recipe_file: Callable[..., Path], tmp_path: Path
) -> None:
    """Code 2 would say that nothing was started, and no `--restarts` would start it again. A status is no reason."""
    run = tmp_path / "run"
    (run / "metrics.jsonl").mkdir(parents=True)
    short = ("--run", str(run), "--set", "schedule.max_steps=2", "--set", "schedule.warmup_steps=1")
    done = command(recipe_file(), *short)
    assert done.returncode == 1, done.stderr
    assert f"error: [Errno 21] Is a directory: '{run}/metrics.jsonl'\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((run / "receipts" / "rank-00000.json").read_text())["state"] == "failed"
    (run / "metrics.jsonl").rmdir()
    (run / "status.json").unlink(missing_ok=True)
    (run / "status.json").mkdir()
    done = command(recipe_file(), *short)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: status.json is not written: [Errno 21] Is a directory") == 1
    assert json.loads((run / "receipts" / "rank-00000.json").read_text())["state"] == "finished"


def test_only_some_of_a_launchers_variables(recipe_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(command(recipe_file()), "WORLD_SIZE", "RANK", "all of them or none")


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("RANK", "x", "RANK=x in the environment is not a whole number"),
        ("RANK", "-1", "RANK=-1"),
        ("RANK", "5", "below WORLD_SIZE=1"),
        ("MASTER_PORT", "99999999", "no TCP port"),
        ("DS_ACCELERATOR", "nonsense", "DS_ACCELERATOR=nonsense: set it to cpu or cuda"),
        # No name, for which a server somewhere would be asked: an address within a network that is not there.
        ("MASTER_ADDR", "fe80::1%nowhere", "cannot meet at MASTER_ADDR:MASTER_PORT = fe80::1%nowhere:"),
    ],
)
def test_a_launchers_variables_with_nonsense(
    name: str, value: str, words: str, recipe_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for variable, setting in {**whole, name: value}.items():
        monkeypatch.setenv(variable, setting)
    run = cold_command if name == "DS_ACCELERATOR" else command  # DeepSpeed reads it when it is imported
    done = run(recipe_file(), "--run", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_strangers_rank_silences_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    refused(command(tmp_path / "nowhere.toml", verb="plan"), "no such recipe")


def test_evaluate_and_generate_refuse_in_one_line(tmp_path: Path) -> None:
    refused(command(tmp_path / "nowhere", verb="evaluate"), "nowhere", "does not exist")
    (tmp_path / "empty").mkdir()
    refused(command(tmp_path / "empty", "--prompt", "a", verb="generate"), "holds no checkpoint")
