"""Inside a model: by ordinary hooks, each layer's largest attention score, its dead and saturated units, its residual
stream; and so a finished run on one batch, with each layer's gradient.

Training looks at itself in the same way every so many steps: see observing.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from data_pipeline.loader import evaluation_batches
from data_pipeline.packing import number_documents
from data_pipeline.shards import open_collection
from data_pipeline.stream import TokenStream
from model.masks import Mask, seen_of_row
from pretrain.config import from_root
from pretrain.evaluate import isolates_documents
from pretrain.run_directory import CheckpointError
from pretrain.subject import Subject, open_subject

if TYPE_CHECKING:
    from pathlib import Path

    from model.transformer import Transformer

BATCH = 4  # windows
SCORES_AT_ONCE = 1 << 22
MOST_TOKENS = 1 << 14  # whose scores are formed, in whole rows, of a layer: they cost what attention itself does
# A unit is dead where no token moves it by so much of what the units of its layer amount to (their root mean square).
DEAD = 1e-3
# It is saturated where all tokens drive it beyond this, from where on the slope of SiLU and GELU is within 2 % of 1:
# it is then as linear as if it had no activation. ReLU's slope is 1 from 0 on.
SATURATED = 6.0


@dataclass(frozen=True)
class Activity:
    """What each layer did in one forward pass."""

    largest_logits: list[float]  # |q·k| times its scale, of all queries with the tokens that they see
    dead_units: list[float]  # shares of the feed-forward's units
    saturated_units: list[float]
    residual_rms: list[float]  # of what the block hands on, all streams together


@dataclass
class Watched:
    """Gathers an Activity; numbers stay on the device until `activity` is asked for."""

    largest_logits: list[Tensor] = field(default_factory=list)
    dead_units: list[Tensor] = field(default_factory=list)
    saturated_units: list[Tensor] = field(default_factory=list)
    residual_rms: list[Tensor] = field(default_factory=list)

    def activity(self) -> Activity:
        return Activity(**{name: torch.stack(one).tolist() for name, one in vars(self).items()})

    def of_kernel(self, kernel: nn.Module, inputs: tuple[Any, ...], out_bhtk: Tensor) -> None:
        q_bhtk, k_bhsk, _, mask, _ = inputs
        self.largest_logits.append(largest_score(q_bhtk, k_bhsk, mask))

    @torch.no_grad()
    def of_driven(self, onset: float, matrix: nn.Module, inputs: tuple[Any, ...], driven_btf: Tensor) -> None:
        """What enters the activation."""
        self.saturated_units.append((driven_btf.flatten(0, -2).amin(0) > onset).float().mean())

    @torch.no_grad()
    def of_units(self, matrix: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """What leaves it, on its way back to the residual stream."""
        units_nf = inputs[0].flatten(0, -2)
        largest_f = torch.maximum(units_nf.amax(0), -units_nf.amin(0)).float()
        self.dead_units.append((largest_f <= DEAD * _rms(units_nf)).float().mean())

    @torch.no_grad()
    def of_block(self, block: nn.Module, inputs: tuple[Any, ...], x_btd: Tensor) -> None:
        self.residual_rms.append(_rms(x_btd))


@contextmanager
def watching(transformer: Transformer) -> Iterator[Watched]:
    """Look at the next forward pass, of which nothing changes. One pass: a second would be appended to the first.

    Compiled blocks run uncompiled meanwhile; a pass with gradients must not have activation checkpointing, which would
    run blocks twice.
    """
    watched, hooks = Watched(), []
    for block in transformer.layers:
        driven = "mlp.gate_proj" if transformer.config.ffn == "swiglu" else "mlp.up_proj"
        onset = 0.0 if transformer.config.ffn == "relu" else SATURATED
        hooks += [
            block.get_submodule("self_attn.kernel").register_forward_hook(watched.of_kernel),
            block.get_submodule(driven).register_forward_hook(partial(watched.of_driven, onset)),
            block.get_submodule("mlp.down_proj").register_forward_pre_hook(watched.of_units),
            block.register_forward_hook(watched.of_block),
        ]
    try:
        with transformer.uncompiled():
            yield watched
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def largest_score(q_bhtk: Tensor, k_bhsk: Tensor, mask: Mask | None) -> Tensor:
    """max |q·k| / sqrt(width) over all pairs that the mask lets see each other, in fp32; some queries at a time.

    Of more than MOST_TOKENS the first rows, and at least one.
    """
    batch, heads, tokens, width = q_bhtk.shape
    keys = k_bhsk.shape[2]
    step = max(1, SCORES_AT_ONCE // (heads * keys))
    found = []
    for row in range(min(batch, max(1, MOST_TOKENS // tokens))):
        k_hsk = k_bhsk[row].float().repeat_interleave(heads // k_bhsk.shape[1], dim=0)
        for begin in range(0, tokens, step):
            queries = range(begin, min(begin + step, tokens))
            scores_hts = q_bhtk[row, :, begin : queries.stop].float() @ k_hsk.mT
            unseen_ts = ~seen_of_row(mask, row, queries, tokens, keys, q_bhtk.device)
            found.append(scores_hts.abs_().masked_fill_(unseen_ts, 0.0).amax())
    return torch.stack(found).amax() / math.sqrt(width)


def _rms(values: Tensor) -> Tensor:
    rms: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32) / math.sqrt(values.numel())
    return rms


# ---------------------------------------------------------------- a finished run


@dataclass(frozen=True)
class Inspected:
    """`gradient_norms`: of all parameters of each block, for the mean loss; `largest_logit` of all layers."""

    gradient_norms: list[float]
    largest_logit: float
    activity: Activity


def inspect(run: Path) -> Inspected:
    """The newest checkpoint of a run on the first held-out windows of its first source, in fp32 on a CPU; documents
    see each other where they did in training."""
    subject = open_subject(run, accelerator="cpu")
    inputs, targets, documents = _batch(subject)
    transformer = subject.model.float().requires_grad_(True)
    with watching(transformer) as watched:
        summed = transformer(inputs, targets, documents_bt=documents)
    assert not isinstance(summed, Tensor), "with targets the model gives a loss"
    (summed.loss_sum / summed.token_count).backward()
    activity = watched.activity()
    norms = [_norm(list(block.parameters())) for block in transformer.layers]
    return Inspected(norms, max(activity.largest_logits), activity)


def _norm(parameters: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.grad.double().square().sum()) for one in parameters if one.grad is not None))


def _batch(subject: Subject) -> tuple[Tensor, Tensor, Tensor | None]:
    assert subject.recipe is not None, "a run has a recipe"
    eos_id = subject.codec.eos_id
    collection = open_collection(from_root(subject.recipe.data.path))
    for source in collection.sources.values():
        split = source.splits.get("validation")
        if split is not None and split.tokens:
            with closing(TokenStream(split)) as stream:
                batches = evaluation_batches(stream, subject.config.seq_len, BATCH, eos_id, 0, 1, None)
                inputs, targets = next(iter(batches))
            isolated = isolates_documents(subject.recipe.data.packing)
            documents = torch.as_tensor(number_documents(inputs, eos_id)) if isolated else None
            return torch.as_tensor(inputs), torch.as_tensor(targets), documents
    raise CheckpointError(f"{subject.recipe.data.path} has no held-out tokens to inspect a model on")
