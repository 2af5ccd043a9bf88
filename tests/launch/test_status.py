"""`launch status`: what it makes of what a run leaves in its directory."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.status import LATE_SECONDS, SILENT_SECONDS, Status, began, read, steps_made
from launch.stop import _do
from tests.command_line import run_command

NOW = 1_800_000_000.0


def instant(seconds_ago: float) -> str:
    return datetime.fromtimestamp(NOW - seconds_ago, UTC).isoformat(timespec="milliseconds")


class Run:
    """A run directory as the trainer writes it, of two ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for folder in ("alive", "receipts"):
            (path / folder).mkdir(parents=True)

    def begins(self, attempt: int = 1, world_size: int = 2, seconds_ago: float = 100.0) -> None:
        record = {"attempt": attempt, "world_size": world_size, "started_at": instant(seconds_ago), "hostname": "a"}
        before = [{**record, "attempt": number} for number in range(1, attempt)]
        (self.path / "environment.json").write_text(json.dumps({"attempts": [*before, record]}))

    def says(self, state: str, step: int, attempt: int = 1, seconds_ago: float = 1.0, **more: Any) -> None:
        record = {"state": state, "attempt": attempt, "global_step": step, "max_steps": 100, **more}
        (self.path / "status.json").write_text(json.dumps({**record, "updated_at": instant(seconds_ago)}))

    def lives(self, rank: int, doing: str = "trains", age: float = 0.5, since: float = 1.0, **more: Any) -> None:
        sign = {
            "attempt": 1, "rank": rank, "host": f"node-{rank}", "pid": 100 + rank, "start_ticks": 7, "step": 5,
            "every_seconds": 1.0, "doing": doing, "since": NOW - since, "at": NOW - age, **more,
        }  # fmt: skip
        (self.path / "alive" / f"rank-{rank:05d}.json").write_text(json.dumps(sign).ljust(383) + "\n")

    def ends(self, rank: int, state: str, reason: str | None = None, attempt: int = 1) -> None:
        receipt = {"attempt": attempt, "rank": rank, "state": state, "global_step": 5, "reason": reason}
        receipt["resume"] = None if state == "finished" else "the command"
        (self.path / "receipts" / f"rank-{rank:05d}.json").write_text(json.dumps(receipt))

    def trains(self, *steps: int, attempt: int = 1, seconds: float = 2.0) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            for step in steps:
                record = {"kind": "train", "step": step, "attempt": attempt, "loss": 9.0 - step / 100}
                file.write(json.dumps({**record, "tokens_per_second": 512.0, "step_seconds": seconds}) + "\n")

    def status(self) -> Status:
        return read(self.path, NOW)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_run_that_went_back_is_where_it_is_now(run: Run) -> None:
    run.begins()
    run.lives(0)
    run.lives(1)
    run.trains(1, 2, 3, 4, 5)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "roll_back", "step": 2, "attempt": 1}) + "\n")
    run.says("running", 2)
    assert run.status().step == 2
    run.trains(3)
    assert run.status().step == 3


def test_a_run_that_trains(run: Run) -> None:
    run.begins()
    run.trains(1, seconds=500.0)  # an attempt's first step takes long, and counts for no rate
    run.trains(2, 3, 4, 5)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "att')  # a kill, or one that is just written
    run.says("running", 5)
    run.lives(0)
    run.lives(1)
    status = run.status()
    assert (status.state, status.step, status.max_steps, status.loss) == ("running", 5, 100, 8.95)
    assert status.tokens_per_second == pytest.approx(512.0)
    assert status.seconds_left == pytest.approx(95 * 2.0)
    assert status.sign_seconds == pytest.approx(0.5)
    assert status.late == ()
    assert [(one.host, one.pid, one.state) for one in status.ranks] == [
        ("node-0", 100, "trains"),
        ("node-1", 101, "trains"),
    ]
    assert "step 5 of 100, 5.0%" in status.to_text()
    run.says("running", 5, seconds_ago=10.0, seconds_left=250.0)  # it knows of evaluations to come
    assert run.status().seconds_left == pytest.approx(240.0)


@pytest.mark.parametrize(
    "sign, words",
    [
        ({"age": LATE_SECONDS + 5}, "no sign of life for 20 s"),
        ({"doing": "waits for data", "since": LATE_SECONDS + 75}, "has been waiting for data for 1 min 30 s"),
        (None, "no sign of life of it is seen here"),
    ],
)
def test_who_is_late(run: Run, sign: dict[str, Any] | None, words: str) -> None:
    run.begins()
    run.says("running", 5)
    run.lives(0)
    if sign is not None:
        run.lives(1, **sign)
    status = run.status()
    assert [one.rank for one in status.late] == [1]
    assert f"late      rank 1 of {'an unknown host' if sign is None else 'node-1'}: {words}" in status.to_text()


def test_where_ranks_sign_less_often_they_are_late_later(run: Run) -> None:
    run.begins()
    run.says("running", 5, seconds_ago=300.0)
    for rank in (0, 1):
        run.lives(rank, age=100.0, every_seconds=41.0)
    assert run.status().late == ()
    assert run.status().state == "running"


def test_a_run_that_was_killed_says_running_and_is_silent(run: Run) -> None:
    run.begins(seconds_ago=1000.0)
    run.says("running", 5, seconds_ago=SILENT_SECONDS + 1)
    for rank in (0, 1):
        run.lives(rank, age=SILENT_SECONDS + 1)
    status = run.status()
    assert (status.state, status.late) == ("silent", ())
    assert "no rank gives a sign of life" in status.to_text()


