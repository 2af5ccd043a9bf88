"""A checkpoint as a model of other programs, and a model of Hugging Face's as a checkpoint that a run can start from.

What is written is whole or not there. What a program would read otherwise is refused: the tokenizer's ids are compared
with SentencePiece's before anything is written, the weights' names, shapes and dtypes before any is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig, ModelConfigError
from model.huggingface import (
    CONFIG,
    INDEX,
    WEIGHTS,
    WeightsError,
    from_config,
    read_weights,
    to_config,
    write_weights,
)
from pretrain.checkpoint import find, load_weights, tokenizer_of, verify, write_imported
from pretrain.run_directory import CheckpointError, RunDirectory
from tokenizer.codec import DESCRIPTION_FILE, Codec, refuse_occupied
from tokenizer.export import EXPORTED_FILES, hf_files
from tokenizer.folder import published, refuse_unwritable

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATION = "generation_config.json"

_EXPORTED = frozenset({CONFIG, GENERATION, WEIGHTS, INDEX, DESCRIPTION_FILE, *EXPORTED_FILES})
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
IMPORTED = frozenset({"manifest.json", "model.json", "weights.safetensors", "tokenizer", "averaged.json"})


@dataclass(frozen=True)
class Report:
    """What was written: sizes of files in bytes, the dtype of the weights, the vocabularies of model and tokenizer."""

    out: str
    parameters: int
    dtype: str
    vocab_size: int
    tokenizer_vocab_size: int
    files: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"{self.out}: {self.parameters:,} parameters in {self.dtype}"]
        lines += [f"  {size:>15,} bytes  {name}" for name, size in self.files.items()]
        if self.vocab_size > self.tokenizer_vocab_size:
            lines.append(
                f"the model's vocabulary of {self.vocab_size:,} is padded: the tokenizer gives "
                f"{self.tokenizer_vocab_size:,} ids"
            )
        return "\n".join(lines)


def export_hf(
    checkpoint: Path, out: Path, *, dtype: str | None, max_shard_bytes: int, overwrite: bool = False
) -> Report:
    """Write a checkpoint (or a run's newest) as a folder that transformers and servers load.

    dtype: of the weights, one of DTYPES, or None for that of the checkpoint. Raises CheckpointError or TokenizerError:
    a checkpoint that is damaged or no model of theirs, a tokenizer that can't be written with equal ids, an `out` that
    is occupied.
    """
    refuse_unwritable(out)
    refuse_occupied(out, overwrite=overwrite, replaceable=_replaceable(out), kind="model")
    config, weights, codec = load_for_export(checkpoint, dtype)
    stored = next(iter(weights.values())).dtype
    try:
        sizes = to_config(config, stored)
    except ModelConfigError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None
    texts = {
        CONFIG: {**sizes, **_token_ids(codec)},
        GENERATION: generation_config(config, codec),
    }
    files, _ = hf_files(codec.folder)
    files[DESCRIPTION_FILE] = (codec.folder / DESCRIPTION_FILE).read_bytes()  # with it, `import` knows the tokenizer
    with published(out, overwrite=overwrite, replaceable=_replaceable(out), kind="model") as fresh:
        write_weights(fresh, weights, config, max_shard_bytes=max_shard_bytes)
        for name, table in texts.items():
            (fresh / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        for name, content in files.items():
            (fresh / name).write_bytes(content)
    return report(out, sorted(out.iterdir()), weights, config.vocab_size, codec)


def load_for_export(checkpoint: Path, dtype: str | None) -> tuple[ModelConfig, dict[str, Tensor], Codec]:
    """The sizes, the weights in `dtype` and the tokenizer of a checkpoint or a run's newest, verified.

    Raises CheckpointError or TokenizerError where one of them is damaged, and where a weight does not fit the dtype.
    """
    path = find(checkpoint)
    verify(path)
    config, weights = load_weights(path)
    codec = Codec.load(tokenizer_of(path))
    return config, {name: _cast(name, weight, dtype) for name, weight in weights.items()}, codec


def _cast(name: str, weight: Tensor, dtype: str | None) -> Tensor:
    cast = weight if dtype is None else weight.to(DTYPES[dtype])
    if cast.dtype != weight.dtype and cast.isinf().any() and not weight.isinf().any():
        raise CheckpointError(
            f"{name} holds {float(weight.abs().max()):.4g}, which {dtype} can't: choose --dtype bf16 or fp32"
        )
    return cast


def _token_ids(codec: Codec) -> dict[str, int]:
    return {f"{name}_token_id": codec.control_ids[name] for name in ("bos", "eos", "pad")}


def generation_config(config: ModelConfig, codec: Codec) -> dict[str, Any]:
    """What transformers' `generate` is to know. A text out of nothing begins as documents do in training, behind an
    EOS; ids that pad the model's vocabulary stand for nothing, and are never chosen.
    """
    table: dict[str, Any] = {**_token_ids(codec), "bos_token_id": codec.eos_id}
    if config.vocab_size > codec.vocab_size:
        table["suppress_tokens"] = list(range(codec.vocab_size, config.vocab_size))
    return table


def _replaceable(out: Path) -> frozenset[str]:
    """What of `out` --overwrite may take away: files that an export writes, where its sizes and its tokenizer's
    description are among them. A model of someone else's has no such description.
    """
    names = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    if not {CONFIG, DESCRIPTION_FILE} <= names:
        return frozenset()
    return frozenset(name for name in names if name in _EXPORTED or _SHARD.fullmatch(name))


# ---------------------------------------------------------------- in


def import_hf(
    folder: Path, out: Path, *, tokenizer: Path | None, rope_layout: str, overwrite: bool = False
) -> tuple[Report, ModelConfig]:
    """Make a checkpoint that a run can start from of a folder that transformers' save_pretrained wrote.

    The weights stay as they are, in their dtype; `rope_layout` is that of the checkpoint. tokenizer: the one that the
    ids are of, where `folder` holds none of ours. Raises CheckpointError or TokenizerError: a model that ours can't be,
    files damaged or of two models, no tokenizer, an `out` that is occupied.
    """
    refuse_unwritable(out)
    refuse_among_checkpoints(out)
    refuse_occupied(out, overwrite=overwrite, replaceable=IMPORTED, kind="checkpoint")
    try:
        config = replace(read_config(folder), rope_layout=rope_layout)
        codec = tokenizer_in(folder, tokenizer, config)
        weights = read_weights(folder, config)
    except WeightsError as error:
        raise CheckpointError(str(error)) from None
    with published(out, overwrite=overwrite, replaceable=IMPORTED, kind="checkpoint") as fresh:
        write_imported(fresh, config, weights, codec)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return report(out, files, weights, config.vocab_size, codec), config


def refuse_among_checkpoints(out: Path) -> None:
    """Raise CheckpointError where `out`, a place for weights without a run, is one for a run's checkpoints."""
    run = RunDirectory(out.absolute().parents[1])
    if run.checkpoints == out.absolute().parent and run.recipe.exists():
        raise CheckpointError(
            f"{out} is among the checkpoints of a run, which could not resume from weights alone: name a place of "
            "their own, and start a run from it with initial_weights"
        )


def read_config(folder: Path) -> ModelConfig:
    """The sizes in a folder's config.json. Raises WeightsError for what is no model of ours."""
    path = folder / CONFIG
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        what = "is no JSON" if path.is_file() else "is missing"
        raise WeightsError(f"{path} {what}: name the folder that save_pretrained wrote") from None
    if not isinstance(table, dict):
        raise WeightsError(f"{path} holds no JSON object: name the folder that save_pretrained wrote")
    try:
        return from_config(table)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def tokenizer_in(folder: Path, given: Path | None, config: ModelConfig) -> Codec:
    """The tokenizer of the ids that a folder's model knows: `given`, or one of ours that lies in the folder.

    Raises CheckpointError where there is none, or where it gives ids that the model has not.
    """
    if given is None and not (folder / DESCRIPTION_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no tokenizer that this program made ({DESCRIPTION_FILE} is missing): give --tokenizer, "
            "the one that gave the ids this model learnt from"
        )
    codec = Codec.load(given or folder)
    if codec.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{codec.folder} gives ids up to {codec.vocab_size - 1}, the model in {folder} knows {config.vocab_size}: "
            "they don't belong together"
        )
    return codec


def report(out: Path, files: list[Path], weights: Mapping[str, Tensor], vocab_size: int, codec: Codec) -> Report:
    """What stands at `out`, a folder or a file."""
    return Report(
        out=str(out),
        parameters=sum(weight.numel() for weight in weights.values()),
        dtype=str(next(iter(weights.values())).dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        tokenizer_vocab_size=codec.vocab_size,
        files={str(file.relative_to(out)) if file != out else file.name: file.stat().st_size for file in files},
    )
