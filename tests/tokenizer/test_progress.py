from __future__ import annotations

import sys

import pytest

from tokenizer import progress
from tokenizer.progress import training_progress
from tokenizer.training_process import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with training_progress() as display:
        display.say("training on 20.0 MB")
        for second in range(31):
            clock[0] = 1000.0 + second
            display.show(Progress(0.01 + second / 40, f"stage {second}"))
    assert capsys.readouterr() == (
        "",
        "training on 20.0 MB\n"
        "training: 26%, stage 10, 10 s, about 28 s left\n"
        "training: 51%, stage 20, 20 s, about 19 s left\n"
        "training: 76%, stage 30, 30 s, about 9 s left\n",
    )


def test_what_is_left_is_not_guessed_out_of_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with training_progress() as display:
        display.show(Progress(0.0, "starting"))
        clock[0] += 3600
        display.show(Progress(0.01, "counting"))
    assert capsys.readouterr().err == "training: 1%, counting, 60 min\n"


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)
    with training_progress() as display:
        display.say("a line")
        display.show(Progress(0.5, "half"))
