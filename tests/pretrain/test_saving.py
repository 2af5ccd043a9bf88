"""Saving while training goes on: the same bytes as a save at once; disks that are full; kills; disks that hang."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.saving
import pretrain.train
from pretrain.checkpoint import list_checkpoints, verify
from pretrain.config import parse_recipe
from pretrain.engine import TrainingEngine, process_group
from pretrain.metrics import Report, TrainingDivergedError, read_metrics
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints, NotSavedError
from pretrain.snapshot import Snapshot
from pretrain.writing import Job, write_files
from tests.pretrain.test_elastic import OFFLOADED, Place, build, steps
from tests.pretrain.test_fp16 import with_fp16
from tests.pretrain.test_resume import all_alive, train_case, wait_for_step
from tests.ranks import live_ranks, root, run_ranks

Tables = Callable[..., dict[str, Any]]

# ---------------------------------------------------------------- the copy


def test_a_copy_shares_storages_as_the_original_does_and_reuses_its_room() -> None:
    flat = torch.arange(10.0)
    value = {"whole": flat, "views": (flat[2:4], [flat[4:].view(2, 3)]), "other": torch.ones(3), "count": [1]}
    snapshot = Snapshot(torch.device("cpu"))
    with snapshot.making_room():
        snapshot.take(value)
        snapshot.take(flat)
    addresses = [{room.data_ptr() for room in snapshot._rooms}]
    for _ in range(2):
        with snapshot.taking():
            kept = snapshot.take(value)
            again = snapshot.take(flat)
        assert kept["views"][0].data_ptr() == kept["whole"].data_ptr() + 8 == again.data_ptr() + 8
        assert kept["whole"].data_ptr() != flat.data_ptr()
        assert snapshot.held_bytes == 4 * 10 + 4 * 3
        addresses.append({kept["whole"].data_ptr(), kept["other"].data_ptr()})
    flat.zero_()
    value["count"].append(2)
    assert kept["views"][1][0].tolist() == [[4, 5, 6], [7, 8, 9]]
    assert kept["count"] == [1]
    assert addresses[0] == addresses[1] == addresses[2]
    with snapshot.taking():
        snapshot.take(torch.ones(3))
    assert snapshot.held_bytes == 12, "room that nothing needs is given back"


COPIED = [
    ("adamw", Place(0, 2)), ("adamw", Place(3, 2, OFFLOADED)), ("sums in fp32", Place(1, 2)), ("fp32", Place(0, 2)),
    ("fp16", Place(2, 2)), ("kahan", Place(3, 2)), ("muon", Place(1, 2)), ("adamw8bit", Place(3, 2)),
]  # fmt: skip


def copies_case(ranks: Ranks, folder: Path) -> None:
    """Of each kind of engine, behind the same step: saved at once, and from a copy when training has gone on."""
    with with_fp16(), process_group(torch.device("cpu")):
        for number, (kind, place) in enumerate(COPIED):
            engine, snapshot, home = build(ranks, kind, place), Snapshot(torch.device("cpu")), folder / str(number)
            steps(engine, kind, 2)
            at_once = {**engine.files(), **weights_file(engine)}
            write_files(at_once, home / "at once", threading.Event())
            with snapshot.taking():
                files = {**engine.files(snapshot), **weights_file(engine, snapshot)}
            steps(engine, kind, 1)
            write_files(files, home / "later", threading.Event())


def weights_file(engine: TrainingEngine, snapshot: Snapshot | None = None) -> dict[str, Callable[[Path], None]]:
    weights = engine.gather_weights(snapshot)
    return {"weights.safetensors": partial(pretrain.saving.save_tensors, weights)} if engine.ranks.is_first else {}


def test_files_from_a_copy_are_those_of_the_step_to_the_last_byte(tmp_path: Path) -> None:
    run_ranks(2, copies_case, tmp_path)
    for number, kind in enumerate(COPIED):
        at_once, later = (content(tmp_path / str(number) / way) for way in ("at once", "later"))
        assert len(at_once) >= (5 if kind[1].stage else 2)
        assert {name: len(data) for name, data in at_once.items()} == {name: len(data) for name, data in later.items()}
        assert [name for name in at_once if at_once[name] != later[name]] == [], kind


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- whole runs

LATE = {3: 5, 6: 8}  # by step of a save, the step that the loop has reached when its writing begins
STEPS, FULL_AT = 10, (6, 10)


class Run:
    """What a run's ranks do beside what they always do, each case by its name."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self.ranks, self.name = ranks, name
        self.reached, self.finishing, self.said = 0, False, list[str]()
        self.changed = threading.Condition()

    def write(self, files: Any, folder: Path, abandoned: threading.Event) -> Any:
        step = int(folder.name.removeprefix("step-").removesuffix(".partial"))
        with self.changed:
            if self.name in ("late", "stopped", "diverged"):
                self.changed.wait_for(lambda: self.finishing or self.reached >= LATE.get(step, 0))
            if self.name == "awaited" and step == 3 and self.ranks.is_first:
                self.changed.wait_for(lambda: any("still being written" in line for line in self.said))
        with small_files() if "full" in self.name and self.ranks.rank == 1 and step in FULL_AT else nullcontext():
            return write_files(files, folder, abandoned)

    def step(self, report: Report, state: Any, **figures: Any) -> None:
        STEP(report, state, **figures)
        with self.changed:
            self.reached = state.global_step
            self.changed.notify_all()
        if self.name == "stopped" and self.reached == 4 and self.ranks.is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.name == "diverged" and self.reached == 5:
            raise TrainingDivergedError("as if")

    def finish(self, checkpoints: Checkpoints) -> None:
        with self.changed:
            self.finishing = True
            self.changed.notify_all()
        FINISH(checkpoints)

    def say(self, message: str) -> None:
        with self.changed:
            self.said.append(message)
            self.changed.notify_all()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with (
            mock.patch.object(pretrain.saving, "write_files", self.write),
            mock.patch.object(Checkpoints, "finish", lambda checkpoints: self.finish(checkpoints)),
            mock.patch.object(Report, "step", lambda report, state, **figures: self.step(report, state, **figures)),
            mock.patch.object(Report, "say", lambda report, message: self.say(message)),
        ):
            yield


