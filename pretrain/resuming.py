"""Which checkpoint a run goes on from, and whether it is this run's. Before a run, one process alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.order import difference
from data_pipeline.steps import Steps
from pretrain.checkpoint import list_checkpoints, read_json, refuse_unhealthy, verify
from pretrain.run_directory import CheckpointError

SPREAD = ("world_size", "zero_stage")  # of a run's identity: how its state is spread, not what it is


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save or prune left behind."""
    for leftover in [*folder.glob("step-*.partial"), *folder.glob("step-*.deleted")]:
        shutil.rmtree(leftover)


def choose(
    folder: Path, resume: str, identity: Mapping[str, Any], say: Callable[[str], None] = lambda message: None
) -> Path | None:
    """The checkpoint to resume from, verified and this run's; None for a fresh start.

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
        refuse_other_run(chosen, identity)
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
        for other, suffix in aside:
            other.rename(_unused_name(other.with_name(other.name + suffix)))
        return path
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} is whole and healthy: restore one from a copy, "
            "or start over with another --run"
        )
    return None


def _unused_name(path: Path) -> Path:
    number = 2
    candidate = path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def refuse_other_run(path: Path, identity: Mapping[str, Any]) -> None:
    """Raises CheckpointError, in one line, where a checkpoint's identity is not this run's.

    Stages of the mixture and parts of the batch ramp that have not begun yet may differ: what has been read, step by
    step, is the same. Ranks and ZeRO stage may differ: `Checkpoints.load` converts.
    """
    stored = read_json(path / "state.json")
    line = difference(stored["order"], identity["order"], consumed_samples=stored["consumed_samples"])
    if line is not None:
        raise CheckpointError(f"{path}: {line}; resume with the data it was trained on, or choose another --run")
    _refuse_other_steps(path, stored, identity)
    stored, identity = with_defaults(stored), with_defaults(identity)
    for name, value in identity.items():
        if name in ("order", "global_batch_size", "batch_ramp", *SPREAD):
            continue
        earlier = stored[name]
        if earlier == value:
            continue
        if isinstance(value, dict):
            key = next(key for key in {**earlier, **value} if earlier.get(key) != value.get(key))
            name, earlier, value = f"{name}.{key}", earlier.get(key), value.get(key)
        remedy = f"resume with the same {name}"
        if name == "precision.compute":  # "auto" is another one on another device
            remedy = f'resume with precision.compute = "{earlier}"'
        raise CheckpointError(
            f"{path} was written with {name} = {earlier}, this run has {value}: {remedy}, or choose another --run"
        )


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


def _refuse_other_steps(path: Path, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    earlier, ours = (Steps.from_json(one["global_batch_size"], one.get("batch_ramp", [])) for one in (stored, identity))
    consumed = stored["consumed_samples"]
    if earlier.parts(consumed) == ours.parts(consumed):
        return
    parts = [f"{{ until_samples = {end}, global_batch_size = {size} }}" for end, size in earlier.parts(consumed)]
    raise CheckpointError(
        f"{path} was written with global_batch_size = {earlier.told(consumed)}, this run has {ours.told(consumed)}: "
        f"resume with the same, or choose another --run, or have another from here on, with batch.ramp = "
        f"[{', '.join(parts)}]"
    )
