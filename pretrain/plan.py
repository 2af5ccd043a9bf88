"""What a recipe will do and hold, computed before anything is started: `python -m pretrain plan RECIPE`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from data_pipeline.order import SampleOrder
from model.accounting import parameter_count
from pretrain.batching import BatchPlan
from pretrain.config import Compute, RecipeError, RunConfig, from_root, show
from pretrain.engine import read_json, refusal, resolve, zero_stage
from pretrain.memory import Budget, static_budget

MB = 10**6
GB = 10**9
UNITS = {"mb": MB, "gb": GB, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}

# What a verdict sets aside beside the static memory: a CUDA context with its kernels and NCCL's channels (0.5 to 1 GB
# on current GPUs), and what a caching allocator cannot use of memory cut into pieces.
CONTEXT_BYTES = GB
FRAGMENTATION = 0.05
AUTO_IS: Compute = "bf16"  # no device is asked; fp16 takes no more bytes
LABEL = "static only: activations not counted yet"
NOT_COUNTED = (
    "activations, logits and the loss's fp32 gradient of the head, communication buckets, gathered layers of ZeRO-3, "
    "the gradient copy inside step()"
)


@dataclass(frozen=True)
class Row:
    """The budget of one stage and accumulation dtype, or why the engine cannot run it."""

    stage: int
    accumulate: str
    budget: Budget | None
    refused: str | None
    configured: bool


@dataclass(frozen=True)
class Verdict:
    """Whether the configured stage fits a device, by static memory and a stated allowance alone."""

    device_memory_bytes: int
    static_bytes: int
    context_bytes: int
    fragmentation_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.static_bytes + self.context_bytes + self.fragmentation_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.device_memory_bytes


@dataclass(frozen=True)
class Plan:
    """A recipe on a number of ranks: sums, static memory per rank, and a verdict where a device memory was given."""

    config: RunConfig
    batch: BatchPlan
    deepspeed: dict[str, Any]
    parameters: int
    rows: tuple[Row, ...]
    verdict: Verdict | None

    @property
    def stage(self) -> int:
        return zero_stage(self.deepspeed)

    @property
    def total_tokens(self) -> int:
        return self.batch.tokens_per_step * self.config.schedule.max_steps

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-able; memory in bytes per rank."""
        return {
            "parameters": self.parameters,
            "world_size": self.batch.world_size,
            "global_batch_size": self.batch.global_batch_size,
            "micro_batch_size": self.batch.micro_batch_size,
            "gradient_accumulation_steps": self.batch.gradient_accumulation_steps,
            "seq_len": self.batch.seq_len,
            "tokens_per_step": self.batch.tokens_per_step,
            "tokens_per_micro_step": self.batch.tokens_per_micro_step,
            "warmup_steps": self.config.schedule.warmup_steps,
            "max_steps": self.config.schedule.max_steps,
            "total_tokens": self.total_tokens,
            "zero_stage": self.stage,
            "precision": self.config.precision.model_dump(),
            "deepspeed": self.deepspeed,
            "static_memory": {"label": LABEL, "not_counted": NOT_COUNTED, "budgets": [_row(row) for row in self.rows]},
            "verdict": None if self.verdict is None else _verdict(self.verdict),
        }

    def to_text(self) -> str:
        """The same for people. GB is 10^9 bytes."""
        return "\n".join([*self._sums(), "", *self._memory(), "", *self._judgement()])

    def _sums(self) -> list[str]:
        batch, schedule = self.batch, self.config.schedule
        padded = ", padding included" if self.config.data.packing == "best_fit" else ""
        return [
            f"parameters        {self.parameters:,}",
            f"ranks             {batch.world_size}",
            f"tokens per step   {batch.tokens_per_step:,} = {batch.global_batch_size} sequences × {batch.seq_len:,}"
            + padded,
            f"accumulation      {batch.gradient_accumulation_steps} micro-steps = {batch.global_batch_size} / "
            f"({batch.micro_batch_size} sequences × {batch.world_size} ranks)",
            f"steps             {schedule.max_steps:,}, the first {schedule.warmup_steps:,} of them warm-up",
            f"total tokens      {self.total_tokens:,}, {self.total_tokens / self.parameters:.1f} per parameter{padded}",
        ]

    def _memory(self) -> list[str]:
        precision = self.config.precision
        largest = max(row.budget.total_bytes for row in self.rows if row.budget is not None)
        unit, unit_name = (GB, "GB") if largest >= GB else (MB, "MB")
        auto = f"{AUTO_IS} (auto: fp16 on a GPU without bf16)"
        computed = auto if precision.compute == "auto" else precision.compute
        lines = [
            f"static memory per rank in {unit_name}, {computed} compute, {precision.master} masters ({LABEL})",
            "  ZeRO  sums in  weights  gradients  buffer  masters  moments   total  bytes/parameter",
        ]
        for row in self.rows:
            mark = "*" if row.configured else " "
            start = f"{mark} {row.stage:<5} {row.accumulate:<7}"
            if row.budget is None:
                lines.append(f"{start}  refused: {row.refused}")
                continue
            weights, gradients, buffer, masters, moments = (part.bytes / unit for part in row.budget.parts)
            lines.append(
                f"{start}  {weights:7.2f}  {gradients:9.2f}  {buffer:6.2f}  {masters:7.2f}  {moments:7.2f}  "
                f"{row.budget.total_bytes / unit:6.2f}  {row.budget.bytes_per_parameter:15.2f}"
            )
            if row.configured:
                formulas = ", ".join(f"{part.name} {part.formula}" for part in row.budget.parts if part.bytes)
                lines.append(f"        {formulas} (P parameters)")
        lines += ["  * this recipe; 'sums in': the dtype gradients are accumulated in (precision.accumulate)"]
        return lines

    def _judgement(self) -> list[str]:
        verdict = self.verdict
        if verdict is None:
            return ["no verdict: say what a device has with --device-memory, for example 24GB or 22GiB"]
        return [
            f"verdict ({LABEL}): {'fits' if verdict.fits else 'does not fit'}",
            f"  static {verdict.static_bytes / GB:.2f} + context {verdict.context_bytes / GB:.2f} "
            f"+ fragmentation {verdict.fragmentation_bytes / GB:.2f} ({FRAGMENTATION:.0%} of static) "
            f"= {verdict.needed_bytes / GB:.2f} GB, the device has {verdict.device_memory_bytes / GB:.2f} GB",
            f"  not counted: {NOT_COUNTED}",
        ]


