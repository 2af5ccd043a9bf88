"""The family of components under the real engine: losses and weights over steps as a plain process has them."""

from __future__ import annotations

import itertools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.history import History
from data_pipeline.loader import Batch
from model.accounting import is_matrix, parameter_shapes
from model.config import PRESETS, ModelConfig, from_table
from model.generate import generate
from pretrain.changes import differences
from pretrain.checkpoint import CheckpointError, refuse_other_model
from pretrain.config import RunConfig, parse_recipe, to_toml
from pretrain.engine import process_group
from pretrain.memory_sizes import group_sizes
from pretrain.optimizer import build_optimizer, parameter_groups
from pretrain.runtime import Ranks
from pretrain.step import train_step
from tests.pretrain.test_engine import build, build_model, micro_batches, plan_of, recipe
from tests.ranks import run_ranks

STEPS = 2
PROMPTS = [[5, 6, 7, 8], [9, 10]]
MLA = {"attention": "mla", "n_kv_heads": 2, "mla_latent": 48, "mla_rope_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "classic": {"norm": "layer", "norm_place": "post", "bias": True, "ffn": "relu", "positions": "sinusoidal"},
    "gpt2": {"norm": "layer", "bias": True, "ffn": "gelu", "positions": "learned", "n_kv_heads": 2, "tied": False},
    "deepnorm, no positions": {"norm_place": "deepnorm", "positions": "none", "bias": True},
    "qk-norm, window, yarn": {
        "qk_norm": True, "sliding_window": 9,
        "rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 16,
    },
    "mla": {**MLA, "bias": True},
    "streams": {"residual": "hyper", "n_streams": 3},
    "mla, streams, dynamic": {
        **MLA, "residual": "hyper", "n_streams": 2,
        "rope_scaling": "dynamic", "rope_scaling_factor": 2.0, "rope_original_seq_len": 16,
    },
}  # fmt: skip


def training(name: str, optimizer: str = "adamw") -> RunConfig:
    config = recipe(compute="fp32", model=MODELS[name])
    table = config.optimizer.model_copy(update={"name": optimizer})
    return config.model_copy(update={"optimizer": table})


def engine_case(ranks: Ranks, names: list[str]) -> dict[tuple[str, int, str], Any]:
    """Losses of some steps, the weights behind them, and under ZeRO-3 how the split model continues texts."""
    found: dict[tuple[str, int, str], Any] = {}
    cases = [*itertools.product(names, (2, 3), ("adamw",)), ("mla, streams, dynamic", 2, "muon")]
    with process_group(torch.device("cpu")):
        for name, stage, optimizer in cases:
            config = training(name, optimizer)
            engine = build(ranks, config, stage)
            batches = micro_batches(config, ranks)
            losses = [train_step(engine, batches, plan_of(config, ranks), lr=1e-3).loss for _ in range(STEPS)]
            continued = generate(engine._engine.module, PROMPTS, 5) if stage == 3 else None
            found[name, stage, optimizer] = (losses, engine.gather_weights(), continued)
    return found if ranks.is_first else {}


@pytest.fixture(scope="module")
def under_engines() -> dict[tuple[str, int, str], Any]:
    return run_ranks(2, engine_case, list(MODELS))[0]


