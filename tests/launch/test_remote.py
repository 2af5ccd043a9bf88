"""One command on every node: here without ssh, but for names that do not exist; over ssh in test_check_nodes.py."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.hosts import Host
from launch.remote import OUTPUT_BYTES, REASON_LETTERS, Answer, is_here, on_each, run_on
from tests.ranks import root

HERE = (Host("localhost", 1),)
LONG = 600.0  # nothing here takes so long


def once(*argv: str, directory: Path = Path("/"), environment: dict[str, str] | None = None) -> Answer:
    return on_each(HERE, argv, directory=directory, environment=environment or {}, timeout=LONG)["localhost"]


def test_what_a_command_is_given_and_what_it_answers(tmp_path: Path) -> None:
    value = "a 'b' \"c\" $HOME `d` \\ \n道!"
    said = "import os, sys; print(os.getcwd(), os.environ['V'], repr(sys.stdin.read()), sys.argv[1:], end='')"
    argv = [sys.executable, "-c", said + "; print('no', file=sys.stderr); sys.exit(3)", "x y", "$z", "it's"]
    answer = once(*argv, directory=tmp_path, environment={"V": value, "PYTHONUTF8": "1"})
    words = ["x y", "$z", "it's"]
    assert answer == Answer(3, f"{tmp_path} {value} '' {words}", "no\n")
    assert not answer.ok
    assert answer.reason() == "no"


def test_no_value_shows_in_a_list_of_processes() -> None:
    seen = "import pathlib; said = [path.read_bytes() for path in pathlib.Path('/proc').glob('[0-9]*/cmdline')]"
    look = f"{seen}; print(b'hid' + b'den' in b''.join(said))"
    answer = once(sys.executable, "-c", look, environment={"V": "hidden"})
    assert answer.stdout == "False\n"


def test_what_cannot_run_is_told() -> None:
    missing = once("true", directory=Path("/nowhere"))
    assert missing.code not in (0, None)
    assert "/nowhere" in missing.reason()
    assert (once("no-such-program").code, "no-such-program" in once("no-such-program").reason()) == (127, True)
    long = once("sh", "-c", "printf %09999d 0 >&2; exit 1").reason()
    assert long == "0" * REASON_LETTERS + "…"
    assert once("false").reason() == "it ended with code 1 and said nothing"


def test_hosts_are_asked_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for what the other leaves: one after the other, neither would ever end."""
    wait = "touch {0}; while ! test -e {1}; do sleep 0.01; done; echo {0}"
    commands = {name: ["sh", "-c", wait.format(*marks)] for name, marks in
                (("localhost", "ab"), (socket.gethostname(), "ba"))}  # fmt: skip
    answers = run_on(commands, directory=tmp_path, environment={}, timeout=LONG)
    assert [(answer.code, answer.stdout) for answer in answers.values()] == [(0, "a\n"), (0, "b\n")]


def test_output_is_kept_up_to_a_bound_and_never_waited_for() -> None:
    answer = once("head", "-c", str(3 * OUTPUT_BYTES), "/dev/zero")
    assert answer.code == 0
    assert OUTPUT_BYTES // 2 < len(answer.stdout) <= OUTPUT_BYTES


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that refuse SIGTERM too."""
    monkeypatch.setattr("launch.remote.KILL_SECONDS", 0.5)
    script = f"trap '' TERM; sleep 600 & echo $! $$ >{tmp_path}/pids; wait; sleep 600"
    answers = on_each(HERE, ["sh", "-c", script], directory=tmp_path, environment={}, timeout=0.5)
    assert answers["localhost"].code is None
    assert answers["localhost"].unreachable == "no answer within 0.5 s"
    assert answers["localhost"].reason() == "no answer within 0.5 s"
    wait_until_gone(tmp_path / "pids")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_one_who_asked(number: signal.Signals, tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; wait"
    asking = (
        "from pathlib import Path; from launch.hosts import Host; from launch.remote import on_each; "
        f"on_each([Host('localhost', 1)], ['sh', '-c', {script!r}], directory=Path('/'), environment={{}}, timeout=600)"
    )
    process = subprocess.Popen([sys.executable, "-c", asking], cwd=root(), stderr=subprocess.DEVNULL)
    while not (tmp_path / "pids").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() != 0
    wait_until_gone(tmp_path / "pids")


def wait_until_gone(pids: Path) -> None:
    """Zombies are gone: in a container nobody may bury them."""
    for pid in pids.read_text().split():
        while (stat := Path(f"/proc/{pid}/stat")).exists():
            try:
                if stat.read_text().rpartition(")")[2].split()[0] in ("Z", "X"):
                    break
            except OSError:
                break
            time.sleep(0.01)


def test_a_host_that_does_not_exist_is_a_reason() -> None:
    hosts = (*HERE, Host("nowhere.invalid", 1))
    answers = on_each(hosts, ["true"], directory=Path("/"), environment={}, timeout=LONG)
    assert list(answers) == ["localhost", "nowhere.invalid"]
    assert answers["localhost"].ok
    assert "nowhere.invalid" in answers["nowhere.invalid"].reason()
    assert answers["nowhere.invalid"].unreachable is not None


def test_without_ssh_that_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sh", "cat", "true"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = (*HERE, Host("nowhere.invalid", 1))
    answers = on_each(hosts, ["true"], directory=Path("/"), environment={}, timeout=LONG)
    assert answers["localhost"].ok  # without timeout(1), too
    assert "install openssh-client" in answers["nowhere.invalid"].reason()


def test_which_names_mean_this_machine() -> None:
    assert all(map(is_here, ("localhost", "127.0.0.1", "127.1.2.3", "::1", socket.gethostname())))
    assert not any(map(is_here, ("nowhere.invalid", "198.51.100.7", "x" * 300, "me@localhost")))
