"""pretrain import."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import AsJson


class _Layout(StrEnum):
    ROTATE_HALF = "rotate_half"
    INTERLEAVED = "interleaved"


EXAMPLES = """
python -m pretrain import downloads/llama --tokenizer tokenizers/books --out imported/x
python -m pretrain import exported/mini --out imported/mini
python -m pretrain run recipe.toml --set initial_weights=imported/mini
"""


def import_weights(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What save_pretrained wrote: config.json and safetensors.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The checkpoint to make.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The tokenizer of the ids; where the folder has one of ours, that one."),
    ] = None,
    rope_layout: Annotated[
        _Layout, typer.Option("--rope-layout", help="Which dimensions RoPE is to pair in the checkpoint.")
    ] = _Layout.ROTATE_HALF,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an import that stands at --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a Llama, Mistral, Qwen3 or GPT-2: training starts from it, other commands take it."""
    from pretrain.export import import_hf

    done, config = import_hf(folder, out, tokenizer=tokenizer, rope_layout=rope_layout.value, overwrite=overwrite)
    if as_json:
        print(json.dumps({**done.to_dict(), "model": config.to_dict()}, indent=2))
        return
    print(f"{done.to_text()}\n\nin a recipe that starts from it:\n\ninitial_weights = {json.dumps(done.out)}\n")
    print("\n".join(["[model]", *(f"{name} = {json.dumps(value)}" for name, value in config.to_dict().items())]))
