"""A rank that hangs is found while it hangs, by the others too; slow work and suspended machines are no hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from pretrain import train as training
from pretrain.config import parse_recipe
from pretrain.engine import TrainingEngine
from pretrain.records import read_metrics
from pretrain.runtime import Ranks
from pretrain.watchdog import Hang, Progress, Stillness, Watchdog, stacks_path
from tests.pretrain.test_fp16 import SMALL
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
HANGS_IN = 3  # the step


def waits_for_the_alarm(metrics: Path) -> None:
    """Where the second rank hangs: until the first has told of it."""
    while not any(one["step"] == HANGS_IN for one in read_metrics(metrics, "alarm")):
        time.sleep(0.05)


def hanging(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    forward, calls = TrainingEngine.forward, [0]

    def slow(engine: TrainingEngine, *batch: Any) -> Any:
        calls[0] += 1
        if ranks.rank == 1 and calls[0] == 2 * HANGS_IN:  # two micro-steps a step
            waits_for_the_alarm(path / "metrics.jsonl")
        return forward(engine, *batch)

    with mock.patch.object(TrainingEngine, "forward", slow):
        return training.train(parse_recipe(tables), path, ranks)


def test_a_rank_that_hangs_is_named_and_all_stacks_are_written(tiny_recipe: Tables, tmp_path: Path) -> None:
    path = tmp_path / "run"
    tables = tiny_recipe(
        model=SMALL, schedule={"max_steps": 4}, health={"hang_seconds": 2.0, "late_rank": "off"},
        checkpoint={"every_steps": 9}, evaluation={"every_steps": 9, "max_tokens": 128},
    )  # fmt: skip
    assert run_ranks(2, hanging, tables, path) == ["finished", "finished"]
    alarm = next(one for one in read_metrics(path / "metrics.jsonl", "alarm") if one["step"] == HANGS_IN)
    assert (alarm["condition"], alarm["action"], alarm["threshold"]) == ("hang", "warn", 2.0)
    assert alarm["value"] >= 2.0
    assert "rank 1 on " in alarm["detail"]
    assert "(waits_for_the_alarm)" in alarm["detail"]
    assert "rank 0" not in alarm["detail"]
    texts = [stacks_path(path / "alarms", HANGS_IN, 1, rank).read_text() for rank in (0, 1)]
    heads = [json.loads(text.splitlines()[0]) for text in texts]
    assert [head["waits_for_other_ranks"] for head in heads] == [True, False]
    assert [head["doing"] for head in heads] == ["trains", "trains"]
    assert "waits_for_the_alarm" in texts[1]
    assert "train_step" in texts[0]
    status = json.loads((path / "status.json").read_bytes())
    assert (status["state"], status["alarm"]["condition"]) == ("finished", "hang")


class Watched:
    """A rank whose progress the test decides, looked at as fast as the watchdog can."""

    def __init__(self, folder: Path, seconds: float, rank: int = 0, world_size: int = 1) -> None:
        self.progress = Progress(7, "trains", 0)
        self.hangs: list[Hang] = []
        self.found, self.over = threading.Event(), threading.Event()
        self.dog = Watchdog(
            lambda: self.progress, folder, attempt=1, rank=rank, world_size=world_size, seconds=seconds,
            found=self.hears, over=self.over.set,
        )  # fmt: skip

    def hears(self, hang: Hang) -> None:
        self.hangs.append(hang)
        self.found.set()


def test_it_is_said_once_until_it_is_over(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "alarms", 0.05, world_size=3)
    with watched.dog:
        assert watched.found.wait(60)
        assert not watched.over.is_set()
        watched.progress = Progress(7, "trains", 1)
        assert watched.over.wait(60)
        watched.found.clear()
        assert watched.found.wait(60)  # it hangs again
    first, second, *more = watched.hangs
    assert not more
    assert first.step == 7
    assert "rank 0 on " in first.detail
    assert "ranks 1, 2 wrote no stacks here" in first.detail
    assert str(tmp_path / "alarms") in second.detail


def test_who_stands_writes_when_the_first_rank_does(tmp_path: Path) -> None:
    """Though it may stand longer by itself, for what it once took; files of other attempts are nothing to go by."""
    dog = Watched(tmp_path, 100.0, rank=1, world_size=2).dog
    still, progress = Stillness(Progress(7, "saves"), 0.0, 1000.0), Progress(7, "trains")
    still.look(Progress(7, "saves"), 500.0)
    still.look(progress, 500.0)
    still.look(progress, 555.0)
    assert (still.seconds, still.longest_seconds) == (55.0, 500.0)
    stacks_path(tmp_path, 7, 2, 0).touch()
    assert not dog._is_hang(progress, still)
    stacks_path(tmp_path, 7, 1, 0).touch()
    assert dog._is_hang(progress, still)
    still.seconds = 45.0
    assert not dog._is_hang(progress, still)
    still.seconds = 600.0
    assert dog._is_hang(Progress(8, "trains"), still)


def test_a_machine_that_slept_did_not_hang() -> None:
    """Looks every 5 s, but for one behind an hour: it counts for 10; what once took long may take as long again."""
    still, at = Stillness(Progress(7, "trains"), 0.0, 10.0), 0.0
    for seconds in (5, 5, 3600, 5):
        at += seconds
        assert not still.look(Progress(7, "trains"), at)
    assert (still.seconds, still.longest_seconds) == (25.0, 0.0)
    assert still.look(Progress(7, "saves"), at + 5)
    assert (still.seconds, still.longest_seconds) == (0.0, 25.0)