def plain(config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps in one process without an engine; activation checkpointing off."""
    model = build_model(config)
    model.activation_checkpointing = "none"
    optimizer = build_optimizer(model, config, 1e-3)
    batches, losses = micro_batches(config, Ranks(0, 0, 1)), []
    for _ in range(STEPS):
        parts: list[Batch] = [next(batches) for _ in range(4)]
        inputs, targets = (
            torch.cat([torch.from_numpy(x) for x in xs])
            for xs in ([one.inputs for one in parts], [one.targets for one in parts])
        )
        loss = model(inputs, targets)
        mean = loss.loss_sum / loss.token_count
        mean.backward()
        losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_a_plain_process(name: str, under_engines: dict[tuple[str, int, str], Any]) -> None:
    losses, weights = plain(training(name))
    assert losses[1] < losses[0]
    for stage in (2, 3):
        its_losses, its_weights, _ = under_engines[name, stage, "adamw"]
        assert its_losses == pytest.approx(losses, rel=1e-5)
        for parameter, expected in weights.items():
            # AdamW's first steps are signs: where a gradient is near 0, rounding may turn one.
            off = (its_weights[parameter] - expected).abs() > 2e-5
            assert off.float().mean() < 0.01, (stage, parameter)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_split_over_ranks_continues_texts(
    name: str, under_engines: dict[tuple[str, int, str], Any]
) -> None:
    """With a cache, MLA's absorbed step included: as the same weights do in one piece."""
    _, weights, continued = under_engines[name, 3, "adamw"]
    model = build_model(training(name))
    model.load_state_dict(weights, strict=False)
    assert continued == generate(model, PROMPTS, 5)


def test_muon_turns_the_matrices_and_leaves_how_streams_mix_to_adamw(
    under_engines: dict[tuple[str, int, str], Any],
) -> None:
    name = "mla, streams, dynamic"
    losses, weights = plain(training(name, "muon"))
    its_losses, its_weights, _ = under_engines[name, 2, "muon"]
    assert its_losses == pytest.approx(losses, rel=1e-4)
    mixing = "layers.0.mlp_streams.mixing_logits"
    torch.testing.assert_close(its_weights[mixing], weights[mixing], rtol=0, atol=1e-4)


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "mla, streams, dynamic"])
def test_what_is_decayed_and_what_the_budget_thinks_of_it(name: str, decay_embeddings: bool, optimizer: str) -> None:
    config = training(name, optimizer)
    table = config.optimizer.model_copy(update={"decay_embeddings": decay_embeddings})
    model = build_model(config)
    groups = parameter_groups(model, table)
    names = {id(parameter): each for each, parameter in model.named_parameters()}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    matrices = {each for each, shape in parameter_shapes(config.model).items() if is_matrix(each, shape)}
    embeddings = {"embed_tokens.weight", "positions.weight"}
    assert decayed == (matrices if decay_embeddings else matrices - embeddings)
    assert not any(each.endswith((".bias", "norm.weight", "_gates", "mixing_logits")) for each in decayed)
    counted = [[p.numel() for p in group["params"]] for group in groups]
    assert [list(group) for group in group_sizes(config.model, optimizer, decay_embeddings)[0]] == counted


# ---------------------------------------------------------------- recipes and checkpoints


@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_says_its_components_and_leaves_llamas_out(name: str) -> None:
    config = training(name)
    assert parse_recipe(tomllib.loads(to_toml(config))) == config
    assert json.loads(json.dumps(config.model.to_dict())) == config.model.to_dict()
    assert from_table(config.model.to_dict()) == config.model
    assert {*config.model.to_dict()} - {*PRESETS["mini"].to_dict()} == {*MODELS[name]} - {"n_kv_heads", "tied"}
    assert len(PRESETS["mini"].to_dict()) == 13, "what stands in model.json of a Llama is what stood there before"


def written(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(config.to_dict()))
    return folder


def test_weights_of_other_components_are_no_beginning(tmp_path: Path) -> None:
    llama = training("streams").model
    llama = replace(llama, residual="plain", n_streams=1)
    stored = written(tmp_path / "llama", llama)
    refuse_other_model(stored, replace(llama, seq_len=16))
    with pytest.raises(CheckpointError, match=r'norm = "rms".*the recipe\'s has "layer": set model.norm = "rms"'):
        refuse_other_model(stored, replace(llama, norm="layer"))
    with pytest.raises(CheckpointError, match=r"sliding_window = null.*the recipe's has 8: leave out"):
        refuse_other_model(stored, replace(llama, sliding_window=8))
    learned = replace(llama, positions="learned")
    with pytest.raises(CheckpointError, match=r"of a model with seq_len = 48, the recipe's has 16"):
        refuse_other_model(written(tmp_path / "learned", learned), replace(learned, seq_len=16))


def test_learned_positions_are_not_made_more_at_a_resume() -> None:
    def found(positions: str) -> tuple[str | None, str]:
        runs = [
            {"order": {"order_version": 1, "seed": 0, "seq_len": length}, "model": {"positions": positions}}
            for length in (48, 96)
        ]
        first = next(differences(*runs, History(())))
        return first.name, first.line

    assert found("rope") == ("seq_len", ": seq_len was 48 and is now 96")
    assert found("learned") == (None, ": seq_len was 48 and is now 96, and each learned position is a weight")
