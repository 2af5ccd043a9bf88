"""Checkpoints: written aside, made durable, verified by hash, and only then named.

    checkpoints/step-00001000/
      engine/               DeepSpeed's own files, one or more a rank: masters, moments, weights
      weights.safetensors   the whole model in the dtype it computes in, tied weights once: evaluate, generate, export
      model.json            the ModelConfig of those weights
      state.json            TrainState, the identity of the run (order of data, batch, ranks, ZeRO stage, precision),
                            and what the step measured: its losses, and whether every number saved is finite
      rng-00000.pt …        torch's generator state, one a rank
      manifest.json         written last: size and sha256 of every other file
    checkpoints/latest      the name of the newest one

Protocol of a save: all ranks write into `step-….partial`; each flushes and hashes its share of the files; the first
rank writes the manifest, renames the folder, moves `latest`, then prunes (see retention.py). A kill anywhere leaves
either the old `latest` or the new one, both whole. Loading verifies every hash and falls back to the newest checkpoint
that is whole and whose numbers are finite. What a manifest names is read only within its folder, and nothing that is
read can run code.

Imported weights are a checkpoint without a run: weights.safetensors, model.json, the tokenizer they belong to, and
manifest.json. A run can start from them, evaluate, generate and export take them; nothing can resume from them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from data_pipeline.durable import file_sha256, sync_folder
from data_pipeline.order import difference
from data_pipeline.steps import Steps
from model.config import ModelConfig, ModelConfigError
from model.huggingface import save_tensors
from pretrain.batching import BatchPlan
from pretrain.retention import Retention, Saved
from pretrain.run_directory import CheckpointError, RunDirectory, write_text
from pretrain.runtime import Ranks, one_ranks_fault

if TYPE_CHECKING:
    from model.transformer import Transformer
    from pretrain.engine import TrainingEngine
    from tokenizer.codec import Codec

FORMAT = "zerohalf-checkpoint"
FORMAT_VERSION = 1

SPREAD = ("world_size", "zero_stage")  # of a run's identity: how its state is spread, not what it is

_STEP = re.compile(r"step-\d{8,}")


@dataclass
class TrainState:
    """Where a run is: all that the loop counts."""

    global_step: int = 0
    consumed_samples: int = 0
    tokens_seen: int = 0

    @classmethod
    def of(cls, checkpoint: Path) -> TrainState:
        """The state that a checkpoint describes."""
        stored = _read_json(checkpoint / "state.json")
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})

    def advance(self, plan: BatchPlan, tokens: int) -> None:
        """Count one more step, which learnt from `tokens` targets (padding is none)."""
        self.global_step += 1
        self.consumed_samples += plan.global_batch_size
        self.tokens_seen += tokens


@dataclass(frozen=True)
class Measured:
    """What the step before a checkpoint measured, as its state.json tells it."""

    loss: float  # nats per token, before the step's update
    grad_norm: float
    overflowed: bool = False  # in fp16, so that the gradient was left out: its norm says nothing of the weights
    heldout_loss: float | None = None  # of all sources, nats per token; None where this step was not evaluated

    def to_dict(self, *, finite: bool) -> dict[str, float | bool | None]:
        """`finite`: all weights, masters and moments are. JSON has no infinity: what is not finite is null."""
        figures = {"loss": self.loss, "grad_norm": self.grad_norm, "heldout_loss": self.heldout_loss}
        told = {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
        excused = {"grad_norm"} if self.overflowed else set()
        sound = all(name in told or value is None or name in excused for name, value in figures.items())
        return {**{name: told.get(name) for name in figures}, "healthy": finite and sound}


class Checkpoints:
    """The checkpoints of one run. Its methods are called on all ranks together."""

    def __init__(
        self, folder: Path, retention: Retention, ranks: Ranks, say: Callable[[str], None] = lambda message: None
    ) -> None:
        self.folder = folder
        self.retention = retention
        self.ranks = ranks
        self.say = say

    def save(self, engine: TrainingEngine, state: TrainState, identity: Mapping[str, Any], measured: Measured) -> Path:
        """Write a checkpoint of `state`; on return it is durable and `latest` names it.

        One that holds numbers which are not finite is told of, and never costs the last healthy one its place.
        """
        record = measured.to_dict(finite=engine.is_finite())
        final = self.folder / f"step-{state.global_step:08d}"
        partial = final.with_name(final.name + ".partial")
        if self.ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.ranks.barrier()
        with _full_disk_told(partial):
            engine.save(partial / "engine")
            torch.save(torch.get_rng_state(), partial / f"rng-{self.ranks.rank:05d}.pt")
            weights = engine.gather_weights()
            if self.ranks.is_first:
                save_tensors(weights, partial / "weights.safetensors")
                (partial / "model.json").write_text(json.dumps(engine.model_config.to_dict(), indent=2) + "\n")
                described = {**asdict(state), **identity, "measured": record}
                (partial / "state.json").write_text(json.dumps(described, indent=2) + "\n")
            del weights
            self.ranks.barrier()
            files = self._receipts(partial)
        if self.ranks.is_first:
            # No newline behind the last brace: cut by one byte, it is no JSON any more.
            write_text(partial / "manifest.json", json.dumps(manifest_of(files), indent=2))
            if final.exists():  # a run resumed from before it, saving the same step again
                shutil.rmtree(final)
            partial.rename(final)
            sync_folder(self.folder)
            write_text(self.folder / "latest", final.name + "\n")
            self._prune()
            if not record["healthy"]:
                self.say(
                    f"warning: step {state.global_step}: not every weight and moment is a finite number; {final.name} "
                    "is kept to be looked at, beside the last healthy checkpoint, and no run will resume from it"
                )
        self.ranks.barrier()
        return final

    def _receipts(self, partial: Path) -> dict[str, dict[str, int | str]]:
        """Flush and hash every file, each rank its share; the union, on every rank."""
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        mine = {}
        for path in paths[self.ranks.rank :: self.ranks.world_size]:
            mine[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": _hash_durable(path)}
        if self.ranks.is_first:
            for folder in {path.parent for path in paths}:
                sync_folder(folder)
        receipts: dict[str, dict[str, int | str]] = {}
        for share in self.ranks.gather(mine):
            receipts.update(share)
        return dict(sorted(receipts.items()))

    def _prune(self) -> None:
        checkpoints = list_checkpoints(self.folder)
        reasons = self.retention.reasons([saved(path) for path in checkpoints])
        for path in checkpoints:
            if not reasons[step_of(path)]:
                remove(path)

    def load(self, path: Path, engine: TrainingEngine) -> TrainState:
        """Put a checkpoint of this run (see `choose`) into the engine, and return the state it describes.

        One of other ranks or another ZeRO stage is converted, and that is said.
        """
        with one_ranks_fault():  # each reads files of its own
            try:
                written = engine.load(path / "engine")
                if written is None or self.ranks.rank < written.world_size:
                    torch.set_rng_state(torch.load(path / f"rng-{self.ranks.rank:05d}.pt", weights_only=True))
            except pickle.UnpicklingError as error:
                name = re.search(r"GLOBAL (\S+)", str(error))
                raise CheckpointError(
                    f"{path} holds {name[1] if name else 'something'}, which is neither a tensor nor a number and "
                    "could run when it is loaded: it was not; take a checkpoint that a run of this program wrote"
                ) from None
        if written is not None:
            self.say(f"{path} was written by {written}: converted for {engine.layout().told_beside(written)}")
        return TrainState.of(path)


# ---------------------------------------------------------------- before a run, one process alone


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save or prune left behind."""
    for leftover in [*folder.glob("step-*.partial"), *folder.glob("step-*.deleted")]:
        shutil.rmtree(leftover)


