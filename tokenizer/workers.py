"""One function over a stream of batches in several threads or processes: in order, in bounded memory, with nobody left
behind.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tokenizer.model_file import TokenizerError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

_IN_FLIGHT = 2  # batches a worker: one it is at, one that waits for it

_work: Callable[[Any], Any] | None = None


def in_threads(work: Callable[[Batch], Result], batches: Iterable[Batch], threads: int) -> Iterator[Result]:
    """Yield work(batch) for each batch, in their order; at most two batches or results a thread are held. An error of
    `work` comes through as it is. The threads end when the iterator ends, is closed or dropped, after the batches they
    are at.
    """
    yield from _in_order(ThreadPoolExecutor(threads), work, batches, threads)


def in_processes(work: Callable[[Batch], Result], batches: Iterable[Batch], processes: int) -> Iterator[Result]:
    """As `in_threads`. `work` is pickled, once for each process, and batches and results are, too.

    Raises TokenizerError when a process dies, or when `work` raises (a TokenizerError as it is). The processes also end
    with this one, however it ends.

    Processes start afresh (`spawn`): a fork would copy locks that other threads hold. A script that gets here needs
    `if __name__ == "__main__":`.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(work,))
    try:
        yield from _in_order(pool, _do, batches, processes)
    except BrokenProcessPool as error:
        raise TokenizerError(
            f"one of {processes} worker processes died: take fewer if memory is short; a script that starts them needs "
            '`if __name__ == "__main__":`'
        ) from error


def _in_order(
    pool: Executor, work: Callable[[Batch], Result], batches: Iterable[Batch], workers: int
) -> Iterator[Result]:
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(work, batch))
            if len(waiting) >= _IN_FLIGHT * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and it ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker calls this"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _do(batch: Any) -> Any:
    assert _work is not None, "the pool starts every worker with _start"
    try:
        return _work(batch)
    except TokenizerError:
        raise
    except Exception as error:  # whatever it is, it must be picklable and name its kind
        raise TokenizerError(f"a worker process failed: {type(error).__name__}: {error}") from error
