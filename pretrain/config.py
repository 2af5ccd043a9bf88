"""The recipe: one typed, frozen tree that owns every number of a run except how DeepSpeed partitions it.

A recipe is a TOML file. Values come from, later ones winning: the defaults below, the model preset, the file,
`--set a.b=VALUE`. An unknown key is an error that names its nearest neighbour, and validation never changes a value:
what the file says is what runs, or the run does not start. Relative paths in a recipe count from the project root,
wherever the command is called from.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from data_pipeline.order import PackingMode
from data_pipeline.steps import Steps
from model.config import ModelConfig, checkpointing_period, from_table

PROJECT_ROOT = Path(__file__).resolve().parents[1]


def _place(path: str) -> str:
    if not path.strip() or "\0" in path:
        raise ValueError("should name a file or folder")
    return path


def _checkpointing(mode: str) -> str:
    checkpointing_period(mode)
    return mode


# What becomes the size of a tensor or of a list; what only counts, up to sums that fit 64 bits; what a fp32 tensor can
# be multiplied by.
Size = Annotated[int, Field(gt=0, lt=2**31)]
Positive = Annotated[int, Field(gt=0, le=2**62)]
NotNegative = Annotated[int, Field(ge=0, le=2**62)]
Rate = Annotated[float, Field(ge=0.0, le=1e30)]
PositiveRate = Annotated[float, Field(gt=0.0, le=1e30)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Place = Annotated[str, AfterValidator(_place)]
Compute = Literal["bf16", "fp16", "fp32"]  # what forward and backward run in


class RecipeError(ValueError):
    """A recipe, an override or a DeepSpeed JSON that cannot run as written; the message is one line with the remedy."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataStage(_Table):
    """From `from_tokens` training tokens on, sources are drawn in proportion to `weights` (non-negative numbers).

    Tokens are counted as samples x seq_len, so padding, where there is any, is among them: a stage begins at a sample.
    """

    from_tokens: NotNegative
    weights: dict[str, Rate]

    @field_validator("weights")
    @classmethod
    def _some_weight(cls, weights: dict[str, float]) -> dict[str, float]:
        if not sum(weights.values()) > 0.0:
            raise ValueError("give at least one source a weight above 0")
        return weights


class DataTable(_Table):
    """A prepared collection and the tokenizer that wrote it. No stages: each source in proportion to its windows."""

    path: Place
    tokenizer: Place
    packing: PackingMode = "concat"  # what a row is made of, see data_pipeline/packing.py
    warn_epochs: PositiveRate = 4.0  # up to four, Muennighoff et al. (2023) found old text nearly as good as new
    stages: Annotated[tuple[DataStage, ...], Strict(False)] = ()

    @field_validator("stages")
    @classmethod
    def _increasing(cls, stages: tuple[DataStage, ...]) -> tuple[DataStage, ...]:
        starts = [stage.from_tokens for stage in stages]
        if starts and (starts[0] != 0 or any(b <= a for a, b in pairwise(starts))):
            raise ValueError(f"from_tokens must start at 0 and increase from stage to stage, not {starts}")
        return stages


class BatchRamp(_Table):
    """Up to the run's sample `until_samples`, steps of another `global_batch_size`."""

    until_samples: Positive
    global_batch_size: Size


class BatchTable(_Table):
    """Sequences per optimizer step over all ranks, and per rank and micro-step; before them, those of a ramp."""

    global_batch_size: Size
    micro_batch_size: Size
    ramp: Annotated[tuple[BatchRamp, ...], Strict(False)] = ()

    @field_validator("ramp")
    @classmethod
    def _whole_steps(cls, ramp: tuple[BatchRamp, ...]) -> tuple[BatchRamp, ...]:
        Steps(1, tuple((part.until_samples, part.global_batch_size) for part in ramp))  # its error says what is wrong
        return ramp