STEP, FINISH = Report.step, Checkpoints.finish


@contextmanager
def small_files() -> Iterator[None]:
    """This process can write no file above 20 kB: a limit that the system keeps, as it does the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


RUNS = ["at once", "late", "awaited", "stopped", "diverged", "full at once", "full"]


def runs_case(ranks: Ranks, tables: dict[str, Any], folder: Path) -> dict[str, tuple[str, list[str]]]:
    """How each run ends, and what it says."""
    found = {}
    with (
        process_group(torch.device("cpu")),  # DeepSpeed can't be started twice in a process: one for all runs
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
    ):
        for name in RUNS:
            run = Run(ranks, name)
            asynchronous = {**tables["checkpoint"], "asynchronous": "at once" not in name}
            config = parse_recipe({**tables, "checkpoint": asynchronous})
            with run.at_work():
                try:
                    ended = pretrain.train.train(config, folder / name, ranks)
                except (NotSavedError, TrainingDivergedError) as error:
                    ended = f"{type(error).__name__}: {error}"
            found[name] = (ended, run.said)
    return found


@pytest.fixture(scope="module")
def runs(
    tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tuple[str, list[str]]], dict[str, tuple[str, list[str]]]]:
    """The folder of the runs above, and what they say on both ranks."""
    folder = tmp_path_factory.mktemp("saving")
    first, second = run_ranks(2, runs_case, tables_of(tiny_recipe), folder)
    return folder, first, second


def tables_of(tiny_recipe: Tables) -> dict[str, Any]:
    return tiny_recipe(
        batch={"global_batch_size": 4},
        schedule={"max_steps": STEPS},
        evaluation={"every_steps": 100},
        checkpoint={"every_steps": 3, "keep_last": 9},
    )


def names(run: Path) -> list[str]:
    """`best` is a matter of evaluation."""
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != "best")


def steps_saved(run: Path) -> list[str]:
    """What lies among the checkpoints, all of them verified; none is half-written."""
    for path in list_checkpoints(run / "checkpoints"):
        verify(path)
    *checkpoints, _ = sorted(names(run), key=lambda name: name == "latest")
    assert (run / "checkpoints" / "latest").read_text() == f"{checkpoints[-1]}\n"
    return [name.removeprefix("step-000000") for name in checkpoints]


def test_checkpoints_are_those_of_a_run_that_saves_at_once(runs: Any) -> None:
    """Written when training was two steps on; and what was measured, which tells nothing of how it was saved."""
    folder, said, others = runs
    for name in ("at once", "late", "awaited"):
        assert said[name][0] == others[name][0] == "finished"
        assert steps_saved(folder / name) == ["03", "06", "09", "10"]
        for step in ("03", "06", "09", "10"):
            ours, wanted = (folder / one / "checkpoints" / f"step-000000{step}" for one in (name, "at once"))
            assert (ours / "manifest.json").read_bytes() == (wanted / "manifest.json").read_bytes(), (name, step)


def test_what_a_save_took_is_recorded(runs: Any) -> None:
    folder, _, _ = runs
    for name in ("at once", "late"):
        records = read_metrics(folder / name / "metrics.jsonl", "save")
        assert [(record["step"], record["failure"]) for record in records] == [(s, None) for s in (3, 6, 9, 10)]
        assert all(record["held_seconds"] > 0 and record["whole_seconds"] > 0 for record in records)
    receipt = json.loads((folder / "late" / "receipts" / "rank-00000.json").read_text())
    assert receipt["save_seconds"] == records[-1]["whole_seconds"]


def test_a_save_that_is_due_while_one_is_written_waits_for_it_and_says_so(runs: Any) -> None:
    _, said, _ = runs
    warnings = [line for line in said["awaited"][1] if "still being written" in line]
    assert warnings == [
        "warning: step 6: the save of step 3 is still being written, and training waits for it: "
        "set a larger checkpoint.every_steps, or use a faster disk"
    ]


def test_a_stop_ends_the_save_in_flight_and_makes_the_last_one(runs: Any) -> None:
    """Asked to stop at step 4, while the save of step 3 waits for step 5: it must not wait for that."""
    folder, said, others = runs
    assert said["stopped"][0] == others["stopped"][0] == "stopped"
    assert steps_saved(folder / "stopped") == ["03", "04"]


def test_a_run_that_diverges_still_ends_the_save_before(runs: Any) -> None:
    folder, said, _ = runs
    assert said["diverged"][0] == "TrainingDivergedError: as if"
    assert steps_saved(folder / "diverged") == ["03"]


@pytest.mark.parametrize("name", ["full at once", "full"])
def test_a_save_that_fails_costs_no_more_than_itself_unless_it_is_the_last(name: str, runs: Any) -> None:
    folder, said, others = runs
    assert steps_saved(folder / name) == ["03", "09"]
    (warning,) = [line for line in said[name][1] if "was not saved" in line]
    aside = f"{folder / name}/checkpoints/step-00000006.partial"
    after = "; the checkpoints before it stay, training goes on, and the next save is tried when it is due"
    assert re.fullmatch(f"warning: step 6 was not saved: rank 1: {aside}/engine/.*, .* free{after}", warning)
    assert said[name][0] == others[name][0]
    assert said[name][0].startswith(f"NotSavedError: rank 1: {folder / name}/checkpoints/step-00000010.partial/")
    assert said[name][0].endswith("the checkpoints before it are whole: see to that and start the same command again")
    failures = [record["failure"] is None for record in read_metrics(folder / name / "metrics.jsonl", "save")]
    assert failures == [True, False, True, False]


# ---------------------------------------------------------------- kills, and a disk that hangs


def hanging_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    """A run in which one rank's second save stays unfinished for good, with its files in place."""

    def write(files: Any, folder: Path, abandoned: threading.Event) -> Any:
        written = write_files(files, folder, abandoned)
        if folder.name == "step-00000006.partial" and ranks.rank == 1:
            threading.Event().wait()
        return written

    with mock.patch.object(pretrain.saving, "write_files", write):
        return train_case(ranks, tables, path)


