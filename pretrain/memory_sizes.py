"""The sizes of one rank that every formula of the engines' memory is made of: groups, partitions, dtypes. No torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from model.accounting import EMBEDDINGS, is_matrix, parameter_shapes
from model.config import ModelConfig
from pretrain.batching import BatchPlan
from pretrain.config import Compute, RunConfig
from pretrain.memory_parts import Device, Place
from pretrain.resolve import is_torchs, zero_stage

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

DEFAULT_BUCKET, DEFAULT_SUB_GROUP = 500_000_000, 10**9  # DeepSpeed's own, where the JSON is silent
ALIGNMENT = 2  # elements a rank, of a flat group (nccl_start_alignment_factor)


@dataclass(frozen=True)
class RankSizes:
    """Sizes and settings of one rank, bytes of the dtypes: weight, master, moment, accumulated and communicated."""

    stage: int
    compute: Compute
    ranks: int
    groups: tuple[tuple[int, ...], ...]  # elements of the parameters of each of the optimizer's groups
    hidden: bool  # the first group has another optimizer's states
    zero: Mapping[str, Any]
    optimizer: str
    fused: bool
    compensated: bool
    largest_matrix: tuple[int, ...]  # of those that Muon orthogonalizes
    block: int  # elements of a block's matrices
    embedding: int
    tied: bool
    runs_again: bool
    weight: int
    master: int
    moment: int
    summed: int
    sent: int
    later: bool  # an update, in any part of the batch ramp, has several micro-steps
    asynchronous: bool  # checkpoints are written from a copy
    device: Device

    @classmethod
    def of(
        cls, config: RunConfig, deepspeed: Mapping[str, Any], ranks: int, compute: Compute, device: Device
    ) -> RankSizes:
        precision = config.precision
        table, plan = config.optimizer, BatchPlan.from_config(config, ranks)
        sizes = [config.batch.global_batch_size, *(part.global_batch_size for part in config.batch.ramp)]
        groups, has_hidden = group_sizes(config.model, table.name, table.decay_embeddings)
        names = parameter_shapes(replace(config.model, n_layers=1))
        matrices = [shape for name, shape in names.items() if name.startswith("layers.") and is_matrix(name, shape)]
        return cls(
            stage=zero_stage(deepspeed),
            compute=compute,
            ranks=ranks,
            groups=groups,
            hidden=has_hidden,
            zero=deepspeed["zero_optimization"],
            optimizer=config.optimizer.name,
            fused=is_torchs(config),
            compensated=precision.compensation == "kahan",
            largest_matrix=max(matrices, key=math.prod),
            block=sum(map(math.prod, matrices)),
            embedding=config.model.vocab_size * config.model.d_model,
            tied=config.model.tied,
            runs_again=config.memory.activation_checkpointing != "none",
            weight=BYTES[compute],
            master=BYTES[precision.master],
            moment=BYTES[precision.moments_dtype],
            summed=BYTES[precision.accumulate],
            sent=BYTES[deepspeed.get("communication_data_type", compute)],
            later=max(sizes) > plan.sequences_per_micro_step,
            asynchronous=config.checkpoint.asynchronous,
            device=device,
        )

    @cached_property
    def parameters(self) -> int:
        return sum(map(sum, self.groups))

    @property
    def bucket(self) -> int:
        return int(self.zero.get("reduce_bucket_size", DEFAULT_BUCKET))

    @cached_property
    def partitions(self) -> tuple[int, ...]:
        """Elements of a rank's part of each group: flat, aligned and cut (ZeRO-1, 2), or of each tensor (ZeRO-3)."""
        if self.stage == 0:
            return tuple(map(sum, self.groups))
        if self.stage == 3:
            return tuple(sum(-(-size // self.ranks) for size in group) for group in self.groups)
        unit = ALIGNMENT * self.ranks
        return tuple(-(-sum(group) // unit) * ALIGNMENT for group in self.groups)

    @property
    def partition(self) -> int:
        return sum(self.partitions)

    @property
    def updated(self) -> int:
        """Elements updated at once: a group's part of a partition, or what sub_group_size cuts off it."""
        largest = max(self.partitions)
        if self.stage != 3:
            return largest
        return min(largest, int(self.zero.get("sub_group_size", DEFAULT_SUB_GROUP)) + self.largest_piece)

    @cached_property
    def largest(self) -> int:
        return max(map(max, self.groups))

    @cached_property
    def largest_piece(self) -> int:
        """Of one tensor in one rank's partition."""
        if self.stage == 3:
            return -(-self.largest // self.ranks)
        return max(piece for _, _, piece in self._pieces())

    @property
    def owned(self) -> int:
        """The elements of all tensors that a rank's partition has any of, whole; the largest rank's."""
        return max(self._owned)

    @property
    def owned_least(self) -> int:
        return min(self._owned)

    @cached_property
    def _owned(self) -> list[int]:
        totals = [0] * self.ranks
        for rank, size, _ in self._pieces():
            totals[rank] += size
        return totals

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Of each tensor in a flat group: a rank that has elements of it, the tensor's elements, and the rank's."""
        for group, part in zip(self.groups, self.partitions, strict=True):
            for size, end in zip(group, accumulate(group), strict=True):
                for rank in range((end - size) // part, (end - 1) // part + 1):
                    yield rank, size, min(end, (rank + 1) * part) - max(end - size, rank * part)

    @property
    def contiguous(self) -> bool:
        """Whether a bucket is one buffer, made beforehand."""
        is_flat_and_offloaded = self.stage < 3 and self.place("offload_optimizer") == "host"
        return bool(self.zero.get("contiguous_gradients", True)) or is_flat_and_offloaded

    @property
    def alone(self) -> bool:
        """Whether no gradient is reduced, since there is no other rank (one_rank.py)."""
        return self.ranks == 1 and self.stage < 3 and self.place("offload_optimizer") == "device"

    def place(self, key: Literal["offload_optimizer", "offload_param"]) -> Place:
        """Where states or weights are: in main memory if they are offloaded."""
        section = self.zero.get(key)
        offloaded = isinstance(section, Mapping) and section.get("device", "none") != "none"
        return "host" if offloaded else "device"


@functools.lru_cache(maxsize=16)
def group_sizes(model: ModelConfig, optimizer: str, decay_embeddings: bool) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Elements of the parameters by group, as `optimizer.parameter_groups` has them, and whether hidden matrices are
    a group of their own, the first one.
    """
    apart = optimizer != "adamw"
    hidden: list[int] = []
    decayed: list[int] = []
    rest: list[int] = []
    for name, shape in parameter_shapes(model).items():
        matrix = is_matrix(name, shape)
        if apart and matrix and name.startswith("layers."):
            group = hidden
        else:
            group = decayed if matrix and (decay_embeddings or name not in EMBEDDINGS) else rest
        group.append(math.prod(shape))
    return tuple(tuple(group) for group in (hidden, decayed, rest) if group), apart
