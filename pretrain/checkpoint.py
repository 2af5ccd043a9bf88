"""What a checkpoint is, and how any process reads it; written by saving.py, chosen by resuming.py.

    checkpoints/step-00001000/
      engine/               DeepSpeed's own files, one or more a rank: masters, moments, weights
      weights.safetensors   the whole model in the dtype it computes in, tied weights once: evaluate, generate, export
      model.json            the ModelConfig of those weights
      state.json            TrainState, the identity of the run (order of data, batch, ranks, ZeRO stage, precision),
                            and what the step measured: its losses, and whether every number saved is finite
      rng-00000.pt …        torch's generator state, one a rank
      manifest.json         written last: size and sha256 of every other file
    checkpoints/latest      the name of the newest one
    checkpoints/best        the name of the one with the lowest held-out loss, of those that stay

What a manifest names is read only within its folder, and nothing that is read can run code.

Imported weights are a checkpoint without a run: weights.safetensors, model.json, the tokenizer they belong to, and
manifest.json. A run can start from them, evaluate, generate and export take them; nothing can resume from them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from data_pipeline.durable import file_sha256
from model.config import ModelConfig, ModelConfigError
from model.huggingface import save_tensors
from pretrain.confined import strays
from pretrain.retention import Saved, best_first
from pretrain.run_directory import CheckpointError, RunDirectory, write_text

if TYPE_CHECKING:
    from model.transformer import Transformer
    from tokenizer.codec import Codec

FORMAT = "zerohalf-checkpoint"
FORMAT_VERSION = 1

BEST, LATEST = "best", "latest"  # files beside the checkpoints, each with the name of one

_STEP = re.compile(r"step-\d{8,}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What to do where not all parts of a checkpoint are at hand.
JOIN = (
    "start on all machines that hold parts, or copy their run directories to this one and join them with "
    "python -m pretrain checkpoints RUN --gather COPY"
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
        read_json(path / "state.json")
        measured = measured_at(path)
    except CheckpointError:
        return Saved(step_of(path), healthy=False)
    score = measured.get("heldout_loss")
    healthy = measured.get("healthy", True) is True and not measured.get("alarms")
    return Saved(step_of(path), score if isinstance(score, float) else None, healthy)


def best_of(paths: Iterable[Path]) -> Path | None:
    """The healthy one with the lowest held-out loss, by what the checkpoints themselves tell; None: none has any."""
    by_step = {step_of(path): path for path in paths}
    ranked = best_first([saved(path) for path in by_step.values()])
    return by_step[ranked[0].step] if ranked else None


def have_named(folder: Path, mark: str, name: str | None) -> None:
    """Have the file `mark` (BEST, LATEST) name a checkpoint, durably, or be gone. Nothing is written without need."""
    file = folder / mark
    if name is None:
        file.unlink(missing_ok=True)
    elif not file.exists() or file.read_text(errors="replace") != name + "\n":
        write_text(file, name + "\n")


def measured_at(path: Path) -> dict[str, Any]:
    """What a checkpoint tells of the step before it (see `Measured`); empty where it tells nothing.

    Weights without a run have no state, checkpoints of earlier versions one without this. CheckpointError: damaged.
    """
    if not (path / "state.json").exists():
        return {}
    measured = read_json(path / "state.json").get("measured", {})
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
    manifest = read_json(path / "manifest.json")
    found = manifest.get("format"), manifest.get("version")
    if found != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(f"{path}/manifest.json says format {found[0]} {found[1]}, not {FORMAT} {FORMAT_VERSION}")
    files, part = manifest.get("files"), manifest.get("part")
    elsewhere = _elsewhere(manifest)
    if (
        not isinstance(files, dict)
        or digest(files, part) != manifest.get("files_sha256")
        or elsewhere is None
        or files.keys() & elsewhere.keys()
    ):
        raise CheckpointError(f"{path}/manifest.json is damaged")
    for name, record in [*files.items(), *elsewhere.items()]:
        if strays(name, path):
            raise CheckpointError(
                f"{path}/manifest.json names {name!r}, which is outside its folder or behind a link: it is not used"
            )
        if not _is_record(record):
            raise CheckpointError(f"{path}/manifest.json is damaged")
    return manifest


def _elsewhere(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The files of a checkpoint that its part names and does not hold; None where what it says of them is no part's."""
    if "part" not in manifest:
        return {}
    part = manifest["part"]
    if not isinstance(part, dict):
        return None
    number, hosts, elsewhere = (part.get(name) for name in ("number", "hosts", "elsewhere"))
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        return None
    # True is no number here.
    if type(number) is not int or number not in range(len(hosts)) or not isinstance(elsewhere, dict):
        return None
    return elsewhere


def _is_record(record: object) -> bool:
    """Whether it tells the size and the sha256 of a file."""
    if not isinstance(record, dict):
        return False
    size, sha256 = record.get("bytes"), record.get("sha256")
    return type(size) is int and size >= 0 and isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None


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
        if file_sha256(file, on_bytes) != record["sha256"]:
            raise CheckpointError(f"{file} is damaged: its sha256 is not the recorded one")


