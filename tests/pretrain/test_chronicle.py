"""What counts of a run's records, whatever resumes, kills and damage left of them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.chronicle import read
from pretrain.figures import figures
from pretrain.page import render
from pretrain.report import notes, page
from pretrain.run_directory import RunDirectoryError
from tests.pretrain.written_run import evaluation, train, write_run


def test_a_resume_puts_what_lies_behind_its_checkpoint_out_of_use(tmp_path: Path) -> None:
    """Also what the later attempt has not come to yet, and evaluations there; what lies before stays."""
    records = [
        *(train(step, 1) for step in range(1, 8)), evaluation(2), evaluation(6, loss=0.5),
        *(train(step, 2, loss=9.0) for step in (4, 5)),
    ]  # fmt: skip
    run = read(write_run(tmp_path / "run", records, attempts=2))
    assert run.series.step.tolist() == [1, 2, 3, 4, 5]
    assert run.series.loss[3:].tolist() == [9.0, 9.0]
    assert run.replaced.step.tolist() == [4, 5, 6, 7]
    assert [one["step"] for one in run.evaluations["all"]] == [2]
    assert [(one.number, one.first_step, one.last_step, one.replaced) for one in run.attempts] == [
        (1, 1, 7, 4), (2, 4, 5, 0),
    ]  # fmt: skip
    spent = run.time_spent()
    assert (spent["training steps that count"], spent["steps that were made again later"]) == (2.5, 2.0)


def test_a_roll_back_puts_what_it_left_out_of_use_and_the_step_of_its_alarm_is_no_gap(tmp_path: Path) -> None:
    alarm = {"condition": "loss_spike", "value": 9.0, "threshold": 4.0, "action": "roll_back", "detail": "median 3"}
    records = [
        *(train(step) for step in (1, 2, 3)), evaluation(3, loss=0.5), train(4),
        {"kind": "alarm", "step": 4, "attempt": 1, **alarm},
        {"kind": "roll_back", "step": 2, "attempt": 1, "alarm_step": 4, "condition": "loss_spike", "left_out": [4]},
        train(3, loss=7.0), {"kind": "left_out", "step": 4, "attempt": 1, "first_sample": 96, "samples": 32}, train(5),
        {"kind": "left_out", "step": 6, "attempt": 2, "first_sample": 160, "samples": 32}, train(7, 2),
    ]  # fmt: skip
    run = read(write_run(tmp_path / "run", records, attempts=2))
    assert run.series.step.tolist() == [1, 2, 3, 5, 7]
    assert run.series.loss[2] == 7.0
    assert run.replaced.step.tolist() == [3, 4]
    assert not run.evaluations
    assert (run.left_out, [one["step"] for one in run.alarms]) == ([4, 6], [4])
    said = notes(run)
    assert not any("missing" in one for one in said)
    assert "1 alarm: loss_spike 1; the last in step 4" in said
    assert "the run went back to step 2 for an alarm in step 4, which is left out since" in said
    assert "median 3" in render(page(run, None))
    figures(run)


def test_an_attempt_that_opens_with_the_evaluation_that_was_due_keeps_its_step(tmp_path: Path) -> None:
    records = [train(1), train(2), train(3), evaluation(2, attempt=2), train(3, 2, loss=1.5)]
    run = read(write_run(tmp_path / "run", records, attempts=2))
    assert run.series.step.tolist() == [1, 2, 3]
    assert run.series.attempt.tolist() == [1, 1, 2]
    assert [one["step"] for one in run.evaluations["all"]] == [2]


def test_tokens_flops_and_time_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    """Records that were lost leave a gap; tokens and FLOPs of those steps are known by the next one's."""
    records = [train(step) for step in (1, 2, 5, 6)]
    series = read(write_run(tmp_path / "run", records)).series
    assert series.breaks.tolist() == [False, False, True, False]
    assert series.flops.tolist() == pytest.approx([6e9, 12e9, 30e9, 36e9])
    assert series.seconds.tolist() == [0.5, 1.0, 1.5, 2.0]


def test_throughput_leaves_out_the_first_step_of_each_attempt_unless_there_is_no_other(tmp_path: Path) -> None:
    slow = {"tokens_per_second": 10.0, "step_seconds": 100.0}
    records = [train(1, **slow), train(2), train(3, 2, **slow), train(4, 2)]
    assert read(write_run(tmp_path / "run", records, attempts=2)).series.steady_rate == 2000
    assert read(write_run(tmp_path / "short", [train(1, **slow)])).series.steady_rate == 10


def test_a_warm_up_is_as_long_as_steps_are_slow(tmp_path: Path) -> None:
    """Of each attempt for itself."""
    slow = {"tokens_per_second": 500.0, "step_seconds": 2.0}
    records = [train(1, **slow), train(2, **slow), *map(train, range(3, 9)), train(9, 2), train(10, 2)]
    series = read(write_run(tmp_path / "run", records, attempts=2)).series
    assert np.flatnonzero(series.warm_up).tolist() == [0, 1, 8]
    assert series.steady_rate == 2000


