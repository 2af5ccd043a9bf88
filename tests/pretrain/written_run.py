"""A run directory as a trainer leaves it, written in milliseconds: for tests of what reads one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pretrain.config import from_root, to_toml
from pretrain.resolve import read_json, resolve
from tests.pretrain.recipe import recipe

STEP_TOKENS = 1000


def train(step: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
    """The record of one step."""
    return {
        "kind": "train", "step": step, "attempt": attempt, "loss": 3 + 5 * math.exp(-step / 20), "lr": 1e-3,
        "grad_norm": 1 / step, "tokens": step * STEP_TOKENS, "tokens_per_second": 2000.0, "step_seconds": 0.5,
        "model_flops_per_second": 2000.0 * 6e6, "mfu": None, "skipped_steps": 0, "peak_memory_bytes": 600_000_000,
        "at": f"2026-01-01T00:{step // 60 % 60:02d}:{step % 60:02d}.000+00:00", **values,
    }  # fmt: skip


def evaluation(step: int, source: str = "all", attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {
        "kind": "evaluation", "step": step, "attempt": attempt, "source": source, "tokens": 500, "text_bytes": 2000,
        "bytes_exact": True, "loss": 3.0 + 1 / step, "uniform": 8.3, "unigram": 6.0, "perplexity": 21.0,
        "bits_per_byte": 1.1, "at": "2026-01-01T00:30:00.000+00:00", **values,
    }  # fmt: skip


def write_run(
    path: Path,
    records: Iterable[Mapping[str, Any]],
    *,
    state: str = "finished",
    attempts: int = 1,
    facts: Mapping[str, Any] | None = None,
    end: bytes = b"",
    **tables: Any,
) -> Path:
    """`end`: what stands behind the last record, as a kill leaves it."""
    path.mkdir(parents=True)
    config = recipe(**tables)
    deepspeed = resolve(read_json(from_root(config.deepspeed.config)), config, 1, "bf16")
    (path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    (path / "metrics.jsonl").write_bytes(b"".join(lines) + end)
    (path / "deepspeed.json").write_text(json.dumps(deepspeed))
    (path / "status.json").write_text(json.dumps({"state": state, "attempt": attempts, "global_step": 1}))
    known = {"world_size": 1, "compute": "bf16", "device": "cpu", "git_commit": "1" * 40, "versions": {}}
    starts = [
        {"attempt": one + 1, "started_at": f"2026-01-01T0{one}:00:00.000+00:00", **known, **(facts or {})}
        for one in range(attempts)
    ]
    (path / "environment.json").write_text(json.dumps({"attempts": starts}))
    return path