def test_killed_while_a_save_is_written_the_one_before_is_used(tiny_recipe: Tables, tmp_path: Path, runs: Any) -> None:
    tables = tables_of(tiny_recipe)
    tables["checkpoint"]["asynchronous"] = True
    with live_ranks(2, hanging_case, tables, tmp_path) as started:
        wait_for_step(tmp_path, 8, lambda: all_alive(started))
        left = tmp_path / "checkpoints" / "step-00000006.partial"
        while not list(left.glob("engine/*pp_rank_1_*")):
            assert all_alive(started)
            time.sleep(0.01)
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000006.partial"]
    assert run_ranks(2, train_case, tables, tmp_path) == ["finished"] * 2
    assert steps_saved(tmp_path) == ["03", "06", "09", "10"]
    attempts = json.loads((tmp_path / "environment.json").read_text())["attempts"]
    assert attempts[-1]["resumed_from"] == str(tmp_path / "checkpoints" / "step-00000003")
    ours, whole = (run / "checkpoints" / "step-00000010" / "manifest.json" for run in (tmp_path, runs[0] / "at once"))
    assert ours.read_bytes() == whole.read_bytes()


# A thread that waits for good, as one does whose file system has gone, when the main one meets an error.
LEFT = """
import sys, threading
from pretrain.writing import Job
job = Job(lambda: open(sys.argv[1]).read(), in_thread=True)
assert not job.wait(0.1)
raise ValueError("met by the loop")
"""


def test_a_disk_that_hangs_keeps_no_process_that_fails(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")
    argv = [sys.executable, "-c", LEFT, str(tmp_path / "hangs")]
    ended = subprocess.run(argv, capture_output=True, text=True, cwd=root(), check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: met by the loop\n")


def test_what_a_thread_raises_is_raised_where_it_is_asked_for() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    job = Job(fail, in_thread=True)
    with pytest.raises(MemoryError, match="no room"):
        job.result()
    assert job.ended
