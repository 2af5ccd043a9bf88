"""SwiGLU by hand: a gate decides, dimension by dimension, how much passes; and what the third matrix costs."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from model.demos.demo import Demo
from model.feedforward import SwiGLU

if TYPE_CHECKING:
    from matplotlib.figure import Figure

X = (1.0, 2.0)
GATE, UP, DOWN = ((1.0, 0.0), (0.0, -1.0)), ((1.0, 1.0), (1.0, -1.0)), ((1.0, 0.0), (0.0, 1.0))


@torch.no_grad()
def demo() -> Demo:
    """down(silu(gate(x)) · up(x)) of two dimensions, each step as a number (Shazeer 2020, eq. 6)."""
    module = SwiGLU(2, 2)
    weights = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}
    module.load_state_dict({f"{name}.weight": torch.tensor(rows) for name, rows in weights.items()})
    x = torch.tensor(X)
    gate, up = module.gate_proj(x), module.up_proj(x)
    passed = F.silu(gate)
    out = module(x[None, None])[0, 0]
    relu = 2 * 512 * 2048 + 2048 + 512
    swiglu = 3 * 512 * 1536
    widths = {d: wide(d) for d in (512, 1536)}
    lines = (
        f"x = {_row(x)}",
        f"gate(x) = {_row(gate)}      silu of it = {_row(passed)}: the first dimension passes, the second hardly",
        f"up(x) = {_row(up)}",
        f"silu(gate) · up = {_row(passed * up)}",
        f"the module gives {_row(out)}",
        "",
        "what it costs at d_model = 512:",
        f"  ReLU, two matrices of 4 · d with biases    {relu:>10,}",
        f"  SwiGLU, three matrices of {widths[512]}, no bias     {swiglu:>10,}  ({swiglu / relu:.2f} ×)",
        "d_ff = 8/3 · d, rounded up to a multiple of 256: " + ", ".join(f"{d} → {w}" for d, w in widths.items()),
    )
    numbers = {
        "gate": gate.tolist(), "silu": passed.tolist(), "up": up.tolist(), "out": out.tolist(),
        "relu_parameters": relu, "swiglu_parameters": swiglu, "d_ff": {str(d): w for d, w in widths.items()},
    }  # fmt: skip
    return Demo("SwiGLU: a gate for every dimension", lines, numbers, _draw)


def wide(d_model: int) -> int:
    """The usual d_ff of SwiGLU: as many parameters as two matrices of 4 · d_model, made a multiple of 256."""
    return -(-8 * d_model // 3 // 256) * 256


def _row(values: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values.tolist()) + "]"


@torch.no_grad()
def _draw(figure: "Figure") -> None:
    found = demo().numbers
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(("gate", "silu", "up", "out")):
        bars = left.bar([number - 0.2, number + 0.2], found[name], width=0.38, color=("tab:blue", "tab:orange"))
        left.bar_label(bars, fmt="%.2f", padding=3)
    left.set_xticks(range(4), ["gate(x)", "silu(gate)", "up(x)", "silu(gate) · up"])
    left.axhline(0, color="grey", linewidth=0.8)
    left.margins(y=0.15)
    left.set(title="x = [1, 2]: two dimensions, two gates")
    gate = torch.linspace(-6, 6, 601)
    for up in (1.0, 2.0, -1.0):
        right.plot(gate, F.silu(gate) * up, label=f"up = {up:g}", linewidth=2.5)
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(title="what passes, by the gate's input", xlabel="gate(x)", ylabel="silu(gate) · up")
    right.legend()
