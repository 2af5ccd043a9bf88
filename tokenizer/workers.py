"""One function over a stream of batches in several processes: in order, in bounded memory, with nobody left behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tokenizer.model_file import TokenizerError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

_IN_FLIGHT = 2  # batches a process: one it is at, one that waits for it

_work: Callable[[Any], Any] | None = None


def in_processes(work: Callable[[Batch], Result], batches: Iterable[Batch], processes: int) -> Iterator[Result]:
    """Yield work(batch) for each batch, in their order. `work` is pickled, once for each process.

    Memory here: two batches or results a process. Raises TokenizerError when a process dies, or when `work` raises
    (a TokenizerError as it is). The processes end when the iterator ends, is closed or dropped, after the batches
    they are at; and with this process, however it ends.

    Processes start afresh (`spawn`): a fork would copy locks that other threads hold. A script that gets here needs
    `if __name__ == "__main__":`.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(work,))
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_do, batch))
            if len(waiting) >= _IN_FLIGHT * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise TokenizerError(
            f"one of {processes} worker processes died: take fewer if memory is short; a script that starts them needs "
            '`if __name__ == "__main__":`'
        ) from error
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
