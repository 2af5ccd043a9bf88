"""pretrain checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pretrain.verbs.options import AsJson
from pretrain.verbs.telling import progress

if TYPE_CHECKING:
    from pretrain.inventory import Entry

EXAMPLES = """
python -m pretrain checkpoints runs/mini
python -m pretrain checkpoints runs/mini --verify --json
python -m pretrain checkpoints runs/mini --prune --keep-last 1 --keep-best 2
python -m pretrain checkpoints runs/mini --prune --yes
python -m pretrain checkpoints runs/mini --average 4 --out averaged/mini
python -m pretrain checkpoints runs/mini --average 3000,3500,4000 --out averaged/mini
python -m pretrain checkpoints runs/mini --gather copies/node-b/mini --gather copies/node-c/mini
"""


def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    check: Annotated[bool, typer.Option("--verify", help="Compare every file with its recorded hash.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Say which the recipe's rule, or --keep-..., would not keep.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove them.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, metavar="N", help="With --prune, instead of the recipe's.")
    ] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option("--keep-every-steps", min=0, metavar="N", help="The same; 0: none for this reason.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option("--keep-best", min=0, metavar="N", help="The same; by held-out loss.")
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(metavar="N|STEP,STEP,...", help="Make the mean of the newest N, or of these, a new checkpoint."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With --average: the checkpoint to make.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --average made there before.")] = False,
    gather: Annotated[
        list[Path] | None,
        typer.Option(metavar="COPY", help="A copy of another machine's run directory: its parts make RUN's whole."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run and why each stays; verify them, remove what nothing keeps, or average weights."""
    from pretrain.config import RecipeError

    given = {"keep_last": keep_last, "keep_every_steps": keep_every_steps, "keep_best": keep_best}
    keeps: dict[str, Any] = {
        name: value or None if name == "keep_every_steps" else value
        for name, value in given.items()
        if value is not None
    }
    if average is None and (out is not None or overwrite):
        raise RecipeError("--out and --overwrite are for --average: say what to average, for example --average 4")
    if average is not None and (check or prune):
        raise RecipeError("--average verifies what it reads and removes nothing: leave out --verify and --prune")
    if gather and (average is not None or check or prune):
        raise RecipeError("--gather verifies what it joins and removes nothing: leave out --average, --verify, --prune")
    if not prune and (yes or keeps):
        raise RecipeError("--yes and --keep-... are for --prune: add it, or leave them out")
    if average is not None:
        if out is None:
            raise RecipeError("--average needs a place for the checkpoint it makes: add --out DIR")
        _average(run, average, out, overwrite=overwrite, as_json=as_json)
        return
    if gather:
        _join(run, gather, as_json=as_json)
        return

    from dataclasses import replace

    from pretrain import inventory
    from pretrain.config import load_recipe
    from pretrain.retention import Retention

    directory = inventory.run_directory(run)
    retention = replace(Retention.of(load_recipe(directory.recipe).checkpoint), **keeps)
    with progress("verified", "bytes") as show:
        if yes:
            found, going = inventory.remove_others(
                directory, retention, check="all" if check else "newest", on_bytes=show
            )
        else:
            depth: Literal["all", "newest", "none"] = "all" if check else "newest" if prune else "none"
            found = inventory.entries(directory, retention, check=depth, on_bytes=show)
            going = inventory.superfluous(found)
    if as_json:
        report = {"run": str(run), "retention": vars(retention), "checkpoints": [one.to_dict() for one in found]}
        report["set_aside"] = [path.name for path in inventory.set_aside(directory)]
        if prune:
            report["removed" if yes else "would_remove"] = [one.path.name for one in going]
        print(json.dumps(report, indent=2))
    else:
        _print_checkpoints(found)
        for path in inventory.set_aside(directory):
            print(f"set aside by a resume, used for nothing: {path}")
    if prune and not as_json and not going:
        print("nothing to remove")
    elif prune and not as_json:
        count = f"{len(going)} checkpoint{'' if len(going) == 1 else 's'}"
        size = f"{count}, {sum(one.bytes or 0 for one in going) / 1e6:,.1f} MB"
        names = "".join(f"\n  {one.path.name}" for one in going)
        print(f"removed {size}{names}" if yes else f"would remove {size} (add --yes to do it){names}")
    if check and any(one.state == "damaged" for one in found):
        raise typer.Exit(1)


def _print_checkpoints(found: Sequence[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "MB", "written (UTC)", "loss", "held-out", "healthy", "files", "kept as")
    for number in (0, 1, 3, 4):
        table.columns[number].justify = "right"
    for one in found:
        size = "" if one.bytes is None else f"{one.bytes / 1e6:,.1f}"
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (one.loss, one.heldout_loss)]
        losses[1] += " best" if one.best else ""
        healthy = {True: "yes", False: "NO", None: "not recorded"}[one.healthy]
        healthy += f": {', '.join(one.alarms)}" if one.alarms else ""
        kept = [*one.kept, *(["latest"] if one.latest else [])]
        written = one.written_at.replace("T", " ").removesuffix("+00:00")
        files = one.state if one.part is None else f"{one.state}, part {one.part}"
        table.add_row(str(one.step), size, written, *losses, healthy, files, ", ".join(kept))
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    for one in found:
        if one.fault is not None:
            print(f"damaged: {one.fault}")


def _average(run: Path, wanted: str, out: Path, *, overwrite: bool, as_json: bool) -> None:
    from pretrain.averaging import average
    from pretrain.config import RecipeError
    from pretrain.inventory import run_directory

    numbers = wanted.split(",")
    if not all(number.strip().isascii() and number.strip().isdigit() and len(number) < 20 for number in numbers):
        raise RecipeError(f"--average {wanted}: say how many of the newest, as 4, or which steps, as 3000,3500,4000")
    steps = [int(number) for number in numbers]
    with progress("verified", "bytes") as show:
        which = steps[0] if len(steps) == 1 else steps
        done, sources = average(run_directory(run), which, out, overwrite=overwrite, on_bytes=show)
    if as_json:
        print(json.dumps({**done.to_dict(), "averaged": [str(path) for path in sources]}, indent=2))
        return
    print(f"{done.to_text()}\nthe mean of {', '.join(path.name for path in sources)}")


def _join(run: Path, copies: Sequence[Path], *, as_json: bool) -> None:
    from pretrain.inventory import run_directory
    from pretrain.joining import join

    with progress("copied", "bytes") as show:
        found = join(run_directory(run), copies, on_bytes=show)
    joined = [path.name for path in found.whole]
    if as_json:
        print(json.dumps({"run": str(run), "joined": joined, "left": found.left}, indent=2))
    else:
        print(f"whole now: {', '.join(joined)}")
        for why in found.left.values():
            print(f"warning: not joined: {why}", file=sys.stderr)
    if found.left:
        raise typer.Exit(1)
