"""Why scores are divided by sqrt(head_dim): without it one key takes all, and the others hear nothing."""

import math
from typing import TYPE_CHECKING, Any

import torch

from model.demos.demo import Demo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_DIMS = (16, 32, 64, 128, 256)
KEYS, QUERIES = 64, 512


def demo() -> Demo:
    """q and k of unit variance: q·k has variance head_dim (Vaswani et al. 2017, section 3.2.1)."""
    rows: list[dict[str, float]] = []
    for head_dim in HEAD_DIMS:
        scores = _scores(head_dim)
        row: dict[str, float] = {"head_dim": head_dim, "variance": float(scores.var())}
        for name, scale in (("plain", 1.0), ("scaled", 1 / math.sqrt(head_dim))):
            largest, gradient = _softmax(scores * scale)
            row |= {f"{name}_largest": largest, f"{name}_gradient": gradient}
        row["scaled_variance"] = row["variance"] / head_dim
        rows.append(row)
    head = "head_dim   variance of q·k      largest weight      gradient at the median key"
    lines = [head, "           plain    scaled      plain    scaled      plain      scaled"]
    lines += [
        f"{row['head_dim']:8d}  {row['variance']:7.1f}  {row['scaled_variance']:8.2f}  {row['plain_largest']:9.3f}"
        f"  {row['scaled_largest']:8.3f}  {row['plain_gradient']:10.1e}  {row['scaled_gradient']:10.1e}"
        for row in rows
    ]
    lines.append(
        f"over {QUERIES} queries of {KEYS} keys: mean weights, geometric mean of |d softmax(s)[best] / d s[key]|"
    )
    numbers: dict[str, Any] = {"rows": rows}
    return Demo("Scores divided by √head_dim: softmax stays awake", tuple(lines), numbers, _draw)


def _scores(head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(head_dim)
    q_qk = torch.randn(QUERIES, head_dim, dtype=torch.float64, generator=generator)
    k_jk = torch.randn(QUERIES, KEYS, head_dim, dtype=torch.float64, generator=generator)
    return torch.einsum("qk,qjk->qj", q_qk, k_jk)


def _softmax(scores_qj: torch.Tensor) -> tuple[float, float]:
    """The mean largest weight, and how it hears of the median key, a geometric mean: of p_i the gradient by score j is
    p_i (δ_ij − p_j)."""
    weights = scores_qj.softmax(-1)
    largest, at = weights.max(-1, keepdim=True)
    jacobian = -largest * weights
    jacobian.scatter_add_(-1, at, largest)
    return float(largest.mean()), float(jacobian.abs().median(dim=-1).values.log().mean().exp())


def _draw(figure: "Figure") -> None:
    rows = demo().numbers["rows"]
    left, right = figure.subplots(1, 2)
    scores = _scores(128)
    for scale, label in ((1.0, "plain"), (1 / math.sqrt(128), "scaled")):
        weights = (scores * scale).softmax(-1).sort(-1, descending=True).values.mean(0)
        left.plot(range(1, 21), weights[:20].tolist(), marker="o", linewidth=2, label=label)
    left.set_xticks(range(1, 21, 3))
    left.set(
        title="attention weights of a query, head_dim 128", xlabel="key, by rank", ylabel="mean weight", ylim=(0, 1)
    )
    for name in ("plain", "scaled"):
        gradients = [row[f"{name}_gradient"] for row in rows]
        right.plot(HEAD_DIMS, gradients, marker="o", linewidth=2, label=name)
    right.set(
        title="gradient at the median key",
        xlabel="head_dim",
        ylabel="gradient",
        xscale="log",
        yscale="log",
    )
    right.set_xticks(HEAD_DIMS, [str(dim) for dim in HEAD_DIMS])
    right.minorticks_off()
    left.legend()
    right.legend()
