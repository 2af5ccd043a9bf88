"""What follows a save: `latest`, and the removal of what nothing keeps, in all homes; disks that fail meanwhile.

The engine here is a stand-in with a file a rank: what real ones write, other tests save and load.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.checkpoint
import pretrain.pruning
import pretrain.resuming
import pretrain.saving
import pretrain.transfer
from data_pipeline.durable import file_sha256
from pretrain.attempt import take
from pretrain.checkpoint import list_checkpoints, verify
from pretrain.engine import process_group
from pretrain.parts import Shelf
from pretrain.pruning import Holding, superfluous
from pretrain.resuming import newest_whole
from pretrain.retention import Retention, Saved
from pretrain.run_directory import RunDirectory, write_text
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints, NotSavedError, SaveResult
from pretrain.sharing import discover
from pretrain.state import Measured, TrainState
from pretrain.transfer import Carried, Courier
from pretrain.writing import write_files
from tests.pretrain.test_sharing import as_node
from tests.ranks import run_ranks

RUN = Path("run", "checkpoints")

# ---------------------------------------------------------------- what is superfluous


def part(step: int, number: int = 0, parts: int = 1, save: str = "", **known: Any) -> dict[str, Holding | None]:
    return {f"step-{step:08d}": Holding(Saved(step, **known), save or str(step), number, parts)}


def of_two(*steps: int, number: int) -> dict[str, Holding | None]:
    return {name: one for step in steps for name, one in part(step, number, 2).items()}


@pytest.mark.parametrize(
    "case, homes, going",
    [
        ("the same everywhere", [of_two(2, 4, 6, number=0), of_two(2, 4, 6, number=1)], [2]),
        ("another home alone has the rest of an old one", [of_two(4, 6, number=0), of_two(2, 4, 6, number=1)], [2]),
        ("a newer one is not whole: the two newest whole ones stay",
         [of_two(2, 4, 6, number=0), of_two(2, 4, 6, 8, number=1)], [2]),
        ("whole ones that another home has", [part(8), {**part(4), **part(6)}], [4]),
        ("parts of two saves of one step are none",
         [{**of_two(2, 4, number=0), **part(6, 0, 2, "a")}, {**of_two(2, 4, number=1), **part(6, 1, 2, "b")}], []),
        ("joined in one home, a part still in the other",
         [{**part(2), **part(4), **part(6)}, of_two(2, number=1)], [2]),
        ("what cannot be read stays, and counts for nothing",
         [{**of_two(2, 4, 6, number=0), "step-00000001": None}, {**of_two(1, 2, 4, number=1), "step-00000006": None}],
         []),
        ("healthy in all parts or not at all",
         [{**of_two(2, 4, number=0), **part(6, 0, 2, healthy=False)}, of_two(2, 4, 6, number=1)], []),
    ],
)  # fmt: skip
def test_what_is_kept_is_decided_over_all_homes(case: str, homes: Any, going: list[int]) -> None:
    assert superfluous(homes, Retention(1)) == [f"step-{step:08d}" for step in going], case


def test_the_best_stays_in_every_home_whichever_knows_its_loss() -> None:
    homes = [part(step, score=score) for step, score in ((2, 3.0), (4, None), (6, None), (8, None))]
    first = {name: one for home in homes for name, one in home.items()}
    assert superfluous([first, part(2)], Retention(1, keep_best=1)) == ["step-00000004"]


# ---------------------------------------------------------------- one home


class Engine:
    """What `Checkpoints` asks of a TrainingEngine."""

    device = torch.device("cpu")
    model_config = mock.Mock(**{"to_dict.return_value": {}})

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.finite = ranks, True

    def is_finite(self) -> bool:
        return self.finite

    def sum_over_ranks(self, *values: float) -> list[float]:
        return self.ranks.sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def files(self, snapshot: object = None) -> dict[str, Callable[[Path], None]]:
        self.ranks.barrier()
        return {f"engine/rank-{self.ranks.rank}.pt": lambda path: path.write_text("state") and None}

    def gather_weights(self, snapshot: object = None) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(3)}


class Saving:
    """A run that does nothing but save."""

    def __init__(self, folder: Path, ranks: Ranks = Ranks(0, 0, 1), shelf: Shelf | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks, self.engine = folder, ranks, Engine(ranks)
        self.said: list[str] = []
        self.ended: list[SaveResult] = []
        self.checkpoints = Checkpoints(
            folder, Retention(1), ranks, self.said.append, on_end=self.ended.append, shelf=shelf
        )

    def save(self, *steps: int, last: bool = False, loss: float = 1.0) -> list[bool]:
        """Whether each of these steps was saved."""
        for step in steps:
            save = self.checkpoints.save_last if last else self.checkpoints.save
            save(self.engine, TrainState(step), {"world_size": self.ranks.world_size}, Measured(loss, 1.0))  # type: ignore[arg-type]
        return [one.failure is None for one in self.ended[len(self.ended) - len(steps) :]]

    @property
    def steps(self) -> list[int]:
        return steps_in(self.folder)

    @property
    def latest(self) -> str:
        return (self.folder / "latest").read_text().strip().removeprefix("step-0000000")


def steps_in(folder: Path) -> list[int]:
    """What lies there, all of it whole."""
    for path in list_checkpoints(folder):
        verify(path)
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


@contextmanager
def no_room_for_latest(while_there: Path) -> Iterator[None]:
    def write(path: Path, text: str) -> None:
        if while_there.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_text(path, text)

    with mock.patch.object(pretrain.checkpoint, "write_text", write):
        yield


def test_where_latest_finds_no_room_older_ones_make_it(tmp_path: Path) -> None:
    run = Saving(tmp_path)
    run.save(2, 4)
    with no_room_for_latest(tmp_path / "step-00000002"):
        assert run.save(6) == [True]
    assert (run.steps, run.latest, run.said) == ([4, 6], "6", [])


@pytest.mark.parametrize("last", [False, True])
def test_a_checkpoint_that_latest_cannot_name_is_saved(tmp_path: Path, last: bool) -> None:
    run = Saving(tmp_path)
    run.save(2, 4)
    run.engine.finite = False
    with no_room_for_latest(tmp_path):
        assert run.save(6, last=last) == [True]
    assert (run.steps, run.latest, run.checkpoints.newest_step) == ([2, 4, 6], "4", 6)
    not_finite, not_named = run.said
    assert not_finite.startswith("warning: step 6: not every weight and moment is a finite number")
    assert not_named.startswith(f"warning: step 6 is saved, but {tmp_path}/latest: the disk is full, ")


def test_what_is_superfluous_goes_behind_a_failed_save_and_before_the_first(tmp_path: Path) -> None:
    run = Saving(tmp_path)
    with mock.patch.object(pretrain.saving, "tidy", return_value=[]):
        run.save(1, 2, 3, 4)
    again = Saving(tmp_path)
    seen: list[int] = []

    def full(path: Path) -> None:
        seen.extend(again.steps)
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(Engine, "files", return_value={"engine/a": full}):
        assert again.save(5) == [False]
    assert seen == again.steps == [3, 4]
    with mock.patch.object(pretrain.saving, "tidy", return_value=[]):
        run.save(6)
    with mock.patch.object(Engine, "files", return_value={"engine/a": full}):
        assert again.save(7) == [False]
        assert again.steps == [4, 6]
        with pytest.raises(NotSavedError, match="nothing was saved at step-00000008"):
            again.save(8, last=True)


def test_one_that_cannot_be_removed_is_told_of_and_keeps_no_other(tmp_path: Path) -> None:
    run = Saving(tmp_path)
    with mock.patch.object(pretrain.saving, "tidy", return_value=[]):
        run.save(1, 2, 3)
    real = pretrain.pruning.remove

    def remove(path: Path) -> None:
        if path.name == "step-00000001":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), "model.json")
        real(path)

    with mock.patch.object(pretrain.pruning, "remove", remove):
        assert run.save(4) == [True]
    assert run.steps == [1, 3, 4]
    assert run.said == [
        f"warning: step 4 is saved, but {tmp_path}/step-00000001 could not be removed: Operation not permitted"
    ]


@pytest.mark.parametrize("asked", ["os.stat", "os.statvfs", "shutil.disk_usage"])
def test_a_disk_that_does_not_even_answer_costs_a_save_and_no_run(tmp_path: Path, asked: str) -> None:
    def gone(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with mock.patch(asked, gone):
        written = write_files({"a": gone}, tmp_path, threading.Event())
    assert str(written.failure).startswith(f"{tmp_path}/a: Stale file handle")

    run = Saving(tmp_path)
    run.save(2)
    rename = Path.rename

    def rename_once(path: Path, target: Path) -> Path:
        if path.name == "step-00000004.partial":
            stack.enter_context(mock.patch(asked, gone))
            gone()
        return rename(path, target)

    with ExitStack() as stack, mock.patch.object(Path, "rename", rename_once):
        assert run.save(4) == [False]
    assert "step 4 was not saved: " in run.said[-1]
    assert (run.save(6), run.steps) == ([True], [2, 6])


def test_what_cannot_be_removed_at_a_start_is_told_of(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in ("step-00000002.deleted", "step-00000004.partial"):
        (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / ".latest.123-abcdef.tmp").touch()
    rmtree = shutil.rmtree

    def remove(path: Path) -> None:
        if path.name.endswith(".deleted"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), ".nfs01")
        rmtree(path)

    with mock.patch.object(shutil, "rmtree", remove):
        (warning,) = take(run)
    left = run.checkpoints / "step-00000002.deleted"
    assert warning == f"warning: {left}, left by a kill, could not be removed: Directory not empty"
    assert list(run.checkpoints.iterdir()) == [left]


def test_of_one_unhealthy_step_the_newest_folder_stays_and_all_damaged_ones(tmp_path: Path) -> None:
    run, said = Saving(tmp_path), list[str]()
    run.save(2, 4)
    for number in range(3):
        run.engine.finite = True
        run.save(6)
        run.engine.finite = False
        run.save(8)
        (tmp_path / "step-00000006" / "model.json").unlink()
        (tmp_path / "step-00000008" / "mark").write_text(str(number))
        assert newest_whole(tmp_path, said.append) == tmp_path / "step-00000004"
    aside = sorted(path.name for path in tmp_path.glob("step-*.*"))
    damaged = ["step-00000006.damaged", "step-00000006.damaged-2", "step-00000006.damaged-3"]
    assert aside == [*damaged, "step-00000008.unhealthy"]
    assert (tmp_path / "step-00000008.unhealthy" / "mark").read_text() == "2"
    removed = [line for line in said if line.startswith("removed ")]
    earlier = tmp_path / "step-00000008.unhealthy"
    assert removed == [f"removed {earlier}, which an earlier start set aside: step-00000008 takes its place"] * 2


# ---------------------------------------------------------------- several homes


def homes_case(ranks: Ranks, places: Sequence[Path]) -> dict[str, Any]:
    """What lies at this rank's home, and what is said, in one case after the other."""
    ranks = as_node(ranks, places)
    found: dict[str, Any] = {}
    with process_group(torch.device("cpu")):
        sharing = discover(RUN.parent, ranks)
        last = ranks.rank == ranks.world_size - 1

        def begin(name: str, *, gathers: bool) -> Saving:
            folder = Path(name, "checkpoints")
            return Saving(folder, ranks, Shelf(folder, sharing, gathers=gathers))

        run = begin("parts", gathers=False)
        run.save(2, 4, loss=1.0 + ranks.rank / 2**40)
        found["states"] = json.loads((run.folder / "step-00000004" / "state.json").read_text())["measured"]["loss"]
        if not last:
            shutil.rmtree(run.folder / "step-00000002")
        run.save(6)
        found["a part that another home has no more"] = (run.steps, run.latest, run.said)

        run = begin("latest", gathers=False)
        run.save(2, 4)
        with no_room_for_latest(run.folder / "step-00000002" if last else Path("nowhere")):
            run.save(6)
        with no_room_for_latest(run.folder if last else Path("nowhere")):
            run.save(8)
        found["latest fails on one"] = (run.steps, run.latest, run.said)

        run = begin("gathered", gathers=True)
        if last:  # what it has of a time when it was the first
            Saving(run.folder).save(2, 4)
        ranks.barrier()
        run.save(6, 8)
        found["was the first"] = (run.steps, (run.folder / "latest").exists(), run.said)

        run = begin("differ", gathers=False)
        run.save(2)
        real = pretrain.saving._write_json

        def another(content: Any, path: Path) -> None:
            real({**content, "rank": ranks.rank}, path)

        with mock.patch.object(pretrain.saving, "_write_json", another):
            saved = run.save(4)
        found["another state"] = (saved, run.steps, run.said)

        run = begin("unlisted", gathers=False)
        run.save(2, 4)
        with mock.patch.object(pretrain.pruning, "held", side_effect=OSError(errno.EIO, "Input/output error")):
            saved = run.save(6)
        found["a folder that cannot be listed"] = (saved, run.steps, run.latest, len(run.said))

        courier = Courier(ranks)
        Path("here").mkdir()
        Path("here", f"from-{ranks.rank}").write_text("content")
        digest = file_sha256(Path("here", f"from-{ranks.rank}"))
        to_and_fro = [Carried(f"from-{sender}", 7, digest, sender, 1 - sender) for sender in (0, 1, 0)]
        with (
            mock.patch.object(pretrain.transfer, "MEET_BYTES", 14),
            mock.patch.object(courier, "gather", wraps=courier.gather) as meet,
        ):
            courier.carry(to_and_fro, Path("here"), Path("there"))
        found["meetings"] = (meet.call_count, Path("there", f"from-{1 - ranks.rank}").read_text())

        courier = Courier(ranks, timedelta(seconds=1))
        started, raised = time.monotonic(), False
        if not last:
            try:
                courier.gather(None)
            except RuntimeError:
                raised = True
        found["patience"] = last or (raised and time.monotonic() - started < 300)
        ranks.barrier()
    return found


def test_several_homes(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    first, second = run_ranks(2, homes_case, places)
    assert first["states"] == second["states"] == 1.0
    for found in (first, second):
        assert found["a part that another home has no more"] == ([4, 6], "6", [])
        steps, latest, said = found["latest fails on one"]
        assert (steps, latest) == ([6, 8], "8" if found is first else "6")
        (warning,) = said
        assert warning.startswith("warning: step 8 is saved, but on ")
        assert "/checkpoints/latest: the disk is full, " in warning
        saved, steps, (warning,) = found["another state"]
        assert (saved, steps) == ([False], [2])
        assert "step-00000004.partial/state.json is another one on " in warning
        assert found["a folder that cannot be listed"] == ([True], [2, 4, 6], "6", 1)
        assert found["meetings"] == (2, "content")
        assert found["patience"]
    assert first["was the first"] == ([6, 8], True, [])
    assert second["was the first"] == ([], False, [])
