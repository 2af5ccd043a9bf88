"""Real processes stand in for the launcher here; the launcher itself is run by the tests of whole runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.addresses import free_port
from launch.command import Launch, added_environment, devices
from launch.demo import Demo
from launch.devices import narrow, visible_gpus
from launch.ending import End, newest_attempt, read_receipts, read_status
from launch.errors import LaunchError
from launch.oom_killer import oom_killer, oom_kills
from launch.running import run_once
from pretrain.keeper import VARIABLE
from pretrain.run_directory import refuse_unusable
from pretrain.verbs.telling import complain
from tests.command_line import run_command

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "launch", "run", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", **environment},
    )


def test_a_dry_run_says_what_would_run_and_starts_nothing(tmp_path, collection, tokenizer):
    directory = tmp_path / "run"
    data = ("--set", f"data.path={collection}", "--set", f"data.tokenizer={tokenizer}")
    done = command(
        *("pretrain/recipes/debug.toml", "--ranks", "2", "--run", str(directory), *data, "--set", "seed=3"),
        *("--max-minutes", "55", "--dry-run", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    argv = report["argv"]
    assert argv[0] == str(Path(sys.executable).parent / "deepspeed")
    assert argv[1:3] == ["--num_gpus", "2"]
    assert argv[3] == "--master_port"
    assert argv[5:] == [
        *("--log_level", "critical", "--module", "pretrain", "run", "pretrain/recipes/debug.toml"),
        *("--run", str(directory), "--resume", "auto", *data, "--set", "seed=3", "--max-minutes", "55"),
    ]
    assert report["world_size"] == 2
    assert report["global_batch_size"] == 16
    assert report["micro_batch_size"] * report["gradient_accumulation_steps"] * 2 == 16
    assert not directory.exists()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["nowhere.toml"], "no such recipe file"),
        (["pretrain/recipes/debug.toml", "--ranks", "3"], "use 12 or 24"),
        (["pretrain/recipes/debug.toml", "--ranks", "0"], "--ranks 0"),
        (["pretrain/recipes/debug.toml", "--set", "seeed=3"], "did you mean seed"),
        (["pretrain/recipes/debug.toml", "--json"], "--dry-run"),
        (["pretrain/recipes/debug.toml", "--set", "data.path=data/nope", "--dry-run"], "data/nope"),
        (["pretrain/recipes/debug.toml", "--max-minutes", "0"], "--max-minutes 0: must be more than 0"),
    ],
)
def test_bad_input_is_one_error_line_before_anything_starts(arguments, says, tmp_path):
    directory = tmp_path / "run"
    done = command(*arguments, "--run", str(directory))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not directory.exists()


def test_a_dry_run_tells_options_that_ranks_do_not_know_and_that_they_get_a_secret(tmp_path, collection, tokenizer):
    """What goes on with the run keeps them, and shows no value of a secret."""
    run = tmp_path / "run"
    data = ("--set", f"data.path={collection}", "--set", f"data.tokenizer={tokenizer}")
    options = ("--ranks", "1", "--launcher", "torchrun", "--env", "MY_TOKEN=abc", "--run", run, "--restarts", "3")
    options += ("--grace-seconds", "9")
    done = run_command("launch", "run", "pretrain/recipes/debug.toml", *options, *data, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "abc" not in done.stdout
    assert "ranks get the values that are shown as ***" in done.stdout
    assert (
        f"--started-by 'python -m launch run pretrain/recipes/debug.toml --ranks 1 --launcher torchrun --env MY_TOKEN "
        f"--run {run} --restarts 3 --set data.path={collection} --set data.tokenizer={tokenizer} --grace-seconds 9'"
    ) in done.stdout
    assert " × 1 rank," in done.stdout


def test_a_run_directory_that_cannot_be_is_one_line_in_every_command(tmp_path):
    recipe, file = "pretrain/recipes/debug.toml", tmp_path / "file"
    file.touch()
    slurm = ("slurm", recipe, "--ranks-per-node", "1", "--no-check-data")
    for package, words in (("pretrain", ("run", recipe)), ("launch", slurm)):
        for path, why in ((file / "x", f"{file} is no folder"), ("/proc/nu", "/proc cannot be written to")):
            done = run_command(package, *words, "--run", path)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
            assert done.stderr.startswith(f"error: {why}")
            assert done.stderr.endswith(f"so a run directory cannot be {path}: choose another --run\n")
    refuse_unusable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == [file]


def test_each_nodes_own_command_says_what_was_wrong(monkeypatch, capsys):
    """All ranks know of it; those of other nodes would leave it to rank 0, whose words stand on its node alone."""
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    for launcher, says in ((None, ""), ("10.0.0.1:5/id", ""), ("127.0.0.1:5/id", "error: what is wrong\n")):
        if launcher is not None:
            monkeypatch.setenv(VARIABLE, launcher)
        assert complain("what is wrong") == 2
        assert capsys.readouterr().err == says
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert complain("what is wrong") == 2
    assert capsys.readouterr().err == ""


HUGE = ("--set", "model.d_model=65536", "--set", "model.d_ff=1048576")  # terabytes on any machine


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path, collection, tokenizer):
    directory = tmp_path / "run"
    data = ("--set", f"data.path={collection}", "--set", f"data.tokenizer={tokenizer}")
    arguments = ("pretrain/recipes/debug.toml", "--ranks", "2", "--run", str(directory), *data, *HUGE)
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: pretrain/recipes/debug.toml does not fit: a rank needs ")
    assert "2 ranks share " in done.stderr
    assert done.stderr.count("\n") == 1
    assert not directory.exists()
    forced = command(*arguments, "--force", "--dry-run", "--json")
    assert forced.returncode == 0
    assert forced.stderr.startswith("warning: pretrain/recipes/debug.toml does not fit: a rank needs ")
    assert json.loads(forced.stdout)["argv"][-1] == "--force"


def test_cores_are_shared_out_on_a_cpu():
    cores = len(os.sched_getaffinity(0))
    assert added_environment(False, 1, {}) == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(cores)}
    assert added_environment(False, 10**6, {})["OMP_NUM_THREADS"] == "1"
    assert added_environment(False, 1, {"OMP_NUM_THREADS": "7", "DS_ACCELERATOR": "cpu"}) == {}
    assert added_environment(True, 1, {}) == {}


def test_the_chosen_gpus_are_the_visible_ones():
    assert narrow(4, None) == (0, 1, 2, 3)
    assert narrow(4, "2,3") == (2, 3)
    assert narrow(4, "") == narrow(4, "-1") == ()
    with pytest.raises(LaunchError, match="by number"):
        narrow(4, "GPU-0a1b")
    assert devices((0, 1, 2, 3), 2) == ["--num_gpus", "2"]
    assert devices((2, 3), 2) == ["--include", "localhost:2,3"]
    assert devices((), 2) == ["--num_gpus", "2"]


def test_a_hanging_nvidia_smi_is_one_line(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("launch.devices.SMI_SECONDS", 0.2)
    with pytest.raises(LaunchError, match=r"gave no answer in 0\.2 s") as caught:
        visible_gpus({})
    assert "\n" not in str(caught.value)
    assert visible_gpus({"DS_ACCELERATOR": "cpu"}) == ()


def test_the_demo_shows_commands_in_one_line_to_be_copied(capsys):
    words = ("data_pipeline", "prepare", *["--input", "english=data_pipeline/sample_corpus/english.jsonl"] * 5)
    Demo().show(*words)
    assert capsys.readouterr().out == f"$ python -m {' '.join(words)}\n"


def test_ports_are_free_and_not_of_those_the_system_hands_out(tmp_path, monkeypatch):
    """One of those could be anybody's by the time the ranks have started."""
    given = tmp_path / "range"
    monkeypatch.setattr("launch.addresses.GIVEN_PORTS", given)
    assert 0 < free_port() < 65536  # where nothing tells which
    given.write_text("32768\t60999\n")
    ports = {free_port() for _ in range(50)}
    assert 16_384 <= min(ports) <= max(ports) < 32_768
    assert len(ports) > 1
    given.write_text("1024\t65535\n")
    assert 0 < free_port() < 65536  # where there is no room below


