"""Several real ranks in the suite, cheaply: processes with a real process group, started by a server that has
already imported torch and deepspeed, so that a launch costs a fraction of a second instead of several.

    results = run_ranks(2, case, argument, ...)      # case(ranks, argument, ...) on each; results in rank order

One launch may run as many cases as it likes; a case is any importable function whose result can be pickled. A rank
that raises fails the launch with its traceback; `start_ranks` gives the live processes, to be killed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeAlias

PRELOADED = ["deepspeed", "pretrain.train", "torch.utils.tensorboard"]

_server = mp.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)

Started: TypeAlias = list[tuple[ForkServerProcess, Connection]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(world_size: int, case: Callable[..., Any], *arguments: Any) -> Started:
    """Start `case(ranks, *arguments)` on every rank; returns each rank's process and the pipe its result comes by."""
    port = free_port()
    started = []
    for rank in range(world_size):
        receiver, sender = _server.Pipe(duplex=False)
        process = _server.Process(
            target=_rank_main, args=(rank, world_size, port, sender, case, arguments), daemon=True
        )
        process.start()
        sender.close()
        started.append((process, receiver))
    return started


def run_ranks(world_size: int, case: Callable[..., Any], *arguments: Any, timeout_seconds: float = 120) -> list[Any]:
    """The results of `case(ranks, *arguments)` in rank order. AssertionError with the first failure's traceback."""
    started = start_ranks(world_size, case, *arguments)
    try:
        pending = {pipe: rank for rank, (_, pipe) in enumerate(started)}
        results: list[Any] = [None] * world_size
        while pending:
            ready = wait(list(pending), timeout=timeout_seconds)
            assert ready, f"ranks {sorted(pending.values())} of {world_size} gave no result in {timeout_seconds} s"
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    started[rank][0].join(5)
                    raise AssertionError(f"rank {rank} died (exit code {started[rank][0].exitcode})") from None
                assert succeeded, f"rank {rank} failed:\n{value}"
                results[rank] = value
        return results
    finally:
        for process, pipe in started:
            if pipe in pending:
                process.kill()
            process.join(30)
            pipe.close()


def _rank_main(
    rank: int, world_size: int, port: int, sender: Connection, case: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    from pretrain.runtime import Ranks

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    os.chdir(tempfile.gettempdir())  # nothing may depend on where a rank was started
    try:
        outcome = (True, case(Ranks(rank, rank, world_size), *arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(
        pickle.dumps(outcome)
    )  # by value: a connection would share tensors by descriptors that die with us


def kill_ranks(started: Started) -> None:
    """SIGKILL every rank, as a lost machine would."""
    for process, _ in started:
        process.kill()
    for process, pipe in started:
        process.join(30)
        pipe.close()


def root() -> Path:
    return Path(__file__).resolve().parents[1]
