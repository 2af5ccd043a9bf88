"""A rank's sign of life: what stands there, when, and that nothing it meets ends the training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.alive import SIGN_BYTES, SignOfLife
from pretrain.state import TrainState


def sign_at(path: Path) -> dict[str, Any]:
    sign: dict[str, Any] = json.loads(path.read_bytes())
    return sign


def test_it_says_who_and_what(tmp_path: Path) -> None:
    path = tmp_path / "alive" / "rank-00003.json"
    with SignOfLife(path, attempt=2, rank=3, world_size=8) as life:
        first = sign_at(path)
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        assert (first["attempt"], first["rank"], first["pid"], first["start_ticks"]) == (2, 3, os.getpid(), ticks)
        assert (first["step"], first["doing"]) == (None, "starts")
        assert first["since"] <= first["at"] <= time.time() + 0.0005  # rounded to the nearest millisecond
        life.state = TrainState()
        life.state.global_step = 7
        life.does("saves")
        while sign_at(path)["doing"] != "saves":  # within a second; pytest ends a test that hangs
            assert path.stat().st_size == SIGN_BYTES
            time.sleep(0.02)
        assert sign_at(path)["step"] == 7
    assert sign_at(path)["doing"] == "ends"


def test_it_tells_waiting_for_data_from_training(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.json"
    life = SignOfLife(path, attempt=1, rank=0, world_size=1)
    seen = []

    def batches() -> Iterator[int]:
        for number in range(2):
            life._write()
            seen.append(sign_at(path)["doing"])
            yield number

    for _ in life.reading(batches()):
        life._write()
        seen.append(sign_at(path)["doing"])
    assert seen == ["waits for data", "trains"] * 2


def test_many_ranks_write_less_often(tmp_path: Path) -> None:
    for world_size, seconds in ((8, 1.0), (4096, 40.96)):
        with SignOfLife(tmp_path / "sign", attempt=1, rank=0, world_size=world_size):
            assert sign_at(tmp_path / "sign")["every_seconds"] == pytest.approx(seconds)


def test_what_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "alive").write_text("a file in the way")
    with SignOfLife(tmp_path / "alive" / "rank-00000.json", attempt=1, rank=0, world_size=1) as life:
        life.does("trains")
    assert (tmp_path / "alive").read_text() == "a file in the way"
