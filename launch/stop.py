"""Stop a run from anywhere that sees its directory: ask, wait and tell, and end it when a deadline has passed.

Asking is a file named `stop`, which all ranks heed together: they save the last whole step and end. What is still
there at the deadline gets SIGKILL: the very processes that gave the run's signs of life, known by host, number and the
instant they began at, here directly and on other nodes over ssh. Whatever started them notices and cleans up.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.errors import LaunchError
from launch.remote import is_here, run_on
from launch.status import RankStatus, Status, duration, read

LOOK_SECONDS = 0.5
TELL_SECONDS = 5.0  # between lines that say the same
RECEIPT_SECONDS = 10.0  # behind a run's last word: so long its ranks take to leave their receipts
SSH_SECONDS = 20.0
# Arguments are PID:TICKS. proc(5): the 22nd field of stat, the 20th behind the name, is when the process began.
KILL = """for one; do
pid=${one%:*}
case $pid in 0 | 1 | '' | *[!0-9]*) continue ;; esac
began=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d ' ' -f 20)
[ -n "$began" ] && [ "$began" = "${one#*:}" ] && kill -KILL "$pid" && echo "$pid"
done
exit 0"""


def stop(run: Path, deadline_seconds: float | None) -> int:
    """Stop the run in this directory. 0: it has stopped or finished, or was not running; 1: it failed, or had to be
    ended. LaunchError: there is no run, or such a deadline."""
    if deadline_seconds is not None and not 0 <= deadline_seconds < math.inf:
        raise LaunchError(f"--deadline {deadline_seconds:g}: must be seconds, 0 or more")
    first = status = read(run)
    if not first.lives:
        return _not_running(first, deadline_seconds)
    (run / "stop").touch()
    _say(f"asked {run}, {first.state}, to save and stop, at step {first.step:,}")
    began, told, told_at, ended_at = time.monotonic(), "", 0.0, None
    while True:
        status, now = read(run), time.monotonic()
        if status.attempt != first.attempt:  # begun by --restarts meanwhile: it hears of no earlier wish
            first = status
            (run / "stop").touch()
        if not status.lives:
            ended_at = ended_at or now
            if all(one.ended for one in status.ranks) or now > ended_at + RECEIPT_SECONDS:
                return _ended(status, now - began)
        elif deadline_seconds is not None and now > began + deadline_seconds:
            _say(f"not stopped within {duration(deadline_seconds)}: {_doing(status)}")
            return _end(status)
        words = _doing(status)
        if words != told or now > told_at + TELL_SECONDS:
            _say(f"{duration(now - began)}: {words}")
            told, told_at = words, now
        time.sleep(LOOK_SECONDS)


def _not_running(status: Status, deadline_seconds: float | None) -> int:
    if status.state != "silent":
        _say(f"{status.run} is not running: attempt {status.attempt} {_how(status)} at step {status.step:,}")
        _say_where(status)
        return 0
    if deadline_seconds is not None:
        return _end(status)
    print(
        f"error: {status.run}: no rank gives a sign of life that could heed a wish: it was killed, or it hangs; "
        "with --deadline 0 what is left of its processes is ended",
        file=sys.stderr,
    )
    return 1


def _ended(status: Status, seconds: float) -> int:
    well = status.state in ("stopped", "finished") and all(one.state in ("stopped", "finished") for one in status.ranks)
    _say(f"{status.run} {_how(status)} at step {status.step:,}, {duration(seconds)} after it was asked")
    for one in status.ranks:
        if one.state not in ("stopped", "finished"):
            _say(f"rank {one.rank} {one.state}" + (f": {one.reason}" if one.reason else ""))
    if status.resume is not None and well:
        _say(f"resume with {status.resume}")
    _say_where(status)
    return 0 if well else 1


def _say_where(status: Status) -> None:
    if status.first_host is not None:
        _say(status.elsewhere)


def _how(status: Status) -> str:
    return "fell silent" if status.state == "silent" else status.state


def _doing(status: Status) -> str:
    """The step, and what ranks are doing, those that do the same together."""
    groups: dict[str, list[int]] = {}
    for one in status.ranks:
        groups.setdefault(one.state, []).append(one.rank)
    doing = ", ".join(f"{_numbers(ranks)}: {_do(state, len(ranks))}" for state, ranks in groups.items())
    return f"step {status.step:,}; {doing}"


def _do(state: str, ranks: int) -> str:
    """What a rank does, of several: "saves" of one, "save" of two."""
    return state if ranks == 1 else re.sub(r"^(start|wait|train|evaluate|save|end)s\b", r"\1", state)


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]}"
    return f"{len(ranks)} ranks"


def _end(status: Status) -> int:
    """End every rank's process that is still the one that gave a sign of life. Gives 1."""
    by_host: dict[str, list[RankStatus]] = {}
    nameless = []
    for one in status.ranks:
        if one.host is not None and one.pid is not None and one.start_ticks is not None and not one.ended:
            by_host.setdefault(one.host, []).append(one)
        elif not one.ended:
            nameless.append(one.rank)
    commands = {
        host: ["sh", "-c", KILL, "sh", *(f"{one.pid}:{one.start_ticks}" for one in ranks)]
        for host, ranks in by_host.items()
    }
    answers = run_on(commands, directory=Path("/"), environment={}, timeout=SSH_SECONDS)
    for host, answer in answers.items():
        ranks = by_host[host]
        killed = [one.rank for one in ranks if str(one.pid) in answer.stdout.split()]
        gone = [one.rank for one in ranks if one.rank not in killed]
        where = "here" if is_here(host) else f"on {host}"
        if not answer.ok:
            _say(f"{_numbers([one.rank for one in ranks])} {where}: not reached to be ended: {answer.reason()}")
            continue
        if killed:
            _say(f"{_numbers(killed)} {where} ended by SIGKILL; the last checkpoint is what it resumes from")
        if gone:
            _say(f"{_numbers(gone)} {where}: nothing left to end")
    if nameless:
        _say(f"{_numbers(nameless)}: no sign of life names a host and a process there that could be ended from here")
    return 1


def _say(text: str) -> None:
    print(text, flush=True)
