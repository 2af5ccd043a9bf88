"""What makes steps faster: on by default where it is safe on the device, and off with one line of the recipe.

`compile`, `precision.tf32` and `optimizer.fused`; docs/performance.md has what each gives, and what is on beside them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from pretrain.config import Compute, RecipeError, RunConfig


class Compiled(NamedTuple):
    """Whether the blocks go through torch.compile, and what a person should know of that."""

    on: bool
    note: str | None = None


def compiles(config: RunConfig, zero_stage: int, device: torch.device) -> Compiled:
    """What `compile` means on `device`. RecipeError where compile = true cannot be done.

    "auto" means on a GPU whose compiler works, where blocks can be compiled: a CPU gains a twentieth or so
    (benchmarks/model.py), which pays for the compilation only in runs of hours.
    """
    if config.compile != "auto":
        fault = compiler_fault(device) if config.compile else None
        if fault is not None:
            raise RecipeError(
                f"compile = true: torch.compile does not work here ({fault}): install a C++ compiler, "
                "or set compile = false"
            )
        return Compiled(config.compile)
    if device.type != "cuda":
        return Compiled(False)
    if zero_stage == 3:
        fault = "ZeRO-3 gathers weights between a block's operations"
    elif config.memory.activation_checkpointing == "selective":
        fault = '"selective" checkpointing chooses among the operations of a block'
    else:
        fault = compiler_fault(device)
    if fault is not None:
        return Compiled(False, f'compile = "auto": the blocks are not compiled: {fault}')
    return Compiled(True, 'compile = "auto": the first step compiles the blocks; compile = false leaves that out')


@functools.cache
def compiler_fault(device: torch.device) -> str | None:
    """Why torch.compile does not work on this device, tried on something small; None where it does."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # a compiler may fail in any way; whatever it is, nothing has begun yet
        lines = [line for line in str(error).splitlines() if line.strip()]
        return (lines[0] if lines else type(error).__name__).strip()[:200]
    return None


def multiply_in_tf32(config: RunConfig, compute: Compute, device: torch.device) -> None:
    """Have a GPU round the factors of fp32 matrix products to TF32 (10 bits of fraction), or not.

    "auto" means wherever a run computes in bf16 or fp16, whose products are no finer; a run in fp32 has asked for more.
    A CPU has none.
    """
    if device.type != "cuda":
        return
    chosen = config.precision.tf32
    used = compute != "fp32" if chosen == "auto" else chosen
    torch.set_float32_matmul_precision("high" if used else "highest")
