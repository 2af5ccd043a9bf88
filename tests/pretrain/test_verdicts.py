"""Verdicts on differences: by hand, against tables of Student's t, and how often they are wrong on noise alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pretrain.verdicts import Noise, difference, noise, student_t


@pytest.mark.parametrize(
    "freedom, confidence, t",
    [
        (1, 0.5, 1.0),
        (1, 0.95, 12.706205),
        (2, 0.95, 4.302653),
        (3, 0.95, 3.182446),
        (4, 0.95, 2.776445),
        (9, 0.95, 2.262157),
        (18, 0.95, 2.100922),
        (9, 1 - 0.05 / 17, 4.037149),
        (18, 1 - 0.05 / 17, 3.436864),
    ],
)
def test_students_t(freedom: int, confidence: float, t: float):
    assert student_t(freedom, confidence) == pytest.approx(t, rel=1e-6)


def test_alone_by_hand():
    """Differences −0.1 and −0.3: mean −0.2, deviation 0.1414, standard error 0.1: 12.7 of them are more than 0.2."""
    apart = difference([2.9, 2.7], [3.0, 3.0], Noise(1.0, 9))
    assert apart.mean == pytest.approx(-0.2)
    assert apart.standard_error == pytest.approx(0.1)
    assert apart.alone == "within the noise"
    assert difference([2.80, 2.79], [3.0, 3.0], Noise(1.0, 9)).alone == "better"  # 0.205 is more than 12.7 · 0.005
    assert difference([3.20, 3.21], [3.0, 3.0], Noise(1.0, 9)).alone == "worse"
    assert difference([3.0, 3.1], [3.0, 3.1], Noise(0.0, 9)).together == "within the noise"
    assert difference([2.0], [3.0], None).alone == "one seed: no verdict"
    assert difference([math.nan, 3.0], [3.0, 3.0], None).together == "not finite"


def test_together_by_hand():
    """Noise 0.1 of 9 degrees of freedom, two seeds: a difference has the error 0.1, and t is 2.262 of one comparison,
    4.037 where 17 are made."""
    pooled = Noise(0.1, 9)
    assert difference([2.77, 2.77], [3.0, 3.0], pooled).together == "better"
    assert difference([2.78, 2.78], [3.0, 3.0], pooled).together == "within the noise"
    assert difference([3.40, 3.40], [3.0, 3.0], pooled, 17).together == "within the noise"
    assert difference([3.41, 3.41], [3.0, 3.0], pooled, 17).together == "worse"


def test_pooled_noise_is_the_residual_of_variant_and_seed():
    """Rows of 1, 2, 4 and 2, 3, 6: means 7/3 and 11/3, of the seeds 1.5, 2.5, 5; rest ±(1/6, 1/6, −1/3)."""
    pooled = noise([[1.0, 2.0, 4.0], [2.0, 3.0, 6.0]])
    assert pooled is not None
    assert pooled.deviation == pytest.approx(math.sqrt(2 * (1 / 36 + 1 / 36 + 1 / 9) / 2))
    assert pooled.freedom == 2
    assert noise([[1.0, 2.0, 4.0], [2.0, 3.0, 6.0], [5.0, math.nan, 5.0]]) == pooled
    assert noise([[1.0], [2.0]]) is noise([[1.0, 2.0]]) is None


def test_two_variants_are_judged_alike_both_ways():
    ours, others = [2.9, 2.6, 2.8], [3.0, 3.0, 3.1]
    pooled = noise([ours, others])
    assert pooled is not None
    apart = difference(ours, others, pooled)
    assert apart.standard_error == pytest.approx(pooled.deviation * math.sqrt(2 / 3))
    assert apart.alone == apart.together


def test_noise_alone_is_seldom_a_difference():
    """400 ladders of ten equal variants and two seeds: alone 17 comparisons are wrong in some twentieth, together in
    at most a twentieth of the ladders; a true difference of 6 deviations is seen by most of them."""
    random = np.random.default_rng(1)
    wrong_alone = wrong_together = seen = 0
    for _ in range(400):
        losses = random.normal(size=(10, 2)) + random.normal(size=(1, 2))  # a seed moves all variants
        pooled = noise(losses.tolist())
        found = [difference(losses[at].tolist(), losses[0].tolist(), pooled, 17) for at in range(1, 10)]
        found += [difference(losses[at].tolist(), losses[at - 1].tolist(), pooled, 17) for at in range(2, 10)]
        wrong_alone += sum(one.alone != "within the noise" for one in found)
        wrong_together += any(one.together != "within the noise" for one in found)
        seen += difference((losses[1] + 6).tolist(), losses[0].tolist(), pooled, 17).together == "worse"
    assert 0.03 < wrong_alone / (17 * 400) < 0.07
    assert wrong_together <= 20
    assert seen > 280
