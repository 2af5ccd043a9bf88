"""What bf16 master weights lose at a low learning rate, and what compensation gives back. docs/precision.md reads it.

    python benchmarks/precision_study.py [--input NAME=PATH ...] [--work DIR] [--plot FILE] [--json]

A small model is trained with fp32 masters by `pretrain run`; the text is the sample corpus, or what --input names. From
that one checkpoint, runs of the same engine go on at a constant low rate: with fp32 masters, with bf16 masters and bf16
moments, and with these and each compensation, every kind on the same rows in the same order, once for each seed of that
order. The reference is the fp32 run of the same seed.

At every step the update that the optimizer computes in fp32, from its own weights, gradient and moments, stands beside
what became of the weights:

    still     elements of the weights that were to change and did not, of those that were to; mean over the steps
    arrived   (what the weights moved · the sum of all updates) / (that sum · itself), over the whole run: 1 where
              nothing is lost; beside it with what Kahan summation has yet to pass on
    distance  of the weights at the end to the reference's, over the reference's own way from the checkpoint

--work keeps text, checkpoint and figures' runs, so that another call begins behind them. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose tokenizer.py is no package

from data_pipeline.prepare import Options, parse_inputs, prepare  # noqa: E402
from pretrain.adamw import direction  # noqa: E402
from pretrain.config import RunConfig, parse_recipe, to_toml  # noqa: E402
from pretrain.engine import process_group  # noqa: E402
from pretrain.inputs import Inputs, initial_weights  # noqa: E402
from pretrain.runtime import Ranks, seed_everything  # noqa: E402
from pretrain.state import TrainState  # noqa: E402
from pretrain.step import train_step  # noqa: E402
from pretrain.train import build_engine, heldout_scores, loader  # noqa: E402
from tokenizer.train import train as train_tokenizer  # noqa: E402

REFERENCE = "fp32"
KINDS: dict[str, dict[str, str]] = {
    REFERENCE: {"master": "fp32"},
    "bf16": {"master": "bf16"},
    "bf16 + kahan": {"master": "bf16", "compensation": "kahan"},
    "bf16 + stochastic": {"master": "bf16", "compensation": "stochastic"},
}


@dataclass
class Watch:
    """Hooks around an optimizer's steps: what was to be added to the weights, beside what was."""

    wanted: dict[Tensor, Tensor] = field(default_factory=dict)  # of this step, by flat partition
    before: dict[Tensor, Tensor] = field(default_factory=dict)
    sums: dict[Tensor, Tensor] = field(default_factory=dict)  # of all steps
    changing: int = 0  # elements that were to change in this step
    still: int = 0
    shares: list[float] = field(default_factory=list)  # still of changing, by step

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda one, *_: self.look_before(one))
        optimizer.register_step_post_hook(lambda one, *_: self.look_behind())

    @torch.no_grad()
    def look_before(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = optimizer.state.get(weights) or {}
                zeros = torch.zeros_like(weights, dtype=torch.float32)
                m, v = (state.get(name, zeros).float().clone() for name in ("exp_avg", "exp_avg_sq"))
                step = int(state.get("step", 0)) + 1
                update = direction(weights.grad, m, v, step, group["betas"], group["eps"])
                update.add_(weights, alpha=group["weight_decay"]).mul_(-group["lr"])
                self.wanted[weights], self.before[weights] = update, weights.detach().clone()

    @torch.no_grad()
    def look_behind(self) -> None:
        for weights, update in self.wanted.items():
            is_to_change = update != 0
            self.changing += int(is_to_change.sum())
            self.still += int((is_to_change & (weights == self.before[weights])).sum())
            total = self.sums.setdefault(weights, torch.zeros_like(update, dtype=torch.float64))
            total += update
        self.wanted.clear()
        self.before.clear()

    def end_step(self) -> None:
        """DeepSpeed steps its optimizer once for each group of parameters."""
        self.shares.append(self.still / self.changing)
        self.changing = self.still = 0


@dataclass(frozen=True)
class Run:
    """One kind's run of one seed. `weights` are its masters at the end, one flat fp32 tensor."""

    losses: list[float]  # of training, by step
    heldout: dict[int, float]  # by the number of steps done
    still: float
    arrived: float
    arrived_with_rest: float
    weights: Tensor


def masters(optimizer: torch.optim.Optimizer, *, with_rest: bool = False) -> Tensor:
    """One flat fp32 tensor of the weights that an optimizer updates; with what Kahan summation keeps beside them."""
    parts = []
    for weights in (weights for group in optimizer.param_groups for weights in group["params"]):
        rest = optimizer.state[weights].get("lost", 0.0) if with_rest else 0.0
        parts.append((weights.detach().float() + rest).view(-1))
    return torch.cat(parts)


def run_on(config: RunConfig, ranks: Ranks, evaluate_every: int) -> tuple[Tensor, Run]:
    """The masters that a run begins with, and the run."""
    inputs = Inputs.check(config, 1)
    seed_everything(config.seed)
    engine = build_engine(inputs, ranks, torch.device("cpu"), initial_weights(inputs))
    optimizer, watch = engine._engine.optimizer.optimizer, Watch()
    watch.attach(optimizer)
    first = masters(optimizer)
    losses, heldout = [], {0: heldout_scores(engine, inputs, ranks)["all"].loss}
    with closing(loader(inputs, ranks, TrainState())) as batches:
        for done in range(1, config.schedule.max_steps + 1):
            losses.append(train_step(engine, batches, inputs.plan, config.schedule.peak_lr).loss)
            watch.end_step()
            if done % evaluate_every == 0 or done == config.schedule.max_steps:
                heldout[done] = heldout_scores(engine, inputs, ranks)["all"].loss
    wanted = torch.cat([total.view(-1) for total in watch.sums.values()])
    arrived, with_rest = (
        float((masters(optimizer, with_rest=rest).double() - first) @ wanted / (wanted @ wanted))
        for rest in (False, True)
    )
    return first, Run(losses, heldout, statistics.fmean(watch.shares), arrived, with_rest, masters(optimizer))


# ---------------------------------------------------------------- the checkpoint


def tables(options: argparse.Namespace, **changes: dict[str, Any]) -> dict[str, Any]:
    """The recipe of the checkpoint's run; keyword arguments replace keys of a table."""
    recipe: dict[str, Any] = {
        "seed": 1,
        "model": {
            "preset": "mini", "vocab_size": options.vocab_size, "d_model": options.width, "n_layers": options.layers,
            "n_heads": options.width // 64, "n_kv_heads": options.width // 64, "d_ff": 3 * options.width,
            "seq_len": options.seq_len,
        },
        "data": {"path": str(options.work / "data"), "tokenizer": str(options.work / "tokenizer")},
        "batch": {"global_batch_size": 16, "micro_batch_size": 8},
        "schedule": {
            "peak_lr": 2e-3, "min_lr": 2e-4, "warmup_steps": options.first_steps // 10,
            "max_steps": options.first_steps,
        },
        "evaluation": {"every_steps": options.first_steps, "max_tokens": options.evaluation_tokens},
        "checkpoint": {"every_steps": options.first_steps},
        "logging": {"tensorboard": False, "every_steps": 50},
    }  # fmt: skip
    for table, values in changes.items():
        recipe[table] = {**recipe.get(table, {}), **values} if isinstance(values, dict) else values
    return recipe


def make_checkpoint(options: argparse.Namespace) -> Path:
    """The trained run that all kinds go on from; each part of it is made once."""
    inputs = {name: [Path(path) for path in paths] for name, paths in parse_inputs(options.input).items()}
    if not (options.work / "data" / "manifest.json").exists():
        import orjson

        texts = [orjson.loads(line)["text"] for paths in inputs.values() for path in paths for line in path.open("rb")]
        train_tokenizer(texts, options.work / "tokenizer", vocab_size=options.vocab_size)
        prepare(inputs, options.work / "tokenizer", options.work / "data", Options(validation_fraction=0.1))
    recipe, run = options.work / "first.toml", options.work / "first"
    recipe.write_text(to_toml(parse_recipe(tables(options))), encoding="utf-8")
    command = [sys.executable, "-m", "pretrain", "run", str(recipe), "--run", str(run)]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return run


def continued(options: argparse.Namespace, kind: str, seed: int, checkpoint: Path) -> RunConfig:
    changes: dict[str, Any] = {
        "seed": seed,
        "initial_weights": str(checkpoint),
        "batch": {"global_batch_size": 4, "micro_batch_size": 4},
        "schedule": {
            "name": "constant", "peak_lr": options.lr, "min_lr": 0.0, "warmup_steps": 0, "max_steps": options.steps,
        },
        "precision": KINDS[kind],
    }  # fmt: skip
    return parse_recipe(tables(options, **changes))


# ---------------------------------------------------------------- the figures


@dataclass(frozen=True)
class Figures:
    """Of one kind, a number for each seed."""

    still: list[float]
    arrived: list[float]
    arrived_with_rest: list[float]
    train_loss: list[float]  # mean over the last quarter of the steps
    heldout_before: list[float]
    heldout: list[float]
    distance: list[float]  # to the reference, over the reference's own way


@dataclass(frozen=True)
class Study:
    kinds: dict[str, Figures]
    parameters: int
    seeds_apart: float  # the references of two seeds, over the way of the first
    rounding: float  # the reference's masters rounded to bf16 at the end, the same way: no bf16 run can be nearer
    lr: float
    steps: int
    tokens: int  # of a run


def measure(options: argparse.Namespace, checkpoint: Path) -> tuple[Study, dict[tuple[str, int], Run]]:
    ranks = Ranks.from_environment(os.environ)
    runs: dict[tuple[str, int], Run] = {}
    with process_group(torch.device("cpu")):
        for seed in options.seeds:
            for kind in KINDS:
                print(f"{kind}, seed {seed}", file=sys.stderr, flush=True)
                config = continued(options, kind, seed, checkpoint)
                first, runs[kind, seed] = run_on(config, ranks, max(1, options.steps // 5))
    return study(options, first, runs), runs


def study(options: argparse.Namespace, first: Tensor, runs: dict[tuple[str, int], Run]) -> Study:
    seeds = options.seeds
    references = {seed: runs[REFERENCE, seed].weights for seed in seeds}
    ways = {seed: float((weights - first).norm()) for seed, weights in references.items()}
    kinds = {}
    for kind in KINDS:
        of_kind = [runs[kind, seed] for seed in seeds]
        kinds[kind] = Figures(
            still=[run.still for run in of_kind],
            arrived=[run.arrived for run in of_kind],
            arrived_with_rest=[run.arrived_with_rest for run in of_kind],
            train_loss=[statistics.fmean(run.losses[-max(1, options.steps // 4) :]) for run in of_kind],
            heldout_before=[run.heldout[0] for run in of_kind],
            heldout=[run.heldout[options.steps] for run in of_kind],
            distance=[float((runs[kind, s].weights - references[s]).norm()) / ways[s] for s in seeds],
        )
    one, other, *_ = seeds
    rounded = references[one].bfloat16().float()
    return Study(
        kinds=kinds,
        parameters=first.numel(),
        seeds_apart=float((references[one] - references[other]).norm()) / ways[one],
        rounding=float((rounded - references[one]).norm()) / ways[one],
        lr=options.lr,
        steps=options.steps,
        tokens=options.steps * 4 * options.seq_len,
    )


def to_text(found: Study) -> str:
    """A table in Markdown, of each seed's figures."""
    lines = [
        f"{found.parameters:,} weights, {found.steps} steps, {found.tokens:,} tokens a run at a rate of {found.lr:g}",
        f"references of two seeds: {found.seeds_apart:.3f} apart; reference rounded to bf16: {found.rounding:.3f} off",
        "",
        "| masters | still | arrived (with the rest) | training loss | held-out loss: before, after | distance |",
        "|---|---|---|---|---|---|",
    ]
    for kind, one in found.kinds.items():
        cells = [
            " / ".join(f"{share:.1%}" for share in one.still),
            " / ".join(f"{a:.3f} ({b:.3f})" for a, b in zip(one.arrived, one.arrived_with_rest, strict=True)),
            " / ".join(f"{loss:.4f}" for loss in one.train_loss),
            f"{one.heldout_before[0]:.4f}, " + " / ".join(f"{loss:.4f}" for loss in one.heldout),
            " / ".join(f"{share:.3f}" for share in one.distance),
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: Study, runs: dict[tuple[str, int], Run], path: Path) -> None:
    """Held-out loss over the steps; what stood still and what arrived; distances. One colour a kind."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (loss, shares, distance) = pyplot.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    colours = dict(zip(KINDS, ("black", "tab:red", "tab:blue", "tab:green"), strict=True))
    seeds = sorted({seed for _, seed in runs})
    for (kind, seed), run in runs.items():
        label = kind if seed == seeds[0] else None
        style = ("-", "--", ":", "-.")[seeds.index(seed) % 4]
        loss.plot(
            list(run.heldout), list(run.heldout.values()), style, color=colours[kind], marker="o", ms=3, label=label
        )
    loss.set(
        xlabel=f"steps at a rate of {found.lr:g}",
        ylabel="nats a token",
        title=f"held-out loss, a line each for {len(seeds)} seeds",
    )
    loss.legend(title="masters")
    for place, kind in enumerate(KINDS):
        one = found.kinds[kind]
        shares.bar(place - 0.2, 100 * statistics.fmean(one.still), 0.4, color=colours[kind], alpha=0.4)
        shares.bar(place + 0.2, 100 * statistics.fmean(one.arrived), 0.4, color=colours[kind])
        distance.bar(place, statistics.fmean(one.distance), 0.6, color=colours[kind])
    names = [kind.replace(" + ", "\n+ ") for kind in KINDS]
    shares.set(ylabel="%", title="weights that stand still in a step (pale),\nof all updates arrived at the end (full)")
    distance.axhline(found.seeds_apart, color="grey", ls="--", label="fp32, another seed")
    distance.axhline(found.rounding, color="grey", ls=":", label="fp32, rounded to bf16 at the end")
    distance.set(ylabel="over the fp32 run's own way", title="distance to the fp32 run", ylim=(0, 1.3))
    distance.legend()
    for axes in (shares, distance):
        axes.set_xticks(range(len(names)), names)
    figure.savefig(path, dpi=110)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    sample = ROOT / "data_pipeline" / "sample_corpus"
    default = [f"{name}={sample / name}.jsonl" for name in ("english", "chinese", "code")]
    parser.add_argument("--input", nargs="+", default=default, metavar="NAME=PATH", help="jsonl; the sample corpus")
    parser.add_argument("--work", type=Path, help="keep text and checkpoint here")
    parser.add_argument("--plot", type=Path, help="draw the figures")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12])
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, default=195, help="of 4 rows each")
    parser.add_argument("--first-steps", type=int, default=300, help="of the checkpoint's run, of 16 rows each")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--evaluation-tokens", type=int, default=8192, help="of each source")
    options = parser.parse_args(arguments)
    if len(options.seeds) < 2:
        parser.error("--seeds: two or more, else nothing says how far two runs are apart anyway")
    return options


def main() -> None:
    options = parse()
    os.environ["DS_ACCELERATOR"] = "cpu"  # what is computed here; DeepSpeed would say that it found nothing else
    with tempfile.TemporaryDirectory() as folder:
        options.work = (options.work or Path(folder)).resolve()
        options.work.mkdir(parents=True, exist_ok=True)
        found, runs = measure(options, make_checkpoint(options))
    if options.plot:
        plot(found, runs, options.plot)
    print(json.dumps(asdict(found), indent=2) if options.json else to_text(found))


if __name__ == "__main__":
    main()
