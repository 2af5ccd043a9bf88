"""Lines over steps, tokens or time, as SVG that stands within a page: matplotlib draws, the page colours and explains.

Colours are names of the page's style sheet, so that one drawing is readable in light and in dark; titles and legends
are HTML beside the drawing, so that they cover no data and whatever they say is escaped like all other text. Long lines
are thinned so that every extreme stays. Missing steps interrupt a line; a number that is not finite is a cross.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Look = Literal["line", "faint", "dashed", "points", "hollow", "level", "upright", "cross"]

COLOURS = 8  # of curves, in the page's style sheet
COLUMNS = 600  # of a plot; a thinned line has at most five points in each
FEW = 60  # points: so few are also drawn as such

# Stand-ins that the page's own colours replace: matplotlib wants numbers.
_INK, _GRID, _BAD = "#fe0a00", "#fe0a01", "#fe0a02"
_NAMES = {_INK: "var(--ink)", _GRID: "var(--grid)", _BAD: "var(--bad)"}


@dataclass(frozen=True)
class Curve:
    """Points in order of x, as its `look` says. "level" is one y for all x; "upright" marks each x, whatever y is."""

    label: str
    x: Array
    y: Array
    colour: int | None = None  # of COLOURS; None: the ink of axes and text
    look: Look = "line"
    breaks: NDArray[np.bool_] | None = None  # the line is interrupted before these points


@dataclass(frozen=True)
class Legend:
    """One entry; `colour` is a name of the style sheet."""

    label: str
    colour: str
    look: Look


@dataclass(frozen=True)
class Plot:
    """A drawing, and the words that belong to it."""

    title: str
    svg: str
    legend: Sequence[Legend]
    caption: str = ""


@dataclass
class _Drawn:
    legend: list[Legend] = field(default_factory=list)
    not_finite: list[float] = field(default_factory=list)


def plot(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    caption: str = "",
    log_y: bool = False,
    unit: Literal["", "time"] = "",
) -> Plot:
    """Draw the curves, those first that the others may cover. With unit "time" x are seconds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {  # matplotlib types each key
        "svg.fonttype": "none",
        "svg.hashsalt": "zerohalf",
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.parse_math": False,
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "path.simplify": False,
    }
    scale, x_unit = _time_unit(curves) if unit == "time" else (1.0, "")
    drawn = _Drawn()
    with rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters its own font lacks: the browser has others
        figure = Figure(figsize=(6.4, 3.3), layout="constrained")
        axes = figure.subplots()
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        if log_y and any((curve.y > 0).any() for curve in curves):
            axes.set_yscale("log")
        for curve in curves:
            _draw(axes, curve, scale, drawn)
        if drawn.not_finite:
            x = np.unique(np.array(drawn.not_finite))
            x = x[_first_of_columns(x)]
            axes.plot(x, np.full(len(x), 0.03), "x", color=_BAD, markersize=5, transform=axes.get_xaxis_transform())
            drawn.legend.append(Legend(f"not finite ({len(drawn.not_finite):,})", "bad", "cross"))
        _dress(axes, x_label + (f" ({x_unit})" if x_unit else ""), y_label, plain_x=unit == "time")
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Plot(title, _inline(target.getvalue(), title), drawn.legend, caption)


def thin(x: Array, y: Array, columns: int = COLUMNS) -> NDArray[np.intp]:
    """The indices that suffice to draw a line `columns` wide: of each column the first and the last point, the lowest
    and the highest, and the first whose y is NaN. All of them where there are few."""
    if len(x) <= 5 * columns:
        return np.arange(len(x))
    kept: set[int] = set()
    starts = [*_first_of_columns(x, columns), len(x)]
    for start, end in pairwise(starts):
        part = y[start:end]
        finite = np.flatnonzero(np.isfinite(part))
        kept |= {start, end - 1}
        if len(finite):
            kept |= {start + int(finite[part[finite].argmin()]), start + int(finite[part[finite].argmax()])}
        if len(finite) < len(part):
            kept.add(start + int(np.flatnonzero(~np.isfinite(part))[0]))
    return np.array(sorted(kept))


