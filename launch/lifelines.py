"""The lines between `launch run` and the keepers of its ranks: who runs where, and how each ended (pretrain/keeper.py).

One TCP connection a rank, which the kernels of both sides close at once when a process dies; where the way between is
cut, keepalive tells within a minute. The first line a keeper sends is the run's id, all others are JSON, one a line.

Anybody can connect, and whoever does so can't harm a run: nothing is parsed before the id has come, lines and the
number of strangers are bounded, and a rank is taken once. How the id gets to the ranks so that their user alone can
read it is told in run_id.py. Who had it could end the run, as a rank's failure does, but not have it called a success:
that is what receipts in the run directory say (see ending.py).
"""

from __future__ import annotations

import errno
import hmac
import json
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

VARIABLE = "ZEROHALF_LAUNCHER"
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 5))
MOST_BYTES = 2**18  # of one message; more is none of ours
STRANGER_SECONDS = 20.0  # for a line's first words; a keeper's follow at once
STRANGERS = 256  # at a time; when there are more, the oldest go
FULL_SECONDS = 0.05  # between two tries to take one in where no file can be opened
RESERVED_FILES = 128  # for all else that this command opens
WELL = ("stopped", "finished")


@dataclass
class Known:
    """What is known of one rank."""

    rank: int
    host: str
    pid: int
    attempt: int | None = None
    state: str | None = None  # of its receipt, as the rank itself says
    code: int | None = None  # how it ended, less than 0 for a signal; None while it runs, or if nobody knows
    said: str = ""  # last
    ended_at: float | None = None
    silent: bool = False  # its machine or the way to it is gone

    @property
    def failed(self) -> bool:
        """Also where it left with code 0 in the middle of an attempt."""
        left = self.attempt is not None and self.state not in WELL
        return self.ended_at is not None and (self.code != 0 or left)


@dataclass
class _Line:
    """One connection."""

    since: float
    unread: bytes = b""
    is_ours: bool = False  # the id has come
    rank: Known | None = None


class Lifelines:
    """The listening end. Nothing happens but within `serve`."""

    def __init__(self, address: str, ranks: Collection[int]) -> None:
        """`address` is where the `ranks` find this machine; it listens on all of its addresses if others have to."""
        self._listener = socket.create_server(("" if address != "127.0.0.1" else address, 0), backlog=1024)
        self._listener.setblocking(False)
        self._expected = ranks
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = most_files - RESERVED_FILES - len(ranks) if most_files != resource.RLIM_INFINITY else STRANGERS
        self._most_strangers = max(1, min(STRANGERS, room))
        self.run_id = secrets.token_hex(16)  # so that ranks of another run are not taken for ours
        self.place = f"{address}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[socket.socket, _Line] = {}  # the oldest first
        self._order: str | None = None  # what newcomers are told, too
        self.known: dict[int, Known] = {}  # by rank

    @property
    def connected(self) -> bool:
        return any(line.rank is not None for line in self._lines.values())

    def first_failure(self) -> Known | None:
        """The rank that failed before all others; None where none did."""
        failed = [one for one in self.known.values() if one.failed]
        return min(failed, key=lambda one: one.ended_at or 0.0, default=None)

    def serve(self, seconds: float) -> None:
        """Wait so long at most for what keepers have to say, and note it."""
        for key, _ in self._selector.select(seconds):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif connection in self._lines:  # else it was dropped meanwhile
                self._read(connection)
        now = time.monotonic()
        for connection, line in list(self._lines.items()):
            if line.rank is None and now - line.since > STRANGER_SECONDS:
                self._drop(connection)

    def stop(self, reason: str) -> None:
        """All ranks are asked to save and stop, those that come later as well."""
        self._tell({"stop": reason})

    def end(self) -> None:
        """All ranks are ended at once."""
        self._tell({"end": True})

    def take_no_more(self) -> None:
        """Who waits to be taken in hears that this end is gone."""
        with suppress(KeyError, ValueError):  # it is closed
            self._selector.unregister(self._listener)
        self._listener.close()
        for connection in [connection for connection, line in self._lines.items() if line.rank is None]:
            self._drop(connection)

    def close(self) -> None:
        for connection in [self._listener, *self._lines]:
            connection.close()
        self._selector.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._order = json.dumps(message) + "\n"
        for connection, line in self._lines.items():
            if line.rank is not None:
                self._send(connection, self._order)

    def _send(self, connection: socket.socket, order: str) -> None:
        with suppress(OSError):  # it is gone, which its reading end tells of
            connection.sendall(order.encode())

    def _accept(self) -> None:
        strangers = [connection for connection, line in self._lines.items() if line.rank is None]
        if len(strangers) >= self._most_strangers:
            self._drop(strangers[0])
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it stays where it is until there is room
                time.sleep(FULL_SECONDS)
            return
        self._lines[connection] = _Line(time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        self._read(connection)  # a keeper's first words most often are there

    def _read(self, connection: socket.socket) -> None:
        try:
            block = connection.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection, silent=True)
            return
        line = self._lines[connection]
        if not block:
            self._drop(connection)
            return
        *messages, line.unread = (line.unread + block).split(b"\n")
        for message in messages:
            try:
                self._note(connection, line, message)
            except Exception:  # whatever a stranger's words lead to, it is the end of its line and of nothing else
                self._drop(connection)
                return
        if len(line.unread) > (MOST_BYTES if line.is_ours else len(self.run_id)):
            self._drop(connection)

    def _note(self, connection: socket.socket, line: _Line, words: bytes) -> None:
        """Any error: it is none of ours."""
        if not line.is_ours:
            line.is_ours = hmac.compare_digest(words, self.run_id.encode())
            if not line.is_ours:
                raise ValueError("another run's rank, or a stranger")
            return
        message = json.loads(words)
        one = line.rank
        if one is None:
            one = Known(int(message["rank"]), readable(str(message["host"])), int(message["pid"]))
            if one.rank not in self._expected or one.rank in self.known:
                raise ValueError("no rank of this run, or one that is there")
            line.rank = self.known[one.rank] = one
            if self._order is not None:
                self._send(connection, self._order)
        elif "attempt" in message:
            one.attempt = int(message["attempt"])
        elif "code" in message:
            code, said, state = int(message["code"]), readable(str(message["said"])), message.get("state")
            if not -128 < code < 256:
                raise ValueError("no exit code")
            one.code, one.said, one.state, one.ended_at = code, said, state, time.monotonic()

    def _drop(self, connection: socket.socket, *, silent: bool = False) -> None:
        """It has ended, with or without a last word, or nothing is heard of it any more."""
        self._selector.unregister(connection)
        connection.close()
        one = self._lines.pop(connection).rank
        if one is not None and one.ended_at is None:
            one.ended_at, one.silent = time.monotonic(), silent


def readable(text: str) -> str:
    """A text as a terminal may be given it: with a mark for each letter that would not be one there."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
