"""What makes steps faster is on where it is safe, and off with one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.transformer import Transformer
from pretrain import acceleration
from pretrain.acceleration import compiles, multiply_in_tf32
from pretrain.adamw import PiecewiseAdamW
from pretrain.config import RecipeError
from pretrain.metrics import read_metrics
from pretrain.optimizer import build_optimizer
from pretrain.resolve import resolve
from tests.pretrain.recipe import recipe
from tests.pretrain.test_resume import train_case
from tests.ranks import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)  # no test needs one: nothing is computed there


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A compiler that works everywhere; the devices that it is tried on."""
    tried: list[torch.device] = []
    monkeypatch.setattr(acceleration, "compiler_fault", lambda device: tried.append(device))
    return tried


@pytest.mark.parametrize(
    "device, stage, tables, on, says",
    [
        (CPU, 2, {}, False, None),
        (GPU, 0, {}, True, "compile = false leaves that out"),
        (GPU, 2, {"memory": {"activation_checkpointing": "full"}}, True, "compile = false leaves that out"),
        (GPU, 3, {}, False, "ZeRO-3"),
        (GPU, 2, {"memory": {"activation_checkpointing": "selective"}}, False, "selective"),
        (GPU, 2, {"compile": False}, False, None),
        (CPU, 2, {"compile": True}, True, None),
    ],
)
def test_blocks_are_compiled_where_a_device_gains(
    device: torch.device, stage: int, tables: dict[str, Any], on: bool, says: str | None, compiler: list[torch.device]
) -> None:
    found = compiles(recipe(**tables), stage, device)
    assert found.on == on
    assert (says in found.note) if says and found.note else found.note is says
    assert compiler == ([device] if on else [])


def test_a_compiler_that_fails_is_no_fault_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceleration, "compiler_fault", lambda device: "no triton")
    assert compiles(recipe(), 2, GPU) == (False, 'compile = "auto": the blocks are not compiled: no triton')
    with pytest.raises(
        RecipeError, match=r"does not work here \(no triton\): install a C\+\+ compiler, or set compile"
    ):
        compiles(recipe(compile=True), 2, GPU)


def test_a_compilers_fault_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(function: object) -> object:
        raise RuntimeError("\n  no compiler  \nand much more")

    monkeypatch.setattr(torch, "compile", failing)
    acceleration.compiler_fault.cache_clear()
    assert acceleration.compiler_fault(CPU) == "no compiler"
    acceleration.compiler_fault.cache_clear()


@pytest.fixture
def _matmul_setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_matmul_setting")
@pytest.mark.parametrize(
    "device, compute, tf32, setting",
    [
        (GPU, "bf16", "auto", "high"),
        (GPU, "fp32", "auto", "highest"),
        (GPU, "fp32", True, "high"),
        (GPU, "bf16", False, "highest"),
        (CPU, "bf16", "auto", "medium"),
        (CPU, "fp32", True, "medium"),
    ],
)
def test_tf32(device: torch.device, compute: Any, tf32: bool | str, setting: str) -> None:
    torch.set_float32_matmul_precision("medium")  # as something else has left it: a CPU is left alone
    multiply_in_tf32(recipe(precision={"tf32": tf32}), compute, device)
    assert torch.get_float32_matmul_precision() == setting


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_torchs_fused_one_unless_the_recipe_says_no(fused: bool) -> None:
    config = recipe(optimizer={"fused": fused}, model={"n_layers": 1, "d_model": 64, "d_ff": 64, "vocab_size": 64})
    optimizer = build_optimizer(Transformer(config.model), config, initial_lr=1e-3)
    assert isinstance(optimizer, torch.optim.AdamW if fused else PiecewiseAdamW)
    assert bool(optimizer.defaults.get("fused")) == fused


def test_an_offloaded_optimizer_is_the_fused_one() -> None:
    json = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    resolve(json, recipe(), 1)
    with pytest.raises(RecipeError, match=r"set optimizer\.fused = true"):
        resolve(json, recipe(optimizer={"fused": False}), 1)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_run_goes_on_with_another_kernel(
    stage: int, tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Fused, then piece by piece, then fused again: the losses are those of one kernel within rounding."""
    losses = []
    for name, kernels in (("one", (True,)), ("two", (True, False, True))):
        starts = [
            tiny_recipe(
                deepspeed={"config": f"ds_configs/zero{stage}.json"},
                precision={"compute": "fp32"},
                schedule={"name": "constant", "min_lr": 0.0, "max_steps": 12 if len(kernels) == 1 else 4 * number},
                optimizer={"fused": fused},
            )
            for number, fused in enumerate(kernels, 1)
        ]
        for tables in starts:
            assert run_ranks(1, train_case, tables, tmp_path / name) == ["finished"]
        losses.append([record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl")])
    assert len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
