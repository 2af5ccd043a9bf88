from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenizer import folder as module
from tokenizer.codec import TokenizerError
from tokenizer.export import export_hf
from tokenizer.folder import publish, refuse_unwritable
from tokenizer.train import train

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = ({"tokenizer.model": word, "description.json": word} for word in (b"old", b"new"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------- replaced, whenever killed

KILLED = """
import os, signal, sys
from pathlib import Path
from tokenizer import folder

moment, exchange = int(sys.argv[2]), sys.argv[3] == "exchange"
steps = 0

def die_behind(function):
    def step(*arguments, **options):
        global steps
        result = function(*arguments, **options)
        steps += 1
        if steps == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return step

for place, names in ((Path, ("rename", "open", "mkdir")), (os, ("fsync", "unlink", "rmdir"))):
    for name in names:
        setattr(place, name, die_behind(getattr(place, name)))
folder._exchange = die_behind(folder._exchange if exchange else lambda one, other: False)
folder.publish({"tokenizer.model": b"new", "description.json": b"new"}, Path(sys.argv[1]), overwrite=True)
"""


def killed_at(folder: Path, moment: int, way: str) -> bool:
    """Replace OLD by NEW in a process that dies behind its so-manieth step. False when it has fewer."""
    publish(OLD, folder, overwrite=True)
    command = [sys.executable, "-c", KILLED, str(folder), str(moment), way]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    assert code in (0, -9)
    return code != 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a name is free for a moment")
def test_a_tokenizer_stands_there_at_every_moment_of_its_replacement(tmp_path: Path) -> None:
    found = []
    while killed_at(tmp_path / "t", len(found) + 1, "exchange"):
        found.append(contents(tmp_path / "t"))
    assert found == sorted(found, key=lambda one: one == NEW)
    assert OLD in found
    assert NEW in found
    publish(NEW, tmp_path / "t", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_without_an_exchange_the_next_to_look_puts_the_old_one_back(tmp_path: Path) -> None:
    moment = 1
    absent = 0
    while killed_at(tmp_path / "t", moment, "renames"):
        moment += 1
        absent += not (tmp_path / "t").exists()
        refuse_unwritable(tmp_path / "t")
        assert contents(tmp_path / "t") in (OLD, NEW)
        assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert absent == 1


def test_only_leftovers_of_the_same_name_are_removed(tmp_path: Path) -> None:
    names = [".t.b.abcdefgh.partial", ".t.abcdefg.partial", "t.abcdefgh.partial"]
    others = [".t.abcdefgh.partial/mine", *(f"{name}/fresh" for name in names)]
    for name in (*others, ".t.12345678.partial/fresh", ".t.12345678.partial/retired"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".t.00000000.partial").write_text("a file")
    publish(NEW, tmp_path / "t", overwrite=False)
    assert {path.name for path in tmp_path.iterdir()} == {*names, ".t.abcdefgh.partial", ".t.00000000.partial", "t"}


def test_many_may_replace_one_tokenizer_at_once(tmp_path: Path) -> None:
    """None removes the working folder of another, and a reader always finds one of them."""
    publish(OLD, tmp_path / "t", overwrite=False)
    failures: list[BaseException] = []

    def replace() -> None:
        try:
            for _ in range(15):
                publish(NEW, tmp_path / "t", overwrite=True)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=replace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert contents(tmp_path / "t") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


# ---------------------------------------------------------------- can't be written

UNWRITABLE = {
    "under a file": ("file/t", "Not a directory"),
    "deep under a file": ("file/a/b/t", "Not a directory"),
    "name too long": ("x" * 300, "File name too long"),
    "a parent's name too long": (f"a/{'x' * 300}/t", "File name too long"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_is_refused_before_the_work(
    name: str, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> Iterator[str]:
        raise AssertionError("read a text")
        yield ""

    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    out, message = UNWRITABLE[name]
    for work in (lambda: train(texts(), Path(out), vocab_size=500), lambda: export_hf(Path("absent"), Path(out))):
        with pytest.raises(TokenizerError, match=message) as caught:
            work()
        assert str(caught.value).startswith(f"{out}: can't be written")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folders")
def test_a_file_system_that_takes_no_folders_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"^/proc/a/t: can't be written"):
        refuse_unwritable(Path("/proc/a/t"))


def test_a_look_whether_it_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    for name in ("t", "a/b/t", "a/../t"):
        refuse_unwritable(tmp_path / name)
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_names_the_folder_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    publish(OLD, Path("t"), overwrite=False)
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(TokenizerError, match=r"^t: can't be written \(No space left on device\); [^\n]*$"):
        publish(NEW, Path("t"), overwrite=True)
    assert contents(tmp_path / "t") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_place_that_something_else_keeps_locked_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.05)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        publish({"a": b"1"}, tmp_path / "t", overwrite=False)
    finally:
        os.close(handle)
    assert (tmp_path / "t" / "a").read_bytes() == b"1"
