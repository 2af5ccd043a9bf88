"""A scaling law fitted to runs of one's own: sizes, tokens and held-out losses in, five constants out.

As in the third approach of Hoffmann et al. (2022, section 3.3): with a = log A, b = log B, e = log E,

    minimise over a, b, e, α, β   Σ Huber(log-sum-exp(a − α log N, b − β log D, e) − log L),  δ = 0.001

from several starts, keeping the best. They use L-BFGS; here it is Levenberg and Marquardt's least squares with weights
that make it Huber's loss, in numpy alone. For each pair of exponents of a grid, where L is linear in the other three,
these come from ordinary least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pretrain.scaling_law import Range, ScalingLaw

DELTA = 1e-3
EXPONENTS = (0.1, 0.2, 0.35, 0.6, 1.0)
ITERATIONS = 300
LEAST_E = 1e-6  # of nats a token: what stands for "no loss below which no model gets"

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One run: all its parameters, the tokens it was trained on, its held-out loss in nats a token."""

    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Fit:
    """The law, and how far from it the points are."""

    law: ScalingLaw
    objective: float  # the sum of Huber losses
    residuals: tuple[float, ...]  # log of law's loss − log of measured loss, by point


def fit(points: Sequence[Point], name: str, source: str) -> Fit:
    """The law of `points`. ValueError: fewer than 5, or of one size or number of tokens, which tell nothing apart."""
    sizes, tokens = {one.parameters for one in points}, {one.tokens for one in points}
    if len(set(points)) < 5 or len(sizes) < 2 or len(tokens) < 2:
        raise ValueError(
            f"{len(set(points))} points of {len(sizes)} sizes and {len(tokens)} numbers of tokens: five constants need "
            "5 points or more, of 2 sizes and 2 numbers of tokens at least"
        )
    n, d, loss = (np.log([getattr(one, key) for one in points]) for key in ("parameters", "tokens", "loss"))
    n_middle, d_middle = n.mean(), d.mean()  # of logarithms around 0, constants and exponents come apart
    n, d = n - n_middle, d - d_middle
    found = [_descend(start, n, d, loss) for start in _starts(n, d, np.exp(loss))]
    objective, (e, a, b, alpha, beta) = min(found, key=lambda one: one[0])
    terms = _terms(np.array([e, a, b, alpha, beta]), n, d)
    law = ScalingLaw(
        name=name,
        source=source,
        E=float(np.exp(e)),
        A=float(np.exp(a + alpha * n_middle)),
        B=float(np.exp(b + beta * d_middle)),
        alpha=float(alpha),
        beta=float(beta),
        parameters=Range(min(sizes), max(sizes)),
        tokens=Range(min(tokens), max(tokens)),
    )
    return Fit(law, float(objective), tuple((np.logaddexp.reduce(terms) - loss).tolist()))


def bootstrap(points: Sequence[Point], times: int, seed: int) -> list[ScalingLaw]:
    """Laws of as many points drawn with replacement, `times` of them: their spread says how little the points fix."""
    draws = np.random.default_rng(seed)
    laws: list[ScalingLaw] = []
    while len(laws) < times:
        drawn = [points[index] for index in draws.integers(len(points), size=len(points))]
        try:
            laws.append(fit(drawn, "bootstrap", "").law)
        except ValueError:  # all of one size, or nearly: tells nothing
            continue
    return laws


def _starts(n: Array, d: Array, loss: Array) -> list[Array]:
    """For each pair of exponents the least squares of L in E, A and B; where one is negative, a small number."""
    starts = []
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        columns = np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], axis=1)
        solution, *_ = np.linalg.lstsq(columns, loss, rcond=None)
        starts.append(np.array([*np.log(np.maximum(solution, 1e-2)), alpha, beta]))
    return starts


def _terms(theta: Array, n: Array, d: Array) -> Array:
    """The logarithms of the three terms, by point: [3, points]."""
    e, a, b, alpha, beta = theta
    return np.stack([np.full_like(n, e), a - alpha * n, b - beta * d])


def _descend(theta: Array, n: Array, d: Array, log_loss: Array) -> tuple[float, Array]:
    """The minimum that a start leads to: objective and (e, a, b, α, β). Exponents stay positive, E above LEAST_E."""

    def residuals(at: Array) -> tuple[Array, Array]:
        terms = _terms(at, n, d)
        whole = np.logaddexp.reduce(terms)
        return whole - log_loss, np.exp(terms - whole)

    least = np.array([np.log(LEAST_E), -50.0, -50.0, 1e-3, 1e-3])
    most = np.array([50.0, 50.0, 50.0, 5.0, 5.0])
    off, shares = residuals(theta)
    objective, damping = _huber(off), 1e-3
    for _ in range(ITERATIONS):
        of_e, of_a, of_b = shares  # the derivatives of log-sum-exp
        slopes = np.stack([of_e, of_a, of_b, -of_a * n, -of_b * d], axis=1)
        weights = DELTA / np.maximum(np.abs(off), DELTA)
        curvature = slopes.T @ (weights[:, None] * slopes)
        gradient = slopes.T @ (weights * off)
        damped = curvature + damping * np.diag(np.diag(curvature) + 1e-9)
        tried = np.clip(theta - np.linalg.solve(damped, gradient), least, most)
        tried_off, tried_shares = residuals(tried)
        better = _huber(tried_off)
        if better < objective:
            gain, theta, off, shares = objective - better, tried, tried_off, tried_shares
            objective, damping = better, max(damping / 3, 1e-12)
            if gain < 1e-10 * objective:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return objective, theta


def _huber(off: Array) -> float:
    size = np.abs(off)
    return float(np.where(size <= DELTA, size**2 / 2, DELTA * (size - DELTA / 2)).sum())
