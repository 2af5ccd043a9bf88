"""What stands beside a rank that `launch run` has started: it keeps the rank's log, and ends it when nobody watches.

`keep` divides the process in two. The child goes on as the rank, its output in a pipe; the parent, the keeper, passes
the output on to where it went before, `[rank 1]` before each line but for the first rank, and into
RUN/logs/attempt-N/rank-00001.log. It holds a connection to `launch run`, whose kernel tells it at once, and however
that happens, when `launch run` dies; and the other way round. Where the line between them is cut, keepalive tells both
within a minute. No file has to be shared for it, and no rank has to answer: it may be busy, or stopped.

Lines go over the connection, the first the run's id, the others JSON: from here who this is, `{"attempt": N}`, and at
the end how it ended, what its receipt says and what the rank said last; from there `{"stop": REASON}` or
`{"end": true}`. It ends as the rank did, code and signal.

Imports what every Python has, since it stands there before anything heavy is loaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# Of the `launch run` that started this rank ADDRESS:PORT/ID, or ADDRESS:PORT//PATH where PATH.RANK holds the id.
VARIABLE = "ZEROHALF_LAUNCHER"
CONNECT_SECONDS = 10.0
# Behind the death of `launch run`, to save and stop; behind a cut line, where other ranks are hardly to be reached.
ORPHAN_SECONDS, CUT_SECONDS = 600.0, 30.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 5))
TAIL_BYTES = 16 * 2**10  # of what the rank said last
LONGEST_LINE = 2**16  # longer ones are passed on in pieces
EARLY_BYTES = 2**20  # of what it said before it had a log
PIPE_BYTES = 4096  # so that a rank whose output nobody reads stands still soon, as without a keeper
LOOK_SECONDS = 0.5
# Behind the rank's end: processes of its own may hold its output open, and whoever reads ours may be slow.
LEFT_OPEN_SECONDS, UNREAD_SECONDS = 1.0, 30.0
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")  # a terminal's control sequences (ECMA-48)


class Kept:
    """The rank's side: what it tells its keeper, and hears from it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def begins(self, attempt: int, log: Path) -> None:
        """The attempt has its number and the rank a log from here on; what it said before stands at its beginning."""
        self._connection.sendall(_line({"attempt": attempt, "log": str(log.resolve())}))

    def ended(self, state: str) -> None:
        """What the rank's receipt says, for a `launch run` that does not see it."""
        self._connection.sendall(_line({"state": state}))

    def heed(self, ask: Callable[[str], None]) -> None:
        """Call `ask(reason)`, on a thread, when `launch run` wants this rank to stop."""

        def listen() -> None:
            for line in self._connection.makefile():
                ask(json.loads(line)["stop"])

        threading.Thread(target=listen, name="keeper", daemon=True).start()


def keep(environ: Mapping[str, str]) -> Kept | None:
    """Divide this process, which has one thread yet. Returns in the rank; None without a `launch run` to speak to.

    Exits with code 1 where that has died meanwhile: nobody would watch this rank.
    """
    launcher = environ.get(VARIABLE)
    if launcher is None or "RANK" not in environ:
        return None
    rank = int(environ["RANK"]) if environ["RANK"].isdecimal() else 0
    ours, its = socket.socketpair()
    on_terminal = rank == 0 and os.isatty(2)
    reading, writing = _terminal() if on_terminal else _pipe()
    sys.stdout.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        if sys.platform == "linux":  # no rank without its keeper
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        ours.close()
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        return Kept(its)
    its.close()
    os.close(writing)
    return Keeper(child, rank, reading, ours, on_terminal=on_terminal).watch(launcher)