WELL = {"state": "stopped"}, {"state": "finished"}
DIED = "a rank died: nothing was left by rank {}"


@pytest.mark.parametrize(
    "code, receipts, asked, expected, says",
    [
        (0, {0: WELL[1], 1: WELL[1]}, 0, 0, ""),
        (1, {0: WELL[0], 1: WELL[0]}, 1, 0, ""),  # the launcher calls a stop by signal a failure
        (0, {0: WELL[1]}, 0, 1, DIED.format("1")),  # and the death of a rank by signal a success
        (0, {1: WELL[1]}, 1, 1, DIED.format("0")),
        (7, {}, 0, 7, DIED.format("0 and 1")),
        (-9, {}, 2, 1, DIED.format("0 and 1")),
        (1, {0: WELL[0], 1: {"state": "failed"}}, 0, 1, "rank 1 failed"),
        (1, {0: WELL[0], 1: {}}, 0, 1, "rank 1 failed"),
    ],
)
def test_the_truth_is_what_every_rank_left(code, receipts, asked, expected, says, capsys):
    end = End(code=code, began=True, asked=asked, receipts=receipts)
    assert end.verdict(Launch((), {}, Path("runs/x"), 2, {}), {"state": "running", "attempt": 1}) == expected
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("asked, expected", [(0, 1), (1, 0), (2, 1)])
def test_asked_to_stop_before_it_began_it_has_not_failed(asked, expected, capsys):
    end = End(code=-15, began=False, asked=asked, receipts={})
    assert end.verdict(Launch((), {}, Path("runs/x"), 2, {}), {}) == expected
    assert ("stopped before it began" if asked == 1 else "before its first step") in capsys.readouterr().err


