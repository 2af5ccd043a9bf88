"""What may change on the way: the global batch along a ramp, and the schedule of a run that resumes.

Real runs of the real loop; a launch runs several, one after the other, in one process group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.train
from data_pipeline.loader import Batch
from data_pipeline.order import SampleOrder
from data_pipeline.recorded_run import read_run
from data_pipeline.steps import Steps
from pretrain.batching import BatchPlan, steps_of
from pretrain.config import RecipeError, parse_recipe
from pretrain.engine import process_group
from pretrain.inputs import Inputs
from pretrain.metrics import Report, read_metrics
from pretrain.plan import Reading, plan
from pretrain.resuming import choose
from pretrain.run_directory import CheckpointError
from pretrain.runtime import Ranks
from pretrain.schedule import learning_rate
from pretrain.state import TrainState
from pretrain.step import StepResult, train_step
from tests.pretrain.recipe import recipe
from tests.pretrain.test_resume import assert_same_checkpoint
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
Run = tuple[dict[str, Any], Path, str]  # a recipe's tables, the run's directory, --resume

RAMP = {
    "global_batch_size": 16,
    "micro_batch_size": 2,
    "ramp": [{"until_samples": 8, "global_batch_size": 4}, {"until_samples": 24, "global_batch_size": 8}],
}
STEPS = Steps(16, ((8, 4), (24, 8)))  # 4, 4, 8, 8, 16, 16 …


def runs_case(ranks: Ranks, runs: list[Run]) -> tuple[list[list[list[int]]], list[list[str]]]:
    """Of each run the samples that this rank gave to each of its steps, and what was said of its learning rate."""
    found: list[list[list[int]]] = []
    told: list[list[str]] = []

    def watched(batches: Iterator[Batch], read: list[int]) -> Iterator[Batch]:
        for batch in batches:
            read += batch.samples.tolist()
            yield batch

    def step(engine: Any, batches: Iterator[Batch], plan: BatchPlan, lr: float, **wishes: Any) -> StepResult:
        found[-1].append([])
        return train_step(engine, watched(batches, found[-1][-1]), plan, lr, **wishes)

    def say(report: Report, message: str) -> None:
        told[-1] += [message] if "learning rate" in message else []

    with (
        process_group(torch.device("cpu")),  # DeepSpeed can't be started twice in a process: one for all runs
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
        mock.patch.object(pretrain.train, "train_step", step),
        mock.patch.object(Report, "say", say),
    ):
        for tables, path, resume in runs:
            found.append([])
            told.append([])
            assert pretrain.train.train(parse_recipe(tables), path, ranks, resume=resume) == "finished"
    return found, told


def short(tiny_recipe: Tables, max_steps: int, *, save: int = 1, **changes: dict[str, Any]) -> dict[str, Any]:
    """A recipe of few steps, evaluated at the end and saved then and every `save` steps."""
    tables = tiny_recipe(
        checkpoint={"every_steps": save, "keep_last": 99}, evaluation={"every_steps": 99, "max_tokens": 128}, **changes
    )
    return {**tables, "schedule": {**tables["schedule"], "max_steps": max_steps}}


def checkpoint(path: Path, step: int) -> Path:
    return path / "checkpoints" / f"step-{step:08d}"


def state_of(path: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint(path, step) / "state.json").read_text())
    return content


# ---------------------------------------------------------------- a batch ramp


def test_a_ramp_reads_its_samples_and_resumes_anywhere_in_it(tiny_recipe: Tables, tmp_path: Path) -> None:
    """Two ranks: at each step the arithmetic samples; branched off in, at and behind the ramp's ends: bit for bit."""
    tables = short(tiny_recipe, 6, batch=RAMP)
    whole, begun = tmp_path / "whole", (1, 2, 4, 5)
    once = short(tiny_recipe, 6, save=99, batch=RAMP)
    branches = [(once, tmp_path / str(step), str(checkpoint(whole, step))) for step in begun]
    by_rank = run_ranks(2, runs_case, [(tables, whole, "auto"), *branches])
    for number, first in enumerate((0, *begun)):
        steps = [sorted(first + second) for first, second in zip(*(read[number] for read, _ in by_rank), strict=True)]
        assert steps == [list(STEPS.samples(step)) for step in range(first, 6)]
    for step in begun:
        assert_same_checkpoint(checkpoint(whole, 6), checkpoint(tmp_path / str(step), 6))
    records = read_metrics(whole / "metrics.jsonl")
    assert [record["tokens"] for record in records] == [STEPS.samples_before(step) * 64 for step in range(1, 7)]
    for step in range(1, 7):
        counted = TrainState.of(checkpoint(whole, step))
        assert (counted.global_step, counted.consumed_samples) == (step, STEPS.samples_before(step))
    recorded = read_run(whole)
    assert recorded.steps == STEPS
    refuse_and_allow(tables, whole)


