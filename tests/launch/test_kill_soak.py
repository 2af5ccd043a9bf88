"""Long test, `make soak`: one process of a run or all of them killed at random moments; it goes on as if never touched.

SOAK_KILLS (60) kills, spread over the ZeRO stages, once more with asynchronous saving; SOAK_SEED draws them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.ending import newest_attempt
from pretrain.checkpoint import list_checkpoints, step_of, verify
from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import all_records, read_metrics
from tests.launch.test_local import marked
from tests.launch.test_stop_soak import ENDLESS, started, trains, wait_for
from tests.pretrain.test_resume import all_alive, assert_same_checkpoint, train_case
from tests.ranks import live_ranks, run_ranks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

KILLS = int(os.environ.get("SOAK_KILLS", "60"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
STAGES = (0, 1, 2, 3)
LAUNCHED = 0.2  # of them, under the real launcher, whose processes take long to start
EVERY_STEPS, EVALUATION_STEPS = 3, 6  # saved, evaluated
MORE = 2  # steps behind the last kill


def phase_of(run: Path, before: int) -> str:
    """What the attempt behind number `before` was doing when it was killed, by what it left."""
    folder, metrics = run / "checkpoints", run / "metrics.jsonl"
    if newest_attempt(run) == before:
        return "starting"
    for partial in folder.glob("*.partial"):
        if (partial / "manifest.json").exists():
            return "saving, all but renamed"
        return "saving, flushing" if (partial / "state.json").exists() else "saving, writing"
    if list(folder.glob("*.deleted")):
        return "saving, pruning"
    if list_checkpoints(folder) and list_checkpoints(folder)[-1].name != (folder / "latest").read_text().strip():
        return "saving, renamed"
    records = [one for one in all_records(metrics) if one["attempt"] > before] if metrics.exists() else []
    if not records:
        return "loading"
    due = records[-1]["step"] % EVALUATION_STEPS == 0 and records[-1].get("source") != "all"
    return "evaluating" if due else "training"


def newest_step(run: Path) -> int:
    """Of the newest checkpoint, 0 without one."""
    return max(map(step_of, list_checkpoints(run / "checkpoints")), default=0)


def wait_for_the_moment(
    moments: random.Random, run: Path, before: int, start_seconds: float, running: Callable[[], bool]
) -> None:
    """A random one: of the start, of any later time, or of a save."""

    def reached(condition: Callable[[], bool]) -> None:
        while not condition():
            assert running(), "it ended by itself"
            time.sleep(0.002)

    kind = moments.choices(("start", "any", "save"), (0.2, 0.35, 0.45))[0]
    if kind == "start":
        time.sleep(moments.uniform(0.0, start_seconds))
        return
    there, more = newest_step(run), EVERY_STEPS * moments.choice((0, 0, 1, 2))
    reached(lambda: newest_attempt(run) > before and trains(run, before + 1) and newest_step(run) >= there + more)
    time.sleep(moments.uniform(0.0, 1.0))
    if kind == "save":
        reached(lambda: any((run / "checkpoints").glob("*.partial")))
        time.sleep(moments.uniform(0.0, 0.1))


def kill_ranks(moments: random.Random, tables: dict[str, Any], run: Path) -> str:
    """Of two ranks without a launcher one is killed, and the other ends by itself; or both are.

    Both before their first step: a rank that is to meet one that is gone waits as long as torch lets it, ten minutes.
    """
    before = newest_attempt(run)
    victims = moments.choice([(0,), (1,), (0, 1)])
    with live_ranks(2, train_case, tables, run) as ranks:
        wait_for_the_moment(moments, run, before, 2.0, lambda: all_alive(ranks))
        if not trains(run, before + 1):
            victims = (0, 1)
        for victim in victims:
            ranks[victim][0].kill()
        for process, _ in ranks:
            process.join()
    return f"rank {' and '.join(map(str, victims))}"


def kill_launched(moments: random.Random, recipe: Path, run: Path) -> str:
    """The launcher, or any process that it started; what is left ends by itself."""
    before = newest_attempt(run)
    launcher = started(recipe, run, "--force")  # whatever else holds the machine's memory
    wait_for_the_moment(moments, run, before, 10.0, lambda: launcher.poll() is None)
    others = {pid: name_of(pid) for pid in marked(run) if pid != launcher.pid}
    victim = moments.choice([launcher.pid, *others])
    if victim == launcher.pid:
        launcher.kill()
    else:
        os.kill(victim, signal.SIGKILL)
    code = launcher.wait()
    assert code != 0
    wait_for(lambda: marked(run) == [])
    return "the launcher" if victim == launcher.pid else f"{others[victim]} of the launcher"


def name_of(pid: int) -> str:
    """A rank, one of DeepSpeed's two launchers, or whatever else runs for the launcher."""
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    for word, name in (("--local_rank", "a rank"), ("deepspeed.launcher.launch", "launch.py"), ("plan", "the plan")):
        if any(argument.startswith(word) for argument in argv):
            return name
    return "the runner" if any(argument.endswith("/deepspeed") for argument in argv) else "another process"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_moments(
    stage: int, asynchronous: bool, tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Every restart goes on from the newest checkpoint, and that is whole; the end is that of a run never touched, bit
    for bit: weights, masters, moments, generators, and every loss and norm on the way."""
    tables = tiny_recipe(
        model={"d_model": 64, "n_heads": 1, "n_layers": 1, "d_ff": 96, "seq_len": 32},
        batch={"micro_batch_size": 4},
        schedule={"max_steps": ENDLESS, "min_lr": 1e-3, "peak_lr": 1e-3},  # no rate depends on where the end is
        evaluation={"every_steps": EVALUATION_STEPS, "max_tokens": 1024},
        checkpoint={"every_steps": EVERY_STEPS, "keep_last": 2, "asynchronous": asynchronous},
        deepspeed={"config": f"ds_configs/zero{stage}.json"},
        precision={"accumulate": "bf16" if stage == 0 else "fp32"},
    )
    recipe, run, whole = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "whole"
    recipe.write_text(to_toml(parse_recipe(tables)))
    moments = random.Random(f"{SEED} {stage} {asynchronous}")
    phases: Counter[str] = Counter()
    for number in range(KILLS // len(STAGES)):
        before = newest_attempt(run)
        there = list_checkpoints(run / "checkpoints")
        launched = moments.random() < LAUNCHED
        victim = kill_launched(moments, recipe, run) if launched else kill_ranks(moments, tables, run)
        phase = phase_of(run, before)
        phases[phase] += 1
        if newest_attempt(run) > before:
            resumed = json.loads((run / "environment.json").read_text())["attempts"][-1]["resumed_from"]
            assert resumed == (str(there[-1]) if there else None)
        saved = list_checkpoints(run / "checkpoints")
        for path in saved:
            verify(path)
        assert not there or saved[-1].name >= there[-1].name, "the newest checkpoint was lost"
        print(f"ZeRO-{stage}, {number}: {victim}, {phase}, {saved[-1].name if saved else 'nothing saved'}", flush=True)
    print(f"ZeRO-{stage}, asynchronous {asynchronous}, seed {SEED}: {dict(sorted(phases.items()))}", flush=True)
    reached = newest_step(run) + MORE
    shorter = {**tables, "schedule": {**tables["schedule"], "max_steps": reached}}
    for path in (run, whole):
        assert run_ranks(2, train_case, shorter, path) == ["finished", "finished"]
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (run, whole))
    assert ours.name == theirs.name == f"step-{reached:08d}"
    assert_same_checkpoint(theirs, ours)
    assert not [entry for entry in (run / "checkpoints").iterdir() if not re.fullmatch(r"latest|step-\d+", entry.name)]
    for kind, figures in (("train", ("loss", "grad_norm", "lr", "tokens")), ("evaluation", ("source", "loss"))):
        expected = {(one["step"], one.get("source")): one for one in read_metrics(whole / "metrics.jsonl", kind)}
        records = [one for one in all_records(run / "metrics.jsonl") if one["kind"] == kind and one["step"] <= reached]
        assert {(one["step"], one.get("source")) for one in records} == expected.keys() != set()
        for one in records:
            for figure in figures:
                assert one[figure] == expected[one["step"], one.get("source")][figure], (one, figure)
