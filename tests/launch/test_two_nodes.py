"""Runs over two real hosts, played by this machine (tests/launch/namespaces.py): `make nodes`, as root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pretrain.config import parse_recipe, to_toml
from pretrain.metrics import all_records, read_metrics
from tests.launch.namespaces import ADDRESSES, INTERFACE, NAMES, Host, two_hosts
from tests.ranks import root

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1800)]

# ssh carries none of it to the other host: a launcher has to.
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
BIN = Path(sys.executable).parent
PORT = "23456"  # free on each host: nobody else lives there
STEPS = 16
RANK = "-m pretrain"  # in the command line of every process of a rank
FORCE = ("--force",)  # whatever else holds the machine's memory
ENDLESS = ("--set", "schedule.max_steps=1000000", "--set", "evaluation.every_steps=1000000")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Callable[..., dict[str, Any]], folder: Path) -> Path:
    tables = tiny_recipe(
        schedule={"max_steps": STEPS, "min_lr": 1e-3, "peak_lr": 1e-3},  # no rate depends on where the end is
        evaluation={"every_steps": STEPS, "max_tokens": 1024},
    )
    path = folder / "recipe.toml"
    path.write_text(to_toml(parse_recipe(tables)))
    return path


@pytest.fixture(scope="module")
def hostfile(folder: Path) -> Path:
    path = folder / "hostfile"
    path.write_text("".join(f"{name} slots=1\n" for name in NAMES))
    return path


@dataclass
class Started:
    """`launch run` on a host, and what it said."""

    process: subprocess.Popen[str]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """pytest ends a test that hangs; a run that ends here fails it."""
        while not condition():
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)


@contextmanager
def launched(host: Host, run: Path, recipe: Path, *options: object) -> Iterator[Started]:
    argv = [sys.executable, "-m", "launch", "run", recipe, "--run", run, *FORCE, *options]
    log = run.with_suffix(".log")
    with log.open("a") as output:
        process = host.start(argv, env=ENVIRONMENT, cwd=root(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield Started(process, log)
    finally:
        process.kill()
        process.wait()


def launch(host: Host, run: Path, recipe: Path, *options: object) -> str:
    """`launch run` to its good end; what it said."""
    with launched(host, run, recipe, *options) as started:
        assert started.process.wait() == 0, started.said()
        return started.said()


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]


def steps_of(run: Path, attempt: int) -> list[int]:
    """The steps that this attempt has made so far."""
    metrics = run / "metrics.jsonl"
    records = all_records(metrics) if metrics.exists() else []
    return [one["step"] for one in records if one["kind"] == "train" and one["attempt"] == attempt]


def attempts(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "environment.json").read_text())["attempts"]
    return found


def documents_of(run: Path, step: int) -> list[dict[str, Any]]:
    """What this step read, as the pipeline traces it."""
    argv = [sys.executable, "-m", "data_pipeline", "trace", run, "--step", step, "--no-text", "--no-files", "--json"]
    done = subprocess.run(list(map(str, argv)), cwd=root(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["reads"]
    return found


def pid_of(run: Path, rank: int) -> int:
    """A rank's process, as its host numbers it."""
    pid: int = json.loads((run / "alive" / f"rank-{rank:05d}.json").read_text())["pid"]
    return pid


def seconds_until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        time.sleep(0.1)
    return time.monotonic() - began


def nothing_left(*hosts: Host) -> bool:
    return not any(host.processes() for host in hosts)


@pytest.fixture(scope="module")
def one_node(recipe: Path, folder: Path) -> Path:
    """The run of two ranks on one machine."""
    run = folder / "one-node"
    argv = [sys.executable, "-m", "launch", "run", recipe, "--ranks", "2", "--run", run, *FORCE]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "GLOO_SOCKET_IFNAME"}
    with (folder / "one-node.log").open("w") as log:
        assert subprocess.run(list(map(str, argv)), env=environment, cwd=root(), stdout=log, stderr=log).returncode == 0
    assert len(losses(run)) == STEPS
    return run


def test_deepspeed_by_hand_and_each_node_by_itself(
    hosts: tuple[Host, Host], recipe: Path, hostfile: Path, one_node: Path, folder: Path
) -> None:
    """DeepSpeed's own command; without ssh, the same command on each node; torchrun: the losses of one node.

    What DeepSpeed passes on by itself is little, the rest stands in its file.
    """
    run = folder / "by-hand"
    (folder / ".deepspeed_env").write_text(f"DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME={INTERFACE}\n")
    argv = [BIN / "deepspeed", "--hostfile", hostfile, "--master_addr", ADDRESSES[0], "--master_port", PORT]
    argv += ["--module", "pretrain", "run", recipe, "--run", run, *FORCE]
    done = hosts[0].run(argv, environment={**ENVIRONMENT, "HOME": str(folder)}, cwd=root())
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run) == losses(one_node)

    for launcher in ("deepspeed", "torchrun"):
        run = folder / f"without-ssh-{launcher}"
        where = ["--nodes", "2", "--ranks", "1", "--master-addr", ADDRESSES[0], "--launcher", launcher]
        other = folder / f"without-ssh-{launcher}-2"  # its log; the run directory is one
        with launched(hosts[1], other, recipe, *where, "--node-rank", "1", "--run", run) as second:
            launch(hosts[0], run, recipe, *where, "--node-rank", "0")
            assert second.process.wait() == 0, second.said()
        assert losses(run) == losses(one_node), launcher
    seconds_until(lambda: nothing_left(*hosts))


