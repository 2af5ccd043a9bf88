"""Which differences between variants are larger than the noise between seeds. A table of losses, variants × seeds, of
which a seed does to all variants alike: what it does cancels in differences.

Two ways to judge a difference, and both are told. Alone: by how far it differs from seed to seed itself, Student's t
of seeds − 1 degrees of freedom at 95 %; of twenty such verdicts one is wrong by chance. Together: the noise of all
variants pooled, as the residual of the two-way layout loss = variant + seed + noise (Fisher's randomised blocks), with
(variants − 1) · (seeds − 1) degrees of freedom, and t so large that with 95 % not one of all comparisons is wrong
(Bonferroni). That sees far more with few seeds, and takes the noise of all variants for equally large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95
WITHIN = "within the noise"
ONE_SEED = "one seed: no verdict"
NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one loss, behind what its variant and its seed do; degrees of freedom it was found with."""

    deviation: float
    freedom: int


def noise(losses: Sequence[Sequence[float]]) -> Noise | None:
    """Pooled over the variants that are finite with every seed; None where there is one seed or one such variant."""
    table = np.array([row for row in losses if all(map(math.isfinite, row))], dtype=np.float64)
    if len(table) < 2 or table.shape[1] < 2:
        return None
    rest = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return Noise(math.sqrt(float((rest**2).sum()) / freedom), freedom)


@dataclass(frozen=True)
class Difference:
    """Of losses, over the seeds; `standard_error` and `alone` of it alone, `together` with the pooled noise."""

    mean: float
    standard_error: float | None  # None: one seed has no spread
    alone: str
    together: str


def difference(
    losses: Sequence[float], others: Sequence[float], pooled: Noise | None, comparisons: int = 1
) -> Difference:
    """Seed by seed, losses minus others; one of so many comparisons that are made."""
    apart = [one - other for one, other in zip(losses, others, strict=True)]
    mean = statistics.fmean(apart)
    if not math.isfinite(mean):
        return Difference(mean, None, NOT_FINITE, NOT_FINITE)
    if len(apart) < 2 or pooled is None:
        return Difference(mean, None, ONE_SEED, ONE_SEED)
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    alone = _verdict(mean, error * student_t(len(apart) - 1))
    needed = student_t(pooled.freedom, 1 - (1 - CONFIDENCE) / comparisons)
    return Difference(mean, error, alone, _verdict(mean, needed * pooled.deviation * math.sqrt(2 / len(apart))))


def _verdict(mean: float, needed: float) -> str:
    if abs(mean) <= needed or mean == 0:
        return WITHIN
    return "better" if mean < 0 else "worse"


@cache
def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that Student's distribution stays within, on both sides of 0, with this probability."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t) for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
