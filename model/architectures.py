"""Which of transformers' models this model can be, what their config.json says, and what their tensors are called.

Four: Llama, Mistral (Llama with a sliding window), Qwen3 (with QK-Norm) and GPT-2. Components that none of them has are
refused, and so is what they can be and this model can't: such weights would load and give nonsense.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.accounting import parameter_shapes
from model.config import ModelConfig, ModelConfigError

LAYOUT = "rotate_half"  # of RoPE, in all of theirs

_LLAMA: dict[str, Any] = {
    "norm": "rms",
    "norm_place": "pre",
    "ffn": "swiglu",
    "positions": "rope",
    "attention": "gqa",
    "residual": "plain",
}
_GPT2 = _LLAMA | {
    "norm": "layer",
    "ffn": "gelu",
    "positions": "learned",
    "bias": True,
    "qk_norm": False,
    "sliding_window": None,
}
# By model_type: the class, and the components that it has; what is left out may be anything.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA | {"qk_norm": False, "sliding_window": None}),
    "mistral": ("MistralForCausalLM", _LLAMA | {"qk_norm": False, "bias": False}),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA | {"qk_norm": True, "bias": False}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "seq_len",
    "rms_norm_eps": "norm_eps",
}
_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_positions": "seq_len",
    "layer_norm_epsilon": "norm_eps",
}
_GPT2_NAMES = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "embed_tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}


class WeightsError(ValueError):
    """A config or weights of another program that can't be taken; one line: what is wrong, and what to do."""


def architecture_of(config: ModelConfig) -> str:
    """The model_type of the model of theirs that this one is. ModelConfigError where there is none."""
    lacks = {
        kind: [name for name, value in components.items() if getattr(config, name) != value]
        for kind, (_, components) in ARCHITECTURES.items()
    }
    nearest = min(lacks, key=lambda kind: len(lacks[kind]))
    if lacks[nearest]:
        name = lacks[nearest][0]
        raise ModelConfigError(
            f"{name} = {getattr(config, name)!r} beside the other components is no model that transformers has: "
            f"{ARCHITECTURES[nearest][0]}, the nearest, has {name} = {ARCHITECTURES[nearest][1][name]!r}"
        )
    return nearest


# ---------------------------------------------------------------- config.json, out


