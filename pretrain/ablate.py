"""An ablation: variants of one recipe under one budget, each an ordinary run per seed; what came of it, with its noise.

A seed draws the weights and orders the data, the same for all variants: a difference from the reference is taken seed
by seed, so what a seed does to both cancels. Its standard error is that of the mean over seeds, and a difference counts
where it exceeds Student's t at 95 % of that: with two seeds 12.7 standard errors, with three 4.3. Of twenty such
comparisons one is wrong by chance.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.durable import write_file
from model.accounting import flops_per_token, kv_cache_bytes_per_token, parameter_count
from pretrain.batching import steps_of
from pretrain.chronicle import LAST_STEPS, Chronicle, read
from pretrain.config import PROJECT_ROOT, RecipeError, RunConfig, to_toml
from pretrain.figures import count, duration
from pretrain.page import Table
from pretrain.run_directory import RunDirectory
from pretrain.variants import Budget, Variant, cost

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # two-sided, 1 to 9 degrees of freedom
MOST_SEEDS = len(T_95) + 1

Start = Callable[[Path, Path], int]  # a recipe and its run directory; gives the exit code


@dataclass(frozen=True)
class Ablation:
    """All that is to be trained: `seeds` runs of each variant, the first variant the reference."""

    recipe: RunConfig
    variants: Sequence[Variant]
    seeds: int
    budget: Budget
    out: Path
    is_ladder: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise RecipeError(f"--seeds {self.seeds}: 1 to {MOST_SEEDS}; below 2 there is no noise to compare with")

    def run_path(self, variant: Variant, seed: int) -> Path:
        return self.out / variant.name / f"seed-{self.recipe.seed + seed}"

    def runs(self) -> list[tuple[Variant, int]]:
        """Seed by seed: whatever is whole of a started ablation compares all variants."""
        return [(variant, seed) for seed in range(self.seeds) for variant in self.variants]

    def config(self, variant: Variant, seed: int) -> RunConfig:
        return self.recipe.model_copy(update={"model": variant.model, "seed": self.recipe.seed + seed})

    @property
    def tokens(self) -> int:
        """Of one run; padding, where packing makes any, is among them."""
        samples = steps_of(self.recipe.batch).samples_before(self.recipe.schedule.max_steps)
        return samples * self.recipe.model.seq_len

    @property
    def flops(self) -> int:
        """Of all runs, with causal attention."""
        return self.seeds * self.tokens * sum(flops_per_token(one.model).causal for one in self.variants)


# ---------------------------------------------------------------- training


def write_recipes(ablation: Ablation) -> None:
    """A recipe beside each run directory. RecipeError where another ablation lies there; nothing is written then."""
    wanted = {
        ablation.run_path(*run).with_suffix(".toml"): to_toml(ablation.config(*run)).encode() for run in ablation.runs()
    }
    for path, text in wanted.items():
        if path.exists() and path.read_bytes() != text:
            raise RecipeError(f"{path} is of another ablation: name another --out, or repeat what was asked there")
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_file(path, text)


def start_run(recipe: Path, run: Path) -> int:
    """`python -m pretrain run` in a process of its own; what it says goes into run.log beside the recipe."""
    with run.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "pretrain", "run", str(recipe.resolve()), "--run", str(run.resolve())]
        return subprocess.run(
            command, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        ).returncode


def train(ablation: Ablation, say: Callable[[str], None], start: Start = start_run) -> None:
    """Every run that is not finished yet, one behind the other. RecipeError where one ends otherwise."""
    missing = [run for run in ablation.runs() if not is_finished(ablation.run_path(*run))]
    done_before = len(ablation.variants) * ablation.seeds - len(missing)
    if done_before:
        say(f"{done_before} of {done_before + len(missing)} runs are finished already")
    work = [flops_per_token(variant.model).causal for variant, _ in missing]
    began = time.monotonic()
    for number, (variant, seed) in enumerate(missing):
        path = ablation.run_path(variant, seed)
        done = sum(work[:number])
        left = (time.monotonic() - began) * sum(work[number:]) / done if done else None
        ahead = "" if left is None else f", about {duration(left)} left"
        say(f"run {done_before + number + 1} of {done_before + len(missing)}: {variant.name}, {path.name}{ahead}")
        code = start(path.with_suffix(".toml"), path)
        if code or not is_finished(path):
            how = f"ended with code {code}" if code else "stopped before its last step"
            raise RecipeError(f"{path} {how}: see {path.with_suffix('.log')}; the same command goes on from there")


def is_finished(path: Path) -> bool:
    try:
        state = json.loads(RunDirectory(path).status.read_bytes()).get("state")
    except (FileNotFoundError, ValueError, AttributeError):
        return False
    return bool(state == "finished")


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Difference:
    """Of held-out loss, from another variant, over the seeds that both have; None: one seed has no spread."""

    mean: float
    standard_error: float | None
    verdict: str


def difference(losses: Sequence[float], others: Sequence[float]) -> Difference:
    """Seed by seed, losses minus others."""
    apart = [one - other for one, other in zip(losses, others, strict=True)]
    mean = statistics.fmean(apart)
    if not math.isfinite(mean):
        return Difference(mean, None, "not finite")
    if len(apart) < 2:
        return Difference(mean, None, "one seed: no verdict")
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    if abs(mean) <= T_95[len(apart) - 2] * error or mean == 0:
        return Difference(mean, error, "within the noise")
    return Difference(mean, error, "better" if mean < 0 else "worse")


def results(ablation: Ablation, measured: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """All figures, JSON-able. `measured`: gradient_norms and largest_logit of a finished run."""
    rows: list[dict[str, Any]] = []
    target = cost(ablation.variants[0].model, ablation.budget)
    for variant in ablation.variants:
        paths = [ablation.run_path(variant, seed) for seed in range(ablation.seeds)]
        runs, inspected = [read(path) for path in paths], [measured(path) for path in paths]
        rows.append(
            {
                **planned(variant, ablation.budget, target),
                "training_loss": _spread([run.series.final_loss for run in runs]),
                "heldout_loss": _spread([_heldout(run) for run in runs]),
                "tokens_per_second": _spread([run.series.steady_rate for run in runs]),
                "gradient_norm": _spread([float(np.nanmean(run.series.grad_norm[-LAST_STEPS:])) for run in runs]),
                "gradient_norms_by_layer": np.mean([one["gradient_norms"] for one in inspected], axis=0).tolist(),
                "largest_attention_logit": _spread([one["largest_logit"] for one in inspected]),
            }
        )
    for number, row in enumerate(rows):
        row["from_reference"] = _apart(row, rows[0]) if number else None
        row["from_row_before"] = _apart(row, rows[number - 1]) if number and ablation.is_ladder else None
    seeds = [ablation.recipe.seed + seed for seed in range(ablation.seeds)]
    return {"budget": ablation.budget, "tokens": ablation.tokens, "seeds": seeds, "variants": rows}


def planned(variant: Variant, budget: Budget, target: int) -> dict[str, Any]:
    """What is known of a variant before it is trained."""
    model = variant.model
    return {
        "name": variant.name,
        "choices": dict(variant.choices),
        "brought": dict(variant.brought),
        "d_ff": model.d_ff,
        "n_layers": model.n_layers,
        "parameters": parameter_count(model),
        "flops_per_token": flops_per_token(model).causal,
        "off_budget": cost(model, budget) / target - 1,
        "kv_bytes_per_token": kv_cache_bytes_per_token(model),
    }


def _heldout(run: Chronicle) -> float:
    last = run.last()
    value = None if last is None else last.get("loss")
    return float("nan") if value is None else float(value)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation over seeds, and each; null where there is none."""
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    mean = statistics.fmean(values)
    each = [one if math.isfinite(one) else None for one in values]
    return {"mean": mean if math.isfinite(mean) else None, "deviation": deviation, "each": each}


