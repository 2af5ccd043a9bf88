"""Where a run runs: what goes together, what starts the ranks, and what becomes of words and variables on their way."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from launch.addresses import address_towards, meeting_address, refuse_taken, resolve
from launch.command import Launch, by_hand, own_hostfile, through_runner, through_shell
from launch.environment import MASK, asked_for, file_in_memory, looks_secret, of_runner, passed_on, shown, to_text
from launch.errors import LaunchError
from launch.hosts import Host
from launch.planning import as_argument, plan_recipe
from launch.where import REFUSED, Where, chosen_launcher, host_here, hosts_of
from tests.command_line import run_command

HOSTS = (Host("node-1", 2), Host("node-2", 4))
FILE = Path("hosts")


@pytest.mark.parametrize(
    "where, expected",
    [
        (Where(), "deepspeed"),
        (Where(launcher="torchrun"), "torchrun"),
        (Where(hostfile=FILE), "pdsh"),
        (Where(hostfile=FILE, launcher="mpich", launcher_args="-v"), "mpich"),
        (Where(node_rank=1, nodes=2, master_addr="a"), "deepspeed"),
        (Where(node_rank=1, hostfile=FILE, master_addr="a", launcher="torchrun"), "torchrun"),
    ],
)
def test_what_starts_the_ranks(where, expected):
    assert chosen_launcher(where) == expected


@pytest.mark.parametrize(
    "where, says",
    [
        *((Where(launcher=name), f"--launcher {name}: ") for name in REFUSED),
        (Where(launcher="frob"), "take pdsh, openmpi, mpich (with --hostfile)"),
        (Where(nodes=2), "--nodes goes with --node-rank"),
        (Where(node_rank=0, master_addr="a"), "add --nodes N"),
        (Where(node_rank=0, nodes=2), "add --master-addr HOST"),
        (Where(launcher="pdsh"), "--launcher pdsh is for several machines"),
        (Where(master_addr="a"), "--master-addr is for several machines"),
        (Where(2, hostfile=FILE), "the host file says how many ranks"),
        (Where(hostfile=FILE, launcher="torchrun"), "give --node-rank I on each node"),
        (Where(node_rank=0, nodes=2, master_addr="a", launcher="pdsh"), "starts all nodes from one"),
        (Where(launcher_args="-v"), "--launcher-args are for pdsh or mpirun"),
        *((Where(master_port=port), f"--master-port {port}: a TCP port is 1 to 65535") for port in (0, -1, 70_000)),
        *(
            (Where(node_rank=1, nodes=2, master_addr=address), "give a host's name or its IP address")
            for address in ("", "a b", "$(id)", "-x", "a\nb", "a\n", "@")
        ),
    ],
)
def test_options_that_do_not_go_together(where, says):
    with pytest.raises(LaunchError, match=r"^[^\n]*$") as caught:
        chosen_launcher(where)
    assert says in str(caught.value)


def test_hosts_in_the_order_of_their_ranks(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node-1 slots=2\nlocalhost slots=4\n")
    hosts = hosts_of(Where(hostfile=path), ())
    assert hosts == (Host("node-1", 2), Host("localhost", 4))
    assert hosts_of(Where(hostfile=path, only=("localhost",)), ()) == hosts[1:]
    assert host_here(hosts, None) == host_here(hosts, 1) == hosts[1]
    assert host_here(hosts[:1], None) is None
    launch = Launch((), {}, Path("x"), 6, {}, hosts, 1)
    assert launch.own_ranks == range(2, 6)
    assert [launch.host_of(rank) for rank in (1, 2, 5)] == ["node-1", "localhost", "localhost"]
    assert hosts_of(Where(3, node_rank=0, nodes=2), ()) == (Host("node-0", 3), Host("node-1", 3))
    assert hosts_of(Where(node_rank=0, nodes=1), (4, 5)) == (Host("node-0", 2),)
    for where, says in (
        (Where(node_rank=2, nodes=2), "--node-rank 2: with 2 nodes it is 0 to 1"),
        (Where(node_rank=-1, nodes=2), "0 to 1"),
        (Where(node_rank=0, nodes=0), "--nodes 0"),
        (Where(0, node_rank=0, nodes=2), "--ranks 0"),
        (Where(node_rank=0, nodes=3, hostfile=path), "names 2"),
    ):
        with pytest.raises(LaunchError, match=says):
            hosts_of(where, ())


TRAINED = ["recipe.toml", "--run", "runs/a b", "--set", 'data.weights=["$x", "`y`"]']


def test_pdsh_starts_deepspeeds_launcher_on_all_hosts(tmp_path):
    from deepspeed.launcher.runner import parse_args

    where = Where(hostfile=FILE, master_addr="10.0.0.1", launcher_args="-t 5")
    argv = through_runner(where, "pdsh", HOSTS, TRAINED, {})
    parsed = parse_args(argv[1:])
    assert (parsed.hostfile, parsed.launcher) == ("hosts", "pdsh")
    assert (parsed.master_addr, parsed.launcher_args) == ("10.0.0.1", "-N -t 5")
    assert parsed.module
    assert parsed.force_multi
    assert (parsed.user_script, parsed.user_args[0]) == ("pretrain", "run")
    # As DeepSpeed, pdsh and the shell of the other node treat them.
    assert arrived(parsed.user_args, tmp_path) == ["run", *TRAINED]


WORDS = [
    "a",
    "a b",
    "",
    "it's",
    'say "so"',
    "$HOME",
    "$HOME x",
    "`id`",
    "`id` x",
    "a\\b",
    "a\\ b",
    "100%",
    "%n %h",
    "a;b",
    "*",
]


def arrived(words, folder: Path) -> list[str]:
    from deepspeed.launcher.multinode_runner import PDSHRunner

    tell = folder / "tell.py"
    tell.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    joined = " ".join(PDSHRunner(Namespace(user_args=list(words), user_script=""), "").user_arguments)
    line = f"{sys.executable} {tell} " + joined.replace("%%", "%")
    return json.loads(subprocess.run(["sh", "-c", line], capture_output=True, check=True, text=True).stdout)


def test_words_arrive_as_they_are(tmp_path):
    assert arrived([through_shell(word) for word in WORDS], tmp_path) == WORDS


def test_a_recipe_whose_name_begins_with_a_dash_is_no_option():
    assert as_argument(Path("./-x.toml")) == "./-x.toml"
    assert as_argument(Path("a/-x.toml")) == "a/-x.toml"
    with pytest.raises(LaunchError, match=r"-x\.toml") as caught:
        plan_recipe(Path("./-x.toml"), 1, (), check_data=False)
    assert "option" not in str(caught.value)


def test_mpirun_is_told_where_ranks_meet():
    passed = {"NCCL_DEBUG": "INFO"}
    argv = through_runner(
        Where(hostfile=FILE, master_addr="10.0.0.1", master_port=29555), "mpich", HOSTS, TRAINED, passed
    )
    assert argv[argv.index("--launcher") + 1] == "impi"
    assert argv[-len(TRAINED) :] == TRAINED
    assert passed == {"NCCL_DEBUG": "INFO", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29555"}
    with pytest.raises(LaunchError, match="GLOO_X cannot be passed on by mpirun"):
        through_runner(Where(hostfile=FILE, master_addr="a"), "openmpi", HOSTS, [], {"GLOO_X": "a b"})


def test_deepspeed_reads_the_hosts_that_we_chose_and_not_the_file():
    """A file that has a BOM or was a pipe it would read otherwise, or start on this machine alone."""
    from deepspeed.launcher.runner import fetch_hostfile

    hosts = (Host("me@node-1", 2), Host("node-2", 4))
    launch = Launch(("deepspeed", "--hostfile", "hosts", "--x"), {}, Path("x"), 6, {}, hosts)
    with own_hostfile(launch) as told:
        before, option, path, behind = told.argv
        assert fetch_hostfile(path) == {host.name: host.slots for host in hosts}
        assert subprocess.run(["cat", path], capture_output=True, check=True).stdout.count(b"\n") == 2  # by a child
    assert (before, option, behind) == ("deepspeed", "--hostfile", "--x")
    assert not Path(path).exists()
    alone = Launch(("deepspeed",), {}, Path("x"), 1, {})
    with own_hostfile(alone) as told:
        assert told is alone


def test_each_nodes_own_command():
    where = Where(node_rank=1, nodes=2, master_addr="node-1")
    argv = by_hand(where, "deepspeed", HOSTS, (4, 5, 6, 7, 8), TRAINED)
    info = next(word.partition("=")[2] for word in argv if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(info)) == {"node-1": [0, 1], "node-2": [4, 5, 6, 7]}
    assert {"--node_rank=1", "--master_addr=node-1", "--master_port=29500"} <= set(argv)
    assert argv[-len(TRAINED) :] == TRAINED
    even = (Host("a", 2), Host("b", 2))
    argv = by_hand(where, "torchrun", even, (), TRAINED)
    assert argv[1:9] == ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2"]
    assert "--run" not in argv
    with pytest.raises(LaunchError, match="equally many"):
        by_hand(where, "torchrun", HOSTS, (), TRAINED)


def test_ports_that_are_taken_are_refused():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--master-port {port}: the port is taken by another program"):
            refuse_taken(port)
        with pytest.raises(LaunchError, match="taken"):
            by_hand(Where(node_rank=0, master_addr="a", master_port=port), "deepspeed", HOSTS, (), [])
        by_hand(Where(node_rank=1, master_addr="a", master_port=port), "deepspeed", HOSTS, (), [])
    refuse_taken(port)
    with pytest.raises(LaunchError, match="1 to 65535"):
        refuse_taken(65_536)


def test_addresses_that_other_machines_reach():
    assert resolve("localhost") == resolve("me@localhost") == "127.0.0.1"
    assert meeting_address(["localhost", "127.0.0.2"]) == address_towards([]) == "127.0.0.1"
    assert meeting_address(["10.1.2.3", "localhost"]) == "10.1.2.3"
    with pytest.raises(LaunchError, match=r"nowhere\.invalid has no address here"):
        resolve("nowhere.invalid")


# ---------------------------------------------------------------- environment


def test_secrets_are_not_shown_and_not_passed_on():
    secret = "HF_TOKEN AWS_SECRET_ACCESS_KEY password WANDB_API_KEY MLFLOW_TRACKING_PASSWORD GITHUBTOKEN PGPASSWORD"
    secret += " MYAPIKEY2 PYTHONTOKEN TORCH_HUBTOKEN COMMONKEY TOKENIZER_TOKEN MYSQL_PWD DBPASS2 GITHUB_PAT XAUTHORITY"
    assert [name for name in secret.split() if not looks_secret(name)] == []
    harmless = "TOKENIZERS_PARALLELISM NCCL_IB_PKEY KEYBOARD MONKEY PATH PWD OLDPWD PYTHONPATH LD_LIBRARY_PATH"
    harmless += " OMP_NUM_THREADS NCCL_COMPAT NCCL_DEBUG GIT_AUTHOR_NAME COMPASS HF_HOME PASSIVE"
    assert [name for name in harmless.split() if looks_secret(name)] == []
    assert shown({"HF_TOKEN": "abc", "X": "1"}) == {"HF_TOKEN": MASK, "X": "1"}
    assert "abc" not in to_text({"HF_TOKEN": "abc"})
    assert asked_for(["HF_TOKEN"], {"HF_TOKEN": "abc"}) == {"HF_TOKEN": "abc"}  # on this machine it stays in memory
    with pytest.raises(LaunchError, match="--env HF_TOKEN: looks like a secret") as caught:
        passed_on({}, {}, {"HF_TOKEN": "abc"})
    assert "abc" not in str(caught.value)
    environ = {
        "HF_TOKEN": "abc",
        "NCCL_AUTH": "abc",
        "PYTHONTOKEN": "abc",
        "UCXTOKEN": "abc",
        "MLFLOW_TRACKING_PASSWORD": "abc",
        "MV2_X": "1",
        "PATH": "/bin",
    }
    assert passed_on(environ, {}, {}) == {}
    assert of_runner(environ, "pdsh") == {"HF_TOKEN": "abc", "PATH": "/bin"}
    assert of_runner(environ, "mpich") == {"PATH": "/bin"}
    unasked = {"PYTHONTOKEN": "abc", "UCXTOKEN": "abc", "NCCLTOKEN": "abc"}  # by DeepSpeed, which looks at beginnings
    assert (passed_on(unasked, {}, {}), of_runner(unasked, "pdsh")) == ({}, {})


def test_an_explicit_list_reaches_other_nodes_as_it_is():
    environ = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "HOME": "/root", "PYTHONPATH": "/a:/b", "PYTHON_X": "1"}
    passed = passed_on(environ, {"OMP_NUM_THREADS": "4"}, {"MY": "a b 100%", "NCCL_DEBUG": "WARN"})
    assert passed == {
        "MY": "a b 100%", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "PYTHONPATH": "/a:/b", "PYTHON_X": "1",
    }  # fmt: skip
    descriptor = file_in_memory({"MY": "a b 100%"}, escape_percent=True)
    path = Path(f"/proc/self/fd/{descriptor}")
    assert path.is_file()  # as DeepSpeed asks
    assert path.read_text() == path.read_text() == "MY=a b 100%%\n"  # and it reads it twice
    os.close(descriptor)
    for value in ('"', "$x", "`id`", "a\\b", "a\nb", " a", "a "):
        with pytest.raises(LaunchError, match="X cannot be passed on"):
            passed_on({}, {}, {"X": value})


@pytest.mark.parametrize(
    "wish, says",
    [
        ("=x", "give NAME"),
        ("a-b=secret", "give NAME"),
        ("RANK=1", "whoever starts a rank"),
        ("ABSENT", "is not set here"),
    ],
)
def test_impossible_variables(wish, says):
    with pytest.raises(LaunchError, match=says) as caught:
        asked_for([wish], {})
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- the command line


def test_a_dry_run_over_hosts_shows_what_reaches_them(tmp_path, collection, tokenizer):
    """This machine under two names; nobody is asked and nothing is started."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n127.0.0.2 slots=1\n")
    for name in ("pdsh",):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    environment = {
        **os.environ, "DS_ACCELERATOR": "cpu", "NCCL_DEBUG": "INFO", "HF_TOKEN": "abcdef",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    options = ("--hostfile", hosts, "--run", tmp_path / "run", "--env", "MY=a b", "--dry-run", "--json")
    options += ("--restarts", "3", "--set", f"data.path={collection}", "--set", f"data.tokenizer={tokenizer}")
    done = run_command("launch", "run", "pretrain/recipes/debug.toml", *options, environment=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["hosts"] == [{"name": "localhost", "slots": 1}, {"name": "127.0.0.2", "slots": 1}]
    assert report["passed_on"].items() >= {"NCCL_DEBUG": "INFO", "MY": "a b", "DS_ACCELERATOR": "cpu"}.items()
    assert (report["world_size"], report["launcher"]) == (2, "pdsh")
    assert report["verdict"]["fits"] is True
    assert report["data"]["path"]
    assert "resume" in report
    assert "abcdef" not in done.stdout
    assert report["argv"][-1] == (
        f"python -m launch run pretrain/recipes/debug.toml --hostfile {hosts} --env 'MY=a b' --run {tmp_path}/run "
        f"--restarts 3 --set data.path={collection} --set data.tokenizer={tokenizer}"
    )
    assert not (tmp_path / "run").exists()
