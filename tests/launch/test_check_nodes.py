"""`launch check` over two real hosts, played by this machine: every fault is made for real, found, and named.

`make nodes`, as root; the clock that is wrong needs `apt-get install faketime`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import parse_recipe, to_toml
from tests.launch.namespaces import ADDRESSES, INTERFACE, NAMES, Host, two_hosts
from tests.ranks import root

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]

ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
QUICK = ("--skip", "all-reduce", "--skip", "disk", "--skip", "free memory")
PORT = 23_457


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@dataclass(frozen=True)
class Checked:
    """What a check came to."""

    code: int
    report: dict[str, Any]

    def level(self, check: str, node: str) -> str:
        (row,) = (row for row in self.report["checks"] if row["check"] == check)
        return str(row["nodes"][node]["level"])

    def only(self, check: str, *words: str, node: str = NAMES[1]) -> None:
        """Exit 2 for one reason, of this check, at this node, that says all these words."""
        assert self.code == 2
        (reason,) = self.report["reasons"]
        assert reason.startswith(f"{check}: ")
        for word in words:
            assert word in reason
        assert self.level(check, node) == "FAIL"

    def among(self, check: str, *words: str) -> None:
        """Exit 2, and among the reasons one of this check that says all these words."""
        assert self.code == 2
        found = [reason for reason in self.report["reasons"] if reason.startswith(f"{check}: ")]
        assert any(all(word in reason for word in words) for reason in found), self.report["reasons"]


class Place:
    """A recipe, a run directory and a host file, and `launch check` of them from the first host."""

    def __init__(self, first: Host, folder: Path, tables: dict[str, Any]) -> None:
        self.first, self.folder = first, folder
        self.recipe, self.run, self.hostfile = folder / "recipe.toml", folder / "run", folder / "hostfile"
        self.run.mkdir()
        self.recipe.write_text(to_toml(parse_recipe(tables)))
        self.data, self.tokenizer = Path(tables["data"]["path"]), Path(tables["data"]["tokenizer"])
        self.write_hosts(*NAMES)

    def write_hosts(self, *names: str) -> None:
        self.hostfile.write_text("".join(f"{name} slots=1\n" for name in names))

    def check(self, *options: object, environment: dict[str, str] = ENVIRONMENT) -> Checked:
        argv = [sys.executable, "-m", "launch", "check", self.recipe, "--hostfile", self.hostfile, "--run", self.run]
        done = self.first.run([*argv, "--json", *options], environment=environment, cwd=root())
        assert done.returncode in (0, 2), done.stderr
        assert done.stdout, done.stderr
        return Checked(done.returncode, json.loads(done.stdout))


@pytest.fixture(scope="module")
def place(
    hosts: tuple[Host, Host], tiny_recipe: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Place:
    return Place(hosts[0], tmp_path_factory.mktemp("check"), tiny_recipe())


@contextmanager
def mounted(host: Host, source: object, target: Path, *options: str) -> Iterator[None]:
    """Something else at a path of one host alone."""
    flags = options or ("--bind",)
    done = host.run(["mount", *flags, source, target])
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        done = host.run(["umount", "--lazy", target])
        assert done.returncode == 0, done.stderr


@contextmanager
def watching(host: Host, words: str, number: signal.Signals) -> Iterator[None]:
    """As soon as a process with these words in its command line is there, it gets the signal."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set() and not host.kill(words, number):
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextmanager
def started_with(host: Host, line: str, folder: Path) -> Iterator[None]:
    """A line of sh before everything that is started on one host: timeout(1) starts it, and stands in there."""
    timeout = Path(str(shutil.which("timeout"))).resolve()
    real, other = folder / "real", folder / "other"
    shutil.copy(timeout, real)
    other.write_text(f'#!/bin/sh\n{line}\nexec {real} "$@"\n')
    other.chmod(0o755)
    with mounted(host, other, timeout):
        yield


def changed_copy(path: Path, folder: Path, change: Callable[[str], str]) -> Path:
    copy = folder / path.name
    copy.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    return copy


