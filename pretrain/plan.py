"""What a recipe will do and hold, computed before anything is started: `python -m pretrain plan RECIPE`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

from data_pipeline.order import SampleOrder
from data_pipeline.steps import Steps
from model.accounting import parameter_count
from model.activations import LEGEND as PASS_LEGEND
from pretrain.batching import BatchPlan, steps_of
from pretrain.config import Compute, RecipeError, RunConfig, from_root, parse_recipe, show
from pretrain.device_memory import GB, MB, DeviceMemory, show_size
from pretrain.fit_found import FRAGMENTATION, Need
from pretrain.memory import BYTES, LEGEND, MOMENTS, Budget, budget
from pretrain.resolve import read_json, resolve, rounding_warnings, zero_stage

UNITS = {"mb": MB, "gb": GB, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}

AUTO_IS: Compute = "bf16"  # no device is asked; fp16 takes no more bytes

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Row:
    """The budget of one stage and accumulation dtype, or why the engine cannot run it."""

    stage: int
    accumulate: str
    budget: Budget | None
    refused: str | None
    configured: bool

    def to_dict(self, parameters: int) -> dict[str, Any]:
        head = {"stage": self.stage, "accumulate": self.accumulate, "configured": self.configured}
        if self.budget is None:
            return {**head, "refused": self.refused}
        return {
            **head,
            "refused": None,
            "state_bytes": self.budget.state_bytes,
            "bytes_per_parameter": self.budget.state_bytes / parameters,
            "static_bytes": self.budget.static_bytes,
            "peak_bytes": self.budget.peak_bytes(),
            "peak_moment": self.budget.peak_moment,
            "host_bytes": self.budget.peak_bytes("host"),
        }


@dataclass(frozen=True)
class Verdict:
    """Whether a rank fits its device: the predicted peak, what a process holds beside its tensors, and an allowance."""

    need: Need
    memory: DeviceMemory
    static_bytes: int

    @property
    def fits(self) -> bool:
        return self.need.fits(self.memory)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; bytes per rank."""
        need, memory = self.need, self.memory
        return {
            "fits": self.fits,
            "needed_bytes": need.total_bytes,
            "device_memory_bytes": memory.total_bytes,
            "device_memory_is": memory.source,
            "static_bytes": self.static_bytes,
            "peak_bytes": need.peak_bytes,
            "peak_moment": need.moment,
            "context_bytes": need.process_bytes,
            "fragmentation_bytes": need.fragmentation_bytes,
            "host_needed_bytes": need.host_bytes,
            "host_memory_bytes": memory.host_bytes,
        }

    def lines(self) -> list[str]:
        need, memory = self.need, self.memory
        beside = "context" if memory.kind == "cuda" else "process"
        lines = [
            f"verdict: {'fits' if self.fits else 'does not fit'}",
            f"  peak {show_size(need.peak_bytes)} ({need.moment}) + {beside} {show_size(need.process_bytes)} "
            f"+ fragmentation {show_size(need.fragmentation_bytes)} ({FRAGMENTATION:.0%} of the peak) "
            f"= {show_size(need.total_bytes)}, a rank has {show_size(memory.total_bytes)} ({memory.source})",
        ]
        if memory.kind == "cuda" and need.host_bytes:
            has = "" if memory.host_bytes is None else f", its share is {show_size(memory.host_bytes)}"
            lines.append(f"  main memory {show_size(need.host_bytes)} a rank{has}")
        return lines