def test_a_rank_that_dies_and_going_on(
    hosts: tuple[Host, Host], recipe: Path, hostfile: Path, one_node: Path, folder: Path
) -> None:
    """Node 2's rank is killed: a clear line, nothing is left; started again: one node's losses, bit for bit; then it
    goes on on one node, with the same samples."""
    run, where = folder / "killed", ("--hostfile", hostfile)
    with launched(hosts[0], run, recipe, *where, *ENDLESS) as first:
        first.wait_for(lambda: len(steps_of(run, 1)) > 5)
        hosts[1].run(["kill", "-KILL", pid_of(run, 1)])
        seconds = seconds_until(lambda: first.process.poll() is not None)
        left = seconds_until(lambda: nothing_left(*hosts))
        print(f"a rank killed: launch ended after {seconds:.1f} s, the last process {left:.1f} s later")
        assert first.process.returncode == 128 + signal.SIGKILL
        assert "rank 1 on node-2 was killed by SIGKILL" in first.said().splitlines()[-1]
    # What a kill lost is done again; the run's first steps are those of the shorter one.
    said = launch(hosts[0], run, recipe, *where, "--set", f"schedule.max_steps={max(steps_of(run, 1)) + 2}")
    assert "resumed from" in said or max(steps_of(run, 1)) < 4
    assert losses(run)[:STEPS] == losses(one_node)[: len(losses(run))]

    run = folder / "whole"
    launch(hosts[0], run, recipe, *where)
    assert losses(run) == losses(one_node)
    launch(hosts[0], run, recipe, "--ranks", "1", "--set", f"schedule.max_steps={STEPS + 4}")
    assert attempts(run)[-1]["world_size"] == 1
    more = folder / "more"  # the same on two ranks
    launch(hosts[0], more, recipe, *where, "--set", f"schedule.max_steps={STEPS + 4}")
    assert documents_of(run, STEPS + 4) == documents_of(more, STEPS + 4) != []
    assert losses(run)[-4:] == pytest.approx(losses(more)[-4:], abs=0.02)
    assert nothing_left(*hosts)


@pytest.mark.parametrize("minutes", [(), ("--timeout-minutes", "0.25")], ids=["lifelines", "timeout"])
def test_the_link_is_cut(
    hosts: tuple[Host, Host], recipe: Path, hostfile: Path, folder: Path, minutes: tuple[str, ...]
) -> None:
    """In the middle of training: ended on both sides with a clear line, and resumable.

    However long ranks would wait for each other, `launch run` and their keepers know within a minute; or ranks earlier.
    """
    run, where = folder / f"cut{len(minutes)}", ("--hostfile", hostfile)
    with launched(hosts[0], run, recipe, *where, *ENDLESS, *minutes) as first:
        first.wait_for(lambda: len(steps_of(run, 1)) > 10)
        hosts[1].cut()
        seconds = seconds_until(lambda: first.process.poll() is not None)
        left = seconds_until(lambda: nothing_left(*hosts))
        print(f"the link cut {minutes}: launch ended after {seconds:.1f} s, the last process {left:.1f} s later")
        assert first.process.returncode not in (0, 2)
        *before, last = first.said().splitlines()
        gone = "rank 1 on node-2 gave no sign for a minute: its machine, or the network to it, is gone"
        waited = "another rank gave no answer for 0.25 minutes (--timeout-minutes)"
        assert gone in last or (minutes and waited in last)  # whichever is known when the last rank ends
        assert any(waited in line for line in before) == bool(minutes)
    hosts[1].heal()
    more = max(steps_of(run, 1)) + 2
    assert "resumed from" in launch(hosts[0], run, recipe, *where, "--set", f"schedule.max_steps={more}")


def test_the_launcher_is_killed(hosts: tuple[Host, Host], recipe: Path, hostfile: Path, folder: Path) -> None:
    """kill -9 of `launch run`: the ranks on both nodes save, stop and are gone."""
    run = folder / "orphans"
    with launched(hosts[0], run, recipe, "--hostfile", hostfile, *ENDLESS) as started:
        started.wait_for(lambda: len(steps_of(run, 1)) > 3)
        assert len(hosts[0].kill(f"{sys.executable} -m launch run")) == 1
        left = seconds_until(lambda: nothing_left(*hosts))
        print(f"launch run killed: the last process gone after {left:.1f} s")
    receipts = [json.loads(path.read_text()) for path in sorted((run / "receipts").iterdir())]
    assert [one["state"] for one in receipts] == ["stopped", "stopped"]