def test_two_good_hosts_are_ready_and_nothing_stays(hosts: tuple[Host, Host], place: Place) -> None:
    checked = place.check("--wait-seconds", 600, "--skip", "free memory")
    assert (checked.code, checked.report["ok"], checked.report["reasons"]) == (0, True, [])
    assert checked.report["world_size"] == 2
    assert checked.report["master"].startswith(ADDRESSES[0])
    levels = {cell["level"] for row in checked.report["checks"] for cell in row["nodes"].values()}
    assert levels <= {"ok", "warn"}
    (sums,) = (row for row in checked.report["checks"] if row["check"] == "all-reduce")
    assert all("1 right, " in cell["text"] for cell in sums["nodes"].values())
    assert not list(place.run.iterdir())
    for host in hosts:
        assert not host.processes()
    argv = [sys.executable, "-m", "launch", "check", "--hostfile", place.hostfile, "--run", place.run, *QUICK]
    shown = hosts[0].run(argv, environment=ENVIRONMENT, cwd=root())
    assert "FAIL" not in shown.stdout
    assert shown.stdout.splitlines()[0].split() == ["check", *NAMES]
    assert shown.stdout.splitlines()[-1] == "ready: 2 nodes, 2 ranks on CPUs"


# ---------------------------------------------------------------- reached or not


def test_a_name_that_is_none(place: Place) -> None:
    place.write_hosts(NAMES[0], "node-3")
    try:
        place.check(*QUICK).only("reachable", "node-3", "resolve", "host file", node="node-3")
    finally:
        place.write_hosts(*NAMES)


def test_one_machine_under_two_names(place: Place) -> None:
    place.write_hosts(NAMES[0], "localhost")
    try:
        place.check(*QUICK).among("machine", "localhost is the same machine as node-1", "once")
    finally:
        place.write_hosts(*NAMES)


def test_a_key_that_is_not_let_in(hosts: tuple[Host, Host], place: Place) -> None:
    with mounted(hosts[1], "/dev/null", hosts[1].folder.parent / "user_key.pub"):
        place.check(*QUICK).only("reachable", "Permission denied", "ssh-copy-id node-2")


def test_a_host_whose_key_is_not_known(hosts: tuple[Host, Host], place: Place) -> None:
    with mounted(hosts[0], "/dev/null", hosts[0].folder.parent / "known_hosts"):
        place.check(*QUICK).only("reachable", "verification failed", "`ssh node-2` once by hand")


def test_a_cable_that_is_cut(hosts: tuple[Host, Host], place: Place) -> None:
    hosts[1].cut()
    try:
        place.check(*QUICK).only("reachable", "node-2 is not reached", "is it up")
    finally:
        hosts[1].heal()


