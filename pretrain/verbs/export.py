"""pretrain export."""

from __future__ import annotations

import importlib.util
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import AsJson, Checkpoint


class _Format(StrEnum):
    HF = "hf"
    GGUF = "gguf"


class _Dtype(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


EXAMPLES = """
python -m pretrain export runs/mini --out exported/mini
python -m pretrain export runs/mini/checkpoints/step-00001000 --out exported/mini --dtype bf16 --overwrite
python -m pretrain export runs/mini --format gguf --out exported/mini.gguf
"""


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder to make; of gguf the file.")],
    form: Annotated[
        _Format,
        typer.Option("--format", help="hf: for transformers and servers. gguf: a Llama for llama.cpp."),
    ] = _Format.HF,
    dtype: Annotated[_Dtype | None, typer.Option(help="Of the weights; the checkpoint's if not given.")] = None,
    max_shard_bytes: Annotated[
        str | None,
        typer.Option("--max-shard-bytes", metavar="SIZE", help="Weights above it are several files; 5GB if not given."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that stands at --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model for other programs, its tokenizer included; see docs/export.md."""
    from pretrain.config import RecipeError
    from pretrain.plan import parse_memory

    if form is _Format.GGUF and max_shard_bytes is not None:
        raise RecipeError("--max-shard-bytes: a GGUF is one file: leave it out")
    shard_bytes = parse_memory(max_shard_bytes or "5GB", "--max-shard-bytes")
    wanted = None if dtype is None else dtype.value
    if form is _Format.GGUF:
        if importlib.util.find_spec("gguf") is None:
            raise RecipeError("--format gguf needs the package gguf: pip install -e '.[gguf]'")
        from pretrain.export_gguf import export_gguf

        done = export_gguf(checkpoint, out, dtype=wanted, overwrite=overwrite)
    else:
        from pretrain.export import export_hf

        done = export_hf(checkpoint, out, dtype=wanted, max_shard_bytes=shard_bytes, overwrite=overwrite)
    print(json.dumps(done.to_dict(), indent=2) if as_json else done.to_text())
