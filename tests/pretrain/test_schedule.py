from __future__ import annotations

import math

import pytest

from pretrain.config import ScheduleTable
from pretrain.schedule import learning_rate


def schedule(warmup_steps=10, max_steps=100, peak_lr=3e-4, min_lr=3e-5):
    return ScheduleTable(peak_lr=peak_lr, min_lr=min_lr, warmup_steps=warmup_steps, max_steps=max_steps)


def test_the_first_step_learns_and_the_ends_are_exact():
    plan = schedule()
    assert learning_rate(0, plan) == pytest.approx(3e-4 / 10)
    assert learning_rate(9, plan) == 3e-4
    assert learning_rate(99, plan) == 3e-5


def test_half_way_is_half_way():
    assert learning_rate(54, schedule()) == pytest.approx((3e-4 + 3e-5) / 2)


@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 1), (0, 7), (1, 2), (6, 7), (500, 20_000)])
def test_rises_then_falls_and_stays_between_its_ends(warmup_steps, max_steps):
    plan = schedule(warmup_steps, max_steps)
    rates = [learning_rate(step, plan) for step in range(max_steps)]
    top = max(warmup_steps - 1, 0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 < rate <= 3e-4 and math.isfinite(rate) for rate in rates)
    assert rates[-1] == 3e-5


@pytest.mark.parametrize("step", [-1, 100])
def test_no_rate_outside_the_run(step):
    with pytest.raises(ValueError, match="outside"):
        learning_rate(step, schedule())
