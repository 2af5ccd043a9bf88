"""How fast models learn beside each other: forward and backward of each, turn by turn in one process.

What a run came to in tokens a second says as much about what else the machine did that hour as about its model. Here
every round has a turn of each model, of which the fastest step counts, and a model is compared with the first within
the round: what slows a round down slows both.
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
    """Medians over the rounds; `lowest` and `highest` are of the ratio. Without the optimizer and without an engine."""

    tokens_per_second: float
    ratio: float  # to the first model's tokens a second in the same round
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
    for seconds in zip(*by_round, strict=True):
        ratios = [turns[0] / one for turns, one in zip(by_round, seconds, strict=True)]
        rate = tokens / statistics.median(seconds)
        found.append(Pace(rate, statistics.median(ratios), min(ratios), max(ratios)))
    return found


def _turn(recipe: RunConfig, config: ModelConfig, device: torch.device, steps: int) -> float:
    """Seconds of the fastest step."""
    compute = recipe.precision.compute
    dtype = DTYPES[auto_compute(device) if compute == "auto" else compute]
    generator = torch.Generator().manual_seed(recipe.seed)
    model = Transformer(config, generator).to(device, dtype)
    model.activation_checkpointing = recipe.memory.activation_checkpointing
    model.loss_chunk_tokens = recipe.memory.loss_chunk_tokens
    shape = (recipe.batch.micro_batch_size, config.seq_len + 1)
    ids = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    return min([_step(model, ids[:, :-1], ids[:, 1:]) for _ in range(1 + steps)][1:])


def _step(model: Transformer, inputs_bt: torch.Tensor, targets_bt: torch.Tensor) -> float:
    _wait(inputs_bt.device)
    began = time.perf_counter()
    summed = model(inputs_bt, targets_bt)
    assert not isinstance(summed, torch.Tensor), "with targets the model gives a loss"
    (summed.loss_sum / summed.token_count).backward()
    _wait(inputs_bt.device)
    seconds = time.perf_counter() - began
    model.zero_grad(set_to_none=True)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