class ScheduleTable(_Table):
    """The learning rate over the steps, see pretrain/schedule.py. Only "wsd" has a time and a shape of its decay."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    peak_lr: PositiveRate
    min_lr: Rate = 0.0
    warmup_steps: NotNegative
    max_steps: Positive
    decay_steps: Positive | None = None
    decay_shape: Literal["linear", "sqrt"] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> ScheduleTable:
        if self.peak_lr < 1e-30:  # a step's part of it could be rounded to 0
            raise ValueError(f"peak_lr {self.peak_lr} is too small for any update: raise it to 1e-30 or more")
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr} is above peak_lr {self.peak_lr}: lower min_lr")
        if self.warmup_steps >= self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves no step of max_steps {self.max_steps}: shorten the warm-up"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_the_name(self) -> ScheduleTable:
        if self.name == "constant" and self.min_lr:
            raise ValueError(f'name = "constant" never falls to min_lr {self.min_lr}: set min_lr = 0 or leave it out')
        if self.name != "wsd":
            given = next((key for key in ("decay_steps", "decay_shape") if getattr(self, key) is not None), None)
            if given is not None:
                raise ValueError(f'{given} belongs to name = "wsd": leave it out of name = "{self.name}"')
        elif self.decay_steps is None:
            raise ValueError('name = "wsd" needs decay_steps, the last steps of max_steps in which the rate falls')
        elif self.decay_steps > self.max_steps - self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} is more than the {self.max_steps - self.warmup_steps} steps that "
                "warmup_steps leaves of max_steps: shorten one of them"
            )
        return self


class OptimizerTable(_Table):
    """ "muon" orthogonalizes the update of hidden matrices; embedding, head and vectors have AdamW beside it."""

    name: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: PositiveRate = 1e-8
    fused: bool = True  # torch's own kernel, where AdamW is torch's
    weight_decay: Annotated[float, Field(ge=0.0, le=1e6)] = 0.1
    decay_embeddings: bool = True  # norms and biases are never decayed
    muon_momentum: Decay = 0.95
    muon_update_rms: PositiveRate = 0.2  # of a matrix's update, so that AdamW's rate serves it (Liu et al. 2025, eq. 4)
    gradient_clipping: float | Literal["off"] = 1.0

    @field_validator("gradient_clipping", mode="before")
    @classmethod
    def _positive_or_off(cls, value: object) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "off" and not (is_number and 0.0 < float(str(value)) < math.inf):
            raise ValueError('should be a positive number, or "off" for no clipping')
        return value

    @property
    def clipping_norm(self) -> float:
        """The largest gradient norm left unclipped, 0.0 for no clipping (how DeepSpeed spells it)."""
        return 0.0 if self.gradient_clipping == "off" else float(self.gradient_clipping)


class PrecisionTable(_Table):
    """Of forward and backward; of the master weights; of their moments; of the gradients while they are summed.

    bf16 masters lose what is below 1/256 of a weight: "kahan" keeps what was lost in a second bf16 number, "stochastic"
    rounds up as often as the lost part is large.

    "auto" computes in what the device has (`runtime.auto_compute`). fp16 scales the loss, lest small gradients vanish:
    by 2^initial_scale_power at first, half of it behind an overflow, twice as much behind loss_scale_window updates
    without one.
    """

    compute: Literal["bf16", "fp16", "fp32", "auto"] = "bf16"
    master: Literal["fp32", "bf16"] = "fp32"
    moments: Literal["master", "fp32", "bf16"] = "master"  # "master": what the masters have
    compensation: Literal["none", "kahan", "stochastic"] = "none"
    accumulate: Literal["fp32", "bf16", "fp16"] = "fp32"
    tf32: bool | Literal["auto"] = "auto"  # factors of fp32 matrix products on a GPU, see acceleration.py
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    loss_scale_window: Size = 1000

    def compute_where(self, auto: Compute) -> Compute:
        """What is computed in where "auto" stands for `auto`."""
        return auto if self.compute == "auto" else self.compute

    @property
    def moments_dtype(self) -> Literal["fp32", "bf16"]:
        return self.master if self.moments == "master" else self.moments

    @model_validator(mode="after")
    def _compensates_something(self) -> PrecisionTable:
        if self.compensation != "none" and self.master != "bf16":
            raise ValueError(
                f'compensation = "{self.compensation}" is for master = "bf16", {self.master} masters lose nothing that '
                'it could keep: set compensation = "none"'
            )
        if (self.master, self.moments_dtype) == ("fp32", "bf16"):
            raise ValueError('moments = "bf16" needs master = "bf16": the engine gives fp32 masters fp32 moments')
        return self

    @model_validator(mode="after")
    def _go_together(self) -> PrecisionTable:
        reason = None if self.compute == "auto" else mismatch(self.compute, self.master, self.accumulate)
        if reason is not None:
            raise ValueError(reason)
        return self


def mismatch(compute: Compute, master: str, accumulate: str) -> str | None:
    """Why these precisions do not go together at any ZeRO stage, with what to change; None where they do."""
    if compute == "fp32" and (master, accumulate) != ("fp32", "fp32"):
        return 'compute = "fp32" keeps masters and gradients in fp32: set master and accumulate to "fp32"'
    if compute == "fp16" and master == "bf16":
        return 'compute = "fp16" keeps masters in fp32: set master = "fp32"'
    if accumulate not in (compute, "fp32"):
        return f'compute = "{compute}" has no {accumulate} gradients to sum: set accumulate to "fp32" or "{compute}"'
    return None


class LossTable(_Table):
    z_loss: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # times (log Z)², PaLM section 5; 0 is off


class MemoryTable(_Table):
    activation_checkpointing: Annotated[str, AfterValidator(_checkpointing)] = "none"
    loss_chunk_tokens: Size = 2048


class EvaluationTable(_Table):
    """Every so many steps, and at the end; without `max_tokens` on all held-out tokens."""

    every_steps: Positive
    max_tokens: Positive | None = None  # per source


class CheckpointTable(_Table):
    """When to save, and what stays: the newest ones, those of some steps for good, the best by held-out loss.

    See pretrain/retention.py. Where machines share no file system, `placement` says where the files lie
    (pretrain/sharing.py).
    """

    every_steps: Positive
    keep_last: Size = 3
    keep_every_steps: Positive | None = None
    keep_best: Annotated[int, Field(ge=0, lt=2**31)] = 0
    placement: Literal["shared", "per_node", "gathered"] = "shared"
    asynchronous: bool = False  # written while training goes on, from a copy in main memory

    @model_validator(mode="after")
    def _keeps_what_is_saved(self) -> CheckpointTable:
        stays, every = self.keep_every_steps, self.every_steps
        if stays is not None and stays % every:
            low = stays // every * every
            near = f"{low} or {low + every}" if low else f"{every}"
            raise ValueError(
                f"keep_every_steps {stays} is no multiple of every_steps {every}, so most of those steps are never "
                f"saved: use {near}"
            )
        return self


class LoggingTable(_Table):
    """What is shown and kept beside metrics.jsonl, see docs/watching.md. `every_steps`: of lines in a log.

    Behind each evaluation the model continues `sample_prompts` by `sample_tokens` tokens each, drawn alike every time.
    """

    every_steps: Positive = 1
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: Annotated[str, Field(min_length=1, max_length=128)] = "zerohalf"
    peak_flops: PositiveRate | None = None  # a second, dense, of one device: for the MFU where none is known
    sample_prompts: Annotated[tuple[str, ...], Strict(False)] = ()
    sample_tokens: Size = 64
    histogram_every_steps: Positive | None = None  # of every weight and its gradient


# What a run does about a condition. Which of them make sense for one, HealthTable says.
Watch = Literal["off", "warn"]
Halt = Literal["off", "warn", "stop"]
Guard = Literal["off", "warn", "skip", "stop", "roll_back"]


class HealthTable(_Table):
    """What is watched while a run trains, and what is done about it: see docs/health.md.

    A policy for each condition, then what the conditions are measured by. Not part of a run's identity: a resume may
    have another.
    """

    non_finite: Literal["skip", "stop", "roll_back"] = "stop"  # loss or gradient; overflows of fp16 are told apart
    loss_spike: Guard = "warn"
    grad_norm_spike: Guard = "warn"
    skipped_steps: Halt = "warn"
    update_ratio: Halt = "warn"
    attention_logit: Halt = "warn"
    dead_units: Halt = "warn"
    rank_mismatch: Halt = "stop"
    late_rank: Watch = "warn"
    hang: Watch = "warn"
    spike_z: PositiveRate = 10.0  # robust standard deviations above the median of the last healthy steps
    window_steps: Annotated[int, Field(ge=8, le=10_000)] = 100  # as many healthy steps
    skipped_in_a_row: Size = 10
    roll_back_steps: Positive = 100  # a roll back goes to a healthy checkpoint at least so long before the alarm
    roll_backs: NotNegative = 3  # of a run; then it stops
    save_batch: bool = True  # the documents of an alarm's step, as text
    observe_every_steps: Positive = 100  # one micro-batch of such a step is looked into
    update_ratio_above: PositiveRate = 1.0  # norm of a matrix's update over its own
    attention_logit_above: PositiveRate = 1000.0
    dead_units_above: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9  # of a block's feed-forward
    hash_every_steps: Positive = 100  # the weights of all ranks are compared
    late_ratio: Annotated[float, Field(gt=1.0, le=1e6)] = 2.0  # a rank's own time in a step over the ranks' median
    hang_seconds: PositiveRate = 300.0  # without a sign of getting on, beyond the longest pause so far


class DeepSpeedTable(_Table):
    config: Place = "ds_configs/zero2.json"


class RunConfig(_Table):
    """A whole recipe. `model` is the architecture's own frozen dataclass, built from the `[model]` table."""

    seed: NotNegative = 1
    initial_weights: Place | None = None  # a checkpoint, or a run's newest; without it they are drawn from the seed
    compile: bool | Literal["auto"] = "auto"  # the blocks through torch.compile: "auto" on GPUs, see acceleration.py
    model: ModelConfig
    data: DataTable
    batch: BatchTable
    schedule: ScheduleTable
    optimizer: OptimizerTable = OptimizerTable()
    loss: LossTable = LossTable()
    precision: PrecisionTable = PrecisionTable()
    memory: MemoryTable = MemoryTable()
    evaluation: EvaluationTable
    checkpoint: CheckpointTable
    logging: LoggingTable = LoggingTable()
    health: HealthTable = HealthTable()
    deepspeed: DeepSpeedTable = DeepSpeedTable()

    @field_validator("model", mode="before")
    @classmethod
    def _build_model(cls, value: object) -> object:
        return from_table(dict(value)) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _evaluation_scores_a_window(self) -> RunConfig:
        most, window = self.evaluation.max_tokens, self.model.seq_len
        if most is not None and most < window:
            raise ValueError(
                f"evaluation.max_tokens {most} is less than one window of model.seq_len {window} tokens: "
                f"use {window} or more, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _best_checkpoints_are_scored(self) -> RunConfig:
        """A checkpoint has a score where an evaluation falls on its step; the last step has both."""
        saved, scored, end = self.checkpoint.every_steps, self.evaluation.every_steps, self.schedule.max_steps
        first = math.lcm(saved, scored)
        if self.checkpoint.keep_best and saved < end <= first:
            raise ValueError(
                f"checkpoint.keep_best {self.checkpoint.keep_best} chooses among checkpoints that were evaluated, but "
                f"checkpoint.every_steps {saved} and evaluation.every_steps {scored} first meet at step {first}, of "
                f"schedule.max_steps {end}: set evaluation.every_steps = {saved}, or one that divides it"
            )
        return self

    @model_validator(mode="after")
    def _checkpoints_reach_back(self) -> RunConfig:
        """Where a run may go back, some checkpoint is old enough, however far the newest one is."""
        health, table = self.health, self.checkpoint
        condition = next((name for name in HealthTable.model_fields if getattr(health, name) == "roll_back"), None)
        reach, wanted = (table.keep_last - 1) * table.every_steps, health.roll_back_steps - 1
        stays = table.keep_every_steps  # of these one is old enough as soon as the run is twice as old
        if condition is not None and reach < wanted and (stays is None or stays > health.roll_back_steps):
            keep = -(-wanted // table.every_steps) + 1
            kept = "" if stays is None else f", keep_every_steps {stays} is rarer than that"
            raise ValueError(
                f'health.{condition} "roll_back" goes back health.roll_back_steps {health.roll_back_steps} steps or '
                f"more, and checkpoint.keep_last {table.keep_last} of every_steps {table.every_steps} may reach back "
                f"{reach + 1}{kept}: set checkpoint.keep_last = {keep}, or lower health.roll_back_steps to {reach + 1}"
            )
        return self

    @model_validator(mode="after")
    def _checkpointing_fits_the_blocks(self) -> RunConfig:
        period, blocks = checkpointing_period(self.memory.activation_checkpointing), self.model.n_layers
        if period > blocks:
            raise ValueError(
                f'memory.activation_checkpointing "every-{period}" of model.n_layers {blocks} blocks: '
                f"use every-{blocks} at most"
            )
        return self

    @model_validator(mode="after")
    def _compiled_blocks_are_checkpointed_whole(self) -> RunConfig:
        if self.compile is True and self.memory.activation_checkpointing == "selective":
            raise ValueError(
                'memory.activation_checkpointing "selective" chooses among the operations of a block, which '
                'compile = true makes one: use "none", "every-2" or "full", or set compile = false'
            )
        return self


def refuse_split_windows(stages: Iterable[int], seq_len: int) -> None:
    """RecipeError where a stage's `from_tokens` is within a window, as it may be in a run that had other windows."""
    for start in stages:
        low = start // seq_len * seq_len
        if start != low:
            raise RecipeError(
                f"data.stages from_tokens {start} is not a multiple of model.seq_len {seq_len}: "
                f"use {low} or {low + seq_len}"
            )


def from_root(path: Path | str) -> Path:
    """Where a path written in a recipe points: relative ones count from the project root, absolute ones stay."""
    return PROJECT_ROOT / path


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check a recipe; `overrides` are `table.key=VALUE` texts. RecipeError: one line, what to do."""
    recipe = Path(path)
    table = _read_toml(recipe)
    for override in overrides:
        apply_override(table, override)
    try:
        return parse_recipe(table)
    except RecipeError as error:
        raise RecipeError(f"{recipe}: {error}") from None


def parse_recipe(table: Mapping[str, Any]) -> RunConfig:
    """Build the config from already-parsed tables. RecipeError: unknown key (nearest neighbour named) or bad value."""
    _refuse_unknown_keys(table, RunConfig, ())
    try:
        return RunConfig.model_validate(dict(table))
    except ValidationError as error:
        raise RecipeError(_one_line(error)) from None


def to_toml(config: RunConfig) -> str:
    """The resolved recipe, every value written out; `parse_recipe(tomllib.loads(text))` gives an equal config."""
    tables: dict[str, dict[str, Any]] = {}
    lines = []
    for name in RunConfig.model_fields:
        value = getattr(config, name)
        if isinstance(value, ModelConfig):
            tables[name] = value.to_dict()
        elif isinstance(value, BaseModel):
            tables[name] = value.model_dump(exclude_none=True)
        elif value is not None:
            lines.append(f"{name} = {_toml_value(value)}")
    for name, table in tables.items():
        of_tables = [key for key, value in table.items() if isinstance(value, tuple) and not _are_texts(value)]
        lists = {key: table.pop(key) for key in of_tables}
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml_value(value)}" for key, value in table.items()]
        for key, entries in lists.items():
            for entry in entries:
                lines += ["", f"[[{name}.{key}]]"]
                lines += [f"{inner} = {_toml_value(value)}" for inner, value in entry.items()]
    return "\n".join(lines) + "\n"


def _are_texts(values: Sequence[object]) -> bool:
    return len(values) > 0 and all(isinstance(value, str) for value in values)


def new_values(earlier: str, recipe: str) -> list[str]:
    """The values of a resolved recipe that an earlier one, which may be damaged, has not: `table.key = value`."""

    def flat(text: str) -> dict[str, str]:
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError):
            return {}
        parts = ((name, value if isinstance(value, dict) else {"": value}) for name, value in tables.items())
        pairs = ((f"{name}.{key}", value) for name, table in parts for key, value in table.items())
        return {name.rstrip("."): _toml_value(value) for name, value in pairs}

    before = flat(earlier)
    return [f"{key} = {value}" for key, value in flat(recipe).items() if before.get(key) != value]


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key most like `key`, by difflib's ratio."""
    return max(known, key=lambda candidate: difflib.SequenceMatcher(None, key, candidate).ratio())


def show(value: object) -> str:
    """A value for an error line: as Python writes it, cut where it is long or nested."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write thousands of digits
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, str | int | float | None) else reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_toml(recipe: Path) -> dict[str, Any]:
    if not recipe.is_file():
        bundled = sorted(path.stem for path in (PROJECT_ROOT / "pretrain" / "recipes").glob("*.toml"))
        hint = f"pretrain/recipes/{nearest(recipe.stem, bundled)}.toml" if bundled else "a TOML file"
        raise RecipeError(f"{recipe}: there is no such recipe file; the nearest one here is {hint}")
    try:
        return tomllib.loads(recipe.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{recipe}: not UTF-8 at byte {error.start}: save the recipe as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{recipe}: not valid TOML: {error}") from None
    except RecursionError:
        raise RecipeError(f"{recipe}: brackets nested too deep: a recipe has tables of values and lists") from None
    except ValueError as error:  # what int() says of thousands of digits
        raise RecipeError(f"{recipe}: a number there has too many digits ({str(error).partition(':')[0]})") from None


def apply_override(table: dict[str, Any], override: str) -> None:
    """Put what a text `table.key=VALUE` says into nested tables. RecipeError: it is none."""
    shown = override if len(override) <= 120 else override[:117] + "..."
    if not override.isprintable():
        raise RecipeError(f"--set {shown!r}: write it on one line, without control characters")
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(f"--set {shown}: write it as table.key=VALUE, for example schedule.peak_lr=3e-4")
    value = _parse_value(shown, text.strip())
    if isinstance(value, dict):
        raise RecipeError(f"--set {shown}: sets single values only: write one --set for each key of the table")
    target: Any = table
    for depth, part in enumerate(path[:-1], start=1):
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {shown}: {'.'.join(path[:depth])} is a value, not a table: set it directly")
    if isinstance(target.get(path[-1]), dict):
        raise RecipeError(f"--set {shown}: {key.strip()} is a table: name one of its keys as well")
    target[path[-1]] = value


def _parse_value(shown: str, text: str) -> Any:
    """TOML's value syntax; a bare word (no TOML value, no quotes or brackets) is a string: paths need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
        if set(parsed) == {"value"}:
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[^\s\"'\[\]{}=,#]+", text):
            return text
    except RecursionError:
        raise RecipeError(f"--set {shown}: brackets nested too deep") from None
    except ValueError as error:  # what int() says of thousands of digits
        raise RecipeError(f"--set {shown}: too many digits ({str(error).partition(':')[0]})") from None
    raise RecipeError(
        f"--set {shown}: the value {show(text)} is neither TOML nor a bare word: quote it as a TOML string"
    )


def _known_keys(table: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in table.model_fields.items():
        yield (*prefix, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known_keys(field.annotation, (*prefix, name))


def _refuse_unknown_keys(table: Mapping[str, Any], shape: type[BaseModel], prefix: tuple[str, ...]) -> None:
    for key, value in table.items():
        where = ".".join((*prefix, key))
        if key not in shape.model_fields:
            here = list(shape.model_fields)
            elsewhere = [known for known in _known_keys(RunConfig) if known[-1] == key]
            near = ".".join(elsewhere[0] if elsewhere else (*prefix, nearest(key, here)))
            raise RecipeError(f"unknown key {where}: did you mean {near}?")
        annotation = shape.model_fields[key].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and isinstance(value, Mapping):
            _refuse_unknown_keys(value, annotation, (*prefix, key))
        elif get_origin(annotation) is tuple and isinstance(value, list):
            element = get_args(annotation)[0]
            for entry in value:
                if isinstance(entry, Mapping):
                    _refuse_unknown_keys(entry, element, (*prefix, key))


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    union_tags = {"float", "literal['off']", "bool", "literal['auto']"}
    key = ".".join(str(part) for part in first["loc"] if part not in union_tags)
    if first["type"] == "missing":
        return f"{key} is missing: add it to the recipe"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(first["input"], Mapping | BaseModel):
        return f"{key}: {message}" if key else message
    return f"{key} = {show(first['input'])}: {message}"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml_value(entry) for entry in value) + "]"
    raise TypeError(f"a recipe cannot hold {value!r}")
