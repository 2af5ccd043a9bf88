"""A small real data set for the trainer's tests: real text, a real tokenizer, real shards, made once a session."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.prepare import Options, prepare
from tests.ranks import root
from tokenizer.train import train

VOCAB_SIZE = 1024

# What is tested here is tested on the CPU, several ranks beside each other, whatever GPUs a machine has.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus() -> Path:
    return root() / "data_pipeline" / "sample_corpus"


@pytest.fixture(scope="session")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "tokenizer"
    texts = [json.loads(line)["text"] for line in (corpus / "english.jsonl").open(encoding="utf-8")]
    train(texts, folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="session")
def collection(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "collection"
    inputs = {"code": [corpus / "code.jsonl"], "english": [corpus / "english.jsonl"]}
    prepare(inputs, tokenizer, folder, Options(validation_fraction=0.05))
    return folder


@pytest.fixture(scope="session")
def tiny_recipe(collection: Path, tokenizer: Path) -> Callable[..., dict[str, Any]]:
    """A recipe's tables, of a model that takes some milliseconds a step; keyword arguments replace keys of a table."""

    def tables(**changes: dict[str, Any]) -> dict[str, Any]:
        recipe: dict[str, Any] = {
            "seed": 11,
            "model": {
                "preset": "mini", "vocab_size": VOCAB_SIZE, "d_model": 128, "n_layers": 2,
                "n_heads": 2, "n_kv_heads": 1, "d_ff": 256, "seq_len": 64,
            },
            "data": {"path": str(collection), "tokenizer": str(tokenizer)},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "schedule": {"peak_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "max_steps": 16},
            "memory": {"activation_checkpointing": "full", "loss_chunk_tokens": 100},
            "evaluation": {"every_steps": 8, "max_tokens": 1024},
            "checkpoint": {"every_steps": 4, "keep_last": 2},
            "logging": {"tensorboard": False},
            "deepspeed": {"config": "ds_configs/zero2.json"},
        }  # fmt: skip
        for table, values in changes.items():
            recipe[table] = {**recipe.get(table, {}), **values}
        return recipe

    return tables
