"""The beginning of an attempt: all ranks agree, the run directory is taken, a checkpoint chosen, and written down what
will run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from data_pipeline.history import History
from pretrain import left_out
from pretrain.agreement import facts, facts_of_weights, refuse_differences
from pretrain.config import new_values, to_toml
from pretrain.engine import TIMEOUT_MINUTES
from pretrain.inputs import Inputs, initial_weights
from pretrain.parts import Shelf, named
from pretrain.resuming import choose, clear_leftovers, converted_from, refuse_other_run, refuse_uneven_stages
from pretrain.rolling_back import clear
from pretrain.run_directory import RunDirectory, RunDirectoryError, write_text
from pretrain.runtime import Ranks
from pretrain.sharing import Sharing, clear_marks, discover, drop_if_empty


@dataclass(frozen=True)
class Attempt:
    """A start of the command, as all ranks know of it."""

    number: int
    resumed_from: Path | None
    initial: Path | None  # what the weights are read from, where that is no checkpoint to resume from
    history: History  # what was ever changed by name in the run
    shelf: Shelf | None  # where ranks have several run directories


def agree(path: Path, ranks: Ranks, inputs: Inputs, resume: str, changes: Sequence[str]) -> Sharing:
    """Which ranks share the run directory at `path`, when all are to run the same. All ranks together.

    Raises RecipeError where they are not, RunDirectoryError where it has to be one for all and is not.
    """
    recipe, plan_sha256 = to_toml(inputs.config), inputs.identity["order"].get("plan_sha256")
    options = {"--resume": resume, "--change": " ".join(changes)}
    refuse_differences(ranks, lambda: facts(recipe, options, inputs.deepspeed, inputs.collection, plan_sha256))
    sharing = discover(path, ranks)
    refusal = sharing.refusal(path) if inputs.config.checkpoint.placement == "shared" else None
    if refusal is not None:
        sharing.on_leaders(lambda: drop_if_empty(path))
        raise RunDirectoryError(refusal)
    return sharing


def begin(
    directory: RunDirectory,
    sharing: Sharing,
    inputs: Inputs,
    resume: str,
    changes: Sequence[str],
    say: Callable[[str], None],
    timeout_minutes: float = TIMEOUT_MINUTES,
) -> Attempt:
    """Begin an attempt in each run directory; errors as of `begin_attempt`. All ranks together.

    `timeout_minutes`: how long a rank waits for others.
    """
    ranks, shelf = sharing.ranks, None
    pids = ranks.gather(os.getpid())
    if sharing.is_one:
        number, chosen, initial = ranks.on_first(lambda: begin_attempt(directory, inputs, resume, pids, say, changes))
    else:
        gathers, patience = inputs.config.checkpoint.placement == "gathered", timedelta(minutes=timeout_minutes)
        shelf = Shelf(directory.checkpoints, sharing, gathers=gathers, patience=patience)
        number, chosen, initial = begin_attempts(shelf, directory, inputs, resume, pids, say, changes)
    history = History.of(ranks.on_first(lambda: directory.attempts()[-1]["changes"]))
    return Attempt(number, chosen, initial, history, shelf)


def begin_attempt(
    directory: RunDirectory,
    inputs: Inputs,
    resume: str,
    pids: list[int],
    say: Callable[[str], None],
    changes: Sequence[str] = (),
) -> tuple[int, Path | None, Path | None]:
    """Take the run directory, choose the checkpoint to go on from, and write down what will run. First rank only.

    `changes`: names of what may be another than the checkpoint's (changes.py); all that were ever made are recorded.
    Returns the attempt's number, the checkpoint, and, where there is none, what the initial weights are read from.
    Raises RunDirectoryError or CheckpointError, with the directory as it was, where another run is at work there or
    what it holds is not this run.
    """
    for warning in take(directory):
        say(warning)
    chosen = choose(directory.checkpoints, resume, inputs.identity, say, changes)
    history = History() if chosen is None else refuse_other_run(chosen, inputs.identity, changes)
    initial = initial_weights(inputs) if chosen is None else None
    return write_down(directory, inputs, chosen, initial, pids, history), chosen, initial


def begin_attempts(
    shelf: Shelf,
    directory: RunDirectory,
    inputs: Inputs,
    resume: str,
    pids: list[int],
    say: Callable[[str], None],
    changes: Sequence[str] = (),
) -> tuple[int, Path | None, Path | None]:
    """The same where not all ranks have one run directory: in each home. All ranks together."""
    sharing = shelf.sharing
    for home, warnings in enumerate(sharing.on_leaders(lambda: take(directory))):
        for warning in warnings:
            say(f"{warning} (on {sharing.host(home)})")
    chosen = shelf.choose(resume, say)
    initial, history = None, History()
    if chosen is None:
        refuse_uneven_stages(inputs.identity)
        initial = sharing.on_leaders(lambda: initial_weights(inputs))[sharing.home]
        if inputs.config.initial_weights is not None:
            refuse_differences(sharing.ranks, lambda: facts_of_weights(initial))
    else:
        history = sharing.ranks.on_first(lambda: refuse_other_run(chosen, inputs.identity, changes))
    attempt = sharing.ranks.on_first(lambda: write_down(directory, inputs, chosen, initial, pids, history))
    others = sharing.leads and sharing.home > 0
    sharing.on_leaders(
        lambda: (
            write_down(directory, inputs, chosen, initial, pids, history, attempt, sharing.host(0))
            if others
            else attempt
        )
    )
    return attempt, chosen, initial


def take(directory: RunDirectory) -> list[str]:
    """Take a run directory for this run, without what a kill left in it; warnings of what had to stay."""
    directory.lock()
    clear_marks(directory.path)
    directory.checkpoints.mkdir(exist_ok=True)
    faults = clear(directory.checkpoints, left_out.read(directory.roll_backs))
    return [*clear_leftovers(directory.checkpoints), *(f"warning: {fault}" for fault in faults)]


def write_down(
    directory: RunDirectory,
    inputs: Inputs,
    chosen: Path | None,
    initial: Path | None,
    pids: list[int],
    history: History,
    attempt: int | None = None,
    first_host: str | None = None,
) -> int:
    """Record a start of the command and what will run; gives its number, which follows unless it is given.

    `first_host`: the machine whose run directory has status and metrics, where that is another.
    """
    recipe = to_toml(inputs.config)
    directory.attempts()  # damaged? then say so before anything is changed
    earlier = recipe
    for path in [directory.recipe, *([] if chosen is None else [chosen.parent.parent / directory.recipe.name])]:
        if path.exists():  # the run's own or, where it branches off, that of the run it comes from
            earlier = path.read_bytes().decode(errors="replace")
            break
    directory.stop_file.unlink(missing_ok=True)
    for left in (directory.receipts, directory.signs):  # by the attempt before
        shutil.rmtree(left, ignore_errors=True)
    inputs.codec.copy_to(directory.tokenizer)
    number = directory.begin_attempt(
        {
            "world_size": inputs.plan.world_size,
            "pids": pids,
            "resumed_from": None if chosen is None else str(named(chosen)),
            "converted_from": None if chosen is None else converted_from(chosen, inputs.identity),
            "initial_weights": None if initial is None else str(initial),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "compute": inputs.compute,
            "recipe_changes": new_values(earlier, recipe),
            "changes": history.to_json(),
            **({} if first_host is None else {"first_host": first_host}),
        },
        attempt,
    )
    write_text(directory.recipe, recipe)  # behind that record: what it says of samples before a change is not true
    write_text(directory.deepspeed, json.dumps(inputs.deepspeed, indent=2) + "\n")
    return number
