"""Training programs that take turns: each a group of rank processes that make a block of steps when told to, and tell
what it took. Between their turns they wait, so that what else the machine does meets all of them alike.

A rank calls `Turn.step_begins` before each step; results go to the parent as lines of its own stdout.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

MARK = "TURN "


class Turn:
    """Within a rank: its blocks of steps."""

    def __init__(self, block_steps: int) -> None:
        self.block_steps = block_steps
        self.losses: list[float] = []
        self._steps = 0
        self._began = (0.0, 0.0)

    def step_begins(self) -> None:
        """Behind a whole block: tell what it took, and wait for the next turn."""
        if self._steps % self.block_steps == 0:
            if self._steps:
                wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
                result = {"wall": wall, "cpu": cpu, "losses": self.losses}
                print(f"\n{MARK}{json.dumps(result)}", flush=True)
            self.losses = []
            if not sys.stdin.readline():
                os._exit(0)  # the parent has seen enough
            self._began = (time.perf_counter(), time.process_time())
        self._steps += 1


class Group:
    """The parent's view of one program's ranks, each a process of `script` with `arguments` on `threads` threads."""

    def __init__(self, script: str, arguments: Sequence[str], ranks: int, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the processes
        self._ranks = [
            subprocess.Popen(
                [sys.executable, script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env={
                    **os.environ,
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu",
                },
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()
        self._said.close()

    def turn(self) -> dict[str, Any]:
        """One block: seconds of the slowest rank, CPU seconds of all, the first rank's losses. SystemExit: one died."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [self._result(process) for process in self._ranks]
        return {
            "wall": max(result["wall"] for result in results),
            "cpu": sum(result["cpu"] for result in results),
            "losses": results[0]["losses"],
        }

    def _result(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return result
        self._said.seek(0)
        last = next((line for line in reversed(self._said.read().splitlines()) if line.strip()), "without a word")
        sys.exit(f"error: {Path(str(process.args[1])).name}: a rank ended: {last}")
