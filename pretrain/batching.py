"""global batch = micro-batch × accumulation × ranks, checked once, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import RecipeError, RunConfig


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
        unit = self.sequences_per_micro_step
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            near = f"{below} or {below + unit}" if below else f"{unit}"
            raise RecipeError(
                f"batch.global_batch_size = {self.global_batch_size} is not a multiple of micro_batch_size × ranks = "
                f"{self.micro_batch_size} × {self.world_size} = {unit}: "
                f"use {near}, or change micro_batch_size or the ranks"
            )

    @classmethod
    def from_config(cls, config: RunConfig, world_size: int) -> BatchPlan:
        return cls(config.batch.global_batch_size, config.batch.micro_batch_size, world_size, config.model.seq_len)

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
