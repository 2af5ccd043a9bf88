"""What an ablation was to do and what it found, as tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.ablate import Ablation, heldout, planned
from pretrain.chronicle import read
from pretrain.figures import count
from pretrain.page import Table
from pretrain.variants import cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = ("d_ff", "layers", "parameters")
ROW_INCHES = 0.3  # of a picture, for each variant


# ---------------------------------------------------------------- tables


def plan_table(ablation: Ablation) -> Table:
    target = cost(ablation.variants[0].model, ablation.budget)
    rows = []
    for variant in ablation.variants:
        row = planned(variant, ablation.budget, target)
        brought = ", ".join(f"{key} = {value}" for key, value in variant.brought.items())
        rows.append([*_head(row), count(row["flops_per_token"] * ablation.tokens), brought])
    head = ["variant", *SIZES, f"off in {ablation.budget}", "FLOPs/token", "KV bytes/token"]
    return Table([*head, "FLOPs a run", "and with it"], rows, range(1, 8))


def _head(row: Mapping[str, Any]) -> list[str]:
    sizes = [f"{row['d_ff']:,}", str(row["n_layers"]), f"{row['parameters']:,}", f"{row['off_budget']:+.2%}"]
    return [row["label"], *sizes, count(row["flops_per_token"]), f"{row['kv_bytes_per_token']:,}"]


def result_tables(found: Mapping[str, Any]) -> list[Table]:
    """What was learnt, with differences and verdicts; what it cost; what the models look like inside."""
    number = len(found["seeds"])
    seeds = "one seed" if number == 1 else f"mean ± standard deviation over {number} seeds"
    return [_learnt(found, seeds), _cost(found), _inside(found, seeds)]


def _learnt(found: Mapping[str, Any], seeds: str) -> Table:
    of_row = any(row["from_row_before"] for row in found["variants"])
    rows = []
    for row in found["variants"]:
        cells = [row["label"], _shown(row["training_loss"]), _shown(row["heldout_loss"]), *_told(row["from_reference"])]
        rows.append([*cells, *(_told(row["from_row_before"]) if of_row else ())])
    head = ["variant", "training loss", "held-out loss", "from the reference", "alone", "together"]
    head += ["from the row before", "alone", "together"] if of_row else []
    title = f"{found['tokens']:,} tokens a run; {seeds}; differences of held-out loss ± standard error"
    if found["noise"] is not None:
        noise = "noise of one loss, pooled: {deviation:.4f}, {freedom} degrees of freedom, {comparisons} comparisons"
        title += "; " + noise.format(**found["noise"])
    return Table(head, rows, (1, 2, 3, 6), title)


def _cost(found: Mapping[str, Any]) -> Table:
    rows = []
    for row in found["variants"]:
        pace = row["pace"]
        speed = f"{pace['ratio']:.2f} ({pace['lowest']:.2f} to {pace['highest']:.2f})"
        rows.append([*_head(row), count(pace["tokens_per_second"]), speed])
    head = ["variant", *SIZES, f"off in {found['budget']}", "FLOPs/token", "KV bytes/token", "tokens/s", "speed"]
    first = found["variants"][0]["label"]
    title = f"speed of forward and backward in one process, {first} = 1; median of the rounds (lowest to highest)"
    return Table(head, rows, range(1, 9), title)


def _inside(found: Mapping[str, Any], seeds: str) -> Table:
    rows = []
    for row in found["variants"]:
        layers = row["by_layer"]
        rows.append(
            [
                row["label"],
                _shown(row["gradient_norm"], 2),
                _each(layers["gradient_norm"]),
                _shown(row["largest_attention_logit"], 1),
                _each(layers["largest_logit"]),
                _each(layers["residual_rms"]),
                " ".join("?" if one is None else f"{one:.0%}" for one in layers["dead_units"]),
            ]
        )
    head = ["variant", "gradient norm", "by layer", "largest logit", "by layer", "residual rms", "dead units"]
    return Table(head, rows, range(1, 7), f"inside the models at the end; {seeds}; by layer the mean")


def _each(values: Sequence[float | None]) -> str:
    return " ".join("?" if one is None else f"{one:.2g}" for one in values)


def _shown(spread: Mapping[str, Any], digits: int = 4) -> str:
    if spread["mean"] is None:
        return "not finite"
    noise = "" if spread["deviation"] is None else f" ± {spread['deviation']:.{digits}f}"
    return f"{spread['mean']:.{digits}f}{noise}"


def _told(apart: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if apart is None:
        return "", "reference", "reference"
    error = "" if apart["standard_error"] is None else f" ± {apart['standard_error']:.4f}"
    shown = "" if apart["mean"] is None else f"{apart['mean']:+.4f}{error}"
    return shown, apart["alone"], apart["together"]


def markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        lines = [table.title, ""] if table.title else []
        lines.append("| " + " | ".join(table.head) + " |")
        lines.append("|" + "|".join("---:" if at in table.numbers else "---" for at in range(len(table.head))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- pictures


def draw_learnt(ablation: Ablation, path: Path) -> None:
    """Training loss over tokens, the mean of the seeds with a band from lowest to highest; held-out differences."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    from pretrain.plots import smooth

    height = max(4.6, 1.6 + ROW_INCHES * len(ablation.variants))
    figure = Figure(figsize=(12, height), layout="constrained")
    curves, points = figure.subplots(1, 2, width_ratios=(3, 2))
    finals: list[list[float]] = []
    for number, variant in enumerate(ablation.variants):
        runs = [read(ablation.run_path(variant, seed)) for seed in range(ablation.seeds)]
        finals.append([heldout(run) for run in runs])
        steps = min(len(run.series) for run in runs)
        window = max(1, steps // 25) | 1
        losses = np.array([smooth(run.series.loss[:steps], window) for run in runs])
        tokens = runs[0].series.tokens[:steps]
        colour = _colour(number, len(ablation.variants))
        curves.plot(tokens, losses.mean(axis=0), color=colour, label=variant.label, linewidth=1.5)
        curves.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        apart = [one - other for one, other in zip(finals[-1], finals[0], strict=True)]
        points.plot(apart, [number] * len(apart), "o", color=colour, markersize=6)
    curves.set(xlabel="tokens", ylabel="training loss, nats a token", title="mean of seeds, band: lowest to highest")
    curves.xaxis.set_major_formatter(EngFormatter())
    curves.legend(frameon=False, fontsize=8)
    points.axvline(0.0, color="grey", linewidth=0.8)
    _name_rows(points, [variant.label for variant in ablation.variants])
    first = ablation.variants[0].label
    points.set(xlabel=f"nats a token more than {first}", title="held-out loss, a point a seed")
    figure.savefig(path, dpi=120)


def draw_inside(found: Mapping[str, Any], path: Path) -> None:
    """Gradient norm by layer, largest attention logit a seed, speed with its range, bytes of the KV cache."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    rows = found["variants"]
    labels = [row["label"] for row in rows]
    figure = Figure(figsize=(12, 2 * max(3.6, 1.4 + ROW_INCHES * len(rows))), layout="constrained")
    ((norms, logits), (speed, cache)) = figure.subplots(2, 2)
    for number, row in enumerate(rows):
        colour = _colour(number, len(rows))
        by_layer = [np.nan if one is None else one for one in row["by_layer"]["gradient_norm"]]
        norms.plot(range(1, len(by_layer) + 1), by_layer, "o-", color=colour, label=row["label"], linewidth=1.2)
        each = [one for one in row["largest_attention_logit"]["each"] if one is not None]
        logits.plot(each, [number] * len(each), "o", color=colour, markersize=6)
        pace = row["pace"]
        speed.plot([pace["lowest"], pace["highest"]], [number, number], color=colour, linewidth=2)
        speed.plot(pace["ratio"], number, "o", color=colour, markersize=6)
        cache.barh(number, row["kv_bytes_per_token"], color=colour)
        cache.annotate(f" {row['kv_bytes_per_token']:,}", (row["kv_bytes_per_token"], number), va="center", fontsize=8)
    norms.set(xlabel="block", ylabel="gradient norm", yscale="log", title="gradient norm by block, mean of seeds")
    for which in ("major", "minor"):
        norms.tick_params(axis="y", which=which, labelsize=8)
    norms.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    norms.yaxis.set_minor_formatter(FormatStrFormatter("%.2g"))
    norms.xaxis.get_major_locator().set_params(integer=True)
    norms.legend(frameon=False, fontsize=8)
    for axes in (logits, speed, cache):
        _name_rows(axes, labels)
    logits.set(xlabel="|q·k| / √width", title="largest attention logit, a point a seed")
    logits.set_xlim(0, logits.get_xlim()[1] * 1.05)
    speed.set(xlabel=f"{labels[0]} = 1, more is faster", title="forward and backward, median and range of the rounds")
    speed.axvline(1.0, color="grey", linewidth=0.8)
    cache.set(xlabel="bytes a token, bf16", title="KV cache")
    cache.margins(x=0.12)
    figure.savefig(path, dpi=120)


def _colour(number: int, of: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](number / max(of - 1, 1) * 0.92)


def _name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