def smooth(y: Array, window: int) -> Array:
    """The mean of `window` values around each, of those that are finite; NaN where none is or y itself is not."""
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(y))
    low, high = np.maximum(middle - window // 2, 0), np.minimum(middle + window // 2 + 1, len(y))
    within = np.maximum(counts[high] - counts[low], 1)
    return np.where(finite, (sums[high] - sums[low]) / within, np.nan)


def _first_of_columns(x: Array, columns: int = COLUMNS) -> NDArray[np.intp]:
    """The index of the first point in each column that has any; x ascends."""
    width = float(x[-1] - x[0])
    column = np.zeros(len(x), dtype=int) if width <= 0 else ((x - x[0]) / width * columns).astype(int)
    return np.flatnonzero(np.diff(column, prepend=-1))


def _draw(axes: Axes, curve: Curve, scale: float, drawn: _Drawn) -> None:
    colour = _INK if curve.colour is None else f"#fe01{curve.colour % COLOURS:02x}"
    name = "ink" if curve.colour is None else f"c{curve.colour % COLOURS}"
    look = curve.look
    if look == "level":
        axes.axhline(float(curve.y[0]), color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
    elif look == "upright":
        for at in curve.x:
            axes.axvline(float(at) / scale, color=colour, linewidth=0.9, linestyle=(0, (1, 2)))
    elif look in ("points", "hollow"):
        chosen = thin(curve.x, curve.y)
        face = "none" if look == "hollow" else colour
        axes.plot(
            curve.x[chosen] / scale, curve.y[chosen], "o", color=colour, markerfacecolor=face, markersize=4.5, zorder=3
        )
        drawn.not_finite += (curve.x[~np.isfinite(curve.y)] / scale).tolist()
    else:
        _draw_line(axes, curve, scale, colour)
        if look != "faint":
            drawn.not_finite += (curve.x[~np.isfinite(curve.y)] / scale).tolist()
    if curve.label and len(curve.x):
        drawn.legend.append(Legend(curve.label, name, look))


def _draw_line(axes: Axes, curve: Curve, scale: float, colour: str) -> None:
    chosen = thin(curve.x, curve.y)
    if curve.breaks is not None:
        chosen = np.union1d(chosen, np.flatnonzero(curve.breaks))
    x, y = curve.x[chosen] / scale, curve.y[chosen]
    if curve.breaks is not None:
        before = np.flatnonzero(curve.breaks[chosen])
        x, y = np.insert(x, before, x[before]), np.insert(y, before, np.nan)
    faint = curve.look == "faint"
    alone = np.isfinite(y)
    alone[1:] &= ~np.isfinite(y[:-1])
    alone[:-1] &= ~np.isfinite(y[1:])
    marked = np.isfinite(y) if len(x) <= FEW else alone  # a point between two gaps is no line
    axes.plot(
        x,
        y,
        color=colour,
        linewidth=0.8 if faint else 1.7,
        alpha=0.4 if faint else 1.0,
        linestyle=(0, (4, 2)) if curve.look == "dashed" else "-",
        solid_joinstyle="round",
        marker="o",
        markersize=2.5 if faint else 3.5,
        markevery=np.flatnonzero(marked).tolist(),
    )


def _dress(axes: Axes, x_label: str, y_label: str, *, plain_x: bool) -> None:
    from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label == "step"))
    if x_label == "step":
        left, right = axes.get_xlim()
        if right - left < 2:  # a single step: its neighbours are whole numbers too
            axes.set_xlim(round((left + right) / 2) - 1, round((left + right) / 2) + 1)
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    elif not plain_x:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        chosen = LogFormatter(minor_thresholds=(2, 0.5))  # knows which ticks to name, but not how to write 0.6
        chosen.set_axis(axes.yaxis)
        chosen.set_locs()
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, place: f"{value:g}" if chosen(value) else "")
    elif max(abs(low), abs(high)) >= 1000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif max(abs(low), abs(high)) < 0.01:
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.3g}")


def _time_unit(curves: Sequence[Curve]) -> tuple[float, str]:
    longest = max((float(curve.x.max()) for curve in curves if len(curve.x)), default=0.0)
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((scale, name) for scale, name in units if longest >= 2 * scale), (1.0, "seconds"))


_numbered: Callable[[], int] = iter(range(1, 2**31)).__next__


def _inline(svg: str, title: str) -> str:
    """matplotlib's file as an element of a page: no declarations, no addresses, ids of its own, the page's colours."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style .*?</style>\s*", "", svg, flags=re.DOTALL)  # a rule for all of the page; it has its own
    svg = re.sub(r"font-family: [^;]*;", "", svg)
    prefix = f"p{_numbered()}-"
    svg = re.sub(r'(?<=[\s]id=")', prefix, svg)
    svg = re.sub(r'(?<=href="#)|(?<=url\(#)', prefix, svg)
    svg = re.sub(r"#fe01([0-9a-f]{2})", lambda found: f"var(--c{int(found[1], 16)})", svg)
    svg = re.sub("|".join(_NAMES), lambda found: _NAMES[found[0]], svg)
    svg = re.sub(r'(<svg )height="[^"]*" ', r"\1", svg)
    svg = re.sub(r'(<svg [^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
