"""What `launch run` and the keepers of its ranks do together, with real processes: a rank of a few lines, and a real
cause for each of its ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launch.command import Launch
from launch.ending import End
from launch.hosts import Host
from launch.lifelines import Known, Lifelines
from launch.running import run_once
from pretrain.keeper import _Log

ROOT = Path(__file__).resolve().parents[2]
# A rank as `pretrain run` begins: its keeper first, then an attempt with a log, then a line of the test's. It says by
# `ends` how that went.
RANK = """
import json, os, pathlib, resource, signal, socket, sys, time
from pretrain.keeper import keep
def ends(state):
    (folder / "receipts").mkdir(exist_ok=True)
    receipt = {"attempt": 1, "rank": rank, "state": state}
    (folder / "receipts" / f"rank-{rank:05d}.json").write_text(json.dumps(receipt))
    kept.ended(state)
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
        ("import nowhere_at_all", 1, "No module named 'nowhere_at_all'; a package is missing on that node"),
        ("socket.getaddrinfo('nowhere.invalid', 1)", 1, "; a node's name has no address there: give --master-addr"),
        (OTHER, 1, "its commit is 1a2b there, 3c4d here; the nodes differ: `python -m launch check`"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 0 was killed by SIGKILL; SIGKILL came from outside"),
        (KEEPER, 1, "rank 0 vanished without a word"),
        ("sys.exit(7)", 7, "rank 0 failed with code 7"),
        ("early = sys.exit('error: bad')", 1, "it ended before its first step"),
        ("os._exit(0)", 1, "rank 0 left in the middle of the run, with code 0"),
        ("ends('failed')", 1, "rank 0 left in the middle of the run, with code 0"),
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


def test_who_says_why_counts_and_not_who_ends_in_silence(tmp_path, capfd):
    """Rank 1's disk is full, all know of it, and rank 0 speaks; its own and torch's warnings say nothing of the end."""
    silent = "print('[W1130 06:15:21.454760756 socket.cpp:207] [c10d] No route to host'); sys.exit(2)"
    speaks = "print('warning: x does not fit: a rank needs 1 GB'); time.sleep(0.5); print('error: rank 1: no room'); "
    speaks += "sys.exit(2)"
    assert run_once(launch(tmp_path, speaks, silent), os.environ)[0] == 2
    assert "rank 0 failed with code 2: rank 1: no room; it had come to no step; logs in " in last_line(
        capfd.readouterr().err
    )
    assert run_once(launch(tmp_path, silent), os.environ)[0] == 2
    assert "rank 0 failed with code 2: before it has a log; it had come to no step" in last_line(capfd.readouterr().err)


def test_a_rank_that_left_before_the_run_began_made_no_success(tmp_path, capfd):
    """By a signal that nobody sent to `launch run`, say."""
    assert run_once(launch(tmp_path, "early = os._exit(0)"), os.environ)[0] == 1
    assert "it ended before its first step" in last_line(capfd.readouterr().err)


def test_bad_input_that_a_rank_has_told_of_is_not_told_twice(tmp_path, capfd):
    words = "early = print('error: no such thing', file=sys.stderr); sys.exit(2)"
    assert run_once(launch(tmp_path, words), os.environ)[0] == 2
    assert capfd.readouterr().err == "before it has a log\nerror: no such thing\n"


STOPPED = "import threading; asked = threading.Event(); kept.heed(lambda why: (print('asked by', why), asked.set())); "
STOPPED += "print('ready', flush=True); (folder / 'ready').touch(); asked.wait(); print('saved'); "
STOPPED += "ends('stopped')"
SLOW = STOPPED.replace("print('saved')", "time.sleep(0.5); print('saved')")
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
        r"print('\r\x1b[2Ka line\nstep 3\n', end=''); ends('finished')"
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


def receipt_of(folder: Path, rank: int = 0) -> str:
    return json.loads((folder / "receipts" / f"rank-{rank:05d}.json").read_text())["state"]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("place", ["a pipe that nobody reads any more", "/dev/full"])
def test_a_run_is_saved_where_there_is_no_place_to_print(tmp_path, place):
    """A Ctrl-C ends the `tee` behind a run first."""
    with Path("/dev/full").open("wb") as full:
        process = caller(tmp_path, SLOW, stderr=full if place == "/dev/full" else subprocess.PIPE)
    wait_for(tmp_path / "ready")
    if process.stderr is not None:
        process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert receipt_of(tmp_path) == "stopped"


def test_bad_input_is_code_2_where_there_is_no_place_to_say_so():
    argv = [sys.executable, "-m", "launch", "run", "nowhere.toml"]
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run(argv, cwd=ROOT, stderr=full).returncode == 2


@pytest.mark.parametrize("place", ["Watch.look", "Lifelines.serve"])
def test_a_fault_of_launch_run_itself_lets_ranks_save_first(tmp_path, place):
    fault = "real = running.PLACE\ndef fault(*words):\n    if not Path(sys.argv[3], 'ready').exists():\n"
    fault += "        return real(*words)\n    raise RuntimeError('of its own')\nrunning.PLACE = fault\n"
    argv = [sys.executable, "-c", CALLER.replace("argv =", fault.replace("PLACE", place) + "argv =")]
    done = subprocess.run([*argv, *launch(tmp_path, SLOW).argv[2:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "RuntimeError: of its own" in done.stderr
    assert "saved\n" in done.stderr
    assert receipt_of(tmp_path) == "stopped"


def test_ranks_without_their_launcher_save_and_stop(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("launch.running.NOTICE_SECONDS", 0.2)
    stat = "pathlib.Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1]"
    killed = SLOW.replace("asked.wait()", f"os.kill(int({stat}), signal.SIGKILL); asked.wait()")
    assert run_once(launch(tmp_path, killed), os.environ) == (137, False)
    told = capfd.readouterr().err
    assert "asked by the end of what had started this rank\n" in told
    assert "(code 137): what had started the ranks (deepspeed) was killed by SIGKILL while they ran" in last_line(told)
    assert "so they saved and stopped" in last_line(told)
    assert receipt_of(tmp_path) == "stopped"


def test_a_line_without_an_end_comes_in_pieces(tmp_path, capfd):
    endless = "os.write(1, b'x' * 300_000); ends('finished')"
    assert run_once(launch(tmp_path, "ends('finished')", endless), os.environ)[0] == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank 1] x")]
    assert len(lines) == 5
    assert sum(line.count("x") for line in lines) == 300_000
    assert (tmp_path / "logs" / "attempt-1" / "rank-00001.log").read_text().count("x") == 300_000


def test_the_log_of_a_terminal_does_not_keep_a_line_without_an_end(tmp_path):
    log = _Log(tmp_path / "log", of_terminal=True)
    for _ in range(100):
        log.write(b"\rstep 1" + b"." * 4096)
    assert len(log._unended) < 2**17
    log.write(b"\rstep 2\n" + b"x" * 2**17)
    assert (tmp_path / "log").read_bytes() == b"step 2\n" + b"x" * 2**17


class Lines:
    """The listening end for ranks 0 to 2, and connections to it."""

    def __init__(self) -> None:
        self.end = Lifelines("127.0.0.1", range(3))
        address, _, port = self.end.place.rpartition(":")
        self.place, self.identity = (address, int(port)), self.end.run_id.encode() + b"\n"
        self.open: list[socket.socket] = []

    def connect(self, words: bytes = b"", *, rank: int | None = None) -> socket.socket:
        """With `rank`, as its keeper does."""
        self.open.append(socket.create_connection(self.place))
        hello = json.dumps({"rank": rank, "host": "h", "pid": 1}).encode() + b"\n"
        self.open[-1].sendall((b"" if rank is None else self.identity + hello) + words)
        return self.open[-1]

    def serve_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline
            self.end.serve(0.05)


@pytest.fixture
def lines() -> Iterator[Lines]:
    opened = Lines()
    yield opened
    for connection in opened.open:
        connection.close()
    opened.end.close()


def test_strangers_are_not_taken_for_ranks(lines):
    hello = b'{"rank": 0, "host": "h", "pid": 1}\n'
    said = [
        b"GET / HTTP/1.0\r\n\r\n",
        b"x" * 32 + b"\n" + hello,
        b"[]\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        b"x" * 10_000,
    ]
    said += [lines.identity + words for words in (b"[" * 100_000 + b"\n", b"5\n", b'{"rank": 1e999}\n', b"{}\n")]
    said += [lines.identity + hello.replace(b"0", rank) for rank in (b"3", b"-1")]
    strangers = [lines.connect(words) for words in said]
    ours = lines.connect(rank=0)
    lines.serve_until(lambda: lines.end.connected and len(lines.end._lines) == 1)
    assert list(lines.end.known) == [0]
    for stranger in strangers:
        with suppress(ConnectionResetError):  # some of its words were not read
            assert stranger.recv(1) == b""
    ours.close()
    lines.serve_until(lambda: not lines.end.connected)
    assert lines.end.first_failure() is lines.end.known[0]


def test_a_rank_is_taken_once(lines):
    lines.connect(rank=0)
    lines.serve_until(lambda: lines.end.connected)
    impostor = lines.connect(b'{"code": 0, "state": "finished", "said": ""}\n', rank=0)
    lines.serve_until(lambda: len(lines.end._lines) == 1 and lines.end.serve(0.2) is None)
    with suppress(ConnectionResetError):
        assert impostor.recv(1) == b""
    assert lines.end.known[0].ended_at is None


@pytest.mark.parametrize("words", [b'{"code": 1e999, "said": ""}', b'{"code": 99999, "said": ""}', b"[" * 100_000])
def test_words_that_are_none_end_their_line_alone(lines, words):
    lines.connect(rank=1)
    lines.connect(words + b"\n", rank=0)
    lines.serve_until(lambda: len(lines.end.known) == 2 and len(lines.end._lines) == 1)
    assert lines.end.known[1].ended_at is None


def test_what_ranks_say_cannot_steer_a_terminal(lines):
    said = "a line\n\x1b]0;title\x07\x9b2J\u202eb\tc"
    lines.connect(json.dumps({"code": 1, "said": said}).encode() + b"\n", rank=0)
    lines.serve_until(lambda: any(one.failed for one in lines.end.known.values()))
    assert lines.end.known[0].said == "a line\n�]0;title��2J�b\tc"


def test_a_newcomer_that_has_left_hears_no_order(lines):
    lines.end.stop("the test")
    for rank in range(3):
        connection = lines.connect(rank=rank)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets
        connection.close()
    lines.connect(rank=None)
    lines.serve_until(lambda: len(lines.end._lines) == 1)


def test_strangers_leave_room_for_ranks(lines, monkeypatch):
    lines.end._most_strangers = 4
    for _ in range(20):
        lines.connect()
    lines.connect(rank=0)
    lines.serve_until(lambda: lines.end.connected)
    assert len(lines.end._lines) <= 5
    monkeypatch.setattr("launch.lifelines.STRANGER_SECONDS", 0.0)
    lines.serve_until(lambda: len(lines.end._lines) == 1)
    assert lines.end.connected


def test_a_receipt_that_is_told_counts_for_a_rank_on_another_machine_alone(tmp_path, capsys):
    told = {rank: Known(rank, "h", 1, attempt=1, state="finished", code=0, ended_at=1.0) for rank in (0, 1)}
    hosts = (Host("localhost", 1), Host("192.0.2.1", 1))
    launched = Launch((), {}, tmp_path, 2, {}, hosts)
    receipts = {0: {"state": "finished"}}
    assert End(0, True, 0, receipts, known=told).verdict(launched, {}) == 0
    assert End(0, True, 0, {}, known=told).verdict(launched, {}) == 1
    assert End(0, True, 0, receipts, known=told).verdict(Launch((), {}, tmp_path, 2, {}), {}) == 1
    assert End(0, True, 0, {**receipts, 1: {"state": "failed"}}, known=told).verdict(launched, {}) == 1
    assert End(0, True, 0, receipts, known={1: replace(told[1], state=None)}).verdict(launched, {}) == 1
    capsys.readouterr()
