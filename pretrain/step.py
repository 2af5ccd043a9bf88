"""One optimizer step: a global batch accumulated over micro-steps and ranks, and the weights updated once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from data_pipeline.loader import Batch
from model.loss import IGNORED
from pretrain.batching import BatchPlan
from pretrain.clock import Clock
from pretrain.engine import TrainingEngine
from pretrain.stopping import StopAgreedError, Stopping, StopWantedError


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured, over all ranks."""

    loss: float  # cross-entropy in nats per token: the mean over the step's tokens, before the update
    z_loss: float  # what loss.z_loss added to it
    tokens: int  # targets learnt from
    grad_norm: float  # of the whole gradient, before clipping
    loss_scale: float | None  # of that gradient while it was computed; None where it has none (bf16, fp32)
    overflowed: bool  # the gradient is not finite, so no weight was updated
    held: bool  # nor was one, since the step was not allowed to
    stop_wanted: bool  # by any rank


def train_step(
    engine: TrainingEngine,
    batches: Iterator[Batch],
    plan: BatchPlan,
    lr: float,
    *,
    stopping: Stopping | None = None,
    allows: Callable[[float, float], bool] = lambda loss, norm: True,
    clock: Clock | None = None,
) -> StepResult:
    """Accumulate one global batch and update the weights once, if its loss and gradient norm allow that.

    The gradient is that of (sum of all token losses) / (number of all target tokens), over micro-steps and ranks
    together, however the tokens are spread over them. DeepSpeed divides by the accumulation steps and averages over
    the ranks, so each micro-loss is scaled up by both before it goes in.

    Raises StopAgreedError, on all ranks, where one of them wants to stop before the update: the engine is then as
    behind the last whole step. `clock` is told what the time goes into.
    """
    stopping = stopping or Stopping(None, engine.sum_over_ranks)
    clock = clock or Clock(engine.device)
    micro_batches = []
    try:
        micro_batches = [next(batches) for _ in range(plan.gradient_accumulation_steps)]
        wish = stopping.wish(before_step=True)
    except StopWantedError:
        wish = True
    clock.lap("data")
    tokens, wishes = engine.sum_over_ranks(sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches), wish)
    stopping.heed(wishes)
    clock.lap("other")  # where ranks wait for the one whose data came last
    engine.set_global_batch_size(plan.global_batch_size)
    scale = plan.gradient_accumulation_steps * plan.world_size / tokens
    loss_sum, cross_entropy_sum = torch.zeros(2, dtype=torch.float64, device=engine.device).unbind()
    for number, batch in enumerate(micro_batches, 1):
        loss = engine.forward(batch.inputs, batch.targets, batch.documents)
        clock.lap("forward")
        engine.backward(loss.loss_sum * scale)
        clock.lap("backward")
        loss_sum += loss.loss_sum.detach()
        cross_entropy_sum += loss.cross_entropy_sum
        if number < len(micro_batches):
            engine.step()
            clock.lap("optimizer")
            try:
                stopping.between_micro_steps()
            except StopAgreedError:
                engine.drop_accumulation()
                raise
    total, cross_entropy, wishes = engine.sum_over_ranks(loss_sum, cross_entropy_sum, stopping.wish())
    clock.lap("other")
    mean = cross_entropy / tokens
    engine.set_learning_rate(lr)  # not before: a checkpoint tells the rate of the last whole step
    engine.step(lambda norm: allows(mean, norm))
    grad_norm = engine.gradient_norm()
    clock.lap("optimizer")
    return StepResult(
        loss=mean,
        z_loss=(total - cross_entropy) / tokens,
        tokens=int(tokens),
        grad_norm=grad_norm,
        loss_scale=engine.loss_scale,
        overflowed=engine.overflowed,
        held=engine.held,
        stop_wanted=wishes > 0,
    )
