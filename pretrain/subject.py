"""What can be evaluated and sampled, opened in one way: a run, a checkpoint, or a folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.config import ModelConfig
from model.huggingface import CONFIG, WeightsError, read_weights
from model.transformer import Transformer
from pretrain.changes import read_otherwise
from pretrain.checkpoint import find, load_model, model_of, run_of, step_of, tokenizer_of
from pretrain.config import RunConfig, load_recipe
from pretrain.export import read_config, tokenizer_in
from pretrain.run_directory import CheckpointError
from pretrain.runtime import pick_device
from tokenizer.codec import Codec


@dataclass(frozen=True)
class Subject:
    """A model with the tokenizer it learnt from, ready to be asked; `recipe` where it stands in a run."""

    path: Path  # the checkpoint, or the folder
    name: str  # for people
    model: Transformer
    codec: Codec
    device: torch.device
    step: int | None = None
    recipe: RunConfig | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def open_subject(
    path: Path, *, accelerator: str | None = None, local_rank: int = 0, overrides: Sequence[str] = ()
) -> Subject:
    """The newest whole checkpoint of a run, the checkpoint named, or what `export_hf` or another program wrote as a
    LlamaForCausalLM beside a tokenizer of ours.

    `overrides`: other values of the model's fields to read the weights with, see `changes.read_otherwise`.
    Raises CheckpointError or TokenizerError, in one line: nothing there, files damaged, a model or tokenizer that this
    program does not know or that do not belong together; RecipeError for an override.
    """
    subject = _open(path, pick_device(local_rank, accelerator))
    if not overrides:
        return subject
    config, weights = read_otherwise(subject.config, overrides), dict(subject.model.named_parameters())
    model = model_of(config, weights, subject.path, subject.device)
    return replace(subject, model=model, name=f"{subject.name}, {', '.join(overrides)}")


def _open(path: Path, device: torch.device) -> Subject:
    ours = any((path / name).exists() for name in ("manifest.json", "checkpoints"))
    if (path / CONFIG).is_file() and not ours:
        return _of_hugging_face(path, device)
    checkpoint = find(path)
    codec = Codec.load(tokenizer_of(checkpoint))
    model = load_model(checkpoint, device)
    if codec.vocab_size > model.config.vocab_size:
        raise CheckpointError(
            f"{codec.folder} gives ids up to {codec.vocab_size - 1}, the model of {checkpoint} knows "
            f"{model.config.vocab_size}: they don't belong together"
        )
    if (checkpoint / "tokenizer").is_dir():  # imported or averaged: no run behind it
        return Subject(checkpoint, str(checkpoint), model, codec, device)
    run, step = run_of(checkpoint), step_of(checkpoint)
    return Subject(checkpoint, f"{run.path}, step {step}", model, codec, device, step, load_recipe(run.recipe))


def _of_hugging_face(folder: Path, device: torch.device) -> Subject:
    try:
        config = read_config(folder)
        codec = tokenizer_in(folder, None, config)
        weights = read_weights(folder, config)
    except WeightsError as error:
        raise CheckpointError(str(error)) from None
    return Subject(folder, str(folder), model_of(config, weights, folder, device), codec, device)


def describes_a_run_still_written(path: Path) -> str | None:
    """A line to say where `path` is a run that goes on meanwhile, else None."""
    status = path / "status.json"
    if not status.is_file():
        return None
    try:
        state = json.loads(status.read_bytes()).get("state")
    except (OSError, ValueError, AttributeError):
        return None
    return (
        f"{path} is running or was killed: what is read is its newest whole checkpoint" if state == "running" else None
    )
