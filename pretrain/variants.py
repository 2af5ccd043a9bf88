"""Models that differ in named components, brought to one budget: what an ablation compares. No torch.

A choice that cannot stand alone brings what it needs, and only that: MLA its two widths and keys for every query head,
hyper-connections their streams. Whatever else a recipe's model has stays.
"""

from __future__ import annotations

import itertools
import tomllib
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from model.accounting import flops_per_token, parameter_count
from model.config import ModelConfig, ModelConfigError
from pretrain.config import RecipeError, nearest

Budget = Literal["parameters", "flops"]
Fitted = Literal["d_ff", "n_layers"]

KINDS: dict[str, Any] = {field.name: field.type for field in fields(ModelConfig)}
NOT_AXES = ("seq_len", "vocab_size")  # another window or vocabulary is another number of tokens: losses don't compare
STREAMS = 4  # of hyper-connections, where the recipe names none
MOST = 64  # variants

CLASSIC = {
    "norm": "layer",
    "norm_place": "post",
    "bias": True,
    "ffn": "relu",
    "positions": "sinusoidal",
    "attention": "gqa",
    "qk_norm": False,
    "sliding_window": None,
    "residual": "plain",
    "rope_scaling": "none",
    "rope_scaling_factor": 1.0,
    "rope_original_seq_len": None,
}


@dataclass(frozen=True)
class Variant:
    """One model of an ablation; `choices` are what it was asked to be, `brought` what these needed.

    `replaces`: what of the row above a ladder's row does not keep, in words.
    """

    name: str
    choices: Mapping[str, Any]
    brought: Mapping[str, Any]
    model: ModelConfig
    replaces: str = ""

    @property
    def label(self) -> str:
        """For people; `name` is the folder's."""
        return f"{self.name} for {self.replaces}" if self.replaces else self.name


def read_axis(text: str) -> tuple[str, list[Any]]:
    """`norm_place=pre,post` as a field of ModelConfig and its values. RecipeError: one line."""
    name, equals, listed = text.partition("=")
    name = name.strip()
    if not equals or not listed.strip():
        raise RecipeError(f"--axis {text}: write it as NAME=VALUE,VALUE, for example norm_place=pre,post")
    if name in NOT_AXES:
        raise RecipeError(f"--axis {name}: variants learn the same tokens of the same windows: {name} is the recipe's")
    if name not in KINDS:
        raise RecipeError(f"--axis {name}: no field of [model]: did you mean {nearest(name, list(KINDS))}?")
    values = [_value(name, one.strip()) for one in listed.split(",")]
    if any(one == other for one, other in itertools.combinations(values, 2)):
        raise RecipeError(f"--axis {text}: a value stands there twice: name each once")
    return name, values


def _value(name: str, text: str) -> Any:
    kinds = typing.get_args(KINDS[name]) or (KINDS[name],)
    if text == "none" and type(None) in kinds:
        return None
    if str in kinds:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        raise RecipeError(f"--axis {name}: {text!r} is no {kinds[0].__name__}") from None


def product(base: ModelConfig, axes: Sequence[tuple[str, Sequence[Any]]]) -> list[Variant]:
    """Every combination of the axes' values, the last axis fastest; the first is the reference."""
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise RecipeError(f"--axis {max(names, key=names.count)}: given twice: name all its values in one")
    combined = [dict(zip(names, values, strict=True)) for values in itertools.product(*(found for _, found in axes))]
    _refuse_count(len(combined))
    return [variant(_name(choices), base, choices) for choices in combined]


def ladder(base: ModelConfig) -> list[Variant]:
    """From the block of 2017 to that of today, one change a row, each on top of those before.

    MLA takes the place of grouped keys and of QK-Norm, which it has no keys for. Sizes are the recipe's.
    """
    groups = base.n_kv_heads if base.n_kv_heads < base.n_heads else _fewer(base.n_heads)
    rows: list[tuple[str, dict[str, Any]]] = [
        ("classic", {**CLASSIC, "n_kv_heads": base.n_heads}),
        ("RMSNorm", {"norm": "rms"}),
        ("no-bias", {"bias": False}),
        ("SwiGLU", {"ffn": "swiglu"}),
        ("pre-norm", {"norm_place": "pre"}),
        ("RoPE", {"positions": "rope"}),
        ("GQA", {"n_kv_heads": groups}),
        ("QK-Norm", {"qk_norm": True}),
        ("MLA", {"attention": "mla", "qk_norm": False, "n_kv_heads": base.n_heads}),
        ("hyper", {"residual": "hyper"}),
    ]
    made, choices = [], dict[str, Any]()
    for name, change in rows:
        choices = {**choices, **change}
        made.append(variant(name, base, choices))
    return [replace(one, replaces="GQA, QK-Norm") if one.name == "MLA" else one for one in made]