def manifest_of(files: Mapping[str, Any], part: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint with these files; `part`: what a part of one tells of the rest (see parts.py)."""
    told = {} if part is None else {"part": part}
    return {"format": FORMAT, "version": FORMAT_VERSION, "files": files, **told, "files_sha256": digest(files, part)}


def digest(files: Mapping[str, Any], part: Mapping[str, Any] | None = None) -> str:
    """What a manifest says of its own list of files, so that a damaged list is noticed."""
    listed = files if part is None else {"files": files, "part": part}
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def refuse_part(path: Path) -> None:
    """Raise CheckpointError where a checkpoint is a part of one, the rest of which other machines hold."""
    manifest = read_manifest(path)
    part = which_part(manifest)
    if part is not None:
        raise CheckpointError(f"{path} is part {part}, of {', '.join(manifest['part']['hosts'])}: {JOIN}")


def which_part(manifest: Mapping[str, Any]) -> str | None:
    """ "1 of 2", of a part of a checkpoint; None of a whole one."""
    part = manifest.get("part")
    return None if part is None else f"{part['number'] + 1} of {len(part['hosts'])}"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is missing or damaged") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged")
    return content


def named(path: Path) -> Path:
    """`path`, or the checkpoint with the lowest held-out loss where it is RUN/checkpoints/best, whether or not such a
    file stands there. Raises CheckpointError where there is none."""
    if path.name != BEST or path.parent.name != "checkpoints" or path.is_dir():
        return path
    best = best_of(list_checkpoints(path.parent))
    if best is None:
        alarms = {str(one) for found in list_checkpoints(path.parent) for one in measured_at(found).get("alarms") or ()}
        if alarms:
            raise CheckpointError(
                f"{path.parent} holds no evaluated checkpoint that was saved without an alarm (on were "
                f"{', '.join(sorted(alarms))}): name one by its step"
            )
        raise CheckpointError(
            f"{path.parent} holds no healthy checkpoint whose step was evaluated: name one by its step, or train with "
            "evaluation.every_steps equal to checkpoint.every_steps, or a divisor of it"
        )
    return best


def find(path: Path) -> Path:
    """The checkpoint meant by `path`: itself, the newest of a run, or RUN/checkpoints/best. Raises CheckpointError
    where there is none."""
    path = named(path)
    if (path / "manifest.json").exists() and (path / "weights.safetensors").exists():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; name a run directory or a checkpoint in it")
    found = list_checkpoints(path / "checkpoints")
    newest = path if (path / "manifest.json").exists() else found[-1] if found else None
    if newest is None:
        raise CheckpointError(f"{path} holds no checkpoint; the first is written at checkpoint.every_steps")
    if not (newest / "weights.safetensors").exists():
        refuse_part(newest)
    return newest


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
        return ModelConfig(**read_json(path / "model.json"))
    except (TypeError, ModelConfigError) as error:
        raise CheckpointError(f"{path}/model.json is of another version of this program: {error}") from None


def fill(model: Transformer, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Put a checkpoint's weights into a model of its sizes, cast to the model's dtype.

    Raises CheckpointError unless they are all of the model's, of its shapes, tied ones once.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    lacking, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    other = [name for name in wanted if name in found and found[name] != wanted[name]]
    if lacking:
        raise CheckpointError(f"{path}/weights.safetensors lacks {lacking[:3]} of {len(lacking)}")
    if other:
        raise CheckpointError(
            f"{path}: {other[0]} is {found[other[0]]} among the weights, {wanted[other[0]]} in the model that "
            "model.json describes: they are not of one model"
        )
    if unknown:
        raise CheckpointError(f"{path}: model.json describes no model with {unknown[:3]} of {len(unknown)}")
    model.load_state_dict(weights, strict=False)


def load_model(path: Path, device: torch.device | None = None) -> Transformer:
    """The model of a checkpoint (or of a run's newest) on a device, by default the CPU, in the dtype of its training.

    A CPU computes fp16 weights in fp32, with a warning: fp32 holds them exactly, and CPUs have kernels for it.
    Raises CheckpointError where the files are damaged or do not fit each other.
    """
    path = find(path)
    verify(path)
    return model_of(*load_weights(path), path, device)


def model_of(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], path: Path, device: torch.device | None = None
) -> Transformer:
    """The model of these sizes and weights, ready to be asked; see `load_model`. `path`: where they were read."""
    from model.transformer import Transformer

    dtype = next(iter(weights.values())).dtype
    if dtype == torch.float16 and (device is None or device.type == "cpu"):
        warnings.warn(f"{path}: its fp16 weights are computed in fp32 on this CPU", stacklevel=2)
        dtype = torch.float32
    model = Transformer(config).to(dtype)
    fill(model, weights, path)
    return model.to(device).eval()


def refuse_other_model(path: Path, config: ModelConfig) -> None:
    """Raise CheckpointError, naming the size, unless a run of `config` can start from the weights of a checkpoint.

    seq_len and init_std say nothing of what weights mean, and may differ; but a learned position is a weight.
    """
    stored, wanted = asdict(model_config(path)), asdict(config)
    for name in stored:
        is_free = name == "init_std" or (name == "seq_len" and config.positions != "learned")
        if stored[name] == wanted[name] or is_free:
            continue
        remedy = f"leave out model.{name}" if stored[name] is None else f"set model.{name} = {json.dumps(stored[name])}"
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
