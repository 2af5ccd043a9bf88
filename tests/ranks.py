"""Several real ranks in the suite, cheaply: processes with a real process group, started by a server that has
already imported torch and deepspeed, so that a launch costs a fraction of a second instead of several.

    results = run_ranks(2, case, argument, ...)      # case(ranks, argument, ...) on each; results in rank order

One launch may run as many cases as it likes; a case is any importable function whose result can be pickled. A rank
that raises fails the launch with its traceback; `live_ranks` gives the live processes, to be watched and killed.

No time is limited here: how long ranks take is the machine's affair, and pytest ends a test that hangs.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeAlias

server = mp.get_context("forkserver")
server.set_forkserver_preload(["tests.preloaded"])

Started: TypeAlias = list[tuple[ForkServerProcess, Connection]]


@contextmanager
def live_ranks(world_size: int, case: Callable[..., Any], *arguments: Any) -> Iterator[Started]:
    """`case(ranks, *arguments)` on every rank: each rank's process, and the pipe its result comes by.

    What still runs at the end gets SIGKILL, as when a machine is lost.
    """
    from torch.distributed import TCPStore

    # The ranks meet at a store that stands here already: a port looked up now and taken later could be lost meanwhile.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: Started = []
    try:
        for rank in range(world_size):
            receiver, sender = server.Pipe(duplex=False)
            process = server.Process(
                target=_rank_main, args=(rank, world_size, store.port, sender, case, arguments), daemon=True
            )
            process.start()
            sender.close()
            started.append((process, receiver))
        yield started
    finally:
        for process, _ in started:
            process.kill()
        for process, pipe in started:
            process.join()
            pipe.close()


def run_ranks(world_size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of `case(ranks, *arguments)` in rank order. AssertionError with the first failure's traceback."""
    with live_ranks(world_size, case, *arguments) as started:
        return results_of(started)


def results_of(started: Started) -> list[Any]:
    """What the ranks' cases return, in rank order, when all have ended."""
    pending = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    results: list[Any] = [None] * len(started)
    while pending:
        for pipe in wait(list(pending)):
            rank = pending.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                started[rank][0].join()
                raise AssertionError(f"rank {rank} died (exit code {started[rank][0].exitcode})") from None
            assert succeeded, f"rank {rank} failed:\n{value}"
            results[rank] = value
    for process, _ in started:
        process.join()
    return results


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
        TORCHELASTIC_USE_AGENT_STORE="True",  # torch: the first rank too finds the store there, and makes none
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


def root() -> Path:
    return Path(__file__).resolve().parents[1]
