"""pretrain run."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import Changes, Overrides, Recipe
from pretrain.verbs.telling import complain

EXAMPLES = """
python -m pretrain run pretrain/recipes/debug.toml
python -m pretrain run pretrain/recipes/mini.toml --run runs/first --set schedule.max_steps=2000
python -m pretrain run pretrain/recipes/mini.toml --max-minutes 55
python -m pretrain run pretrain/recipes/mini.toml --set batch.global_batch_size=128 --change global_batch_size
deepspeed --module pretrain run pretrain/recipes/mini.toml
"""


def run(
    recipe: Recipe,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--run-dir",
            metavar="DIR",
            help="The run directory; runs/RECIPE if not given. Under torchrun only as --run-dir.",
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(metavar="auto|never|PATH", help="auto: go on from this run's newest whole checkpoint, if any."),
    ] = "auto",
    change: Changes = None,
    force: Annotated[
        bool, typer.Option("--force", help="Begin although the memory plan says that it does not fit.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option("--max-minutes", metavar="M", help="Save and stop so as to be done before so many are over."),
    ] = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option("--grace-seconds", metavar="S", help="What a signal leaves before the kill; 30 under launchers."),
    ] = None,
    timeout_minutes: Annotated[
        float | None,
        typer.Option("--timeout-minutes", metavar="M", help="How long a rank waits for the others: 10 if not given."),
    ] = None,
    started_at: Annotated[float | None, typer.Option("--started-at", hidden=True)] = None,
    started_by: Annotated[str | None, typer.Option("--started-by", hidden=True)] = None,
) -> None:
    """Train. One process on its own; several under `deepspeed` or `python -m launch run`. Started again, it resumes.

    SIGTERM, SIGUSR1, Ctrl-C, --max-minutes or a file named stop in the run directory: it saves and stops, with code 0.
    """
    from pretrain.keeper import keep
    from pretrain.mpi import adopt_names
    from pretrain.stopping import LAUNCHERS_GRACE_SECONDS, Deadline, StopRequest

    adopt_names(os.environ)
    begun_at = time.time() if started_at is None else started_at
    path = directory or Path("runs") / recipe.stem
    launched = "LOCAL_RANK" in os.environ
    kept = keep(os.environ)
    stop = StopRequest(path / "stop")
    stop.install(speaks=os.environ.get("RANK", "0") == "0")
    if kept is not None:
        kept.heed(stop.ask)

    from pretrain.config import RecipeError, load_recipe
    from pretrain.run_directory import RunDirectoryError, refuse_unusable

    limits = {"--max-minutes": max_minutes, "--grace-seconds": grace_seconds, "--timeout-minutes": timeout_minutes}
    for option, given in limits.items():
        if given is not None and not 0 < given < math.inf:
            raise RecipeError(f"{option} {given:g}: must be more than 0")
    try:
        config = load_recipe(recipe, overrides or ())
        refuse_unusable(path)
    except (RecipeError, RunDirectoryError) as error:
        if os.environ.get("LOCAL_RANK") == "0":
            error.add_note("met by this machine, which reads a file of its own")
        raise
    from pretrain.changes import check_names

    changes = check_names(change or ())
    if max_minutes is not None:
        from model.accounting import parameter_count

        # Masters, two moments and, twice, weights: what an fp32 run writes first.
        stop.deadline = Deadline(begun_at + 60 * max_minutes, first_save_bytes=16 * parameter_count(config.model))
    if grace_seconds is None and launched:
        grace_seconds = LAUNCHERS_GRACE_SECONDS
    from pretrain.device_memory import of_rank, ranks_here
    from pretrain.engine import TIMEOUT_MINUTES
    from pretrain.fit import needed, too_big
    from pretrain.metrics import TrainingDivergedError
    from pretrain.out_of_memory import explain, is_out_of_memory
    from pretrain.receipts import MET_WHILE_IT_RAN, command_that_goes_on
    from pretrain.run_directory import RunDirectory
    from pretrain.runtime import Ranks, auto_compute, is_lost_peer, is_timeout, one_ranks_fault, pick_device
    from pretrain.saving import NotSavedError
    from pretrain.train import train

    with one_ranks_fault():
        ranks = Ranks.from_environment(os.environ)
    device = pick_device(ranks.local_rank, ranks.accelerator)
    compute = config.precision.compute_where(auto_compute(device))
    here = ranks_here(os.environ, ranks.world_size)
    memory = of_rank(device.type, ranks.local_rank, here, alone=ranks.world_size == 1)
    need = needed(config, ranks.world_size, memory.kind, compute)
    message = too_big(config, ranks.world_size, memory, need, compute)
    if message is not None and not force:
        refusal = RecipeError(f"{recipe} {message}, or go on with --force")
        if memory.occupied or ranks.local_rank == 0:  # other ranks of this machine have the same to say
            refusal.add_note("met by this rank alone")
        raise refusal
    if message is not None and ranks.is_first:
        print(f"warning: {recipe} {message}", file=sys.stderr)
    command = started_by or command_that_goes_on(
        recipe, path, here if launched and here == ranks.world_size else None, overrides or (), resume, changes, limits,
        force=force,
    )  # fmt: skip
    timeout_minutes = timeout_minutes or TIMEOUT_MINUTES
    try:
        outcome = train(
            config, path, ranks, resume=resume, stop=stop, grace_seconds=grace_seconds,
            timeout_minutes=timeout_minutes, command=command, kept=kept, changes=changes,
        )  # fmt: skip
        if kept is not None:
            kept.ended(outcome)
    except TrainingDivergedError as error:
        complain(str(error))
        raise typer.Exit(1) from None
    except NotSavedError as error:  # all ranks know of it
        raise typer.Exit(complain(str(error))) from None
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            saved = RunDirectory(path).checkpoints
            line = explain(error, config, ranks.world_size, need, compute, device, saved)
            raise typer.Exit(complain(line, on_every_rank=True)) from None
        if isinstance(error, OSError) and MET_WHILE_IT_RAN in getattr(error, "__notes__", ()):
            complain(str(error), on_every_rank=True)  # no input is to blame: the same command may well go on
            raise typer.Exit(1) from None
        if not isinstance(error, RuntimeError) or not is_lost_peer(error):
            raise
        lost = "another rank is gone, and this one cannot go on without it"
        if is_timeout(error):
            lost = f"another rank gave no answer for {timeout_minutes:g} minutes (--timeout-minutes): its machine, the "
            lost += "network between them, or a rank that hangs; this one cannot go on without it"
        complain(lost, on_every_rank=True)
        raise typer.Exit(1) from None
