"""QK-Norm: scores that stay bounded when q and k grow."""

import math
from typing import TYPE_CHECKING, Any

import torch

from model.demos.demo import Demo
from model.norms import RMSNorm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_DIM, TOKENS = 64, 256
GROWTH = (1, 2, 4, 8, 16, 32)


@torch.no_grad()
def demo() -> Demo:
    """An RMSNorm per head on q and k, before RoPE (Henry et al. 2020; as in Qwen3): |q·k| / √d is at most √d."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(TOKENS, HEAD_DIM, generator=generator) for _ in range(2))
    norm = RMSNorm(HEAD_DIM, 1e-6)
    rows = []
    for factor in GROWTH:
        plain, normed = q @ (factor * k).T / HEAD_DIM**0.5, norm(q) @ norm(factor * k).T / HEAD_DIM**0.5
        rows.append({
            "factor": factor,
            "plain": float(plain.abs().max()), "normed": float(normed.abs().max()),
            "plain_entropy": _entropy(plain), "normed_entropy": _entropy(normed),
        })  # fmt: skip
    lines = [f"{'k grows by':>11}{'largest score':>16}{'with QK-Norm':>14}{'entropy':>10}{'with QK-Norm':>14}"]
    lines += [
        f"{row['factor']:>9} ×{row['plain']:16.2f}{row['normed']:14.2f}"
        f"{row['plain_entropy']:10.3f}{row['normed_entropy']:14.3f}"
        for row in rows
    ]
    lines.append(f"no score can pass √head_dim = {HEAD_DIM**0.5:g} while the norms' gains are 1")
    lines.append(f"entropy in nats: ln {TOKENS} = {math.log(TOKENS):.3f} is uniform")
    numbers: dict[str, Any] = {"rows": rows, "bound": HEAD_DIM**0.5}
    return Demo("QK-Norm: scores stay bounded while weights grow", tuple(lines), numbers, _draw)


def _entropy(scores: torch.Tensor) -> float:
    log_weights = scores.log_softmax(-1)
    return float(-(log_weights.exp() * log_weights).sum(-1).mean())


def _draw(figure: "Figure") -> None:
    found = demo().numbers
    left, right = figure.subplots(1, 2)
    for axes, suffix in ((left, ""), (right, "_entropy")):
        for name, label in (("plain", "plain"), ("normed", "QK-Norm")):
            axes.plot(GROWTH, [row[name + suffix] for row in found["rows"]], marker="o", linewidth=2.5, label=label)
        axes.set(xlabel="k grows by the factor", xscale="log")
        axes.set_xticks(GROWTH, [str(factor) for factor in GROWTH])
        axes.minorticks_off()
    left.axhline(found["bound"], color="grey", linestyle="--", label="√head_dim")
    left.set(title="largest score", yscale="log")
    right.set(title="entropy of the attention weights", ylabel="nats", ylim=(0, None))
    left.legend()
    right.legend()
