"""What a run found when it looked at itself, as plots: updates, attention's scores, idle units, the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.chronicle import Chronicle, Record
from pretrain.plots import Curve, Plot, plot

MOST_LAYERS = 5  # of a plot with a curve a layer


def inside(run: Chronicle) -> list[Plot]:
    """None where the run never looked, or one look is all there is."""
    looks = run.observations
    if len(looks) < 2:
        return []
    x = np.array([one["step"] for one in looks], dtype=float)
    health = run.config.health
    drawn = []
    largest = _series(looks, "attention_logit")
    if np.isfinite(largest).any():
        above = health.attention_logit_above
        limit = Curve(f"alarm above {above:g}", x[:1], np.array([above]), 1, "level")
        near = [limit] if np.nanmax(largest) > above / 10 else []
        curve = Curve("largest of all layers", x, largest, 0)
        drawn.append(plot("Attention's scores", [curve, *near], x_label="step", y_label="score before the softmax"))
    ratios = {"update_ratio": "largest of all matrices", "update_ratio_median": "median matrix"}
    curves = [Curve(label, x, _series(looks, name), at) for at, (name, label) in enumerate(ratios.items())]
    if any(np.isfinite(curve.y).any() for curve in curves):
        drawn.append(plot("Updates", curves, x_label="step", y_label="norm of update / norm of matrix", log_y=True))
    streams = _by_layer(looks, "residual_rms_by_layer")
    if streams:
        curves = [Curve(f"behind layer {layer}", x, y, number) for number, (layer, y) in enumerate(streams)]
        drawn.append(plot("Residual stream", curves, x_label="step", y_label="root mean square"))
    units = {"dead_units": "dead", "saturated_units": "saturated"}
    curves = [Curve(label, x, _series(looks, name), at) for at, (name, label) in enumerate(units.items())]
    if any(np.nanmax(curve.y, initial=0.0) > 0 for curve in curves):
        drawn.append(plot("Idle units", curves, x_label="step", y_label="share of a layer's, of the layer with most"))
    return drawn


def _series(looks: Sequence[Record], name: str) -> NDArray[np.float64]:
    return np.array([_number(one.get(name)) for one in looks])


def _by_layer(looks: Sequence[Record], name: str) -> list[tuple[int, NDArray[np.float64]]]:
    """Some layers, the first and the last among them, with their values over the looks."""
    rows = [one.get(name) for one in looks]
    layers = min((len(row) for row in rows if isinstance(row, list)), default=0)
    if not layers:
        return []
    chosen = sorted({round(at) for at in np.linspace(0, layers - 1, min(layers, MOST_LAYERS))})
    values = np.array([row[:layers] if isinstance(row, list) else [None] * layers for row in rows], dtype=float)
    return [(layer, values[:, layer]) for layer in chosen]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
