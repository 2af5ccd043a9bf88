"""Parts of checkpoints (see parts.py), copied to one machine, made whole: a checkpoint like any other, in its place.

A kill at any point leaves the part as it was, perhaps with files beside it that its manifest does not name: the
manifest of the whole replaces that of the part when everything is there, verified and on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.durable import file_sha256, publish, sync_folder, temporary_name
from pretrain.checkpoint import list_checkpoints, manifest_of, read_manifest, verify
from pretrain.parts import every_file
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError, write_text


def join(
    run: RunDirectory, others: Sequence[Path], on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Complete each part among the checkpoints of a run with the files that copies of other run directories hold.

    Gives those that are whole now. Raises CheckpointError, with the part as it was, where one lacks files or a file is
    damaged, RunDirectoryError while a run is at work there. `on_bytes` hears of bytes copied, of how many.
    """
    for other in others:
        if not (other / "checkpoints").is_dir():
            raise CheckpointError(f"--gather {other} is no copy of a run directory: it lacks checkpoints/")
    try:
        run.lock()
    except RunDirectoryError:
        raise RunDirectoryError(f"{run.path} has a run at work: nothing is joined; stop it, or wait for it") from None
    parts = [path for path in list_checkpoints(run.checkpoints) if "part" in read_manifest(path)]
    if not parts:
        raise CheckpointError(f"{run.path} has no checkpoint that is a part of one: there is nothing to join")
    found = {path: _sources(path, others) for path in parts}
    total = sum(read_manifest(source)["files"][name]["bytes"] for files in found.values() for name, source in files)
    done = 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        on_bytes(done, total)

    for path, files in found.items():
        verify(path)
        every = every_file(read_manifest(path))
        for name, source in files:
            _copy(source / name, path / name, every[name]["sha256"], count)
        for folder in {(path / name).parent for name in every}:
            sync_folder(folder)
        write_text(path / "manifest.json", json.dumps(manifest_of(dict(sorted(every.items()))), indent=2))
    return parts


def _sources(path: Path, others: Sequence[Path]) -> list[tuple[str, Path]]:
    """What a part lacks: each file with the part of the same save that has it. CheckpointError where none has."""
    manifest = read_manifest(path)
    every = every_file(manifest)
    candidates = {}
    for folder in [other / "checkpoints" / path.name for other in others]:
        if folder.is_dir():
            theirs = read_manifest(folder)
            if every_file(theirs) == every:
                candidates[folder] = theirs["files"]
    found = {
        name: next((folder for folder, files in candidates.items() if name in files), None)
        for name in sorted(every.keys() - manifest["files"].keys())
    }
    missing = [name for name, folder in found.items() if folder is None]
    if missing:
        hosts = ", ".join(manifest["part"]["hosts"])
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(every)} files, {missing[0]} among them: it was written on {hosts}; "
            f"give, with --gather, a copy of each one's run directory that holds {path.name}"
        )
    return [(name, folder) for name, folder in found.items() if folder is not None]


def _copy(source: Path, target: Path, sha256: str, count: Callable[[int], None]) -> None:
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
