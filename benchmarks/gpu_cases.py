"""What benchmarks/gpu.py measures, case by case, as recipes; and what is predicted of each. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from model.accounting import flops_per_token
from pretrain.config import RunConfig, load_recipe
from pretrain.memory import MOMENTS, Budget, budget
from pretrain.resolve import read_json, resolve

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "pretrain" / "recipes" / "0.5b.toml"

Kind = Literal["losses", "speed", "saving"]
Accelerator = Literal["cuda", "cpu"]

# In place of the recipe's own.
TINY = {"vocab_size": 512, "d_model": 128, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ff": 256, "seq_len": 64}


@dataclass(frozen=True)
class Case:
    """One measurement of the recipe `0.5b` on one rank, changed as the fields say. Batches count sequences."""

    kind: Kind
    micro_batch_size: int
    global_batch_size: int
    accelerator: Accelerator = "cuda"
    tiny: bool = False
    seq_len: int | None = None  # the recipe's, and so the layers
    n_layers: int | None = None
    checkpointing: str = "none"
    compile: bool = False
    compute: Literal["bf16", "fp32"] = "bf16"
    stage: int = 2
    steps: int = 3  # measured at least
    seconds: float = 5.0  # of measured steps at least
    profile: bool = False

    @property
    def name(self) -> str:
        """As a table has it."""
        if self.kind == "losses":
            return f"{self.compute} on {'the CPU' if self.accelerator == 'cpu' else 'the GPU'}"
        compiled = ", compiled" if self.compile else ""
        return f"{self.micro_batch_size} of {self.global_batch_size}, {self.checkpointing}{compiled}"

    def config(self) -> RunConfig:
        """The recipe. RecipeError where the fields don't go together."""
        changes: dict[str, Any] = {
            "batch.global_batch_size": self.global_batch_size,
            "batch.micro_batch_size": self.micro_batch_size,
            "precision.compute": f'"{self.compute}"',
            "memory.activation_checkpointing": f'"{self.checkpointing}"',
            "compile": str(self.compile).lower(),
            "checkpoint.asynchronous": str(self.kind == "saving").lower(),  # its copy is in main memory from then on
        }
        if self.tiny:
            changes |= {f"model.{key}": value for key, value in TINY.items()} | {"memory.loss_chunk_tokens": 64}
        sizes = {"model.seq_len": self.seq_len, "model.n_layers": self.n_layers}
        changes |= {key: value for key, value in sizes.items() if value is not None}
        return load_recipe(RECIPE, [f"{key}={value}" for key, value in changes.items()])

    def deepspeed(self) -> dict[str, Any]:
        """What DeepSpeed is told of it."""
        return resolve(read_json(ROOT / "ds_configs" / f"zero{self.stage}.json"), self.config(), 1, self.compute)

    def predicted(self) -> Budget:
        return budget(self.config(), self.deepspeed(), 1, compute=self.compute, device=self.accelerator)

    @property
    def predicted_peak_bytes(self) -> int:
        """While it trains and saves, on its device; on a CPU main memory is the device."""
        found = self.predicted()
        return max(found.at(moment) + (found.at(moment, "host") if self.accelerator == "cpu" else 0)
                   for moment in MOMENTS)  # fmt: skip

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs, attention counted causally."""
        return flops_per_token(self.config().model).causal


def losses(accelerator: Accelerator, *, tiny: bool) -> list[Case]:
    """In fp32 and in bf16, on the CPU and on `accelerator`: a third of the blocks, short windows: for the CPU."""
    seq_len, n_layers = (32, 2) if tiny else (256, 6)
    return [
        Case("losses", 1, 1, where, tiny, seq_len, n_layers, compute=compute, steps=4)
        for where in dict.fromkeys((accelerator, "cpu"))
        for compute in ("fp32", "bf16")
    ]


def speeds(accelerator: Accelerator, *, tiny: bool) -> Iterator[Case]:
    """Micro-batches × checkpointing × compile, what matters most first: time may end before they do.

    A CPU compiles nothing here: it would take longer than all else.
    """
    sizes, smallest, whole = ((2,), 1, 4) if tiny else ((16, 8, 32), 4, 64)
    base = Case("speed", smallest, whole, accelerator, tiny, seconds=0.1 if tiny else 5.0)
    ways = (True, False) if accelerator == "cuda" else (False,)
    for size, checkpointing, compiled in itertools.product(sizes, ("none", "full"), ways):
        yield replace(base, micro_batch_size=size, checkpointing=checkpointing, compile=compiled)
    yield replace(base, micro_batch_size=sizes[0], checkpointing="selective")
    yield base


def behind(best: Case) -> list[Case]:
    """What follows the sweep, of the fastest: with the recipe's own global batch, kernel by kernel; and its saves."""
    whole = best.global_batch_size if best.tiny else 256
    return [
        replace(best, global_batch_size=whole, seconds=best.seconds if best.tiny else 12.0, profile=True),
        replace(best, kind="saving"),
    ]
