"""How fast models learn beside each other: forward and backward of each, turn by turn in one process.

What a run came to in tokens a second says as much about what else the machine did that hour as about its model. Here
every round has a turn of each model, of which the fastest step counts, and a model is compared with the first within
the round: what slows a round down slows both. On CPUs models are compared by the processor time of this process, of
all its threads, which other programs take nothing of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.config import ModelConfig
from model.transformer import Transformer
from pretrain.config import RunConfig
from pretrain.runtime import auto_compute

ROUNDS = 7
STEPS = 4  # of a turn, behind one that warms up
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Pace:
    """Of forward and backward, without the optimizer and without an engine."""

    tokens_per_second: float  # of the fastest step of all, by the clock on the wall
    ratio: float  # of the first model's time in the same round to this one's, the median of the rounds
    lowest: float
    highest: float


def paces(
    recipe: RunConfig, models: Sequence[ModelConfig], device: torch.device, rounds: int = ROUNDS, steps: int = STEPS
) -> list[Pace]:
    """Of the recipe's micro-batch, in its compute dtype, not compiled, one model in memory at a time; weights and ids
    are drawn. On a busy machine more steps a turn find one that nothing disturbed."""
    by_round = [[_turn(recipe, model, device, steps) for model in models] for _ in range(rounds)]
    tokens = recipe.batch.micro_batch_size * recipe.model.seq_len
    found = []
    for turns in zip(*by_round, strict=True):
        ratios = [first.busy / one.busy for (first, *_), one in zip(by_round, turns, strict=True)]
        rate = tokens / min(one.wall for one in turns)
        found.append(Pace(rate, statistics.median(ratios), min(ratios), max(ratios)))
    return found


@dataclass(frozen=True)
class _Turn:
    """Seconds of its fastest step, by either clock."""

    wall: float
    busy: float


def _turn(recipe: RunConfig, config: ModelConfig, device: torch.device, steps: int) -> _Turn:
    compute = recipe.precision.compute
    dtype = DTYPES[auto_compute(device) if compute == "auto" else compute]
    generator = torch.Generator().manual_seed(recipe.seed)
    model = Transformer(config, generator).to(device, dtype)
    model.activation_checkpointing = recipe.memory.activation_checkpointing
    model.loss_chunk_tokens = recipe.memory.loss_chunk_tokens
    shape = (recipe.batch.micro_batch_size, config.seq_len + 1)
    ids = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    timed = [_step(model, ids[:, :-1], ids[:, 1:]) for _ in range(1 + steps)][1:]
    return _Turn(min(wall for wall, _ in timed), min(busy for _, busy in timed))


def _step(model: Transformer, inputs_bt: torch.Tensor, targets_bt: torch.Tensor) -> tuple[float, float]:
    """Seconds by the clock on the wall, and busy ones: a CPU's own, a GPU's by the clock, since it is ours alone."""
    device = inputs_bt.device
    _wait(device)
    began, busy_before = time.perf_counter(), time.process_time()
    summed = model(inputs_bt, targets_bt)
    assert not isinstance(summed, torch.Tensor), "with targets the model gives a loss"
    (summed.loss_sum / summed.token_count).backward()
    _wait(device)
    wall, busy = time.perf_counter() - began, time.process_time() - busy_before
    model.zero_grad(set_to_none=True)
    return wall, busy if device.type == "cpu" else wall


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
