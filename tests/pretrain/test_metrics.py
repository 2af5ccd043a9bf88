"""metrics.jsonl: appended, strict JSON, readable whatever a kill left of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from data_pipeline.order import SampleOrder
from pretrain.batching import steps_of
from pretrain.metrics import MetricsLog, Report, all_records, format_duration, read_metrics
from pretrain.run_directory import RunDirectory
from pretrain.state import TrainState
from tests.pretrain.recipe import recipe


def write(path: Path, attempt: int, losses: dict[int, float]) -> None:
    log = MetricsLog(path, attempt=attempt)
    for step, loss in losses.items():
        log.write("train", step, {"loss": loss})
    log.close()


def test_a_replayed_step_stands_twice_and_the_last_attempt_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, {1: 5.0, 2: 4.0, 3: 3.5})
    write(path, 2, {3: 3.25, 4: 3.0})
    assert [(r["step"], r["attempt"], r["loss"]) for r in read_metrics(path)] == [
        (1, 1, 5.0), (2, 1, 4.0), (3, 2, 3.25), (4, 2, 3.0),
    ]  # fmt: skip
    assert len(all_records(path)) == 5


def test_a_line_cut_anywhere_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, {1: 5.0, 2: 4.0})
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        write(path, 2, {2: 4.5, 3: 3.0})
        steps = [record["step"] for record in read_metrics(path)]
        assert steps == [1, 2, 3]
        assert read_metrics(path)[1]["loss"] == 4.5


def test_full_precision_and_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    loss = 10.373491181781864
    write(path, 1, {1: loss, 2: math.inf, 3: math.nan})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [record["loss"] for record in records] == [loss, None, None]


@pytest.mark.parametrize(
    "seconds, text", [(0, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (273600, "3 d 04 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_run_says_at_its_start_what_it_reads_and_how_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = SampleOrder(seed=1, seq_len=4, tokens={"a": 801, "b": 2401})
    for limit, warned in ((3.9, ["a", "b"]), (4.0, [])):
        config = recipe(data={"warn_epochs": limit}, logging={"tensorboard": False})
        with Report(RunDirectory(tmp_path), config, active=True) as report:
            report.begins(1, TrainState(), None, order, steps_of(config.batch))
        said = capsys.readouterr().err.splitlines()
        assert said[:2] == [
            "mixture from sample 0: of every 4 samples a 1, b 3", "epochs in 3,200 samples: a 4.00, b 4.00"
        ]  # fmt: skip
        assert [line.split()[1] for line in said if line.startswith("warning: ")] == warned


def test_records_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "full").symlink_to("/dev/full")
    log = MetricsLog(tmp_path / "full", attempt=1, say=said.append)
    for step in (1, 2):
        log.write("train", step, {"loss": 1.0})
    assert said == [f"warning: {tmp_path}/full: the disk is full: records wait in main memory until there is room"]
    log._file = (tmp_path / "room").open("ab", buffering=0)
    log.write("train", 3, {"loss": 1.0})
    assert [record["step"] for record in all_records(tmp_path / "room")] == [1, 2, 3]
    log.close()
    assert len(said) == 1

    log = MetricsLog(tmp_path / "full", attempt=1, say=said.append)
    log.write("train", 4, {"loss": 1.0})
    log.close()
    assert said[1:] == [said[0], f"warning: {tmp_path}/full: the disk is full: 1 of its records are lost"]