def to_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says of the model. Old and new spellings stand side by side where transformers 4 and 5 differ.

    ModelConfigError where transformers has no such model, or refuses its sizes.
    """
    kind = architecture_of(config)
    dtype_name = str(dtype).removeprefix("torch.")
    ours: dict[str, Any] = _gpt2_config(config) if kind == "gpt2" else _llama_config(config, kind)
    return {
        "architectures": [ARCHITECTURES[kind][0]],
        "model_type": kind,
        **ours,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "use_cache": True,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }


def _llama_config(config: ModelConfig, kind: str) -> dict[str, Any]:
    if config.d_model % config.n_heads:
        raise ModelConfigError(
            f"d_model = {config.d_model} is no multiple of n_heads = {config.n_heads}: transformers takes no such Llama"
        )
    table: dict[str, Any] = {
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **_rope_config(config),
    }
    if kind == "llama":
        return table | {"attention_bias": config.bias, "mlp_bias": config.bias, "pretraining_tp": 1}
    if kind == "mistral":
        return table | {"sliding_window": config.sliding_window}
    return table | {
        "attention_bias": False,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if config.sliding_window is not None else config.n_layers,
    }


def _rope_config(config: ModelConfig) -> dict[str, Any]:
    """RoPE as transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`) spell it.

    "dynamic" takes max_position_embeddings for the length trained at, and knows no end: ours is a key of our own.
    """
    plain = {"rope_theta": config.rope_base}
    if config.rope_scaling == "none":
        return plain | {"rope_parameters": {"rope_type": "default", **plain}}
    trained = config.rope_original_seq_len
    scaling: dict[str, Any] = {"rope_type": config.rope_scaling, "factor": config.rope_scaling_factor}
    if config.rope_scaling == "yarn":
        scaling["original_max_position_embeddings"] = trained
    table = plain | {"rope_parameters": plain | scaling, "rope_scaling": scaling}
    if config.rope_scaling == "dynamic":
        return table | {"max_position_embeddings": trained, "seq_len": config.seq_len}
    return table | {"original_max_position_embeddings": trained}


def _gpt2_config(config: ModelConfig) -> dict[str, Any]:
    if config.n_kv_heads != config.n_heads or config.n_heads * config.head_dim != config.d_model:
        raise ModelConfigError(
            f"n_heads = {config.n_heads}, n_kv_heads = {config.n_kv_heads}, head_dim = {config.head_dim}: "
            f"GPT2LMHeadModel has as many key/value heads as heads, which divide d_model = {config.d_model} among them"
        )
    return {
        **{theirs: getattr(config, ours) for theirs, ours in _GPT2_SIZES.items()},
        "n_inner": config.d_ff,
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


# ---------------------------------------------------------------- config.json, in


def from_config(table: Mapping[str, Any]) -> ModelConfig:
    """The sizes and components that a config.json describes, `rope_layout` being Hugging Face's.

    What it leaves out has the default of transformers' own config, sizes excepted. Raises WeightsError for what this
    model can't be, or a size that is missing or out of range.
    """
    kind, architectures = table.get("model_type"), table.get("architectures")
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None or architectures not in (None, [known[0]]):
        found = architectures[0] if isinstance(architectures, list) and architectures else kind
        names = ", ".join(name for name, _ in ARCHITECTURES.values())
        raise WeightsError(f"describes {found!r}: {names} are all that can be taken")
    _demand(table, quantization_config=None)
    sizes = _GPT2_SIZES if kind == "gpt2" else _SIZES
    needed = {"qwen3": ("num_key_value_heads", "head_dim"), "mistral": ("num_key_value_heads",)}.get(str(kind), ())
    missing = [name for name in (*sizes, *needed) if name not in table]
    if missing:
        raise WeightsError(f"lacks {', '.join(missing)}")
    values: dict[str, Any] = dict(known[1]) | {ours: table[theirs] for theirs, ours in sizes.items()}
    values["tied"] = table.get("tie_word_embeddings", kind == "gpt2")
    values["init_std"] = table.get("initializer_range", 0.02)
    values |= _gpt2_values(table) if kind == "gpt2" else _llama_values(table, str(kind))
    heads, width = values["n_heads"], values["d_model"]
    try:
        if values["head_dim"] is None:  # a wrong type here is told of by its own check
            values["head_dim"] = width // heads
        if values["d_ff"] is None:
            values["d_ff"] = 4 * width
        return ModelConfig(**values, rope_layout=LAYOUT)
    except (TypeError, ZeroDivisionError):
        named = {ours: theirs for theirs, ours in sizes.items()}
        raise WeightsError(f"{named['d_model']} = {width!r}, {named['n_heads']} = {heads!r}") from None
    except ModelConfigError as error:
        raise WeightsError(str(error)) from None


def _llama_values(table: Mapping[str, Any], kind: str) -> dict[str, Any]:
    bias = table.get("attention_bias", False) if kind == "llama" else False
    _demand(table, hidden_act="silu", attention_bias=bias, mlp_bias=bias, attention_dropout=0)
    heads, kv_heads = table["num_attention_heads"], table.get("num_key_value_heads")
    window = table.get("sliding_window", 4096) if kind == "mistral" else None
    if kind == "qwen3":
        window = table.get("sliding_window", 4096) if table.get("use_sliding_window", False) else None
        first, types = table.get("max_window_layers", 28), table.get("layer_types")
        alike = first == 0 if types is None else types == ["sliding_attention"] * table["num_hidden_layers"]
        if window is not None and not alike:
            raise WeightsError("has a sliding window in some of its layers: this model has one in all, or in none")
    return {
        "bias": bias,
        "n_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": table.get("head_dim"),
        "sliding_window": window,
        **_rope_values(table),
    }


def _gpt2_values(table: Mapping[str, Any]) -> dict[str, Any]:
    activation = table.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise WeightsError(f"activation_function = {activation!r:.60}: this model has gelu_new alone")
    _demand(table, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width, heads = table["n_embd"], table["n_head"]
    if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
        raise WeightsError(f"n_embd = {width} is no multiple of n_head = {heads}")
    return {"n_kv_heads": heads, "head_dim": None, "d_ff": table.get("n_inner")}


def _demand(table: Mapping[str, Any], **settings: Any) -> None:
    for name, only in settings.items():
        if table.get(name, only) != only:
            raise WeightsError(f"{name} = {json.dumps(table[name])[:60]}: this model has {json.dumps(only)} alone")


def _rope_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's base and scaling, of transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`).

    Both may stand there. Which of them counts depends on the version, so all must say the same.
    """
    bases = [table["rope_theta"]] if table.get("rope_theta") is not None else []
    scalings = []
    for name in ("rope_parameters", "rope_scaling"):
        settings = table.get(name)
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise WeightsError(f"{name} = {settings!r:.60} is no table")
        partial = settings.get("partial_rotary_factor", table.get("partial_rotary_factor", 1))
        if partial not in (None, 1):
            raise WeightsError(
                f"{name}: partial_rotary_factor {partial!r:.60}: this model's RoPE covers the whole head"
            )
        if settings.get("rope_theta") is not None:
            bases.append(settings["rope_theta"])
        scalings.append(_scaling(table, name, settings))
    if any(base != bases[0] for base in bases):
        raise WeightsError(f"gives RoPE several bases ({', '.join(f'{base!r:.40}' for base in bases)}): leave one")
    if any(scaling != scalings[0] for scaling in scalings):
        raise WeightsError("scales RoPE in several ways (rope_parameters, rope_scaling): leave one")
    return {"rope_base": bases[0] if bases else 10000.0, **(scalings[0] if scalings else {})}


def _scaling(table: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one table of settings; none for plain RoPE."""
    kind, factor = settings.get("rope_type", settings.get("type", "default")), settings.get("factor")
    if kind == "default":
        return {}
    if kind not in ("linear", "dynamic", "yarn"):
        raise WeightsError(f"scales RoPE ({name}: type {kind!r:.60}): linear, dynamic and yarn can be taken")
    longest = table["max_position_embeddings"]
    if not isinstance(factor, int | float) or not isinstance(longest, int) or factor < 1:
        raise WeightsError(
            f"{name}: factor {factor!r:.40} of max_position_embeddings {longest!r:.40}: give numbers from 1"
        )
    trained = settings.get("original_max_position_embeddings", table.get("original_max_position_embeddings"))
    fields = {"rope_scaling": kind, "rope_scaling_factor": float(factor)}
    if kind == "dynamic":
        longest, trained = table.get("seq_len", int(longest * factor)), longest
    elif trained is None:
        trained = longest if kind == "yarn" else max(1, round(longest / factor))
    if kind == "yarn":
        for key, plain in (("beta_fast", 32), ("beta_slow", 1), ("truncate", True), ("attention_factor", None)):
            if settings.get(key) not in (None, plain):
                raise WeightsError(f"{name}: {key} = {settings[key]!r:.40}: this model's YaRN has {plain} alone")
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            raise WeightsError(f"{name}: mscale and mscale_all_dim: this model's YaRN has neither")
    return {**fields, "rope_original_seq_len": trained, "seq_len": longest}


