"""Small models of several sizes on several amounts of text, and a scaling law fitted to them. docs/scaling.md reads it.

    python benchmarks/scaling_sweep.py --work DIR [--json FILE] [--plot FILE] [--short]

Every size is trained by `pretrain run` on every number of tokens, each time from the start and with a schedule of that
length (a checkpoint in the midst of a longer schedule has a rate that is too high, and a worse loss than its tokens
could give: Hoffmann et al. 2022, section 3.1). No run reads a text twice. Held-out loss is measured at the end of each,
on the same tokens for all. The text is English and code of the sample corpus.

--work keeps data and runs: started again, the sweep goes on where it was, in the midst of a run too. Some twenty
minutes on one core. --short: nine runs of a few steps, which walk the road and make no law worth a name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose tokenizer.py is no package

from data_pipeline.prepare import Options, prepare  # noqa: E402
from model.accounting import parameter_count  # noqa: E402
from model.config import from_table  # noqa: E402
from pretrain.config import parse_recipe, to_toml  # noqa: E402
from pretrain.scaling_fit import Point, bootstrap, fit  # noqa: E402
from pretrain.scaling_law import CONSTANTS, FORMULA, Range, ScalingLaw  # noqa: E402

SOURCES = ("english", "code")
VOCAB_SIZE = 1024  # small, lest the models be embeddings and little else
SEQ_LEN = 128
BATCH = 4  # rows a step: of so few tokens, small steps and many of them make the most
SIZES = ((32, 1), (64, 1), (96, 2), (128, 3), (192, 3))  # d_model, n_layers
TOKENS = (2**17, 2**18, 2**19, 2**20)  # all less than the text has
RATES = (4e-3, 2e-3, 1e-3)  # of which each size has the one that is best at TUNING_TOKENS
TUNING_TOKENS = 2**18
BOOTSTRAPS = 200
OTHER_SEEDS = (2, 3)  # for the size in the middle, at TUNING_TOKENS
EVALUATION_TOKENS = 32768  # of each source


@dataclass(frozen=True)
class Trial:
    """One run."""

    d_model: int
    n_layers: int
    tokens: int
    peak_lr: float
    seed: int = 1

    @property
    def name(self) -> str:
        return f"{self.d_model}x{self.n_layers}-{self.tokens}-{self.peak_lr:g}-{self.seed}"

    @property
    def size(self) -> tuple[int, int]:
        return self.d_model, self.n_layers

    @property
    def steps(self) -> int:
        return self.tokens // (BATCH * SEQ_LEN)

    @property
    def model(self) -> dict[str, Any]:
        """The recipe's [model]: heads of 64, as wide together as the model or a little wider."""
        heads = -(-self.d_model // 64)
        return {
            "preset": "mini", "vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN, "d_model": self.d_model,
            "n_layers": self.n_layers, "n_heads": heads, "n_kv_heads": heads, "d_ff": 3 * self.d_model,
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        return parameter_count(from_table(self.model))

    @property
    def overrides(self) -> dict[str, Any]:
        """What differs from the recipe of the sweep."""
        return {
            "seed": self.seed,
            **{f"model.{key}": value for key, value in self.model.items() if key != "preset"},
            "schedule.peak_lr": self.peak_lr,
            "schedule.min_lr": self.peak_lr / 10,
            "schedule.warmup_steps": max(1, self.steps // 20),
            "schedule.max_steps": self.steps,
            "evaluation.every_steps": self.steps,
        }


@dataclass(frozen=True)
class Score:
    """A trial and its held-out loss in nats a token."""

    trial: Trial
    loss: float


@dataclass(frozen=True)
class Grid:
    """Which trials there are."""

    sizes: tuple[tuple[int, int], ...] = SIZES
    tokens: tuple[int, ...] = TOKENS
    rates: tuple[float, ...] = RATES
    tuning_tokens: int = TUNING_TOKENS
    other_seeds: tuple[int, ...] = OTHER_SEEDS


WHOLE = Grid()
SHORT = Grid(SIZES[:3], (2**13, 2**14, 2**15), RATES[:1], 2**14, ())


def prepare_data(work: Path) -> None:
    """Tokenizer and token files of the sample corpus, made once."""
    if (work / "data" / "manifest.json").exists():
        return
    import orjson

    from tokenizer.train import train as train_tokenizer

    inputs = {name: [ROOT / "data_pipeline" / "sample_corpus" / f"{name}.jsonl"] for name in SOURCES}
    texts = [orjson.loads(line)["text"] for [path] in inputs.values() for line in path.open("rb")]
    train_tokenizer(texts, work / "tokenizer", vocab_size=VOCAB_SIZE)
    prepare(inputs, work / "tokenizer", work / "data", Options(validation_fraction=0.1))


def write_recipe(work: Path) -> Path:
    """The recipe whose values the trials override."""
    any_trial = Trial(*SIZES[0], TOKENS[0], RATES[0])
    tables: dict[str, Any] = {
        "model": any_trial.model,
        "data": {"path": str(work / "data"), "tokenizer": str(work / "tokenizer")},
        "batch": {"global_batch_size": BATCH, "micro_batch_size": BATCH},
        "schedule": {},
        "evaluation": {"max_tokens": EVALUATION_TOKENS},
        "checkpoint": {"every_steps": 512, "keep_last": 1},
        "logging": {"tensorboard": False, "every_steps": 64},
    }
    for key, value in any_trial.overrides.items():
        *table, name = key.split(".")
        (tables[table[0]] if table else tables)[name] = value
    path = work / "recipe.toml"
    path.write_text(to_toml(parse_recipe(tables)), encoding="utf-8")
    return path


def heldout(run: Path, step: int) -> dict[str, Any] | None:
    """A run's evaluation over all sources at `step`; None where it has none yet."""
    if not (run / "metrics.jsonl").exists():
        return None
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    found = [one for one in records if (one["kind"], one.get("source"), one["step"]) == ("evaluation", "all", step)]
    return found[-1] if found else None


def run(trial: Trial, recipe: Path, work: Path) -> dict[str, Any]:
    """The held-out evaluation at a trial's end, which is run, or gone on with, where it is not there yet."""
    directory = work / "runs" / trial.name
    command = [sys.executable, "-m", "pretrain", "run", str(recipe), "--run", str(directory)]
    for key, value in trial.overrides.items():
        command += ["--set", f"{key}={value}"]
    done = heldout(directory, trial.steps)
    if done is None:
        print(trial.name, file=sys.stderr, flush=True)
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        done = heldout(directory, trial.steps)
    if done is None:
        raise SystemExit(f"error: {directory} ended without an evaluation at step {trial.steps}: see its metrics.jsonl")
    return done


def sweep(loss_of: Callable[[Trial], float], grid: Grid = WHOLE) -> list[Score]:
    """All trials, the shorter first: rates at the tuning tokens, other seeds there, then each size's rate on all."""
    sizes, tuning = grid.sizes, grid.tuning_tokens
    scores = [Score(trial, loss_of(trial)) for trial in (Trial(*s, tuning, r) for s in sizes for r in grid.rates)]
    best = {size: min((one for one in scores if one.trial.size == size), key=lambda one: one.loss) for size in sizes}
    middle = best[sizes[len(sizes) // 2]].trial
    others = [replace(middle, seed=seed) for seed in grid.other_seeds]
    rest = [replace(best[size].trial, tokens=count) for count in grid.tokens if count != tuning for size in sizes]
    return scores + [Score(trial, loss_of(trial)) for trial in others + rest]


# ---------------------------------------------------------------- the law


def point(score: Score) -> Point:
    return Point(score.trial.parameters, score.trial.tokens, score.loss)


def best_of_each(scores: list[Score]) -> list[Score]:
    """Of each size and number of tokens the trial of the first seed with the least loss: what a law is fitted to."""
    best: dict[tuple[int, int], Score] = {}
    for score in scores:
        place = score.trial.parameters, score.trial.tokens
        if score.trial.seed == Trial.seed and (place not in best or score.loss < best[place].loss):
            best[place] = score
    return [best[place] for place in sorted(best)]


def judge(scores: list[Score], grid: Grid = WHOLE) -> dict[str, Any]:
    """The law, how far the points are from it, and how little they fix it. JSON-able; `estimate --fit` reads it."""
    chosen = best_of_each(scores)
    points = [point(score) for score in chosen]
    name, source = "sample corpus", "benchmarks/scaling_sweep.py on English and code of the sample corpus"
    found = fit(points, name, source)
    laws = bootstrap(points, BOOTSTRAPS if grid is WHOLE else 2, seed=1)
    spread = {key: sorted(getattr(law, key) for law in laws) for key in CONSTANTS}
    middle = Trial(*grid.sizes[len(grid.sizes) // 2], grid.tuning_tokens, 0.0)
    seeds = [one for one in scores if one.trial.tokens == middle.tokens and one.trial.seed != Trial.seed]
    rate = seeds[0].trial.peak_lr if seeds else None
    alike = [
        one.loss
        for one in scores
        if one.trial.size == middle.size and one.trial.tokens == middle.tokens and one.trial.peak_lr == rate
    ]
    return {
        "formula": FORMULA,
        "law": found.law.to_dict(),
        "points": [
            row(score) | {"fitted": score.loss * math.exp(off)}
            for score, off in zip(chosen, found.residuals, strict=True)
        ],
        "largest_residual": max(abs(off) for off in found.residuals),
        "bootstrap": {
            "times": len(laws),
            "from_10_to_90_percent": {
                key: [values[len(laws) // 10], values[-1 - len(laws) // 10]] for key, values in spread.items()
            },
        },
        "seeds_apart": {"losses": alike, "standard_deviation": statistics.stdev(alike) if len(alike) > 1 else None},
        "without_the_largest": forecast(points, name, source),
        "trials": [row(score) for score in scores],
    }


def row(score: Score) -> dict[str, Any]:
    return {**asdict(score.trial), "parameters": score.trial.parameters, "loss": score.loss}


def forecast(points: list[Point], name: str, source: str) -> list[dict[str, float]]:
    """A law of all sizes but the largest, and what it says of that one: the only part here that looks ahead."""
    largest = max(one.parameters for one in points)
    law = fit([one for one in points if one.parameters != largest], name, source).law
    return [
        {**asdict(one), "forecast": law.loss(one.parameters, one.tokens)} for one in points if one.parameters == largest
    ]


def to_text(judged: dict[str, Any]) -> str:
    """The points as a table in Markdown, then the law."""
    tokens = sorted({one["tokens"] for one in judged["points"]})
    lines = [
        "| parameters | width × layers | rate | " + " | ".join(f"{count:,} tokens" for count in tokens) + " |",
        "|---|---|---|" + "---|" * len(tokens),
    ]
    by_size: dict[int, list[dict[str, Any]]] = {}
    for one in judged["points"]:
        by_size.setdefault(one["parameters"], []).append(one)
    for parameters, ones in by_size.items():
        cells = " | ".join(f"{one['loss']:.3f} ({one['fitted']:.3f})" for one in ones)
        first = ones[0]
        shape = f"{first['d_model']} × {first['n_layers']}"
        lines.append(f"| {parameters:,} | {shape} | {first['peak_lr']:g} | {cells} |")
    lines += ["", "| constant | fitted | 10 to 90 % of bootstraps |", "|---|---|---|"]
    for name in CONSTANTS:
        low, high = judged["bootstrap"]["from_10_to_90_percent"][name]
        lines.append(f"| {name} | {judged['law'][name]:.4g} | {low:.4g} to {high:.4g} |")
    return "\n".join(lines)


def plot(judged: dict[str, Any], path: Path) -> None:
    """Measured losses as dots, the law as lines: over tokens, a colour a size; and over size, a colour for tokens."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    law = law_of(judged)
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained", sharey=True)
    for axes, across, along in zip(panels, ("tokens", "parameters"), ("parameters", "tokens"), strict=True):
        values = sorted({one[along] for one in judged["points"]})
        for place, value in enumerate(values):
            colour = pyplot.get_cmap("viridis")(0.9 * place / max(1, len(values) - 1))
            dots = [one for one in judged["points"] if one[along] == value]
            ends = min(one[across] for one in dots) / 1.2, max(one[across] for one in dots) * 1.2
            line = [ends[0] * (ends[1] / ends[0]) ** (step / 50) for step in range(51)]
            axes.plot([one[across] for one in dots], [one["loss"] for one in dots], "o", color=colour)
            fitted = [law.loss(value, at) if along == "parameters" else law.loss(at, value) for at in line]
            axes.plot(line, fitted, color=colour, lw=1, label=f"{value:,}")
        axes.set(xscale="log", xlabel=across, title=f"dots: measured, lines: the law, a colour for {along}")
        axes.legend(title=along, fontsize="small")
    panels[0].set_ylabel("held-out loss, nats a token")
    figure.savefig(path, dpi=110)


def law_of(judged: dict[str, Any]) -> ScalingLaw:
    ranges = {name: Range(**judged["law"][name]) for name in ("parameters", "tokens")}
    return ScalingLaw(**judged["law"] | ranges)


# ---------------------------------------------------------------- the command


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True, help="keep data and runs here, and go on from them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write points and law here, for `estimate --fit`")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them")
    parser.add_argument("--short", action="store_true", help="nine short runs instead")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    prepare_data(work)
    recipe = write_recipe(work)
    grid = SHORT if options.short else WHOLE
    judged = judge(sweep(lambda trial: run(trial, recipe, work)["loss"], grid), grid)
    if options.json:
        options.json.write_text(json.dumps(judged, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(judged, options.plot)
    print(to_text(judged))


if __name__ == "__main__":
    main()
