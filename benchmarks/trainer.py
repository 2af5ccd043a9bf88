"""Our training loop beside transformers' Trainer: the same DeepSpeed JSON, weights, windows, batch and arithmetic.

    python benchmarks/trainer.py [--ranks N]... [--stage N] [--tokens N] [--accumulation N] [--pairs N] [--quick]
        [--json]

Ours is `pretrain.train.train`, theirs `transformers.Trainer` with LlamaForCausalLM (scaled_dot_product_attention) and
torch's fused AdamW. Both log every step; ours writes TensorBoard as well. Each has processes of its own, and they take
turns in blocks of a few steps. They read the same windows in the same order, and their losses must be the same, or
nothing is printed. A ratio is their seconds to ours, the median over pairs of blocks: above 1 ours is faster. CPU
seconds, of all ranks together, are what a busy machine leaves as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from benchmarks.freed_memory import make_data
from benchmarks.model import transformers_model
from benchmarks.overhead import machine, recipe
from benchmarks.turns import Group, Turn
from model.transformer import Transformer
from pretrain import train as loop
from pretrain.config import RunConfig, from_root
from pretrain.inputs import Inputs
from pretrain.resolve import read_json, resolve
from pretrain.runtime import Ranks, keep_freed_memory
from pretrain.state import TrainState

LOSS_TOLERANCE = 0.002  # relative


def config_of(options: argparse.Namespace, ranks: int) -> RunConfig:
    """The recipe of a step of `tokens` tokens in `accumulation` micro-steps of all ranks, at a constant low rate."""
    sequences = max(options.tokens // options.seq_len, ranks * options.accumulation)
    steps = options.block_steps * (options.pairs + 1) + 1
    micro = sequences // (ranks * options.accumulation)
    changes = [
        f"batch.micro_batch_size={micro}", "schedule.name=constant", "schedule.peak_lr=1e-4", "schedule.min_lr=0.0",
        "schedule.warmup_steps=0", *options.set,
    ]  # fmt: skip
    return recipe(options.preset, options.work, options.stage, sequences, options.seq_len, steps, changes)


# ---------------------------------------------------------------- the two programs, on each rank


def ours(config: RunConfig, turn: Turn, ranks: Ranks, runs: Path) -> None:
    real = loop.train_step

    def train_step(*arguments: Any, **others: Any) -> Any:
        turn.step_begins()
        result = real(*arguments, **others)
        turn.losses.append(result.loss)
        return result

    with mock.patch.object(loop, "train_step", train_step):
        loop.train(config, runs / f"{ranks.world_size}-ranks", ranks)


def theirs(config: RunConfig, turn: Turn, ranks: Ranks, runs: Path, work: Path) -> None:
    import transformers

    keep_freed_memory()
    windows = torch.from_numpy(np.load(work / "windows.npy"))
    model = Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))
    llama = transformers_model(model, windows[:1, :-1], windows[:1, 1:]).module
    table, batch = config.optimizer, config.batch
    accumulation = batch.global_batch_size // (batch.micro_batch_size * ranks.world_size)
    arguments = transformers.TrainingArguments(
        output_dir=str(runs / "theirs"), use_cpu=True, bf16=True, max_steps=config.schedule.max_steps,
        per_device_train_batch_size=batch.micro_batch_size, gradient_accumulation_steps=accumulation,
        learning_rate=config.schedule.peak_lr, lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch_fused",
        adam_beta1=table.beta1, adam_beta2=table.beta2, adam_epsilon=table.eps, weight_decay=table.weight_decay,
        max_grad_norm=table.clipping_norm, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, remove_unused_columns=False, seed=config.seed,
        deepspeed=resolve(read_json(from_root(config.deepspeed.config)), config, ranks.world_size),
    )  # fmt: skip

    class Trainer(transformers.Trainer):
        """Windows in their order, and the loss of all targets of a window, which its own shift would cut by one."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs, use_cache=False).loss

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turn.step_begins()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                turn.losses.append(logs["loss"])

    rows = [{"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]} for row in windows]
    trainer = Trainer(model=llama, args=arguments, train_dataset=rows, callbacks=[Turns()])
    trainer.model_accepts_loss_kwargs = False
    trainer.train()


def write_windows(config: RunConfig, work: Path) -> None:
    """The windows of all steps in the order in which ours reads them, (samples, seq_len + 1) int64."""
    one = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_batch_size": 1})})
    batches: Iterator[Any]
    count = config.batch.global_batch_size * config.schedule.max_steps
    with loop.loader(Inputs.check(one, 1), Ranks(0, 0, 1), TrainState()) as batches:
        rows = [next(batches) for _ in range(count)]
    np.save(work / "windows.npy", np.stack([np.append(row.inputs[0], row.targets[0, -1]) for row in rows]))


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Found:
    ranks: int
    stage: int
    tokens: int
    accumulation: int
    wall_ratio: float  # their seconds to ours
    wall_low: float
    wall_high: float
    cpu_ratio: float
    ours_tokens_per_second: float
    theirs_tokens_per_second: float
    worst_loss: float
    pairs: int

    def line(self) -> str:
        return (
            f"{self.ranks} rank{'s' if self.ranks > 1 else ' '}  ZeRO-{self.stage}  {self.tokens:6,} tokens a step in "
            f"{self.accumulation} micro-steps: {self.wall_ratio:.3f} × the Trainer's speed ({self.wall_low:.2f} to "
            f"{self.wall_high:.2f}), {self.cpu_ratio:.3f} by CPU seconds; {self.ours_tokens_per_second:,.0f} and "
            f"{self.theirs_tokens_per_second:,.0f} tokens/s, {self.pairs} pairs, losses differ by {self.worst_loss:.0e}"
        )


def group(side: str, ranks: int, threads: int, options: argparse.Namespace, runs: str) -> Group:
    """The processes of "ours" or "theirs", which wait for their first turn."""
    arguments = [
        "--side", side, "--runs", runs,
        "--of-ranks", str(ranks), "--stage", str(options.stage), "--tokens", str(options.tokens), "--preset",
        options.preset, "--seq-len", str(options.seq_len), "--accumulation", str(options.accumulation), "--pairs",
        str(options.pairs), "--block-steps", str(options.block_steps), "--work", str(options.work),
        *(word for change in options.set for word in ("--set", change)),
    ]  # fmt: skip
    return Group(__file__, arguments, ranks, threads)


def measure(ranks: int, options: argparse.Namespace) -> Found:
    config = config_of(options, ranks)
    write_windows(config, options.work)
    threads = max(1, torch.get_num_threads() // ranks)
    with (
        tempfile.TemporaryDirectory() as runs,
        group("ours", ranks, threads, options, runs) as us,
        group("theirs", ranks, threads, options, runs) as them,
    ):
        pairs = [(us.turn(), them.turn()) for _ in range(options.pairs + 1)]
    worst = max(
        abs(mine - other) / other
        for one, two in pairs
        for mine, other in zip(one["losses"], two["losses"], strict=False)  # the Trainer logs a step behind its end
    )
    if worst > LOSS_TOLERANCE:
        sys.exit(f"error: {ranks} ranks: losses differ by {worst:.1e}")
    steady = pairs[1:]  # the first warms both up
    walls = [two["wall"] / one["wall"] for one, two in steady]
    tokens = config.batch.global_batch_size * config.model.seq_len

    def rate(side: int) -> float:
        return tokens * options.block_steps / statistics.median(pair[side]["wall"] for pair in steady)

    return Found(
        ranks=ranks,
        stage=options.stage,
        tokens=tokens,
        accumulation=options.accumulation,
        wall_ratio=statistics.median(walls),
        wall_low=min(walls),
        wall_high=max(walls),
        cpu_ratio=statistics.median(two["cpu"] / one["cpu"] for one, two in steady),
        ours_tokens_per_second=rate(0),
        theirs_tokens_per_second=rate(1),
        worst_loss=worst,
        pairs=len(steady),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step (default: 2048)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps of a step (default: 1)")
    parser.add_argument("--preset", default="mini", help="of the model (default: mini)")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=6, help="of blocks, behind one that is left out (default: 6)")
    parser.add_argument("--block-steps", type=int, default=3, help="steps of a block (default: 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the recipe")
    parser.add_argument("--quick", action="store_true", help="one rank, two pairs")
    parser.add_argument("--work", type=Path, help="folder for the data (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--of-ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    if options.side:
        config, turn = config_of(options, options.of_ranks), Turn(options.block_steps)
        ranks = Ranks.from_environment(os.environ)
        if options.side == "ours":
            ours(config, turn, ranks, options.runs)
        else:
            theirs(config, turn, ranks, options.runs, options.work)
        return
    if options.quick:
        options.ranks, options.pairs = options.ranks or [1], 2
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        options.work = options.work or Path(temporary)
        if not (options.work / "data").exists():
            make_data(options.work)
        for ranks in options.ranks or (1, 2):
            found.append(measure(ranks, options))
            if not options.json:
                print(found[-1].line(), flush=True)
    if options.json:
        print(json.dumps({**machine(), "found": [asdict(one) for one in found]}, indent=2))


if __name__ == "__main__":
    main()
