"""Which checkpoint a run goes on from, and whether it is this run's. Before a run, one process alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.history import History
from pretrain.changes import refuse_other
from pretrain.checkpoint import list_checkpoints, read_json, refuse_part, refuse_unhealthy, verify
from pretrain.run_directory import CheckpointError

SPREAD = ("world_size", "zero_stage")  # of a run's identity: how its state is spread, not what it is


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save or prune left behind."""
    for leftover in [*folder.glob("step-*.partial"), *folder.glob("step-*.deleted")]:
        shutil.rmtree(leftover)


def choose(
    folder: Path,
    resume: str,
    identity: Mapping[str, Any],
    say: Callable[[str], None] = lambda message: None,
    changes: Collection[str] = (),
) -> Path | None:
    """The checkpoint to resume from, verified and this run's, but for `changes`; None for a fresh start.

    `resume` is "auto" (the newest whole checkpoint in `folder`, if there is one), "never" (CheckpointError if there is
    one), or a path: that checkpoint, unless the run has gone on from it already; then the run's newest, or, for an
    older one of its own, CheckpointError. CheckpointError too where the chosen one is another run's or other ranks'.
    """
    if resume == "never":
        if list_checkpoints(folder):
            raise CheckpointError(
                f"{folder} already holds checkpoints: choose another --run, or leave out --resume never"
            )
        return None
    chosen = newest_whole(folder, say)
    if resume != "auto":
        wanted = Path(resume).resolve()
        if not any((wanted / name).exists() for name in ("manifest.json", "engine")):
            raise CheckpointError(
                f"--resume {resume}: no checkpoint there; say auto, never, or the folder of a checkpoint, such as "
                "runs/a/checkpoints/step-00001000"
            )
        verify(wanted)
        refuse_unhealthy(wanted)
        refuse_part(wanted)
        if not (wanted / "engine").is_dir():
            raise CheckpointError(
                f"{wanted} holds weights without a state of training: to start from them, "
                f"set initial_weights = {wanted} in the recipe and leave out --resume"
            )
        own = wanted.parent == folder.resolve()
        if own and chosen is not None and chosen.resolve() != wanted:
            raise CheckpointError(
                f"{folder} goes on behind {wanted.name}, to {chosen.name}: to branch off from {wanted.name}, "
                "choose another --run"
            )
        if chosen is None:
            chosen = wanted
    if chosen is not None:
        refuse_other_run(chosen, identity, changes)
    return chosen


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest healthy checkpoint whose files all have the recorded hashes; None if there is none at all.

    Others on the way are told of and renamed to step-….damaged or step-….unhealthy. CheckpointError where there are
    only such.
    """
    candidates = list_checkpoints(folder)
    aside: list[tuple[Path, str]] = []
    for path in reversed(candidates):
        suffix = ".damaged"
        try:
            verify(path)
            suffix = ".unhealthy"
            refuse_unhealthy(path)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
            aside.append((path, suffix))
            continue
        refuse_part(path)
        for other, suffix in aside:
            set_aside(other, suffix)
        return path
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} is whole and healthy: restore one from a copy, "
            "or start over with another --run"
        )
    return None


def set_aside(path: Path, suffix: str) -> None:
    """Have a checkpoint be none, under a name that says why."""
    path.rename(_unused_name(path.with_name(path.name + suffix)))


def _unused_name(path: Path) -> Path:
    number = 2
    candidate = path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def refuse_other_run(path: Path, identity: Mapping[str, Any], changes: Collection[str] = ()) -> History:
    """What was changed on the way of a run that goes on from a checkpoint, what `changes` names here included.

    Raises CheckpointError, in one line, where the checkpoint's identity is otherwise not this run's. Stages of the
    mixture and parts of the batch ramp that have not begun yet may differ: what has been read, step by step, is the
    same. Ranks and ZeRO stage may differ: `Checkpoints.load` converts.
    """
    stored = read_json(path / "state.json")
    history = refuse_other(path, stored, identity, changes)
    stored, identity = with_defaults(stored), with_defaults(identity)
    for name in ("precision", "optimizer"):
        earlier, value = stored[name], identity[name]
        if earlier == value:
            continue
        key = next(key for key in {**earlier, **value} if earlier.get(key) != value.get(key))
        name, earlier, value = f"{name}.{key}", earlier.get(key), value.get(key)
        remedy = f"resume with the same {name}"
        if name == "precision.compute":  # "auto" is another one on another device
            remedy = f'resume with precision.compute = "{earlier}"'
        raise CheckpointError(
            f"{path} was written with {name} = {earlier}, this run has {value}: {remedy}, or choose another --run"
        )
    return history


def converted_from(path: Path, identity: Mapping[str, Any]) -> dict[str, int] | None:
    """The ranks and the ZeRO stage that wrote a checkpoint, where one of them is not this run's."""
    stored = read_json(path / "state.json")
    same = all(stored[name] == identity[name] for name in SPREAD)
    return None if same else {name: stored[name] for name in SPREAD}


def with_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with what it leaves out of precision and optimizer because it is the default."""
    precision, optimizer = identity["precision"], identity.get("optimizer", {})
    return {
        **identity,
        "precision": {**precision, "moments": precision["master"], "compensation": "none", **precision},
        "optimizer": {"name": "adamw", "decay_embeddings": True, **optimizer},
    }
