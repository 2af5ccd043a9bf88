"""Conditions injected into real runs on two ranks: at which step they are met, what is done, what is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import pretrain.train
from data_pipeline.loader import Batch
from data_pipeline.recorded_run import read_run
from data_pipeline.trace import with_texts
from pretrain.checkpoint import list_checkpoints, measured_at
from pretrain.config import parse_recipe
from pretrain.engine import TrainingEngine, process_group
from pretrain.guard import Guard
from pretrain.health import TrainingDivergedError
from pretrain.metrics import Report, all_records, read_metrics
from pretrain.runtime import Ranks
from pretrain.state import TrainState
from pretrain.step import train_step
from tests.ranks import run_ranks
from tokenizer.codec import Codec

Tables = Callable[..., dict[str, Any]]

STEPS = 9  # every third is saved
BAD = 8  # the step that is tampered with
HEALTH = {"window_steps": 8, "spike_z": 20.0, "roll_back_steps": 3}


class StruckError(Exception):
    pass


class Leg(NamedTuple):
    """A start of a run. `losses`, `gradients`: what those of some steps, from 1, are multiplied by on the last rank."""

    tables: dict[str, Any]
    path: Path
    losses: Mapping[int, float] = {}
    gradients: Mapping[int, float] = {}
    struck_in: str | None = None  # a part of a roll back behind which the process is lost
    end: int | None = None  # or the step behind which it is
    changes: tuple[str, ...] = ()


class Told(NamedTuple):
    """How it ended, on one rank."""

    outcome: str
    ran: list[int]  # the steps that were run, as often as they were
    read: list[list[int]]  # the samples that each of these read here


def legs_case(ranks: Ranks, legs: Sequence[Leg]) -> list[Told]:
    with process_group(torch.device("cpu")):  # DeepSpeed can't be started twice in a process
        return legs_of(ranks, legs)


def legs_of(ranks: Ranks, legs: Sequence[Leg]) -> list[Told]:
    """Each a run of its own, in the process group that is there."""
    found = []
    with mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()):
        for leg in legs:
            ran: list[int] = []
            read: list[list[int]] = []
            with injected(leg, ran, read, tampers=ranks.rank == ranks.world_size - 1):
                try:
                    outcome: str = pretrain.train.train(parse_recipe(leg.tables), leg.path, ranks, changes=leg.changes)
                except (StruckError, TrainingDivergedError) as error:
                    outcome = str(error) or "struck"
            ranks.barrier()
            found.append(Told(outcome, ran, read))
    return found


@contextmanager
def injected(leg: Leg, ran: list[int], read: list[list[int]], *, tampers: bool) -> Iterator[None]:
    """Note which steps are run and what they read, tamper with some, and lose the process where the leg says so."""
    leaves_out, forward, backward = Guard.leaves_out, TrainingEngine.forward, TrainingEngine.backward
    step, record, rolled_back = Report.step, pretrain.guard.record, Report.rolled_back

    def noting(self: Guard, number: int) -> bool:
        left = leaves_out(self, number)
        ran.extend([] if left else [number])
        return left

    def tampered_forward(self: TrainingEngine, *arrays: Any) -> Any:
        loss, by = forward(self, *arrays), leg.losses.get(ran[-1])
        if by is None or not tampers:
            return loss
        return loss._replace(loss_sum=loss.loss_sum * by, cross_entropy_sum=loss.cross_entropy_sum * by)

    def tampered_backward(self: TrainingEngine, loss: torch.Tensor) -> None:
        by = leg.gradients.get(ran[-1])
        backward(self, loss if by is None or not tampers else loss * by)

    def ending(self: Report, state: TrainState, **figures: Any) -> None:
        step(self, state, **figures)
        if leg.end is not None and state.global_step == leg.end + 1:
            raise StruckError

    def recorded(*arguments: Any) -> list[str]:
        if leg.struck_in == "loaded":
            raise StruckError
        if leg.struck_in == "recorded":
            with mock.patch("pretrain.rolling_back.clear", return_value=[]):
                record(*arguments)
            raise StruckError
        return record(*arguments)

    def behind(self: Report, *arguments: Any) -> None:
        rolled_back(self, *arguments)
        if leg.struck_in == "cleared":
            raise StruckError

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            read[-1].extend(batch.samples.tolist())
            yield batch

    def reading(engine: TrainingEngine, batches: Iterator[Batch], *rest: Any, **others: Any) -> Any:
        read.append([])
        return train_step(engine, watched(batches), *rest, **others)

    with (
        mock.patch.object(pretrain.train, "train_step", reading),
        mock.patch.object(Guard, "leaves_out", noting),
        mock.patch.multiple(TrainingEngine, forward=tampered_forward, backward=tampered_backward),
        mock.patch.multiple(Report, step=ending, rolled_back=behind),
        mock.patch("pretrain.guard.record", recorded),
    ):
        yield


def tables_of(tiny_recipe: Tables, stage: int = 2, **health: Any) -> dict[str, Any]:
    return tiny_recipe(
        model={"d_model": 64, "n_heads": 1, "d_ff": 96, "seq_len": 32},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        schedule={"max_steps": STEPS},
        memory={"activation_checkpointing": "none"},
        precision={"accumulate": "fp32" if stage else "bf16"},
        evaluation={"every_steps": STEPS, "max_tokens": 64},
        checkpoint={"every_steps": 3, "keep_last": 9},
        health={**HEALTH, **health},
        deepspeed={"config": f"ds_configs/zero{stage}.json"},
    )


def alarms_of(run: Path) -> list[tuple[int, str, str]]:
    return [(one["step"], one["condition"], one["action"]) for one in records_of(run, "alarm")]


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in all_records(run / "metrics.jsonl") if one["kind"] == kind]


def saved_steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")]


# ---------------------------------------------------------------- what is met, and what is done


KINDS: dict[str, tuple[dict[str, Any], float, bool]] = {
    # policies, what the loss or the gradient is multiplied by, whether it is the gradient alone
    "clean": ({}, 1.0, True),
    "loss warn": ({}, 9.0, False),
    "loss skip": ({"loss_spike": "skip"}, 9.0, False),
    "loss stop": ({"loss_spike": "stop"}, 9.0, False),
    "norm skip": ({"grad_norm_spike": "skip"}, 3000.0, True),
    "not finite stop": ({}, float("nan"), False),
    "not finite skip": ({"non_finite": "skip"}, float("nan"), False),
    "not finite norm skip": ({"non_finite": "skip"}, float("inf"), True),
    "nothing to go back to": ({"loss_spike": "roll_back", "roll_back_steps": 6}, 9.0, False),
    "never back": ({"loss_spike": "roll_back", "roll_backs": 0}, 9.0, False),
}


class Runs(NamedTuple):
    home: Path
    told: dict[str, tuple[Told, Told]]  # of both ranks

    def of(self, kind: str) -> Path:
        return self.home / kind.replace(" ", "-")


@pytest.fixture(scope="module")
def runs(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    home = tmp_path_factory.mktemp("health")
    made = Runs(home, {})
    legs = [
        Leg(
            tables_of(tiny_recipe, 2, **health),
            made.of(kind),
            *({BAD: by} if one else {} for one in (not alone, alone)),
        )
        for kind, (health, by, alone) in KINDS.items()
    ]
    first, second = run_ranks(2, legs_case, legs)
    made.told.update(zip(KINDS, zip(first, second, strict=True), strict=True))
    return made


@pytest.mark.soak
def test_five_hundred_clean_steps_have_no_alarm(tiny_recipe: Tables, tmp_path: Path) -> None:
    """With the defaults, from the first step on: warm-up, the steepest fall, the end of the schedule."""
    tables = tiny_recipe(
        schedule={"max_steps": 500, "warmup_steps": 20},
        memory={"activation_checkpointing": "none"},
        evaluation={"every_steps": 250, "max_tokens": 64},
        checkpoint={"every_steps": 250},
    )
    (told,) = run_ranks(1, legs_case, [Leg(tables, tmp_path / "run")])
    assert told[0].outcome == "finished"
    assert alarms_of(tmp_path / "run") == []
    losses = [one["loss"] for one in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1, "it learns"


def test_a_clean_run_has_no_alarm(runs: Runs) -> None:
    assert runs.told["clean"][0][:2] == ("finished", [*range(1, STEPS + 1)])
    assert alarms_of(runs.of("clean")) == []
    assert not (runs.of("clean") / "alarms").exists()
    assert not (runs.of("clean") / "roll_backs.json").exists()


@pytest.mark.parametrize(
    "kind, conditions, action",
    [
        ("loss warn", ("loss_spike",), "warn"),
        ("loss skip", ("loss_spike",), "skip"),
        ("norm skip", ("grad_norm_spike",), "skip"),
        ("not finite skip", ("non_finite",), "skip"),
        ("not finite norm skip", ("non_finite",), "skip"),
    ],
)
def test_what_is_tampered_with_is_met_at_its_step_and_training_goes_on(
    kind: str, conditions: tuple[str, ...], action: str, runs: Runs
) -> None:
    run = runs.of(kind)
    assert runs.told[kind][0][:2] == ("finished", [*range(1, STEPS + 1)])
    assert runs.told[kind][0][:2] == runs.told[kind][1][:2]
    assert alarms_of(run) == [(BAD, condition, action) for condition in conditions]
    assert saved_steps(run) == [3, 6, 9]
    status = json.loads((run / "status.json").read_text())
    assert status.get("alarm", {}).get("condition") == (conditions[-1] if conditions else None)
    clean = {one["step"]: one["loss"] for one in read_metrics(runs.of("clean") / "metrics.jsonl")}
    losses = {one["step"]: one["loss"] for one in read_metrics(run / "metrics.jsonl")}
    assert all(losses[step] == clean[step] for step in range(1, BAD))
    assert (losses[BAD + 1] == clean[BAD + 1]) is False, "without the step the weights are others"


def test_a_skipped_step_uses_up_its_samples_and_moves_no_weight(runs: Runs) -> None:
    """Whatever it was skipped for, the weights behind it are the same: those of the step before."""
    skipped = [runs.of(kind) for kind in KINDS if kind.endswith("skip")]
    for run in skipped[1:]:
        one, other = (folder / "checkpoints" / f"step-{STEPS:08d}" for folder in (skipped[0], run))
        assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    state = json.loads((skipped[0] / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())
    assert (state["global_step"], state["consumed_samples"]) == (STEPS, 8 * STEPS)
    assert measured_at(skipped[0] / "checkpoints" / f"step-{STEPS:08d}")["healthy"] is True


@pytest.mark.parametrize(
    "kind, told",
    [
        (
            "loss stop",
            rf"step {BAD}: loss_spike \S+ is above \S+ \(median \S+ of the last 7 healthy steps\); nothing",
        ),
        (
            "not finite stop",
            rf"step {BAD}: loss nan, gradient norm .*; nothing of this step was saved: resume",
        ),
        ("nothing to go back to", rf"step {BAD}: loss_spike .*; there is no healthy checkpoint of step 2 or before"),
        ("never back", rf"step {BAD}: loss_spike .*; the run has gone back 0 times, health.roll_backs is 0; nothing"),
    ],
)
def test_a_stop_is_one_line_and_leaves_what_was_saved(kind: str, told: str, runs: Runs) -> None:
    run, (first, second) = runs.of(kind), runs.told[kind]
    assert first[:2] == second[:2]
    assert first.ran == [*range(1, BAD + 1)]
    assert first.outcome.count("\n") == 0
    assert re.match(told, first.outcome), first.outcome
    assert saved_steps(run) == [3, 6]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"


def test_the_batch_of_an_alarm_is_saved_as_text(runs: Runs, tokenizer: Path) -> None:
    run = runs.of("loss warn")
    assert [path.name for path in (run / "alarms").iterdir()] == [f"step-{BAD:08d}.jsonl"]
    rows = [json.loads(line) for line in (run / "alarms" / f"step-{BAD:08d}.jsonl").read_text().splitlines()]
    recorded = read_run(run)
    part, reads = recorded.documents_of(BAD)
    traced = with_texts(part.collection, part.streams, reads, Codec.load(tokenizer), with_files=True)
    assert [row["text"] for row in rows] == [one.text for one in traced]
    assert [row["sample"] for row in rows] == [one.read.sample for one in traced]
    assert [(row["file"], row["position"]) for row in rows] == [
        (one.origin.path, one.origin.position)
        for one in traced  # type: ignore[union-attr]
    ]
    assert {row["sample"] for row in rows} == {*range(8 * (BAD - 1), 8 * BAD)}
