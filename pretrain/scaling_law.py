"""The loss to expect of a model's size and its tokens: L(N, D) = E + A / N^α + B / D^β, in nats a token.

N are all parameters, embeddings included, D the tokens trained on, each of them new to the model. E is what no model
could get below, the second term what a model of that size lacks, the third what training on so little text lacks. The
form is Hoffmann et al.'s (2022, arXiv 2203.15556, equation 2). No torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config import RecipeError, show

FORMULA = "L(N, D) = E + A / N^alpha + B / D^beta"
CONSTANTS = ("E", "A", "B", "alpha", "beta")
TOKENS_PER_PARAMETER = 20  # what Hoffmann et al.'s first two approaches come to: 1.4e12 tokens for 70e9 parameters
FLOPS_PER_PARAMETER_AND_TOKEN = 6


@dataclass(frozen=True)
class Range:
    """From the smallest to the largest that a law was fitted on."""

    least: float
    most: float

    def beyond(self, value: float) -> float | None:
        """How many times below or above the range, as a factor above 1; None within it."""
        if value < self.least:
            return self.least / value
        return value / self.most if value > self.most else None


@dataclass(frozen=True)
class ScalingLaw:
    """The five constants, whose they are, and on what sizes and tokens they were fitted."""

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float
    parameters: Range | None = None
    tokens: Range | None = None

    def of_size(self, parameters: float) -> float:
        """What a model of so many parameters lacks, in nats a token."""
        return self.A * math.pow(parameters, -self.alpha)

    def of_data(self, tokens: float) -> float:
        """What training on so many tokens lacks, in nats a token."""
        return self.B * math.pow(tokens, -self.beta)

    def loss(self, parameters: float, tokens: float) -> float:
        """Expected loss on held-out text, in nats a token."""
        return self.E + self.of_size(parameters) + self.of_data(tokens)

    def optimal_tokens(self, parameters: float) -> float:
        """The tokens for which no other size does better at the same FLOPs.

        Where N·D is constant, L is least where the last two terms, times their exponents, are equal:
        α A / N^α = β B / D^β. inf where that is beyond what a float holds.
        """
        of_size = self.alpha * self.of_size(parameters)
        try:
            return math.pow(self.beta * self.B / of_size, 1 / self.beta)
        except (OverflowError, ZeroDivisionError):
            return math.inf

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens with the least loss at 6·N·D = flops (Hoffmann et al., equation 4)."""
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        log_n = math.log(self.alpha * self.A / (self.beta * self.B)) + self.beta * math.log(product)
        parameters = math.exp(log_n / (self.alpha + self.beta))
        return parameters, product / parameters

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what `read_law` reads."""
        return asdict(self)


_HOFFMANN_RANGE = Range(70e6, 16e9), Range(5e9, 500e9)  # abstract of Hoffmann et al.

HOFFMANN = ScalingLaw(
    "Hoffmann et al.", "2022, arXiv 2203.15556, approach 3", 1.69, 406.4, 410.7, 0.34, 0.28, *_HOFFMANN_RANGE
)
# The same runs, read off the paper's figure and fitted anew: the constants above fit them badly, and give an optimum
# that contradicts the paper's other two approaches. Standard errors 0.03, 124.58, 1293.23, 0.02, 0.02.
BESIROGLU = ScalingLaw(
    "Besiroglu et al.", "2024, arXiv 2404.10102, the same runs fitted anew", 1.8172, 482.01, 2085.43, 0.3478, 0.3658,
    *_HOFFMANN_RANGE,
)  # fmt: skip
PUBLISHED = (BESIROGLU, HOFFMANN)


def read_law(path: Path) -> ScalingLaw:
    """A law of one's own: E, A, B, alpha, beta at the top of a JSON file, or in its "law" as the sweep writes it.

    RecipeError: no such file, no JSON, a constant missing or out of range.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such file to read a law from") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not JSON: {error}") from None
    law = content.get("law", content) if isinstance(content, dict) else None
    if not isinstance(law, dict):
        raise RecipeError(f"{path}: should be an object with {', '.join(CONSTANTS)}, or with these in its law")
    e, a, b, alpha, beta = (_constant(path, law, name) for name in CONSTANTS)
    ranges = (_range(path, law.get(name), name) for name in ("parameters", "tokens"))
    found = ScalingLaw(str(law.get("name", path.name)), str(law.get("source", path)), e, a, b, alpha, beta, *ranges)
    try:
        possible = all(math.isfinite(x) and x > 0 for flops in (1e15, 1e27) for x in found.optimum(flops))
    except (ArithmeticError, ValueError):
        possible = False
    if not possible:
        raise RecipeError(f"{path}: the best size by this law is beyond what a float holds: are its constants right?")
    return found


def _constant(path: Path, law: dict[str, Any], name: str) -> float:
    if name not in law:
        raise RecipeError(f"{path}: {name} is missing: a law has {', '.join(CONSTANTS)}")
    value = _number(law[name])
    if value is None or value < 0 or (value == 0 and name != "E"):
        least = "0 or more" if name == "E" else "more than 0"
        raise RecipeError(f"{path}: {name} = {show(law[name])}: should be a number, {least}")
    if name in ("alpha", "beta") and not 1e-3 <= value <= 10:
        raise RecipeError(f"{path}: {name} = {show(law[name])}: an exponent should be between 0.001 and 10")
    return value


def _range(path: Path, given: object, name: str) -> Range | None:
    if given is None:
        return None
    ends = [_number(given.get(end)) for end in ("least", "most")] if isinstance(given, dict) else []
    least, most = ends if len(ends) == 2 else (None, None)
    if least is None or most is None or not 0 < least <= most:
        raise RecipeError(f"{path}: {name} = {show(given)}: should have least and most, two numbers above 0 in order")
    return Range(least, most)


def _number(value: object) -> float | None:
    """JSON's numbers but for what no sum here could hold: NaN, Infinity, hundreds of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e100 < value < 1e100:
        return None
    return float(value)
