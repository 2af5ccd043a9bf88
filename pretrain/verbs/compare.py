"""pretrain compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import AsJson

EXAMPLES = """
python -m pretrain compare runs/mini runs/mini-muon
python -m pretrain compare runs/mini runs/mini-muon --html pages/muon.html
python -m pretrain compare runs/a runs/b runs/c --json
"""


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, at least two.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also one page with all of it and plots.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Runs beside each other: losses, tokens, FLOPs, speed, and only those settings in which they differ."""
    from data_pipeline.durable import write_file
    from pretrain import compare as comparison
    from pretrain.chronicle import read
    from pretrain.config import RecipeError
    from pretrain.page import render

    comparison.refuse_numbers(len(runs))
    if html is not None and (not html.parent.is_dir() or html.is_dir()):
        raise RecipeError(f"--html {html}: name a file in a folder that is there")
    chronicles = [read(run) for run in runs]
    told = comparison.compare(chronicles)
    same = told["loss_per_token_compares"]
    if html is not None:
        page = comparison.page(chronicles, same, told["notes"])
        write_file(html, render(page).encode("utf-8", errors="replace"))
    if as_json:
        print(json.dumps(told, indent=2, allow_nan=False))
        return
    for note in told["notes"]:
        print(f"note: {note}")
    results = comparison.table(chronicles, same)
    print(results.turned().to_text())
    if any(run.evaluations for run in chronicles):
        print(comparison.heldout_by_source(chronicles, same).to_text())
    if told["differences"]:
        print(comparison.differences_table(chronicles).to_text())
    else:
        print("no difference in configuration, versions or commit")
    if html is not None:
        print(f"page: {html}")
