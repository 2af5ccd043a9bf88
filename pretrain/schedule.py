"""The learning rate as a pure function of the step number: nothing to save, nothing to restore.

Warm-up, then cosine (Loshchilov & Hutter 2017, eq. 5, one cycle). Steps s from 0, w = warmup_steps, S = max_steps:

    s < w:   peak_lr · (s + 1) / w
    s >= w:  min_lr + (peak_lr − min_lr) · (1 + cos(π · (s + 1 − w) / (S − w))) / 2

So the first step learns (peak_lr / w, not 0), step w − 1 has exactly peak_lr, and step S − 1 exactly min_lr.
"""

from __future__ import annotations

import math

from pretrain.config import ScheduleTable


def learning_rate(step: int, schedule: ScheduleTable) -> float:
    """The rate of optimizer step `step`, counted from 0. ValueError outside 0 … max_steps − 1."""
    if not 0 <= step < schedule.max_steps:
        raise ValueError(f"step {step} is outside the schedule's 0 … {schedule.max_steps - 1}")
    if step < schedule.warmup_steps:
        return schedule.peak_lr * ((step + 1) / schedule.warmup_steps)
    progress = (step + 1 - schedule.warmup_steps) / (schedule.max_steps - schedule.warmup_steps)
    return schedule.min_lr + (schedule.peak_lr - schedule.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
