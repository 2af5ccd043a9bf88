"""`launch run --restarts --elastic`: what is started again, on which hosts; real runs are in test_two_nodes.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.command import Launch
from launch.errors import LaunchError
from launch.hosts import Host
from launch.restarts import Elastic, start, why_not, wishes
from launch.where import Where
from tests.command_line import run_command

HERE = Host("localhost", 2)
# Reserved by RFC 2606: no such name will ever resolve, so ssh says at once that it reaches nobody.
GONE = Host("gone.invalid", 2)


def prepared(only: Sequence[str], again: bool) -> Launch:
    """A launch on these hosts, where a batch of 8 can be divided among their ranks."""
    ranks = 2 * len(only)
    if 8 % ranks:
        raise LaunchError(f"8 is not a multiple of {ranks}")
    return Launch((), {}, Path("run"), ranks, {}, tuple(Host(name, 2) for name in only))


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"code": 1, "step": 7}, None),
        ({"code": 137, "step": 7, "failed_at": 5}, None),
        ({"code": 2, "step": 7}, "is wrong"),
        ({"code": 1, "step": 7, "asked": True}, "asked to stop"),
        ({"code": 1, "step": None}, "made no step"),
        ({"code": 1, "step": 7, "failed_at": 7}, "step 7 twice in a row"),
    ],
)
def test_what_would_fail_again_is_not_started_again(facts: dict[str, int], words: str | None, tmp_path: Path) -> None:
    reason = why_not(**{"asked": False, "stop_file": tmp_path / "stop", "failed_at": None, **facts})  # type: ignore[arg-type]
    assert (reason is None) if words is None else words in (reason or "")
    (tmp_path / "stop").touch()
    assert why_not(code=1, asked=False, stop_file=tmp_path / "stop", step=7, failed_at=None) == "it was asked to stop"


def test_limits() -> None:
    assert Elastic.parse("1:4") == Elastic(1, 4)
    assert Elastic.parse("3") == Elastic(3, 3)
    for text in ("4:1", "0:2", "a", "1:2:3", "", "-1:2", ":2"):
        with pytest.raises(LaunchError, match="as in 1:4"):
            Elastic.parse(text)


def test_only_hosts_that_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(prepared, (HERE, GONE), Elastic(1, 2)).hosts == (HERE,)
    assert "without gone.invalid: " in capsys.readouterr().err
    with pytest.raises(LaunchError, match=r"1 of 2 hosts can be used .* at least 2: gone\.invalid: "):
        start(prepared, (HERE, GONE), Elastic(2, 2))


def test_as_many_as_divide_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    names = [Host(name, 2) for name in ("localhost", "127.0.0.1", "127.0.0.2")]
    assert start(prepared, names, Elastic(1, 3)).ranks == 4
    assert "not on 3 nodes: 8 is not a multiple of 6" in capsys.readouterr().err
    assert start(prepared, names, Elastic(1, 1)).ranks == 2
    with pytest.raises(LaunchError, match="no number of nodes will do: 8 is not a multiple of 6"):
        start(prepared, names, Elastic(3, 3))


def test_without_limits_nobody_is_asked() -> None:
    launch = Launch((), {}, Path("run"), 2, {})
    assert start(lambda only, again: launch, (), None) is launch


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for where, restarts, elastic, words in [
        (Where(), 0, "1:2", "add --hostfile"),
        (Where(node_rank=0, nodes=2, master_addr="a"), 1, None, "--restarts is for one command"),
        (Where(node_rank=0, hostfile=tmp_path), 0, "1:2", "--elastic is for one command"),
    ]:
        with pytest.raises(LaunchError, match=words):
            wishes(where, restarts, elastic)
    done = run_command(
        "launch", "run", "pretrain/recipes/debug.toml", "--elastic", "2:1", "--hostfile", os.devnull, "--dry-run"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