def refuse_and_allow(tables: dict[str, Any], path: Path) -> None:
    """Another ramp is refused where it has begun, and only there. Checkpoint 6 stands behind 56 samples."""

    def resumed(**batch: Any) -> Path | None:
        changed = parse_recipe({**tables, "batch": {**tables["batch"], **batch}})
        return choose(path / "checkpoints", "auto", Inputs.check(changed, 2).identity)

    newest = checkpoint(path, 6)
    kept = RAMP["ramp"]
    assert resumed() == newest
    later = {"until_samples": 88, "global_batch_size": 16}
    assert resumed(ramp=[*kept, later], global_batch_size=32) == newest
    assert resumed(ramp=[*kept, {**later, "until_samples": 56}], global_batch_size=4) == newest
    for batch, says in (
        ({"ramp": []}, "4 until sample 8, then 8 until sample 24, then 16, this run has 16"),
        ({"ramp": kept[:1]}, "this run has 4 until sample 8, then 16"),
        ({"global_batch_size": 8}, "this run has 4 until sample 8, then 8"),
        (
            {"ramp": [*kept, {**later, "until_samples": 40}], "global_batch_size": 32},
            "then 16 until sample 40, then 32",
        ),
    ):
        with pytest.raises(CheckpointError, match=re.escape(says)) as refused:
            resumed(**batch)
    assert str(refused.value).endswith("or have it changed from step 6 on: --change global_batch_size")


def test_one_rank_reads_what_two_read_and_a_plain_run_may_grow(tiny_recipe: Tables, tmp_path: Path) -> None:
    """A run without a ramp goes on with another batch if its past is written down as a ramp; else it is refused."""
    tables, plain = short(tiny_recipe, 6, save=99, batch=RAMP), short(tiny_recipe, 3, save=99)
    past = [{"until_samples": 24, "global_batch_size": 8}]
    grown = short(tiny_recipe, 5, save=99, batch={"global_batch_size": 16, "ramp": past})
    ramp, run = tmp_path / "ramp", tmp_path / "run"
    ((rank, _),) = run_ranks(1, runs_case, [(tables, ramp, "auto"), (plain, run, "auto"), (grown, run, "auto")])
    assert rank[0] == [list(STEPS.samples(step)) for step in range(6)]
    assert [len(step) for steps in rank[1:] for step in steps] == [8, 8, 8, 16, 16]
    assert "batch_ramp" not in state_of(run, 3)  # what has no ramp is stored as it always was
    assert state_of(run, 5) == {**state_of(run, 5), "global_batch_size": 16, "batch_ramp": [[24, 8]]}
    unwritten = Inputs.check(parse_recipe(short(tiny_recipe, 5, batch={"global_batch_size": 16})), 1).identity
    with pytest.raises(CheckpointError, match="global_batch_size = 8 until sample 24, then 16, this run has 16"):
        choose(run / "checkpoints", "auto", unwritten)


