"""Units done one after the other, in this process or in a pool of them; the receipts they leave are the result."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_pipeline.duplicates import hash_unit, read_repeats
from data_pipeline.filters import DuplicateFilter
from data_pipeline.locks import Span, hold_as_worker
from data_pipeline.progress import Counters
from data_pipeline.unit import Options, PrepareError, StopWork, Unit, UnitWork, Workplace
from tokenizer.codec import Codec

Pass = Literal["hash", "tokenize"]


@dataclass(frozen=True)
class Job:
    """What is to be done with each unit, and where."""

    what: Pass
    place: Workplace
    options: Options
    tokenizer: Path
    strict: bool
    span: Span


def run_units(job: Job, units: Sequence[Unit], workers: int, counters: Counters) -> None:
    """Do all units; the first error stops all, and whoever is told to stop (`counters`) raises StopWork.

    CorpusError, PrepareError, OSError: see `UnitWork`.
    """
    workers = min(workers, len(units))
    codec = Codec.load(job.tokenizer)
    codec.say_note()  # the workers keep silent
    if workers <= 1:
        _run(job, units, counters, codec)
        return
    arguments = (job, units, counters, os.getpid(), pickle.dumps(codec))
    context = multiprocessing.get_context("spawn")  # not fork: no lock and no thread of ours may leak into a worker
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=arguments)
    try:
        for done in as_completed([pool.submit(_work) for _ in range(workers)]):
            done.result()
    except BrokenProcessPool:
        raise PrepareError(
            f"one of {workers} workers died, perhaps for want of memory; start again to continue, with fewer --workers"
        ) from None
    except StopWork:
        raise PrepareError("the work was stopped") from None
    finally:
        counters.stop()
        pool.shutdown(cancel_futures=True)


def _run(job: Job, units: Sequence[Unit], counters: Counters, codec: Codec) -> None:
    """Take units nobody has taken until none are left."""
    mine = _units_not_taken(units, counters)
    if job.what == "hash":
        for unit in mine:
            hash_unit(job.place, unit, job.options, strict=job.strict, progress=counters)
    else:
        _tokenize(job, mine, counters, codec)


def _units_not_taken(units: Sequence[Unit], counters: Counters) -> Iterator[Unit]:
    while (number := counters.next_unit()) < len(units):
        yield units[number]


def _tokenize(job: Job, units: Iterator[Unit], counters: Counters, codec: Codec) -> None:
    """While one unit is read, a thread syncs and names the one before: hashing and the disk take a tenth of the time
    and no interpreter."""
    published: Future[dict[str, Any]] | None = None
    with ThreadPoolExecutor(1) as publisher:
        for unit in units:
            filters, expected = job.options.filters(), None
            if job.options.deduplicate:
                repeats, expected = read_repeats(job.place, unit)
                filters.append(DuplicateFilter(repeats))
            work = UnitWork(job.place, unit, job.options, codec, filters, strict=job.strict, progress=counters)
            work.read(expected)
            try:
                if published is not None:
                    published.result()
            except BaseException:
                work.discard()
                raise
            published = publisher.submit(work.publish)
        if published is not None:
            published.result()


# ---------------------------------------------------------------- in a worker process


_worker: tuple[Job, Sequence[Unit], Counters, Codec] | None = None


def _start_worker(job: Job, units: Sequence[Unit], counters: Counters, parent: int, codec: bytes) -> None:
    """`codec`: pickled, so that its self-test, a third of a start, is not made again."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and tells us to stop
    hold_as_worker(job.place, job.span)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _worker = job, units, counters, pickle.loads(codec)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def _work() -> None:
    assert _worker is not None, "the pool starts every worker with _start_worker"
    _run(*_worker)
