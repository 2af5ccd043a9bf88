"""What a run is doing, from what it leaves in its directory: how far it is, how fast, who is late, how its ranks ended.

Nothing is started or asked: status.json, metrics.jsonl, the signs of life and the receipts say it, also of a run on
other machines that share the directory. Their clocks are taken to agree within seconds (`launch check` looks at that).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch import records
from launch.records import ENDED, Record
from launch.remote import is_here

LATE_SECONDS = 15.0  # without a sign of life, or waiting for data while the others have theirs
SILENT_SECONDS = 60.0  # without a sign of any rank: it is gone
SIGNS_MISSED = 5  # at least; where many ranks share a file system, each gives one less often
RECENT_STEPS = 20  # whose mean is the rate
RESTARTING = "restarting"  # a file in the run directory: `launch run` is about to start it again
RESTART_SECONDS = 600.0  # so long that is believed, where it cannot be seen whether it lives
LIVES = ("starting", "running", "restarting")


@dataclass(frozen=True)
class RankStatus:
    """One rank of the last attempt: how it ended, or its last sign of life."""

    rank: int
    host: str | None
    pid: int | None
    start_ticks: int | None  # when the process began: with its number it is no other
    state: str  # stopped, finished or failed as its receipt says, else what it was doing; "no sign" where it left none
    step: int | None
    since_seconds: float | None  # how long it has been doing that
    sign_seconds: float | None  # the age of its last sign of life
    patience_seconds: float  # without one, that mean nothing yet
    reason: str | None  # what it was stopped by, or what failed
    late: str | None  # why the others wait for it

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class Status:
    """A run's last attempt."""

    run: Path
    state: str  # starting, running, restarting, stopped, finished, failed, or silent: it said nothing of its end
    attempt: int
    world_size: int
    started_at: str
    hostname: str | None
    step: int
    max_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    sign_seconds: float | None  # the age of the newest sign of life of any rank
    ranks: tuple[RankStatus, ...]
    resume: str | None
    first_host: (
        str | None
    )  # the machine that has status and metrics, where that is another: then `ranks` are those here

    @property
    def lives(self) -> bool:
        return self.state in LIVES

    @property
    def late(self) -> tuple[RankStatus, ...]:
        return tuple(one for one in self.ranks if one.late is not None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "state": self.state,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "started_at": self.started_at,
            "hostname": self.hostname,
            "global_step": self.step,
            "max_steps": self.max_steps,
            "loss": self.loss,
            "tokens_per_second": self.tokens_per_second,
            "seconds_left": self.seconds_left,
            "sign_seconds": self.sign_seconds,
            "late": [one.rank for one in self.late],
            "ranks": [vars(one) for one in self.ranks],
            "resume": self.resume,
            "first_host": self.first_host,
        }

    def to_text(self) -> str:
        lines = [
            f"run       {self.run}",
            f"state     {self._state_in_words()}",
            f"progress  {self._progress()}",
            f"rate      {self._rate()}",
        ]
        if self.first_host is not None:
            lines.append(f"note      {self.elsewhere}")
        lines += [f"late      rank {one.rank} of {one.host or 'an unknown host'}: {one.late}" for one in self.late]
        if self.resume is not None:
            lines.append(f"resume    {self.resume}")
        return "\n".join([*lines, "", *_table(self.ranks)])

    @property
    def elsewhere(self) -> str:
        return (
            f"status, rate and all receipts lie on {self.first_host}: ask there; here are this machine's ranks alone, "
            "which share no run directory with it"
        )

    def _state_in_words(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        words = f"{self.state}: attempt {self.attempt}, {ranks}, begun {self.started_at}"
        words += "" if self.hostname is None else f", rank 0 on {self.hostname}"
        if self.state == "silent":
            age = (
                "none was ever given" if self.sign_seconds is None else f"the last is {duration(self.sign_seconds)} old"
            )
            words += f"; no rank gives a sign of life, {age}: it was killed, or its machines are gone"
        return words

    def _progress(self) -> str:
        if not self.max_steps:
            return f"step {self.step:,}"
        return f"step {self.step:,} of {self.max_steps:,}, {self.step / self.max_steps:.1%}"

    def _rate(self) -> str:
        if self.first_host is not None:
            return f"told on {self.first_host}"
        if self.tokens_per_second is None:
            return "no step of this attempt was measured yet"
        words = f"{self.tokens_per_second:,.0f} tokens/s over the last steps"
        words += "" if self.loss is None else f", loss {self.loss:.4f}"
        return words if self.seconds_left is None else f"{words}, about {duration(self.seconds_left)} of steps left"


def read(run: Path, now: float | None = None) -> Status:
    """The status of the last attempt at `now` (seconds since the epoch). LaunchError: there is no run, or a damaged
    one."""
    now = time.time() if now is None else now
    last = records.newest_attempt(run)
    attempt = last["attempt"]
    said = records.status(run, attempt) or {"state": "starting"}  # it has begun, and says nothing yet
    receipts = records.receipts(run, attempt)
    ranks = tuple(_ranks(last["world_size"], records.signs(run, attempt), receipts, now))
    first_host = last["first_host"]
    if first_host is not None:
        ranks = tuple(one for one in ranks if one.ended or one.sign_seconds is not None)
    signs = [one.sign_seconds for one in ranks if one.sign_seconds is not None]
    ages = [*signs, *([now - records.seconds(said["updated_at"])] if said.get("updated_at") is not None else [])]
    silent = min([*ages, now - records.seconds(last["started_at"])]) > max(
        [SILENT_SECONDS, *(one.patience_seconds for one in ranks)]
    )
    state = _state(said["state"], ranks, silent=silent)
    if first_host is not None and state == "starting" and any(one.step for one in ranks):
        state = "running"
    steps = _recent_steps(run, attempt)
    known = [one.step or 0 for one in ranks] if first_host is not None else []
    step = max([said.get("global_step", 0), *known, *(one["step"] for one in steps)])
    seconds = sum(one["step_seconds"] for one in steps)
    tokens = sum(one["tokens_per_second"] * one["step_seconds"] for one in steps)
    max_steps = said.get("max_steps")
    if state == "failed" and _restarts(run / RESTARTING, attempt, now):
        state = "restarting"
    if state not in ("starting", "running"):
        ranks = tuple(replace(one, late=None, state=one.state if one.ended else "no receipt") for one in ranks)
    return Status(
        run=run,
        state=state,
        attempt=attempt,
        world_size=last["world_size"],
        started_at=last["started_at"],
        hostname=first_host or last["hostname"],
        step=step,
        max_steps=max_steps,
        loss=steps[-1]["loss"] if steps else None,
        tokens_per_second=tokens / seconds if seconds else None,
        seconds_left=_seconds_left(said, now, steps, step) if state == "running" else None,
        sign_seconds=min(ages, default=None),
        ranks=ranks,
        resume=next((one["resume"] for one in receipts.values() if one["resume"]), None),
        first_host=first_host,
    )


def _seconds_left(said: Record, now: float, steps: Sequence[Record], step: int) -> float | None:
    """As the run says, which counts evaluations and saves to come; else by the pace of its last steps."""
    if said.get("seconds_left") is not None and said.get("updated_at") is not None:
        return max(float(said["seconds_left"]) - (now - records.seconds(said["updated_at"])), 0.0)
    if not steps or not said.get("max_steps"):
        return None
    mean = sum(float(one["step_seconds"]) for one in steps) / len(steps)
    return (int(said["max_steps"]) - step) * mean


def _restarts(marker: Path, attempt: int, now: float) -> bool:
    """Whether a `launch run` that lives, or that said so not long ago on another machine, starts it again behind this
    attempt."""
    said = records.checked(records.parsed(marker), {"attempt": records.whole(1)}, records.PROCESS)
    if said is None or said["attempt"] != attempt:
        return False
    if said["pid"] is not None and said["host"] is not None and is_here(said["host"]):
        return said["start_ticks"] in (None, began(said["pid"]))
    with suppress(OSError):
        return now - marker.stat().st_mtime < RESTART_SECONDS
    return False


def began(pid: int) -> int | None:
    """When a process of this machine began, in ticks of its clock; None where there is none. proc(5): field 22 of stat,
    the 20th behind the name."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return None


def _state(said: str, ranks: tuple[RankStatus, ...], *, silent: bool) -> str:
    """What it says, unless its ranks know better: a run that was killed went on saying "running"."""
    if said in ENDED:
        return said
    if ranks and all(one.ended for one in ranks):
        return "failed" if any(one.state == "failed" for one in ranks) else ranks[0].state
    return "silent" if silent else said


def _ranks(world_size: int, signs: dict[int, Record], receipts: dict[int, Record], now: float) -> list[RankStatus]:
    found = []
    for rank in range(world_size):
        sign, receipt = signs.get(rank, {}), receipts.get(rank)
        age = now - sign["at"] if sign else None
        since = now - sign["since"] if sign else None
        patience = max(LATE_SECONDS, SIGNS_MISSED * (sign.get("every_seconds") or 0.0))
        state = sign.get("doing", "no sign") if receipt is None else receipt["state"]
        found.append(
            RankStatus(
                rank=rank,
                host=sign.get("host"),
                pid=sign.get("pid"),
                start_ticks=sign.get("start_ticks"),
                state=state,
                step=sign.get("step") if receipt is None else receipt["global_step"],
                since_seconds=since if receipt is None else None,
                sign_seconds=age,
                patience_seconds=patience,
                reason=None if receipt is None else receipt["reason"],
                late=_late(state, age, since, patience) if receipt is None else None,
            )
        )
    return found


def _late(doing: str, age: float | None, since: float | None, patience: float) -> str | None:
    if age is None or since is None:
        return "no sign of life of it is seen here: it gave none, or its machine does not share this directory"
    if age > patience:
        return f"no sign of life for {duration(age)}: it hangs, was killed, or its machine is gone"
    if doing == "waits for data" and since > LATE_SECONDS:
        return f"has been waiting for data for {duration(since)}: look at the disk or network that it reads from"
    return None


def _recent_steps(run: Path, attempt: int) -> list[Record]:
    """The last steps of this attempt, but for its first, which takes longer."""
    steps = records.steps(run, attempt)[-RECENT_STEPS - 1 :]
    return steps[1:] or steps


def steps_made(run: Path, attempt: int) -> bool:
    """Whether this attempt has made a step, as far as it can be seen from here."""
    return bool(records.steps(run, attempt))


def _table(ranks: tuple[RankStatus, ...]) -> list[str]:
    rows = [("rank", "host", "pid", "step", "state", "sign of life")]
    for one in ranks:
        state = one.state if one.since_seconds is None else f"{one.state}, {duration(one.since_seconds)}"
        state += "" if one.reason is None else f": {one.reason}"
        age = "none" if one.sign_seconds is None else f"{duration(one.sign_seconds)} ago"
        rows.append((str(one.rank), one.host or "?", _shown(one.pid), _shown(one.step), state, age))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    ages = max(len(row[5]) for row in rows)
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5].ljust(ages), row[4]])
        for row in rows
    ]


def _shown(value: int | None) -> str:
    return "?" if value is None else str(value)


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
