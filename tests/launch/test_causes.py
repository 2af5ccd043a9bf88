"""Each cause that launch/hints.py knows, met by real runs on two real hosts (tests/launch/namespaces.py), `make nodes`:
what the user sees last names the rank, the cause and what to change. And what others see meanwhile.

Not here: what only a GPU can fail of (CUDA, NCCL). Causes that a few lines of a rank can meet: test_keepers.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import safetensors

from launch.run_id import FOLDER
from pretrain.config import parse_recipe, to_toml
from tests.launch.namespaces import INTERFACE, NAMES, Host, two_hosts
from tests.ranks import root

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]

ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
SHORT = ("--timeout-minutes", "0.1")
PORT = 23456  # free on each host: nobody else lives there


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `apart` is another folder on each host."""
    folder = tmp_path_factory.mktemp("causes")
    for name in ("apart", "empty"):
        (folder / name).mkdir()
    for name, order in (("hosts", NAMES), ("hosts-2-1", reversed(NAMES))):
        (folder / name).write_text("".join(f"{one} slots=1\n" for one in order))
    return folder


@pytest.fixture(scope="module")
def hosts(place: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(apart=[place / "apart"]) as both:
        yield both


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Callable[..., dict[str, Any]], place: Path) -> Path:
    path = place / "recipe.toml"
    path.write_text(to_toml(parse_recipe(tiny_recipe())))
    return path


@pytest.fixture
def run(request: pytest.FixtureRequest, place: Path) -> Path:
    return place / request.node.name


def argv_of(recipe: Path, run: Path, *options: object) -> list[object]:
    return [sys.executable, "-m", "launch", "run", recipe, "--run", run, "--force", *options]


def last_of(
    host: Host,
    recipe: Path,
    run: Path,
    *options: object,
    code: int,
    before: str = "",
) -> str:
    """What `launch run` on this host says last, when it has ended with this code; `before` is said earlier."""
    output = run.with_suffix(".log")
    with output.open("w") as log:
        process = host.start(argv_of(recipe, run, *options), env=ENVIRONMENT, cwd=root(), stdout=log, stderr=log)
    assert process.wait() == code, output.read_text()
    *earlier, last = output.read_text().splitlines()
    assert before in "\n".join(earlier)
    assert last.startswith(f"error: run {run} failed (code {code}): ")
    return last


@contextmanager
def mounted(host: Host, *words: object) -> Iterator[None]:
    """`mount` on this host alone; the last word is where."""
    assert host.run(["mount", *words]).returncode == 0
    try:
        yield
    finally:
        assert host.run(["umount", words[-1]]).returncode == 0


NO_WAY = "no way leads from one node to another: give an address that all nodes reach with --master-addr"


@pytest.mark.parametrize(
    "address, words, advice",
    [
        ("10.99.0.1", "Network is unreachable", NO_WAY),  # this host has no route there
        ("10.77.0.9", "No route to host", NO_WAY),  # nobody answers there
        ("node-9", "name resolution", "a node's name has no address there: give --master-addr as a number"),
        ("node-1", "timed out", "not all ranks came, or one fell silent"),  # node 1's command was not given
    ],
    ids=["no-route", "no-host", "no-name", "nobody"],
)
def test_the_first_node_is_not_reached(
    hosts: tuple[Host, Host], recipe: Path, run: Path, address: str, words: str, advice: str
) -> None:
    where = ("--nodes", 2, "--node-rank", 1, "--ranks", 1, "--master-addr", address, *SHORT)
    last = last_of(hosts[1], recipe, run, *where, code=2)
    assert "rank 1 on node-1 failed with code 2: the ranks cannot meet at MASTER_ADDR:MASTER_PORT = " in last
    assert words in last
    assert f"; {advice}" in last
    assert last.endswith("; it ended before its first step")


