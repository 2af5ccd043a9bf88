"""Which checkpoints stay: the rule against a slow reading of its own words, over random runs; a recipe's part in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pretrain.config import RecipeError, parse_recipe, to_toml
from pretrain.retention import Reason, Retention, Saved

Tables = Callable[..., dict[str, Any]]


def stays(rule: Retention, checkpoints: list[Saved], one: Saved) -> set[Reason]:
    """The same rule, a question at a time."""
    reasons: set[Reason] = set()
    if sum(other.step > one.step for other in checkpoints) < rule.keep_last:
        reasons.add("last")
    if rule.keep_every_steps and one.step % rule.keep_every_steps == 0:
        reasons.add("every")
    if one.healthy and one.score is not None and one.score == one.score:
        better = [
            other
            for other in checkpoints
            if other.healthy and other.score is not None and (other.score, -other.step) < (one.score, -one.step)
        ]
        if len(better) < rule.keep_best:
            reasons.add("best")
    newest_healthy = one.healthy and sum(other.healthy and other.step > one.step for other in checkpoints) < 2
    return reasons or ({"healthy"} if newest_healthy else set())


def test_the_rule_is_what_it_says() -> None:
    draw = random.Random(5)
    given: set[Reason] = set()
    for _ in range(400):
        rule = Retention(draw.randint(1, 4), draw.choice([None, 3, 4]), draw.randint(0, 3))
        steps = draw.sample(range(1, 30), draw.randint(0, 12))
        checkpoints = [
            Saved(step, draw.choice([None, 1.0, 2.0, draw.random(), float("nan")]), draw.random() < 0.5)
            for step in steps
        ]
        reasons = rule.reasons(checkpoints)
        assert list(reasons) == sorted(steps)
        for one in checkpoints:
            assert set(reasons[one.step]) == stays(rule, checkpoints, one), (rule, one)
            given |= set(reasons[one.step])
    assert given == {"last", "every", "best", "healthy"}


def test_the_last_healthy_ones_outlive_any_number_of_others() -> None:
    """As a run does it: a save, then what nothing keeps is gone."""
    rule, there = Retention(keep_last=2), list[Saved]()
    for step in range(1, 50):
        there.append(Saved(step, healthy=step <= 10))
        reasons = rule.reasons(there)
        there = [one for one in there if reasons[one.step]]
    assert [one.step for one in there] == [9, 10, 48, 49]
    assert rule.reasons(there) == {9: ("healthy",), 10: ("healthy",), 48: ("last",), 49: ("last",)}


def test_a_recipe_whose_rule_could_keep_nothing_is_refused(tiny_recipe: Tables) -> None:
    table = {"every_steps": 4, "keep_last": 1, "keep_every_steps": 12, "keep_best": 2}
    config = parse_recipe(tiny_recipe(checkpoint=table, evaluation={"every_steps": 2}))
    assert Retention.of(config.checkpoint) == Retention(1, 12, 2)
    assert "keep_every_steps = 12\nkeep_best = 2\n" in to_toml(config)
    assert Retention.of(parse_recipe(tiny_recipe()).checkpoint) == Retention(2)
    with pytest.raises(RecipeError, match=r"keep_every_steps 10 is no multiple of every_steps 4.*use 8 or 12$"):
        parse_recipe(tiny_recipe(checkpoint={"every_steps": 4, "keep_every_steps": 10}))
    with pytest.raises(RecipeError, match=r"use 4$"):
        parse_recipe(tiny_recipe(checkpoint={"every_steps": 4, "keep_every_steps": 3}))


@pytest.mark.parametrize("saved, scored, meets", [(4, 4, 4), (4, 2, 4), (4, 6, 12), (4, 16, 16), (6, 5, 30)])
def test_the_best_are_chosen_only_where_checkpoints_are_scored(
    saved: int, scored: int, meets: int, tiny_recipe: Tables
) -> None:
    """The tiny recipe has 16 steps, and an evaluation and a checkpoint at the last one whatever else it says."""
    tables = tiny_recipe(checkpoint={"every_steps": saved}, evaluation={"every_steps": scored})
    assert parse_recipe(tables).checkpoint.keep_best == 0
    tables["checkpoint"] = {**tables["checkpoint"], "keep_best": 1}
    if meets < 16:
        parse_recipe(tables)
    else:
        with pytest.raises(RecipeError, match=rf"first meet at step {meets}, of schedule.max_steps 16: set evaluation"):
            parse_recipe(tables)
