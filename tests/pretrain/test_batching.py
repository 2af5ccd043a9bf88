from __future__ import annotations

import pytest

from pretrain.batching import BatchPlan
from pretrain.config import RecipeError


def test_the_sums():
    plan = BatchPlan(global_batch_size=256, micro_batch_size=8, world_size=4, seq_len=2048)
    assert plan.gradient_accumulation_steps == 8
    assert plan.tokens_per_step == 524_288
    assert plan.tokens_per_micro_step == 16_384
    assert plan.sequences_per_micro_step * plan.gradient_accumulation_steps == plan.global_batch_size


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_tokens_per_step_do_not_depend_on_ranks(ranks):
    assert BatchPlan(256, 8, ranks, 2048).tokens_per_step == 524_288


@pytest.mark.parametrize(
    "batch, micro, ranks, says",
    [
        (250, 8, 3, "8 × 3 = 24: use 240 or 264"),
        (4, 8, 1, "use 8,"),
        (0, 1, 1, "at least 1"),
        (8, 8, 0, "world_size = 0"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(batch, micro, ranks, says):
    with pytest.raises(RecipeError, match=says):
        BatchPlan(batch, micro, ranks, 128)
