"""What launch reads of a run directory: what the trainer wrote, and what may be half written, damaged or forged.

A record is given if every field that it must have is what it must be, and is none otherwise: others have to suffice.
A field that it may lack is None where it is not what it must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.errors import LaunchError
from launch.hosts import NAME

LARGEST = 2**53  # of any number: what a float holds exactly
MOST_RANKS = 10**6
METRICS_BYTES = 64 * 2**10  # of the end of metrics.jsonl, which hold the steps that a rate is made of
ENDED = ("stopped", "finished", "failed")

Record = dict[str, Any]
Kind = Callable[[Any], bool]


def whole(least: int, most: int = LARGEST) -> Kind:
    """Whole numbers from `least` to `most`."""
    return lambda value: type(value) is int and least <= value <= most


def number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST  # no NaN either


def amount(value: Any) -> bool:
    return number(value) and value >= 0


def text(value: Any) -> bool:
    return isinstance(value, str)


def instant(value: Any) -> bool:
    """What `seconds` takes."""
    try:
        seconds(value)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def host(value: Any) -> bool:
    """A name that ssh takes for nothing else."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def one_of(*words: str) -> Kind:
    return lambda value: isinstance(value, str) and value in words


PROCESS: Mapping[str, Kind] = {"host": host, "pid": whole(2), "start_ticks": whole(1)}  # kill(2): 0, 1, -N are others
ATTEMPT: Mapping[str, Kind] = {"attempt": whole(1), "world_size": whole(1, MOST_RANKS), "started_at": instant}
STATUS: Mapping[str, Kind] = {"attempt": whole(1), "state": one_of("running", *ENDED), "global_step": whole(0)}
SIGN: Mapping[str, Kind] = {
    "attempt": whole(1), "rank": whole(0), "doing": text, "since": number, "at": number,
}  # fmt: skip
WHOSE: Mapping[str, Kind] = {"attempt": whole(1), "rank": whole(0)}
RECEIPT: Mapping[str, Kind] = {**WHOSE, "state": one_of(*ENDED)}
STEP: Mapping[str, Kind] = {
    "kind": one_of("train"), "attempt": whole(1), "step": whole(0), "loss": number, "step_seconds": amount,
    "tokens_per_second": amount,
}  # fmt: skip
GONE_BACK: Mapping[str, Kind] = {"kind": one_of("roll_back"), "attempt": whole(1), "step": whole(0)}


def newest_attempt(run: Path) -> Record:
    """The attempt that began last. LaunchError: none was started there, or it cannot be told."""
    path = run / "environment.json"
    if not path.exists():
        raise LaunchError(
            f"{run} is no run directory: nothing was started there (no environment.json); if it was started "
            "just now, wait for its plan"
        )
    said = parsed(path)
    attempts = said.get("attempts") if isinstance(said, dict) else None
    last = (
        checked(attempts[-1], ATTEMPT, {"hostname": text, "first_host": text})
        if isinstance(attempts, list) and attempts
        else None
    )
    if last is None:
        raise LaunchError(f"{path} is damaged, its last attempt cannot be read: bring it back from a copy of the run")
    return last


def status(run: Path, attempt: int) -> Record | None:
    """What status.json says of this attempt."""
    may = {"max_steps": whole(0), "updated_at": instant, "seconds_left": amount}
    said = checked(parsed(run / "status.json"), STATUS, may)
    return said if said is not None and said["attempt"] == attempt else None


def signs(run: Path, attempt: int) -> dict[int, Record]:
    """The ranks' signs of life, by rank."""
    return _by_rank(run / "alive", attempt, SIGN, {"step": whole(0), "every_seconds": amount, **PROCESS})


def receipts(run: Path, attempt: int) -> dict[int, Record]:
    """How ranks ended, by rank."""
    return _by_rank(run / "receipts", attempt, RECEIPT, {"global_step": whole(0), "reason": text, "resume": text})


def steps(run: Path, attempt: int) -> list[Record]:
    """The attempt's steps at the end of metrics.jsonl, in their order; those that a roll back went behind are none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - METRICS_BYTES, 0))
        lines = file.read().splitlines()
    found: list[Record] = []
    for line in map(decoded, lines):  # half lines too, by where reading began or by a kill
        made, gone_back = checked(line, STEP), checked(line, GONE_BACK)
        if made is not None and made["attempt"] == attempt:
            found.append(made)
        elif gone_back is not None and gone_back["attempt"] == attempt:
            found = [one for one in found if one["step"] <= gone_back["step"]]
    return found


def checked(value: Any, must: Mapping[str, Kind], may: Mapping[str, Kind] | None = None) -> Record | None:
    """The fields of a record, None where it is none."""
    if not isinstance(value, dict) or not all(fits(value.get(name)) for name, fits in must.items()):
        return None
    others = {name: value.get(name) if fits(value.get(name)) else None for name, fits in (may or {}).items()}
    return {name: value[name] for name in must} | others


def parsed(path: Path) -> Any:
    """What a JSON file holds, None where it holds none or cannot be read."""
    try:
        return decoded(path.read_bytes())
    except OSError:
        return None


def decoded(source: bytes) -> Any:
    """What JSON means, None where it is none, or nested too deep."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return None


def seconds(timestamp: str) -> float:
    """Since the epoch. ValueError, TypeError, OverflowError: no instant."""
    return datetime.fromisoformat(timestamp).timestamp()


def _by_rank(folder: Path, attempt: int, must: Mapping[str, Kind], may: Mapping[str, Kind]) -> dict[int, Record]:
    found = (checked(parsed(path), must, may) for path in sorted(folder.glob("rank-*.json")))
    return {one["rank"]: one for one in found if one is not None and one["attempt"] == attempt}
