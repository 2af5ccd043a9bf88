"""The real launcher, real ranks: what `launch run` says of a run's end is true, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.addresses import free_port
from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import read_metrics
from tests.ranks import root

ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def recipe(tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(parse_recipe(tiny_recipe(checkpoint={"every_steps": 8}))))
    return path


@contextmanager
def launch(recipe: Path, run: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`launch run`. It writes into a pipe of one page, so that it stands still soon after the test stops reading."""
    argv = [sys.executable, "-m", "launch", "run", str(recipe), "--ranks", "2", "--run", str(run), *options]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, pipesize=4096, cwd=root(), env=ENVIRONMENT
    )
    try:
        yield process
    finally:
        process.kill()  # nothing, where it has ended
        process.wait()


def read_to(process: subprocess.Popen[bytes], beginning: str) -> None:
    """Read what a run says up to a line that begins so."""
    assert process.stdout is not None
    said = b""
    while not said.startswith(beginning.encode()):
        said = process.stdout.readline()
        assert said, f"it ended without saying {beginning!r}"


def rest_of(process: subprocess.Popen[bytes]) -> str:
    """What it says from here to its end."""
    output, _ = process.communicate()
    return output.decode()


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
    """Killed, resumed, and then the same recipe by the deepspeed command alone: the same losses, bit for bit.

    From step 10 on nobody reads what the run says; it is killed before its last step, at which the three pages of lines
    of more than 80 letters that it and its keeper write ahead do not let it arrive.
    """
    run = tmp_path / "run"
    more = ("--set", "schedule.max_steps=200", "--set", "evaluation.every_steps=200")
    with launch(recipe, run, *more) as first:
        read_to(first, "step 10/")
        pids = pids_of(run)
        os.kill(pids[1], signal.SIGKILL)
        output = rest_of(first)
    assert first.returncode == 137
    told = output.splitlines()[-1]
    assert told.startswith(f"error: run {run} failed (code 137): rank 1 was killed by SIGKILL; "), output
    assert f"logs in {run}/logs/attempt-1; the same command resumes from the last checkpoint" in told
    assert not any(alive(pid) for pid in pids)
    assert len(losses(run)) < 200
    logs = [(run / "logs" / "attempt-1" / f"rank-0000{rank}.log").read_text() for rank in (0, 1)]
    assert "step 10/200 " in logs[0]
    assert "step " not in logs[1]

    with launch(recipe, run, *more) as second:
        output = rest_of(second)
    assert second.returncode == 0, output
    assert "resumed from" in output
    assert json.loads((run / "status.json").read_text())["state"] == "finished"

    direct = tmp_path / "direct"
    argv = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    argv += ["--module", "pretrain", "run", str(recipe), "--run", str(direct), *more]
    argv += ["--set", "checkpoint.every_steps=200"]  # none of the saves is read
    done = subprocess.run(argv, capture_output=True, text=True, cwd=root(), env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(direct) == losses(run)
    assert len(losses(run)) == 200


def test_interrupted_it_saves_and_stops_and_leaves_nothing_running(recipe: Path, tmp_path: Path) -> None:
    """A million steps: only the interrupt can end it."""
    run = tmp_path / "run"
    with launch(
        recipe, run, "--set", "schedule.max_steps=1000000", "--set", "evaluation.every_steps=1000000"
    ) as process:
        read_to(process, "step 3/")
        pids = pids_of(run)
        process.send_signal(signal.SIGINT)
        output = rest_of(process)
    assert process.returncode == 0, output
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped"
    assert (run / "checkpoints" / f"step-{status['global_step']:08d}" / "manifest.json").exists()
    receipts = [json.loads((run / "receipts" / f"rank-0000{rank}.json").read_text()) for rank in (0, 1)]
    assert [receipt["state"] for receipt in receipts] == ["stopped", "stopped"]
    assert receipts[1]["resume"].startswith(f"python -m launch run {recipe} --ranks 2 --run {run} --set ")
    assert f"stopped by Ctrl-C to `launch run`; resume with {receipts[0]['resume']}; " in output
    assert not any(alive(pid) for pid in pids)


def test_bad_input_is_one_line_and_starts_nothing(recipe: Path, tmp_path: Path) -> None:
    with launch(recipe, tmp_path / "run", "--set", "batch.global_batch_size=7") as process:
        output = rest_of(process)
    assert process.returncode == 2
    assert output.startswith("error: ")
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "run").exists()
