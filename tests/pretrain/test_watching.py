"""What a real run says of itself: time that adds up to the wall, MFU and its terms, texts, histograms, the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from model.accounting import flops_per_token
from pretrain.chronicle import read
from pretrain.clock import PARTS, STEP_PARTS
from pretrain.config import parse_recipe
from pretrain.figures import figures
from pretrain.metrics import Report, all_records, read_metrics
from pretrain.page import render
from pretrain.report import page
from pretrain.runtime import Ranks
from pretrain.train import train
from tests.pretrain.test_fp16 import SMALL
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
STEPS = 6
PEAK = 1e11


def train_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    assert train(parse_recipe(tables), path, ranks) == "finished"
    return time.perf_counter() - started


@pytest.fixture(scope="module")
def tables(tiny_recipe: Tables) -> dict[str, Any]:
    return tiny_recipe(
        model=SMALL, schedule={"max_steps": STEPS}, evaluation={"every_steps": 3, "max_tokens": 512},
        checkpoint={"every_steps": 2, "keep_last": 2}, optimizer={"gradient_clipping": "off"},
        batch={"global_batch_size": 2, "micro_batch_size": 2}, precision={"compute": "fp32"},
        memory={"activation_checkpointing": "full"}, deepspeed={"config": "ds_configs/zero0.json"},
        logging={"tensorboard": True, "peak_flops": PEAK, "sample_prompts": ["The"], "sample_tokens": 8,
                 "histogram_every_steps": 2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tables: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    path = tmp_path_factory.mktemp("watching") / "run"
    (seconds,) = run_ranks(1, train_case, tables, path)
    return path, seconds


def test_the_parts_of_an_attempt_add_up_to_its_wall(run: tuple[Path, float]) -> None:
    path, seconds = run
    (spent,) = read_metrics(path / "metrics.jsonl", "time")
    parts = {part: spent[f"{part}_seconds"] for part in PARTS}
    assert sum(parts.values()) == pytest.approx(spent["wall_seconds"], abs=1e-6)
    assert spent["wall_seconds"] <= seconds
    steps = read_metrics(path / "metrics.jsonl")
    assert len(steps) == STEPS
    for step in steps:
        assert sum(step[f"{part}_seconds"] for part in STEP_PARTS) == pytest.approx(step["step_seconds"], abs=1e-9)
        assert all(step[f"{part}_seconds"] > 0 for part in STEP_PARTS)
    for part in ("data", "forward", "backward", "optimizer"):
        assert sum(step[f"{part}_seconds"] for step in steps) == pytest.approx(parts[part], abs=1e-6)
    evaluations = [one["seconds"] for one in read_metrics(path / "metrics.jsonl", "evaluation") if "seconds" in one]
    saves = [one["held_seconds"] for one in read_metrics(path / "metrics.jsonl", "save")]
    assert (len(evaluations), len(saves)) == (2, 3)
    assert 0 < sum(evaluations) <= parts["evaluation"]
    assert 0 < sum(saves) <= parts["save"]
    assert parts["paused"] == 0


def test_flops_of_the_model_and_of_the_hardware_are_apart(run: tuple[Path, float], tables: dict[str, Any]) -> None:
    config = parse_recipe(tables)
    flops, head = flops_per_token(config.model), 6 * config.model.vocab_size * config.model.d_model
    for step in read_metrics(run[0] / "metrics.jsonl"):
        rate = step["tokens_per_second"]
        assert step["model_flops_per_second"] == pytest.approx(flops.causal * rate)
        assert step["mfu"] == pytest.approx(flops.causal * rate / PEAK)
        # All blocks, but not the head, are run forward once more: a third of their FLOPs.
        assert step["hardware_flops_per_second"] == pytest.approx((flops.causal * 4 - head) / 3 * rate, rel=1e-3)


def test_histograms_are_those_of_the_gradients_and_weights(run: tuple[Path, float]) -> None:
    """With one micro-batch and one rank a gradient is the step's, whose norm is recorded."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, _ = run
    shown = EventAccumulator(str(path / "tensorboard"), {"histograms": 0, "tensors": 0}).Reload()
    names = shown.Tags()["histograms"]
    squares: dict[int, float] = {}
    for name in names:
        assert [one.step for one in shown.Histograms(name)] == [2, 4, 6]
        if name.startswith("gradients/"):
            for one in shown.Histograms(name):
                squares[one.step] = squares.get(one.step, 0.0) + one.histogram_value.sum_squares
    norms = {one["step"]: one["grad_norm"] for one in read_metrics(path / "metrics.jsonl")}
    assert {step: math.sqrt(square) for step, square in squares.items()} == pytest.approx(
        {step: norms[step] for step in (2, 4, 6)}, rel=1e-4
    )
    weights = {name.removeprefix("weights/") for name in names if name.startswith("weights/")}
    assert weights == {name.removeprefix("gradients/") for name in names if name.startswith("gradients/")}
    assert "samples/The/text_summary" in shown.Tags()["tensors"]


