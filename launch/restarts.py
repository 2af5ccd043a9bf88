"""A run that fails starts again by itself, from its last whole checkpoint, and on the nodes that are left.

Not what would fail again at once: bad input, an attempt that made no step, two in a row that end at the same step. Not
what somebody wanted to end: a signal, `launch stop`. How often at most, the caller says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launch.command import Launch, own_hostfile
from launch.ending import BAD_INPUT, newest_attempt
from launch.errors import LaunchError
from launch.hints import RESUMES
from launch.hosts import Host, read_hostfile
from launch.remote import on_each
from launch.running import STOP_SIGNALS, run_once
from launch.saying import unfailing
from launch.status import RESTARTING, began, read, steps_made
from launch.where import Where

PAUSE_SECONDS = 3.0  # before the next start: a machine that goes down takes its services with it one by one
ANSWER_SECONDS = 15.0

# Prepares a launch on these hosts of the host file, () for all, in the order given; `again` where it is not the first.
Prepare = Callable[[Sequence[str], bool], Launch]


@dataclass(frozen=True)
class Elastic:
    """How many nodes a run may have."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Elastic:
        """MIN:MAX, or one number for both."""
        match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text, re.ASCII)
        numbers = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= numbers[0] <= numbers[1]:
            raise LaunchError(f"--elastic {text}: give the smallest and the largest number of nodes, as in 1:4")
        return cls(*numbers)


def wishes(where: Where, restarts: int, elastic: str | None) -> tuple[tuple[Host, ...], Elastic | None]:
    """The hosts of the host file, if there is one, and the limits that `elastic` tells. LaunchError: not to be had."""
    if where.node_rank is not None and (restarts or elastic is not None):
        option = "--restarts" if restarts else "--elastic"
        raise LaunchError(
            f"{option} is for one command that starts all nodes: with --node-rank, have what starts this command on "
            "each node start it again, or add --hostfile and leave out --node-rank"
        )
    if elastic is None:
        return (), None
    if where.hostfile is None:
        raise LaunchError(f"--elastic {elastic} chooses among the machines of a host file: add --hostfile FILE")
    return read_hostfile(where.hostfile), Elastic.parse(elastic)


def start(prepare: Prepare, hosts: Sequence[Host], elastic: Elastic | None, *, again: bool = False) -> Launch:
    """A launch on all hosts or, with `elastic`, on as many of those that answer as it may have and the batch allows.

    LaunchError: fewer answer than it must have; or the recipe allows none of the numbers of ranks.
    """
    if elastic is None:
        return prepare((), again)
    answers = on_each(hosts, ["true"], directory=Path.cwd(), environment={}, timeout=ANSWER_SECONDS)
    answering = [host.name for host in hosts if answers[host.name].ok]
    absent = [f"{name}: {answer.reason()}" for name, answer in answers.items() if not answer.ok]
    for reason in absent:
        _say(f"without {reason}")
    if len(answering) < elastic.least:
        raise LaunchError(
            f"{len(answering)} of {len(hosts)} hosts can be used and --elastic asks for at least {elastic.least}: "
            f"{'; '.join(absent) or 'the host file names no more'}"
        )
    refusal: LaunchError | None = None
    for count in range(min(elastic.most, len(answering)), elastic.least - 1, -1):
        try:
            return prepare(answering[:count], again)
        except LaunchError as error:  # ranks that do not divide the batch, or too little memory for so few
            _say(f"not on {count} node{'s' if count > 1 else ''}: {error}")
            refusal = refusal or error
    raise LaunchError(f"--elastic {elastic.least}:{elastic.most}: no number of nodes will do: {refusal}")


def run(
    prepare: Prepare,
    launch: Launch,
    hosts: Sequence[Host],
    environ: Mapping[str, str],
    started_at: float,
    *,
    restarts: int,
    elastic: Elastic | None,
) -> int:
    """Run `launch`, and again up to `restarts` times where it fails; the exit code of the last one.

    A signal between two starts means what it means within one: it is not started again. Before the first it ends this.
    """
    marker = launch.run_directory / RESTARTING
    failed_at: int | None = None  # the step at which the attempt before ended
    code: int | None = None
    previous = {number: signal.signal(number, _asked) for number in STOP_SIGNALS}
    try:
        for number in range(restarts + 1):
            before = newest_attempt(launch.run_directory)
            with own_hostfile(launch) as told:
                code, asked = run_once(told, environ, started_at)
            marker.unlink(missing_ok=True)
            if code == 0 or number == restarts:
                if code != 0 and restarts:
                    _say(f"no start is left: all {restarts} of --restarts are used")
                return code
            step = _step_of_a_failure(launch.run_directory, newer_than=before)
            reason = why_not(code, asked=asked, stop_file=launch.run_directory / "stop", step=step, failed_at=failed_at)
            if reason is not None:
                _say(f"not started again: {reason}")
                return code
            failed_at = step
            _say(f"start {number + 1} of {restarts} again, behind code {code} at step {step}")
            marker.write_text(json.dumps(_restarting(newest_attempt(launch.run_directory))) + "\n")
            time.sleep(PAUSE_SECONDS)
            launch = start(prepare, hosts, elastic, again=True)
            if (launch.run_directory / "stop").exists():
                _say("not started again: it was asked to stop")
                return code
            print(launch.to_text(), file=unfailing(sys.stdout), flush=True)
    except (LaunchError, OSError) as error:
        if code is None:
            raise
        _say(f"error: it cannot start again: {error}")
        return code
    except _Asked as asked_by:
        if code is None:
            return 128 + asked_by.number
        _say(f"not started again: it was asked to stop, by {asked_by.name}; {RESUMES}")
        return code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        with suppress(OSError):
            marker.unlink(missing_ok=True)
    raise AssertionError("the last start returns")


class _Asked(KeyboardInterrupt):
    """A signal came while no rank ran."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _asked(number: int, frame: FrameType | None) -> None:
    """A handler of signals, for one: what follows it is short."""
    for one in STOP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise _Asked(number)


def _restarting(attempt: int) -> dict[str, Any]:
    """What the marker says: behind which attempt, and whose word it is, so that others see whether that one lives."""
    return {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid(), "start_ticks": began(os.getpid())}


def why_not(code: int, *, asked: bool, stop_file: Path, step: int | None, failed_at: int | None) -> str | None:
    """Why a run that ended with this code is not started again; None where it is.

    `step`: at which it ended, None where it made none; `failed_at`: where the attempt before ended, if that failed too.
    """
    if code == BAD_INPUT:
        return "what it was given is wrong, and would be again"
    if asked or stop_file.exists():
        return "it was asked to stop"
    if step is None:
        return "it made no step, so the same would happen again"
    if step == failed_at:
        return f"it failed at step {step} twice in a row, and would again"
    return None


def _step_of_a_failure(run_directory: Path, newer_than: int) -> int | None:
    """At which step the newest attempt ended, if it is newer than this one and made a step."""
    number = newest_attempt(run_directory)
    if number <= newer_than or not steps_made(run_directory, number):
        return None
    return read(run_directory).step


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
