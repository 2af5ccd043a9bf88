"""The run directory: every path in it, its lock, its attempts, its status.

runs/NAME/
  recipe.toml        the resolved recipe
  deepspeed.json     the resolved DeepSpeed configuration
  environment.json   one entry an attempt (a start of the command): versions, commit, ranks, what it resumed from
  tokenizer/         a copy: the run can generate and evaluate on its own
  metrics.jsonl      one object a line, appended, never rewritten
  tensorboard/
  checkpoints/       step-00001000/ (its manifest.json written last), latest, best
  status.json        what the run is doing: state, attempt, global_step
  alarms/            step-00000123.jsonl …: the documents of steps with alarms (see alarm_batch.py), and the stacks of
                     ranks that hung (see watchdog.py)
  roll_backs.json    which alarms the run went back for, and which steps it leaves out since (see left_out.py)
  receipts/          rank-00000.json …: how each rank of the last attempt ended (see receipts.py)
  alive/             rank-00000.json …: each rank's sign of life, while it runs (see alive.py)
  logs/              attempt-3/rank-00000.log …: what each rank said, of a run that `launch run` started (see keeper.py)
  stop               create it, and the run saves its last whole step and stops
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

from data_pipeline.durable import write_file
from pretrain.config import PROJECT_ROOT

RECORDED_PACKAGES = ("torch", "deepspeed", "numpy", "sentencepiece", "pydantic", "safetensors")


# What a run last said of itself. "running" also stands behind a run that was killed: see updated_at.
RunState = Literal["running", "stopped", "finished", "failed"]


class RunDirectoryError(ValueError):
    """The run directory cannot be used as asked; the message says why and what to do."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not this run's; the message says what to do."""


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`: at any kill point either the old or the whole new content stands there."""
    write_file(path, text.encode())


def now() -> str:
    """This instant, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def refuse_unusable(path: Path) -> None:
    """Raise RunDirectoryError where no run directory can be made at `path`, or written to. Leaves nothing behind."""
    nearest = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise RunDirectoryError(f"{nearest} is no folder, so a run directory cannot be {path}: choose another --run")
    try:
        Path(tempfile.mkdtemp(prefix=".seen-", dir=nearest)).rmdir()
    except OSError as error:
        raise RunDirectoryError(
            f"{nearest} cannot be written to ({error.strerror or error}), so a run directory cannot be {path}: "
            "choose another --run"
        ) from None


@dataclass
class RunDirectory:
    path: Path
    ROLL_BACKS: ClassVar[str] = "roll_backs.json"

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self._lock: IO[str] | None = None

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def deepspeed(self) -> Path:
        return self.path / "deepspeed.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def alarms(self) -> Path:
        return self.path / "alarms"

    @property
    def roll_backs(self) -> Path:
        return self.path / self.ROLL_BACKS

    @property
    def receipts(self) -> Path:
        return self.path / "receipts"

    def receipt(self, rank: int) -> Path:
        return self.receipts / f"rank-{rank:05d}.json"

    @property
    def signs(self) -> Path:
        return self.path / "alive"

    def sign(self, rank: int) -> Path:
        return self.signs / f"rank-{rank:05d}.json"

    def log(self, attempt: int, rank: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}" / f"rank-{rank:05d}.log"

    @property
    def stop_file(self) -> Path:
        return self.path / "stop"

    def lock(self) -> None:
        """Take the folder for this run; the kernel gives the lock back when the process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"{self.path} is in use by another run; wait for it, or choose another --run"
            ) from None

    def attempts(self) -> list[dict[str, Any]]:
        """What environment.json records. Raises RunDirectoryError where it is damaged."""
        if not self.environment.exists():
            return []
        try:
            attempts: list[dict[str, Any]] = list(json.loads(self.environment.read_bytes())["attempts"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RunDirectoryError(
                f"{self.environment} is damaged: move it away, and the run goes on without its record of earlier starts"
            ) from None
        return attempts

    def begin_attempt(self, facts: Mapping[str, Any], attempt: int | None = None) -> int:
        """Record a start of the command; returns its number, which follows unless it is given, from 1."""
        attempts = self.attempts()
        attempt = attempt or len(attempts) + 1
        attempts.append({"attempt": attempt, "started_at": now(), **facts, **software()})
        write_text(self.environment, json.dumps({"attempts": attempts}, indent=2) + "\n")
        return attempt

    def write_status(
        self,
        state: RunState,
        *,
        attempt: int,
        global_step: int,
        max_steps: int,
        seconds_left: float | None = None,
        alarm: Mapping[str, Any] | None = None,
    ) -> None:
        """`seconds_left` until it is done, where that can be told; `alarm`: the last one of this attempt."""
        record = {
            "state": state,
            "attempt": attempt,
            "global_step": global_step,
            "max_steps": max_steps,
            "updated_at": now(),
            **({} if seconds_left is None else {"seconds_left": seconds_left}),
            **({} if alarm is None else {"alarm": alarm}),
        }
        write_text(self.status, json.dumps(record) + "\n")


def software() -> dict[str, Any]:
    """Versions and the code's commit: what a person needs to run the same thing again."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"versions": versions, "git_commit": git_commit(), "hostname": platform.node()}


def git_commit() -> str | None:
    """The commit of this code, with `-dirty` behind it where files differ from it; None outside a git checkout."""
    try:
        described = subprocess.run(
            ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