def test_time_goes_to_what_it_was_spent_on_also_in_vain(tmp_path: Path) -> None:
    """The first attempt was killed, and its last steps count no more; the second tells of a pause at its end."""
    parts = {f"{part}_seconds": share for part, share in (
        ("data", 0.01), ("forward", 0.14), ("backward", 0.3), ("optimizer", 0.04), ("other", 0.01))}  # fmt: skip
    save = {"kind": "save", "attempt": 1, "held_seconds": 0.25, "whole_seconds": 9.0, "failure": None}
    records = [
        *(train(step, **parts) for step in range(1, 5)), evaluation(2, seconds=3.0, at="2026-01-01T00:00:03+00:00"),
        {**save, "step": 2}, evaluation(4, seconds=4.0, at="2026-01-01T00:00:09+00:00"),
        *(train(step, 2, **parts, at="2026-01-01T01:00:01+00:00") for step in (3, 4)),
        {"kind": "time", "step": 4, "attempt": 2, "wall_seconds": 60.0, "paused_seconds": 20.0,
         "at": "2026-01-01T01:01:00+00:00"},
    ]  # fmt: skip
    run = read(write_run(tmp_path / "run", records, attempts=2))
    assert run.step_parts() == pytest.approx(
        {"data": 0.04, "forward": 0.56, "backward": 1.2, "optimizer": 0.16, "other": 0.04}
    )
    spent = run.time_spent()
    assert spent == pytest.approx({
        "training steps that count": 2.0, "steps that were made again later": 1.0, "evaluating": 7.0,
        "saving": 0.25, "paused": 20.0, "starting, logging, all else": 9 + 60 - 30.25, "between attempts": 3591.0,
    })  # fmt: skip
    assert sum(spent.values()) == pytest.approx(3660)
    assert render(page(run, None)).count("what a step is made of") == 1


def test_what_earlier_versions_did_not_record_is_not_known(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", [train(1), train(2)]))
    assert run.step_parts() == {}
    assert np.isnan(run.series.steady_share(run.series.mfu))
    shown = render(page(run, None))
    assert "what a step is made of" not in shown
    assert "MFU: not known" in shown


def test_numbers_that_are_not_finite_stay_unknown_and_leave_the_rest(tmp_path: Path) -> None:
    records = [train(1), train(2, loss=None, grad_norm=None), train(3, loss=2.0), evaluation(2, loss=None)]
    run = read(write_run(tmp_path / "run", records))
    assert np.isnan(run.series.loss).tolist() == [False, True, False]
    assert run.series.final_loss == pytest.approx((3 + 5 * math.exp(-1 / 20) + 2.0) / 2)
    assert run.best() is None


@pytest.mark.parametrize("end, damaged", [(b'{"kind": "tra', 0), (b"\x00\x00\n[1]\n17\nnull\n", 4), (b"\n\n", 0)])
def test_damaged_lines_cost_only_themselves(tmp_path: Path, end: bytes, damaged: int) -> None:
    run = read(write_run(tmp_path / "run", [train(1), train(2)], end=end))
    assert (len(run.series), run.damaged_lines) == (2, damaged)


STRANGE: list[dict[str, Any]] = [
    {"loss": "3"}, {"loss": [3]}, {"loss": 10**400}, {"tokens": 1e308}, {"tokens": math.inf}, {"step_seconds": 1e308},
    {"mfu": "0.4"}, {"data_seconds": [1]}, {"seconds": "1"},
    {"perplexity": "21"}, {"text_bytes": {}}, {"bits_per_byte": math.nan}, {"unigram": True}, {"source": 5},
    {"step": 10**400}, {"step": -1}, {"attempt": "1"}, {"kind": None},
]  # fmt: skip


@pytest.mark.parametrize("values", STRANGE)
def test_what_no_run_writes_is_a_damaged_line(values: dict[str, Any], tmp_path: Path) -> None:
    """And the page is made of the rest."""
    strange = [json.dumps({**record(2), **values}) for record in (train, evaluation)]
    end = "\n".join([*strange, json.dumps(train(3)), ""]).encode()
    run = read(write_run(tmp_path / "run", [train(1), evaluation(1)], end=end))
    assert run.damaged_lines == 2
    assert run.series.step.tolist() == [1, 3]
    assert render(page(run, None))


def test_facts_of_another_kind_are_none(tmp_path: Path) -> None:
    facts = {"versions": [1], "world_size": "x", "recipe_changes": 3, "hostname": "here"}
    run = read(write_run(tmp_path / "run", [train(1), evaluation(1, tokens=None, loss=None)], facts=facts))
    assert set(run.environment) & set(facts) == {"hostname"}
    assert render(page(run, None))


def test_what_is_no_run_or_has_no_step_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match=r"no recipe\.toml"):
        read(tmp_path)
    with pytest.raises(RunDirectoryError, match="no step yet"):
        read(write_run(tmp_path / "run", []))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(RunDirectoryError, match="no step yet"):
        read(tmp_path / "run")


def test_a_run_that_says_running_needs_a_sign_of_life(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [train(1)], state="running")
    assert read(path).state == "silent"
    (path / "alive").mkdir()
    for at, state in ((time.time(), "running"), (time.time() - 3600, "silent")):
        (path / "alive" / "rank-00000.json").write_text(json.dumps({"at": at}))
        assert read(path).state == state


def test_memory_is_compared_with_what_means_the_same(tmp_path: Path) -> None:
    """Residence with the whole process on a CPU, an allocator's peak with tensors on a GPU; only the last attempt's."""
    records = [train(1, peak_memory_bytes=900), train(2, 2, peak_memory_bytes=700)]
    on_cpu = read(write_run(tmp_path / "cpu", records, attempts=2)).memory
    assert (on_cpu.kind, on_cpu.measured, on_cpu.comparable) == ("cpu", 700, on_cpu.predicted_with_process)
    on_gpu = read(write_run(tmp_path / "gpu", records, attempts=2, facts={"device": "cuda"})).memory
    assert (on_gpu.kind, on_gpu.comparable) == ("cuda", on_gpu.predicted)
    unknown = read(write_run(tmp_path / "old", records, facts={"device": None})).memory
    assert not unknown.kind_known
