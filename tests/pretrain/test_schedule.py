from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest

from pretrain.config import ScheduleTable
from pretrain.schedule import first_falling_step, jump, learning_rate

PEAK, LOW = 3e-4, 3e-5


def schedule(name: str = "cosine", warmup_steps: int = 10, max_steps: int = 100, **values: Any) -> ScheduleTable:
    whole = {"peak_lr": PEAK, "min_lr": 0.0 if name == "constant" else LOW, **values}
    return ScheduleTable.model_validate({"name": name, "warmup_steps": warmup_steps, "max_steps": max_steps, **whole})


def rates(plan: ScheduleTable) -> list[float]:
    return [learning_rate(step, plan) for step in range(plan.max_steps)]


def many() -> list[ScheduleTable]:
    """Every name and shape, falling to 0 and to more: the smallest runs whole, and larger ones at random."""
    sizes = [(warmup, length) for length in range(1, 9) for warmup in range(length)]
    draw = random.Random(5)
    for _ in range(40):
        length = draw.randint(9, 400)
        sizes.append((draw.randrange(length), length))
    found = []
    for warmup, length in sizes:
        for low in (0.0, LOW, PEAK):
            found += [schedule(name, warmup, length, min_lr=low) for name in ("cosine", "linear")]
            decays = {1, length - warmup, draw.randint(1, length - warmup)}
            shapes = ({}, {"decay_shape": "linear"}, {"decay_shape": "sqrt"})
            found += [
                schedule("wsd", warmup, length, min_lr=low, decay_steps=decay, **shape)
                for decay in decays
                for shape in shapes
            ]
        found.append(schedule("constant", warmup, length))
    return found


def test_rises_stays_falls_and_never_learns_nothing() -> None:
    """Every step's rate is finite, above 0 and at most the peak; the parts are monotone and meet at the peak."""
    for plan in many():
        all_rates, begin = rates(plan), first_falling_step(plan)
        warmup, middle, fall = all_rates[: plan.warmup_steps], all_rates[plan.warmup_steps : begin], all_rates[begin:]
        assert all(0 < rate <= PEAK and math.isfinite(rate) for rate in all_rates), plan
        assert warmup == [PEAK * ((step + 1) / plan.warmup_steps) for step in range(plan.warmup_steps)]
        assert warmup[-1:] in ([PEAK], []), plan
        assert set(middle) <= {PEAK}
        if plan.min_lr < PEAK:
            assert all(a > b > plan.min_lr for a, b in pairwise([PEAK, *fall])), plan
        if plan.name == "wsd":
            assert len(fall) == plan.decay_steps


def test_a_fall_is_cut_from_the_peak_to_the_step_behind_the_last() -> None:
    """Its steps are as large as the curve's own, at the joints too, and equal where it is a line."""
    for plan in many():
        if plan.name == "constant" or plan.min_lr == PEAK:
            continue
        points = [PEAK, *rates(plan)[first_falling_step(plan) :], plan.min_lr]
        height, parts = PEAK - plan.min_lr, len(points) - 1
        drops = [a - b for a, b in pairwise(points)]
        if plan.name == "linear" or plan.decay_shape == "linear":
            assert drops == pytest.approx([height / parts] * parts, rel=1e-9)
        elif plan.name == "cosine":
            assert max(drops) <= height * math.sin(math.pi / 2 / parts) * (1 + 1e-9)
            assert drops == pytest.approx(drops[::-1], rel=1e-9)
        else:
            assert max(drops) == drops[0] == pytest.approx(height / math.sqrt(parts))


def test_by_hand() -> None:
    linear = rates(schedule("linear", 2, 5, peak_lr=1.0, min_lr=0.0))
    assert linear == [0.5, 1.0, 0.75, 0.5, 0.25]
    wsd = rates(schedule("wsd", 2, 8, peak_lr=1.0, min_lr=0.0, decay_steps=3))
    assert wsd == pytest.approx([0.5, 1, 1, 1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)])
    cosine = rates(schedule("cosine", 0, 3, peak_lr=1.0, min_lr=0.2))
    assert cosine == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * p)) / 2 for p in (0.25, 0.5, 0.75)])
    assert rates(schedule("constant", 3, 5, peak_lr=3.0)) == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert rates(schedule("cosine", 0, 1, peak_lr=1.0, min_lr=0.0)) == pytest.approx([0.5])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_of_a_trillion_steps_learns_too(name: str) -> None:
    """Where 1 + cos(…) or 1 − √… would be 0 in float64."""
    plan = schedule(name, 0, 10**12, min_lr=0.0, **({"decay_steps": 10**12} if name == "wsd" else {}))
    assert 0 < learning_rate(10**12 - 1, plan) < learning_rate(10**12 - 2, plan) < PEAK


def test_no_rate_is_above_the_peak_by_a_rounding() -> None:
    """min_lr + (peak_lr − min_lr) is here the number behind peak_lr."""
    plan = schedule("cosine", 0, 10**14, peak_lr=0.000947, min_lr=0.000373)
    assert plan.min_lr + (plan.peak_lr - plan.min_lr) > plan.peak_lr
    assert learning_rate(0, plan) == plan.peak_lr


def test_before_its_decay_a_run_knows_nothing_of_its_end() -> None:
    stable = rates(schedule("constant", 10, 400))
    for length, decay in ((100, 30), (101, 1), (400, 400 - 10)):
        plan = schedule("wsd", 10, length, decay_steps=decay)
        assert rates(plan)[: length - decay] == stable[: length - decay]


@pytest.mark.parametrize("step", [-1, 100])
def test_no_rate_outside_the_run(step: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        learning_rate(step, schedule())


def test_a_jump_is_told_and_a_late_decay_is_none() -> None:
    late = schedule("wsd", 10, 60, decay_steps=20)
    for step in (1, 5, 10, 30, 40):
        before = learning_rate(step - 1, schedule("constant", 10, 400))
        assert jump(step, before, late) is None
    said = jump(45, PEAK, late)
    assert said is not None
    a, b = learning_rate(44, late), learning_rate(45, late)
    assert said == (
        f"warning: the learning rate jumps from 0.0003 in step 45 to {b:.6g} in step 46; this schedule has {a:.6g} for "
        "step 45, in a fall that begins with step 41: to decay from here, set schedule.max_steps = 65"
    )
    longer = jump(50, learning_rate(49, schedule(max_steps=50)), schedule(max_steps=100))
    assert longer is not None
    assert "schedule.max_steps" not in longer
    assert jump(0, 1.0, late) is jump(60, 1.0, late) is None
