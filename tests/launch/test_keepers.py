"""What `launch run` and the keepers of its ranks do together, with real processes: a rank of a few lines, and a real
cause for each of its ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.command import Launch
from launch.running import run_once

ROOT = Path(__file__).resolve().parents[2]
# A rank as `pretrain run` begins: its keeper first, then an attempt with a log, then a line of the test's.
RANK = """
import os, pathlib, resource, signal, socket, sys, time
from pretrain.keeper import keep
folder, rank, words = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2]
kept = keep(os.environ)
print("before it has a log", flush=True)
if "early" not in words:
    kept.begins(1, folder / "logs" / "attempt-1" / f"rank-{rank:05d}.log")
exec(words)
"""
# Starts one rank for each of its words, and says nothing of how they end: 0, as DeepSpeed's runner may.
LAUNCHER = """
import os, subprocess, sys
rank, folder, *words = sys.argv[1:]
ranks = [
    subprocess.Popen([sys.executable, "-c", rank, folder, word], env={**os.environ, "RANK": str(number)})
    for number, word in enumerate(words)
]
for process in ranks:
    process.wait()
"""


def launch(folder: Path, *words: str) -> Launch:
    return Launch((sys.executable, "-c", LAUNCHER, RANK, str(folder), *words), {}, folder, len(words), {})


def last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


REFUSED = "probe = socket.create_server(('127.0.0.1', 0)); port = probe.getsockname()[1]; probe.close(); "
REFUSED += "socket.create_connection(('127.0.0.1', port))"
TAKEN = "taken = socket.create_server(('127.0.0.1', 0)); socket.create_server(taken.getsockname())"
TOO_BIG = "resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)); bytearray(2**30)"
FULL = "full = open('/dev/full', 'wb', buffering=0); full.write(b'x')"
# One rank of two, for a moment: the other never comes.
RENDEZVOUS = (
    "import datetime, torch.distributed as dist; "
    "dist.TCPStore('127.0.0.1', 0, 2, True, datetime.timedelta(milliseconds=300))"
)
KEEPER = "any(iter(lambda: time.sleep(0.01) or any(folder.glob('logs/*/*')), True)); "
KEEPER += "os.kill(os.getppid(), signal.SIGKILL); time.sleep(3600)"
OTHER = "sys.exit('error: rank 1 (b) has another program than rank 0 (a): its commit is 1a2b there, 3c4d here')"


@pytest.mark.parametrize(
    "words, code, says",
    [
        ("raise ValueError('of its own')", 1, "rank 0 failed with code 1: ValueError: of its own"),
        (REFUSED, 1, "ConnectionRefusedError: [Errno 111] Connection refused; nobody listened where the ranks"),
        (TAKEN, 1, "another program has the port at which the ranks meet"),
        (TOO_BIG, 1, "MemoryError; memory ran out: `python -m pretrain plan RECIPE"),
        (FULL, 1, "No space left on device; the disk is full: make room"),
        (RENDEZVOUS, 1, "not all ranks came, or one fell silent"),
        (OTHER, 1, "its commit is 1a2b there, 3c4d here; the nodes differ: `python -m launch check`"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 0 was killed by SIGKILL; SIGKILL came from outside"),
        (KEEPER, 1, "rank 0 vanished without a word"),
        ("sys.exit(7)", 7, "rank 0 failed with code 7"),
        ("early = sys.exit('error: bad')", 1, "it ended before its first step"),
    ],
)
def test_what_a_rank_met_is_told_last_with_its_cause(tmp_path, capfd, words, code, says):
    """Also where the launcher says that all is well."""
    assert run_once(launch(tmp_path, words), os.environ)[0] == code
    told = capfd.readouterr().err
    assert says in last_line(told)
    assert last_line(told).startswith(f"error: run {tmp_path} failed (code {code}): ")
    if "Error" in says:
        assert told.count("Traceback (most recent call last)") == 2  # where it happened, and once more at the end
    logs = tmp_path / "logs" / "attempt-1" / "rank-00000.log"
    assert logs.exists() is ("early" not in words)
    if logs.exists() and "getppid" not in words:
        assert logs.read_text().startswith("before it has a log\n")


def test_the_first_failure_counts_and_not_who_lost_another_rank(tmp_path, capfd):
    """Rank 0 ends first, and knows nothing; rank 2 would go on for ever."""
    lost = "sys.exit('error: another rank is gone, and this one cannot go on without it')"
    own = "time.sleep(1); raise ValueError('the cause')"
    endless = "print('a line'); time.sleep(3600)"
    launched = launch(tmp_path, lost, own, endless)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.running.PEERS_SECONDS", 3.0)
        assert run_once(launched, os.environ)[0] == 1
    told = capfd.readouterr().err
    assert "rank 1 failed with code 1: ValueError: the cause; " in last_line(told)
    assert "[rank 2] before it has a log\n" in told
    assert "[rank 0]" not in told
    assert (tmp_path / "logs" / "attempt-1" / "rank-00002.log").read_text() == "before it has a log\na line\n"


def test_bad_input_that_a_rank_has_told_of_is_not_told_twice(tmp_path, capfd):
    words = "early = print('error: no such thing', file=sys.stderr); sys.exit(2)"
    assert run_once(launch(tmp_path, words), os.environ)[0] == 2
    assert capfd.readouterr().err == "before it has a log\nerror: no such thing\n"


STOPPED = "import threading; asked = threading.Event(); kept.heed(lambda why: (print('asked by', why), asked.set())); "
STOPPED += "print('ready', flush=True); asked.wait(); print('saved')"
CALLER = """
import os, sys
from pathlib import Path
from launch import running
from launch.command import Launch
argv = (sys.executable, "-c", *sys.argv[1:])
sys.exit(running.run_once(Launch(argv, {}, Path(sys.argv[3]), len(sys.argv) - 4, {}), os.environ)[0])
"""


def caller(folder: Path, *words: str, **options) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", CALLER, *launch(folder, *words).argv[2:]]
    return subprocess.Popen(argv, cwd=ROOT, text=True, **options)


def read_to_ready(process: subprocess.Popen[str]) -> None:
    while "ready" not in (line := process.stderr.readline()):
        assert line, "it ended before it was ready"


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_ranks_are_told_who_asked_them_to_stop(tmp_path, number, name):
    process = caller(tmp_path, STOPPED, STOPPED, stderr=subprocess.PIPE)
    read_to_ready(process)
    read_to_ready(process)
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == 0, told
    assert f"asked by {name} to `launch run`\nsaved\n" in told
    assert f"[rank 1] asked by {name} to `launch run`\n[rank 1] saved\n" in told
    assert not (tmp_path / "stop").exists()


def test_the_death_of_launch_run_lets_ranks_save_and_stop(tmp_path):
    """Killed, so that it can tell nobody; the launcher between them goes on."""
    unleashed = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{LAUNCHER}"
    argv = [sys.executable, "-c", CALLER, unleashed, *launch(tmp_path, STOPPED).argv[3:]]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    read_to_ready(process)
    process.kill()
    assert process.stderr.read() == "asked by the end of `launch run`\nsaved\n"
    process.wait()
    process.stderr.close()


def test_a_rank_that_comes_when_launch_run_is_gone_ends(tmp_path):
    environment = {**os.environ, "RANK": "0", "ZEROHALF_LAUNCHER": "127.0.0.1:1/x"}
    argv = [sys.executable, "-c", RANK, str(tmp_path), "time.sleep(3600)"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: rank 0: `launch run`, at 127.0.0.1:1, is gone: nobody would watch this rank\n" in done.stderr


def test_on_a_terminal_rank_0_has_a_terminal_and_a_log_of_plain_lines(tmp_path):
    """A bar that is drawn again and again stands in the log as it stood in the end."""
    words = "print(os.isatty(2), os.get_terminal_size(2).columns); "
    words += (
        r"print('\x1b[31mstep 1\x1b[0m\r\x1b[2Kstep 2', end='', flush=True); "
        r"print('\r\x1b[2Ka line\nstep 3\n', end='')"
    )
    ours, its = pty.openpty()
    subprocess.run(["stty", "cols", "123"], stdin=its, check=True)
    process = caller(tmp_path, words, stderr=its, stdout=its)
    os.close(its)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # nobody has it open any more
            break
    os.close(ours)
    assert process.wait() == 0
    assert b"True 123" in shown
    assert b"\x1b[31mstep 1\x1b[0m\r\x1b[2Kstep 2\r\x1b[2Ka line" in shown
    log = tmp_path / "logs" / "attempt-1" / "rank-00000.log"
    assert log.read_text() == "before it has a log\nTrue 123\na line\nstep 3\n"


def test_strangers_are_not_taken_for_ranks():
    import socket

    from launch.lifelines import Lifelines

    lines = Lifelines("127.0.0.1")
    address, port, identity = re.match(r"(.*):(\d+)/(.*)", lines.environment["ZEROHALF_LAUNCHER"]).groups()
    hello = {"rank": 0, "host": "h", "pid": 1}
    said = [b"GET / HTTP/1.0\r\n\r\n", json.dumps({"id": "x", **hello}).encode() + b"\n", b"[]\n", b"{}\n"]
    strangers = [socket.create_connection((address, int(port))) for _ in said]
    for stranger, words in zip(strangers, said, strict=True):
        stranger.sendall(words)
    ours = socket.create_connection((address, int(port)))
    ours.sendall(json.dumps({"id": identity, **hello}).encode() + b"\n")
    deadline = time.monotonic() + 60
    while (len(lines._heard) > 1 or not lines.connected) and time.monotonic() < deadline:
        lines.serve(0.1)
    assert list(lines.known) == [0]
    assert all(stranger.recv(1) == b"" for stranger in strangers)
    ours.close()
    while lines.connected and time.monotonic() < deadline:
        lines.serve(0.1)
    assert lines.first_failure() is lines.known[0]
    for one in strangers:
        one.close()
    lines.close()
