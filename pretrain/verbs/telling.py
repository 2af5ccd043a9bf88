"""What every verb tells in the same way: what went wrong, and how far long work is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


def complain(message: str, *, on_every_rank: bool = False) -> int:
    """All ranks find the same fault in a command or a recipe, and one line is enough; a full disk is one rank's."""
    ranked = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()  # else RANK is a stranger's
    rank = os.environ["RANK"] if ranked else "0"
    if rank == "0" or on_every_rank or (ranked and _first_of_a_command()):
        who = f"rank {rank}: " if on_every_rank and rank != "0" else ""
        print(f"error: {who}{' '.join(message.split())}", file=sys.stderr)
    return 2


def _first_of_a_command() -> bool:
    """Whether this is the first rank of a `launch run` on this machine, which may be one of several: rank 0 speaks on
    its own one alone."""
    from pretrain.keeper import VARIABLE

    return os.environ["LOCAL_RANK"] == "0" and os.environ.get(VARIABLE, "").startswith("127.")


@contextmanager
def progress(done: str, unit: str, *, shown: bool = True) -> Iterator[Callable[[int, int | None], None]]:
    """Give what is to hear of long work, as (so far, of all): a bar on a terminal, else now and then a line. `shown`:
    on the rank that speaks."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    watched = shown and sys.stderr.isatty()
    started = spoke_at = time.monotonic()
    columns = TextColumn("{task.fields[rate]}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not watched) as progress:
        task = progress.add_task(done, total=None, rate="")

        def show(so_far: int, total: int | None) -> None:
            nonlocal spoke_at
            rate = f"{so_far / (time.monotonic() - started):,.0f} {unit}/s"
            progress.update(task, completed=so_far, total=total, rate=rate)
            if shown and not watched and time.monotonic() - spoke_at > 10:
                spoke_at = time.monotonic()
                of_all = "" if total is None else f" of {total:,}"
                print(f"{so_far:,}{of_all} {unit} {done}, {rate}", file=sys.stderr, flush=True)

        yield show


@contextmanager
def memory_told(remedy: str) -> Iterator[None]:
    """The end of memory in what only reads a checkpoint: one line with `remedy`, exit 2."""
    from pretrain.out_of_memory import explain_reading, is_out_of_memory
    from pretrain.runtime import pick_device

    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        device = pick_device(0, os.environ.get("DS_ACCELERATOR"))
        raise typer.Exit(complain(explain_reading(error, remedy, device))) from None