def test_how_ranks_ended(run: Run) -> None:
    run.begins()
    run.says("failed", 5)
    run.lives(1)
    run.ends(0, "failed", "OSError: no space")
    status = run.status()
    assert (status.state, status.resume) == ("failed", "the command")
    assert [one.state for one in status.ranks] == ["failed", "no receipt"]
    assert "failed: OSError: no space" in status.to_text()


def test_a_status_that_could_not_be_written_is_made_up_by_receipts(run: Run) -> None:
    run.begins()
    run.says("running", 5, seconds_ago=1000.0)
    for rank in (0, 1):
        run.ends(rank, "stopped", "SIGTERM")
    assert run.status().state == "stopped"


def test_an_attempt_that_starts_has_nothing_of_the_one_before(run: Run) -> None:
    run.begins(attempt=2, seconds_ago=1.0)
    run.says("failed", 5)
    run.lives(0)
    run.ends(1, "failed")
    run.trains(4, 5)
    status = run.status()
    assert (status.state, status.step, status.tokens_per_second) == ("starting", 0, None)
    assert [one.state for one in status.ranks] == ["no sign", "no sign"]
    assert steps_made(run.path, 1)
    assert not steps_made(run.path, 2)


def test_one_that_is_about_to_start_again(run: Run) -> None:
    run.begins()
    run.says("failed", 5)
    (run.path / "restarting").write_text('{"attempt": 1}')
    os.utime(run.path / "restarting", (NOW - 5, NOW - 5))
    assert run.status().state == "restarting"
    os.utime(run.path / "restarting", (NOW - 5000, NOW - 5000))
    assert run.status().state == "failed"
    # On this machine it is seen whether who said so lives.
    said = {"attempt": 1, "host": os.uname().nodename, "pid": os.getpid(), "start_ticks": began(os.getpid())}
    for ticks, state in ((said["start_ticks"], "restarting"), (1, "failed")):
        (run.path / "restarting").write_text(json.dumps({**said, "start_ticks": ticks}))
        os.utime(run.path / "restarting", (NOW - 5, NOW - 5))
        assert run.status().state == state


def test_on_another_machine_than_the_first_it_is_what_its_own_ranks_say(run: Run) -> None:
    """With nothing shared, neither status nor metrics nor other ranks' receipts are there."""
    run.begins(seconds_ago=1000.0)
    record = json.loads((run.path / "environment.json").read_text())
    record["attempts"][-1] |= {"first_host": "node-0", "hostname": "node-1"}
    (run.path / "environment.json").write_text(json.dumps(record))
    run.lives(1)
    assert (run.status().state, run.status().step) == ("running", 5)
    run.lives(1, age=900.0)
    assert run.status().state == "silent"
    run.ends(1, "finished")
    status = run.status()
    assert (status.state, status.step, [one.rank for one in status.ranks]) == ("finished", 5, [1])
    told = status.to_text()
    assert "receipts lie on node-0: ask there" in told
    assert "rank 0 on node-0" in told
    stopped = run_command("launch", "stop", run.path)
    assert (stopped.returncode, "is not running: attempt 1 finished at step 5" in stopped.stdout) == (0, True)
    assert "receipts lie on node-0" in stopped.stdout


def test_several_ranks_save_and_one_saves() -> None:
    assert [_do(state, 2) for state in ("saves", "waits for data", "no sign", "finished")] == [
        "save", "wait for data", "no sign", "finished"
    ]  # fmt: skip
    assert _do("saves", 1) == "saves"


def test_the_command(run: Run) -> None:
    nothing = run_command("launch", "status", run.path)
    assert (nothing.returncode, len(nothing.stderr.splitlines())) == (2, 1)
    assert nothing.stderr.startswith(f"error: {run.path} is no run directory")
    run.begins()
    run.says("finished", 100)
    for rank in (0, 1):
        run.ends(rank, "finished")
    told = run_command("launch", "status", run.path, "--json")
    assert told.returncode == 0, told.stderr
    assert [json.loads(told.stdout)[key] for key in ("state", "world_size", "late")] == ["finished", 2, []]
    run.says("failed", 5)
    assert run_command("launch", "status", run.path).returncode == 1


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nothing was started there"):
        read(tmp_path / "nowhere")


WRONG: tuple[Any, ...] = (None, -1, 0, 1e308, float("nan"), "x", "", [], {}, True, 10**30, "\ud800", [1])


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every field in JSON."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*before, key)
            yield from places(value[key], (*before, key))


def test_damaged_files_are_left_out_or_one_line(run: Run) -> None:
    run.begins()
    run.says("running", 3)
    run.lives(0)
    run.trains(3)
    run.ends(1, "failed", "OSError")
    names = ("environment.json", "status.json", "alive/rank-00000.json", "metrics.jsonl", "receipts/rank-00001.json")
    refused = []
    for path in (run.path / name for name in names):
        whole = path.read_bytes()
        damaged = [b"", b"null", b"5", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b'{"step": ' + b"9" * 5000 + b"}"]
        for place in places(json.loads(whole)):
            for wrong in WRONG:
                record = one = copy.deepcopy(json.loads(whole))
                for key in place[:-1]:
                    one = one[key]
                one[place[-1]] = wrong
                damaged.append(json.dumps(record).encode())
        for content in damaged:
            path.write_bytes(content)
            try:
                status = run.status()
            except LaunchError as error:
                refused.append(str(error))
            else:
                assert status.to_text()
                assert json.loads(json.dumps(status.to_dict(), allow_nan=False))["ranks"]
        path.write_bytes(whole)
    assert len(refused) > 20
    assert all(error.startswith(f"{run.path}/environment.json is damaged") for error in refused)
    assert run.status().state == "running"
