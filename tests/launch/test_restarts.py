"""`launch run --restarts --elastic`: what is started again, on which hosts; real runs are in test_two_nodes.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import restarts as restarts_of
from launch.command import Launch
from launch.errors import LaunchError
from launch.hosts import Host
from launch.restarts import Elastic, Prepare, run, start, why_not, wishes
from launch.status import RESTARTING, read
from launch.where import Where
from tests.command_line import run_command

HERE = Host("localhost", 2)
# Reserved by RFC 2606: no such name will ever resolve, so ssh says at once that it reaches nobody.
GONE = Host("gone.invalid", 2)


def prepared(only: Sequence[str], again: bool) -> Launch:
    """A launch on these hosts, where a batch of 8 can be divided among their ranks."""
    ranks = 2 * len(only)
    if 8 % ranks:
        raise LaunchError(f"8 is not a multiple of {ranks}")
    return Launch((), {}, Path("run"), ranks, {}, tuple(Host(name, 2) for name in only))


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"code": 1, "step": 7}, None),
        ({"code": 137, "step": 7, "failed_at": 5}, None),
        ({"code": 2, "step": 7}, "is wrong"),
        ({"code": 1, "step": 7, "asked": True}, "asked to stop"),
        ({"code": 1, "step": None}, "made no step"),
        ({"code": 1, "step": 7, "failed_at": 7}, "step 7 twice in a row"),
    ],
)
def test_what_would_fail_again_is_not_started_again(facts: dict[str, int], words: str | None, tmp_path: Path) -> None:
    reason = why_not(**{"asked": False, "stop_file": tmp_path / "stop", "failed_at": None, **facts})  # type: ignore[arg-type]
    assert (reason is None) if words is None else words in (reason or "")
    (tmp_path / "stop").touch()
    assert why_not(code=1, asked=False, stop_file=tmp_path / "stop", step=7, failed_at=None) == "it was asked to stop"


def test_limits() -> None:
    assert Elastic.parse("1:4") == Elastic(1, 4)
    assert Elastic.parse("3") == Elastic(3, 3)
    for text in ("4:1", "0:2", "a", "1:2:3", "", "-1:2", ":2"):
        with pytest.raises(LaunchError, match="as in 1:4"):
            Elastic.parse(text)


def test_only_hosts_that_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(prepared, (HERE, GONE), Elastic(1, 2)).hosts == (HERE,)
    assert "without gone.invalid: " in capsys.readouterr().err
    with pytest.raises(LaunchError, match=r"1 of 2 hosts can be used .* at least 2: gone\.invalid: "):
        start(prepared, (HERE, GONE), Elastic(2, 2))


def test_as_many_as_divide_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    names = [Host(name, 2) for name in ("localhost", "127.0.0.1", "127.0.0.2")]
    assert start(prepared, names, Elastic(1, 3)).ranks == 4
    assert "not on 3 nodes: 8 is not a multiple of 6" in capsys.readouterr().err
    assert start(prepared, names, Elastic(1, 1)).ranks == 2
    with pytest.raises(LaunchError, match="no number of nodes will do: 8 is not a multiple of 6"):
        start(prepared, names, Elastic(3, 3))


def test_without_limits_nobody_is_asked() -> None:
    launch = Launch((), {}, Path("run"), 2, {})
    assert start(lambda only, again: launch, (), None) is launch


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for where, restarts, elastic, words in [
        (Where(), 0, "1:2", "add --hostfile"),
        (Where(node_rank=0, nodes=2, master_addr="a"), 1, None, "--restarts is for one command"),
        (Where(node_rank=0, hostfile=tmp_path), 0, "1:2", "--elastic is for one command"),
    ]:
        with pytest.raises(LaunchError, match=words):
            wishes(where, restarts, elastic)
    done = run_command(
        "launch", "run", "pretrain/recipes/debug.toml", "--elastic", "2:1", "--hostfile", os.devnull, "--dry-run"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


FAILS = """import json, os, sys
from pathlib import Path
run = Path(sys.argv[1])
path = run / "environment.json"
attempts = json.loads(path.read_text())["attempts"] if path.exists() else []
number = len(attempts) + 1
attempt = {"attempt": number, "world_size": 1, "started_at": "2020-01-01T00:00:00+00:00"}
path.write_text(json.dumps({"attempts": [*attempts, attempt]}))
said = {"state": "failed", "attempt": number, "global_step": number, "max_steps": 9}
(run / "status.json").write_text(json.dumps(said))
step = {"kind": "train", "attempt": number, "step": number, "loss": 1.0, "step_seconds": 1.0, "tokens_per_second": 1.0}
with (run / "metrics.jsonl").open("a") as file:
    print(json.dumps(step), file=file)
os._exit(7)
"""


PLAN = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "tokens_per_step": 1, "global_batch_size": 1}


def failing(run_directory: Path) -> Launch:
    """A launch of one process that makes a step, and then fails."""
    return Launch((sys.executable, "-c", FAILS, str(run_directory)), {}, run_directory, 1, PLAN)


def restarted(launch: Launch, prepare: Prepare | None = None) -> int:
    return run(prepare or (lambda only, again: launch), launch, (), os.environ, 0.0, restarts=1, elastic=None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_between_two_starts_is_a_wish_to_stop(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_of, "PAUSE_SECONDS", 600.0)
    states = []

    def ask() -> None:
        while not (tmp_path / RESTARTING).exists() or not (tmp_path / RESTARTING).read_text().endswith("\n"):
            time.sleep(0.02)  # pytest ends a test that hangs
        states.append(read(tmp_path).state)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert restarted(failing(tmp_path)) == 7
    asking.join()
    assert states == ["restarting"]
    assert not (tmp_path / RESTARTING).exists()
    assert read(tmp_path).state == "failed"
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    said = capsys.readouterr().err
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"not started again: it was asked to stop, by {name}; the same command resumes" in said


@pytest.mark.parametrize("error", [LaunchError("no"), OSError("no"), RuntimeError("no")])
def test_whatever_goes_wrong_between_two_starts_leaves_no_marker(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts_of, "PAUSE_SECONDS", 0.0)

    def prepare(only: Sequence[str], again: bool) -> Launch:
        assert (tmp_path / RESTARTING).exists()
        raise error

    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError):
            restarted(failing(tmp_path), prepare)
    else:
        assert restarted(failing(tmp_path), prepare) == 7
    assert not (tmp_path / RESTARTING).exists()


def test_once_it_lives_again_no_marker_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts_of, "PAUSE_SECONDS", 0.0)
    assert restarted(failing(tmp_path)) == 7
    assert read(tmp_path).attempt == 2
    assert not (tmp_path / RESTARTING).exists()
