"""pretrain evaluate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import AsJson, Checkpoint
from pretrain.verbs.telling import memory_told, progress

EXAMPLES = """
python -m pretrain evaluate runs/mini
python -m pretrain evaluate runs/mini/checkpoints/step-00001000 --data data/mine --json
"""


def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A collection written by prepare; the run's own if not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=65536, metavar="N", help="Sequences scored at a time.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Score at most so many tokens of each source.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out loss, perplexity and bits per byte of each source, beside the uniform and the unigram baseline."""
    from rich.console import Console
    from rich.table import Table

    from pretrain.evaluate import evaluate_checkpoint

    smaller = f"set --batch-size below {batch_size}" if batch_size > 1 else "use a machine or a GPU with more memory"
    with memory_told(smaller), progress("scored", "tokens") as show:
        scores = evaluate_checkpoint(
            checkpoint,
            data,
            batch_size=batch_size,
            max_tokens=max_tokens,
            accelerator=os.environ.get("DS_ACCELERATOR"),
            on_tokens=show,
        )
    if as_json:
        print(json.dumps({source: score.to_dict() for source, score in scores.items()}, indent=2))
        return
    table = Table("source", "tokens", "loss", "perplexity", "bits/byte", "unigram", "uniform", "below unigram")
    for column in table.columns[1:]:
        column.justify = "right"
    for source, score in scores.items():
        bits = f"{score.bits_per_byte:.4f}" if score.bytes_exact else f"about {score.bits_per_byte:.3f}"
        figures = (score.loss, score.perplexity, score.unigram, score.uniform, score.unigram - score.loss)
        loss, perplexity, unigram, uniform, gain = (f"{figure:.4f}" for figure in figures)
        table.add_row(source, f"{score.tokens:,}", loss, perplexity, bits, unigram, uniform, gain)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    print("loss, unigram and uniform in nats per token; bits per UTF-8 byte of the source text")
