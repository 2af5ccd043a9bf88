"""Which checkpoint a run goes on from, and whether it is this run's. Before a run, one process alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipeline.durable import sync_folder
from data_pipeline.history import History
from data_pipeline.order import SampleOrder
from pretrain import left_out
from pretrain.changes import after, mixture_of, reading_of, refuse_other, told, unchanged
from pretrain.checkpoint import (
    BEST,
    LATEST,
    best_of,
    have_named,
    list_checkpoints,
    named,
    read_json,
    read_manifest,
    refuse_part,
    refuse_unhealthy,
    step_of,
    verify,
    which_part,
)
from pretrain.config import Compute, refuse_split_windows
from pretrain.run_directory import CheckpointError, RunDirectory

UNHEALTHY = ".unhealthy"
PART = ".incomplete"  # ends the name of a part that was passed over for an older whole checkpoint
SPREAD = ("world_size", "zero_stage")  # of a run's identity: how its state is spread, not what it is


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what a killed save or prune left behind; warnings of what cannot be removed, and is in nobody's way."""
    warnings = []
    for leftover in [
        *folder.glob("step-*.partial"),
        *folder.glob("step-*.deleted"),
        *folder.glob(".latest.*.tmp"),
        *folder.glob(".best.*.tmp"),
    ]:
        try:
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)
        except OSError as error:
            warnings.append(f"warning: {leftover}, left by a kill, could not be removed: {error.strerror or error}")
    return warnings


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
    chosen = _chosen(folder, resume, lambda: newest_whole(folder, say), _refuse_unfit)
    if chosen is None:
        refuse_uneven_stages(identity)
    else:
        refuse_other_run(chosen, identity, changes)
    return chosen


def preview(
    folder: Path,
    resume: str,
    identity: Callable[[Compute], Mapping[str, Any]],
    changes: Collection[str] = (),
    *,
    alone: bool = True,
) -> dict[str, Any] | None:
    """What `choose` would choose, JSON-able; None for a fresh start. In a moment: sizes are compared, no hashes.

    Nothing is renamed. `identity` is this run's where "auto" computes in what it is given; `alone`: all ranks are on
    this machine, so that a part of a checkpoint is none. CheckpointError as there.
    """
    notes: list[str] = []

    def refuse_unfit(path: Path) -> None:
        _refuse_by_size(path)
        if alone:
            refuse_part(path)

    chosen = _chosen(folder, resume, lambda: _newest_by_size(folder, notes, alone=alone), refuse_unfit)
    if chosen is None:
        return None
    manifest = read_manifest(chosen)
    part = which_part(manifest)
    found: dict[str, Any] = {"checkpoint": str(chosen), "global_step": step_of(chosen), "told": notes}
    found |= {} if part is None else {"part": part}
    if "state.json" not in manifest["files"]:  # another machine's part of it has it
        return found
    stored = read_json(chosen / "state.json")
    ours = identity(stored["precision"]["compute"])
    history = refuse_other_run(chosen, ours, changes)
    made = history.made_at(stored["global_step"])
    now = after(ours, history)
    order = SampleOrder.of(now["order"])
    back = left_out.merged(left_out.read(folder.parent / RunDirectory.ROLL_BACKS), left_out.known_to(chosen))
    without = left_out.steps_left_out(back, reading_of(now))
    return {
        **found,
        "told": [
            *notes,
            *told(made, order),
            *unchanged(changes, history, made),
            *(one.told() for one in back if one.step in without),
        ],
        "left_out": sorted(without),
        "tokens_seen": stored["tokens_seen"],
        "written_by": {name: stored[name] for name in SPREAD},
        "converted": converted_from(chosen, ours) is not None,
        "changes": [] if made is None else list(made.changed),
    }


def preview_text(found: Mapping[str, Any] | None, world_size: int, zero_stage: int) -> str:
    """What `preview` found, for people; the run is of these ranks, under this ZeRO stage."""
    if found is None:
        return "nothing there: it begins at step 0"
    words = [f"{found['checkpoint']}, step {found['global_step']:,}"]
    if found.get("converted"):
        earlier = found["written_by"]
        words.append(
            f"written by {earlier['world_size']} rank{'s' * (earlier['world_size'] != 1)} under "
            f"ZeRO-{earlier['zero_stage']}, converted for {world_size} under ZeRO-{zero_stage}"
        )
    if "part" in found:
        words.append(f"part {found['part']}, the machines must hold the rest between them")
    return "\n".join(["; ".join(words), *found["told"]])


def _chosen(
    folder: Path, resume: str, newest: Callable[[], Path | None], refuse_unfit: Callable[[Path], None]
) -> Path | None:
    if resume == "never":
        if list_checkpoints(folder):
            raise not_fresh(folder)
        return None
    chosen = newest()
    if resume != "auto":
        wanted = named(Path(resume)).resolve()
        if not any((wanted / name).exists() for name in ("manifest.json", "engine")):
            raise CheckpointError(
                f"--resume {resume}: no checkpoint there; say auto, never, or the folder of a checkpoint, such as "
                "runs/a/checkpoints/step-00001000"
            )
        refuse_unfit(wanted)
        if not (wanted / "engine").is_dir():
            raise without_state(wanted)
        own = wanted.parent == folder.resolve()
        if own and chosen is not None and chosen.resolve() != wanted:
            raise not_newest(folder, wanted.name, chosen.name)
        if chosen is None:
            chosen = wanted
    return chosen