def test_the_port_is_taken_on_another_host(hosts: tuple[Host, Host], recipe: Path, place: Path, run: Path) -> None:
    """Which the command cannot see beforehand."""
    words = f"import socket, time; taken = socket.create_server(('', {PORT})); print(flush=True); time.sleep(600)"
    server = hosts[1].start([sys.executable, "-c", words], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout:
        server.stdout.readline()
    where = ("--hostfile", place / "hosts-2-1", "--master-port", PORT, *SHORT)
    last = last_of(hosts[0], recipe, run, *where, code=2)
    server.kill()
    server.wait()
    assert "rank 0 on node-2 failed with code 2: the ranks cannot meet at" in last
    assert "EADDRINUSE" in last
    assert "; another program has the port at which the ranks meet: start again, which takes another" in last


def test_the_nodes_have_other_recipes(hosts: tuple[Host, Host], recipe: Path, place: Path, run: Path) -> None:
    path = place / "apart" / "recipe.toml"
    for host, seed in zip(hosts, ("seed = 11", "seed = 12"), strict=True):
        host.side_of(path.parent).joinpath(path.name).write_text(recipe.read_text().replace("seed = 11", seed))
    last = last_of(hosts[0], path, run, "--hostfile", place / "hosts", *SHORT, code=2)
    assert "rank 1 (node-2) has another recipe than rank 0 (node-1): seed is 12 there, 11 here: " in last
    assert "; the nodes differ: `python -m launch check` compares all of them; " in last


def test_the_nodes_have_other_code(hosts: tuple[Host, Host], recipe: Path, place: Path, run: Path) -> None:
    other = place / "schedule.py"
    module = root() / "pretrain" / "schedule.py"
    other.write_text(f"{module.read_text()}\n# one line more\n")
    with mounted(hosts[1], "--bind", other, module):
        last = last_of(hosts[0], recipe, run, "--hostfile", place / "hosts", *SHORT, code=2)
    assert "rank 1 (node-2) has another program than rank 0 (node-1): " in last
    assert "; the nodes differ: `python -m launch check` compares all of them; " in last


def test_a_package_is_missing(hosts: tuple[Host, Host], recipe: Path, place: Path, run: Path) -> None:
    where = ("--hostfile", place / "hosts", *SHORT)
    with mounted(hosts[1], "--bind", place / "empty", Path(safetensors.__file__).parent):
        before = "[rank 1] Traceback (most recent call last):"
        last = last_of(hosts[0], recipe, run, *where, code=1, before=before)
    assert "rank 1 on node-2 failed with code 1: ImportError: cannot import name " in last
    assert "; a package is missing on that node: the virtualenv must be the same on every node (make setup); " in last


def test_a_rank_never_comes(hosts: tuple[Host, Host], recipe: Path, place: Path, run: Path) -> None:
    """What would have started it cannot: nobody could speak for it."""
    where = ("--hostfile", place / "hosts", *SHORT)
    with mounted(hosts[1], "--bind", place / "empty", Path(deepspeed.__file__).parent):
        last = last_of(hosts[0], recipe, run, *where, code=2, before="No module named 'deepspeed.launcher'")
    assert "rank 0 on node-1 failed with code 2: the ranks cannot meet at " in last
    assert "1/2 clients joined.; not all ranks came, or one fell silent: " in last
    assert last.endswith("; nothing was heard of rank 1 on node-2; it ended before its first step")
    assert not list(FOLDER.glob("zerohalf-run-*.1"))  # what was there for rank 1 is gone


def test_a_disk_is_full(hosts: tuple[Host, Host], recipe: Path, place: Path) -> None:
    """At the last save: training itself goes on without one."""
    with (
        mounted(hosts[0], "-t", "tmpfs", "-o", "size=200m", "tmpfs", place / "apart"),
        mounted(hosts[1], "-t", "tmpfs", "-o", "size=3m", "tmpfs", place / "apart"),
    ):
        run = place / "apart" / "run"
        where = ("--hostfile", place / "hosts", "--set", "checkpoint.placement=per_node", *SHORT)
        last = last_of(hosts[0], recipe, run, *where, code=2, before="warning: step 8 was not saved: rank 1: ")
    assert "rank 0 on node-1 failed with code 2: rank 1: " in last
    assert ": the disk is full, 0 MB free: nothing was saved at step-00000016" in last
    assert ": make room (or lower checkpoint.keep_last) and start the same command again; " in last


def test_memory_runs_out(hosts: tuple[Host, Host], recipe: Path, run: Path) -> None:
    """One tensor is larger than what any machine has, and the plan was overruled."""
    huge = ("--set", "model.d_model=65536", "--set", "model.d_ff=1048576")
    last = last_of(hosts[0], recipe, run, "--ranks", 2, *huge, *SHORT, code=2, before="warning: ")
    assert "failed with code 2: out of memory when 274.88 GB more was asked for; " in last
    assert "; main memory or a GPU's ran out: set what the words before this say; `python -m pretrain plan " in last
    assert "resumes" not in last  # there is no checkpoint


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich"])
def test_nobody_else_sees_the_runs_id(
    hosts: tuple[Host, Host], recipe: Path, place: Path, run: Path, launcher: str
) -> None:
    """What starts the ranks shows to all what it is given; the id goes before it, into files of the user alone."""
    environment = ENVIRONMENT
    if launcher != "pdsh":
        run.mkdir()
        (run / "mpirun").write_text(f'#!/bin/sh\nexec mpirun.{launcher} "$@"\n')  # whichever is the system's own
        (run / "mpirun").chmod(0o755)
        environment = {**ENVIRONMENT, "PATH": f"{run}{os.pathsep}{ENVIRONMENT['PATH']}"}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ("--hostfile", place / "hosts", "--launcher", launcher, *SHORT)
    seen: set[str] = set()
    files: dict[str, tuple[int, str]] = {}
    with run.with_suffix(".log").open("w") as log:
        argv = argv_of(recipe, run / "run", *options)
        process = hosts[0].start(argv, env=environment, cwd=root(), stdout=log, stderr=log)
    while process.poll() is None:
        for host in hosts:
            seen.update(host.processes().values())
        for path in FOLDER.glob("zerohalf-run-*"):
            try:
                files[path.name] = (path.stat().st_mode & 0o777, path.read_text())
            except FileNotFoundError:
                continue  # its rank has taken it
        time.sleep(0.02)
    assert process.returncode == 0, run.with_suffix(".log").read_text()
    named = re.compile(rf"ZEROHALF_LAUNCHER[= ]\"?[\d.]+:\d+/{FOLDER}/(zerohalf-run-\w+)")
    (name,) = {match[1] for line in seen for match in named.finditer(line)}
    ours = {path: found for path, found in files.items() if path.startswith(name)}
    assert sorted(ours) == [f"{name}.0", f"{name}.1"]
    assert {mode for mode, _ in ours.values()} == {0o600}
    (run_id,) = {text for _, text in ours.values() if text}
    assert not any(run_id in line for line in seen)
    assert not any((FOLDER / path).exists() for path in ours)
