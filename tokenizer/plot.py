"""The report as a picture: how much text a token holds, and how often which token occurs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenizer.codec import TokenizerError
from tokenizer.report import Source, total

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_path(path: Path) -> None:
    """Raise TokenizerError unless a picture can be written at `path`; for before the long work."""
    if path.suffix.lower() not in SUFFIXES:
        raise TokenizerError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise TokenizerError(f"--plot {path}: is a folder; name a file in it")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise TokenizerError(f"--plot {path}: cannot write into the folder {path.parent}; choose another")


def draw(sources: Sequence[Source], path: Path) -> None:
    """Write the picture whole or not at all, in the format that the suffix of `path` names."""
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    whole = total(sources)
    groups = [*sources, whole] if len(sources) > 1 else list(sources)
    bars = len(groups) * len(whole.usages)
    figure = Figure(figsize=(min(max(11.0, 5.5 + 0.45 * bars), 40.0), 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[max(1.2, 0.08 * bars), 1])
    _draw_bytes_per_token(left, groups)
    _draw_frequencies(right, whole)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".partial", dir=path.parent) as work:
        fresh = Path(work, path.name)
        figure.savefig(fresh, dpi=150)
        fresh.replace(path)


def _draw_bytes_per_token(axes: Axes, groups: Sequence[Source]) -> None:
    candidates = [usage.candidate for usage in groups[0].usages]
    width = 0.8 / len(candidates)
    for place, candidate in enumerate(candidates):
        heights = [group.text_bytes / max(group.usages[place].tokens, 1) for group in groups]
        centres = np.arange(len(groups)) + (place - (len(candidates) - 1) / 2) * width
        drawn = axes.bar(centres, heights, width * 0.92, label=_label(candidate.name), color=_colour(place))
        axes.bar_label(drawn, fmt="%.2f", fontsize=8, padding=1)
    axes.set_title("Text in a token (more is better)")
    axes.set_ylabel("UTF-8 bytes per token")
    axes.set_xticks(range(len(groups)), [_label(group.name) for group in groups])
    if sum(len(_label(group.name)) for group in groups) > 50:
        axes.tick_params(axis="x", labelrotation=30)
    axes.margins(y=0.1)
    _tidy(axes)


def _draw_frequencies(axes: Axes, whole: Source) -> None:
    for place, usage in enumerate(whole.usages):
        seen = np.sort(usage.counts[usage.counts > 0])[::-1]
        ranks = np.arange(1, len(seen) + 1)
        axes.loglog(ranks, seen / seen.sum(), color=_colour(place), linewidth=1.6)
        axes.plot(ranks[-1:], seen[-1:] / seen.sum(), "o", markersize=4, color=_colour(place))
    axes.set_title("How often each token occurs, all sources")
    axes.set_xlabel("tokens, most frequent first (the dot: how many ids occurred)")
    axes.set_ylabel("share of all tokens")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def _colour(place: int) -> Any:
    return f"C{place % 10}"


def _label(name: str) -> str:
    """A name in characters that every font has, with nothing that matplotlib would read as mathematics."""
    short = name if len(name) <= 40 else f"…{name[-39:]}"
    return short.replace("…", "...").encode("ascii", "backslashreplace").decode("ascii").replace("$", r"\$")
