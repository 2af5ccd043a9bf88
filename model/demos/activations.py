"""ReLU, GELU and SiLU: values, slopes, and where each lets a gradient through."""

from typing import TYPE_CHECKING, Any

import torch

from model.demos.demo import Demo
from model.feedforward import ACTIVATIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)


def demo() -> Demo:
    """SiLU'(x) = σ(x) (1 + x (1 − σ(x))), beside the slope that autograd finds."""
    values = {name: _curve(name, torch.tensor(POINTS, dtype=torch.float64)) for name in ACTIVATIONS}
    sigma = torch.tensor(POINTS, dtype=torch.float64).sigmoid()
    formula = sigma * (1 + torch.tensor(POINTS, dtype=torch.float64) * (1 - sigma))
    error = float((formula - values["silu"][1]).abs().max())
    grid = torch.linspace(-3, 0, 30_001, dtype=torch.float64)
    lows = {name: _lowest(name, grid) for name in ACTIVATIONS}
    lines = ["       x " + "".join(f"{x:>9g}" for x in POINTS)]
    for name, (value, slope) in values.items():
        lines.append(f"{name:>6}   " + "".join(f"{float(x):9.4f}" for x in value))
        lines.append(f"{'slope':>6}   " + "".join(f"{float(x):9.4f}" for x in slope))
    lines.append(f"SiLU's slope by σ(x)(1 + x(1 − σ(x))) is autograd's within {error:.0e}")
    for name, (x, low) in lows.items():
        if low < 0:
            lines.append(f"{name} falls to {low:.4f} at x = {x:.3f}: negative inputs still send a gradient back")
    lines.append(
        "ReLU's slope is exactly 0 for every negative input: a unit that is always negative never learns again"
    )
    numbers: dict[str, Any] = {"x": list(POINTS), "silu_slope_error": error, "lowest": lows}
    numbers |= {name: {"value": value.tolist(), "slope": slope.tolist()} for name, (value, slope) in values.items()}
    return Demo("Activations: what passes forward, and what comes back", tuple(lines), numbers, _draw)


def _curve(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = ACTIVATIONS[name](x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def _lowest(name: str, grid: torch.Tensor) -> tuple[float, float]:
    value = ACTIVATIONS[name](grid)
    at = int(value.argmin())
    return float(grid[at]), float(value[at])


def _draw(figure: "Figure") -> None:
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    left, right = figure.subplots(1, 2)
    for name in ACTIVATIONS:
        value, slope = _curve(name, x)
        left.plot(x, value, label=name, linewidth=2.5)
        right.plot(x, slope, label=name, linewidth=2.5)
    left.set(title="value", xlabel="x", ylim=(-1, 4))
    right.set(title="slope", xlabel="x", ylim=(-0.3, 1.3))
    for axes in (left, right):
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.legend(loc="upper left")
