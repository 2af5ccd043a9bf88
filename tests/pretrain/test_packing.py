"""Isolated and packed documents in the real trainer: two ranks, resumed bit for bit, counted, scored with masks."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.coverage import prove_coverage
from data_pipeline.loader import IGNORED_TARGET, Batch, Loader
from data_pipeline.packing_plan import make_plan, plan_folder
from data_pipeline.prepare import Options, prepare
from data_pipeline.recorded_run import read_run
from data_pipeline.shards import DataFormatError, open_collection
from data_pipeline.steps import Steps
from data_pipeline.stream import TokenStream
from data_pipeline.trace import documents_read
from model.transformer import Transformer
from pretrain.__main__ import main
from pretrain.checkpoint import CheckpointError, list_checkpoints
from pretrain.config import parse_recipe, to_toml
from pretrain.inputs import Inputs
from pretrain.metrics import read_metrics
from pretrain.resuming import choose
from pretrain.runtime import LAUNCHER_VARIABLES
from pretrain.state import TrainState
from tests.pretrain.scores import scores_of
from tests.pretrain.test_resume import assert_same_checkpoint, train_case
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
SEQ_LEN, STEPS = 64, 6


@dataclass(frozen=True)
class Made:
    """A run of STEPS steps without a stop, and a copy of it that lost what came behind half of them and went on."""

    tables: dict[str, Any]
    whole: Path
    resumed: Path


@pytest.fixture(scope="module")
def data(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, several in a window of 64: lines of code and of English."""
    folder = tmp_path_factory.mktemp("packed")
    inputs: dict[str, list[Path | str]] = {}
    for name in ("code", "english"):
        texts = [json.loads(line)["text"] for line in (corpus / f"{name}.jsonl").open(encoding="utf-8")][:8]
        lines = [line for text in texts for line in text.splitlines() if line.strip()][:1500]
        inputs[name] = [folder / f"{name}.jsonl"]
        Path(inputs[name][0]).write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return prepare(inputs, tokenizer, folder / "data", Options(validation_fraction=0.1)).collection.path


