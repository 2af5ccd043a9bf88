"""The checkpoints of real runs: what they record, which stay, what is refused; listed, verified, pruned, averaged."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

import pretrain.train
from data_pipeline.durable import file_sha256
from pretrain import checkpoint as store
from pretrain.__main__ import app
from pretrain.checkpoint import digest, list_checkpoints, load_model, load_weights, manifest_of, refuse_part, verify
from pretrain.config import RecipeError, parse_recipe
from pretrain.engine import process_group
from pretrain.export import export_hf
from pretrain.inputs import Inputs, initial_weights
from pretrain.metrics import TrainingDivergedError, all_records, read_metrics
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError
from pretrain.runtime import Ranks
from pretrain.state import Measured
from pretrain.step import train_step
from pretrain.train import train
from tests.pretrain import test_engine as engines
from tests.pretrain.scores import scores_of
from tests.ranks import run_ranks
from tokenizer.codec import TokenizerError

Tables = Callable[..., dict[str, Any]]


def train_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    try:
        return train(parse_recipe(tables), path, ranks)
    except (TrainingDivergedError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def finished_run(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Ten steps on one rank, saved at each, evaluated at the even ones."""
    path = tmp_path_factory.mktemp("inventory") / "run"
    tables = tiny_recipe(
        schedule={"max_steps": 10},
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_every_steps": 4, "keep_best": 2},
        evaluation={"every_steps": 2, "max_tokens": 128},
    )
    assert run_ranks(1, train_case, tables, path) == ["finished"]
    return path, tables


@pytest.fixture
def run(finished_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy to change."""
    shutil.copytree(finished_run[0], tmp_path / "run")
    return tmp_path / "run"


def steps(run: Path) -> list[int]:
    return [store.step_of(path) for path in list_checkpoints(run / "checkpoints")]


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def command(*arguments: object) -> int:
    """The verb as a user calls it, in this process; the exit code. Errors come as they are raised."""
    try:
        return app(["checkpoints", *map(str, arguments)], standalone_mode=False) or 0
    except typer.Exit as end:
        return int(end.exit_code)


def flip(file: Path) -> None:
    """One bit of the last byte."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def signed(checkpoint: Path, **changed: Any) -> None:
    """Give a checkpoint a manifest of what stands in it now, as whoever writes files can."""
    files = {
        str(file.relative_to(checkpoint)): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest_of({**files, **changed})))


# ---------------------------------------------------------------- what a run keeps


