"""How far work is, said while it goes on: a line in a log, a bar on a terminal; MB/s, tokens/s, the time left."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from data_pipeline import progress
from data_pipeline.progress import Counters, reporting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def begun() -> Counters:
    counters = Counters()
    counters.add(input_bytes=250, text_bytes=40_000_000_000, tokens=12_000_000_000)
    return counters


def test_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PLAIN_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with reporting(begun(), "prepare", 1000):
        wait_for(sys.stderr, "ETA")
    line = sys.stderr.getvalue().splitlines()[0]
    found = re.fullmatch(
        r"prepare: 25\.0% of the input, ([0-9.]+) MB/s of text, ([0-9,]+) tokens/s, ETA ([0-9]+) s", line
    )
    assert found, line
    megabytes, tokens = float(found[1]), float(found[2].replace(",", ""))
    assert tokens / megabytes == pytest.approx(12_000_000_000 / 40_000, rel=0.01)


def test_before_anything_is_done_the_time_left_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PLAIN_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with reporting(Counters(), "prepare", 1000):
        wait_for(sys.stderr, "ETA unknown")
    assert "tokens/s" not in sys.stderr.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "160")
    with reporting(begun(), "prepare", 1000):
        wait_for(sys.stderr, "tokens/s")
    said = sys.stderr.getvalue()
    assert all(words in said for words in ("prepare", "25 %", "MB/s of text", "ETA"))


def test_nothing_is_said_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with reporting(begun(), "prepare", 1000):
        pass