def not_fresh(folder: Path) -> CheckpointError:
    """What is wrong with "never"."""
    return CheckpointError(f"{folder} already holds checkpoints: choose another --run, or leave out --resume never")


def without_state(wanted: Path) -> CheckpointError:
    """What is wrong with a path at which there are weights alone."""
    return CheckpointError(
        f"{wanted} holds weights without a state of training: to start from them, "
        f"set initial_weights = {wanted} in the recipe and leave out --resume"
    )


def not_newest(folder: Path, wanted: str, newest: str) -> CheckpointError:
    """What is wrong with an older checkpoint of the run itself."""
    return CheckpointError(
        f"{folder} goes on behind {wanted}, to {newest}: to branch off from {wanted}, choose another --run"
    )


def _refuse_unfit(path: Path) -> None:
    verify(path)
    refuse_unhealthy(path)
    refuse_part(path)


def _refuse_by_size(path: Path) -> None:
    for name, record in read_manifest(path)["files"].items():
        if not (path / name).is_file() or (path / name).stat().st_size != record["bytes"]:
            raise CheckpointError(f"{path / name} is missing or has another size than was written")
    refuse_unhealthy(path)


def _newest_by_size(folder: Path, notes: list[str], *, alone: bool) -> Path | None:
    gone = left_out.abandoned(folder, left_out.read(folder.parent / RunDirectory.ROLL_BACKS))
    candidates = [path for path in list_checkpoints(folder) if path.name not in gone]
    parts: list[CheckpointError] = []
    for path in reversed(candidates):
        with suppress(CheckpointError):
            _refuse_by_size(path)
            try:
                if alone:
                    refuse_part(path)
            except CheckpointError as error:
                parts.append(error)
                continue
            notes += [passed_over(part, path.name) for part in parts]
            return path
    if parts:
        raise parts[0]
    if candidates:
        raise CheckpointError(_none_whole(folder, candidates))
    return None


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest healthy checkpoint whose files all have the recorded hashes; None if there is none at all.

    Others on the way are told of and renamed to step-….damaged, step-….unhealthy or step-….incomplete. CheckpointError
    where there are only such.
    """
    candidates = list_checkpoints(folder)
    aside: list[tuple[str, str]] = []
    parts: list[CheckpointError] = []
    for path in reversed(candidates):
        suffix = ".damaged"
        try:
            verify(path)
            suffix = UNHEALTHY
            refuse_unhealthy(path)
            suffix = PART
            refuse_part(path)
        except CheckpointError as error:
            aside.append((path.name, suffix))
            if suffix == PART:
                parts.append(error)
            else:
                say(f"{error}; trying the one before it")
            continue
        for part in parts:
            say(passed_over(part, path.name))
        for line in set_aside(folder, aside, path.name):
            say(line)
        return path
    if parts:  # machines or copies are missing, not checkpoints
        raise parts[0]
    if candidates:
        raise CheckpointError(_none_whole(folder, candidates))
    return None


def passed_over(part: CheckpointError, older: str) -> str:
    """What is said where a run goes on without a part that is none of its checkpoints where it was started."""
    return f"{part}; going on from {older} instead, which is whole here: the part is renamed, to …{PART}"


def _none_whole(folder: Path, candidates: Sequence[Path]) -> str:
    return (
        f"none of the {len(candidates)} checkpoints in {folder} is whole and healthy: restore one from a copy, "
        "or start over with another --run"
    )


def set_aside(folder: Path, named: Sequence[tuple[str, str]], newest: str) -> list[str]:
    """Have checkpoints be none, under names that say why: their own, each with a suffix. Those not there are no matter.

    `latest` names `newest` before that or, where it is not in this folder, the newest that stays: at no moment one that
    is gone. Nor does `best`.

    A run that diverges makes the unhealthy ones again, start after start: of one step the newest stays; told of is
    what has been removed for it. The damaged ones all stay: a file of theirs may be restored from a copy.
    """
    going = [(folder / name, suffix) for name, suffix in named if (folder / name).exists()]
    if not going:
        return []
    staying = [path.name for path in list_checkpoints(folder) if path.name not in dict(named)]
    have_named(folder, LATEST, newest if newest in staying else staying[-1] if staying else None)
    best = best_of(folder / name for name in staying)
    have_named(folder, BEST, None if best is None else best.name)
    removed = []
    for path, suffix in going:
        if suffix == UNHEALTHY:
            for earlier in sorted(folder.glob(f"{path.name}{suffix}*")):
                shutil.rmtree(earlier, ignore_errors=True)
                if not earlier.exists():
                    removed.append(f"removed {earlier}, which an earlier start set aside: {path.name} takes its place")
        path.rename(_unused_name(path.with_name(path.name + suffix)))
    sync_folder(folder)
    return removed


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
    refuse_uneven_stages(identity, history)
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


def refuse_uneven_stages(identity: Mapping[str, Any], history: History | None = None) -> None:
    """RecipeError where a stage does not begin with a window, unless the run's past had windows of another length.

    With those behind it, its tokens are no multiple of anything, and a stage begins with the next window.
    """
    seq_len = identity["order"]["seq_len"]
    if history is None or all(read.order["seq_len"] == seq_len for _, read in history.reads()):
        refuse_split_windows([start for start, _ in mixture_of(identity)], seq_len)


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
