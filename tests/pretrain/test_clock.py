"""Every moment of an attempt belongs to one part of it, pauses apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from pretrain.clock import PAUSE_SECONDS, Clock, Pauses, fitted, warm_up_steps
from tests.ranks import root


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_all_time_belongs_to_a_part() -> None:
    now = Time()
    clock = Clock(now=now)
    now.at += 1  # start
    for _ in range(2):
        with clock.step():
            for part, seconds in (("data", 0.5), ("forward", 2), ("backward", 4), ("forward", 1), ("optimizer", 0.25)):
                now.at += seconds
                clock.lap(part)
            now.at += 0.125
        assert clock.step_seconds == {"data": 0.5, "forward": 3, "backward": 4, "optimizer": 0.25, "other": 0.125}
        assert clock.last_step == 7.875
        now.at += 8  # logs
    with clock.during("save"):
        now.at += 16
    with suppress(KeyError), clock.during("evaluation"):
        now.at += 32
        raise KeyError
    now.at += 64
    parts = clock.laps()
    assert parts == {
        "start": 1, "data": 1, "forward": 6, "backward": 8, "optimizer": 0.5, "evaluation": 32, "save": 16,
        "other": 0.25 + 16 + 64, "paused": 0,
    }  # fmt: skip
    assert sum(parts.values()) == clock.wall_seconds == now.at - 100


def test_a_step_that_is_given_up_belongs_to_what_was_done() -> None:
    now = Time()
    clock = Clock(now=now)
    with suppress(KeyError), clock.step():
        now.at += 1
        clock.lap("data")
        now.at += 2
        raise KeyError
    assert (clock.seconds["data"], clock.seconds["other"]) == (1, 2)


def test_a_pause_is_no_time_of_the_part_in_which_it_fell() -> None:
    now, cpu = Time(), Time()
    with Clock(now=now, pauses=Pauses(now, cpu)) as clock, clock.step():
        now.at += PAUSE_SECONDS / 2
        clock.lap("data")
        now.at += 3600
        clock.lap("forward")
        now.at, cpu.at = now.at + 10, cpu.at + 9  # at work
        clock.lap("backward")
    assert clock.seconds["paused"] == 3600
    assert clock.step_seconds["forward"] == 0
    assert clock.step_seconds["backward"] == 10
    assert sum(clock.seconds.values()) == clock.wall_seconds


STOPPED = """
import json, sys
from pretrain.clock import Clock
with Clock() as clock:
    with clock.during("data"):
        print("ready", flush=True)
        sys.stdin.readline()
    print(json.dumps({"wall": clock.wall_seconds, **clock.seconds}))
"""


def test_a_process_that_was_stopped_tells_it_from_waiting() -> None:
    """It waits for a word all the time; only while it is stopped does it not look at the clock."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], cwd=root(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * PAUSE_SECONDS)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate("\n")
    parts = json.loads(said)
    wall = parts.pop("wall")
    assert 2 * PAUSE_SECONDS <= parts["paused"] <= wall
    assert sum(parts.values()) == pytest.approx(wall)


def test_laps_of_a_gpu_add_up_to_the_time_of_the_host() -> None:
    laps = [("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 2.0), ("optimizer", 0.5)]
    assert fitted(laps, 10.0) == {"data": 1, "forward": 4, "backward": 4, "optimizer": 1.0, "other": 0}
    # Two seconds of them were a pause: that fell into one of the longest parts.
    assert sum(fitted(laps, 7.5).values()) == 7.5
    assert min(fitted(laps, 7.5).values()) >= 0
    assert fitted(laps, 7.5)["data"] == 1
    assert sum(fitted(laps, 0.0).values()) == 0
    assert fitted([], 3.0)["other"] == 3


@pytest.mark.parametrize(
    "paces, steps",
    [
        ([], 0), ([5.0], 0), ([9.0, 1.0], 1), ([1.0, 1.0, 1.0], 1), ([9.0, 3.0, 2.0, 1.0, 1.1, 0.9, 1.0], 3),
        ([9.0, 1.0, 1.0, 5.0, 1.0], 1), ([float(100 - step) for step in range(100)], 1),
        ([2.0 ** (30 - step) for step in range(40)], 20),
    ],
)  # fmt: skip
def test_warm_up_ends_where_steps_are_like_those_behind_them(paces: list[float], steps: int) -> None:
    assert warm_up_steps(paces) == steps