# ---------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Stored:
    """A tensor of theirs: ours by name and shape, one below the other, or side by side and transposed."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(shape[0] for _, shape in self.parts)
        rest = self.parts[0][1][1:]
        return (*rest, rows) if self.transposed else (rows, *rest)

    def join(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Theirs, of our weights; the same memory where that is one of them as it is."""
        parts = [weights[name] for name, _ in self.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (whole.T if self.transposed else whole).contiguous()

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Ours, of theirs."""
        whole = tensor.T if self.transposed else tensor
        parts = torch.split(whole, [shape[0] for _, shape in self.parts])
        return {name: part.contiguous() for (name, _), part in zip(self.parts, parts, strict=True)}


def stored_tensors(config: ModelConfig) -> Iterator[Stored]:
    """Every tensor that their model of these sizes stores; a tied head is none. Errors as in `architecture_of`."""
    is_gpt2 = architecture_of(config) == "gpt2"
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if not is_gpt2:
            yield Stored(name if name.startswith("lm_head.") else f"model.{name}", ((name, shape),))
        elif ".q_proj." in name:
            names = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
            theirs = _gpt2_name(name.replace("self_attn.q_proj", "attn.c_attn"))
            yield Stored(theirs, tuple((part, shapes[part]) for part in names), transposed=len(shape) == 2)
        elif ".k_proj." not in name and ".v_proj." not in name:
            is_matrix = len(shape) == 2 and name.startswith("layers.")  # theirs are (in, out)
            yield Stored(_gpt2_name(name), ((name, shape),), transposed=is_matrix)


def _gpt2_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{_GPT2_NAMES[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"transformer.h.{layer}.{_GPT2_NAMES.get(inner, inner)}.{kind}"


def may_be_left(name: str) -> bool:
    """Whether a tensor says nothing that config.json doesn't: old transformers stored RoPE's frequencies and masks."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