class Keeper:
    """The parent's side of one rank."""

    def __init__(self, child: int, rank: int, reading: int, kept: socket.socket, *, on_terminal: bool) -> None:
        self.child = child
        self.rank = rank
        self.reading: int | None = reading
        self.kept = kept
        self.on_terminal = on_terminal
        self.launcher: socket.socket | None = None
        self.kill_at: float | None = None
        self.code: int | None = None  # as Popen tells it: less than 0 for a signal
        self.to_show = b""  # what is still to be written to where output went before
        self.state: str | None = None  # of its receipt
        self.unended = b""  # the beginning of a line whose end was not read yet
        self.log: _Log | None = None
        self.log_failed = False
        self.early = b""
        self.tail = b""
        self.heard: dict[socket.socket, bytes] = {}

    def watch(self, launcher: str) -> NoReturn:
        """To the rank's end, and then end as it did."""
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        self._connect(launcher)
        while self.code is None:
            self._look()
            self._reap()
            if self.code is None and self.kill_at is not None and time.monotonic() > self.kill_at:
                os.kill(self.child, signal.SIGKILL)
        self._finish(lambda: self.reading is not None or self.kept.fileno() >= 0, LEFT_OPEN_SECONDS)
        self._show(b"", last=True)
        said = _readable(self.tail).decode(errors="replace")
        self._tell({"code": self.code, "state": self.state, "said": said})
        self._finish(lambda: bool(self.to_show), UNREAD_SECONDS)
        if self.code < 0:
            with suppress(OSError):  # of SIGKILL, which nobody handles
                signal.signal(-self.code, signal.SIG_DFL)
            os.kill(os.getpid(), -self.code)
        os._exit(max(self.code, 0))

    def _finish(self, goes_on: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while goes_on() and time.monotonic() < until:
            self._look()

    def _connect(self, launcher: str) -> None:
        place, _, identity = launcher.partition("/")
        address, _, port = place.rpartition(":")
        try:
            identity = _taken(identity, self.rank)
        except OSError as error:
            self._leave(
                f"the file by which `launch run` would know it cannot be had: {error}: ranks stand on the hosts in the "
                "order of the host file"
            )
        try:
            self.launcher = socket.create_connection((address, int(port)), timeout=CONNECT_SECONDS)
        except ConnectionRefusedError:
            self._leave(f"`launch run`, at {place}, is gone: nobody would watch this rank")
        except (OSError, ValueError) as error:
            self._say(
                f"warning: rank {self.rank} of {socket.gethostname()} does not reach `launch run` at {place}: {error}; "
                "it would not notice when that dies\n"
            )
            return
        self.launcher.settimeout(None)
        self.launcher.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in KEEPALIVE:
            self.launcher.setsockopt(socket.IPPROTO_TCP, option, seconds)
        who = {"rank": self.rank, "host": socket.gethostname(), "pid": self.child}
        with suppress(OSError):
            self.launcher.sendall(identity.encode() + b"\n" + _line(who))

    def _leave(self, why: str) -> NoReturn:
        """No rank without somebody who watches it."""
        self._say(f"error: rank {self.rank}: {why}\n")
        os.kill(self.child, signal.SIGKILL)
        os._exit(1)

    def _look(self) -> None:
        """Wait a moment for any of the ends, and do what there is to do."""
        poll = select.poll()
        listened = {one.fileno(): one for one in (self.launcher, self.kept) if one is not None and one.fileno() >= 0}
        for descriptor in listened:
            poll.register(descriptor, select.POLLIN)
        if self.to_show:
            poll.register(2, select.POLLOUT)
        elif self.reading is not None:  # not before what was read is shown: the rank waits for whoever reads it
            poll.register(self.reading, select.POLLIN)
        for descriptor, events in poll.poll(LOOK_SECONDS * 1000):
            if descriptor == 2 and self.to_show:
                self._write()
            elif descriptor == self.reading:
                self._read()
            elif descriptor in listened and events:
                self._listen(listened[descriptor])
        if self.on_terminal and self.reading is not None:
            _copy_size(2, self.reading)

    def _read(self) -> None:
        assert self.reading is not None
        try:
            block = os.read(self.reading, PIPE_BYTES)
        except OSError:  # a terminal's way to say that nobody writes any more
            block = b""
        if not block:
            os.close(self.reading)
            self.reading = None
            return
        self._show(block)
        self.tail = (self.tail + block)[-TAIL_BYTES:]
        self._keep(block)

    def _show(self, block: bytes, *, last: bool = False) -> None:
        if self.rank == 0:
            self.to_show += block
            return
        *lines, self.unended = (self.unended + block).split(b"\n")
        if self.unended and (last or len(self.unended) >= LONGEST_LINE):
            lines.append(self.unended)
            self.unended = b""
        prefix = f"[rank {self.rank}] ".encode()
        self.to_show += b"".join(prefix + line + b"\n" for line in lines)

    def _write(self) -> None:
        """So much as a pipe takes at once when it takes anything."""
        if not self.to_show:
            return
        try:
            written = os.write(2, self.to_show[: select.PIPE_BUF])
        except OSError:  # whoever read it has left; the log goes on
            written = len(self.to_show)
        self.to_show = self.to_show[written:]

    def _say(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, text.encode())

    def _keep(self, block: bytes) -> None:
        if self.log is None:
            self.early = (self.early + block)[-EARLY_BYTES:]
            return
        try:
            if not self.log_failed:
                self.log.write(block)
        except OSError as error:
            self.log_failed = True
            self._say(f"warning: rank {self.rank}: no more of its log is kept: {error}\n")

    def _listen(self, connection: socket.socket) -> None:
        """Act on what `launch run` or the rank says, whole lines of it."""
        try:
            said = connection.recv(65_536)
        except OSError:  # keepalive's: no answer, for a minute
            self._lost("the line to `launch run` is cut", CUT_SECONDS)
            return
        if not said and connection is self.kept:
            self.kept.close()
            return
        if not said:
            self._lost("the end of `launch run`", ORPHAN_SECONDS)
            return
        *lines, self.heard[connection] = (self.heard.get(connection, b"") + said).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if connection is self.kept and "state" in message:
                self.state = message["state"]
            elif connection is self.kept:
                self._begin(message)
            elif "stop" in message:
                self._ask(message["stop"])
            elif "end" in message:
                self.kill_at = 0.0

    def _begin(self, message: Mapping[str, Any]) -> None:
        self._tell({"attempt": message["attempt"]})
        try:
            self.log = _Log(Path(message["log"]), of_terminal=self.on_terminal)
        except OSError as error:
            self._say(f"warning: rank {self.rank} has no log: {error}\n")
            return
        early, self.early = self.early, b""
        self._keep(early)

    def _lost(self, reason: str, seconds: float) -> None:
        """Nobody watches any more: save and stop, and end in any case when the seconds are over."""
        assert self.launcher is not None
        self.launcher.close()
        self.launcher = None
        self.kill_at = time.monotonic() + seconds
        self._ask(reason)

    def _ask(self, reason: str) -> None:
        with suppress(OSError):
            self.kept.sendall(_line({"stop": reason}))

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self.launcher is not None:
            with suppress(OSError):
                self.launcher.sendall(_line(message))

    def _reap(self) -> None:
        pid, status = os.waitpid(self.child, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.code is None:
            os.kill(self.child, number)


class _Log:
    """A rank's file; of what went to a terminal whole lines, as they stood there in the end."""

    def __init__(self, path: Path, *, of_terminal: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._of_terminal = of_terminal
        self._unended = b""

    def write(self, block: bytes) -> None:
        if self._of_terminal:
            whole, end, self._unended = (self._unended + block).rpartition(b"\n")
            block = _readable(whole) + end
            if len(self._unended) >= LONGEST_LINE:  # of a bar, what it wrote over goes; the rest is kept as it is
                _, bar, self._unended = self._unended.rstrip(b"\r").rpartition(b"\r")
                if not bar:
                    block, self._unended = block + _readable(self._unended), b""
        while block:
            block = block[os.write(self._descriptor, block) :]


def _taken(identity: str, rank: int) -> str:
    """The id, of which there is no copy behind this where a file holds it. OSError: it cannot be read."""
    if not identity.startswith("/"):
        return identity
    path = Path(f"{identity}.{rank}")
    text = path.read_text()
    path.unlink()
    return text


def _readable(text: bytes) -> bytes:
    """Each line as a terminal would show it in the end: without control sequences, and what a `\\r` wrote over."""
    lines = _CONTROL.sub(b"", text).split(b"\n")
    return b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def _terminal() -> tuple[int, int]:
    """A terminal as wide as the one of stderr, for the rank's progress bar; what is written to it comes unchanged."""
    reading, writing = pty.openpty()
    tty.setraw(writing)
    _copy_size(2, writing)
    return reading, writing


def _copy_size(source: int, target: int) -> None:
    with suppress(OSError):  # it went away
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * struct.calcsize("HHHH"))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
