"""Weights and sizes to and from Hugging Face's LlamaForCausalLM: config.json and safetensors, one file or several.

The names differ by a prefix and the sizes by their names; nothing is computed, so every bit survives both ways. What
Hugging Face's Llama can be and this model can't (biases, scaled RoPE, another activation, another architecture) is
refused, not approximated: such weights would load and give nonsense.

Hugging Face pairs dimension i with i + head_dim/2; weights of the other RoPE layout are reordered on their way
(`model.positions.reorder`). A tied head is stored once, with the embedding.
"""

import errno
import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig, ModelConfigError
from model.positions import reorder

LAYOUT = "rotate_half"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_METADATA = {"format": "pt"}  # transformers opens no file that doesn't say so

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as safetensors writes them

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "seq_len",
    "rms_norm_eps": "norm_eps",
}


class WeightsError(ValueError):
    """A config or weights of another program that can't be taken; one line: what is wrong, and what to do."""


# ---------------------------------------------------------------- config.json


def to_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says of the model. Old and new spellings stand side by side where transformers 4 and 5 differ.

    ModelConfigError where d_model is no multiple of n_heads: transformers refuses that, whatever head_dim is.
    """
    if config.d_model % config.n_heads:
        raise ModelConfigError(
            f"d_model = {config.d_model} is no multiple of n_heads = {config.n_heads}: transformers takes no such Llama"
        )
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "initializer_range": config.init_std,
        "use_cache": True,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }


def from_config(table: Mapping[str, Any]) -> ModelConfig:
    """The sizes that a config.json describes, `rope_layout` being Hugging Face's.

    What it leaves out has the default of transformers' LlamaConfig, sizes excepted. Raises WeightsError for what this
    model can't be, or a size that is missing or out of range.
    """
    _refuse_other_models(table)
    missing = [name for name in _SIZES if name not in table]
    if missing:
        raise WeightsError(f"lacks {', '.join(missing)}")
    values: dict[str, Any] = {ours: table[theirs] for theirs, ours in _SIZES.items()}
    heads = table["num_attention_heads"]
    values["n_kv_heads"] = heads if table.get("num_key_value_heads") is None else table["num_key_value_heads"]
    values["tied"] = table.get("tie_word_embeddings", False)
    values["rope_base"] = _rope_base(table)
    values["init_std"] = table.get("initializer_range", 0.02)
    values["head_dim"] = table.get("head_dim")
    try:
        if values["head_dim"] is None:  # a wrong type here is told of by its own check
            values["head_dim"] = table["hidden_size"] // heads
        return ModelConfig(**values, rope_layout=LAYOUT)
    except (TypeError, ZeroDivisionError):
        raise WeightsError(f"hidden_size = {table['hidden_size']!r}, num_attention_heads = {heads!r}") from None
    except ModelConfigError as error:
        raise WeightsError(str(error)) from None


def _refuse_other_models(table: Mapping[str, Any]) -> None:
    architectures = table.get("architectures")
    if table.get("model_type") != "llama" or architectures not in (None, ["LlamaForCausalLM"]):
        found = architectures[0] if isinstance(architectures, list) and architectures else table.get("model_type")
        raise WeightsError(f"describes {found!r}: LlamaForCausalLM is all that can be taken")
    for name, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("attention_dropout", 0),
        ("quantization_config", None),
    ):
        if table.get(name, only) != only:
            raise WeightsError(f"{name} = {json.dumps(table[name])[:60]}: this model has {json.dumps(only)} alone")


def _rope_base(table: Mapping[str, Any]) -> Any:
    """RoPE's base, where transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) writes it.

    Both may stand there. Which of them counts depends on the version, so all must say the same: plain RoPE, one base.
    """
    bases = [table["rope_theta"]] if table.get("rope_theta") is not None else []
    for name in ("rope_parameters", "rope_scaling"):
        settings = table.get(name)
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise WeightsError(f"{name} = {settings!r:.60} is no table")
        kind = settings.get("rope_type", settings.get("type", "default"))
        partial = settings.get("partial_rotary_factor", table.get("partial_rotary_factor", 1))
        if kind != "default" or partial not in (None, 1):
            what = f"type {kind!r:.60}" if kind != "default" else f"partial_rotary_factor {partial!r:.60}"
            raise WeightsError(f"scales RoPE ({name}: {what}): this model's RoPE is plain, and covers the whole head")
        if settings.get("rope_theta") is not None:
            bases.append(settings["rope_theta"])
    if any(base != bases[0] for base in bases):
        raise WeightsError(f"gives RoPE several bases ({', '.join(f'{base!r:.40}' for base in bases)}): leave one")
    return bases[0] if bases else 10000.0


# ---------------------------------------------------------------- names and shapes


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that a model of these sizes stores, by our names; a tied head is none."""
    d, q_width, kv_width = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "embed_tokens.weight", (config.vocab_size, d)
    for layer in range(config.n_layers):
        for name, shape in (
            ("input_layernorm", (d,)),
            ("self_attn.q_proj", (q_width, d)),
            ("self_attn.k_proj", (kv_width, d)),
            ("self_attn.v_proj", (kv_width, d)),
            ("self_attn.o_proj", (d, q_width)),
            ("post_attention_layernorm", (d,)),
            ("mlp.gate_proj", (config.d_ff, d)),
            ("mlp.up_proj", (config.d_ff, d)),
            ("mlp.down_proj", (d, config.d_ff)),
        ):
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", (d,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, d)


