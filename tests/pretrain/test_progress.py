"""When a run will be done, and how it is shown."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from pretrain.progress import RECENT, Pace, ProgressView, Repeated
from tests.ranks import root


@pytest.mark.parametrize(
    "every, step, end, left",
    [(10, 0, 100, 10), (10, 50, 100, 5), (10, 50, 105, 6), (10, 99, 100, 1), (10, 100, 100, 0), (30, 50, 40, 0)],
)
def test_what_is_still_to_come_is_counted(every: int, step: int, end: int, left: int) -> None:
    repeated = Repeated(every)
    repeated.was_done(step, 1.0)
    assert repeated.left(step, end) == left


@pytest.mark.parametrize("step, left", [(9, 10), (10, 10), (11, 9), (99, 1), (100, 1)])
def test_what_a_step_itself_is_followed_by_is_still_to_come(step: int, left: int) -> None:
    assert Repeated(10).left(step, 100) == left


def test_the_time_left_counts_evaluations_and_saves_and_no_warm_up() -> None:
    """A run of 1,000 steps of one second, 20 evaluations of 30 s and 10 saves of 20 s; the first steps are slow."""
    pace = Pace()
    for step in range(50):
        pace.add({0: 60.0, 1: 5.0}.get(step, 0.9 if step % 2 else 1.1), 8)
    evaluations, saves = Repeated(50, lambda: 25.0, done_step=50), Repeated(100, lambda: 40.0)
    guessed = pace.seconds_left(950 * 8, 50, 1000, (evaluations, saves))
    assert guessed == pytest.approx(950 + 19 * 25 + 10 * 40)
    evaluations.seconds += [99.0, 28.0, 32.0]
    saves.seconds.append(20.0)
    assert pace.seconds_left(950 * 8, 50, 1000, (evaluations, saves)) == pytest.approx(950 + 19 * 30 + 10 * 20)


def test_the_pace_is_that_of_the_last_steps_whatever_their_size() -> None:
    pace = Pace()
    for samples in (8, 16, 32):
        for _ in range(RECENT):
            pace.add(2.0 * samples, samples)
    assert pace.seconds_a_sample == pytest.approx(2.0)
    for _ in range(RECENT):  # the machine has other work now
        pace.add(3.0 * 32, 32)
    assert pace.seconds_a_sample == pytest.approx(3.0)


def test_a_log_has_plain_lines_where_they_are_due(capsys: pytest.CaptureFixture[str]) -> None:
    view, silent = ProgressView(100, active=True), ProgressView(100, active=False)
    for one in (view, silent):
        one.open()
        for step in range(1, 5):
            one.step(step, ["loss 1.0", "12,345 tokens/s"], due=step % 2 == 0)
        one.say("[red]what[/red] is said")
        one.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 2/100  loss 1.0  12,345 tokens/s", "step 4/100  loss 1.0  12,345 tokens/s", "[red]what[/red] is said",
    ]  # fmt: skip


ON_A_TERMINAL = """
from pretrain.progress import ProgressView
view = ProgressView(100, active=True)
view.open()
assert view.is_live
for step in range(1, 41):
    view.step(step, ["loss 1.2345", "lr 1.00e-03", "grad norm 0.500", "12,345 tokens/s", "MFU 41.2%", "ETA 2 h 07 min",
                     "memory 0.61 GB"], due=False)
view.say("warning: [x] something")
view.close()
"""


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_has_a_bar_and_all_figures_however_narrow_it_is(columns: int) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL], cwd=root(), stderr=follower, env=environment) as one:
        os.close(follower)
        shown = b""
        try:
            while piece := os.read(leader, 65536):
                shown += piece
        except OSError:  # the other end is closed: all was read
            pass
        assert one.wait() == 0
    os.close(leader)
    text = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))
    assert "warning: [x] something" in text
    assert "step 40/100" in text
    assert "40.0 %" in text
    for figure in ("loss 1.2345", "12,345 tokens/s", "MFU 41.2%", "ETA 2 h 07 min", "memory 0.61 GB"):
        assert figure in text
