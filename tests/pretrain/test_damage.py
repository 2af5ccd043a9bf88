"""Every file of a checkpoint damaged in every way: it is found, the checkpoint before it is used, and that is said."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import pretrain.train
from pretrain.averaging import average
from pretrain.checkpoint import find, list_checkpoints, load_model, verify
from pretrain.config import parse_recipe
from pretrain.engine import process_group
from pretrain.inputs import Inputs, initial_weights
from pretrain.metrics import Report
from pretrain.resuming import newest_whole
from pretrain.run_directory import CheckpointError, RunDirectory
from pretrain.runtime import Ranks
from tests.pretrain.test_resume import assert_same_checkpoint
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]


def with_a_bit_flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


# What is left of a file's bytes; None: the file is gone.
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "a bit flipped": with_a_bit_flipped,
    "cut by a byte": lambda content, draw: content[:-1],
    "cut to half": lambda content, draw: content[: len(content) // 2],
    "cut to nothing": lambda content, draw: b"",
    "a byte more": lambda content, draw: content + b"\0",
    "removed": lambda content, draw: None,
}


def damage(file: Path, kind: str, draw: random.Random) -> bytes:
    """Do it to a file; what it held."""
    content = file.read_bytes()
    left = DAMAGES[kind](content, draw)
    assert left != content
    if left is None:
        file.unlink()
    else:
        file.write_bytes(left)
    return content


def files_of(folder: Path) -> list[Path]:
    """Whatever stands in a checkpoint, relative to it: what is written some day is damaged here too."""
    return sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())


# ---------------------------------------------------------------- found before anything is read


class Run(NamedTuple):
    path: Path
    tables: dict[str, Any]
    ranks: int

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


STAGES = {1: 2, 2: 1, 3: 2}  # ZeRO stage → ranks


def runs_case(ranks: Ranks, runs: Sequence[Run]) -> list[list[str]]:
    """What each of several runs says to its end, one behind the other in one process group."""
    told = []
    with (
        process_group(torch.device("cpu")),  # DeepSpeed can't be started twice in a process
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
    ):
        for run in runs:
            said: list[str] = []
            with mock.patch.object(Report, "say", lambda report, message, said=said: said.append(message)):
                assert pretrain.train.train(parse_recipe(run.tables), run.path, ranks) == "finished"
            told.append(said)
    return told


@pytest.fixture(scope="module")
def finished_runs(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """By ZeRO stage, a run of six steps with checkpoints at 2, 4 and 6."""
    home = tmp_path_factory.mktemp("damage")
    runs = {}
    for stage, ranks in STAGES.items():
        tables = tiny_recipe(
            model={"d_model": 64, "n_heads": 1, "d_ff": 96},
            schedule={"max_steps": 6},
            checkpoint={"every_steps": 2, "keep_last": 3},
            evaluation={"every_steps": 6, "max_tokens": 128},
            deepspeed={"config": f"ds_configs/zero{stage}.json"},
        )
        runs[stage] = Run(home / f"zero{stage}", tables, ranks)
    for ranks in set(STAGES.values()):
        run_ranks(ranks, runs_case, [run for run in runs.values() if run.ranks == ranks])
    return runs


def copied(run: Run, path: Path) -> Run:
    shutil.copytree(run.path, path)
    return run._replace(path=path)


@pytest.mark.parametrize("stage", STAGES)
def test_damage_anywhere_is_found_and_the_one_before_is_used(
    stage: int, finished_runs: dict[int, Run], tmp_path: Path
) -> None:
    folder = copied(finished_runs[stage], tmp_path / "run").checkpoints
    newest, before = folder / "step-00000006", folder / "step-00000004"
    files, draw = files_of(newest), random.Random(stage)
    assert len(files) >= 6 + STAGES[stage]
    for name in files:
        for kind in DAMAGES:
            content = damage(newest / name, kind, draw)
            said: list[str] = []
            assert newest_whole(folder, said.append) == before, (name, kind)
            if newest.exists():  # without a manifest it is no checkpoint at all
                assert (str(name), kind, said) == ("manifest.json", "removed", [])
            else:
                assert said == [f"{said[0].removesuffix('; trying the one before it')}; trying the one before it"]
                assert str(newest / name) in said[0], (name, kind)
                newest.with_name(newest.name + ".damaged").rename(newest)
            (newest / name).write_bytes(content)
    verify(newest)


def test_what_the_file_latest_says_is_no_matter(finished_runs: dict[int, Run], tmp_path: Path) -> None:
    folder = copied(finished_runs[2], tmp_path / "run").checkpoints
    draw, said = random.Random(5), list[str]()
    for kind in DAMAGES:
        content = damage(folder / "latest", kind, draw)
        assert newest_whole(folder, said.append) == folder / "step-00000006"
        assert find(tmp_path / "run") == folder / "step-00000006"
        (folder / "latest").write_bytes(content)
    assert said == []


def test_weights_without_a_run_are_refused_where_anything_is_damaged(
    finished_runs: dict[int, Run], tmp_path: Path
) -> None:
    """The mean of two checkpoints, a folder as an import makes it with averaged.json beside it."""
    run = copied(finished_runs[2], tmp_path / "run")
    mean = tmp_path / "mean"
    average(RunDirectory(run.path), 2, mean)
    load_model(mean)
    inputs = Inputs.check(parse_recipe({**run.tables, "initial_weights": str(mean)}), 1)
    assert initial_weights(inputs) == mean
    files, draw = files_of(mean), random.Random(7)
    assert {"averaged.json", "model.json", "manifest.json", "weights.safetensors"} < {str(name) for name in files}
    assert len({name.parent for name in files}) == 2, "no tokenizer is in it"
    for name in files:
        for kind in DAMAGES:
            content = damage(mean / name, kind, draw)
            for used in (verify, load_model):
                with pytest.raises(CheckpointError):
                    used(mean)
            with pytest.raises(CheckpointError):
                initial_weights(inputs)
            (mean / name).write_bytes(content)
    verify(mean)


@pytest.mark.soak
def test_every_bit_of_a_manifest_counts(finished_runs: dict[int, Run], tmp_path: Path) -> None:
    path = copied(finished_runs[1], tmp_path / "run").checkpoints / "step-00000006"
    content = (path / "manifest.json").read_bytes()
    flipped = (
        content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        for at in range(len(content))
        for bit in range(8)
    )
    cut = (content[:length] for length in range(len(content)))
    manifests = [*flipped, *cut]
    for manifest in manifests:
        (path / "manifest.json").write_bytes(manifest)
        with pytest.raises(CheckpointError):
            verify(path)
    print(f"{len(manifests)} manifests")


# ---------------------------------------------------------------- and the run goes on


def resumed_from(run: Run) -> str | None:
    attempts = json.loads((run.path / "environment.json").read_text())["attempts"]
    source = attempts[-1]["resumed_from"]
    return None if source is None else Path(source).name


def damaged_and_resumed(cases: Iterable[tuple[Run, Path, str]], home: Path, draw: random.Random) -> int:
    """Copies of finished runs with one file of their newest checkpoint damaged, started again: how many there were.

    Each says what it found, goes on from the one before, and ends with the very checkpoint that was damaged.
    """
    copies = []
    for number, (run, name, kind) in enumerate(cases):
        copy = copied(run, home / str(number))
        damage(copy.checkpoints / "step-00000006" / name, kind, draw)
        copies.append((copy, run, name, kind))
    for ranks in {copy.ranks for copy, *_ in copies}:
        mine = [case for case in copies if case[0].ranks == ranks]
        for said, (copy, run, name, kind) in zip(
            run_ranks(ranks, runs_case, [c[0] for c in mine])[0], mine, strict=True
        ):
            assert resumed_from(copy) == "step-00000004", (name, kind)
            newest = copy.checkpoints / "step-00000006"
            if (str(name), kind) != ("manifest.json", "removed"):
                assert any(f"{newest / name}" in line and "trying the one before it" in line for line in said)
                assert newest.with_name(f"{newest.name}.damaged").is_dir()
            assert_same_checkpoint(run.checkpoints / newest.name, newest)
            assert (copy.checkpoints / "latest").read_text() == f"{newest.name}\n"
    return len(copies)


def test_a_run_whose_newest_checkpoint_is_damaged_ends_as_it_did(finished_runs: dict[int, Run], tmp_path: Path) -> None:
    draw = random.Random(3)
    cases = []
    for stage in (1, 3):
        files = files_of(finished_runs[stage].checkpoints / "step-00000006")
        of_the_optimizer = next(name for name in files if "optim" in name.name)
        cases.append((finished_runs[stage], of_the_optimizer, draw.choice(list(DAMAGES))))
    assert damaged_and_resumed(cases, tmp_path, draw) == 2


@pytest.mark.soak
def test_the_same_of_every_file(finished_runs: dict[int, Run], tmp_path: Path) -> None:
    draw = random.Random(4)
    cases = [
        (run, name, kind)
        for run in finished_runs.values()
        for name in files_of(run.checkpoints / "step-00000006")
        for kind in draw.sample(list(DAMAGES), 2)
    ]
    print(f"{damaged_and_resumed(cases, tmp_path, draw)} resumed runs")


@pytest.mark.parametrize("spared", [1, 0])
def test_damage_to_several_goes_back_to_the_newest_whole_one(
    spared: int, finished_runs: dict[int, Run], tmp_path: Path
) -> None:
    folder = copied(finished_runs[2], tmp_path / "run").checkpoints
    checkpoints, draw = list_checkpoints(folder), random.Random(spared)
    for path in checkpoints[spared:]:
        damage(path / draw.choice(files_of(path)), "a bit flipped", draw)
    if spared:
        said: list[str] = []
        assert newest_whole(folder, said.append) == checkpoints[0]
        assert [path.name in line for path, line in zip(reversed(checkpoints[1:]), said, strict=True)] == [True, True]
        assert list_checkpoints(folder) == checkpoints[:1]
    else:
        with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints .* is whole.*another --run"):
            newest_whole(folder, lambda message: None)
        assert list_checkpoints(folder) == checkpoints, "something was renamed"
