"""RoPE: a score depends on how far apart two tokens are, not on where they stand."""

import math
from typing import TYPE_CHECKING, Any

import torch

from model.demos.demo import Demo
from model.positions import rotate
from model.rope_scaling import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_DIM, BASE, DISTANCE = 64, 10000.0, 7
SHIFTS = (0, 1, 10, 100, 1000, 10_000)


def demo() -> Demo:
    """q·k at six places and one distance; wavelengths 2π · base^(2i/head_dim) (Su et al. 2021, section 3.2)."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(HEAD_DIM, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = {shift: float(_at(q, shift + DISTANCE) @ _at(k, shift)) for shift in SHIFTS}
    others = {distance: float(_at(q, distance) @ _at(k, 0)) for distance in (0, 1, 2, 4, 8, 16)}
    spread = max(scores.values()) - min(scores.values())
    waves = {head_dim: [2 * math.pi / float(f) for f in plain(head_dim, BASE)] for head_dim in (64, 128)}
    turned = [_at(torch.tensor([1.0, 0.0], dtype=torch.float64), position).tolist() for position in range(7)]
    lines = [
        f"one q, one k, always {DISTANCE} tokens apart:",
        *(f"  positions {shift + DISTANCE:>6} and {shift:>6}   q·k = {score:.10f}" for shift, score in scores.items()),
        f"  they differ by {spread:.0e}",
        "and at other distances: " + ", ".join(f"{distance}: {score:.3f}" for distance, score in others.items()),
        "one pair of dimensions, [1, 0], at positions 0 to 4: "
        + ", ".join(f"({x:.2f}, {y:.2f})" for x, y in turned[:5]),
        "tokens to come round once, fastest and slowest pair: "
        + "; ".join(f"head_dim {dim}: {found[0]:.2f} and {found[-1]:,.0f}" for dim, found in waves.items()),
    ]
    numbers: dict[str, Any] = {
        "scores": {str(shift): score for shift, score in scores.items()}, "spread": spread, "turned": turned,
        "by_distance": {str(distance): score for distance, score in others.items()},
        "wavelengths": {str(dim): found for dim, found in waves.items()},
    }  # fmt: skip
    return Demo("RoPE: only the distance counts", tuple(lines), numbers, _draw)


def _at(x: torch.Tensor, position: int) -> torch.Tensor:
    """x, turned as at that position, in float64."""
    angle = position * plain(len(x), BASE)
    return rotate(x[None, None, None], angle.cos()[None], angle.sin()[None])[0, 0, 0]


def _draw(figure: "Figure") -> None:
    found = demo().numbers
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.3, 1, 1])
    for position, (x, y) in enumerate(found["turned"]):
        left.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": f"C{position}", "linewidth": 2})
        left.text(1.14 * x, 1.14 * y, str(position), ha="center", va="center", color=f"C{position}")
    left.set(title="one pair, positions 0 to 6", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    middle.plot([str(shift) for shift in SHIFTS], list(found["scores"].values()), marker="o", label=f"{DISTANCE} apart")
    middle.plot(list(map(str, SHIFTS)), [found["by_distance"]["8"]] * len(SHIFTS), linestyle=":", label="8 apart")
    middle.set(title="q·k at many places", xlabel="position of k")
    middle.margins(y=0.4)
    middle.legend()
    for head_dim, waves in found["wavelengths"].items():
        right.plot(waves, linewidth=2.5, label=f"head_dim {head_dim}")
    right.axhline(2048, color="grey", linestyle="--", label="a window of 2048")
    right.set(title="tokens to come round once", xlabel="pair of dimensions", yscale="log")
    right.legend()
