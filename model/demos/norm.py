"""LayerNorm and RMSNorm by hand, what a scaled input does to them, and what gains do over depth without one."""

from typing import TYPE_CHECKING, Any

import torch

from model.demos.demo import Demo
from model.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAINS = (1.2, 1.0, 0.8)
LAYERS = 12


@torch.no_grad()
def demo() -> Demo:
    """Statistics of short rows; RMSNorm(αx) = sign(α) RMSNorm(x); 1.2¹² and 0.8¹²."""
    row, pair, turns = torch.tensor([1.0, 3, 5, 7]), torch.tensor([3.0, 4]), torch.tensor([2.0, -2, 2, -2])
    layer, rms = LayerNorm(4, 1e-12), RMSNorm(4, 1e-12)
    variance = float(row.var(correction=0))
    found: dict[str, Any] = {
        "mean": float(row.mean()), "variance": variance, "deviation": variance**0.5, "layer": layer(row).tolist(),
        "rms": _rms(row), "rms_normed": rms(row).tolist(),
        "pair_rms": _rms(pair), "pair_normed": RMSNorm(2, 1e-12)(pair).tolist(), "turns_rms": _rms(turns),
        "scaled": {str(factor): rms(factor * row).tolist() for factor in (100.0, 0.01, -1.0)},
        "gains": {str(gain): gain**LAYERS for gain in GAINS},
        "normed_gains": {str(gain): _through_layers(gain, normed=True)[-1] for gain in GAINS},
    }  # fmt: skip
    lines = [
        "x = [1, 3, 5, 7]",
        f"  LayerNorm: mean {found['mean']:g}, variance {variance:g}, σ {variance**0.5:.4f} → {_row(found['layer'])}",
        f"  RMSNorm:   root mean square √21 = {found['rms']:.4f} → {_row(found['rms_normed'])}",
        f"x = [3, 4]:         RMS {found['pair_rms']:.4f} → {_row(found['pair_normed'])}",
        f"x = [2, −2, 2, −2]: RMS {found['turns_rms']:g}",
        "RMSNorm keeps nothing of the input's scale but its sign:",
        *(f"  {factor:>6} · x → {_row(normed)}" for factor, normed in found["scaled"].items()),
        f"{LAYERS} layers that each multiply by a gain, without and with a norm behind each:",
        *(
            f"  {gain} → {value:8.3f}   with a norm {found['normed_gains'][gain]:.3f}"
            for gain, value in found["gains"].items()
        ),
    ]
    return Demo("Norms: a scale that the next layer can read", tuple(lines), found, _draw)


def _rms(row: torch.Tensor) -> float:
    return float(row.square().mean().sqrt())


def _row(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values) + "]"


@torch.no_grad()
def _through_layers(gain: float, *, normed: bool) -> list[float]:
    """The root mean square behind each layer."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(1))
    norm = RMSNorm(256, 1e-6)
    x = norm(x)
    found = [_rms(x)]
    for _ in range(LAYERS):
        x = norm(gain * x) if normed else gain * x
        found.append(_rms(x))
    return found


def _draw(figure: "Figure") -> None:
    left, right = figure.subplots(1, 2)
    row = torch.tensor([1.0, 3, 5, 7])
    for offset, (name, values) in enumerate({
        "x": row, "LayerNorm": LayerNorm(4, 1e-12)(row).detach(), "RMSNorm": RMSNorm(4, 1e-12)(row).detach(),
    }.items()):  # fmt: skip
        bars = left.bar([number + 0.27 * (offset - 1) for number in range(4)], values.tolist(), width=0.25, label=name)
        left.bar_label(bars, fmt="%.2f", fontsize=10, padding=2)
    left.set_xticks(range(4), ["x₁", "x₂", "x₃", "x₄"])
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(title="[1, 3, 5, 7], normed")
    left.legend()
    for gain in GAINS:
        right.plot(_through_layers(gain, normed=False), linewidth=2.5, label=f"gain {gain}")
    right.plot(_through_layers(1.2, normed=True), "k--", linewidth=2, label="gain 1.2, with a norm")
    right.set(title="scale over depth", xlabel="layer", ylabel="root mean square", yscale="log")
    right.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    right.legend()
