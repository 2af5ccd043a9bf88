"""The loss by how much context a token had, as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.config import RecipeError
from pretrain.evaluation import Evaluation

SUFFIXES = (".png", ".svg", ".pdf")
BINS_A_DOUBLING = 4


def check_path(path: Path) -> None:
    """Raise RecipeError unless a picture can be written at `path`; for before the long work."""
    if path.suffix.lower() not in SUFFIXES:
        raise RecipeError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise RecipeError(f"--plot {path}: name a file in a folder that exists")


def binned(evaluation: Evaluation) -> list[tuple[float, float]]:
    """(tokens of context, mean loss) over ranges that widen with the context, BINS_A_DOUBLING a doubling."""
    rows = np.array(evaluation.by_place)
    context, tokens, loss = rows.T
    bins = np.floor(np.log2(context) * BINS_A_DOUBLING).astype(int)
    found = []
    for number in np.unique(bins):
        here = bins == number
        weights = tokens[here] / tokens[here].sum()
        found.append((float((context[here] * weights).sum()), float((loss[here] * weights).sum())))
    return found


def draw(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Write the picture of one evaluation or two, in the format that the suffix of `path` names."""
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for evaluation in evaluations:
        axes.plot(*zip(*binned(evaluation), strict=True), marker="o", label=textwrap.fill(str(evaluation.subject), 60))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens of context in the window", ylabel="loss, nats per token", title="Loss by context")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
