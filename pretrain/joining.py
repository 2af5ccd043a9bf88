"""Parts of checkpoints (see parts.py), copied to one machine, made whole: a checkpoint like any other, in its place.

Each checkpoint is joined on its own: one that lacks files, or is damaged, keeps none of the others from it. A kill at
any point leaves the part as it was, perhaps with files beside it that its manifest does not name: the manifest of the
whole replaces that of the part when everything is there, verified and on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.durable import file_sha256, publish, sync_folder, temporary_name
from pretrain.checkpoint import list_checkpoints, manifest_of, read_manifest, verify
from pretrain.parts import every_file
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError, write_text


@dataclass
class Joined:
    """The checkpoints that are whole now, oldest first, and of those that are not by name what keeps them from it."""

    whole: list[Path] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """A part, and where the files that it lacks are to be had: in these copies' folders, to be tried in their order."""

    path: Path
    every: Mapping[str, Any]
    sources: Mapping[str, Sequence[Path]]


def join(
    run: RunDirectory, others: Sequence[Path], on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> Joined:
    """Complete each part among the checkpoints of a run with the files that copies of other run directories hold.

    A part that no copy completes stays as it was. CheckpointError where that is all there is, RunDirectoryError while
    a run is at work there. `on_bytes` hears of bytes copied, of how many.
    """
    for other in others:
        if not (other / "checkpoints").is_dir():
            raise CheckpointError(f"--gather {other} is no copy of a run directory: it lacks checkpoints/")
    try:
        run.lock()
    except RunDirectoryError:
        raise RunDirectoryError(f"{run.path} has a run at work: nothing is joined; stop it, or wait for it") from None
    parts, joined = [], Joined()
    for path in list_checkpoints(run.checkpoints):
        try:
            if "part" in read_manifest(path):
                parts.append(_sources(path, others))
        except CheckpointError as error:
            joined.left[path.name] = str(error)
    total = sum(part.every[name]["bytes"] for part in parts for name in part.sources)
    done = 0
    for part in parts:
        try:
            _complete(part, _counted(lambda copied: on_bytes(copied, total), done))
            joined.whole.append(part.path)
        except CheckpointError as error:
            joined.left[part.path.name] = str(error)
        done += sum(part.every[name]["bytes"] for name in part.sources)
    if not parts and not joined.left:
        raise CheckpointError(f"{run.path} has no checkpoint that is a part of one: there is nothing to join")
    if not joined.whole:
        raise CheckpointError(list(joined.left.values())[-1])
    return joined


def _counted(on_bytes: Callable[[int], None], before: int) -> Callable[[int], None]:
    """What is to hear of some bytes behind those that were copied before."""
    return lambda copied: on_bytes(before + copied)


def _sources(path: Path, others: Sequence[Path]) -> _Part:
    """Where what a part lacks is to be had: in parts of the same save. CheckpointError where some of it is in none."""
    manifest = read_manifest(path)
    every, candidates, faults = every_file(manifest), {}, []
    for folder in [other / "checkpoints" / path.name for other in others]:
        if folder.is_dir():
            try:
                theirs = read_manifest(folder)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            if every_file(theirs) == every:
                candidates[folder] = theirs["files"]
    found = {
        name: [folder for folder, files in candidates.items() if name in files]
        for name in sorted(every.keys() - manifest["files"].keys())
    }
    missing = [name for name, folders in found.items() if not folders]
    if missing:
        hosts = ", ".join(manifest["part"]["hosts"])
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(every)} files, {missing[0]} among them: it was written on {hosts}; "
            f"give, with --gather, a copy of each one's run directory that holds {path.name}"
            + "".join(f"; {fault}" for fault in faults)
        )
    return _Part(path, every, found)


def _complete(part: _Part, on_bytes: Callable[[int], None]) -> None:
    """Make a part whole. CheckpointError, with the part as it was, where it or every copy of a file is damaged.

    `on_bytes` hears how many bytes have been copied.
    """
    verify(part.path)
    done = 0
    for name, folders in part.sources.items():
        _copy_first_good(name, folders, part, _counted(on_bytes, done))
        done += part.every[name]["bytes"]
    for folder in {(part.path / name).parent for name in part.every}:
        sync_folder(folder)
    write_text(part.path / "manifest.json", json.dumps(manifest_of(dict(sorted(part.every.items()))), indent=2))


def _copy_first_good(name: str, folders: Sequence[Path], part: _Part, on_bytes: Callable[[int], None]) -> None:
    faults = []
    for folder in folders:
        try:
            _copy(folder / name, part.path / name, part.every[name]["sha256"], on_bytes)
            return
        except CheckpointError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{folder / name} could not be copied: {error.strerror or error}")
    raise CheckpointError("; ".join(faults))


def _copy(source: Path, target: Path, sha256: str, on_bytes: Callable[[int], None]) -> None:
    copied = 0

    def count(read: int) -> None:
        nonlocal copied
        copied += read
        on_bytes(copied)

    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if file_sha256(temporary, count) != sha256:
            raise CheckpointError(f"{source} is damaged: its sha256 is not the recorded one")
        publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
