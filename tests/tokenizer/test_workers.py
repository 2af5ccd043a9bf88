from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenizer.model_file import TokenizerError
from tokenizer.workers import in_processes, in_threads

ROOT = Path(__file__).resolve().parents[2]


def square(number: int) -> int:
    if number % 3 == 0:
        time.sleep(0.02)  # a later batch may be done first
    return number * number


def fail(number: int) -> int:
    if number == 5:
        raise KeyError("five")
    return number


def refuse(number: int) -> int:
    raise TokenizerError(f"text {number}: refused")


def die(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def own_pid(_: int) -> int:
    return os.getpid()


def alive(pid: int) -> bool:
    """Whether a process runs. One that is dead and only waits for its parent to notice does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def no_children_soon() -> bool:
    """multiprocessing's own helper for semaphores stays; it is no child of `multiprocessing.active_children`."""
    deadline = time.monotonic() + 20
    while multiprocessing.active_children():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_results_come_in_order_out_of_several_processes() -> None:
    assert list(in_processes(square, range(50), 3)) == [number * number for number in range(50)]
    pids = set(in_processes(own_pid, range(50), 2))
    assert os.getpid() not in pids
    assert list(in_processes(square, [], 2)) == []
    assert no_children_soon()


def test_results_come_in_order_out_of_several_threads() -> None:
    threads = threading.active_count()
    assert list(in_threads(square, range(50), 3)) == [number * number for number in range(50)]
    with pytest.raises(KeyError, match="five"):
        list(in_threads(fail, range(50), 3))
    results = in_threads(square, range(10**9), 2)
    assert next(results) == 0
    results.close()
    assert threading.active_count() == threads


@pytest.mark.parametrize("workers", [in_processes, in_threads])
def test_batches_are_read_no_further_ahead_than_two_a_worker(workers: Callable[..., Iterator[int]]) -> None:
    read = 0

    def batches() -> Iterator[int]:
        nonlocal read
        for number in range(40):
            read += 1
            yield number

    for given, _ in enumerate(workers(square, batches(), 2)):
        assert read <= given + 4
    assert read == 40


@pytest.mark.parametrize(
    "work, message",
    [
        (fail, "^a worker process failed: KeyError: 'five'$"),
        (refuse, "^text 0: refused$"),
        (die, "^one of 2 worker processes died"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_one_error_here(work: object, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        list(in_processes(work, range(50), 2))
    assert no_children_soon()


def test_an_error_of_the_batches_comes_through_as_it_is() -> None:
    def batches() -> Iterator[int]:
        yield from range(7)
        raise LookupError("the source ended badly")

    with pytest.raises(LookupError, match="ended badly"):
        list(in_processes(square, batches(), 2))
    assert no_children_soon()


def test_whoever_stops_early_leaves_no_process() -> None:
    results = in_processes(square, range(10**9), 2)
    assert next(results) == 0
    results.close()
    assert no_children_soon()
    for result in in_processes(square, range(10**9), 2):  # dropped, not closed
        if result > 100:
            break
    del result
    assert no_children_soon()


CONSUMER = """
import sys, time
from tests.tokenizer.test_workers import own_pid
from tokenizer.workers import in_processes, in_threads

if __name__ == "__main__":
    pids = set()
    for pid in in_processes(own_pid, range(10**9), 2):
        pids.add(pid)
        if len(pids) == 2:
            print(*pids, flush=True)
            time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_of_a_killed_consumer_end(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    process = subprocess.Popen(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.stdout.close()
    assert len(pids) == 2
    assert all(map(alive, pids))
    process.send_signal(how)
    process.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "workers live on without their parent"
        time.sleep(0.01)


def test_ctrl_c_is_heard_once(tmp_path: Path) -> None:
    """It reaches all processes of a terminal: the consumer stops, and no worker complains."""
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    process = subprocess.Popen(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert len(process.stdout.readline().split()) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.count(b"Traceback") == 1
    assert b"KeyboardInterrupt" in errors
