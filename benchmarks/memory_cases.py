"""What benchmarks/memory.py measures: models, components, precisions and stages, each with what is predicted of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.config import Compute, RecipeError, RunConfig, parse_recipe
from pretrain.memory import Budget, budget
from pretrain.resolve import read_json, resolve

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZE = 2
MICRO_STEPS = 2

# compute, master, sums
PRECISIONS: tuple[tuple[Compute, str, str], ...] = (
    ("bf16", "fp32", "bf16"),
    ("bf16", "fp32", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "fp32"),
    ("fp32", "fp32", "fp32"),
    ("fp16", "fp32", "fp16"),
    ("fp16", "fp32", "fp32"),
)


@dataclass(frozen=True)
class Shape:
    """A model and a micro-batch; buckets are those of ds_configs, divided so that they stay smaller than the model."""

    model: dict[str, Any]
    checkpointing: str
    loss_chunk_tokens: int
    buckets_divided_by: int


SHAPES = {
    "small": Shape(
        {
            "preset": "mini", "vocab_size": 2048, "d_model": 128, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1,
            "d_ff": 352, "seq_len": 64,
        },
        "full", 32, 500,
    ),
    "mini": Shape({"preset": "mini", "seq_len": 256}, "none", 128, 20),
    "0.5b": Shape({"preset": "0.5b", "seq_len": 256}, "full", 128, 1),
    "components": Shape(  # much of whose peak is activations
        {
            "preset": "mini", "vocab_size": 512, "d_model": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
            "d_ff": 352, "seq_len": 512,
        },
        "none", 256, 1000,
    ),
}  # fmt: skip

MLA = {"attention": "mla", "n_kv_heads": 4, "mla_latent": 128, "mla_rope_dim": 32}
GROWN = {"rope_scaling_factor": 4.0, "rope_original_seq_len": 128}
COMPONENTS: dict[str, dict[str, Any]] = {  # every choice that is not Llama's, and some together
    "Llama's block": {},
    "LayerNorm": {"norm": "layer"},
    "post-norm": {"norm_place": "post"},
    "DeepNorm": {"norm_place": "deepnorm"},
    "biases": {"bias": True},
    "ReLU": {"ffn": "relu", "d_ff": 512},
    "GELU": {"ffn": "gelu", "d_ff": 512},
    "no positions": {"positions": "none"},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned positions": {"positions": "learned"},
    "multi-head": {"n_kv_heads": 4},
    "multi-query": {"n_kv_heads": 1},
    "MLA": MLA,
    "QK-Norm": {"qk_norm": True},
    "window 128": {"sliding_window": 128},
    "four streams": {"residual": "hyper", "n_streams": 4},
    "untied": {"tied": False},
    "linear RoPE": {"rope_scaling": "linear", **GROWN},
    "dynamic RoPE": {"rope_scaling": "dynamic", **GROWN},
    "YaRN": {"rope_scaling": "yarn", **GROWN},
    "the 2017 block": {
        "norm": "layer", "norm_place": "post", "bias": True, "ffn": "relu", "d_ff": 512, "positions": "sinusoidal",
        "n_kv_heads": 4, "tied": False,
    },
    "GPT-2's block": {
        "norm": "layer", "bias": True, "ffn": "gelu", "d_ff": 512, "positions": "learned", "n_kv_heads": 4,
    },
    "MLA, four streams, window 128": {**MLA, "residual": "hyper", "n_streams": 4, "sliding_window": 128},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    config: RunConfig
    deepspeed: dict[str, Any]
    compute: Compute

    @property
    def predicted(self) -> Budget:
        return budget(self.config, self.deepspeed, WORLD_SIZE, compute=self.compute, device="cpu")


def recipe(shape: Shape, micro_steps: int = MICRO_STEPS, **tables: dict[str, Any]) -> RunConfig:
    """A run of `shape`, one window a micro-batch; other tables take the place of those here."""
    return parse_recipe(
        {
            "model": shape.model,
            "data": {"path": "unused", "tokenizer": "unused"},
            "batch": {"global_batch_size": micro_steps * WORLD_SIZE, "micro_batch_size": 1},
            "schedule": {"peak_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "max_steps": 100},
            "memory": {"activation_checkpointing": shape.checkpointing, "loss_chunk_tokens": shape.loss_chunk_tokens},
            "evaluation": {"every_steps": 50},
            "checkpoint": {"every_steps": 50},
            **tables,
        }
    )


def of_stage(stage: int, divided_by: int) -> dict[str, Any]:
    """ds_configs/zeroN.json with every number of elements divided."""
    ds_json = read_json(ROOT / "ds_configs" / f"zero{stage}.json")
    for key, value in ds_json["zero_optimization"].items():
        if key != "stage" and isinstance(value, int) and not isinstance(value, bool):
            ds_json["zero_optimization"][key] = value // divided_by
    return ds_json


def cases(shape: Shape, stages: Iterable[int], micro_steps: int = MICRO_STEPS) -> Iterator[Case]:
    """Every precision that each stage runs."""
    for stage, (compute, master, sums) in itertools.product(stages, PRECISIONS):
        try:
            config = recipe(shape, micro_steps, precision={"compute": compute, "master": master, "accumulate": sums})
            resolved = resolve(of_stage(stage, shape.buckets_divided_by), config, WORLD_SIZE)
        except RecipeError:  # what the engine does not have
            continue
        yield Case(f"zero{stage} {compute} master {master} sums {sums}", config, resolved, compute)


def component_cases(shape: Shape, stages: Iterable[int]) -> Iterator[Case]:
    """Every component in bf16 with fp32 masters and sums in bf16."""
    for stage, (name, choice) in itertools.product(stages, COMPONENTS.items()):
        chosen = replace(shape, model={**shape.model, **choice})
        config = recipe(chosen, precision={"compute": "bf16", "master": "fp32", "accumulate": "bf16"})
        resolved = resolve(of_stage(stage, shape.buckets_divided_by), config, WORLD_SIZE)
        yield Case(f"zero{stage} {name}", config, resolved, "bf16")
