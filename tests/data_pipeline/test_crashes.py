"""What happens to `prepare` from outside: a full disk, two writers, input that changes, a kill at any moment."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data_pipeline.corpus import CorpusError
from data_pipeline.prepare import Options, Part, PrepareError, prepare, prepare_part
from data_pipeline.shards import DataFormatError, open_collection
from data_pipeline.unit import PieceReading
from tests.data_pipeline.conftest import real_texts
from tests.data_pipeline.test_parts import data
from tests.data_pipeline.test_prepare import write_jsonl

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(validation_fraction=0.2, unit_bytes=20_000)
TWICE = Options(validation_fraction=0.2, unit_bytes=20_000, deduplicate=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder, texts = tmp_path_factory.mktemp("input"), real_texts(30)
    return {
        "one": [write_jsonl(folder / "a.jsonl", [*texts[:15], texts[2]], bad_lines=True)],
        "two": [write_jsonl(folder / "b.jsonl.gz", texts[15:22]), write_jsonl(folder / "c.jsonl", texts[20:])],
    }


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> dict[bool, dict[str, bytes]]:
    """What must stand there in the end, by whether duplicates are dropped."""
    folder = tmp_path_factory.mktemp("whole")
    for options in (OPTIONS, TWICE):
        prepare(inputs, tokenizer_folder, folder / str(options.deduplicate), options)
    return {twice: data(folder / str(twice)) for twice in (False, True)}


def is_no_collection(out: Path) -> bool:
    try:
        open_collection(out)
    except DataFormatError:
        return True
    return False


# ---------------------------------------------------------------- a full disk


def prepare_with_small_files(limit: int, *arguments: Any, **keywords: Any) -> None:
    """Exit code 3 and nothing else where the one line that a user must see is right."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        prepare(*arguments, **keywords)
    except OSError as error:
        os._exit(3 if "out: File too large; make room and start again" in str(error) else 4)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [OPTIONS, TWICE], ids=["all", "deduplicated"])
def test_a_full_disk_is_one_line_and_then_goes_on(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, whole: dict[bool, dict[str, bytes]],
    workers: int, options: Options,
) -> None:  # fmt: skip
    """A limit on the size of a file stands for the disk: some units fit, others don't."""
    out = tmp_path / "out"
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    arguments, keywords = (inputs, tmp_path / "tokenizer", out, options), {"workers": workers}
    prepare_part(*arguments, part=Part(1, 2**40))  # the tokenizer's files are larger than the limit
    process = multiprocessing.get_context("fork").Process(
        target=prepare_with_small_files, args=(14_000, *arguments), kwargs=keywords
    )
    process.start()
    process.join()
    assert process.exitcode == 3
    assert is_no_collection(out)
    assert not list(out.rglob("*.tmp"))
    prepare(*arguments, **keywords)
    assert data(out) == whole[options.deduplicate]