def choose(
    folder: Path, resume: str, identity: Mapping[str, Any], say: Callable[[str], None] = lambda message: None
) -> Path | None:
    """The checkpoint to resume from, verified and this run's; None for a fresh start.

    `resume` is "auto" (the newest whole checkpoint in `folder`, if there is one), "never" (CheckpointError if there is
    one), or a path: that checkpoint, unless the run has gone on from it already; then the run's newest, or, for an
    older one of its own, CheckpointError. CheckpointError too where the chosen one is another run's or other ranks'.
    """
    if resume == "never":
        if list_checkpoints(folder):
            raise CheckpointError(
                f"{folder} already holds checkpoints: choose another --run, or leave out --resume never"
            )
        return None
    chosen = newest_whole(folder, say)
    if resume != "auto":
        wanted = Path(resume).resolve()
        if not any((wanted / name).exists() for name in ("manifest.json", "engine")):
            raise CheckpointError(
                f"--resume {resume}: no checkpoint there; say auto, never, or the folder of a checkpoint, such as "
                "runs/a/checkpoints/step-00001000"
            )
        verify(wanted)
        refuse_unhealthy(wanted)
        if not (wanted / "engine").is_dir():
            raise CheckpointError(
                f"{wanted} holds weights without a state of training: to start from them, "
                f"set initial_weights = {wanted} in the recipe and leave out --resume"
            )
        own = wanted.parent == folder.resolve()
        if own and chosen is not None and chosen.resolve() != wanted:
            raise CheckpointError(
                f"{folder} goes on behind {wanted.name}, to {chosen.name}: to branch off from {wanted.name}, "
                "choose another --run"
            )
        if chosen is None:
            chosen = wanted
    if chosen is not None:
        refuse_other_run(chosen, identity)
    return chosen


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest healthy checkpoint whose files all have the recorded hashes; None if there is none at all.

    Others on the way are told of and renamed to step-….damaged or step-….unhealthy. CheckpointError where there are
    only such.
    """
    candidates = list_checkpoints(folder)
    aside: list[tuple[Path, str]] = []
    for path in reversed(candidates):
        suffix = ".damaged"
        try:
            verify(path)
            suffix = ".unhealthy"
            refuse_unhealthy(path)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
            aside.append((path, suffix))
            continue
        for other, suffix in aside:
            other.rename(_unused_name(other.with_name(other.name + suffix)))
        return path
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} is whole and healthy: restore one from a copy, "
            "or start over with another --run"
        )
    return None


def _unused_name(path: Path) -> Path:
    number = 2
    candidate = path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def refuse_other_run(path: Path, identity: Mapping[str, Any]) -> None:
    """Raises CheckpointError, in one line, where a checkpoint's identity is not this run's.

    Stages of the mixture and parts of the batch ramp that have not begun yet may differ: what has been read, step by
    step, is the same. Ranks and ZeRO stage may differ: `Checkpoints.load` converts.
    """
    stored = _read_json(path / "state.json")
    line = difference(stored["order"], identity["order"], consumed_samples=stored["consumed_samples"])
    if line is not None:
        raise CheckpointError(f"{path}: {line}; resume with the data it was trained on, or choose another --run")
    _refuse_other_steps(path, stored, identity)
    stored, identity = with_defaults(stored), with_defaults(identity)
    for name, value in identity.items():
        if name in ("order", "global_batch_size", "batch_ramp", *SPREAD):
            continue
        earlier = stored[name]
        if earlier == value:
            continue
        if isinstance(value, dict):
            key = next(key for key in {**earlier, **value} if earlier.get(key) != value.get(key))
            name, earlier, value = f"{name}.{key}", earlier.get(key), value.get(key)
        remedy = f"resume with the same {name}"
        if name == "precision.compute":  # "auto" is another one on another device
            remedy = f'resume with precision.compute = "{earlier}"'
        raise CheckpointError(
            f"{path} was written with {name} = {earlier}, this run has {value}: {remedy}, or choose another --run"
        )


def converted_from(path: Path, identity: Mapping[str, Any]) -> dict[str, int] | None:
    """The ranks and the ZeRO stage that wrote a checkpoint, where one of them is not this run's."""
    stored = _read_json(path / "state.json")
    same = all(stored[name] == identity[name] for name in SPREAD)
    return None if same else {name: stored[name] for name in SPREAD}


