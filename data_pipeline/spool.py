"""Standard input kept on disk while `prepare` works on it: cut into units, read again, continued after a kill.

The bytes lie in `.prepare/stdin/`, in a file named by their SHA-256, until the collection is whole; the plan keeps size
and SHA-256 for good. Whoever starts the same command again pipes the same bytes in, or none at all.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_pipeline.corpus import FileFacts, Found, standard_input
from data_pipeline.durable import file_sha256, publish, temporary_name
from data_pipeline.shards import MANIFEST_NAME, PLAN_FORMAT, PLAN_PATH, read_manifest
from data_pipeline.unit import PrepareError, Workplace

_READ_BYTES = 1 << 20
_REPORT_SECONDS = 10.0
_TAG = "sha256="


class _Content(NamedTuple):
    size: int
    sha256: str


def spool_folder(place: Workplace) -> Path:
    """Where standard input is kept."""
    return place.state / "stdin"


def keep_stdin(place: Workplace, kind: str) -> Found:
    """Standard input as a file that can be read again and again. Only the one writer may call this.

    PrepareError: there is none, or it is not what the work was begun with.
    """
    folder = spool_folder(place)
    folder.mkdir(exist_ok=True)
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()
    kept = next(iter(folder.iterdir()), None)
    begun_with = _Content(kept.stat().st_size, kept.stem.partition(".")[0]) if kept else _planned(place)
    is_whole = (place.out / MANIFEST_NAME).exists()
    temporary = temporary_name(folder / kind)
    try:
        with nullcontext() if kept or is_whole else temporary.open("xb") as sink:
            given = _take_stdin(sink)
        if given.size == 0:
            given = _without_input(place, begun_with, kept, is_whole)
        if begun_with not in (None, given):
            raise PrepareError(
                f"{place.out}: it was begun with other bytes on standard input (SHA-256 {begun_with.sha256[:12]}, now "
                f"{given.sha256[:12]}); delete that folder to start anew, or choose another --out"
            )
        file = folder / f"{given.sha256}.{kind}"
        if not (kept or is_whole):
            publish(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    piece, _ = standard_input(kind)
    piece = replace(piece, path=kept or file, tag=_TAG + given.sha256)
    return Found(piece, FileFacts(piece.shown, given.size, tag=piece.tag))


def _planned(place: Workplace) -> _Content | None:
    """What the plan says of standard input, if the work was begun with it."""
    if not (place.out / PLAN_PATH).exists():
        return None
    plan, _ = read_manifest(place.out / PLAN_PATH, PLAN_FORMAT)
    files: list[dict[str, Any]] = [file for source in plan["sources"].values() for file in source["files"]]
    tagged = ((file["size"], file.get("tag") or "") for file in files)
    return next((_Content(size, tag.removeprefix(_TAG)) for size, tag in tagged if tag.startswith(_TAG)), None)


def _without_input(place: Workplace, begun_with: _Content | None, kept: Path | None, is_whole: bool) -> _Content:
    """What to go on with where nothing is piped in."""
    if begun_with is None:
        raise PrepareError("standard input is empty; pipe a corpus into it")
    if kept and file_sha256(kept) != begun_with.sha256:
        raise PrepareError(f"{kept}: damaged; delete it, and pipe the same input in again")
    if not (kept or is_whole):
        raise PrepareError(f"{place.out}: what came on standard input is not kept there any more; pipe it in again")
    return begun_with


def _take_stdin(sink: BinaryIO | None) -> _Content:
    """Read standard input to its end, into a synced file where one is given. A terminal counts as empty."""
    digest, size = hashlib.sha256(), 0
    if sys.stdin is None or sys.stdin.isatty():  # None: as `<&-` leaves it
        return _Content(0, "")
    said_at = time.monotonic()
    while chunk := sys.stdin.buffer.read(_READ_BYTES):
        digest.update(chunk)
        size += len(chunk)
        if sink is not None:
            sink.write(chunk)
        if time.monotonic() - said_at >= _REPORT_SECONDS:
            said_at = time.monotonic()
            print(f"prepare: {size / 1e6:,.0f} MB came on standard input", file=sys.stderr, flush=True)
    if sink is not None:
        sink.flush()
        os.fsync(sink.fileno())
    return _Content(size, digest.hexdigest())