def test_the_same_texts_stand_in_the_records(run: tuple[Path, float]) -> None:
    records = [one for one in all_records(run[0] / "metrics.jsonl") if one["kind"] == "samples"]
    assert [(one["step"], [text["prompt"] for text in one["texts"]]) for one in records] == [(3, ["The"]), (6, ["The"])]
    assert all(isinstance(one["texts"][0]["text"], str) for one in records)


def test_the_report_shows_what_the_time_went_into(run: tuple[Path, float]) -> None:
    chronicle = read(run[0])
    found = figures(chronicle)
    assert found["step_seconds"].keys() == set(STEP_PARTS)
    assert sum(found["step_seconds"].values()) == pytest.approx(found["training_seconds"])
    steady = [one for one in read_metrics(run[0] / "metrics.jsonl") if one["step"] > found["warm_up_steps"]]
    tokens = sum(one["tokens_per_second"] * one["step_seconds"] for one in steady)
    seconds = sum(one["step_seconds"] for one in steady)
    assert found["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert found["mfu"] == pytest.approx(sum(one["mfu"] * one["step_seconds"] for one in steady) / seconds)
    assert found["mfu"] < found["hfu"] < 4 / 3 * found["mfu"]
    spent = found["seconds"]
    assert spent["evaluating"] > 0
    assert spent["saving"] > 0
    text = render(page(chronicle, None))
    assert all(f"<td>{part}</td>" in text or f">{part}<" in text for part in STEP_PARTS)
    assert "MFU" in text


# ---------------------------------------------------------------- the time left

TOLD_AT = (50, 100, 200)


def telling_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> dict[int, tuple[float, float]]:
    """By step, the seconds left as told there, and as it turned out."""
    told: dict[int, tuple[float, float]] = {}
    record = Report.step

    def step(report: Report, state: Any, **figures: Any) -> None:
        record(report, state, **figures)
        if state.global_step in TOLD_AT:
            told[state.global_step] = (report.seconds_left, time.perf_counter())

    with mock.patch.object(Report, "step", step):
        train_case(ranks, tables, path)
    ended = time.perf_counter()
    return {step: (left, ended - at) for step, (left, at) in told.items()}


@pytest.mark.soak
def test_behind_fifty_steps_the_time_left_is_right_to_a_tenth(tiny_recipe: Tables, tmp_path: Path) -> None:
    """Before the first evaluation and the first save of the run. For a machine that does nothing else meanwhile."""
    tables = tiny_recipe(
        schedule={"max_steps": 800}, evaluation={"every_steps": 80, "max_tokens": 16384},
        checkpoint={"every_steps": 60, "keep_last": 2}, batch={"global_batch_size": 16, "micro_batch_size": 8},
    )  # fmt: skip
    (told,) = run_ranks(1, telling_case, tables, tmp_path / "run")
    print({step: f"told {left:.1f} s, was {was:.1f} s" for step, (left, was) in told.items()})
    assert {step: left for step, (left, _) in told.items()} == pytest.approx(
        {step: was for step, (_, was) in told.items()}, rel=0.1
    )
