"""`launch stop`: a real run is asked and waits; one that hangs is ended, and nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.status import began, read
from launch.stop import KILL, stop
from pretrain.config import parse_recipe
from pretrain.runtime import Ranks
from pretrain.train import train
from tests.ranks import live_ranks, results_of


def trains(ranks: Ranks, tables: dict[str, Any], run: Path) -> str:
    return train(parse_recipe(tables), run, ranks)


def wait_for_step(run: Path) -> None:
    sign = run / "alive" / "rank-00000.json"
    while not sign.exists() or not json.loads(sign.read_bytes())["step"]:
        time.sleep(0.05)  # pytest ends a test that hangs


def test_it_asks_and_waits_and_ends_what_hangs(
    tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    tables = tiny_recipe(schedule={"max_steps": 10**6}, evaluation={"every_steps": 10**6})
    with live_ranks(1, trains, tables, run) as started:
        wait_for_step(run)
        assert stop(run, None) == 0
        assert results_of(started) == ["stopped"]
    said = capsys.readouterr().out
    assert f"asked {run}, running, to save and stop" in said
    assert "resume with the same command" in said.splitlines()[-1]
    assert stop(run, None) == 0
    assert "is not running: attempt 1 stopped" in capsys.readouterr().out

    run = tmp_path / "hung"
    with live_ranks(1, trains, tables, run) as started:
        wait_for_step(run)
        (process, _), pid = started[0], json.loads((run / "alive" / "rank-00000.json").read_bytes())["pid"]
        assert process.pid == pid
        os.kill(pid, signal.SIGSTOP)
        assert stop(run, 1.0) == 1
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert "rank 0 here ended by SIGKILL" in capsys.readouterr().out


def test_a_number_that_is_another_process_now_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sign of life names this very process, but another start of it: then it must survive."""
    (tmp_path / "alive").mkdir()
    attempt = {"attempt": 1, "world_size": 1, "started_at": "2020-01-01T00:00:00+00:00"}
    (tmp_path / "environment.json").write_text(json.dumps({"attempts": [attempt]}))
    sign = {
        "attempt": 1, "rank": 0, "host": os.uname().nodename, "pid": os.getpid(), "start_ticks": 1, "step": 3,
        "doing": "trains", "since": 0.0, "at": 0.0,
    }  # fmt: skip
    (tmp_path / "alive" / "rank-00000.json").write_text(json.dumps(sign))
    assert read(tmp_path).state == "silent"
    assert stop(tmp_path, None) == 1
    assert "with --deadline 0" in capsys.readouterr().err
    assert not (tmp_path / "stop").exists()
    assert stop(tmp_path, 0.0) == 1
    assert "rank 0 here: nothing left to end" in capsys.readouterr().out


def test_a_forged_sign_of_life_ends_nobody_and_hides_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 is what it says; whatever else a sign says that somebody forged, the other process lives."""
    (tmp_path / "alive").mkdir()
    here = os.uname().nodename
    with (
        subprocess.Popen(["sleep", "60"], process_group=0) as rank,
        subprocess.Popen(["sleep", "60"], process_group=0) as other,
    ):
        ticks = began(other.pid)
        forged = [
            {"pid": -other.pid, "start_ticks": ""}, {"pid": f"9999999 {other.pid}", "start_ticks": ""},
            {"pid": -other.pid, "start_ticks": ticks}, {"pid": f"{other.pid}", "start_ticks": ticks},
            {"pid": True, "start_ticks": ticks}, {"pid": float(other.pid), "start_ticks": ticks},
            {"pid": other.pid, "start_ticks": None}, {"pid": other.pid, "start_ticks": 0},
            *({"pid": other.pid, "start_ticks": ticks, "host": host} for host in (5, [here], None, "\0", "\ud800")),
        ]  # fmt: skip
        attempt = {"attempt": 1, "world_size": 1 + len(forged), "started_at": "2020-01-01T00:00:00+00:00"}
        (tmp_path / "environment.json").write_text(json.dumps({"attempts": [attempt]}))
        true = {"pid": rank.pid, "start_ticks": began(rank.pid)}
        for number, told in enumerate([true, *forged]):
            sign = {
                "attempt": 1,
                "rank": number,
                "host": here,
                "step": 3,
                "doing": "trains",
                "since": 0,
                "at": 0,
                **told,
            }
            (tmp_path / "alive" / f"rank-{number:05d}.json").write_text(json.dumps(sign))
        assert stop(tmp_path, 0.0) == 1
        assert rank.wait() == -signal.SIGKILL
        words = [f"{-other.pid}:", f"0:{began(other.pid)}", f"{other.pid}:", "1:"]
        subprocess.run(["sh", "-c", KILL, "sh", *words], check=True)
        assert other.poll() is None
        other.kill()
    said = capsys.readouterr().out
    assert "rank 0 here ended by SIGKILL" in said
    assert f"{len(forged)} ranks: no sign of life names a host and a process there" in said


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -1.0])
def test_a_deadline_that_is_none(deadline: float, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--deadline .*: must be seconds"):
        stop(tmp_path, deadline)
