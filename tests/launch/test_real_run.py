"""The real launcher, real ranks: what `launch run` says of a run's end is true, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import read_metrics
from tests.pretrain.test_resume import wait_for_step
from tests.ranks import free_port, root

ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def recipe(tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(parse_recipe(tiny_recipe(checkpoint={"every_steps": 8}))))
    return path


def launch(recipe: Path, run: Path, *options: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "launch", "run", str(recipe), "--ranks", "2", "--run", str(run), *options]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root(), env=ENVIRONMENT
    )


def pids_of(run: Path) -> list[int]:
    pids: list[int] = json.loads((run / "environment.json").read_text())["attempts"][-1]["pids"]
    return pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]


def test_a_rank_that_dies_fails_the_run_and_the_same_command_resumes(recipe: Path, tmp_path: Path) -> None:
    """Killed, resumed, and then the same recipe by the deepspeed command alone: the same losses, bit for bit."""
    run = tmp_path / "run"
    more = ("--set", "schedule.max_steps=60", "--set", "evaluation.every_steps=60")
    first = launch(recipe, run, *more)
    wait_for_step(run, 10)
    pids = pids_of(run)
    os.kill(pids[1], signal.SIGKILL)
    output, _ = first.communicate(timeout=90)
    assert first.returncode != 0
    assert "a rank died" in output.splitlines()[-1], output
    assert not any(alive(pid) for pid in pids)

    second = launch(recipe, run, *more)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    assert "resumed from" in output
    assert json.loads((run / "status.json").read_text())["state"] == "finished"

    direct = tmp_path / "direct"
    argv = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    argv += ["--module", "pretrain", "run", str(recipe), "--run", str(direct), *more]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=root(), env=ENVIRONMENT, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert losses(direct) == losses(run)
    assert len(losses(run)) == 60


def test_interrupted_it_saves_and_stops_and_leaves_nothing_running(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(recipe, run, "--set", "schedule.max_steps=2000", "--set", "evaluation.every_steps=2000")
    wait_for_step(run, 3)
    pids = pids_of(run)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped"
    assert (run / "checkpoints" / f"step-{status['global_step']:08d}" / "manifest.json").exists()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def test_bad_input_is_one_line_and_starts_nothing(recipe: Path, tmp_path: Path) -> None:
    process = launch(recipe, tmp_path / "run", "--set", "batch.global_batch_size=7")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.startswith("error: ")
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "run").exists()
