"""What all workers have done so far, and how that is shown while it goes on."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PLAIN_REPORT_SECONDS = 10.0


class Counters:
    """What all processes have done so far, and the sign to stop; shared memory, passed to workers as they start."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.get_context("spawn").Array("q", 5)

    def add(self, *, input_bytes: int = 0, text_bytes: int = 0, tokens: int = 0) -> None:
        with self._numbers.get_lock():
            for place, count in enumerate((input_bytes, text_bytes, tokens)):
                self._numbers[place] += count

    def stop(self) -> None:
        self._numbers.get_obj()[3] = 1

    def stopped(self) -> bool:
        return bool(self._numbers.get_obj()[3])

    def next_unit(self) -> int:
        """0, 1, 2 and so on, each to one process only."""
        with self._numbers.get_lock():
            number = int(self._numbers[4])
            self._numbers[4] = number + 1
        return number

    @property
    def input_bytes(self) -> int:
        return int(self._numbers.get_obj()[0])

    @property
    def text_bytes(self) -> int:
        return int(self._numbers.get_obj()[1])

    @property
    def tokens(self) -> int:
        return int(self._numbers.get_obj()[2])


@contextmanager
def reporting(counters: Counters, what: str, input_bytes: int) -> Iterator[None]:
    """Progress on stderr while the block runs: a bar on a terminal, else a line every ten seconds."""
    if sys.stderr is None:  # as `2>&-` leaves it
        yield
        return
    ended = threading.Event()
    report = _on_terminal if sys.stderr.isatty() else _in_lines
    thread = threading.Thread(target=report, args=(counters, what, input_bytes, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _rates(counters: Counters, began_at: float) -> str:
    seconds = max(time.monotonic() - began_at, 1e-9)
    tokens = f", {counters.tokens / seconds:,.0f} tokens/s" if counters.tokens else ""
    return f"{counters.text_bytes / seconds / 1e6:.1f} MB/s of text{tokens}"


def _on_terminal(counters: Counters, what: str, input_bytes: int, ended: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    began_at = time.monotonic()
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:.0f} %  {task.fields[rates]}  ETA"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=input_bytes, rates="")
        while not ended.wait(0.25):
            bar.update(task, completed=counters.input_bytes, rates=_rates(counters, began_at))
        bar.update(task, completed=counters.input_bytes, rates=_rates(counters, began_at))


def _in_lines(counters: Counters, what: str, input_bytes: int, ended: threading.Event) -> None:
    began_at = time.monotonic()
    while not ended.wait(_PLAIN_REPORT_SECONDS):
        done = min(counters.input_bytes / input_bytes, 1.0) if input_bytes else 1.0
        seconds = time.monotonic() - began_at
        eta = f"ETA {seconds / done - seconds:.0f} s" if done else "ETA unknown"
        print(f"{what}: {done:.1%} of the input, {_rates(counters, began_at)}, {eta}", file=sys.stderr, flush=True)
