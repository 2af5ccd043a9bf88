"""Long test, `make soak`: real runs under the real launcher, asked to stop at random moments in every phase."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from launch.ending import newest_attempt
from pretrain.checkpoint import list_checkpoints, verify
from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import all_records, read_metrics
from tests.launch.test_local import listens, marked
from tests.launch.test_real_run import ENVIRONMENT
from tests.ranks import root

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

MOMENTS = int(os.environ.get("SOAK_MOMENTS", "40"))
ENDLESS = 10**6
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def started(recipe: Path, run: Path, *options: object) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "launch", "run", recipe, "--ranks", "2", "--run", run, *options]
    log = (run.parent / "log.txt").open("ab")
    return subprocess.Popen(
        list(map(str, argv)), stdout=log, stderr=log, cwd=root(), env={**ENVIRONMENT, "MARK": str(run)}
    )


def ask(process: subprocess.Popen[bytes], run: Path, moments: random.Random, began: bool) -> str:
    """One of the ways to ask, of those there are at this moment; what it was."""
    ways = ["launch", "a rank", "the stop file", "every rank"] if began else ["launch"]
    way, number = moments.choice(ways), moments.choice(SIGNALS)
    if way == "launch":
        process.send_signal(number)
        return f"{number.name} to launch"
    if way == "the stop file":
        (run / "stop").touch()
        return way
    pids = json.loads((run / "environment.json").read_text())["attempts"][-1]["pids"]
    for pid in moments.sample(pids, len(pids) if way == "every rank" else 1):
        os.kill(pid, number)
    return f"{number.name} to {way}"


def trains(run: Path, attempt: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and any(one["attempt"] == attempt for one in all_records(metrics))


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def test_asked_to_stop_at_random_moments(tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Starting, reading, accumulating, evaluating, saving: each ends with code 0, whole, and leaves nothing running;
    resumed each time, the weights are those of a run that nobody ever asked, bit for bit."""
    tables = tiny_recipe(
        batch={"global_batch_size": 64, "micro_batch_size": 2},
        schedule={"max_steps": ENDLESS, "min_lr": 1e-3, "peak_lr": 1e-3},  # no rate depends on where the end is
        evaluation={"every_steps": 3, "max_tokens": 8192},
        checkpoint={"every_steps": 4, "keep_last": 2},
        deepspeed={"config": f"ds_configs/zero{os.environ.get('SOAK_STAGE', '2')}.json"},
    )
    recipe, run, whole = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "whole"
    recipe.write_text(to_toml(parse_recipe(tables)))
    moments = random.Random(int(os.environ.get("SOAK_SEED", "1")))
    for number in range(MOMENTS):
        before = newest_attempt(run)
        process = started(recipe, run, "--force")  # whatever else holds the machine's memory
        wait_for(lambda process=process: listens(process))
        phase = moments.choices(("starting", "begun", "training"), (0.2, 0.2, 0.6))[0]
        if phase != "starting":
            wait_for(lambda before=before: newest_attempt(run) > before)
        if phase == "training":
            wait_for(lambda before=before: trains(run, before + 1))
        time.sleep(moments.uniform(0.0, 6.0))
        began = newest_attempt(run) > before
        way = ask(process, run, moments, began)
        asked_at = time.monotonic()
        assert process.wait() == 0, (number, way, (tmp_path / "log.txt").read_text()[-3000:])
        seconds = time.monotonic() - asked_at
        wait_for(lambda: marked(run) == [])
        if newest_attempt(run) > before:
            receipts = [json.loads(path.read_text()) for path in sorted((run / "receipts").iterdir())]
            assert [(one["rank"], one["state"]) for one in receipts] == [(0, "stopped"), (1, "stopped")], (number, way)
            step = receipts[0]["global_step"]
            saved = list_checkpoints(run / "checkpoints")
            assert [path.name for path in saved][-1:] == ([f"step-{step:08d}"] if step else []), (number, way)
            for path in saved:
                verify(path)
        else:
            step = "none: it had not begun"
        print(f"{number}: {phase}, {way}, {seconds:.1f} s, step {step}", flush=True)
    reached = int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-"))
    for path in (run, whole):
        assert started(recipe, path, "--force", "--set", f"schedule.max_steps={reached + 2}").wait() == 0
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (run, whole))
    assert ours.name == theirs.name == f"step-{reached + 2:08d}"
    weights = [load_file(path / "weights.safetensors") for path in (ours, theirs)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    for kind in ("train", "evaluation"):
        records = [
            [(one["step"], one.get("source"), one["loss"]) for one in read_metrics(path / "metrics.jsonl", kind)]
            for path in (run, whole)
        ]
        assert records[0] == records[1] != []
