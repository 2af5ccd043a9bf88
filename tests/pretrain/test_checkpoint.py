"""Checkpoints of a real run: strangers are refused, leftovers are no checkpoints. Of damage: test_damage.py."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.attempt import begin_attempt
from pretrain.checkpoint import find, list_checkpoints, load_model, run_of
from pretrain.config import parse_recipe
from pretrain.inputs import Inputs
from pretrain.resuming import choose, clear_leftovers, converted_from
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError
from pretrain.runtime import Ranks
from pretrain.train import train
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]


def train_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    return train(parse_recipe(tables), path, ranks)


@pytest.fixture(scope="module")
def finished_run(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 8 steps on one rank with checkpoints at 2, 4, 6 and 8, of which the last three are kept."""
    path = tmp_path_factory.mktemp("run") / "run"
    tables = tiny_recipe(
        schedule={"max_steps": 8}, checkpoint={"every_steps": 2, "keep_last": 3}, evaluation={"every_steps": 100}
    )
    assert run_ranks(1, train_case, tables, path) == ["finished"]
    return path, tables


@pytest.fixture
def run(finished_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy to damage."""
    path, tables = finished_run
    shutil.copytree(path, tmp_path / "run")
    return tmp_path / "run", tables


def identity(tables: dict[str, Any], world_size: int = 1) -> dict[str, Any]:
    return Inputs.check(parse_recipe(tables), world_size).identity


def names(path: Path) -> list[str]:
    return [checkpoint.name for checkpoint in list_checkpoints(path / "checkpoints")]


def test_the_last_ones_are_kept_and_latest_names_the_newest(run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    assert names(path) == ["step-00000004", "step-00000006", "step-00000008"]
    assert (path / "checkpoints" / "latest").read_text() == "step-00000008\n"
    assert find(path).name == "step-00000008"
    assert choose(path / "checkpoints", "auto", identity(tables)) == path / "checkpoints" / "step-00000008"


@pytest.mark.parametrize("content", [b"{}", b"[]", b"[" * 100_000, b'{"format": "zerohalf-checkpoint", "version": 1}'])
def test_a_manifest_of_another_shape_is_damage(content: bytes, run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    (path / "checkpoints" / "step-00000008" / "manifest.json").write_bytes(content)
    assert choose(path / "checkpoints", "auto", identity(tables)) == path / "checkpoints" / "step-00000006"


@pytest.mark.parametrize("content", ["junk", "", "{}", '{"attempts": 5}'])
def test_a_damaged_record_of_attempts_is_one_line(content: str, run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    (path / "environment.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"environment.json is damaged: move it away"):
        begin_attempt(RunDirectory(path), Inputs.check(parse_recipe(tables), 1), "auto", [1], print)
    (path / "environment.json").unlink()
    (path / "recipe.toml").write_bytes(b"\xff\xfe")
    attempt, *_ = begin_attempt(RunDirectory(path), Inputs.check(parse_recipe(tables), 1), "auto", [1], print)
    assert attempt == 1


def test_what_a_kill_left_is_no_checkpoint_and_is_cleared(run: tuple[Path, dict[str, Any]]) -> None:
    path, _ = run
    folder = path / "checkpoints"
    shutil.copytree(folder / "step-00000008", folder / "step-00000010.partial")
    (folder / "step-00000004").rename(folder / "step-00000004.deleted")
    assert names(path) == ["step-00000006", "step-00000008"]
    clear_leftovers(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["best", "latest", "step-00000006", "step-00000008"]


@pytest.mark.parametrize(
    "changes, world_size, message",
    [
        ({"batch": {"global_batch_size": 16}}, 1, "global_batch_size = 8, this run has 16"),
        ({"precision": {"master": "bf16"}}, 2, "precision.master = fp32, this run has bf16"),
        ({"optimizer": {"name": "muon"}}, 2, "optimizer.name = adamw, this run has muon"),
        ({"model": {"d_ff": 512}}, 1, "model.d_ff = 256, this run has 512"),
        ({"model": {"seq_len": 32}}, 2, "seq_len was 64 and is now 32"),
    ],
)
def test_another_run_is_refused_by_name(
    changes: dict[str, Any], world_size: int, message: str, run: tuple[Path, dict[str, Any]], tiny_recipe: Tables
) -> None:
    path, tables = run
    changed = {**tables, **{name: {**tables.get(name, {}), **values} for name, values in changes.items()}}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        choose(path / "checkpoints", "auto", identity(changed, world_size))


def test_other_ranks_and_another_stage_are_the_same_run(run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    newest = path / "checkpoints" / "step-00000008"
    other = {**tables, "deepspeed": {"config": "ds_configs/zero3.json"}}
    assert choose(path / "checkpoints", "auto", identity(other, 2)) == newest
    assert converted_from(newest, identity(other, 2)) == {"world_size": 1, "zero_stage": 2}
    assert converted_from(newest, identity(tables)) is None


def test_a_refused_resume_leaves_the_run_as_it_was(run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    before = {name: (path / name).read_bytes() for name in ("recipe.toml", "environment.json", "deepspeed.json")}
    inputs = Inputs.check(parse_recipe({**tables, "seed": 12}), 1)
    with pytest.raises(CheckpointError, match="seed was 11 and is now 12"):
        begin_attempt(RunDirectory(path), inputs, "auto", [1], print)
    assert before == {name: (path / name).read_bytes() for name in before}


def test_a_longer_run_may_resume_and_the_change_is_recorded(run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    longer = {**tables, "schedule": {**tables["schedule"], "max_steps": 12}}
    attempt, chosen, _ = begin_attempt(RunDirectory(path), Inputs.check(parse_recipe(longer), 1), "auto", [1], print)
    assert (attempt, chosen) == (2, path / "checkpoints" / "step-00000008")
    recorded = json.loads((path / "environment.json").read_text())["attempts"][-1]
    assert recorded["recipe_changes"] == ["schedule.max_steps = 12"]
    assert recorded["resumed_from"] == str(chosen)


def test_a_directory_in_use_is_refused(run: tuple[Path, dict[str, Any]]) -> None:
    path, tables = run
    holder = RunDirectory(path)
    holder.lock()
    with pytest.raises(RunDirectoryError, match="in use by another run"):
        begin_attempt(RunDirectory(path), Inputs.check(parse_recipe(tables), 1), "auto", [1], print)


def test_resume_never_and_resume_from_a_path(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, tables = run
    folder, empty = path / "checkpoints", tmp_path / "other" / "checkpoints"
    ours = identity(tables)
    with pytest.raises(CheckpointError, match="already holds checkpoints"):
        choose(folder, "never", ours)
    assert choose(empty, "never", ours) is None
    assert choose(empty, "auto", ours) is None
    assert choose(empty, str(folder / "step-00000004"), ours) == (folder / "step-00000004").resolve()
    assert choose(folder, str(folder / "step-00000008"), ours) == folder / "step-00000008"
    with pytest.raises(CheckpointError, match="choose another --run"):
        choose(folder, str(folder / "step-00000004"), ours)
    with pytest.raises(CheckpointError, match="nowhere: no checkpoint there; say auto, never, or the folder of a"):
        choose(folder, str(tmp_path / "nowhere"), ours)


def test_a_checkpoint_alone_says_what_it_lacks(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = run
    alone = tmp_path / "alone" / "step-00000008"
    shutil.copytree(find(path), alone)
    with pytest.raises(CheckpointError, match="stands in no run directory"):
        run_of(alone)


def test_the_plain_weights_are_those_the_engine_computed_with(run: tuple[Path, dict[str, Any]]) -> None:
    """weights.safetensors against DeepSpeed's own file; the tie is one tensor, stored once."""
    path, _ = run
    assert (find(path) / "weights.safetensors").stat().st_mode == (find(path) / "model.json").stat().st_mode
    model = load_model(path)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    theirs = torch.load(find(path) / "engine" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
