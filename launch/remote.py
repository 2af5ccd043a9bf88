"""One command on every node at once: over the system's ssh, or directly where a name means this machine.

Each node is given a short script on the standard input of `sh`, so that no login shell has to agree on quoting and no
value of the environment shows in a list of processes. The same input is the leash: when it ends (this command has
died, or it has waited long enough) the script ends what it started; where the line is cut so that nobody hears of it,
`timeout` does. Nothing ever asks: a password or an unknown host key is a reason, not a prompt.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from launch.hosts import Host

CONNECT_SECONDS = 10
KILL_SECONDS = 5  # between SIGTERM and SIGKILL
OUTPUT_BYTES = 4 * 2**20  # of each stream; what comes behind it is read and dropped
REASON_LETTERS = 300  # of a reason
TIMED_OUT = (124, 128 + 9)  # what timeout(1) ends with: after SIGTERM, after SIGKILL
HERE = b"\x1ezerohalf\x1e\n"  # stands before the command's own output: it was reached, and profiles are done talking

# A master connection of the user's own configuration is used where it is open; one made here would never close stderr.
SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ControlMaster=no"]
SSH += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]

# In braces, so that the shell has read all of it before `cat` waits on the same input. `timeout` makes a process group
# of its own and passes signals on to it; one that was stopped hears of them when it goes on.
SCRIPT = """{{
printf '\\036zerohalf\\036\\n'
cd {directory} || exit
{exports}
bound=$(command -v timeout) && bound="$bound -k {kill} {seconds}"
exec 3<&0 </dev/null
$bound {command} 3<&- & job=$!
{{ cat <&3; kill "$job"; kill -CONT "$job"; }} >/dev/null 2>&1 & leash=$!
wait "$job"; code=$?
kill "$leash"
exit "$code"
}}
"""


@dataclass(frozen=True)
class Answer:
    """What came of a command on one node. `code` is None where there is none, and then `unreachable` says why.

    `asked_at` and `ended_at`, of its output: by this machine's clock, in seconds since the epoch.
    """

    code: int | None
    stdout: str = ""
    stderr: str = ""
    unreachable: str | None = None
    asked_at: float = field(default=0.0, compare=False)
    ended_at: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        return self.code == 0

    def reason(self) -> str:
        """Why it is not ok, in one line: why the node was not reached, or the last line of what the command said."""
        if self.unreachable is not None:
            return self.unreachable
        return _last_line(self.stderr) or _last_line(self.stdout) or f"it ended with code {self.code} and said nothing"


def on_each(
    hosts: Sequence[Host], argv: Sequence[str], *, directory: Path, environment: Mapping[str, str], timeout: float
) -> dict[str, Answer]:
    """Run one command on every node in parallel; the answers by the names of the hosts, in their order.

    `environment` is added to the node's own. A node that gives no answer within `timeout` seconds is unreachable, and
    what was started there is ended. Programs on the nodes see an empty standard input.
    """
    return run_on({host.name: argv for host in hosts}, directory=directory, environment=environment, timeout=timeout)


def run_on(
    commands: Mapping[str, Sequence[str]], *, directory: Path, environment: Mapping[str, str], timeout: float
) -> dict[str, Answer]:
    """As `on_each`, with a command of its own for each node."""
    calls: dict[str, _Call] = {}
    with ThreadPoolExecutor(max(len(commands), 1)) as pool:  # a name server that is silent is so for all at once
        here = dict(zip(commands, pool.map(is_here, commands), strict=True))
    deadline = time.monotonic() + timeout
    try:
        for name, argv in commands.items():
            calls[name] = _Call(name, here[name], _script(argv, directory, environment, timeout))
        return {name: call.answer(deadline, timeout) for name, call in calls.items()}
    finally:  # all at once, also where a Ctrl-C came in between
        for call in calls.values():
            call.let_go()
        for call in calls.values():
            call.end()


def _last_line(said: str) -> str:
    """The end of what was said, cut where nobody would read it; "" where nothing was."""
    line = (said.strip().splitlines() or [""])[-1].strip()
    return line if len(line) <= REASON_LETTERS else f"{line[:REASON_LETTERS]}…"


def is_here(name: str) -> bool:
    """Whether a host's name means this machine: its own name, or one that resolves to an address of its own."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False  # perhaps a name that only ssh's own configuration knows
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # only an address of this machine can be bound
            return True
    return False


def _script(argv: Sequence[str], directory: Path, environment: Mapping[str, str], timeout: float) -> str:
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    return SCRIPT.format(
        directory=shlex.quote(str(directory)),
        exports=exports,
        kill=KILL_SECONDS,
        seconds=f"{timeout:.3f}",
        command=shlex.join(argv),
    )


class _Call:
    """A command that runs on one node."""

    def __init__(self, name: str, here: bool, script: str) -> None:
        command = ["sh"] if here else [*SSH, "--", name, "sh"]
        self.missing = shutil.which(command[0]) is None
        if self.missing:
            return
        self.asked_at = time.time()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.output, self.errors = _Reader(self.process.stdout), _Reader(self.process.stderr)
        with suppress(BrokenPipeError):  # ssh has already said why
            self.process.stdin.write(script.encode())
            self.process.stdin.flush()

    def answer(self, deadline: float, timeout: float) -> Answer:
        if self.missing:
            return Answer(None, unreachable="ssh is not installed on this machine: install openssh-client")
        with suppress(subprocess.TimeoutExpired):
            # The node's own clock began a connection's time later.
            self.process.wait(max(deadline + CONNECT_SECONDS - time.monotonic(), 0))
        code = self.process.poll()
        stdout, stderr = self.output.text(), self.errors.text()
        noise, reached, stdout = stdout.partition(HERE.decode())
        if code is None or (reached and code in TIMED_OUT and time.monotonic() >= deadline):
            return Answer(None, stdout, stderr, f"no answer within {timeout:g} s")
        if not reached:
            said = _last_line(stderr) or _last_line(noise)
            return Answer(None, stdout, stderr, said or f"ssh ended with code {code}")
        return Answer(code, stdout, stderr, None, self.asked_at, self.output.ended_at)

    def let_go(self) -> None:
        """The end of the leash: what still runs there is told to end."""
        if not self.missing and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self) -> None:
        if self.missing:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS + 1)
        self.process.kill()
        self.process.wait()


class _Reader:
    """A stream read to its end by a thread of its own, so that no node waits for a reader; its beginning is kept."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.kept = bytearray()
        self.ended_at = 0.0
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while block := stream.read1(65_536):  # type: ignore[attr-defined]
                self.kept += block[: OUTPUT_BYTES - len(self.kept)]
        self.ended_at = time.time()

    def text(self) -> str:
        self.thread.join(1)  # something that it left behind may hold the stream open
        return bytes(self.kept).decode(errors="replace")
