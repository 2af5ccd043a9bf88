"""Files kept open: few of all owners together, each owner's own, never closed under a reader."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline import open_files
from data_pipeline.open_files import OpenFiles


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture
def few_files() -> Iterator[None]:
    """A process that may open few more files than it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * descriptors() + 40, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def files(folder: Path, count: int) -> list[str]:
    paths = [folder / str(number) for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(number.to_bytes(2, "little"))
    return list(map(str, paths))


def read(opened: OpenFiles, path: str) -> int:
    return int.from_bytes(opened.get(path).read(2, 0), "little")


def test_owners_share_what_may_be_open(tmp_path: Path, few_files: None) -> None:
    paths, owners = files(tmp_path, 300), [OpenFiles() for _ in range(20)]
    before = descriptors()
    for number, path in enumerate(paths):
        for owner in owners:
            assert read(owner, path) == number
    assert descriptors() - before <= open_files._allowed()
    for owner in owners:
        owner.close()
    assert descriptors() == before


def test_what_was_read_last_stays_open(tmp_path: Path, few_files: None) -> None:
    paths, owner = files(tmp_path, 300), OpenFiles()
    first = owner.get(paths[0])
    for path in paths:
        owner.get(path)
        assert owner.get(paths[0]) is first
    owner.close()


def test_a_file_is_not_closed_under_a_reader(tmp_path: Path) -> None:
    (path,), owner = files(tmp_path, 1), OpenFiles()
    held = owner.get(path)
    owner.close()
    assert held.read(2, 0) == b"\0\0"
    descriptor = held._descriptor
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_each_owner_sees_what_stood_there_when_it_opened_it(tmp_path: Path) -> None:
    (path,), early, late = files(tmp_path, 1), OpenFiles(), OpenFiles()
    assert read(early, path) == 0
    (tmp_path / "new").write_bytes(b"\7\0")
    (tmp_path / "new").rename(path)
    assert (read(early, path), read(late, path)) == (0, 7)
    early.close()
    assert read(early, path) == 7
    early.close()
    late.close()


def test_a_missing_file_is_an_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    owner, before = OpenFiles(), descriptors()
    with pytest.raises(FileNotFoundError):
        owner.get(str(tmp_path / "missing"))
    assert descriptors() == before


def test_many_threads_and_a_small_limit(tmp_path: Path, few_files: None) -> None:
    paths, owner, wrong = files(tmp_path, 200), OpenFiles(), []

    def work(first: int) -> None:
        for step in range(400):
            number = (first + 7 * step) % len(paths)
            if read(owner, paths[number]) != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(11 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    owner.close()


def test_an_owner_that_is_collected_while_another_opens_does_no_harm(tmp_path: Path) -> None:
    """Collected within the lock, as the garbage collector may."""
    (path,) = files(tmp_path, 1)
    cycle: list[object] = [OpenFiles()]
    cycle[0].get(path)  # type: ignore[attr-defined]
    cycle.append(cycle)

    class Closes:
        def __init__(self, owner: OpenFiles) -> None:
            self.owner, self.me = owner, self

        def __del__(self) -> None:
            self.owner.close()

    Closes(cycle[0])  # type: ignore[arg-type]
    with open_files._LOCK:
        gc.collect()
    assert all(key[0] != cycle[0]._owner for key in open_files._READ_LAST)  # type: ignore[attr-defined]


def test_a_forked_process_is_not_locked_out(tmp_path: Path) -> None:
    """Forked while another thread holds the lock, as it does at every read."""
    (path,), held, done = files(tmp_path, 1), threading.Event(), threading.Event()

    def hold() -> None:
        with open_files._LOCK:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if read(OpenFiles(), path) == 0 else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
