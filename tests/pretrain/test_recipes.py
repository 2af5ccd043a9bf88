from __future__ import annotations

import re
import tomllib

import pytest

from pretrain.config import PROJECT_ROOT, load_recipe, parse_recipe, to_toml
from pretrain.plan import plan

RECIPES = sorted((PROJECT_ROOT / "pretrain" / "recipes").glob("*.toml"))


def size(bytes_held):
    return f"{bytes_held / 1e9:.2f} GB" if bytes_held >= 1e9 else f"{bytes_held / 1e6:.0f} MB"


def test_the_recipes_are_all_there():
    assert {path.stem for path in RECIPES} >= {"debug", "mini", "0.5b", "0.5b-bf16-master"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_on_one_rank_and_on_two(path):
    config = load_recipe(path)
    assert parse_recipe(tomllib.loads(to_toml(config))) == config
    for ranks in (1, 2):
        assert plan(config, ranks).batch.tokens_per_step == config.batch.global_batch_size * config.model.seq_len


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_sums_in_the_comments_are_true(path):
    text = path.read_text()
    made = plan(load_recipe(path), 1)
    for name, figure in [
        ("parameters", made.parameters),
        ("tokens per step", made.batch.tokens_per_step),
        ("total tokens", made.total_tokens),
    ]:
        assert re.search(rf"{name} +{figure:,}\b", text), f"{name} {figure:,}"
    for stage in range(4):
        (line,) = re.findall(rf"^#   ZeRO-{stage} (.*)$", text, flags=re.MULTILINE)
        expected = [
            "refused" if row.budget is None else size(row.budget.state_bytes)
            for ranks in (1, 2)
            for row in plan(load_recipe(path), ranks).rows
            if row.stage == stage
        ]
        assert re.findall(r"refused|[\d.]+ [GM]B", line) == expected