def with_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with what it leaves out of precision and optimizer because it is the default."""
    precision, optimizer = identity["precision"], identity.get("optimizer", {})
    return {
        **identity,
        "precision": {**precision, "moments": precision["master"], "compensation": "none", **precision},
        "optimizer": {"name": "adamw", "decay_embeddings": True, **optimizer},
    }


def _refuse_other_steps(path: Path, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    earlier, ours = (Steps.from_json(one["global_batch_size"], one.get("batch_ramp", [])) for one in (stored, identity))
    consumed = stored["consumed_samples"]
    if earlier.parts(consumed) == ours.parts(consumed):
        return
    parts = [f"{{ until_samples = {end}, global_batch_size = {size} }}" for end, size in earlier.parts(consumed)]
    raise CheckpointError(
        f"{path} was written with global_batch_size = {earlier.told(consumed)}, this run has {ours.told(consumed)}: "
        f"resume with the same, or choose another --run, or have another from here on, with batch.ramp = "
        f"[{', '.join(parts)}]"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Folders named step-NNNNNNNN with a manifest, oldest first; not verified."""
    found = [p for p in folder.glob("step-*") if _STEP.fullmatch(p.name) and (p / "manifest.json").exists()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def saved(path: Path) -> Saved:
    """What retention is to know of a checkpoint.

    One of earlier versions, which recorded no health, passes for healthy; one whose state cannot be read does not.
    """
    try:
        _read_json(path / "state.json")
        measured = measured_at(path)
    except CheckpointError:
        return Saved(step_of(path), healthy=False)
    score = measured.get("heldout_loss")
    return Saved(step_of(path), score if isinstance(score, float) else None, measured.get("healthy", True) is True)


def measured_at(path: Path) -> dict[str, Any]:
    """What a checkpoint tells of the step before it (see `Measured`); empty where it tells nothing.

    Weights without a run have no state, checkpoints of earlier versions one without this. CheckpointError: damaged.
    """
    if not (path / "state.json").exists():
        return {}
    measured = _read_json(path / "state.json").get("measured", {})
    if not isinstance(measured, dict):
        raise CheckpointError(f"{path}/state.json is damaged")
    return measured


def refuse_unhealthy(path: Path) -> None:
    """Raise CheckpointError where the state of a checkpoint says that some of its numbers are not finite."""
    if measured_at(path).get("healthy") is False:
        raise CheckpointError(f"{path} holds weights or moments that are not finite: use an earlier checkpoint")


def remove(path: Path) -> None:
    """Delete a checkpoint. Renamed first: a kill meanwhile must not leave something that carries such a name."""
    doomed = path.with_name(path.name + ".deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError where it is missing, damaged or names a place outside."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    manifest = _read_json(path / "manifest.json")
    found = manifest.get("format"), manifest.get("version")
    if found != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(f"{path}/manifest.json says format {found[0]} {found[1]}, not {FORMAT} {FORMAT_VERSION}")
    files = manifest.get("files")
    if not isinstance(files, dict) or digest(files) != manifest.get("files_sha256"):
        raise CheckpointError(f"{path}/manifest.json is damaged")
    home = os.path.realpath(path)
    for name, record in files.items():
        if "\0" in name or not Path(os.path.realpath(path / name)).is_relative_to(home):
            raise CheckpointError(f"{path}/manifest.json names {name!r}, which is outside its folder: it is not used")
        if not isinstance(record, dict) or not isinstance(record.get("bytes"), int):
            raise CheckpointError(f"{path}/manifest.json is damaged")
    return manifest


def verify(path: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Raise CheckpointError, naming the file, unless every file is there with its recorded size and sha256.

    `on_bytes` hears of every piece read.
    """
    for name, record in read_manifest(path)["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != record["bytes"]:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {record['bytes']} were written")
        if file_sha256(file, on_bytes) != record.get("sha256"):
            raise CheckpointError(f"{file} is damaged: its sha256 is not the recorded one")


def manifest_of(files: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "version": FORMAT_VERSION, "files": files, "files_sha256": digest(files)}


def digest(files: Mapping[str, Any]) -> str:
    """What a manifest says of its own list of files, so that a damaged list is noticed."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is missing or damaged") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged")
    return content


def find(path: Path) -> Path:
    """The checkpoint meant by `path`: itself, or the newest of a run. Raises CheckpointError where there is none."""
    if (path / "manifest.json").exists() and (path / "weights.safetensors").exists():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; name a run directory or a checkpoint in it")
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint; the first is written at checkpoint.every_steps")
    return found[-1]


def run_of(path: Path) -> RunDirectory:
    """The run that a run directory or checkpoint belongs to. Raises CheckpointError where it stands in none."""
    run = RunDirectory(find(path).parent.parent)
    if not run.recipe.is_file() or not run.tokenizer.is_dir():
        raise CheckpointError(
            f"{path} stands in no run directory: {run.path} lacks recipe.toml or tokenizer/; copy the checkpoint "
            "together with them, as RUN/checkpoints/NAME"
        )
    return run


def tokenizer_of(path: Path) -> Path:
    """The tokenizer's folder that goes with a checkpoint: its own, if it was imported, or its run's."""
    own = find(path) / "tokenizer"
    return own if own.is_dir() else run_of(path).tokenizer


def load_weights(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The sizes and the weights by name of a checkpoint, tied weights once, as stored. To be verified before.

    Raises CheckpointError where this version knows no such model, and where the weights are not finite.
    """
    refuse_unhealthy(path)
    try:
        return model_config(path), load_file(path / "weights.safetensors")
    except SafetensorError as error:
        raise CheckpointError(f"{path}/weights.safetensors is no file of safetensors: {error}") from None


def open_weights(path: Path) -> safe_open:
    """A checkpoint's weights to be read one by one (keys, get_tensor), as a context. To be verified before."""
    try:
        return safe_open(path / "weights.safetensors", "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path}/weights.safetensors is no file of safetensors: {error}") from None


def model_config(path: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint's weights. Raises CheckpointError where this version knows no such model."""
    try:
        return ModelConfig(**_read_json(path / "model.json"))
    except (TypeError, ModelConfigError) as error:
        raise CheckpointError(f"{path}/model.json is of another version of this program: {error}") from None


def fill(model: Transformer, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Put a checkpoint's weights into a model of its sizes, cast to the model's dtype.

    Raises CheckpointError unless they are all of the model's, tied ones once.
    """
    missing = model.load_state_dict(weights, strict=False).missing_keys
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    if set(missing) - tied:
        raise CheckpointError(f"{path}/weights.safetensors lacks {sorted(set(missing) - tied)[:3]} of {len(missing)}")


def load_model(path: Path, device: torch.device | None = None) -> Transformer:
    """The model of a checkpoint (or of a run's newest) on a device, by default the CPU, in the dtype of its training.

    A CPU computes fp16 weights in fp32, with a warning: fp32 holds them exactly, and CPUs have kernels for it.
    Raises CheckpointError where the files are damaged or do not fit each other.
    """
    from model.transformer import Transformer

    path = find(path)
    verify(path)
    config, weights = load_weights(path)
    dtype = next(iter(weights.values())).dtype
    if dtype == torch.float16 and (device is None or device.type == "cpu"):
        warnings.warn(f"{path}: its fp16 weights are computed in fp32 on this CPU", stacklevel=2)
        dtype = torch.float32
    model = Transformer(config).to(dtype)
    fill(model, weights, path)
    return model.to(device).eval()


def refuse_other_model(path: Path, config: ModelConfig) -> None:
    """Raise CheckpointError, naming the size, unless a run of `config` can start from the weights of a checkpoint.

    seq_len and init_std say nothing of what weights mean, and may differ.
    """
    stored, wanted = model_config(path).to_dict(), config.to_dict()
    for name in stored:
        if stored[name] == wanted[name] or name in ("seq_len", "init_std"):
            continue
        remedy = f"set model.{name} = {json.dumps(stored[name])}"
        if name == "rope_layout":
            remedy += f", or export them and import them again with --rope-layout {wanted[name]}"
        raise CheckpointError(
            f"initial_weights {path} are of a model with {name} = {json.dumps(stored[name])}, the recipe's has "
            f"{json.dumps(wanted[name])}: {remedy}"
        )


def write_imported(folder: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor], codec: Codec) -> None:
    """Make a checkpoint without a run in a folder: weights as they are, sizes, tokenizer; the manifest of all there."""
    save_tensors(weights, folder / "weights.safetensors")
    (folder / "model.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    codec.copy_to(folder / "tokenizer")
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / "manifest.json").write_text(json.dumps(manifest_of(files), indent=2))


@contextmanager
def _full_disk_told(partial: Path) -> Iterator[None]:
    """Say in one line that the disk is full, however the writer that met it put it, and give back what was written.

    torch and safetensors report it in words of their own, some without one of the disk.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        free_bytes = shutil.disk_usage(partial.parent).free
        if not full and free_bytes >= 2**20 and "No space left" not in str(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"{partial.parent}: the disk is full, nothing was saved at {partial.stem}, the checkpoints before it are "
            "whole: make room (or lower checkpoint.keep_last) and start the same command again"
        ) from error


def _hash_durable(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_sha256(path)
