"""An ablation: variants of one recipe under one budget, each an ordinary run per seed; what came of it, with its noise.

A seed draws the weights and orders the data, the same for all variants: a difference from the reference is taken seed
by seed, so what a seed does to both cancels. What counts as a difference: verdicts.py.
"""

from __future__ import annotations

import ctypes
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_pipeline.durable import write_file
from model.accounting import flops_per_token, kv_cache_bytes_per_token, parameter_count
from pretrain.batching import steps_of
from pretrain.chronicle import LAST_STEPS, Chronicle, read
from pretrain.config import PROJECT_ROOT, RecipeError, RunConfig, to_toml
from pretrain.figures import duration
from pretrain.run_directory import RunDirectory
from pretrain.variants import Budget, Variant, cost
from pretrain.verdicts import Noise, difference, noise

if TYPE_CHECKING:
    from pretrain.inspection import Inspected
    from pretrain.pace import Pace

_PR_SET_PDEATHSIG = 1

MOST_SEEDS = 10

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
    """`python -m pretrain run` in a process of its own; what it says goes into run.log beside the recipe.

    Whatever ends this process, the run is asked to save and stop.
    """
    with run.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "pretrain", "run", str(recipe.resolve()), "--run", str(run.resolve())]
        process = subprocess.Popen(
            command, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_stop_with_parent
        )
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


def _stop_with_parent() -> None:
    """In the child, on Linux: SIGTERM when this process is killed (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def last_error(log: Path) -> str:
    """What a run said last of why it failed, in brackets; nothing where it said nothing."""
    if not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    return f" ({lines[-1].removeprefix('error: ')})" if lines else ""


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
            log = path.with_suffix(".log")
            how = f"ended with code {code}{last_error(log)}" if code else "stopped before its last step"
            raise RecipeError(f"{path} {how}: see {log}; the same command goes on from there")


def is_finished(path: Path) -> bool:
    try:
        state = json.loads(RunDirectory(path).status.read_bytes()).get("state")
    except (FileNotFoundError, ValueError, AttributeError):
        return False
    return bool(state == "finished")


# ---------------------------------------------------------------- results


def results(ablation: Ablation, inspect: Callable[[Path], Inspected], paces: Sequence[Pace]) -> dict[str, Any]:
    """All figures, JSON-able. `inspect` looks into a finished run; a pace for each variant."""
    rows: list[dict[str, Any]] = []
    target = cost(ablation.variants[0].model, ablation.budget)
    for variant, pace in zip(ablation.variants, paces, strict=True):
        paths = [ablation.run_path(variant, seed) for seed in range(ablation.seeds)]
        runs, inspected = [read(path) for path in paths], [inspect(path) for path in paths]
        rows.append(
            {
                **planned(variant, ablation.budget, target),
                "training_loss": _spread([run.series.final_loss for run in runs]),
                "heldout_loss": _spread([heldout(run) for run in runs]),
                "pace": asdict(pace),
                "tokens_per_second_of_runs": _spread([run.series.steady_rate for run in runs]),
                "gradient_norm": _spread([float(np.nanmean(run.series.grad_norm[-LAST_STEPS:])) for run in runs]),
                "largest_attention_logit": _spread([one.largest_logit for one in inspected]),
                "by_layer": {
                    "gradient_norm": _mean([one.gradient_norms for one in inspected]),
                    "largest_logit": _mean([one.activity.largest_logits for one in inspected]),
                    "residual_rms": _mean([one.activity.residual_rms for one in inspected]),
                    "dead_units": _mean([one.activity.dead_units for one in inspected]),
                },
            }
        )
    pooled = noise([_losses(row) for row in rows])
    comparisons = 2 * len(rows) - 3 if ablation.is_ladder else len(rows) - 1  # the second row's two are one
    for number, row in enumerate(rows):
        row["from_reference"] = _apart(row, rows[0], pooled, comparisons) if number else None
        before = rows[number - 1] if number and ablation.is_ladder else None
        row["from_row_before"] = None if before is None else _apart(row, before, pooled, comparisons)
    return {
        "budget": ablation.budget,
        "tokens": ablation.tokens,
        "seeds": [ablation.recipe.seed + seed for seed in range(ablation.seeds)],
        "noise": None if pooled is None else {**asdict(pooled), "comparisons": comparisons},
        "variants": rows,
    }


def planned(variant: Variant, budget: Budget, target: int) -> dict[str, Any]:
    """What is known of a variant before it is trained."""
    model = variant.model
    return {
        "name": variant.name,
        "label": variant.label,
        "choices": dict(variant.choices),
        "brought": dict(variant.brought),
        "d_ff": model.d_ff,
        "n_layers": model.n_layers,
        "parameters": parameter_count(model),
        "flops_per_token": flops_per_token(model).causal,
        "off_budget": cost(model, budget) / target - 1,
        "kv_bytes_per_token": kv_cache_bytes_per_token(model),
    }


def heldout(run: Chronicle) -> float:
    last = run.last()
    value = None if last is None else last.get("loss")
    return float("nan") if value is None else float(value)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation over seeds, and each; null where there is none."""
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    mean = statistics.fmean(values)
    each = [one if math.isfinite(one) else None for one in values]
    return {"mean": mean if math.isfinite(mean) else None, "deviation": deviation, "each": each}


def _mean(by_seed: Sequence[Sequence[float]]) -> list[float | None]:
    """Over seeds, a number a layer; null where it is not finite."""
    means = np.mean(np.array(by_seed, dtype=np.float64), axis=0)
    return [float(one) if math.isfinite(one) else None for one in means]


def _losses(row: Mapping[str, Any]) -> list[float]:
    return [math.nan if one is None else one for one in row["heldout_loss"]["each"]]


def _apart(row: Mapping[str, Any], other: Mapping[str, Any], pooled: Noise | None, comparisons: int) -> dict[str, Any]:
    found = asdict(difference(_losses(row), _losses(other), pooled, comparisons))
    return {**found, "mean": found["mean"] if math.isfinite(found["mean"]) else None}