def _fewer(heads: int) -> int:
    """Half of them, or the next fewer that divide them."""
    return next(count for count in range(max(heads // 2, 1), 0, -1) if heads % count == 0)


def variant(name: str, base: ModelConfig, choices: Mapping[str, Any]) -> Variant:
    """RecipeError naming the variant where these choices make no model."""
    asked = {**base.to_dict(), **choices}
    brought: dict[str, Any] = {}
    if asked.get("attention", base.attention) == "mla":
        widths = {"mla_latent": 2 * base.head_dim, "mla_rope_dim": max(base.head_dim // 2 // 2 * 2, 2)}
        brought |= {key: value for key, value in widths.items() if asked.get(key) is None}
        if "n_kv_heads" not in choices:
            brought["n_kv_heads"] = asked["n_heads"]
    else:
        brought |= {key: None for key in ("mla_latent", "mla_rope_dim") if key not in choices}
    hyper, streams = asked.get("residual", base.residual) == "hyper", asked.get("n_streams", base.n_streams)
    if "n_streams" not in choices and hyper == (streams == 1):
        brought["n_streams"] = STREAMS if hyper else 1
    try:
        model = _quietly(base, {**choices, **brought})
    except ModelConfigError as error:
        raise RecipeError(f"variant {name} cannot be built: {error}") from None
    changed = {key: value for key, value in brought.items() if value != getattr(base, key)}
    return Variant(name, dict(choices), changed, model)


def _name(choices: Mapping[str, Any]) -> str:
    """As a folder may be called: norm_place=pre,ffn=relu."""
    return ",".join(f"{key}={'none' if value is None else str(value).lower()}" for key, value in choices.items())


def _quietly(base: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """The recipe itself has warned of what a model warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(base, **values)


def _refuse_count(count: int) -> None:
    if not 2 <= count <= MOST:
        raise RecipeError(
            f"{count} variant{'' if count == 1 else 's'} to compare: --axis values make 2 to {MOST}, or use --ladder"
        )


# ---------------------------------------------------------------- one budget for all


def cost(model: ModelConfig, budget: Budget) -> int:
    """Parameters, or training FLOPs a token with causal attention."""
    return parameter_count(model) if budget == "parameters" else flops_per_token(model).causal


def fit(variants: Sequence[Variant], budget: Budget, fitted: Fitted) -> list[Variant]:
    """All with another `fitted`, so that each costs as nearly what the first does as whole numbers allow.

    Both costs are linear in d_ff and in n_layers: two of them give the line. RecipeError where an axis is `fitted`
    itself, or where a variant without any of it costs more already.
    """
    if any(fitted in one.choices for one in variants):
        other = "n_layers" if fitted == "d_ff" else "d_ff"
        raise RecipeError(f"--axis {fitted}: it is what brings variants to one budget: use --fit {other} with it")
    target = cost(variants[0].model, budget)
    return [variants[0], *(replace(one, model=_fit(one, target, budget, fitted)) for one in variants[1:])]


def _fit(one: Variant, target: int, budget: Budget, fitted: Fitted) -> ModelConfig:
    at_1, at_2 = (cost(_quietly(one.model, {fitted: size}), budget) for size in (1, 2))
    size = 1 + round((target - at_1) / (at_2 - at_1))
    if size < 1:
        raise RecipeError(
            f"variant {one.name} has {at_1:,} {budget} with {fitted} = 1 already, the reference {target:,}: "
            "make the recipe's model larger, or leave that variant out"
        )
    try:
        return _quietly(one.model, {fitted: size})
    except ModelConfigError as error:
        raise RecipeError(f"variant {one.name} cannot be fitted: {error}") from None