def test_a_run_keeps_what_its_recipe_says_and_records_what_it_measured(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    path, _ = finished_run
    scores = {r["step"]: r["loss"] for r in read_metrics(path / "metrics.jsonl", "evaluation") if r["source"] == "all"}
    assert sorted(scores) == [2, 4, 6, 8, 10]
    best = sorted(scores, key=lambda step: scores[step])[:2]
    assert steps(path) == sorted({9, 10, 4, 8, *best})
    for record in read_metrics(path / "metrics.jsonl"):
        if record["step"] not in steps(path):
            continue
        assert json.loads((at(path, record["step"]) / "state.json").read_text())["measured"] == {
            "loss": record["loss"],
            "grad_norm": record["grad_norm"],
            "heldout_loss": scores.get(record["step"]),
            "healthy": True,
        }


def test_what_is_healthy_as_a_step_measured_it() -> None:
    nan = math.nan
    assert Measured(1.0, 2.0, heldout_loss=3.0).to_dict(finite=True)["healthy"]
    assert not Measured(1.0, 2.0).to_dict(finite=False)["healthy"]
    assert Measured(1.0, nan).to_dict(finite=True) == {
        "loss": 1.0, "grad_norm": None, "heldout_loss": None, "healthy": False,
    }  # fmt: skip
    assert Measured(1.0, math.inf, left_out=True).to_dict(finite=True)["healthy"], "fp16 left that gradient out"
    assert Measured(nan, nan, left_out=True).to_dict(finite=True)["healthy"], "a step that moved no weight"
    assert not Measured(1.0, 1.0, left_out=True).to_dict(finite=False)["healthy"]
    assert not Measured(1.0, 1.0, heldout_loss=nan).to_dict(finite=True)["healthy"]


def finite_case(ranks: Ranks) -> list[tuple[Any, ...]]:
    """Under every stage, one number of one rank is spoilt: in a weight, a master, a moment. Gives what went unseen."""
    unseen: list[tuple[Any, ...]] = []
    variants: list[tuple[int, dict[str, str]]] = [(0, {"compute": "fp32"}), (1, {}), (2, {"master": "bf16"}), (3, {})]
    with process_group(torch.device("cpu")):
        for stage, precision in variants:
            config = engines.recipe(**precision)
            engine = engines.build(ranks, config, stage)
            train_step(engine, engines.micro_batches(config, ranks), engines.plan_of(config, ranks), 1e-3)
            if not engine.is_finite():
                unseen.append((stage, precision, "nothing was spoilt"))
            held = engine._engine
            master, state = next(iter(getattr(held.optimizer, "optimizer", held.optimizer).state.items()))
            weight = next(held.module.parameters())
            places = {"weight": getattr(weight, "ds_tensor", weight), "master": master, "moment": state["exp_avg_sq"]}
            for (place, tensor), bad in itertools.product(places.items(), (math.nan, -math.inf, 1e30)):
                number = tensor.detach().view(-1)[3:4]
                before = number.clone()
                if ranks.rank == 1:
                    number.fill_(bad)
                if engine.is_finite():
                    unseen.append((stage, precision, place, bad))
                number.copy_(before)
    return unseen


def test_a_number_that_is_not_finite_is_seen_wherever_it_is() -> None:
    assert run_ranks(2, finite_case) == [[], []]


def test_a_run_whose_weights_stop_being_finite_keeps_its_last_healthy_checkpoint(
    finished_run: tuple[Path, dict[str, Any]], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate of 1e30 spoils the weights behind a step whose loss is finite: they are saved, the next step ends it."""
    _, tables = finished_run
    # No room for a healthy one but by its health.
    narrow = {**tables, "checkpoint": {"every_steps": 1, "keep_last": 1}}
    wild = {**narrow, "schedule": {"peak_lr": 1e30, "min_lr": 1e30, "warmup_steps": 0, "max_steps": 20}}
    (message,) = run_ranks(1, train_case, wild, run)
    assert message.startswith("TrainingDivergedError: step 12")
    assert steps(run) == [9, 10, 11]
    verify(at(run, 10))
    assert not json.loads((at(run, 11) / "state.json").read_text())["measured"]["healthy"]
    assert command(run, "--json") == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(one["step"], one["healthy"], one["kept"]) for one in listed] == [
        (9, True, ["healthy"]),
        (10, True, ["healthy"]),
        (11, False, ["last"]),
    ]
    for used in (load_weights, load_model):
        with pytest.raises(CheckpointError, match="step-00000011 holds weights or moments that are not finite"):
            used(at(run, 11))
    assert command(run, "--prune", "--yes", "--keep-last", 1) == 0
    assert steps(run) == [9, 10, 11]

    sane = {**narrow, "schedule": {**tables["schedule"], "max_steps": 12}}
    assert run_ranks(1, train_case, sane, run) == ["finished"]
    assert read_metrics(run / "metrics.jsonl")[10]["attempt"] == 3
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == [
        "best", "latest", "step-00000011", "step-00000011.unhealthy", "step-00000012",
    ]  # fmt: skip


def spoilt_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> list[str]:
    """A run in which, behind the save of step 4, one second moment of one rank turns infinite; then the same again."""
    saved: list[int] = []

    def step(engine: Any, *rest: Any, **wishes: Any) -> Any:
        result = train_step(engine, *rest, **wishes)
        saved.append(len(saved) + 1)
        if saved[-1] == 5 and ranks.rank == 1:
            optimizer = engine._engine.optimizer.optimizer
            next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[3] = math.inf
        return result

    with (
        process_group(torch.device("cpu")),  # DeepSpeed can't be started twice in a process
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
    ):
        with mock.patch.object(pretrain.train, "train_step", step):
            first = train(parse_recipe(tables), path, ranks)
        if ranks.is_first:
            shutil.copytree(path, path.with_name("spoilt"))
        ranks.barrier()
        return [first, train(parse_recipe(tables), path, ranks)]


def test_however_many_saves_follow_numbers_that_are_not_finite_two_healthy_ones_stay(
    tiny_recipe: Tables, tmp_path: Path
) -> None:
    """An infinite second moment leaves every loss finite: its weight stands still, and the run goes on to its end."""
    tables = tiny_recipe(
        schedule={"max_steps": 12},
        checkpoint={"every_steps": 1, "keep_last": 1},
        evaluation={"every_steps": 12, "max_tokens": 64},
    )
    run, spoilt = tmp_path / "run", tmp_path / "spoilt"
    assert run_ranks(2, spoilt_case, tables, run) == [["finished", "finished"]] * 2
    assert steps(spoilt) == [3, 4, 12]
    assert [store.saved(path).healthy for path in list_checkpoints(spoilt / "checkpoints")] == [True, True, False]
    verify(at(spoilt, 4))
    assert steps(run) == [11, 12]
    assert all(store.saved(path).healthy for path in list_checkpoints(run / "checkpoints"))
    assert (run / "checkpoints" / "step-00000012.unhealthy").is_dir()
    attempts = json.loads((run / "environment.json").read_text())["attempts"]
    assert attempts[1]["resumed_from"] == str(at(run, 4))
    losses: dict[int, list[float]] = {}
    for record in all_records(run / "metrics.jsonl"):
        if record["kind"] == "train":
            losses.setdefault(record["step"], []).append(record["loss"])
    assert all(math.isfinite(loss) for both in losses.values() for loss in both)
    assert losses[5][0] == losses[5][1]
    assert losses[12][0] != losses[12][1], "nothing was spoilt"


# ---------------------------------------------------------------- listed, verified, pruned


def test_the_list_says_what_is_there_and_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(at(run, 9), run / "checkpoints" / "step-00000011.damaged")
    older = json.loads((at(run, 9) / "state.json").read_text())
    del older["measured"]
    (at(run, 9) / "state.json").write_text(json.dumps(older))
    signed(at(run, 9))
    flip(at(run, 8) / "weights.safetensors")
    (at(run, 4) / "manifest.json").write_text("{")

    assert command(run) == 0
    text = capsys.readouterr().out
    assert "not recorded" in text
    assert "unverified" in text
    assert "step-00000004/manifest.json is missing or damaged" in text
    assert "step-00000011.damaged" in text

    assert command(run, "--verify", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["set_aside"] == ["step-00000011.damaged"]
    assert report["retention"] == {"keep_last": 2, "keep_every_steps": 4, "keep_best": 2}
    listed = {one["step"]: one for one in report["checkpoints"]}
    assert {step: one["state"] for step, one in listed.items() if step in (4, 8, 9, 10)} == {
        4: "damaged", 8: "damaged", 9: "whole", 10: "whole",
    }  # fmt: skip
    assert "weights.safetensors is damaged" in listed[8]["fault"]
    assert (listed[9]["healthy"], listed[9]["kept"], listed[9]["latest"]) == (None, ["last"], False)
    assert (listed[10]["healthy"], listed[10]["latest"], "last" in listed[10]["kept"]) == (True, True, True)
    files = [file for file in at(run, 10).rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert listed[10]["bytes"] == sum(file.stat().st_size for file in files)


def test_prune_says_first_and_removes_only_when_told_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = steps(run)
    narrow = ("--prune", "--keep-last", 1, "--keep-every-steps", 0, "--keep-best", 0)
    assert command(run, *narrow) == 0
    assert f"would remove {len(before) - 2} checkpoints" in capsys.readouterr().out
    assert steps(run) == before
    holder = RunDirectory(run)
    holder.lock()
    with pytest.raises(RunDirectoryError, match="has a run at work: nothing is removed"):
        command(run, *narrow, "--yes")
    assert steps(run) == before
    assert holder._lock is not None
    holder._lock.close()
    assert command(run, "--prune", "--yes") == 0, "by the recipe nothing is too much"
    assert steps(run) == before
    capsys.readouterr()
    assert command(run, *narrow, "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [f"step-{step:08d}" for step in before[:-2]]
    assert steps(run) == [9, 10]


def test_prune_leaves_the_last_whole_one_whatever_else_is_asked(run: Path) -> None:
    """The two newest are damaged, which their hashes alone tell."""
    for step in (9, 10):
        flip(at(run, step) / "rng-00000.pt")
    narrow = ("--prune", "--yes", "--keep-last", 1, "--keep-every-steps", 0, "--keep-best", 0)
    assert command(run, *narrow) == 0
    there = steps(run)
    assert there[-3:] == [8, 9, 10]
    assert len(there) == 4

    for step in there[:2]:
        state = json.loads((at(run, step) / "state.json").read_text())
        state["measured"]["healthy"] = False
        (at(run, step) / "state.json").write_text(json.dumps(state))
        signed(at(run, step))
    with pytest.raises(CheckpointError, match=r"none of the 4 checkpoints .* is whole and healthy: nothing is removed"):
        command(run, *narrow)
    assert steps(run) == there


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--yes"], "are for --prune"),
        (["--keep-best", 2], "are for --prune"),
        (["--out", "x"], "are for --average"),
        (["--average", 2], "add --out DIR"),
        (["--average", 2, "--out", "x", "--prune"], "leave out --verify and --prune"),
        (["--average", "few", "--out", "x"], "say how many of the newest"),
    ],
)
def test_options_that_say_nothing_together_are_refused(arguments: list[object], message: str, run: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        command(run, *arguments)


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", run / "checkpoints", at(run, 10)):
        with pytest.raises(CheckpointError, match="is no run directory"):
            command(path)
    assert not (tmp_path / "nowhere").exists()


# ---------------------------------------------------------------- averaged


def test_the_mean_is_the_mean_and_is_taken_wherever_a_checkpoint_is(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tables = finished_run
    out = tmp_path / "mean"
    assert command(path, "--average", "10,4,8", "--out", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dtype"], len(report["averaged"])) == ("float32", 3)
    verify(out)
    ours = load_file(out / "weights.safetensors")
    theirs = [load_file(at(path, step) / "weights.safetensors") for step in (4, 8, 10)]
    assert ours.keys() == theirs[0].keys()
    for name, mean in ours.items():
        assert theirs[0][name].dtype == torch.bfloat16
        expected = torch.stack([weights[name].double() for weights in theirs]).mean(dim=0)
        assert mean.dtype == torch.float32
        assert torch.allclose(mean.double(), expected, rtol=2**-24, atol=0), name
        assert not torch.equal(mean, theirs[0][name].float())
    recorded = json.loads((out / "averaged.json").read_text())
    assert [one["step"] for one in recorded["checkpoints"]] == [4, 8, 10]

    score = scores_of(out, Path(tables["data"]["path"]), batch_size=8, max_tokens=64)["all"]
    assert 0 < score.loss < score.uniform
    assert "model.safetensors" in export_hf(out, tmp_path / "hf", dtype="bf16", max_shard_bytes=10**9).files
    assert initial_weights(Inputs.check(parse_recipe({**tables, "initial_weights": str(out)}), 1)) == out

    with pytest.raises(TokenizerError, match="holds a checkpoint already"):
        command(path, "--average", 2, "--out", out)
    assert command(path, "--average", 2, "--out", out, "--overwrite") == 0
    assert [one["step"] for one in json.loads((out / "averaged.json").read_text())["checkpoints"]] == [9, 10]


def test_what_has_no_mean_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mean"

    def refused(wanted: object, message: str, place: Path = out) -> None:
        with pytest.raises(CheckpointError, match=message):
            command(run, "--average", wanted, "--out", place)
        assert not place.exists()

    refused(1, "a mean is of 2 or more")
    refused("8,8", "2 or more different steps")
    refused(40, f"has {len(steps(run))} healthy checkpoints")
    refused("8,11", "no checkpoint of step 11: it has")
    refused(2, "among the checkpoints of a run", run / "checkpoints" / "mean")

    model = json.loads((at(run, 8) / "model.json").read_text())
    (at(run, 8) / "model.json").write_text(json.dumps({**model, "norm_eps": 1e-3}))
    signed(at(run, 8))
    refused("4,8", "step-00000008 is of another model than .*step-00000004")
    weights = load_file(at(run, 9) / "weights.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name].view(-1)}, at(run, 9) / "weights.safetensors")
    signed(at(run, 9))
    refused("9,10", "has another shape")
    save_file({**weights, name: weights[name] * math.nan}, at(run, 9) / "weights.safetensors")
    signed(at(run, 9))
    refused("9,10", f"the mean of {name} is not finite")
    save_file({**weights, "another": torch.zeros(2)}, at(run, 9) / "weights.safetensors")
    signed(at(run, 9))
    refused("9,10", "holds other weights")
    (at(run, 9) / "weights.safetensors").write_bytes(b"")
    refused("4,9", "weights.safetensors has 0 bytes")


# ---------------------------------------------------------------- files from others


@pytest.mark.parametrize(
    "way",
    ["..", "absolute", "link", "link of a folder", "back behind a link", "link within", ".", "empty", "null byte"],
)
def test_a_manifest_that_names_a_place_outside_is_refused(way: str, run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere" / "secret"
    secret.parent.mkdir()
    secret.write_text("text")
    checkpoint = at(run, 10)
    name = {
        "..": "../../../elsewhere/secret", "absolute": str(secret), "link": "link", "link of a folder": "link/secret",
        "back behind a link": "link/../secret",  # within this folder here, another place where there is no such link
        "link within": "link/secret", ".": "engine/./secret", "empty": "engine//secret", "null byte": "a\0b",
    }[way]  # fmt: skip
    if "within" in way or "behind" in way:
        (checkpoint / "inner" / "deep").mkdir(parents=True)
        (checkpoint / "inner" / "secret").write_text("text")
        (checkpoint / "link").symlink_to("inner/deep" if "behind" in way else "inner")
    elif way.startswith("link"):
        (checkpoint / "link").symlink_to(secret if way == "link" else secret.parent)
    elif way in (".", "empty"):
        (checkpoint / "engine" / "secret").write_text("text")
    signed(checkpoint, **{name: {"bytes": 4, "sha256": file_sha256(secret)}})
    with pytest.raises(CheckpointError, match="which is outside its folder"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "part",
    [
        None,
        [],
        {},
        {"number": 0, "hosts": [1, 2], "elsewhere": {}},
        {"number": 10**30, "hosts": ["a"], "elsewhere": {}},
        {"number": -5, "hosts": ["a", "b"], "elsewhere": {}},
        {"number": True, "hosts": ["a", "b"], "elsewhere": {}},
        {"number": 0, "hosts": [], "elsewhere": {}},
        {"number": 0, "hosts": ["a"], "elsewhere": {"model.json": {"bytes": 1, "sha256": "0" * 64}}},
        {"number": 0, "hosts": ["a"], "elsewhere": {"x": {"bytes": 5}}},
        {"number": 0, "hosts": ["a"], "elsewhere": {"x": {"bytes": -1, "sha256": "0" * 64}}},
        {"number": 0, "hosts": ["a"], "elsewhere": {"../x": {"bytes": 1, "sha256": "0" * 64}}},
    ],
)
def test_a_part_of_another_shape_is_damage(part: Any, run: Path) -> None:
    path = at(run, 10) / "manifest.json"
    manifest = json.loads(path.read_text())
    signature = digest(manifest["files"], part)
    path.write_text(json.dumps({**manifest, "part": part, "files_sha256": signature}))
    for use in (verify, refuse_part):
        with pytest.raises(CheckpointError, match=r"manifest.json (is damaged|names '../x')"):
            use(at(run, 10))


def test_a_checkpoint_may_stand_behind_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").rename(tmp_path / "disk" / "checkpoints")
    (run / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    verify(at(run, 10))


class Trap:
    """What, being unpickled, makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def test_nothing_that_stands_in_a_checkpoint_is_run(
    finished_run: tuple[Path, dict[str, Any]], run: Path, tmp_path: Path
) -> None:
    """Its hashes are right, as whoever makes such a file can make them; and a resume from it says what it found."""
    sprung = tmp_path / "sprung"
    (file,) = at(run, 10).glob("engine/*optim_states.pt")
    honest = torch.load(file, weights_only=False)
    torch.save({**honest, "more": Trap(sprung)}, file)
    signed(at(run, 10))
    longer = {**finished_run[1], "schedule": {**finished_run[1]["schedule"], "max_steps": 11}}
    (said,) = run_ranks(1, train_case, longer, run)
    assert said.startswith(f"CheckpointError: {at(run, 10)} holds posix.mkdir, which is neither a tensor nor a number")
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists(), "the trap is one"
