"""The lines between `launch run` and the keepers of its ranks: who runs where, and how each ended (pretrain/keeper.py).

One TCP connection a rank, which the kernels of both sides close at once when a process dies; where the way between is
cut, keepalive tells within a minute. Messages are JSON, one a line.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

VARIABLE = "ZEROHALF_LAUNCHER"
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 5))
MOST_BYTES = 2**20  # of one message; more is none of ours


@dataclass
class Known:
    """What is known of one rank."""

    rank: int
    host: str
    pid: int
    attempt: int | None = None
    code: int | None = None  # how it ended, less than 0 for a signal; None while it runs, or if nobody knows
    said: str = ""  # last
    ended_at: float | None = None
    silent: bool = False  # its machine or the way to it is gone

    @property
    def failed(self) -> bool:
        return self.ended_at is not None and self.code != 0


class Lifelines:
    """The listening end. Nothing happens but within `serve`."""

    def __init__(self, address: str) -> None:
        """`address` is where the ranks find this machine; it listens on all of its addresses if others have to."""
        self._listener = socket.create_server(("" if address != "127.0.0.1" else address, 0), backlog=1024)
        self._listener.setblocking(False)
        self._id = secrets.token_hex(8)  # so that ranks of another run are not taken for ours
        self._place = f"{address}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._heard: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, Known] = {}
        self._order: str | None = None  # what newcomers are told, too
        self.known: dict[int, Known] = {}  # by rank; the newest of each

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: f"{self._place}/{self._id}"}

    @property
    def connected(self) -> bool:
        return bool(self._ranks)

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
            else:
                self._read(connection)

    def stop(self, reason: str) -> None:
        """All ranks are asked to save and stop, those that come later as well."""
        self._tell({"stop": reason})

    def end(self) -> None:
        """All ranks are ended at once."""
        self._tell({"end": True})

    def close(self) -> None:
        for connection in [self._listener, *self._heard]:
            connection.close()
        self._selector.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._order = json.dumps(message) + "\n"
        for connection in self._ranks:
            with suppress(OSError):  # it is gone, which its reading end tells of
                connection.sendall(self._order.encode())

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
            self._heard[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            block = connection.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection, silent=True)
            return
        if not block or len(self._heard[connection]) > MOST_BYTES:
            self._drop(connection)
            return
        *lines, self._heard[connection] = (self._heard[connection] + block).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                self._note(connection, message)
            except (ValueError, KeyError, TypeError):
                self._drop(connection)  # a stranger
                return

    def _note(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        one = self._ranks.get(connection)
        if one is None:
            if message["id"] != self._id:
                raise ValueError("another run's rank")
            one = Known(int(message["rank"]), str(message["host"]), int(message["pid"]))
            self._ranks[connection] = self.known[one.rank] = one
            if self._order is not None:
                connection.sendall(self._order.encode())
        elif "attempt" in message:
            one.attempt = int(message["attempt"])
        elif "code" in message:
            one.code, one.said, one.ended_at = int(message["code"]), str(message["said"]), time.monotonic()

    def _drop(self, connection: socket.socket, *, silent: bool = False) -> None:
        """It has ended, with or without a last word, or nothing is heard of it any more."""
        self._selector.unregister(connection)
        connection.close()
        self._heard.pop(connection, None)
        one = self._ranks.pop(connection, None)
        if one is not None and one.ended_at is None:
            one.ended_at, one.silent = time.monotonic(), silent
