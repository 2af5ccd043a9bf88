"""The learning rate as a pure function of the step number: nothing to save, nothing to restore.

Steps s from 0, w = warmup_steps, S = max_steps. A linear warm-up; from step b on a fall, of which q is still left:

    s < w:        peak_lr · (s + 1) / w
    w <= s < b:   peak_lr
    s >= b:       min_lr + (peak_lr − min_lr) · shape(q),    q = (S − s) / (S − b + 1)

    "cosine"      b = w                  shape(q) = (1 + cos π(1 − q)) / 2    Loshchilov & Hutter 2017, eq. 5, one cycle
    "linear"      b = w                  shape(q) = q
    "wsd"         b = S − decay_steps    shape(q) = 1 − √(1 − q), or q        Hu et al. 2024 (warm-up, stable, decay)
    "constant"    b = S

A fall leaves from the last step before it (q = 1, the peak) and arrives (q = 0, min_lr) at step S, one behind the
last: so every step of it is below the one before, and **no step is spent at rate 0**, also where min_lr is 0. This is
one rule for all names. Were min_lr the rate of step S − 1, a run to 0 would read its last batch and learn nothing from
it; were step b still at the peak, as in the papers, a decay of one step would not fall.

"wsd" falls as 1 − √ of the part that is over unless decay_shape says "linear": Hägele et al. 2024 find it consistently
better. No rate before step b depends on S, so a stable run, resumed at any checkpoint with a max_steps and decay_steps
that put b there, decays from there, and is up to there the stable run to the last bit.
"""

from __future__ import annotations

import math

from pretrain.config import ScheduleTable


def learning_rate(step: int, schedule: ScheduleTable) -> float:
    """The rate of optimizer step `step`, counted from 0; always above 0. ValueError outside 0 … max_steps − 1."""
    if not 0 <= step < schedule.max_steps:
        raise ValueError(f"step {step} is outside the schedule's 0 … {schedule.max_steps - 1}")
    if step < schedule.warmup_steps:
        return schedule.peak_lr * ((step + 1) / schedule.warmup_steps)
    begin = first_falling_step(schedule)
    if step < begin:
        return schedule.peak_lr
    left = (schedule.max_steps - step) / (schedule.max_steps - begin + 1)
    rate = schedule.min_lr + (schedule.peak_lr - schedule.min_lr) * _shape(left, schedule)
    return min(rate, schedule.peak_lr)  # the sum may be the last bit above it


def first_falling_step(schedule: ScheduleTable) -> int:
    """The step, from 0, with which the rate begins to fall; `max_steps` where it never does."""
    if schedule.name == "constant":
        return schedule.max_steps
    if schedule.name == "wsd":
        return schedule.max_steps - (schedule.decay_steps or 0)  # the recipe's own check: it is there
    return schedule.warmup_steps


def _shape(left: float, schedule: ScheduleTable) -> float:
    """The formulas above, written so that the smallest `left` does not vanish in a difference to 1."""
    if schedule.name == "cosine":
        return math.sin(0.5 * math.pi * left) ** 2
    if schedule.name == "wsd" and schedule.decay_shape != "linear":
        return left / (1.0 + math.sqrt(1.0 - left))
    return left


def jump(step: int, rate_before: float, schedule: ScheduleTable) -> str | None:
    """One line where a run that resumes at `step` (from 0) has not come by this schedule; None where it goes on in it.

    `rate_before` is what the step before really had. A schedule may change on the way, and a late decay is made so;
    but a rate that jumps because of it is said aloud.
    """
    if not 0 < step < schedule.max_steps:
        return None
    expected, rate = learning_rate(step - 1, schedule), learning_rate(step, schedule)
    if any(math.isclose(rate_before, one, rel_tol=1e-6) for one in (expected, rate)):
        return None
    begin = first_falling_step(schedule)
    fall = f", in a fall that begins with step {begin + 1}" if begin < step else ""
    remedy = f": to decay from here, set schedule.max_steps = {step + (schedule.decay_steps or 0)}"
    return (
        f"warning: the learning rate jumps from {rate_before:.6g} in step {step} to {rate:.6g} in step {step + 1}; "
        f"this schedule has {expected:.6g} for step {step}{fall}{remedy if fall and schedule.name == 'wsd' else ''}"
    )