def test_a_host_without_our_python(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    with mounted(hosts[1], tmp_path, Path(sys.executable).parent):
        place.check(*QUICK).only("reachable", "cannot run", sys.executable, "No such file")


def test_a_host_that_is_lost_on_the_way(hosts: tuple[Host, Host], place: Place) -> None:
    """What asks the second question there is killed."""
    with watching(hosts[1], '"ask": "meet", "address"', signal.SIGKILL):
        place.check(*QUICK).among("reachable", "node-2 was reached, and then it was not")


# ---------------------------------------------------------------- code and versions


def test_other_code(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    path = root() / "pretrain" / "schedule.py"
    copy = changed_copy(path, tmp_path, lambda text: text + "\n# one line more\n")
    with mounted(hosts[1], copy, path):
        place.check(*QUICK).only("code", "node-2 has other code", "pretrain/schedule.py (1 of")


def test_another_recipe(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    copy = changed_copy(place.recipe, tmp_path, lambda text: text + "\n")
    with mounted(hosts[1], copy, place.recipe):
        place.check(*QUICK).only("code", "recipe.toml")


def dist_info(name: str) -> tuple[str, Path]:
    """The version of a library that is installed, and the folder that says so."""
    found = importlib.metadata.distribution(name)
    return found.version, Path(str(found.locate_file(""))) / f"{name}-{found.version}.dist-info"


def test_other_versions(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    with ExitStack() as stack:
        versions = {}
        for name in ("torch", "deepspeed", "numpy"):
            versions[name], folder = dist_info(name)
            lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            (tmp_path / name).write_text(lines)
            stack.enter_context(mounted(hosts[1], tmp_path / name, folder / "METADATA"))
        checked = place.check(*QUICK)
    for name in ("torch", "deepspeed"):
        checked.among(name, f"node-2 has {name} 1.0, node-1 {versions[name]}: install the same on both")
    assert len(checked.report["reasons"]) == 2
    (warning,) = checked.report["warnings"]
    assert warning.startswith(f"other libraries: node-2 has numpy 1.0, not {versions['numpy']}: ")


def test_a_host_without_torch(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    with mounted(hosts[1], tmp_path, dist_info("torch")[1]):
        place.check(*QUICK).only("torch", "node-2 has torch not at all")


def test_another_driver(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    """Of GPUs that this machine does not have: programs that answer as nvidia-smi does, of two versions."""
    bins = [tmp_path / name for name in NAMES]
    for folder, version in zip(bins, ("550.54.15", "535.183.01"), strict=True):
        folder.mkdir()
        smi = folder / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho '0, NVIDIA H100, 81559, 1, {version}, GPU-{version}'\n")
        smi.chmod(0o755)
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {**ENVIRONMENT, "PYTHONPATH": ""}
    with mounted(hosts[0], bins[0], empty), mounted(hosts[1], bins[1], empty):
        checked = place.check(*QUICK, "--env", f"PATH={empty}:{os.environ['PATH']}", environment=environment)
    checked.among("driver", "node-2 has the NVIDIA driver 535.183.01, node-1 550.54.15")


def test_too_little_memory(place: Place) -> None:
    skipped = QUICK[:4]
    larger = [f"batch.{size}_batch_size=4000000" for size in ("global", "micro")]
    checked = place.check(*skipped, "--set", larger[0], "--set", larger[1].replace("4000000", "2000000"))
    checked.among("free memory", "node-2 has", "of main memory free for a rank, the recipe needs", "--fit")


def test_few_open_files(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    with started_with(hosts[1], "ulimit -n 1000", tmp_path):
        checked = place.check(*QUICK)
    assert (checked.report["reasons"], checked.level("limits", NAMES[1])) == ([], "warn")
    assert "node-2 allows 1,000 open files" in checked.report["warnings"][0]


def test_little_shared_memory(hosts: tuple[Host, Host], place: Place) -> None:
    place.hostfile.write_text("node-1 slots=2\nnode-2 slots=2\n")
    try:
        with mounted(hosts[1], "shm", Path("/dev/shm"), "-t", "tmpfs", "-o", "size=64m"):
            checked = place.check(*QUICK)
        assert checked.level("limits", NAMES[1]) == "warn"
        assert "/dev/shm of 67 MB" in checked.report["warnings"][-1]
    finally:
        place.write_hosts(*NAMES)


# ---------------------------------------------------------------- paths


def test_a_run_directory_that_cannot_be_written(hosts: tuple[Host, Host], place: Place) -> None:
    with mounted(hosts[1], place.run, place.run):
        assert hosts[1].run(["mount", "-o", "remount,bind,ro", place.run]).returncode == 0
        place.check(*QUICK).among("run directory", "node-2 cannot write", "Read-only file system", "--run")


def test_a_run_directory_that_is_not_shared(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    with mounted(hosts[1], tmp_path, place.run):
        checked = place.check(*QUICK)
    checked.among("shared", "node-2 does not see what node-1 writes", "checkpoint.placement")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full(hosts: tuple[Host, Host], place: Place) -> None:
    with mounted(hosts[1], "full", place.run, "-t", "tmpfs", "-o", "size=64k"):
        hosts[1].run(["dd", "if=/dev/zero", f"of={place.run}/fill", "bs=4k"])
        place.check(*QUICK).among("run directory", "node-2", "No space left on device")


def test_a_disk_too_small_for_the_checkpoints(hosts: tuple[Host, Host], place: Place) -> None:
    with mounted(hosts[1], "small", place.run, "-t", "tmpfs", "-o", "size=1m"):
        place.check(*QUICK).among("run directory", "node-2 has 1 MB free", "3 checkpoints take", "keep_last")


def test_a_disk_too_slow_for_the_checkpoint(place: Place) -> None:
    checked = place.check("--skip", "all-reduce", "--grace-seconds", "0.000001")
    checked.among("disk", "node-2 writes", "its part of a checkpoint", "--grace-seconds leaves 1e-06")


def test_data_that_is_missing(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    with mounted(hosts[1], tmp_path, place.data):
        place.check(*QUICK).only("data", "node-2 cannot read the data", "manifest.json", "No such file")


def test_data_that_differs(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    path = place.data / "manifest.json"
    copy = changed_copy(path, tmp_path, lambda text: text + "\n")
    with mounted(hosts[1], copy, path):
        place.check(*QUICK).only("data", "node-2 has another data than node-1", "copy it")


def test_data_without_a_shard(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(place.data, copy)
    next(copy.rglob("train-*.bin")).unlink()
    with mounted(hosts[1], copy, place.data):
        place.check(*QUICK).only("data", "node-2 lacks", "train-00000.bin", "manifest names")


def test_another_tokenizer(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    path = place.tokenizer / "description.json"
    copy = changed_copy(path, tmp_path, lambda text: text + "\n")
    with mounted(hosts[1], copy, path):
        place.check(*QUICK).only("tokenizer", "node-2 has another tokenizer")


# ---------------------------------------------------------------- clock and network


def test_a_clock_that_is_wrong(hosts: tuple[Host, Host], place: Place, tmp_path: Path) -> None:
    """What is started on the second host sees a clock a minute ahead: by libfaketime, which all of them load."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    assert library is not None, "apt-get install faketime"
    with started_with(hosts[1], f"export LD_PRELOAD={library} FAKETIME=+60s", tmp_path):
        place.check(*QUICK).only("clock", "the clock of node-2 is", "s ahead", "chrony")


def test_hosts_whose_names_are_their_own_loopback(hosts: tuple[Host, Host], place: Place) -> None:
    """Debian's installer writes such lines. What the check says comes true: who goes on all the same finds no peer."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "GLOO_SOCKET_IFNAME"}
    before = [host.hosts_file.read_text() for host in hosts]
    for host, text in zip(hosts, before, strict=True):
        host.hosts_file.write_text(text.replace(f"{host.address} {host.name}", f"127.0.1.1 {host.name}"))
    try:
        said = place.check("--skip", "disk", "--skip", "free memory", environment=environment)
        for host in hosts:
            said.among("own name", host.name, "127.0.1.1", host.address, f"GLOO_SOCKET_IFNAME={INTERFACE}")
        assert len(said.report["reasons"]) == 2
        assert said.level("all-reduce", NAMES[0]) == "-"
        skipped = place.check("--skip", "own name", "--skip", "disk", "--wait-seconds", "60", environment=environment)
        skipped.among("all-reduce", "failed as the ranks connected with each other", "GLOO_SOCKET_IFNAME")
        told = place.check("--skip", "disk", "--skip", "free memory")
        assert (told.code, told.report["reasons"]) == (0, [])
    finally:
        for host, text in zip(hosts, before, strict=True):
            host.hosts_file.write_text(text)


def test_an_interface_that_is_not_there(place: Place) -> None:
    place.check(*QUICK, environment={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth7"}).among(
        "own name", "no interface eth7", INTERFACE
    )


def test_a_first_host_that_is_everybodys_own(hosts: tuple[Host, Host], place: Place) -> None:
    before = hosts[1].hosts_file.read_text()
    hosts[1].hosts_file.write_text("127.0.0.1 node-1\n" + before)
    try:
        place.check(*QUICK, "--master-addr", "node-1").among("interface", "for node-2 the address of node-1, node-1")
    finally:
        hosts[1].hosts_file.write_text(before)


def test_an_address_to_which_no_route_leads(place: Place) -> None:
    checked = place.check(*QUICK, "--master-addr", "198.51.100.7")  # of RFC 5737: nobody's
    checked.among("interface", "no route leads from node-2 to 198.51.100.7")


def test_a_port_that_is_taken(hosts: tuple[Host, Host], place: Place) -> None:
    listener = hosts[0].start([sys.executable, "-c", LISTENER, PORT], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        checked = place.check(*QUICK, "--master-port", PORT)
        checked.only("port", f"node-1 cannot listen at port {PORT}", "already in use", "--master-port", node=NAMES[0])
        assert checked.level("port", NAMES[1]) == "-"
    finally:
        listener.kill()
        listener.communicate()


LISTENER = """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""


def test_a_port_that_a_firewall_closes(hosts: tuple[Host, Host], place: Place) -> None:
    rule = ["rule", "add", "pref", "10", "ipproto", "tcp", "dport", str(PORT), "prohibit"]
    assert hosts[1].run(["ip", *rule]).returncode == 0
    try:
        checked = place.check(*QUICK, "--master-port", PORT)
        checked.only("port", "node-2 gets no connection to node-1", f"port {PORT}", "firewall")
    finally:
        hosts[1].run(["ip", "rule", "del", "pref", "10"])


def test_a_rank_that_never_comes(hosts: tuple[Host, Host], place: Place) -> None:
    """Its process is stopped as soon as it is there; nothing of it is left behind."""
    with watching(hosts[1], "TCPStore", signal.SIGSTOP):
        checked = place.check("--skip", "disk", "--wait-seconds", "20")
    checked.among("all-reduce", "rank 1 of node-2 never came to")
    assert not hosts[1].processes()


# ---------------------------------------------------------------- the last one: nobody gets in any more


def test_a_host_without_an_sshd(hosts: tuple[Host, Host], place: Place) -> None:
    hosts[1].end_ssh()
    place.check(*QUICK).only("reachable", "Connection refused", "sshd")
