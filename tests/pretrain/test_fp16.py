"""fp16 on the real engine: close to fp32, overflows left out and counted, the loss scale's whole life, resumed exactly.

DeepSpeed finds no fp16 arithmetic on most CPUs, while torch's kernels for it work on all. So the ranks here override
that one answer of DeepSpeed's accelerator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pretrain.checkpoint import list_checkpoints, load_model
from pretrain.config import RecipeError, parse_recipe
from pretrain.engine import TrainingEngine, process_group
from pretrain.metrics import Report, TrainingDivergedError, all_records, read_metrics
from pretrain.resolve import refusal
from pretrain.runtime import Ranks, auto_compute, precision_note
from pretrain.state import TrainState
from pretrain.step import StepResult, train_step
from pretrain.train import train
from tests.pretrain.recipe import recipe as smallest_recipe
from tests.pretrain.test_engine import build, micro_batches, plan_of, recipe
from tests.pretrain.test_resume import assert_same_checkpoint
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
OFFERED = [
    (stage, accumulate)
    for stage in (0, 1, 2, 3)
    for accumulate in ("fp16", "fp32")
    if refusal(stage, "fp16", "fp32", accumulate) is None
]
STEPS = 7
# fp16 on a CPU is some fifty times slower than fp32.
SMALL = {"d_model": 64, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "d_ff": 64}


def with_fp16() -> Any:
    """DeepSpeed's accelerator says yes to fp16, for as long as the context lasts."""
    from deepspeed.accelerator import get_accelerator

    return mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True)


@contextmanager
def overflows_at(steps: Sequence[int]) -> Iterator[None]:
    """Losses of some steps, from 1, are so large that their gradients overflow fp16."""
    backward = TrainingEngine.backward

    def scaled(self: TrainingEngine, loss: torch.Tensor) -> None:
        step = self._engine.global_steps + 1  # DeepSpeed's count, in its checkpoints too
        backward(self, loss * 1e30 if step in steps else loss)

    with mock.patch.object(TrainingEngine, "backward", scaled):
        yield


# ---------------------------------------------------------------- steps


def trained(
    ranks: Ranks, stage: int, overflows: Sequence[int], **precision: Any
) -> tuple[list[StepResult], dict[str, Any]]:
    """Some steps on the same batch, overflowing on the last rank alone, and what the engine holds behind them."""
    config = recipe(model=SMALL, memory="none", **precision)
    engine = build(ranks, config, stage)
    plan = plan_of(config, ranks)
    batches = micro_batches(config, ranks)
    with overflows_at(overflows if ranks.rank == ranks.world_size - 1 else ()):
        steps = [train_step(engine, batches, plan, lr=1e-3) for _ in range(STEPS)]
    held = {
        "weights": {p.dtype for p in engine._engine.module.parameters()},
        "states": {
            tensor.dtype
            for state in engine._engine.optimizer.optimizer.state.values()
            for key, tensor in state.items()
            if key != "step"
        },
        "rope": engine._engine.module.positions.cos_td.dtype,
        "skipped": engine.skipped_steps,
    }
    return steps, held


def steps_case(ranks: Ranks) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    with with_fp16(), process_group(torch.device("cpu")):
        found["fp32"] = trained(ranks, 2, (), compute="fp32")
        for stage, accumulate in OFFERED:
            settings = {"compute": "fp16", "accumulate": accumulate, "initial_scale_power": 8}
            found[stage, accumulate, "steady"] = trained(ranks, stage, (), **settings)
            found[stage, accumulate, "eventful"] = trained(ranks, stage, [5], **settings, loss_scale_window=3)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_ranks(2, steps_case)


@pytest.mark.parametrize("stage, accumulate", OFFERED)
def test_fp16_trains_close_to_fp32(stage: int, accumulate: str, results: list[dict[Any, Any]]) -> None:
    steps, held = results[0][stage, accumulate, "steady"]
    reference, _ = results[0]["fp32"]
    assert [step.loss for step in steps] == [step.loss for step in results[1][stage, accumulate, "steady"][0]]
    assert steps[-1].loss < steps[0].loss - 0.1
    for step, exact in zip(steps, reference, strict=True):
        assert step.loss == pytest.approx(exact.loss, rel=1e-3)
        assert step.grad_norm == pytest.approx(exact.grad_norm, rel=1e-2)
        assert (step.loss_scale, step.overflowed) == (256.0, False)
        assert (exact.loss_scale, exact.overflowed) == (None, False)
    assert held == {"weights": {torch.float16}, "states": {torch.float32}, "rope": torch.float32, "skipped": 0}