def test_a_ledger_that_the_disk_cannot_hold_leaves_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    """What waits in its buffer cannot be written either when it is closed; shards begun must go all the same."""
    path = write_jsonl(tmp_path / "x.jsonl", [text[:500] for text in real_texts(9)])
    with path.open("a") as file:
        file.write('{"text": null}\n' * 300)
    inputs, out = {"x": [path]}, tmp_path / "out"
    prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 2**40))
    arguments = (14_000, inputs, tokenizer_folder, out, OPTIONS)
    process = multiprocessing.get_context("fork").Process(target=prepare_with_small_files, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 3
    assert not list(out.rglob("*.tmp"))
    prepare(inputs, tokenizer_folder, out, OPTIONS)
    assert len((out / "x" / "ledger.jsonl").read_bytes().splitlines()) == 300


ON_A_SMALL_DISK = """
import json, subprocess, sys
from pathlib import Path
disk, kilobytes, command = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", disk], check=True)
first = subprocess.run(command, capture_output=True, text=True)
found = {"code": first.returncode, "said": first.stderr, "manifest": (disk / "out" / "manifest.json").exists(),
         "leftovers": [str(path) for path in disk.rglob("*.tmp")]}
subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
found["after"] = subprocess.run(command, capture_output=True, text=True).returncode
subprocess.run(["cp", "-r", disk / "out", disk.with_name("saved")], check=True)
print(json.dumps(found))
"""


@pytest.mark.soak  # needs the right to mount in a namespace of its own: `unshare -rm`
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [OPTIONS, TWICE], ids=["all", "deduplicated"])
def test_a_real_disk_that_is_full(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, whole: dict[bool, dict[str, bytes]],
    workers: int, options: Options,
) -> None:  # fmt: skip
    """Disks of many sizes, from one without room for the tokenizer to one that just holds all."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "data_pipeline", "prepare", "--tokenizer", str(tokenizer_folder), "--out",
               str(disk / "out"), "--workers", str(workers), "--unit-bytes", "20000", "--validation-fraction", "0.2",
               *(["--deduplicate"] if options.deduplicate else [])]  # fmt: skip
    command += [f"--input={name}={path}" for name, paths in inputs.items() for path in paths]
    codes = []
    for kilobytes in (8, 40, 80, 120, 160, 200, 240, 280, 320, 360, 400, 440, 480, 560, 640, 1000):
        done = subprocess.run(
            ["unshare", "-rm", sys.executable, "-c", ON_A_SMALL_DISK, str(disk), str(kilobytes), *command],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        codes.append(found["code"])
        if found["code"]:
            assert found["code"] == 2
            assert found["said"].count("\n") == 1, found["said"]
            assert found["said"].startswith("error: ")
            assert "No space left on device" in found["said"]
            assert not found["manifest"]
        assert found["leftovers"] == []
        assert found["after"] == 0
        assert data(tmp_path / "saved") == whole[options.deduplicate]
        shutil.rmtree(tmp_path / "saved")
    assert codes[:5] == [2] * 5
    assert codes[-1] == 0


# ---------------------------------------------------------------- two writers


def prepare_or_say(*arguments: Any) -> None:
    """Exit code 0: done; 3: refused, with the line that a user must see."""
    try:
        prepare(*arguments)
    except PrepareError as error:
        os._exit(3 if "another `prepare` is writing there" in str(error) else 4)


def test_of_writers_that_begin_at_once_one_does_the_work(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, whole: dict[bool, dict[str, bytes]]
) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(4):
        out = tmp_path / str(turn)
        arguments = (inputs, tokenizer_folder, out, OPTIONS)
        processes = [context.Process(target=prepare_or_say, args=arguments) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
        assert 0 in codes
        assert set(codes) <= {0, 3}
        assert data(out) == whole[False]


# ---------------------------------------------------------------- input that changes


def test_input_that_changes_while_it_is_read_is_not_taken(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", real_texts(9))
    record = PieceReading.record

    def change_and_record(reading: PieceReading) -> dict[str, Any]:
        with path.open("ab") as file:
            file.write(b'{"text": "late"}\n')
        return record(reading)

    monkeypatch.setattr(PieceReading, "record", change_and_record)
    for options in (OPTIONS, TWICE):
        out = tmp_path / f"out-{options.deduplicate}"
        with pytest.raises(CorpusError, match=r"x\.jsonl: the file changed while it was read"):
            prepare({"x": [path]}, tokenizer_folder, out, options)
        assert not list(out.rglob("*.bin"))
        assert not list(out.rglob("*.tmp"))


def test_input_that_changed_between_a_stop_and_its_continuation_is_refused(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", real_texts(9))
    prepare_part({"x": [path]}, tokenizer_folder, tmp_path / "out", OPTIONS, part=Part(1, 2))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"def", b"fed", 1))
    for call in (
        lambda: prepare({"x": [path]}, tokenizer_folder, tmp_path / "out", OPTIONS),
        lambda: prepare_part({"x": [path]}, tokenizer_folder, tmp_path / "out", OPTIONS, part=Part(2, 2)),
    ):
        with pytest.raises(PrepareError, match=r"x\.jsonl changed since it was begun"):
            call()
    assert is_no_collection(tmp_path / "out")


# ---------------------------------------------------------------- memory

MEASURE = """
import re, sys
from pathlib import Path
from data_pipeline.prepare import Options, prepare
options = Options(deduplicate=sys.argv[4] == "twice")
prepare({"x": [Path(sys.argv[1])]}, Path(sys.argv[2]), Path(sys.argv[3]), options)
print(int(re.search("VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer_folder: Path, passes: str) -> None:
    """One unit of many short documents, as a compressed file of any size is. getrusage would tell the parent's peak."""
    peaks = []
    for documents in (60_000, 240_000):
        path = tmp_path / f"{documents}.jsonl.zst"
        rng = random.Random(documents)
        with zstandard.open(path, "wt", encoding="utf-8") as file:
            for number in range(documents):
                file.write(json.dumps({"text": f"{number} some words, {rng.random()}\n" * 3}) + "\n")
        command = [sys.executable, "-c", MEASURE, path, tokenizer_folder, tmp_path / f"out-{documents}", passes]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < 300e6
    assert peaks[1] - peaks[0] < 25e6


# ---------------------------------------------------------------- kills


def kill_and_continue(call: Callable[[], object], out: Path, rng: random.Random, seconds: float, kills: int) -> int:
    """Kill `call` in other processes at random moments, so many times; returns how many were killed before their end.

    One that came to its end had no time left to be killed in: everything is done then.
    """
    killed = 0
    for _ in range(kills):
        process = multiprocessing.get_context("fork").Process(target=call)
        process.start()
        process.join(rng.uniform(0, seconds))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            return killed
        killed += 1
        assert is_no_collection(out) != (out / "manifest.json").exists()
    return killed


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [OPTIONS, TWICE], ids=["all", "deduplicated"])
def test_killed_a_hundred_times_it_gives_the_same_bytes(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, whole: dict[bool, dict[str, bytes]],
    workers: int, options: Options, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One to three kills, then a continuation to the end, whose bytes are compared; until a hundred kills."""
    monkeypatch.setattr("data_pipeline.locks._ORPHANS_SECONDS", 120.0)
    rng = random.Random(f"{workers} {options.deduplicate}")
    began_at = time.monotonic()
    prepare(inputs, tokenizer_folder, tmp_path / "timing", options, workers=workers)
    seconds = time.monotonic() - began_at
    killed = turn = 0
    while killed < 100:
        turn += 1
        out = tmp_path / str(turn)

        def call(out: Path = out) -> None:
            prepare(inputs, tokenizer_folder, out, options, workers=workers)

        killed += kill_and_continue(call, out, rng, seconds, rng.randint(1, 3))
        prepare(inputs, tokenizer_folder, out, options, workers=workers)
        assert data(out) == whole[options.deduplicate]
        assert not list(out.rglob("*.tmp"))
        shutil.rmtree(out)
    print(f"{killed} kills, {turn} collections, all the same")


@pytest.mark.soak
def test_parts_killed_at_random_give_the_same_bytes(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, whole: dict[bool, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three parts at once, each killed now and then, as machines that fail."""
    monkeypatch.setattr("data_pipeline.locks._ORPHANS_SECONDS", 120.0)
    rng = random.Random(3)
    killed = turn = 0
    while killed < 100:
        turn += 1
        out = tmp_path / str(turn)
        context = multiprocessing.get_context("fork")
        for _ in range(2):
            processes = [
                context.Process(
                    target=prepare_part,
                    args=(inputs, tokenizer_folder, out, TWICE),
                    kwargs={"part": Part(number, 3), "workers": 1 + number % 2},
                )
                for number in (1, 2, 3)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(rng.uniform(0, 1.5))
                process.kill()
                process.join()
                killed += process.exitcode == -signal.SIGKILL
            assert is_no_collection(out)
        prepare(inputs, tokenizer_folder, out, TWICE)
        assert data(out) == whole[True]
        assert not list(out.rglob("*.tmp"))
        shutil.rmtree(out)
