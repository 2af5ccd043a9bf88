"""Scaling laws: published constants by hand, laws from files, and a fit that finds what made the points."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pretrain.config import RecipeError
from pretrain.scaling_fit import Point, bootstrap, fit
from pretrain.scaling_law import BESIROGLU, HOFFMANN, Range, ScalingLaw, read_law

LAW = {"E": 1.5, "A": 100, "B": 200.0, "alpha": 0.3, "beta": 0.25}


def points(law, noise, seed=0, sizes=6, tokens=5):
    draws = np.random.default_rng(seed)
    return [
        Point(int(n), int(d), law.loss(int(n), int(d)) * math.exp(noise * draws.normal()))
        for n in np.geomspace(1e5, 1e8, sizes)
        for d in np.geomspace(1e6, 1e10, tokens)
    ]


# ---------------------------------------------------------------- published constants


@pytest.mark.parametrize(
    "law, terms",
    [(HOFFMANN, (1.69, 406.4 / 4868, 410.7 / 2517)), (BESIROGLU, (1.8172, 482.01 / 5915, 2085.43 / 27737))],
)
def test_the_loss_of_chinchilla_itself(law, terms):
    """70e9 parameters and 1.4e12 tokens have the logarithms 24.9718 and 27.9675; exponents times these, in exp."""
    assert (law.E, law.of_size(70e9), law.of_data(1.4e12)) == pytest.approx(terms, rel=1e-3)
    assert law.loss(70e9, 1.4e12) == pytest.approx(sum(terms), abs=1e-4)


def test_one_fit_says_twenty_tokens_a_parameter_and_the_other_does_not():
    assert BESIROGLU.optimal_tokens(70e9) / 70e9 == pytest.approx(18.4, abs=0.05)
    assert HOFFMANN.optimal_tokens(70e9) / 70e9 == pytest.approx(109.4, abs=0.05)


@pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU])
def test_no_neighbour_of_the_optimum_does_better(law):
    flops = 1e20
    size, tokens = law.optimum(flops)
    assert 6 * size * tokens == pytest.approx(flops)
    assert law.optimal_tokens(size) == pytest.approx(tokens)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert law.loss(size * factor, tokens / factor) > law.loss(size, tokens)


# ---------------------------------------------------------------- laws from files


def test_a_law_comes_back_from_its_file(tmp_path):
    law = ScalingLaw("mine", "a sweep", 0.0, 3.0, 4.0, 0.5, 0.25, Range(1e5, 1e6), None)
    path = tmp_path / "law.json"
    path.write_text(json.dumps({"points": [], "law": law.to_dict()}), encoding="utf-8")
    assert read_law(path) == law


def test_five_constants_are_enough(tmp_path):
    path = tmp_path / "law.json"
    path.write_text(json.dumps(LAW), encoding="utf-8")
    assert read_law(path).loss(1e6, 1e8) == pytest.approx(1.5 + 100 / 1e6**0.3 + 200 / 1e8**0.25)


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "not JSON"),
        ("[1]", "should be an object"),
        (json.dumps({"law": 3}), "should be an object"),
        (json.dumps(LAW | {"alpha": None}), "alpha = None: should be a number"),
        (json.dumps({key: value for key, value in LAW.items() if key != "B"}), "B is missing"),
        (json.dumps(LAW | {"A": -1}), "A = -1: should be a number, more than 0"),
        (json.dumps(LAW | {"E": True}), "E = True"),
        (json.dumps(LAW | {"E": float("nan")}), "E = nan"),
        (json.dumps(LAW | {"B": 10**400}), "B = a number of 1329 bits"),
        (json.dumps(LAW | {"beta": 1e-9}), "an exponent should be between"),
        (json.dumps(LAW | {"tokens": [1, 2]}), "tokens = [1, 2]: should have least and most"),
        (json.dumps(LAW | {"parameters": {"least": 3, "most": 2}}), "in order"),
        ("\xff", "not JSON"),
    ],
)
def test_what_is_no_law_is_one_line(tmp_path, content, says):
    path = tmp_path / "law.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RecipeError) as refused:
        read_law(path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------- the fit


def test_exact_points_give_their_constants_back():
    found = fit(points(BESIROGLU, noise=0.0), "found", "")
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(BESIROGLU, name), rel=1e-4)
    assert found.objective < 1e-12
    assert found.law.parameters == Range(1e5, 1e8)


def test_noise_moves_the_exponents_little_and_one_wild_point_hardly():
    """Huber's loss: a point that is off by 30 percent pulls as one that is off by a thousandth."""
    noisy = points(HOFFMANN, noise=2e-3, seed=4)
    wild = [Point(one.parameters, one.tokens, one.loss * (1.3 if i == 7 else 1)) for i, one in enumerate(noisy)]
    for made in (noisy, wild):
        found = fit(made, "found", "").law
        assert found.alpha == pytest.approx(HOFFMANN.alpha, abs=0.01)
        assert found.beta == pytest.approx(HOFFMANN.beta, abs=0.01)
    assert abs(fit(wild, "found", "").residuals[7]) == pytest.approx(math.log(1.3), abs=0.02)


def test_a_law_without_a_floor_is_found_too():
    law = ScalingLaw("none", "", 0.0, 50.0, 30.0, 0.2, 0.15)
    found = fit(points(law, noise=0.0), "found", "").law
    assert found.E < 0.02
    assert (found.alpha, found.beta) == pytest.approx((0.2, 0.15), abs=2e-3)


def test_what_tells_nothing_apart_is_refused():
    some = points(HOFFMANN, noise=0.0)
    with pytest.raises(ValueError, match="4 points of 1 sizes and 4 numbers of tokens"):
        fit(some[:4], "", "")
    with pytest.raises(ValueError, match="5 points of 1 sizes"):
        fit(some[:5], "", "")


def test_the_bootstrap_spreads_around_the_fit_and_is_the_same_again():
    made = points(HOFFMANN, noise=1e-2, seed=2, sizes=4, tokens=4)
    laws = bootstrap(made, 8, seed=1)
    alphas = [law.alpha for law in laws]
    assert min(alphas) < fit(made, "", "").law.alpha < max(alphas)
    assert alphas == [law.alpha for law in bootstrap(made, 8, seed=1)]
