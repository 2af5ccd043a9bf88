"""metrics.jsonl: one record a line, appended to and never rewritten.

Every record carries `kind`, `step` and `attempt` (docs/formats.md says which kinds there are). After a resume the
replayed steps appear again with the next attempt's number, so nothing that was once reported is lost, and a reader
takes the last record of each step (`read_metrics`).

A full disk ends no run here: what a save that fails has filled it gives back. Records wait for that in main memory.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain.run_directory import now
from pretrain.writing import is_full


class MetricsLog:
    """Appends records to metrics.jsonl. Only the first rank makes one."""

    def __init__(self, path: Path, *, attempt: int, say: Callable[[str], None] = lambda message: None) -> None:
        self.attempt = attempt
        self._say = say
        self._path = path
        _end_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._lock = threading.Lock()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record, `values` in full precision, null where one is not finite (JSON has none). From any thread."""
        finite = {name: None if _is_not_finite(value) else value for name, value in values.items()}
        record = {"kind": kind, "step": step, "attempt": self.attempt, **finite, "at": now()}
        with self._lock:
            waited = bool(self._unwritten)
            self._unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
            is_written = self._append()
        if not is_written and not waited:
            self._say(f"warning: {self._path}: the disk is full: records wait in main memory until there is room")

    def close(self) -> None:
        with self._lock:
            is_written = self._append()
        if not is_written:
            lost = self._unwritten.count(b"\n")
            self._say(f"warning: {self._path}: the disk is full: {lost} of its records are lost")
        self._file.close()

    def _append(self) -> bool:
        """Write what is not yet written; False where the disk is full, perhaps within a line that goes on later."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not is_full(error):
                raise
        return not self._unwritten


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _end_torn_line(path: Path) -> None:
    """A kill can leave half a line at the end; begin the next record on a line of its own."""
    if path.exists() and path.stat().st_size > 0:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_metrics(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The records of one kind, in step order, the last attempt's where a step was run more than once.

    Evaluation records are told apart by their source as well. Half-written lines (a kill) are passed over.
    """
    latest: dict[tuple[int, str], dict[str, Any]] = {}
    for record in all_records(path):
        if record["kind"] == kind:
            latest[record["step"], record.get("source", "")] = record
    return [latest[key] for key in sorted(latest)]


def all_records(path: Path) -> list[dict[str, Any]]:
    """Every whole record, in the order written."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:  # empty, or cut short by a kill
            continue
    return records