def _apart(row: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    pair = [[math.nan if one is None else one for one in which["heldout_loss"]["each"]] for which in (row, other)]
    found = difference(*pair)
    mean = found.mean if math.isfinite(found.mean) else None
    return {"mean": mean, "standard_error": found.standard_error, "verdict": found.verdict}


# ---------------------------------------------------------------- tables


def plan_table(ablation: Ablation) -> Table:
    target = cost(ablation.variants[0].model, ablation.budget)
    rows = []
    for variant in ablation.variants:
        row = planned(variant, ablation.budget, target)
        brought = ", ".join(f"{key} = {value}" for key, value in variant.brought.items())
        rows.append([*_head(row), count(row["flops_per_token"] * ablation.tokens), brought])
    head = ["variant", "d_ff", "layers", "parameters", f"off in {ablation.budget}", "FLOPs/token", "KV bytes/token"]
    return Table([*head, "FLOPs a run", "and with it"], rows, range(1, 8))


def _head(row: Mapping[str, Any]) -> list[str]:
    sizes = [f"{row['d_ff']:,}", str(row["n_layers"]), f"{row['parameters']:,}", f"{row['off_budget']:+.2%}"]
    return [row["name"], *sizes, count(row["flops_per_token"]), f"{row['kv_bytes_per_token']:,}"]


def result_tables(found: Mapping[str, Any]) -> list[Table]:
    """What was learnt, with differences and verdicts; what it cost."""
    of_row = any(row["from_row_before"] for row in found["variants"])
    learnt, cost_of = [], []
    for row in found["variants"]:
        cells = [row["name"], _shown(row["training_loss"]), _shown(row["heldout_loss"]), *_told(row["from_reference"])]
        learnt.append([*cells, *(_told(row["from_row_before"]) if of_row else ())])
        norms = " ".join(f"{one:.2g}" for one in row["gradient_norms_by_layer"])
        rate = row["tokens_per_second"]["mean"]
        logit, norm = row["largest_attention_logit"], row["gradient_norm"]
        cost_of.append([*_head(row), count(rate), _shown(norm, 2), norms, _shown(logit, 1)])
    number = len(found["seeds"])
    seeds = "one seed" if number == 1 else f"mean ± standard deviation over {number} seeds"
    head = ["variant", "training loss", "held-out loss", "from the reference", "verdict"]
    head += ["from the row before", "verdict"] if of_row else []
    head_cost = ["variant", "d_ff", "layers", "parameters", f"off in {found['budget']}", "FLOPs/token"]
    head_cost += ["KV bytes/token", "tokens/s", "gradient norm", "by layer", "largest logit"]
    title = f"{found['tokens']:,} tokens a run; {seeds}; differences of held-out loss ± standard error"
    return [Table(head, learnt, (1, 2, 3, 5), title), Table(head_cost, cost_of, range(1, 11))]


def _shown(spread: Mapping[str, Any], digits: int = 4) -> str:
    if spread["mean"] is None:
        return "not finite"
    noise = "" if spread["deviation"] is None else f" ± {spread['deviation']:.{digits}f}"
    return f"{spread['mean']:.{digits}f}{noise}"


def _told(apart: Mapping[str, Any] | None) -> tuple[str, str]:
    if apart is None:
        return "", "reference"
    if apart["mean"] is None:
        return "", apart["verdict"]
    error = "" if apart["standard_error"] is None else f" ± {apart['standard_error']:.4f}"
    return f"{apart['mean']:+.4f}{error}", apart["verdict"]


def markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        lines = [table.title, ""] if table.title else []
        lines.append("| " + " | ".join(table.head) + " |")
        lines.append("|" + "|".join("---:" if at in table.numbers else "---" for at in range(len(table.head))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- picture


def draw(ablation: Ablation, path: Path) -> None:
    """Training loss over tokens, the mean of the seeds with a band from lowest to highest; held-out differences."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    from pretrain.plots import smooth

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    curves, points = figure.subplots(1, 2, width_ratios=(3, 2))
    finals: list[list[float]] = []
    for number, variant in enumerate(ablation.variants):
        runs = [read(ablation.run_path(variant, seed)) for seed in range(ablation.seeds)]
        finals.append([_heldout(run) for run in runs])
        steps = min(len(run.series) for run in runs)
        window = max(1, steps // 25) | 1
        losses = np.array([smooth(run.series.loss[:steps], window) for run in runs])
        tokens = runs[0].series.tokens[:steps]
        colour = colormaps["viridis"](number / max(len(ablation.variants) - 1, 1) * 0.92)
        curves.plot(tokens, losses.mean(axis=0), color=colour, label=variant.name, linewidth=1.5)
        curves.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        apart = [one - other for one, other in zip(finals[-1], finals[0], strict=True)]
        points.plot(apart, [number] * len(apart), "o", color=colour, markersize=6)
    curves.set(xlabel="tokens", ylabel="training loss, nats a token", title="mean of seeds, band: lowest to highest")
    curves.legend(frameon=False, fontsize=8)
    points.axvline(0.0, color="grey", linewidth=0.8)
    points.set_yticks(range(len(ablation.variants)), [variant.name for variant in ablation.variants])
    points.invert_yaxis()
    points.set(xlabel=f"nats a token more than {ablation.variants[0].name}", title="held-out loss, a point a seed")
    points.locator_params(axis="x", nbins=5)
    figure.savefig(path, dpi=120)
