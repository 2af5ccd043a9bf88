"""Weights to and from folders of transformers: config.json and safetensors, one file or several.

Which models those can be, and how their tensors are named: `model.architectures`. Nothing is computed, so every bit
survives both ways. Weights of the other RoPE layout than Hugging Face's are reordered on their way
(`model.positions.reorder`). A tied head is stored once, with the embedding.
"""

import errno
import json
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.architectures import LAYOUT, WeightsError, from_config, may_be_left, stored_tensors, to_config
from model.config import ModelConfig
from model.positions import reorder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_METADATA = {"format": "pt"}  # transformers opens no file that doesn't say so

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as safetensors writes them

__all__ = ["WeightsError", "from_config", "read_weights", "save_tensors", "to_config", "write_weights"]

# ---------------------------------------------------------------- out


def write_weights(folder: Path, weights: Mapping[str, Tensor], config: ModelConfig, *, max_shard_bytes: int) -> None:
    """Write a model's weights into an empty folder, in one file or, above `max_shard_bytes`, in several with an index.

    A tensor larger than that has a file of its own. OSError where the disk doesn't take them.
    """
    if config.positions == "rope":
        weights = reorder(weights, config.head_dim, have=config.rope_layout, want=LAYOUT)
    named = {stored.name: stored.join(weights) for stored in stored_tensors(config)}
    shards = _shards(named, max_shard_bytes)
    if len(shards) == 1:
        save_tensors(named, folder / WEIGHTS, _METADATA)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors({name: named[name] for name in names}, folder / file, _METADATA)
        weight_map.update(dict.fromkeys(names, file))
    metadata = {
        "total_size": sum(tensor.nbytes for tensor in named.values()),
        "total_parameters": sum(tensor.numel() for tensor in named.values()),
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    """The names, in order, cut where a file would grow over `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that those may read who may read any new file here. Raises OSError.

    safetensors alone leaves it to its owner (mode 0600), whatever the umask.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error
    path.chmod(mode)


# ---------------------------------------------------------------- in


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The weights of a folder that transformers wrote, by our names, in their own dtype and `config`'s RoPE layout.

    Every name, shape and dtype is checked before the first weight is read. Raises WeightsError: no safetensors, a file
    damaged or cut short, a tensor missing, unknown, of another shape or dtype than `config` has it, a weight that is
    not finite, or a head that is said to be tied to the embedding and is another.
    """
    with ExitStack() as stack:
        places = _places(folder, stack)
        _check(folder, places, config)
        weights: dict[str, Tensor] = {}
        for stored in stored_tensors(config):
            tensor = _tensor(places, stored.name)
            if not tensor.isfinite().all():
                raise WeightsError(f"{folder}: {stored.name} is not finite: the training that made it diverged")
            weights.update(stored.split(tensor))
        if config.tied and HEAD in places and not _tensor(places, HEAD).equal(weights["embed_tokens.weight"]):
            raise WeightsError(f"{folder}: {CONFIG} says tie_word_embeddings, but {HEAD} is not the embedding")
    if config.positions != "rope":
        return weights
    return reorder(weights, config.head_dim, have=LAYOUT, want=config.rope_layout)


def _places(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Which open file holds which tensor."""
    files = _files(folder)
    places: dict[str, Any] = {}
    for file in files:
        path = folder / file
        if not path.is_file():
            raise WeightsError(f"{path} is missing: copy the folder again")
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is cut short or damaged ({error}): copy it again") from None
        for name in opened.keys():  # noqa: SIM118  (the reader is no dict)
            if name in places:
                raise WeightsError(f"{path} holds {name}, and so does another file: {folder} is of two models")
            places[name] = opened
    return places


def _files(folder: Path) -> list[str]:
    """The names of the weight files: one, or those of the index."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise WeightsError(f"{folder / INDEX} is damaged: copy the folder again") from None
        strange = [file for file in files if not isinstance(file, str) or Path(file).name != file]
        if not files or strange:
            raise WeightsError(f"{folder / INDEX} names no files beside it: copy the folder again")
        return files
    pickled = next((name for name in PICKLED if (folder / name).exists()), None)
    if pickled is not None:
        raise WeightsError(
            f"{folder} has its weights in {pickled}, a pickle, which may run any code when it is opened: "
            "load it with transformers where you trust it, and save_pretrained writes safetensors"
        )
    raise WeightsError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: name the folder that save_pretrained wrote")


def _check(folder: Path, places: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise WeightsError unless the files hold what a model of these sizes has, and nothing else."""
    dtypes: dict[str, str] = {}
    for stored in stored_tensors(config):
        name, shape = stored.name, stored.shape
        if name not in places:
            raise WeightsError(f"{folder} lacks {name}, which its {CONFIG} asks for")
        there = places[name].get_slice(name)
        if tuple(there.get_shape()) != shape:
            raise WeightsError(
                f"{folder}: {name} is {_times(there.get_shape())}, by {CONFIG} it is {_times(shape)}: "
                "they are of two models"
            )
        dtypes[there.get_dtype()] = name
        if there.get_dtype() not in _STORED:
            raise WeightsError(f"{folder}: {name} is stored as {there.get_dtype()}: {', '.join(_STORED)} can be taken")
    if len(dtypes) > 1:
        mixed = ", ".join(f"{name} as {dtype}" for dtype, name in dtypes.items())
        raise WeightsError(f"{folder} stores {mixed}: save it in one dtype")
    known = {stored.name for stored in stored_tensors(config)} | ({HEAD} if config.tied else set())
    strange = sorted(name for name in places if name not in known and not may_be_left(name))
    if strange:
        raise WeightsError(f"{folder} holds {strange[0]} ({len(strange)} such), which this model has no place for")


def _tensor(places: Mapping[str, Any], name: str) -> Tensor:
    tensor: Tensor = places[name].get_tensor(name)
    return tensor


def _times(shape: Any) -> str:
    return " x ".join(map(str, shape))