def test_a_node_dies_and_the_run_goes_on_with_the_other(
    hosts: tuple[Host, Host], recipe: Path, hostfile: Path, folder: Path
) -> None:
    """`--restarts` and `--elastic`: node 2 loses its sshd and its rank; node 1 goes on alone, by itself."""
    run = folder / "elastic"
    options = ("--hostfile", hostfile, "--restarts", "2", "--elastic", "1:2", *ENDLESS)
    with launched(hosts[0], run, recipe, *options) as started:
        started.wait_for(lambda: len(steps_of(run, 1)) > 5)
        hosts[1].end_ssh()
        hosts[1].kill(RANK)
        started.wait_for(lambda: (run / "environment.json").exists() and len(attempts(run)) > 1)
        started.wait_for(lambda: len(steps_of(run, 2)) > 2)
        assert [one["world_size"] for one in attempts(run)] == [2, 1]
        assert nothing_left(hosts[1])
        argv = [sys.executable, "-m", "launch", "stop", run, "--deadline", "600"]
        stopped = hosts[0].run(argv, cwd=root())
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert started.process.wait() == 0, started.said()
    said = started.said()
    assert "start 1 of 2 again, behind code" in said
    assert "without node-2: " in said
    # The batch and the samples are the same: on one rank as on two.
    assert [one["step"] for one in read_metrics(run / "metrics.jsonl")] == list(range(1, len(losses(run)) + 1))

    too_few = hosts[0].run(
        [sys.executable, "-m", "launch", "run", recipe, "--run", run, "--hostfile", hostfile, "--elastic", "2"],
        environment=ENVIRONMENT, cwd=root(),
    )  # fmt: skip
    assert too_few.returncode == 2
    assert "1 of 2 hosts can be used and --elastic asks for at least 2: node-2: " in too_few.stderr.splitlines()[-1]


def test_a_hung_rank_on_the_other_node_is_ended_by_stop(
    hosts: tuple[Host, Host], recipe: Path, hostfile: Path, folder: Path
) -> None:
    """`launch status` says who is late, `launch stop --deadline` ends it there, over ssh."""
    run = folder / "hung"
    with launched(hosts[0], run, recipe, "--hostfile", hostfile, *ENDLESS) as started:
        started.wait_for(lambda: len(steps_of(run, 1)) > 3)
        pid = pid_of(run, 1)
        hosts[1].run(["kill", "-STOP", pid])
        argv = [sys.executable, "-m", "launch", "status", run, "--json"]
        status: dict[str, Any] = {}

        def late() -> bool:
            nonlocal status
            status = json.loads(hosts[0].run(argv, cwd=root()).stdout)
            return status["late"] == [1]

        started.wait_for(late)
        assert (status["ranks"][1]["host"], status["ranks"][1]["pid"]) == ("node-2", pid)
        stopped = hosts[0].run([sys.executable, "-m", "launch", "stop", run, "--deadline", "3"], cwd=root())
        assert stopped.returncode == 1
        assert "rank 1 on node-2 ended by SIGKILL" in stopped.stdout
        assert started.process.wait() not in (0, 2)
        seconds_until(lambda: nothing_left(*hosts))


def test_restarted_on_one_machine_it_ends_as_if_undisturbed(recipe: Path, folder: Path) -> None:
    """A rank is killed in the middle; `--restarts` goes on by itself: the weights of the undisturbed run."""
    run, whole = folder / "restarted", folder / "undisturbed"
    argv = [sys.executable, "-m", "launch", "run", recipe, "--ranks", "2", *FORCE, "--set", "schedule.max_steps=100"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "GLOO_SOCKET_IFNAME"}
    process = subprocess.Popen(
        [*map(str, argv), "--run", str(run), "--restarts", "1"],
        env=environment, cwd=root(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, pipesize=4096,
    )  # fmt: skip
    assert process.stdout is not None
    said = b""
    while b"step 10/" not in said:  # from there on nobody reads it, and it cannot come to its end
        line = process.stdout.readline()
        assert line, said
        said += line
    os.kill(attempts(run)[0]["pids"][1], signal.SIGKILL)
    said += process.communicate()[0]
    assert process.returncode == 0, said
    assert b"start 1 of 1 again, behind code 137 at step" in said
    assert len(attempts(run)) == 2
    argv += ["--run", whole]
    with (folder / "undisturbed.log").open("w") as log:
        assert subprocess.run(list(map(str, argv)), env=environment, cwd=root(), stdout=log, stderr=log).returncode == 0
    assert losses(run) == losses(whole)
    weights = [load_file(path / "checkpoints" / "step-00000100" / "weights.safetensors") for path in (run, whole)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