@pytest.mark.parametrize("stage, accumulate", OFFERED)
def test_the_scale_grows_and_an_overflow_on_one_rank_is_left_out_on_all(
    stage: int, accumulate: str, results: list[dict[Any, Any]]
) -> None:
    """The updates that do happen are those of a run with one scale: a power of two more or less moves no bit of them.

    DeepSpeed's own growth would halve the third.
    """
    for rank in (0, 1):
        steps, held = results[rank][stage, accumulate, "eventful"]
        assert [step.loss_scale for step in steps] == [256.0, 256.0, 256.0, 512.0, 512.0, 256.0, 256.0]
        assert [step.overflowed for step in steps] == [number == 4 for number in range(STEPS)]
        assert [math.isfinite(step.grad_norm) for step in steps] == [not step.overflowed for step in steps]
        assert held["skipped"] == 1
        assert steps[5].loss == steps[4].loss, "the same batch and the same weights"
        steady = results[rank][stage, accumulate, "steady"][0]
        assert [step.loss for step in steps[:5]] == pytest.approx([step.loss for step in steady[:5]], rel=1e-5)
        assert steps[6].loss == pytest.approx(steady[5].loss, rel=1e-5)
        norms = [step.grad_norm for step in steps if not step.overflowed]
        assert norms == pytest.approx([step.grad_norm for step in steady[:6]], rel=1e-4)


# ---------------------------------------------------------------- runs


def fp16_run(
    ranks: Ranks, tables: dict[str, Any], path: Path, overflows: Sequence[int] = (), fails_behind: int | None = None
) -> str:
    """Train in fp16, overflowing at some steps; with `fails_behind`, the process is lost behind that step."""
    record = Report.step

    def record_and_fail(self: Report, state: TrainState, **figures: Any) -> None:
        record(self, state, **figures)
        if state.global_step == fails_behind:
            raise InterruptedError

    with with_fp16(), overflows_at(overflows), mock.patch.object(Report, "step", record_and_fail):
        try:
            return train(parse_recipe(tables), path, ranks)
        except (InterruptedError, TrainingDivergedError) as error:
            return str(error)


def small(tiny_recipe: Tables, *, steps: int, stage: int = 2, **precision: Any) -> dict[str, Any]:
    return tiny_recipe(
        model={**SMALL, "seq_len": 16},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        schedule={"max_steps": steps, "warmup_steps": 0},
        memory={"activation_checkpointing": "none"},
        evaluation={"max_tokens": 64},
        deepspeed={"config": f"ds_configs/zero{stage}.json"},
        precision=precision,
    )


FIGURES = ("loss", "grad_norm", "lr", "tokens", "loss_scale", "skipped_steps")


@pytest.mark.parametrize("stage, world_size", [(2, 1), (3, 2)])
def test_a_resumed_run_has_the_loss_scale_and_all_else(
    stage: int, world_size: int, tiny_recipe: Tables, tmp_path: Path
) -> None:
    """Resumed amid a window, so the count of updates since the last overflow matters, and with one step skipped."""
    scaling = {"initial_scale_power": 8, "loss_scale_window": 3}
    tables = small(tiny_recipe, steps=8, stage=stage, compute="fp16", **scaling)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_ranks(world_size, fp16_run, tables, whole, [2, 7]) == ["finished"] * world_size
    run_ranks(world_size, fp16_run, tables, broken, [2, 7], 6)
    assert run_ranks(world_size, fp16_run, tables, broken, [2, 7]) == ["finished"] * world_size

    expected = {record["step"]: record for record in read_metrics(whole / "metrics.jsonl")}
    scales = [record["loss_scale"] for record in expected.values()]
    assert scales == [256.0] * 2 + [128.0] * 3 + [256.0] * 2 + [128.0]
    assert [record["skipped_steps"] for record in expected.values()] == [0] + [1] * 5 + [2] * 2
    assert [step for step, record in expected.items() if record["grad_norm"] is None] == [2, 7]
    again = [record for record in all_records(broken / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in again] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    for record in again:
        assert {name: record[name] for name in FIGURES} == {name: expected[record["step"]][name] for name in FIGURES}
    assert_same_checkpoint(list_checkpoints(whole / "checkpoints")[-1], list_checkpoints(broken / "checkpoints")[-1])


@pytest.mark.parametrize("stage", [2, 3])
def test_an_overflow_at_the_smallest_scale_ends_the_run(stage: int, tiny_recipe: Tables, tmp_path: Path) -> None:
    tables = small(tiny_recipe, steps=9, stage=stage, compute="fp16", initial_scale_power=2)
    (message,) = run_ranks(1, fp16_run, tables, tmp_path / "run", range(1, 10))
    assert message.startswith("step 3: a gradient overflows fp16 even at the smallest loss scale, 1;")
    assert "lower schedule.peak_lr" in message
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(r["loss_scale"], r["skipped_steps"]) for r in records] == [(4.0, 1), (2.0, 2), (1.0, 3)]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


