"""The script of `launch slurm` in a real SLURM (tests/launch/slurm_cluster.py): `make slurm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pretrain.checkpoint import list_checkpoints, verify
from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import all_records, read_metrics
from tests.launch.slurm_cluster import ENDS, Cluster, Job, missing
from tests.launch.test_local import marked
from tests.ranks import root

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

ENDLESS = 10**6
TOO_EARLY = 10  # steps that a run must have made before it is disturbed: its last checkpoint is then not the last step


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lacking = missing()
    assert not lacking, f"this machine has no {', '.join(lacking)}: install slurm-wlm and munge (Debian's packages)"
    with Cluster(tmp_path_factory.mktemp("slurm")).running() as one:
        yield one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a name that a careless script falls over."""
    folder = tmp_path / 'it\'s a "run" $(touch x) 100%j'
    folder.mkdir()
    return folder


@pytest.fixture
def recipe(tiny_recipe: Callable[..., dict[str, Any]], folder: Path) -> Path:
    """Of a run without end, whose rate depends on no end either."""
    tables = tiny_recipe(
        schedule={"max_steps": ENDLESS, "peak_lr": 1e-3, "min_lr": 1e-3},
        evaluation={"every_steps": ENDLESS},
        checkpoint={"every_steps": ENDLESS},
    )
    path = folder / "a recipe.toml"
    path.write_text(to_toml(parse_recipe(tables)))
    return path


def ends_at(recipe: Path, step: int) -> None:
    text = recipe.read_text()
    assert f"max_steps = {ENDLESS}" in text
    recipe.write_text(text.replace(f"max_steps = {ENDLESS}", f"max_steps = {step}"))


