"""pretrain report."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pretrain.verbs.options import AsJson
from pretrain.verbs.telling import memory_told

if TYPE_CHECKING:
    from pretrain.samples import Samples


class _Which(StrEnum):
    NEWEST = "newest"
    BEST = "best"


EXAMPLES = """
python -m pretrain report runs/mini
python -m pretrain report runs/mini --sample best --prompt 'It is a truth' --prompt '从前'
python -m pretrain report runs/mini --no-samples --html pages/mini.html
python -m pretrain report runs/mini --no-samples --json
"""


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory; a run may be at work in it.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="The page; RUN/report.html if not given.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="To be continued, instead of the usual ones. May be repeated."),
    ] = None,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Load no checkpoint, write no text.")] = False,
    which: Annotated[_Which, typer.Option("--sample", help="The checkpoint that writes.")] = _Which.NEWEST,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Of the samples.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Tables and one page of a run: losses, speed, memory, what changed, and what it writes."""
    from data_pipeline.durable import write_file
    from pretrain.chronicle import read
    from pretrain.config import RecipeError
    from pretrain.figures import alarms_table, attempts_table, figures, heldout_table, time_table
    from pretrain.page import render
    from pretrain.report import notes, page, tiles

    if no_samples and prompts:
        raise RecipeError("--prompt is for samples: leave out --no-samples")
    chronicle = read(run)
    out = html or run / "report.html"
    if not out.parent.is_dir() or out.is_dir():
        raise RecipeError(f"--html {out}: name a file in a folder that is there")
    samples = None if no_samples else _samples(run, which, prompts, seed)
    write_file(out, render(page(chronicle, samples)).encode("utf-8", errors="replace"))
    if as_json:
        told = figures(chronicle)
        if samples is not None:
            told["samples"] = {**vars(samples), "texts": [list(text) for text in samples.texts]}
        print(json.dumps({**told, "html": str(out)}, indent=2, allow_nan=False))
        return
    print(f"{run}: {chronicle.state}")
    for note in notes(chronicle):
        print(f"note: {note}")
    width = max(len(tile.label) for tile in tiles(chronicle))
    for tile in tiles(chronicle):
        print(f"{tile.label:<{width}}  {tile.value}{f' ({tile.detail})' if tile.detail else ''}")
    tables = [*([heldout_table(chronicle)] if chronicle.evaluations else []), attempts_table(chronicle)]
    alarms = alarms_table(chronicle)
    tables += [] if alarms is None else [alarms]
    for table in (*tables, time_table(chronicle)):
        print(table.to_text())
    for prompt, text in () if samples is None else samples.texts:
        print(f"[{samples.checkpoint if samples else ''}] {prompt}{text}")
    print(f"page: {out}")


def _samples(run: Path, which: _Which, prompts: list[str] | None, seed: int) -> Samples:
    """Without prompts of one's own a run that cannot write yet gets its page all the same."""
    from pretrain.config import RecipeError
    from pretrain.run_directory import CheckpointError
    from pretrain.samples import PROMPTS, Samples, samples
    from tokenizer.codec import TokenizerError

    try:
        with memory_told("add --no-samples"):
            return samples(run, which.value, prompts or PROMPTS, seed, os.environ.get("DS_ACCELERATOR"))
    except (CheckpointError, TokenizerError, RecipeError) as error:
        if prompts:
            raise
        print(f"warning: no samples: {error}", file=sys.stderr)
        return Samples(None, "", (), str(error))
