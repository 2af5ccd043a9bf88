"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's TOML file, see pretrain/recipes.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value: --set schedule.peak_lr=3e-4."),
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run directory (its newest checkpoint) or a checkpoint.")
]
Asked = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CHECKPOINT|HF_DIR",
        help="A run directory (its newest checkpoint), a checkpoint, or a folder in Hugging Face's format.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        metavar="NAME",
        help="Let a resume have another global_batch_size, seq_len, data or model from here on. May be repeated; may "
        "stay in the command.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
