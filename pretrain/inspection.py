"""What a trained model does with one batch: how large each layer's gradient is, how large attention's scores get."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import model.attention
import model.mla
from data_pipeline.loader import evaluation_batches
from data_pipeline.shards import open_collection
from data_pipeline.stream import TokenStream
from model.kernels import attend
from model.masks import Band, Mask
from pretrain.config import from_root
from pretrain.run_directory import CheckpointError
from pretrain.subject import Subject, open_subject

BATCH = 4  # windows


@dataclass(frozen=True)
class Inspected:
    """`gradient_norms`: of all parameters of each block, for the mean loss; `largest_logit`: the largest |q·k| times
    its scale that any query has with a token it sees."""

    gradient_norms: list[float]
    largest_logit: float


def inspect(run: Path) -> Inspected:
    """The newest checkpoint of a run on the first held-out windows of its first source, in fp32 on a CPU.

    One long text: tokens of several documents see each other, as in training on concatenated rows.
    """
    subject = open_subject(run, accelerator="cpu")
    inputs, targets = _batch(subject)
    transformer = subject.model.float().requires_grad_(True)
    with _scores() as largest:
        summed = transformer(inputs, targets)
    assert not isinstance(summed, Tensor), "with targets the model gives a loss"
    (summed.loss_sum / summed.token_count).backward()
    norms = []
    for block in transformer.layers:
        squares = [float(one.grad.double().square().sum()) for one in block.parameters() if one.grad is not None]
        norms.append(math.sqrt(sum(squares)))
    return Inspected(norms, max(largest))


def _batch(subject: Subject) -> tuple[Tensor, Tensor]:
    assert subject.recipe is not None, "a run has a recipe"
    collection = open_collection(from_root(subject.recipe.data.path))
    for source in collection.sources.values():
        split = source.splits.get("validation")
        if split is not None and split.tokens:
            with closing(TokenStream(split)) as stream:
                batches = evaluation_batches(stream, subject.config.seq_len, BATCH, subject.codec.eos_id, 0, 1, None)
                inputs, targets = next(iter(batches))
                return torch.as_tensor(inputs), torch.as_tensor(targets)
    raise CheckpointError(f"{subject.recipe.data.path} has no held-out tokens to inspect a model on")


@contextmanager
def _scores() -> Iterator[list[float]]:
    """The largest score of each attention meanwhile: what `attend` multiplies is looked at on its way there."""
    largest: list[float] = []

    def watched(q_bhtk: Tensor, k_bhsk: Tensor, v_bhsk: Tensor, mask: Mask | None, *, grouped: bool) -> Tensor:
        largest.append(largest_score(q_bhtk, k_bhsk, mask))
        return attend(q_bhtk, k_bhsk, v_bhsk, mask, grouped=grouped)

    rooms = (model.attention, model.mla)
    for room in rooms:
        setattr(room, "attend", watched)  # noqa: B010
    try:
        yield largest
    finally:
        for room in rooms:
            setattr(room, "attend", attend)  # noqa: B010


def largest_score(q_bhtk: Tensor, k_bhsk: Tensor, mask: Mask | None) -> float:
    """max |q·k| / sqrt(width) over what a causal query sees, or a sliding window of it."""
    with torch.no_grad():
        k_bhsk = k_bhsk.repeat_interleave(q_bhtk.shape[1] // k_bhsk.shape[1], dim=1)
        scores_bhts = (q_bhtk @ k_bhsk.mT).abs() / math.sqrt(q_bhtk.shape[-1])
        scores_bhts = scores_bhts.tril()
        if isinstance(mask, Band):
            scores_bhts = scores_bhts.triu(1 - mask.window)
        return float(scores_bhts.max())
