"""A trained checkpoint read in longer windows by name: the angles, the losses and the command are those of the model
that is named, the weights are the checkpoint's. That a run goes on so: test_changes.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.transformer import Transformer
from pretrain.changes import read_otherwise
from pretrain.config import RecipeError
from pretrain.subject import open_subject
from tests.command_line import run_command
from tests.pretrain.test_evaluation import write_model

WAYS = {
    "unscaled": {"seq_len": 96},
    "base": {"seq_len": 96, "rope_base": 5e4},
    "linear": {"seq_len": 96, "rope_scaling": "linear", "rope_scaling_factor": 3, "rope_original_seq_len": 32},
    "dynamic": {"seq_len": 96, "rope_scaling": "dynamic", "rope_original_seq_len": 32},
    "yarn": {"seq_len": 96, "rope_scaling": "yarn", "rope_scaling_factor": 3.5, "rope_original_seq_len": 32},
}


def overrides(fields: dict[str, Any]) -> list[str]:
    return [f"model.{field}={value}" for field, value in fields.items()]


@pytest.fixture(scope="module")
def trained(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long") / "model", tokenizer)


def test_weights_are_read_as_the_model_that_is_named(trained: Path) -> None:
    """Every way gives the logits of a model built with those fields and given the weights, and no two give the same."""
    own = open_subject(trained)
    ids_bt = torch.randint(own.config.vocab_size, (1, 96), generator=torch.Generator().manual_seed(3))
    found = {}
    for way, fields in WAYS.items():
        subject = open_subject(trained, overrides=overrides(fields))
        assert subject.config == replace(own.config, **fields)
        assert subject.name == f"{own.name}, {', '.join(overrides(fields))}"
        built = Transformer(subject.config)
        built.load_state_dict(own.model.state_dict())
        with torch.no_grad():
            found[way], expected = subject.model(ids_bt), built(ids_bt)
        assert torch.equal(found[way], expected)
    for one in WAYS:
        assert all(not torch.equal(found[one], found[other]) for other in WAYS if other != one)
    with torch.no_grad():
        assert torch.equal(found["unscaled"][:, :32], own.model(ids_bt[:, :32]))


def test_the_command_scores_by_longer_context(trained: Path, corpus: Path) -> None:
    data = ("--data", corpus / "english.jsonl", "--max-tokens", "600")
    given = [word for override in overrides(WAYS["yarn"]) for word in ("--set", override)]
    done = run_command("pretrain", "evaluate", trained, *data, *given, "--against", trained, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    report = json.loads(done.stdout)
    assert (report["rule"]["seq_len"], report["against"]["rule"]["seq_len"]) == (96, 32)
    assert report["by_context"][-1]["context_tokens"] == 96
    assert "model.rope_scaling=yarn" in report["subject"]


def test_what_weights_do_not_allow_is_one_line(trained: Path) -> None:
    config = open_subject(trained).config
    learned = replace(config, positions="learned")
    for own, given, words in (
        (config, ["model.d_ff=64"], "--set model.d_ff=64: weights are read with another seq_len, norm_eps, init_std,"),
        (config, ["seed=3"], "of [model], no more"),
        (config, ["seq_len=64"], "of [model], no more"),
        (config, ["model.rope_scaling=yarn"], 'rope_scaling = "yarn" needs rope_original_seq_len'),
        (config, ["model.seq_len=0"], "seq_len = 0 must be positive"),
        (config, ["model.seq_len"], "write it as table.key=VALUE"),
        (learned, ["model.seq_len=64"], "weights are read with another norm_eps,"),
    ):
        with pytest.raises(RecipeError) as refused:
            read_otherwise(own, given)
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)
    done = run_command("pretrain", "evaluate", trained, "--set", "model.d_ff=64")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --set model.d_ff=64: ")
