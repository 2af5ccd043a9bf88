"""The checkpoints of a run, seen from outside: what each is, whether it is whole, why it stays; and removing the rest.

Only `remove_others` changes anything, and it needs the run's lock: no run is at work there meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pretrain.checkpoint import (
    BEST,
    best_of,
    have_named,
    list_checkpoints,
    measured_at,
    read_manifest,
    remove,
    saved,
    step_of,
    verify,
    which_part,
)
from pretrain.retention import Reason, Retention
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError

OnBytes = Callable[[int, int], None]  # hears how many bytes have been verified, of how many


@dataclass(frozen=True)
class Entry:
    """One checkpoint. `state` is "unverified" where its files were not compared with their hashes."""

    path: Path
    step: int
    written_at: str  # when its manifest was, UTC
    bytes: int | None  # of all files that the manifest lists
    loss: float | None  # of the step before it, in training
    heldout_loss: float | None  # of all sources, where that step was evaluated
    healthy: bool | None  # loss, weights and moments are finite, and no alarm was on; None: not recorded
    state: Literal["whole", "unverified", "damaged"]
    fault: str | None = None  # what is damaged
    latest: bool = False
    best: bool = False  # the lowest held-out loss of all healthy ones here: RUN/checkpoints/best
    kept: tuple[Reason, ...] = ()
    alarms: tuple[str, ...] = ()  # that were on when it was saved, of those that say something of the weights
    part: str | None = None  # "1 of 2" where other machines hold the rest of it

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.path.name, **{name: value for name, value in vars(self).items() if name != "path"}}


def run_directory(path: Path) -> RunDirectory:
    """The run at `path`. Raises CheckpointError where none is."""
    run = RunDirectory(path)
    if not run.recipe.is_file() or not run.checkpoints.is_dir():
        raise CheckpointError(
            f"{path} is no run directory (it lacks recipe.toml or checkpoints/): name one, as runs/mini"
        )
    return run


def entries(
    run: RunDirectory,
    retention: Retention,
    *,
    check: Literal["none", "newest", "all"] = "none",
    on_bytes: OnBytes = lambda done, total: None,
) -> list[Entry]:
    """All checkpoints of a run, oldest first, and why `retention` keeps each.

    check: which are verified by their hashes: none; all; or, newest first, those up to one that is whole and healthy.
    What is found to be damaged counts for nothing: it keeps no other out, and is not kept for any reason.
    """
    latest = _latest(run)
    found = {}
    for path in list_checkpoints(run.checkpoints):
        with suppress(FileNotFoundError):  # removed meanwhile by the run itself
            found[path] = _look(path, latest)
    to_check = [path for path in reversed(found) if check != "none" and found[path].state != "damaged"]
    sizes = {path: found[path].bytes or 0 for path in to_check}
    done = 0
    for number, path in enumerate(to_check):
        total = sum(sizes.values()) if check == "all" else done + sizes[path]

        def count(read: int, total: int = total) -> None:
            nonlocal done
            done += read
            on_bytes(done, total)

        try:
            verify(path, count)
            found[path] = replace(found[path], state="whole")
        except CheckpointError as error:
            done = sum(sizes[one] for one in to_check[: number + 1])
            if not path.exists():
                del found[path]
                continue
            found[path] = replace(found[path], state="damaged", fault=str(error))
        if check == "newest" and found[path].state == "whole" and found[path].healthy is not False:
            break
    sound = [path for path, entry in found.items() if entry.state != "damaged"]
    reasons, best = retention.reasons([saved(path) for path in sound]), best_of(sound)
    return [replace(entry, kept=reasons.get(entry.step, ()), best=path == best) for path, entry in found.items()]


def _look(path: Path, latest: str | None) -> Entry:
    """A checkpoint without reading its large files."""
    written = (path / "manifest.json").stat().st_mtime
    written_at = datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")
    try:
        manifest = read_manifest(path)
        size = sum(record["bytes"] for record in manifest["files"].values())
        measured = measured_at(path)
    except CheckpointError as error:
        return Entry(path, step_of(path), written_at, None, None, None, None, "damaged", str(error))
    loss, heldout_loss = (_number(measured.get(name)) for name in ("loss", "heldout_loss"))
    alarms = tuple(map(str, measured.get("alarms") or ()))
    healthy = None if "healthy" not in measured else measured["healthy"] is True and not alarms
    return Entry(
        path, step_of(path), written_at, size, loss, heldout_loss, healthy, "unverified",
        latest=path.name == latest, alarms=alarms, part=which_part(manifest),
    )  # fmt: skip


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _latest(run: RunDirectory) -> str | None:
    file = run.checkpoints / "latest"
    return file.read_text(errors="replace").strip() if file.is_file() else None


def set_aside(run: RunDirectory) -> list[Path]:
    """What a resume found damaged, not finite or in parts and renamed; nothing reads or removes it."""
    return sorted(
        path for why in ("damaged", "unhealthy", "incomplete") for path in run.checkpoints.glob(f"step-*.{why}*")
    )


def superfluous(found: Sequence[Entry]) -> list[Entry]:
    """Those that nothing keeps. Damaged ones are not among them: a file of theirs may be restored from a copy."""
    return [entry for entry in found if not entry.kept and entry.state != "damaged"]


def remove_others(
    run: RunDirectory,
    retention: Retention,
    *,
    check: Literal["newest", "all"] = "newest",
    on_bytes: OnBytes = lambda done, total: None,
) -> tuple[list[Entry], list[Entry]]:
    """Remove the checkpoints that `retention` does not keep; gives those that stay and those that went.

    Raises RunDirectoryError while a run is at work there, and CheckpointError, with nothing removed, where none of the
    healthy ones is whole: one that is not may be the best there is.
    """
    try:
        run.lock()
    except RunDirectoryError:
        raise RunDirectoryError(f"{run.path} has a run at work: nothing is removed; stop it, or wait for it") from None
    found = entries(run, retention, check=check, on_bytes=on_bytes)
    going = superfluous(found)
    if going and not any(entry.state == "whole" and entry.healthy is not False for entry in found):
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {run.checkpoints} is whole and healthy: nothing is removed"
        )
    best = best_of(entry.path for entry in found if entry not in going and entry.state != "damaged")
    have_named(run.checkpoints, BEST, None if best is None else best.name)
    for entry in going:
        remove(entry.path)
    return [entry for entry in found if entry not in going], going
