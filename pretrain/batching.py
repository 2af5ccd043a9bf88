"""global batch = micro-batch × accumulation × ranks, checked once, before anything is started.

A ramp (`batch.ramp`) gives the run's first samples smaller global batches, for gradients that are large against their
noise while the model knows little (McCandlish et al. 2018). The micro-batch stays and the accumulation grows, so memory
is the same in every part. Which samples a step reads is `data_pipeline.steps`' affair: pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_pipeline.steps import Steps
from pretrain.config import BatchTable, RecipeError, RunConfig


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut into micro-steps. Batch sizes count sequences of `seq_len` tokens.

    RecipeError when the global batch is no multiple of micro-batch × ranks: rounding it would train another recipe.
    """

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    seq_len: int

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size", "world_size", "seq_len"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} = {getattr(self, name)}: must be at least 1")
        _refuse_uneven("batch.global_batch_size", self.global_batch_size, self.micro_batch_size, self.world_size)

    @classmethod
    def from_config(cls, config: RunConfig, world_size: int) -> BatchPlan:
        """The plan of the steps behind the ramp.

        RecipeError where the global batch of any part of the ramp does not divide, naming the part.
        """
        batch = config.batch
        for number, part in enumerate(batch.ramp):
            name = f"batch.ramp[{number}].global_batch_size"
            _refuse_uneven(name, part.global_batch_size, batch.micro_batch_size, world_size)
        return cls(batch.global_batch_size, batch.micro_batch_size, world_size, config.model.seq_len)

    def of_step(self, step: int, steps: Steps) -> BatchPlan:
        """The plan of a step (from 0) of a run with these steps, be it in the ramp or behind it."""
        return replace(self, global_batch_size=steps.size(step))

    @property
    def sequences_per_micro_step(self) -> int:
        """Sequences all ranks together read in one micro-step."""
        return self.micro_batch_size * self.world_size

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.global_batch_size // self.sequences_per_micro_step

    @property
    def tokens_per_step(self) -> int:
        """Slots all ranks together read in one optimizer step: tokens to learn from, and padding where there is any."""
        return self.global_batch_size * self.seq_len

    @property
    def tokens_per_micro_step(self) -> int:
        """Tokens one rank reads in one micro-step (its activations grow with this)."""
        return self.micro_batch_size * self.seq_len


def steps_of(batch: BatchTable) -> Steps:
    """Which samples each step of a run reads, its ramp included."""
    return Steps(batch.global_batch_size, tuple((part.until_samples, part.global_batch_size) for part in batch.ramp))


def _refuse_uneven(name: str, global_batch_size: int, micro_batch_size: int, world_size: int) -> None:
    unit = micro_batch_size * world_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        raise RecipeError(
            f"{name} = {global_batch_size} is not a multiple of micro_batch_size × ranks = "
            f"{micro_batch_size} × {world_size} = {unit}: use {near}, or change micro_batch_size or the ranks"
        )
