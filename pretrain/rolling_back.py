"""Going back: a run with an alarm goes on from an earlier checkpoint, in the same process, without the alarm's step.

In this order, so that a kill anywhere leaves a run that goes on: the earlier checkpoint is loaded, the roll back is
recorded (see left_out.py), and what lies behind that checkpoint is removed. Before the record a later start meets the
alarm again and goes back again; behind it, it goes on as this one does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pretrain import left_out
from pretrain.checkpoint import BEST, LATEST, best_of, have_named, list_checkpoints, read_json, saved, step_of, verify
from pretrain.engine import TrainingEngine
from pretrain.pruning import prune
from pretrain.run_directory import CheckpointError, RunDirectory
from pretrain.saving import Checkpoints
from pretrain.sharing import Sharing
from pretrain.state import TrainState


def go_back(
    checkpoints: Checkpoints, engine: TrainingEngine, sharing: Sharing, steps: range, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any]] | None:
    """Load the newest healthy checkpoint of one of `steps`; None where there is none. All ranks together.

    Returns where the run is then, and all that the checkpoint tells of it.

    One that proves damaged is told of, and the one before it taken.
    """
    checkpoints.finish()
    folder, shelf = checkpoints.folder, checkpoints.shelf
    by_home = sharing.on_leaders(
        lambda: [path.name for path in list_checkpoints(folder) if step_of(path) in steps and saved(path).healthy]
    )
    for name in sorted({name for names in by_home for name in names}, key=lambda name: step_of(Path(name)))[::-1]:
        path = folder / name
        if shelf is not None:
            taken, fault = shelf.take(name)
        else:
            taken, fault = path, sharing.ranks.on_first(partial(_fault, path))
        if taken is not None and fault is None:
            state, stored = checkpoints.load(taken, engine), read_json(taken / "state.json")
            if shelf is not None:
                shelf.clear()
            return state, stored
        say(f"{fault}; trying the one before it")
    return None


def _fault(path: Path) -> str | None:
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return None


def record(directory: RunDirectory, sharing: Sharing, roll_backs: left_out.RollBacks) -> list[str]:
    """Write down a run's roll backs, the new one among them, then remove what it has left. All ranks together.

    Says what could not be removed.
    """
    sharing.on_leaders(lambda: left_out.write(directory.roll_backs, roll_backs))
    return [
        fault for faults in sharing.on_leaders(lambda: clear(directory.checkpoints, roll_backs)) for fault in faults
    ]


def clear(folder: Path, roll_backs: left_out.RollBacks) -> list[str]:
    """Remove the checkpoints that a run has left by going back; no mark names one meanwhile. Once a folder."""
    going = left_out.abandoned(folder, roll_backs)
    staying = [path for path in list_checkpoints(folder) if path.name not in going]
    if not going:
        return []
    best = best_of(staying)
    have_named(folder, LATEST, staying[-1].name if staying else None)
    have_named(folder, BEST, None if best is None else best.name)
    return prune(folder, going)