# ---------------------------------------------------------------- what the device can


def refused_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> tuple[bool, str]:
    from deepspeed.accelerator import get_accelerator

    try:
        return get_accelerator().is_fp16_supported() is True, train(parse_recipe(tables), path, ranks)
    except RecipeError as error:
        return False, str(error)


def test_fp16_is_refused_where_the_device_has_none(tiny_recipe: Tables, tmp_path: Path) -> None:
    """By the machine's own answer: before anything stands in the run directory."""
    tables = small(tiny_recipe, steps=1, compute="fp16")
    ((supported, outcome),) = run_ranks(1, refused_case, tables, tmp_path / "run")
    if supported:
        assert outcome == "finished"
    else:
        assert outcome.startswith("this CPU cannot train in fp16")
        assert 'set precision.compute = "bf16"' in outcome
        assert not (tmp_path / "run").exists()


def test_auto_is_the_devices_choice_and_a_resume_keeps_it(tiny_recipe: Tables, tmp_path: Path) -> None:
    path = tmp_path / "run"
    tables = small(tiny_recipe, steps=2, compute="auto")
    assert run_ranks(1, fp16_run, tables, path) == ["finished"]
    assert 'compute = "auto"' in (path / "recipe.toml").read_text()
    assert json.loads((path / "environment.json").read_text())["attempts"][0]["compute"] == "bf16"
    (checkpoint,) = list_checkpoints(path / "checkpoints")
    assert json.loads((checkpoint / "state.json").read_text())["precision"]["compute"] == "bf16"
    ((_, refused),) = run_ranks(1, elsewhere_case, tables, path)
    assert "was written with precision.compute = bf16, this run has fp16" in refused
    assert 'resume with precision.compute = "bf16"' in refused


def elsewhere_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> tuple[str, str]:
    """As on a device for which "auto" is fp16."""
    from pretrain.run_directory import CheckpointError

    with mock.patch("pretrain.train.auto_compute", return_value="fp16"), with_fp16():
        try:
            return "ran", train(parse_recipe(tables), path, ranks)
        except CheckpointError as error:
            return "refused", str(error)


def unlike_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    """The second rank's GPU has no bf16."""
    with mock.patch("pretrain.train.auto_compute", return_value=("bf16", "fp16")[ranks.rank]), with_fp16():
        try:
            return train(parse_recipe(tables), path, ranks)
        except RecipeError as error:
            return str(error)


def test_ranks_on_unlike_devices_are_refused(tiny_recipe: Tables, tmp_path: Path) -> None:
    told = run_ranks(2, unlike_case, small(tiny_recipe, steps=1, compute="auto"), tmp_path / "run")
    assert told[0] == told[1]
    assert "would be bf16 on rank 0 and fp16 on rank 1: set it to one of them" in told[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_bf16, auto", [(True, "bf16"), (False, "fp16")])
def test_what_auto_stands_for(has_bf16: bool, auto: str) -> None:
    gpu = torch.device("cuda", 0)
    answer = lambda *, including_emulation: has_bf16 or including_emulation  # noqa: E731
    with (
        mock.patch("torch.cuda.is_bf16_supported", answer),
        mock.patch("torch.cuda.get_device_name", return_value="Tesla T4"),
    ):
        assert auto_compute(gpu) == auto
        assert auto_compute(torch.device("cpu")) == "bf16"
        note = precision_note(smallest_recipe(precision={"compute": "auto"}).precision, gpu)
        assert note is not None
        assert note.startswith(f'precision.compute = "auto": {auto}')
        assert "Tesla T4" in note
        imitated = precision_note(smallest_recipe().precision, gpu)
        assert (imitated is None) == has_bf16


def test_a_cpu_computes_fp16_weights_in_fp32(tiny_recipe: Tables, tmp_path: Path) -> None:
    tables = small(tiny_recipe, steps=2, compute="fp16")
    assert run_ranks(1, fp16_run, tables, tmp_path) == ["finished"]
    with pytest.warns(UserWarning, match="its fp16 weights are computed in fp32 on this CPU"):
        model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
