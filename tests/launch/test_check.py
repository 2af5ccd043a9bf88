"""`launch check`: this machine for real, and every judgement on what two such machines would say.

The faults themselves are made for real on two hosts in test_check_nodes.py.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from launch import network_checks, node_checks, path_checks, probe
from launch.all_reduce import bus_bandwidth, contribution, wrong_elements
from launch.check import of_options
from launch.errors import LaunchError
from launch.hosts import Host
from launch.remote import Answer
from launch.rows import CHECKS, Asked, Report, Row
from pretrain.config import parse_recipe, to_toml
from tests.command_line import run_command
from tests.ranks import root

CPU = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
GB = 10**9
GPU = {"name": "NVIDIA H100", "total_bytes": 80 * GB, "used_bytes": 0, "uuid": "GPU-1"}
PLAN = {
    "data": {"path": "data/x", "tokenizer": "tokenizers/x"},
    "checkpoint": {"bytes": 8 * GB, "keep_last": 3},
}


# ---------------------------------------------------------------- this machine


def check(*arguments: object) -> tuple[int, str, str]:
    done = run_command("launch", "check", *arguments, environment=CPU)
    return done.returncode, done.stdout, done.stderr


def test_this_machine_is_ready(tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Two ranks, a real all-reduce, a real file on the disk; nothing stays. What memory is free depends on others."""
    recipe, run = tmp_path / "recipe.toml", tmp_path / "runs" / "new"
    recipe.write_text(to_toml(parse_recipe(tiny_recipe())))
    options = ["--grace-seconds", 3600, "--wait-seconds", 600, "--skip", "free memory"]
    code, output, errors = check(recipe, "--ranks", 2, "--run", run, "--json", *options)
    assert (code, errors) == (0, "")
    report = json.loads(output)
    assert (report["ok"], report["world_size"], report["device"], report["reasons"]) == (True, 2, "cpu", [])
    assert [row["check"] for row in report["checks"]] == [name for name in CHECKS if name != "free memory"]
    cells = {row["check"]: row["nodes"]["localhost"] for row in report["checks"]}
    assert {cell["level"] for cell in cells.values()} <= {"ok", "warn"}
    assert cells["torch"]["text"] == torch.__version__
    assert "2 right, " in cells["all-reduce"]["text"]
    assert "a save" in cells["disk"]["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_a_machine_that_is_not_ready_ends_as_2(tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The same for people: the table, and the reasons behind it with what to do."""
    recipe = tmp_path / "recipe.toml"
    absent = {"path": str(tmp_path / "absent"), "tokenizer": str(tmp_path / "none")}
    recipe.write_text(to_toml(parse_recipe(tiny_recipe(data=absent))))
    skipped = [word for name in ("all-reduce", "disk", "free memory") for word in ("--skip", name)]
    code, output, errors = check(recipe, "--ranks", 1, "--run", tmp_path, *skipped)
    assert (code, errors) == (2, "")
    lines = output.splitlines()
    assert lines[0].split() == ["check", "localhost"]
    assert f"FAIL  data: localhost cannot read the data: {tmp_path}/absent/manifest.json: No such file" in output
    assert f"FAIL  tokenizer: localhost cannot read the tokenizer: {tmp_path}/none: No such file" in output
    assert lines[-1] == "2 reasons not to start: 1 node, 1 rank on CPUs"
    assert not any(line.startswith(("all-reduce", "disk")) for line in lines)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--skip", "disc"], ["--skip disc", "disk"]),
        (["--ranks", "0"], ["--ranks 0"]),
        (["--master-port", "70000"], ["--master-port 70000", "65535"]),
        (["--master-addr", "node-1"], ["--master-addr", "--hostfile"]),
        (["--master-port", "0"], ["--master-port 0", "65535"]),
        (["--master-addr", "$(id)"], ["--master-addr '$(id)'", "a host's name"]),
        (["--grace-seconds", "nan"], ["--grace-seconds nan"]),
        (["--wait-seconds", "0"], ["--wait-seconds 0"]),
        (["--hostfile", "absent"], ["absent", "slots"]),
        (["--hostfile", "hosts", "--ranks", "2"], ["--ranks and --hostfile"]),
        (["absent.toml"], ["absent.toml"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options_are_one_line(arguments: list[str], words: list[str]) -> None:
    code, output, errors = check(*arguments)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("error: ")
    for word in words:
        assert word in errors


def test_a_host_that_has_no_address_is_left_to_the_report(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("nowhere.invalid slots=2\nalso.invalid slots=2\n")
    asked = of_options(None, environ={}, hostfile=hosts)
    assert (asked.address, asked.ranks, asked.run) == ("nowhere.invalid", 4, Path("runs"))


# ---------------------------------------------------------------- two machines, as this one describes itself


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this machine says of itself; JSON and back, as it comes over the line."""
    run = tmp_path_factory.mktemp("run")
    ask = {"root": str(root()), "recipe": None, "run": str(run), "data": None, "tokenizer": None}
    return dict(json.loads(json.dumps(probe.facts({**ask, "mark": ".mark", "write_bytes": 2**20}))))


@pytest.fixture
def facts(described: dict[str, Any]) -> dict[str, Any]:
    """Two such machines that could train together: each a machine of its own, on a network."""
    both = {name: copy.deepcopy(described) for name in ("one", "two")}
    for name, fact in both.items():
        fact |= {"machine": name, "hostname": name, "own_addresses": ["10.0.0.1"], "data_sha256": "d"}
        fact |= {"tokenizer_sha256": "t", "free_bytes": 100 * GB, "available_bytes": 64 * GB, "cores": 8}
        fact |= {"open_files": 65_536, "shared_memory_bytes": GB, "written_bytes": GB, "write_seconds": 1.0}
        fact |= {"addresses": {"10.0.0.1": "eth0", "127.0.0.1": "lo"}, "default_route": "10.0.0.1"}
    return both


def asked(**changes: Any) -> Asked:
    hosts = (Host("one", 2), Host("two", 2))
    return replace(Asked(hosts, Path("runs/x"), "10.0.0.1", 29_500, {}, PLAN), **changes)


def all_rows(what: Asked, facts: dict[str, Any], need: int | None = None) -> list[Row]:
    return [
        node_checks.machines(facts), node_checks.code(facts), *node_checks.versions(facts),
        node_checks.devices(what, facts), node_checks.memory(what, facts, need), node_checks.limits(what, facts),
        path_checks.run_directory(what, facts), *path_checks.inputs(what, facts), path_checks.disk(what, facts),
        network_checks.own_name(what, facts),
    ]  # fmt: skip


def on_gpus(facts: dict[str, Any], **changes: Any) -> None:
    for fact in facts.values():
        fact |= {"gpus": [{**GPU, "index": index} for index in range(2)], "driver": "550.54"}
    facts["two"]["gpus"][1] |= changes


def test_a_machine_describes_itself(described: dict[str, Any]) -> None:
    assert described["files"]["launch/probe.py"] == described["files"]["launch/probe.py"].lower()
    assert {"pretrain/recipes/debug.toml", "ds_configs/zero2.json", "model/loss.py"} <= described["files"].keys()
    assert described["written_bytes"] == 2**20
    assert described["memory_bytes"] >= described["available_bytes"] > 0
    assert described["libraries"]["torch"] == torch.__version__


def test_two_equal_machines_have_no_fault(facts: dict[str, Any]) -> None:
    for row in all_rows(asked(), facts, need=GB):
        assert (row.reasons, row.warnings) == ([], []), row.name
        assert [level for level, _ in row.cells.values()] == ["ok", "ok"], row.name
    on_gpus(facts)
    for row in all_rows(asked(device="cuda"), facts, need=GB):
        assert (row.reasons, row.warnings) == ([], []), row.name


@pytest.mark.parametrize(
    "check, change, words",
    [
        ("machine", {"machine": "one"}, ["two is the same machine as one"]),
        ("code", {"files": {"launch/probe.py": "x"}, "commit": None}, ["two has other code", "two no commit"]),
        ("code", {"files": {}}, ["two has no code of ours"]),
        ("python", {"python": "3.13.1"}, ["two has Python 3.13.1"]),
        ("torch", {"libraries": {"torch": None}}, ["two has torch not at all"]),
        ("deepspeed", {"libraries": {"deepspeed": "0.18"}}, ["two has deepspeed 0.18"]),
        ("other libraries", {"libraries": {"numpy": "1.0"}}, ["two has numpy 1.0, not "]),
        ("devices", {"cores": 1}, ["1 cores for 2 ranks"]),
        ("free memory", {"available_bytes": GB}, ["two has 500 MB of main memory", "1 GB", "--device-memory 500MB"]),
        ("limits", {"open_files": 1024}, ["two allows 1,024 open files", "ulimit -n"]),
        ("limits", {"shared_memory_bytes": 64 * 2**20}, ["/dev/shm of 67 MB", "--shm-size"]),
        ("run directory", {"run_error": "Permission denied"}, ["two cannot write", "Permission denied"]),
        ("run directory", {"write_error": "No space left on device"}, ["two cannot write", "No space left"]),
        ("run directory", {"free_bytes": 31 * GB}, ["31 GB free", "4 checkpoints take 32 GB"]),
        ("data", {"data_sha256": "other"}, ["two has another data than one at data/x"]),
        ("data", {"data_sha256": None, "data_error": "data/x: No such file"}, ["two cannot read the data: data/x"]),
        ("data", {"data_missing": "data/x/a-00001.bin"}, ["two lacks data/x/a-00001.bin"]),
        ("tokenizer", {"tokenizer_sha256": "other"}, ["two has another tokenizer"]),
        ("disk", {"write_seconds": 10.0}, ["two writes 100 MB/s", "8 GB takes 40 s", "leave 30 s"]),
        ("own name", {"own_addresses": ["127.0.1.1"]}, ["127.0.1.1", "10.0.0.1", "GLOO_SOCKET_IFNAME=eth0"]),
        ("own name", {"own_addresses": []}, ["has no address there"]),
    ],
)  # fmt: skip
def test_each_fault_is_one_line_of_its_own_check(
    check: str, change: dict[str, Any], words: list[str], facts: dict[str, Any]
) -> None:
    """Nothing else complains."""
    for key, value in change.items():
        facts["two"][key] = {**facts["two"][key], **value} if key == "libraries" else value
    told = [(row.name, line) for row in all_rows(asked(), facts, need=GB) for line in [*row.reasons, *row.warnings]]
    ((name, line),) = told
    assert name == check
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "check, gpu, fact, words",
    [
        ("driver", {}, {"driver": "535.1"}, ["two has the NVIDIA driver 535.1"]),
        ("devices", {}, {"gpus": []}, ["two has 0 GPUs for 2 ranks"]),
        ("devices", {}, {"gpus": [], "gpus_error": "nvidia-smi: hangs"}, ["two: nvidia-smi: hangs"]),
        ("devices", {"used_bytes": 10 * GB}, {}, ["GPU 1 10 GB"]),
        ("free memory", {"used_bytes": 78 * GB}, {}, ["two has 2 GB of GPU memory", "needs 4 GB"]),
    ],
)
def test_faults_of_gpus(
    check: str, gpu: dict[str, Any], fact: dict[str, Any], words: list[str], facts: dict[str, Any]
) -> None:
    on_gpus(facts, **gpu)
    facts["two"] |= fact
    rows = {row.name: row for row in all_rows(asked(device="cuda"), facts, need=4 * GB)}
    told = [*rows[check].reasons, *rows[check].warnings]
    assert len(told) == 1
    for word in words:
        assert word in told[0]


def test_of_many_the_most_are_right(facts: dict[str, Any]) -> None:
    facts["three"] = {**facts["two"], "machine": "three"}
    facts["one"] = {**facts["one"], "python": "3.99.0"}
    python = node_checks.versions(facts)[0]
    assert [level for level, _ in python.cells.values()] == ["FAIL", "ok", "ok"]
    assert python.reasons[0].startswith("one has Python 3.99.0, two")


def test_a_slow_disk_fails_where_the_grace_is_known(facts: dict[str, Any]) -> None:
    row = path_checks.disk(asked(grace_seconds=2.0), facts)  # 4 GB of each at 1 GB/s
    assert len(row.reasons) == 2
    assert "--grace-seconds leaves 2" in row.reasons[0]
    assert not path_checks.disk(asked(grace_seconds=4.5), facts).reasons


# ---------------------------------------------------------------- what they say of each other


def test_marks_show_who_shares_a_folder() -> None:
    marks = {"one": "a", "two": "b"}
    assert not path_checks.sharing(asked(), marks, {"one": {"marks": ["a", "b"]}, "two": {"marks": ["a", "b"]}}).reasons
    apart = {"one": {"marks": ["a"]}, "two": {"marks": ["b"]}}
    row = path_checks.sharing(asked(), marks, apart)
    assert [reason.partition(" in ")[0] for reason in row.reasons] == [
        "one does not see what two writes",
        "two does not see what one writes",
    ]
    plan = {**PLAN, "checkpoint": {"placement": "per_node"}}
    assert not path_checks.sharing(asked(plan=plan), marks, apart).reasons


@pytest.mark.parametrize(
    "said, level, text",
    [
        (102.0, "ok", "within 2.0 s"),
        (104.5, "warn", "1.5 s ahead"),
        (98.0, "warn", "2.0 s behind"),
        (160.0, "FAIL", "57.0 s ahead"),
        (0.0, "FAIL", "100.0 s behind"),
    ],
)
def test_a_clock_is_judged_by_what_is_sure(said: float, level: str, text: str) -> None:
    """Asked at 100 of ours, answered at 104, a second of work in between: only what cannot lie in there is a skew."""
    answer = Answer(0, asked_at=100.0, ended_at=104.0)
    row = network_checks.clock({"two": {"began_at": said, "ended_at": said + 1.0}}, {"two": answer})
    assert row.cells["two"] == (level, text)


def test_routes_and_ports(facts: dict[str, Any]) -> None:
    well = {"one": {"route": "10.0.0.1", "came": [1]}, "two": {"route": "10.0.0.2", "connected_from": "10.0.0.2"}}
    assert not network_checks.routes(asked(), facts, well).reasons
    assert not network_checks.port(asked(), well).reasons
    own = {**well, "two": {"route": "127.0.0.1", "connect_error": "timed out"}}
    assert "is its own" in network_checks.routes(asked(), facts, own).reasons[0]
    assert "(timed out)" in network_checks.port(asked(), own).reasons[0]
    assert "no route" in network_checks.routes(asked(), facts, {"two": {"route": None}}).reasons[0]
    taken = {**own, "one": {"route": "10.0.0.1", "listen_error": "Address already in use"}}
    (reason,) = network_checks.port(asked(), taken).reasons
    assert reason == "one cannot listen at port 29500: Address already in use: give another --master-port"
    alone = {"route": "10.0.0.3", "connect_error": "timed out"}
    assert list(network_checks.port(asked(), {**well, "two": alone, "three": alone}).cells.values()) == [
        ("ok", "29500 free"),
        ("FAIL", "timed out"),
        ("FAIL", "timed out"),
    ]


# ---------------------------------------------------------------- sums over all ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_sums_are_counted(world_size: int, dtype: torch.dtype) -> None:
    size = 1021
    total = sum((contribution(rank, size) for rank in range(world_size)), torch.zeros(size)).to(dtype)
    assert wrong_elements(total, world_size) == 0
    missing = total - contribution(world_size - 1, size).to(dtype)
    assert wrong_elements(missing, world_size) == int(contribution(world_size - 1, size).sum())
    total[7] += 1
    total[1020] = float("nan")
    assert wrong_elements(total, world_size) == 2


def test_each_rank_adds_ones_at_places_of_its_own() -> None:
    assert contribution(4, 5).tolist() == [0, 1, 0, 0, 1]
    assert sum(contribution(rank, 4) for rank in range(4)).tolist() == [2, 1, 1, 2]


def test_bandwidth_of_the_bus() -> None:
    """Two ranks send as much as they have; with many, it comes near twice that."""
    assert bus_bandwidth(100, 2.0, 2) == 50.0
    assert bus_bandwidth(100, 2.0, 4) == 75.0
    assert bus_bandwidth(100, 2.0, 1) == 0.0


def rank(number: int, **said: Any) -> dict[str, Any]:
    return {"rank": number, "stage": "end", "fault": None, "absent": [], "wrong": [], "seconds": 1.0, **said}


@pytest.mark.parametrize(
    "one, two, failed, words",
    [
        ([rank(0), rank(1)], [rank(2), rank(3)], [], []),
        ([rank(0), rank(1)], [rank(2, wrong=["torch.bfloat16 × 7: 2 wrong"]), rank(3)], ["two"],
         ["wrong on two", "rank 2: torch.bfloat16 × 7: 2 wrong"]),
        ([rank(0), rank(1)], [rank(2), rank(3, fault="reset", stage="group")], ["two"],
         ["rank 3 on two failed as the ranks connected", "(reset)", "GLOO_SOCKET_IFNAME"]),
        ([rank(0, absent=[2, 3]), rank(1, absent=[2, 3])], "no answer within 9 s", ["two"],
         ["rank 2 of two never came to 10.0.0.1:29500: no answer within 9 s"]),
        ([rank(0, absent=[3]), rank(1, absent=[3])], [rank(2, absent=[3]), rank(3, fault="ended", stage="process")],
         ["two"], ["rank 3 on two failed as a process (ended)"]),
        ([rank(0, absent=[1]), rank(1, stage="process", fault="it ended with code -9")], [rank(2, absent=[1])], ["one"],
         ["rank 1 on one"]),
    ],
)  # fmt: skip
def test_who_is_to_blame_for_an_all_reduce(one: Any, two: Any, failed: list[str], words: list[str]) -> None:
    row = network_checks.all_reduce(asked(), {"one": one, "two": two}, 10**9)
    assert [node for node, (level, _) in row.cells.items() if level == "FAIL"] == failed
    assert len(row.reasons) == len(failed)
    for word in words:
        assert word in row.reasons[0]
    if not failed:
        assert row.cells["one"] == ("ok", "2 right, 1.5 GB/s")


# ---------------------------------------------------------------- the report


def test_many_nodes_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tuple(Host(f"node-{number}", 8) for number in range(9))
    row = Row("code")
    for host in hosts:
        row.ok(host.name, "abc")
    row.fail("node-7", "def", "node-7 has other [code]")
    report = Report(asked(hosts=hosts, device="cuda"), (row,))
    report.print(Console(highlight=False, width=120, file=sys.stdout))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["code", "8", "of", "9", "node-7", "FAIL", "def"]
    assert lines[-2:] == ["FAIL  code: node-7 has other [code]", "1 reason not to start: 9 nodes, 72 ranks on GPUs"]


def test_a_check_that_is_unknown_names_those_that_are() -> None:
    from launch.check import check as check_nodes

    with pytest.raises(LaunchError, match="all-reduce"):
        check_nodes(asked(), skip=["sums"])