def test_receipts_of_other_attempts_and_what_is_none_do_not_count(tmp_path):
    assert read_receipts(tmp_path, newer_than=0) == {}
    (tmp_path / "receipts").mkdir()
    contents = ['{"attempt": 3, "rank": 0}', '{"attempt": 2, "rank": 1}', "{", "[]", '{"attempt": "3", "rank": 4}']
    contents += ['{"attempt": 3, "rank": "1"}', '{"attempt": 3, "rank": [1]}', "[" * 5000]
    for number, content in enumerate(contents):
        (tmp_path / "receipts" / f"rank-{number:05d}.json").write_text(content)
    assert read_receipts(tmp_path, newer_than=1) == {0: {"attempt": 3, "rank": 0}}
    assert read_receipts(tmp_path, newer_than=3) == {}


def test_an_attempt_has_begun_when_it_is_recorded(tmp_path):
    assert newest_attempt(tmp_path) == 0
    for content in ("{", "[]", '{"attempts": 5}', '{"attempts": "x"}', "[" * 5000):
        (tmp_path / "environment.json").write_text(content)
        assert newest_attempt(tmp_path) == 0
    (tmp_path / "environment.json").write_text('{"attempts": [{}, {}]}')
    assert newest_attempt(tmp_path) == 2


@pytest.mark.parametrize(
    "group, name, text",
    [
        ("0::/a/b", "sys/fs/cgroup/a/b/memory.events", "low 0\noom 9\noom_kill {}\n"),
        ("4:cpu,memory:/x\n0::/", "sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("1:cpu:/", "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
    ],
)
def test_the_kernels_oom_killer_is_named_where_its_count_grew(tmp_path, group, name, text, capsys):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    assert oom_kills(tmp_path) == {}
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text.format(3))
    before = oom_kills(tmp_path)
    assert list(before.values()) == [3]
    assert oom_killer(before, before) is None
    assert oom_killer({}, before) is None  # not known before, so nothing is known
    (tmp_path / name).write_text(text.format(4))
    killer = oom_killer(before, oom_kills(tmp_path))
    assert killer is not None
    assert ("this machine" in killer) is ("vmstat" in name)
    status = {"state": "running", "attempt": 1}
    for told in (killer, None):
        end = End(code=-9, began=True, asked=0, receipts={}, killer=told)
        assert end.verdict(Launch((), {}, Path("runs/x"), 1, {}), status) == 1
        errors = capsys.readouterr().err
        assert ("Meanwhile the kernel ended a process of " in errors) is (told is not None)
        assert errors.count("\n") == 1


def test_this_kernels_counts_are_read():
    counts = oom_kills()
    assert all(count >= 0 for count in counts.values())
    if Path("/proc/vmstat").exists() and "oom_kill" in Path("/proc/vmstat").read_text():
        assert "machine" in counts


def test_a_damaged_status_is_an_error(tmp_path):
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(LaunchError, match="not valid JSON"):
        read_status(tmp_path)
    assert read_status(tmp_path / "none") == {}


# A launcher that dies at once on SIGTERM, as DeepSpeed's runner does, and a rank that saves first and then stops: by
# the stop file once it has begun; by SIGTERM before, and then it leaves nothing.
RANK = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
begun = len(sys.argv) == 2
def write(name, content):
    part = folder / "part"
    part.write_text(json.dumps(content))
    part.replace(folder / name)
def say(state):
    write("status.json", {"state": state, "attempt": 1})