def their_name(name: str) -> str:
    """Hugging Face's name of one of our tensors."""
    return name if name.startswith("lm_head.") else f"model.{name}"


# ---------------------------------------------------------------- out


def write_weights(folder: Path, weights: Mapping[str, Tensor], config: ModelConfig, *, max_shard_bytes: int) -> None:
    """Write a model's weights into an empty folder, in one file or, above `max_shard_bytes`, in several with an index.

    A tensor larger than that has a file of its own. OSError where the disk doesn't take them.
    """
    weights = reorder(weights, config.head_dim, have=config.rope_layout, want=LAYOUT)
    named = {their_name(name): weights[name].contiguous() for name, _ in tensor_shapes(config)}
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
        weights = {name: _tensor(places, their_name(name)) for name, _ in tensor_shapes(config)}
        if broken := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
            raise WeightsError(f"{folder}: {their_name(broken)} is not finite: the training that made it diverged")
        head = their_name("lm_head.weight")
        if config.tied and head in places and not _tensor(places, head).equal(weights["embed_tokens.weight"]):
            raise WeightsError(f"{folder}: {CONFIG} says tie_word_embeddings, but {head} is not the embedding")
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
    for ours, shape in tensor_shapes(config):
        name = their_name(ours)
        if name not in places:
            raise WeightsError(f"{folder} lacks {name}, which its {CONFIG} asks for")
        stored = places[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise WeightsError(
                f"{folder}: {name} is {_times(stored.get_shape())}, by {CONFIG} it is {_times(shape)}: "
                "they are of two models"
            )
        dtypes[stored.get_dtype()] = name
        if stored.get_dtype() not in _STORED:
            raise WeightsError(f"{folder}: {name} is stored as {stored.get_dtype()}: {', '.join(_STORED)} can be taken")
    if len(dtypes) > 1:
        mixed = ", ".join(f"{name} as {dtype}" for dtype, name in dtypes.items())
        raise WeightsError(f"{folder} stores {mixed}: save it in one dtype")
    known = {their_name(name) for name, _ in tensor_shapes(config)} | ({"lm_head.weight"} if config.tied else set())
    # Old transformers stored RoPE's frequencies, which follow from the config.
    strange = sorted(name for name in places if name not in known and not name.endswith(".rotary_emb.inv_freq"))
    if strange:
        raise WeightsError(f"{folder} holds {strange[0]} ({len(strange)} such), which this model has no place for")


def _tensor(places: Mapping[str, Any], name: str) -> Tensor:
    tensor: Tensor = places[name].get_tensor(name)
    return tensor


def _times(shape: Any) -> str:
    return " x ".join(map(str, shape))