@dataclass(frozen=True)
class Plan:
    """A recipe on a number of ranks: sums, memory per rank, and a verdict where a device's memory was given."""

    config: RunConfig
    batch: BatchPlan
    deepspeed: dict[str, Any]
    parameters: int
    kind: Kind
    budget: Budget
    rows: tuple[Row, ...]
    verdict: Verdict | None

    @property
    def stage(self) -> int:
        return zero_stage(self.deepspeed)

    @property
    def total_tokens(self) -> int:
        return steps_of(self.config.batch).samples_before(self.config.schedule.max_steps) * self.batch.seq_len

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint on disk, all ranks' files together: masters, moments and what else the optimizer keeps, and
        the weights twice (weights.safetensors, DeepSpeed's own file)."""
        not_saved = ("weights", "gradients", "accumulation buffer")
        kept = sum(part.bytes for part in self.budget.parts if part.state and part.name not in not_saved)
        weights = BYTES[self.config.precision.compute_where(AUTO_IS)] * self.parameters
        return kept * (self.batch.world_size if self.stage else 1) + 2 * weights

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-able; memory in bytes per rank."""
        held = self.budget
        return {
            "parameters": self.parameters,
            "world_size": self.batch.world_size,
            "global_batch_size": self.batch.global_batch_size,
            "micro_batch_size": self.batch.micro_batch_size,
            "gradient_accumulation_steps": self.batch.gradient_accumulation_steps,
            "seq_len": self.batch.seq_len,
            "tokens_per_step": self.batch.tokens_per_step,
            "batch_ramp": [part.model_dump() for part in self.config.batch.ramp],
            "tokens_per_micro_step": self.batch.tokens_per_micro_step,
            "warmup_steps": self.config.schedule.warmup_steps,
            "max_steps": self.config.schedule.max_steps,
            "total_tokens": self.total_tokens,
            "zero_stage": self.stage,
            "precision": self.config.precision.model_dump(),
            "deepspeed": self.deepspeed,
            "memory": {
                "device": self.kind,
                "parts": [asdict(part) for part in held.parts],
                "symbols": symbols(held),
                "moments": {
                    moment: {"device_bytes": held.at(moment), "host_bytes": held.at(moment, "host")}
                    for moment in MOMENTS
                },
                "static_bytes": held.static_bytes,
                "peak_bytes": held.peak_bytes(),
                "peak_moment": held.peak_moment,
                "host_peak_bytes": held.peak_bytes("host"),
            },
            "stages": [row.to_dict(self.parameters) for row in self.rows],
            "data": {name: str(from_root(getattr(self.config.data, name))) for name in ("path", "tokenizer")},
            "checkpoint": {"bytes": self.checkpoint_bytes, **self.config.checkpoint.model_dump()},
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
        }

    def to_text(self, formulas: bool = False) -> str:
        """The same for people. GB is 10^9 bytes."""
        memory = self._memory(formulas)
        return "\n".join([*self._sums(), "", *memory, "", *self._stages(), "", *self._judgement()])

    def _sums(self) -> list[str]:
        batch, schedule = self.batch, self.config.schedule
        padded = ", padding included" if self.config.data.packing == "best_fit" else ""
        return [
            f"parameters        {self.parameters:,}",
            f"ranks             {batch.world_size}",
            f"tokens per step   {batch.tokens_per_step:,} = {batch.global_batch_size} sequences × {batch.seq_len:,}"
            + padded,
            f"accumulation      {counted(batch.gradient_accumulation_steps, 'micro-step')} = "
            f"{batch.global_batch_size} / "
            f"({batch.micro_batch_size} sequences × {counted(batch.world_size, 'rank')})",
            *([f"batch ramp        {steps_of(self.config.batch).told()}"] if self.config.batch.ramp else []),
            f"steps             {schedule.max_steps:,}, the first {schedule.warmup_steps:,} of them warm-up",
            f"total tokens      {self.total_tokens:,}, {self.total_tokens / self.parameters:.1f} per parameter{padded}",
            *rounding_warnings(self.config),
        ]

    def _memory(self, formulas: bool) -> list[str]:
        """The budget, part by part, and the moment in which a rank holds most."""
        held, precision = self.budget, self.config.precision
        unit, unit_name = (GB, "GB") if held.peak_bytes() >= GB else (MB, "MB")
        device = "a GPU" if self.kind == "cuda" else "a CPU"
        lines = [
            f"memory of one rank on {device} in {unit_name}, ZeRO-{self.stage}, {self._computed} compute, "
            f"{precision.master} masters",
            f"  {unit_name:>8}        {'lives in':<32}  part{': formula' if formulas else ''}",
        ]
        for part in held.parts:
            place = "" if part.place == "device" else "host"
            named = f"{part.name}: {part.formula}" if formulas else part.name
            lines.append(f"  {part.bytes / unit:8.3f}  {place:<4}  {part.lives:<32}  {named}")
        peak = held.peak_moment
        sums = ", ".join(f"{moment}{'*' if moment == peak else ''} {held.at(moment) / unit:.3f}" for moment in MOMENTS)
        lines.append(f"  together: {sums}")
        state, static = show_size(held.state_bytes), show_size(held.static_bytes)
        lines.append(f"  * the peak, {show_size(held.peak_bytes())} in {peak}; training state {state}, static {static}")
        if not formulas:
            return lines
        meant = "; ".join(f"{symbol} {meaning}" for symbol, meaning in symbols(held).items())
        lines += textwrap.wrap(f"in the formulas: {meant}", 118, initial_indent="  ", subsequent_indent="  ")
        return lines

    @property
    def _computed(self) -> str:
        auto = f"{AUTO_IS} (auto: fp16 on a GPU without bf16)"
        return auto if self.config.precision.compute == "auto" else self.config.precision.compute

    def _stages(self) -> list[str]:
        largest = max(row.budget.peak_bytes() for row in self.rows if row.budget is not None)
        unit, unit_name = (GB, "GB") if largest >= GB else (MB, "MB")
        lines = [
            f"every stage, {unit_name} a rank: the training state, with what else lives between steps, and at the peak",
            "  ZeRO  sums in    state  bytes/parameter   static     peak  in",
        ]
        refused: list[str] = []
        for row in self.rows:
            start = f"{'*' if row.configured else ' '} {row.stage:<5} {row.accumulate:<7}"
            if row.budget is None:
                lines.append(f"{start}  refused")
                refused.append(f"{row.stage} with sums in {row.accumulate} is refused: {row.refused}")
                continue
            state, static, peak = row.budget.state_bytes, row.budget.static_bytes, row.budget.peak_bytes()
            lines.append(
                f"{start}  {state / unit:7.2f}  {state / self.parameters:15.2f}  {static / unit:7.2f}  "
                f"{peak / unit:7.2f}  {row.budget.peak_moment}"
            )
        lines.append("  * this recipe; 'sums in': the dtype gradients are accumulated in (precision.accumulate)")
        for reason in refused:
            lines += textwrap.wrap(reason, 118, initial_indent="  ", subsequent_indent="  ")
        return lines

    def _judgement(self) -> list[str]:
        if self.verdict is None:
            return ["no verdict: say what a device has with --device-memory, for example 24GB or 22GiB, or auto"]
        return self.verdict.lines()


@dataclass(frozen=True)
class Reading:
    """What a run reads until its last step: the mixture in whole numbers, and how often each source is gone through."""

    samples: int
    stages: list[dict[str, Any]]  # first_sample, period, slots
    epochs: dict[str, float]
    warn_epochs: float

    @classmethod
    def of(cls, config: RunConfig, order: SampleOrder, steps: Steps | None = None) -> Reading:
        """`steps`: the run's, where they are not those of the recipe alone."""
        samples = (steps or steps_of(config.batch)).samples_before(config.schedule.max_steps)
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


def plan(config: RunConfig, world_size: int, memory: DeviceMemory | None = None, kind: Kind = "cuda") -> Plan:
    """Check a recipe on `world_size` ranks and compute what it will do. RecipeError where it cannot run as written.

    `memory` is what one rank may use; without it there is no verdict, and `kind` says what the ranks run on.
    """
    if not 1 <= world_size < 2**31:
        raise RecipeError(f"world size {show(world_size)}: must be at least 1 and below 2^31")
    compute = config.precision.compute_where(AUTO_IS)
    kind = kind if memory is None else memory.kind
    deepspeed = resolve(read_json(from_root(config.deepspeed.config)), config, world_size, AUTO_IS)
    stage = zero_stage(deepspeed)
    held = budget(config, deepspeed, world_size, compute=compute, device=kind)
    half = "fp16" if compute == "fp16" else "bf16"

    def row(at_stage: int, accumulate: str) -> Row:
        if (at_stage, accumulate) == (stage, config.precision.accumulate):
            return Row(at_stage, accumulate, held, None, configured=True)
        path = config.deepspeed.config if at_stage == stage else f"ds_configs/zero{at_stage}.json"
        try:
            other = _with_accumulation(config, accumulate)
            told = resolve(read_json(from_root(path)), other, world_size, AUTO_IS)
            elsewhere = budget(other, told, world_size, compute=compute, device=kind)
        except RecipeError as refused:
            return Row(at_stage, accumulate, None, str(refused), configured=False)
        return Row(at_stage, accumulate, elsewhere, None, configured=False)

    return Plan(
        config=config,
        batch=BatchPlan.from_config(config, world_size),
        deepspeed=deepspeed,
        parameters=parameter_count(config.model),
        kind=kind,
        budget=held,
        rows=tuple(row(at_stage, accumulate) for at_stage in range(4) for accumulate in (half, "fp32")),
        verdict=None if memory is None else Verdict(Need.of(held, kind), memory, held.static_bytes),
    )


def counted(number: int, what: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def symbols(held: Budget) -> dict[str, str]:
    """The letters in the formulas of a budget, and what they mean."""
    used = {"P", "N", *(word for part in held.parts for word in re.findall(r"[A-Za-z]+", part.formula))}
    return {symbol: meaning for symbol, meaning in {**PASS_LEGEND, **LEGEND}.items() if symbol in used}


def _with_accumulation(config: RunConfig, accumulate: str) -> RunConfig:
    tables = {name: getattr(config, name) for name in RunConfig.model_fields}
    return parse_recipe({**tables, "precision": {**config.precision.model_dump(), "accumulate": accumulate}})


def parse_memory(text: str, what: str = "device memory") -> int:
    """Bytes of a size like 24GB (10^9) or 22GiB (2^30). RecipeError for anything else: a bare number has no unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    size_bytes = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size_bytes < 2**63:
        raise RecipeError(f"{what} {show(text)}: write a positive number with a unit, for example 24GB or 22GiB")
    return round(size_bytes)