@dataclass(frozen=True)
class Reading:
    """What a run reads until its last step: the mixture in whole numbers, and how often each source is gone through."""

    samples: int
    stages: list[dict[str, Any]]  # first_sample, period, slots
    epochs: dict[str, float]
    warn_epochs: float

    @classmethod
    def of(cls, config: RunConfig, order: SampleOrder) -> Reading:
        samples = config.schedule.max_steps * config.batch.global_batch_size
        return cls(samples, order.describe()["stages"], order.epochs(samples), config.data.warn_epochs)

    @property
    def too_often(self) -> list[str]:
        """The sources read more often than `data.warn_epochs` says."""
        return [source for source, count in self.epochs.items() if count > self.warn_epochs]

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {**asdict(self), "too_often": self.too_often}

    def lines(self) -> list[str]:
        """The same for people, a warning for each source that is read too often."""
        lines = []
        for stage in self.stages:
            slots = ", ".join(f"{source} {count}" for source, count in stage["slots"].items())
            lines.append(f"mixture from sample {stage['first_sample']:,}: of every {stage['period']:,} samples {slots}")
        epochs = ", ".join(f"{source} {count:.2f}" for source, count in self.epochs.items())
        lines.append(f"epochs in {self.samples:,} samples: {epochs}")
        for name in self.too_often:
            lines.append(
                f"warning: {name} is read {self.epochs[name]:,.2f} times, data.warn_epochs is {self.warn_epochs:g}: "
                "give it less weight or more text, train for fewer steps, or raise that limit"
            )
        return lines


def plan(config: RunConfig, world_size: int, device_memory_bytes: int | None = None) -> Plan:
    """Check a recipe on `world_size` ranks and compute what it will do. RecipeError where it cannot run as written."""
    if world_size < 1:
        raise RecipeError(f"world size {world_size}: must be at least 1")
    precision = config.precision
    compute = precision.compute_where(AUTO_IS)
    deepspeed = resolve(read_json(from_root(config.deepspeed.config)), config, world_size, AUTO_IS)
    stage = zero_stage(deepspeed)
    parameters = parameter_count(config.model)

    half = "fp16" if compute == "fp16" else "bf16"

    def row(at_stage: int, accumulate: str) -> Row:
        refused = refusal(at_stage, compute, precision.master, accumulate)
        budget = None
        if refused is None:
            budget = static_budget(parameters, at_stage, world_size, precision.master, accumulate, compute)
        configured = (at_stage, accumulate) == (stage, precision.accumulate)
        return Row(at_stage, accumulate, budget, refused, configured)

    verdict = None
    if device_memory_bytes is not None:
        static = static_budget(
            parameters, stage, world_size, precision.master, precision.accumulate, compute
        ).total_bytes
        verdict = Verdict(device_memory_bytes, static, CONTEXT_BYTES, round(FRAGMENTATION * static))
    return Plan(
        config=config,
        batch=BatchPlan.from_config(config, world_size),
        deepspeed=deepspeed,
        parameters=parameters,
        rows=tuple(row(at_stage, accumulate) for at_stage in range(4) for accumulate in (half, "fp32")),
        verdict=verdict,
    )


def parse_memory(text: str, what: str = "device memory") -> int:
    """Bytes of a size like 24GB (10^9) or 22GiB (2^30). RecipeError for anything else: a bare number has no unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    size_bytes = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size_bytes < 2**63:
        raise RecipeError(f"{what} {show(text)}: write a positive number with a unit, for example 24GB or 22GiB")
    return round(size_bytes)


def _row(row: Row) -> dict[str, Any]:
    head = {"stage": row.stage, "accumulate": row.accumulate, "configured": row.configured, "refused": row.refused}
    if row.budget is None:
        return head
    parts = [asdict(part) for part in row.budget.parts]
    total = {"total_bytes": row.budget.total_bytes, "bytes_per_parameter": row.budget.bytes_per_parameter}
    return {**head, "parts": parts, **total}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"label": LABEL, "fits": verdict.fits, "needed_bytes": verdict.needed_bytes, **asdict(verdict)}