def written(recipe: Path, run: Path, *options: str, ranks_per_node: int = 2) -> Path:
    """The script that the verb writes."""
    path = run.parent / f"{run.name}.sbatch"
    ranks = ["--ranks-per-node", ranks_per_node]
    argv = ["launch", "slurm", recipe, *ranks, "--run", run, "--output", path, *options]
    done = subprocess.run([sys.executable, "-m", *map(str, argv)], cwd=root(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return path


def steps(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    return [one["step"] for one in all_records(metrics) if one["kind"] == "train"] if metrics.exists() else []


def attempts(run: Path) -> list[dict[str, Any]]:
    record = run / "environment.json"
    return json.loads(record.read_text())["attempts"] if record.exists() else []


def wait_until_it_trains(job: Job, run: Path, attempt: int) -> None:
    """Until this attempt has made some steps."""
    metrics = run / "metrics.jsonl"

    def made() -> int:
        records = all_records(metrics) if metrics.exists() else []
        return sum(one["kind"] == "train" and one["attempt"] == attempt for one in records)

    while made() < TOO_EARLY:
        assert job.state not in ENDS, (job.facts(), logs(run))
        time.sleep(0.2)


def wait_for_restart(job: Job, number: int) -> None:
    """Until it is back in the queue for the so manieth time."""
    while job.restarts < number:
        assert job.state not in ENDS or job.restarts >= number, job.facts()
        time.sleep(0.2)
    job.wait_for("PENDING", "RUNNING")


def logs(run: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted((run / "logs").rglob("*.log")))


def log_of(job: Job, run: Path) -> str:
    return (run / "logs" / f"slurm-{job.number}.log").read_text()


def rank_log(job: Job, run: Path, start: int, rank: int = 0) -> str:
    return (run / "logs" / f"job-{job.number}-start-{start}" / f"rank-{rank:05d}.log").read_text()


def receipts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run / "receipts").iterdir())]


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint, which is whole."""
    newest = list_checkpoints(run / "checkpoints")[-1]
    verify(newest)
    return int(newest.name.removeprefix("step-"))


def test_disturbed_in_every_way_it_ends_with_the_weights_of_an_undisturbed_run(
    cluster: Cluster, recipe: Path, folder: Path
) -> None:
    """Its time limit, preemption with time to save, preemption without: each time it saves its last step, goes back
    into the queue, and resumes there."""
    run, whole = folder / "disturbed", folder / "whole"
    script = written(recipe, run, "--time", "60", "--signal-seconds", "50", "--partition", "graceful")
    job = cluster.submit(script)

    wait_until_it_trains(job, run, 1)  # the time limit comes near: SLURM signals, and the script puts it back
    hours, minutes, _ = job.facts()["RunTime"].split(":")
    cluster.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")
    wait_for_restart(job, 1)
    assert "stopped by SIGUSR1" in rank_log(job, run, 0)
    assert "back into the queue" in log_of(job, run)
    assert saved_step(run) == steps(run)[-1]
    cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")

    wait_until_it_trains(job, run, 2)  # preempted with time to save: SLURM signals the ranks, the script puts it back
    urgent = cluster.urgent()
    wait_for_restart(job, 2)
    urgent.wait_for("COMPLETED")
    assert "stopped by SIGTERM" in rank_log(job, run, 1)
    assert log_of(job, run).count("back into the queue") == 2
    assert saved_step(run) == steps(run)[-1]

    wait_until_it_trains(job, run, 3)
    cluster.ask("scontrol", "requeue", str(job.number))  # by an administrator
    wait_for_restart(job, 3)
    cluster.ask("scontrol", "update", f"JobId={job.number}", "Partition=main")
    assert "stopped by SIGTERM" in rank_log(job, run, 2)
    assert log_of(job, run).count("ended by SLURM") == 1

    wait_until_it_trains(job, run, 4)  # preempted without: ranks and script are ended, SLURM puts it back
    assert job.facts()["Partition"] == "main"
    urgent = cluster.urgent()
    wait_for_restart(job, 4)
    ends_at(recipe, saved_step(run) + 3)
    urgent.wait_for("COMPLETED")
    assert "stopped by SIGTERM" in rank_log(job, run, 3)
    assert log_of(job, run).count("ended by SLURM") == 2
    assert log_of(job, run).count("back into the queue") == 2
    assert saved_step(run) == steps(run)[-1]

    job.wait_for("COMPLETED")
    assert log_of(job, run).endswith("finished\n")
    assert [one["resumed_from"] is not None for one in attempts(run)] == [False, True, True, True, True]
    assert {one["world_size"] for one in attempts(run)} == {2}

    cluster.submit(written(recipe, whole)).wait_for("COMPLETED")
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (run, whole))
    assert ours.name == theirs.name
    weights = [load_file(path / "weights.safetensors") for path in (ours, theirs)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    losses = [[(one["step"], one["loss"]) for one in read_metrics(path / "metrics.jsonl")] for path in (run, whole)]
    assert losses[0] == losses[1] != []
    assert not (root() / "x").exists()
    assert not list(folder.glob("**/x"))


def test_two_nodes_are_as_one(cluster: Cluster, recipe: Path, folder: Path) -> None:
    """A rank on each, and both ranks on one: the same losses, bit for bit."""
    ends_at(recipe, 6)
    one, two = folder / "one", folder / "two"
    cluster.submit(written(recipe, one)).wait_for("COMPLETED")
    script = written(recipe, two, "--nodes", "2", "--partition", "both", ranks_per_node=1)
    job = cluster.submit(script)
    job.wait_for("COMPLETED")
    assert job.facts()["NumNodes"] == "2"
    assert [path.name for path in sorted((two / "logs" / f"job-{job.number}-start-0").iterdir())] == [
        "rank-00000.log", "rank-00001.log",
    ]  # fmt: skip
    losses = [[one["loss"] for one in read_metrics(path / "metrics.jsonl")] for path in (one, two)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_cancelled_it_has_saved_leaves_nothing_running_and_does_not_come_back(
    cluster: Cluster, recipe: Path, folder: Path
) -> None:
    run = folder / "run"
    script = written(recipe, run, "--env", "PASSED", "--env", f"MARK={folder}")
    job = cluster.submit(script, environment={"PASSED": "passed on", "HF_TOKEN": "a secret"})
    wait_until_it_trains(job, run, 1)
    pids = attempts(run)[0]["pids"]
    for rank, pid in enumerate(pids):
        environment = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
        )
        assert "HF_TOKEN" not in environment
        assert environment["PASSED"] == "passed on"
        numbers = [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        assert numbers == [str(rank), str(rank), "2", "2"]
    assert "a secret" not in script.read_text()
    assert "passed on" not in script.read_text()
    assert set(pids) <= set(marked(folder))
    cluster.ask("scancel", str(job.number))
    job.wait_for("CANCELLED")
    while marked(folder):
        time.sleep(0.2)
    assert [(one["state"], one["reason"]) for one in receipts(run)] == [("stopped", "SIGTERM")] * 2
    assert saved_step(run) == steps(run)[-1]
    assert (job.state, job.restarts) == ("CANCELLED", 0)


def test_the_stop_file_ends_it_for_good_and_the_same_script_goes_on(
    cluster: Cluster, recipe: Path, folder: Path
) -> None:
    run = folder / "run"
    script = written(recipe, run)
    job = cluster.submit(script)
    wait_until_it_trains(job, run, 1)
    (run / "stop").touch()
    job.wait_for("COMPLETED")
    assert job.restarts == 0
    assert "stopped by" in log_of(job, run)
    stopped_at = saved_step(run)
    assert stopped_at == steps(run)[-1]

    job = cluster.submit(script)
    wait_until_it_trains(job, run, 2)
    assert attempts(run)[1]["resumed_from"].endswith(f"step-{stopped_at:08d}")
    cluster.ask("scancel", "--signal=USR1", str(job.number))
    wait_for_restart(job, 1)
    (run / "stop").touch()  # while it waits to start again
    job.wait_for("COMPLETED")
    assert log_of(job, run).endswith("stop is there: not started again\n")
    assert len(attempts(run)) == 2


def test_a_failure_fails_the_job_with_its_reason_in_the_log(cluster: Cluster, recipe: Path, folder: Path) -> None:
    run = folder / "run"
    script = written(recipe, run)
    text = recipe.read_text()
    recipe.write_text(text.replace("peak_lr = ", "peek_lr = "))
    job = cluster.submit(script)
    job.wait_for("FAILED")
    assert job.restarts == 0
    assert "did you mean schedule.peak_lr?" in log_of(job, run)

    recipe.write_text(text)  # put right, and then one rank dies
    job = cluster.submit(script)
    wait_until_it_trains(job, run, 1)
    os.kill(attempts(run)[0]["pids"][1], 9)
    job.wait_for("FAILED")
    assert job.restarts == 0
    assert "task 1: Killed" in log_of(job, run)
    assert "error: a rank failed (srun: " in log_of(job, run)