@pytest.fixture(scope="module")
def runs(data: Path, tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    make_plan(open_collection(data), SEQ_LEN)
    made = {}
    for packing, stage in (("concat_masked", 3), ("best_fit", 2)):
        folder = tmp_path_factory.mktemp(packing)
        tables = tiny_recipe(
            data={"path": str(data), "packing": packing},
            schedule={"max_steps": STEPS},
            checkpoint={"every_steps": STEPS // 2, "keep_last": 2},
            evaluation={"every_steps": STEPS, "max_tokens": 1024},
            precision={"compute": "fp32"},
            loss={"z_loss": 0.01},
            deepspeed={"config": f"ds_configs/zero{stage}.json"},
        )
        one = made[packing] = Made(tables, folder / "whole", folder / "resumed")
        assert run_ranks(2, train_case, tables, one.whole) == ["finished", "finished"]
        checkpoints = shutil.copytree(one.whole, one.resumed) / "checkpoints"
        shutil.rmtree(checkpoints / f"step-{STEPS:08d}")
        (checkpoints / "latest").write_text(f"step-{STEPS // 2:08d}\n")
        assert run_ranks(2, train_case, tables, one.resumed) == ["finished", "finished"]
    return made


@pytest.fixture(params=["concat_masked", "best_fit"])
def made(request: pytest.FixtureRequest, runs: dict[str, Made]) -> Made:
    return runs[request.param]


def test_resumed_equals_uninterrupted_bit_for_bit(made: Made) -> None:
    records = read_metrics(made.resumed / "metrics.jsonl")
    assert [(one["step"], one["attempt"]) for one in records] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    expected = {record["step"]: record for record in read_metrics(made.whole / "metrics.jsonl")}
    for record in records:
        for figure in ("loss", "grad_norm", "tokens"):
            assert record[figure] == expected[record["step"]][figure], (record["step"], figure)
    last = [list_checkpoints(path / "checkpoints")[-1] for path in (made.whole, made.resumed)]
    assert_same_checkpoint(*last)


def steps_read(made: Made) -> list[list[Batch]]:
    """The micro-batches of each step, of both ranks."""
    inputs = Inputs.check(parse_recipe(made.tables), 2)
    streams = {name: TokenStream(source.splits["train"]) for name, source in inputs.collection.sources.items()}
    steps: list[list[Batch]] = [[] for _ in range(STEPS)]
    for rank in range(2):
        with Loader(
            inputs.order, streams, rank=rank, world_size=2, micro_batch_size=2, gradient_accumulation_steps=2,
            first_sample=0, eos_id=inputs.collection.eos_id, plan=inputs.packed,
        ) as loader:  # fmt: skip
            for micro_step in range(2 * STEPS):
                steps[micro_step // 2].append(next(loader))
    return steps


def test_tokens_are_targets(made: Made) -> None:
    """What metrics.jsonl and the checkpoint count, against the batches themselves."""
    counts = [sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in step) for step in steps_read(made)]
    seen = [record["tokens"] for record in read_metrics(made.whole / "metrics.jsonl")]
    assert seen == np.cumsum(counts).tolist()
    assert (seen[-1] < STEPS * 8 * SEQ_LEN) == (made.tables["data"]["packing"] == "best_fit")
    state = TrainState.of(list_checkpoints(made.whole / "checkpoints")[-1])
    assert (state.tokens_seen, state.consumed_samples) == (seen[-1], STEPS * 8)


def test_the_first_loss_is_that_of_isolated_documents(made: Made) -> None:
    """By a plain model with the run's initial weights; without the masks it has another loss. The z-loss is apart."""
    config = parse_recipe(made.tables)
    model = Transformer(config.model, torch.Generator().manual_seed(config.seed))
    model.z_loss = 0.01
    first, losses, z_losses = steps_read(made)[0], [], []
    for isolated in (True, False):
        loss_sum, z_loss_sum, tokens = 0.0, 0.0, 0
        for batch in first:
            assert batch.documents is not None
            ids_bt, targets_bt, documents_bt = map(torch.from_numpy, (batch.inputs, batch.targets, batch.documents))
            with torch.no_grad():
                loss = model(ids_bt, targets_bt, documents_bt=documents_bt if isolated else None)
            loss_sum, tokens = loss_sum + loss.cross_entropy_sum.item(), tokens + loss.token_count.item()
            z_loss_sum += loss.loss_sum.item() - loss.cross_entropy_sum.item()
        losses.append(loss_sum / tokens)
        z_losses.append(z_loss_sum / tokens)
    recorded = read_metrics(made.whole / "metrics.jsonl")[0]
    assert recorded["loss"] == pytest.approx(losses[0], rel=1e-6)
    assert recorded["z_loss"] == pytest.approx(z_losses[0], rel=1e-4)
    assert 0.4 < recorded["z_loss"] < 0.6  # 0.01 · ln² 1024, nearly
    assert abs(losses[1] / losses[0] - 1) > 1e-5


def test_another_packing_or_plan_is_refused_on_resume(made: Made) -> None:
    checkpoints = made.whole / "checkpoints"
    own = made.tables["data"]["packing"]

    def identity(packing: str) -> dict[str, Any]:
        tables = {**made.tables, "data": {**made.tables["data"], "packing": packing}}
        return Inputs.check(parse_recipe(tables), 2).identity

    assert choose(checkpoints, "auto", identity(own)) is not None
    for other in {"concat", "concat_masked", "best_fit"} - {own}:
        with pytest.raises(CheckpointError, match=f"packing was '{own}' and is now '{other}'"):
            choose(checkpoints, "auto", identity(other))
    if own == "best_fit":
        changed = identity(own)
        changed["order"]["plan_sha256"] = "ab" * 32
        with pytest.raises(CheckpointError, match="plan_sha256 was"):
            choose(checkpoints, "auto", changed)


def test_what_the_run_read_is_traced_and_counted(made: Made) -> None:
    recorded = read_run(made.whole)
    assert recorded.order.packing == made.tables["data"]["packing"]
    assert recorded.checked_against is not None
    streams = {name: TokenStream(source.splits["train"]) for name, source in recorded.collection.sources.items()}
    reads = list(documents_read(recorded.order, streams, Steps(8).samples(0), recorded.plan))
    first = read_metrics(made.whole / "metrics.jsonl")[0]["tokens"]
    shared = 0 if recorded.plan else 8  # windows share a token
    assert sum(read.stop - read.start for read in reads) == first + shared
    found = prove_coverage(recorded.order, STEPS * 8, micro_batch_size=2, ranks=[1, 2])
    assert {one.source for one in found} == set(streams)

    recipe = made.whole / "recipe.toml"
    text = recipe.read_text()
    try:
        for packing, words in (("concat", "packing was"), ("tight", "data.packing is 'tight', none of concat")):
            recipe.write_text(text.replace(f'"{made.tables["data"]["packing"]}"', f'"{packing}"'))
            with pytest.raises(DataFormatError, match=words):
                read_run(made.whole)
    finally:
        recipe.write_text(text)


def test_a_checkpoint_is_scored_with_the_masks_of_its_run(made: Made) -> None:
    """As the run scored it at its end; not so where the recipe says that it saw whole windows."""
    last = {
        record["source"]: record["loss"]
        for record in read_metrics(made.whole / "metrics.jsonl", "evaluation")
        if record["step"] == STEPS
    }
    scores = scores_of(made.whole, batch_size=2, max_tokens=1024)
    assert {name: score.loss for name, score in scores.items()} == pytest.approx(last, rel=1e-6)
    recipe = made.whole / "recipe.toml"
    text = recipe.read_text()
    try:
        recipe.write_text(text.replace(f'"{made.tables["data"]["packing"]}"', '"concat"'))
        other = scores_of(made.whole, batch_size=2, max_tokens=1024)
    finally:
        recipe.write_text(text)
    assert abs(other["all"].loss / last["all"] - 1) > 1e-5


# ---------------------------------------------------------------- on the command line


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: dict[str, Made], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """A verb over the recipe of the packed run, in this process: exit code, stdout, stderr."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(parse_recipe(runs["best_fit"].tables)))

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main has its own
    for name in LAUNCHER_VARIABLES:  # main fills them in; they must not stay for what is tested later
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(verb: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pretrain", verb, str(recipe), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_what_packing_does_is_said_before_a_run(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = command("plan", "--check-data")
    assert (code, err) == (0, "")
    assert "packing best_fit, an epoch of each source:\n  code: " in out
    assert out.count("padding included") == 2
    assert "\nmixture from sample 0: of every " in out
    assert "\nepochs in " in out
    assert "warning" not in out
    _, out, _ = command("plan", "--check-data", "--set", "data.warn_epochs=0.001")
    assert out.count("\nwarning: code is read ") == out.count("\nwarning: english is read ") == 1
    _, out, _ = command("plan", "--check-data", "--json", "--set", "data.packing=concat")
    figures = json.loads(out)["packing"]
    assert sorted(json.loads(out)["reading"]["epochs"]) == ["code", "english"]
    assert sorted(figures) == ["code", "english"]
    assert all(one["documents_cut"] > 100 and one["tokens_padded"] == 0 for one in figures.values())


def test_a_missing_or_wrong_plan_is_one_line(
    command: Callable[..., tuple[int, str, str]], data: Path, tmp_path: Path
) -> None:
    plan = plan_folder(open_collection(data), SEQ_LEN)
    hidden = plan.rename(plan.with_name("hidden"))

    def refused(*words: str) -> None:
        code, out, err = command("run", "--run", tmp_path / "run")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert all(word in err for word in words), err

    try:
        refused("no best_fit plan", f"python -m data_pipeline pack {data} --seq-len {SEQ_LEN}")
        shutil.copytree(hidden, plan)
        rows = plan / "english.rows"
        rows.write_bytes(rows.read_bytes()[:-1])
        refused("english.rows", "damaged")
    finally:
        shutil.rmtree(plan, ignore_errors=True)
        hidden.rename(plan)
    code, _, err = command("plan", "--set", "data.packing=tight")
    assert (code, "data.packing" in err, "'tight'" in err) == (2, True, True)
    assert not (tmp_path / "run").exists()