def test_a_part_that_does_not_divide_is_named() -> None:
    ramp = [{"until_samples": 48, "global_batch_size": 12}, {"until_samples": 96, "global_batch_size": 24}]
    config = recipe(batch={"ramp": ramp})
    steps, plan = steps_of(config.batch), BatchPlan.from_config(config, 1)
    assert [plan.of_step(step, steps).gradient_accumulation_steps for step in (0, 3, 4, 5, 6)] == [3, 3, 6, 6, 8]
    assert steps == Steps(32, ((48, 12), (96, 24)))
    with pytest.raises(RecipeError, match=re.escape("batch.ramp[0].global_batch_size = 12 is not a multiple of")):
        BatchPlan.from_config(config, 2)


def test_the_plan_counts_a_ramps_tokens() -> None:
    config = recipe(batch={"ramp": [{"until_samples": 48, "global_batch_size": 12}]}, schedule={"max_steps": 20})
    samples = 48 + 16 * 32  # four steps of 12, sixteen of 32
    made = plan(config, 1)
    assert made.total_tokens == samples * 1024
    assert "batch ramp        12 until sample 48, then 32\n" in made.to_text()
    assert made.to_dict()["batch_ramp"] == [{"until_samples": 48, "global_batch_size": 12}]
    order = SampleOrder(seed=1, seq_len=1024, tokens={"one": 100 * 1024 + 1})
    reading = Reading.of(config, order)
    assert (reading.samples, reading.epochs) == (samples, {"one": samples / 100})
    assert "batch ramp" not in plan(recipe(), 1).to_text()


# ---------------------------------------------------------------- a decay that begins late


def test_a_stable_run_decays_late_in_its_own_directory_and_in_another(tiny_recipe: Tables, tmp_path: Path) -> None:
    """Before the decay all is the stable run's, bit for bit; it begins where it was asked to; a jump is told."""
    stable = short(tiny_recipe, 6, schedule={"name": "constant", "min_lr": 0.0, "warmup_steps": 2})
    late = short(tiny_recipe, 6, save=4, schedule={"name": "wsd", "min_lr": 0.0, "warmup_steps": 2, "decay_steps": 2})
    longer = short(tiny_recipe, 8, save=4, schedule={"name": "wsd", "min_lr": 0.0, "warmup_steps": 2, "decay_steps": 2})
    planned, stays, branch, inside = (tmp_path / name for name in ("planned", "stays", "branch", "inside"))
    runs: list[Run] = [
        (stable, stays, "auto"),  # six steps at the peak
        (late, planned, "auto"),  # the same decay, planned from the beginning
        (late, branch, str(checkpoint(stays, 4))),  # begun late, in a directory of its own
        (late, inside, str(checkpoint(stays, 5))),  # where it should be half over
        (longer, stays, "auto"),  # begun late, in the same directory
    ]
    ((_, told),) = run_ranks(1, runs_case, runs)
    expected = [learning_rate(step, parse_recipe(late).schedule) for step in range(6)]
    assert expected[:4] == [5e-4, 1e-3, 1e-3, 1e-3]
    assert expected[3] > expected[4] > expected[5] > 0

    def rates(path: Path) -> list[float]:
        return [record["lr"] for record in read_metrics(path / "metrics.jsonl")]

    assert rates(planned) == expected
    assert rates(branch) == expected[4:]
    assert_same_checkpoint(checkpoint(stays, 4), checkpoint(planned, 4))
    assert_same_checkpoint(checkpoint(planned, 6), checkpoint(branch, 6))
    assert rates(stays) == [*expected[:4], 1e-3, 1e-3, *expected[4:]]
    assert told == [[], [], [], told[3], []]
    assert told[3] == [
        f"warning: the learning rate jumps from 0.001 in step 5 to {expected[5]:.6g} in step 6; this schedule has "
        f"{expected[4]:.6g} for step 5, in a fall that begins with step 5: to decay from here, set "
        "schedule.max_steps = 7"
    ]
    for path, changes in (
        (branch, ['schedule.name = "wsd"', "schedule.decay_steps = 2"]),
        (stays, ['schedule.name = "wsd"', "schedule.max_steps = 8", "schedule.decay_steps = 2"]),
    ):
        attempts = json.loads((path / "environment.json").read_text())["attempts"]
        assert attempts[-1]["recipe_changes"] == [*changes, "checkpoint.every_steps = 4"]