def stop(*_):
    (folder / "saving").touch()
    time.sleep(0.5)
    if begun:
        say("stopped")
        (folder / "receipts").mkdir()
        write("receipts/rank-00000.json", {"attempt": 1, "rank": 0, "state": "stopped"})
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / "ready").touch()
if begun:
    say("running")
    write("environment.json", {"attempts": [{}]})
while not (folder / "stop").exists():
    time.sleep(0.05)
stop()
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
# Its patience is longer than any test: what ends early here was not ended by it.
CALLER = """
import os, sys
from pathlib import Path
from launch import running
from launch.command import Launch
running.GRACE_SECONDS = 3600.0
argv = (sys.executable, "-c", sys.argv[2], sys.argv[1], sys.argv[3])
sys.exit(running.run_once(Launch(argv, {"MARK": sys.argv[1]}, Path(sys.argv[1]), 1, {}), os.environ)[0])
"""


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def marked(directory):
    """Living processes whose environment carries this test's mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={directory}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


def listens(process):
    """Whether it has set its handlers: SIGTERM has none from the start, and `run` sets this one last."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def call(tmp_path):
    """Starts `run` in a process of its own; whatever is left of it at the end is killed."""
    callers = []

    def start(launcher, rank):
        argv = [sys.executable, "-c", CALLER, str(tmp_path), launcher, rank]
        callers.append(subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE))
        return callers[-1]

    yield start
    for caller in callers:
        caller.kill()
        caller.wait()
        caller.stderr.close()
    for pid in marked(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("begun", [True, False])
def test_a_signal_lets_the_ranks_save_and_leaves_no_orphans(tmp_path, call, number, begun):
    caller = call(LAUNCHER, RANK if begun else RANK.replace("len(sys.argv) == 2", "False"))
    wait_for((tmp_path / ("environment.json" if begun else "ready")).exists)
    wait_for(lambda: listens(caller))
    caller.send_signal(number)
    assert caller.wait() == 0, caller.stderr.read()
    assert (tmp_path / "stop").exists() is begun
    assert (tmp_path / "saving").exists()
    assert read_status(tmp_path).get("state") == ("stopped" if begun else None)
    assert marked(tmp_path) == []


def test_a_second_signal_ends_everything_at_once(tmp_path, call):
    """At once: the rank would take an hour to save."""
    caller = call(LAUNCHER, RANK.replace("time.sleep(0.5)", "time.sleep(3600)"))
    wait_for((tmp_path / "environment.json").exists)
    wait_for(lambda: listens(caller))
    caller.terminate()
    wait_for((tmp_path / "saving").exists)
    caller.terminate()
    assert caller.wait() == 1
    assert b"a rank died" in caller.stderr.read()
    wait_for(lambda: marked(tmp_path) == [])


def test_a_rank_killed_by_a_signal_is_a_failure_even_if_the_launcher_says_zero(tmp_path, capfd):
    status = json.dumps({"state": "running", "attempt": 1, "global_step": 3, "max_steps": 9})
    attempts = json.dumps({"attempts": [{}]})
    files = {"status.json": status, "environment.json": attempts}
    rank = f"import os, pathlib; [pathlib.Path(n).write_text(c) for n, c in {files!r}.items()]; os.kill(os.getpid(), 9)"
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], cwd=sys.argv[2])"
    argv = (sys.executable, "-c", launcher, rank, str(tmp_path))
    assert run_once(Launch(argv, {}, tmp_path, 1, {}), os.environ)[0] == 1
    assert "step 3 of 9" in capfd.readouterr().err
    assert read_status(tmp_path)["state"] == "failed"


def test_the_minutes_of_a_run_begin_with_the_command(tmp_path):
    """Not with the ranks, which start some seconds later."""
    tell = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))"
    for limits, told in ((("--max-minutes", "5"), "--max-minutes 5 --started-at 12.500"), ((), "")):
        argv = (sys.executable, "-c", tell, str(tmp_path / "told"), *limits)
        assert run_once(Launch(argv, {}, tmp_path, 1, {}), os.environ, started_at=12.5)[0] == 1
        assert (tmp_path / "told").read_text() == told


def test_killed_itself_it_takes_the_run_with_it(tmp_path, call):
    caller = call("import time; time.sleep(3600)", "")
    wait_for(lambda: len(marked(tmp_path)) == 1)
    caller.kill()
    caller.wait()
    wait_for(lambda: marked(tmp_path) == [])
