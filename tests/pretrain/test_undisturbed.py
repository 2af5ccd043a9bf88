"""Evaluation in training: nothing that is trained differs by a bit for it; all ranks do the same share of it; the best
checkpoint of a run is marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.loader import evaluation_batches
from data_pipeline.shards import open_collection
from data_pipeline.stream import TokenStream
from model.loss import IGNORED
from pretrain import inventory
from pretrain.__main__ import main
from pretrain.checkpoint import find, list_checkpoints
from pretrain.config import parse_recipe
from pretrain.metrics import read_metrics
from pretrain.retention import Retention
from pretrain.run_directory import CheckpointError, RunDirectory
from pretrain.runtime import Ranks
from pretrain.train import train
from tests.pretrain.test_fp16 import SMALL, with_fp16
from tests.pretrain.test_resume import tensors_of
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
STEPS, OFTEN, NEVER = 4, 1, 9


def train_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> None:
    with with_fp16():
        assert train(parse_recipe(tables), path, ranks) == "finished"


# Of each number of ranks: stage, packing, precision. Every stage, both packings without a plan, fp16 once.
SETTINGS: list[tuple[int, int, str, dict[str, str]]] = [
    (1, 3, "concat_masked", {}),
    (2, 0, "concat", {"accumulate": "bf16"}),
    (2, 1, "concat_masked", {"compute": "fp16", "accumulate": "fp32"}),
    (2, 2, "concat", {}),
    (2, 3, "concat", {}),
]


def trained(path: Path) -> list[Any]:
    """Weights, masters, moments, generators, loss scales of every checkpoint; what each step measured."""
    import torch

    told: list[Any] = []
    for checkpoint in list_checkpoints(path / "checkpoints"):
        for file in sorted(checkpoint.rglob("*")):
            if file.suffix == ".pt":
                content = torch.load(file, weights_only=False)
                told += [(file.name, tensor.dtype, tensor.numpy(force=True).tobytes())
                         if tensor.dtype != torch.bfloat16 else (file.name, tensor.view(torch.int16).numpy().tobytes())
                         for tensor in tensors_of(content)]  # fmt: skip
        told.append((checkpoint / "weights.safetensors").read_bytes())
    names = ("step", "loss", "grad_norm", "lr", "tokens", "loss_scale", "skipped_steps")
    return [*told, *({name: one.get(name) for name in names} for one in read_metrics(path / "metrics.jsonl"))]


@pytest.mark.parametrize("world_size, stage, packing, precision", SETTINGS)
def test_training_is_the_same_bit_for_bit(
    world_size: int, stage: int, packing: str, precision: dict[str, str], tiny_recipe: Tables, tmp_path: Path
) -> None:
    """With an evaluation, samples and histograms behind every step, and with no sight of it before the last."""
    looked = {"sample_prompts": ["The", "She said"], "sample_tokens": 12, "histogram_every_steps": 1}
    for every in (OFTEN, NEVER):
        tables = tiny_recipe(
            model=SMALL, data={"packing": packing}, precision=precision,
            deepspeed={"config": f"ds_configs/zero{stage}.json"}, schedule={"max_steps": STEPS},
            checkpoint={"every_steps": 2, "keep_last": 9}, evaluation={"every_steps": every, "max_tokens": 1024},
            logging=looked | {"tensorboard": True} if every == OFTEN else {},
        )  # fmt: skip
        run_ranks(world_size, train_case, tables, tmp_path / str(every))
    often, never = tmp_path / str(OFTEN), tmp_path / str(NEVER)
    assert len(trained(often)) > 10
    assert trained(often) == trained(never)
    evaluations = [[one for one in read_metrics(path / "metrics.jsonl", "evaluation") if one["source"] == "all"]
                   for path in (often, never)]  # fmt: skip
    assert [len(found) for found in evaluations] == [STEPS, 1]
    samples = read_metrics(often / "metrics.jsonl", "samples")
    assert [[one["prompt"] for one in record["texts"]] for record in samples] == [["The", "She said"]] * STEPS
    assert evaluations[0][-1]["loss"] == evaluations[1][-1]["loss"]
    assert all(one["seconds"] > 0 for one in evaluations[0])


def test_ranks_share_the_work_evenly(collection: Path) -> None:
    """As many batches each, and windows that differ by less than a batch."""
    split = open_collection(collection).sources["english"].splits["validation"]
    for world_size in (2, 3, 5):
        shares = []
        for rank in range(world_size):
            batches = list(evaluation_batches(TokenStream(split), 32, 2, 2, rank, world_size))
            shares.append((len(batches), sum(int((row != IGNORED).any()) for _, targets in batches for row in targets)))
        assert len({count for count, _ in shares}) == 1
        assert max(rows for _, rows in shares) - min(rows for _, rows in shares) <= 2


# ---------------------------------------------------------------- the best


@pytest.fixture(scope="module")
def run(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("best") / "run"
    tables = tiny_recipe(
        model=SMALL, schedule={"max_steps": 6}, checkpoint={"every_steps": 2, "keep_last": 9},
        evaluation={"every_steps": 4, "max_tokens": 512},
    )  # fmt: skip
    run_ranks(1, train_case, tables, path)
    return path


def scored(path: Path, step: int, loss: float | None, healthy: bool = True) -> None:
    """Have a checkpoint tell this of its step, as its own save would."""
    import hashlib
    import json

    from pretrain.checkpoint import digest

    folder = path / "checkpoints" / f"step-{step:08d}"
    state = json.loads((folder / "state.json").read_text())
    state["measured"] |= {"heldout_loss": loss, "healthy": healthy}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files_sha256"] = digest(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_best_is_named_and_can_be_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    checkpoints, best = copy / "checkpoints", copy / "checkpoints" / "best"
    # Step 2 was not evaluated: the last one, which learnt most, was.
    assert best.read_text() == "step-00000006\n"
    scored(copy, 4, 0.5)
    assert find(best).name == "step-00000004"
    scored(copy, 2, 0.1, healthy=False)
    scored(copy, 6, float("nan"))
    assert find(best).name == "step-00000004"
    best.unlink()  # as in a run of earlier versions
    assert find(best).name == "step-00000004"
    monkeypatch.setattr("sys.argv", ["pretrain", "checkpoints", str(copy)])
    with pytest.raises(SystemExit, match=r"^(0|None)$"):
        main()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best" in line]
    assert "0.5000 best" in line
    listed = inventory.entries(RunDirectory(copy), Retention(1))
    assert [one.best for one in listed] == [False, True, False]
    inventory.remove_others(RunDirectory(copy), Retention(1, keep_best=1))
    assert best.read_text() == "step-00000004\n"
    for step in (4, 6):
        scored(copy, step, None)
    with pytest.raises(CheckpointError, match=r"holds no healthy checkpoint whose step was evaluated"):
        find(checkpoints / "best")
