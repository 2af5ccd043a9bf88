"""What a run has written of itself, read for people: the steps that count, evaluations, attempts, where the time went.

A resume goes back to a checkpoint: what an earlier attempt did behind it counts no more, whether or not the later one
has come that far again. Such steps are kept apart as `replaced`. A run may be at work meanwhile: what is whole is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.accounting import parameter_count
from pretrain.clock import PARTS, STEP_PARTS, Part, warm_up_steps
from pretrain.config import RecipeError, RunConfig, load_recipe
from pretrain.device_memory import PROCESS_BYTES
from pretrain.memory import budget
from pretrain.plan import AUTO_IS, Kind
from pretrain.run_directory import RunDirectory, RunDirectoryError

Array = NDArray[np.float64]
Record = Mapping[str, Any]

SIGN_SECONDS = 60  # a sign of life older than that is none
MOST_STEPS, LARGEST = 2**53, 1e30  # what no counter, and no number of a run, comes to
NUMBERS = (
    "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "model_flops_per_second", "loss_scale",
    "hardware_flops_per_second", "mfu", *(f"{part}_seconds" for part in PARTS), "wall_seconds", "held_seconds",
    "whole_seconds", "seconds", "peak_memory_bytes", "text_bytes", "uniform", "unigram", "perplexity", "bits_per_byte",
)  # fmt: skip
LAST_STEPS = 20  # a final training loss is the mean of so many steps: one alone is mostly noise


@dataclass(frozen=True)
class Series:
    """Optimizer steps in order, one entry each; NaN where a number was not finite or not written."""

    step: Array
    attempt: Array
    loss: Array
    lr: Array
    grad_norm: Array
    tokens: Array  # learnt from so far
    step_tokens: Array  # of this step alone
    step_seconds: Array
    flops: Array  # so far; those of steps whose record is missing as of the next one's tokens
    seconds: Array  # so far in training steps, without evaluation, saving and pauses
    tokens_per_second: Array
    loss_scale: Array
    parts: Mapping[Part, Array]  # of step_seconds; NaN in records of earlier versions
    mfu: Array  # a share of 1; NaN where no peak is known of the device
    hfu: Array  # the same with what is computed again in backward
    memory: Array  # the most the first rank had held, bytes
    opens: NDArray[np.bool_]  # the first step of an attempt
    warm_up: NDArray[np.bool_]  # it, and those behind it that are not like the rest yet: compilation, first touches

    @classmethod
    def of(cls, records: Sequence[Record]) -> Series:
        def column(name: str) -> Array:
            return np.array([_number(record.get(name)) for record in records], dtype=np.float64)

        tokens, rate, seconds, attempt = map(column, ("tokens", "tokens_per_second", "step_seconds", "attempt"))
        with np.errstate(divide="ignore", invalid="ignore"):
            per_token = column("model_flops_per_second") / rate
            again = column("hardware_flops_per_second") / column("model_flops_per_second")
        gained = np.diff(tokens, prepend=0.0)
        opens = np.diff(attempt, prepend=-1.0) != 0
        step_tokens, mfu = np.round(rate * seconds), column("mfu")
        return cls(
            step=column("step"),
            attempt=attempt,
            loss=column("loss"),
            lr=column("lr"),
            grad_norm=column("grad_norm"),
            tokens=tokens,
            step_tokens=step_tokens,
            step_seconds=seconds,
            flops=np.cumsum(np.nan_to_num(per_token * gained)),
            seconds=np.cumsum(np.nan_to_num(seconds)),
            tokens_per_second=rate,
            loss_scale=column("loss_scale"),
            parts={part: column(f"{part}_seconds") for part in STEP_PARTS},
            mfu=mfu,
            hfu=mfu * again,
            memory=column("peak_memory_bytes"),
            opens=opens,
            warm_up=_warm_up(opens, seconds, step_tokens),
        )

    def __len__(self) -> int:
        return len(self.step)

    @property
    def breaks(self) -> NDArray[np.bool_]:
        """Where the step before has no record."""
        return np.diff(self.step, prepend=self.step[:1]) > 1

    @property
    def steady_rate(self) -> float:
        """Tokens a second in training steps, without each attempt's warm-up unless there is no other."""
        counted = self._steady(self.step_tokens)
        seconds = float(self.step_seconds[counted].sum())
        return float(self.step_tokens[counted].sum()) / seconds if seconds else float("nan")

    def steady_share(self, values: Array) -> float:
        """The mean over the time of those steps of what is a share at each; NaN where it is not known."""
        counted = self._steady(values)
        seconds = self.step_seconds[counted]
        return float((values[counted] * seconds).sum() / seconds.sum()) if counted.any() else float("nan")

    def _steady(self, values: Array) -> NDArray[np.bool_]:
        known = np.isfinite(values) & (self.step_seconds > 0)
        steady = known & ~self.warm_up
        return steady if steady.any() else known

    @property
    def final_loss(self) -> float:
        """The mean of the last LAST_STEPS steps whose loss is finite."""
        finite = self.loss[np.isfinite(self.loss)]
        return float(finite[-LAST_STEPS:].mean()) if len(finite) else float("nan")


@dataclass(frozen=True)
class Attempt:
    """A start of the command, and what it did."""

    number: int
    facts: Record  # of environment.json; empty where that does not know it
    first_step: int | None  # None: it made no step
    last_step: int | None
    replaced: int  # of its steps, those that count no more
    step_seconds: float
    started_at: float | None  # seconds since the epoch
    ended_at: float | None  # its last record


@dataclass(frozen=True)
class Memory:
    """What a rank of the last attempt was predicted to hold and the most that one held. Bytes."""

    kind: Kind
    kind_known: bool
    predicted: int  # tensors at the peak
    predicted_with_process: int  # and what a process holds beside them
    moment: str
    measured: float  # by the first rank: allocated on a GPU, resident on a CPU; NaN: not recorded

    @property
    def comparable(self) -> int:
        """The prediction that means what was measured: an allocator counts tensors, residence the whole process."""
        return self.predicted if self.kind == "cuda" else self.predicted_with_process


@dataclass(frozen=True)
class Chronicle:
    """A run: its recipe, and what its records say."""

    path: Path
    config: RunConfig
    recipe: str
    deepspeed: Mapping[str, Any]
    status: Record
    series: Series
    replaced: Series
    evaluations: Mapping[str, Sequence[Record]]  # source → records in step order; "all" is all of them together
    changes: Sequence[Record]
    alarms: Sequence[Record]  # all that were ever raised, in the order written
    roll_backs: Sequence[Record]  # likewise; `step` is that of the checkpoint gone back to
    left_out: Sequence[int]  # steps that were not run for an alarm
    saves: Sequence[Record]
    observations: Sequence[Record]  # in step order
    attempts: Sequence[Attempt]
    evaluating_seconds: float  # of all attempts, also what was done in vain
    saving_seconds: float  # for which training stood still
    paused_seconds: float  # of attempts that could tell it at their end
    damaged_lines: int  # whole lines that are no record
    last_sign: float | None  # seconds since the epoch

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def state(self) -> str:
        """finished, stopped, failed, running; or "silent": it said running, and no rank gives a sign of life."""
        said = str(self.status.get("state", "silent"))
        if said == "running" and (self.last_sign is None or time.time() - self.last_sign > SIGN_SECONDS):
            return "silent"
        return said

    @property
    def parameters(self) -> int:
        return parameter_count(self.config.model)

    @property
    def environment(self) -> Record:
        """Of the last start."""
        return self.attempts[-1].facts if self.attempts else {}

    def at(self, step: int) -> int | None:
        """The index in `series` of a step; None: it has no record."""
        index = int(np.searchsorted(self.series.step, step))
        return index if index < len(self.series) and self.series.step[index] == step else None

    def last(self, source: str = "all") -> Record | None:
        records = self.evaluations.get(source, ())
        return records[-1] if records else None

    def best(self, source: str = "all") -> Record | None:
        """The evaluation with the lowest loss, the first of equals; None where none is finite."""
        finite = [record for record in self.evaluations.get(source, ()) if np.isfinite(_number(record.get("loss")))]
        return min(finite, key=lambda record: float(record["loss"])) if finite else None

    @cached_property
    def memory(self) -> Memory:
        """RecipeError where the recipe cannot be budgeted."""
        if not self.deepspeed:
            raise RecipeError("deepspeed.json is missing or damaged")
        facts = self.environment
        built = str((facts.get("versions") or {}).get("torch", ""))  # all that earlier versions tell of the device
        device = facts.get("device") or ("cpu" if "+cpu" in built else None)
        kind: Kind = "cpu" if device == "cpu" else "cuda"
        compute = facts.get("compute") or self.config.precision.compute_where(AUTO_IS)
        held = budget(self.config, self.deepspeed, int(facts.get("world_size") or 1), compute=compute, device=kind)
        peak = held.peak_bytes() + (held.peak_bytes("host") if kind == "cpu" else 0)
        last = self.series.memory[self.series.attempt == self.series.attempt[-1]]
        measured = float(max(last[last > 0], default=np.nan))
        return Memory(kind, device is not None, peak, peak + PROCESS_BYTES[kind], held.peak_moment, measured)

    def time_spent(self) -> dict[str, float]:
        """Seconds from the first start to the last record, by what they went into."""
        counted = float(np.nan_to_num(self.series.step_seconds).sum())
        again = float(np.nan_to_num(self.replaced.step_seconds).sum())
        spans = [
            (one.started_at, one.ended_at)
            for one in self.attempts
            if one.started_at is not None and one.ended_at is not None
        ]
        within = sum(max(end - start, 0.0) for start, end in spans)
        whole = spans[-1][1] - spans[0][0] if spans else 0.0
        return {
            "training steps that count": counted,
            "steps that were made again later": again,
            "evaluating": self.evaluating_seconds,
            "saving": self.saving_seconds,
            "paused": self.paused_seconds,
            "starting, logging, all else": max(
                within - counted - again - self.evaluating_seconds - self.saving_seconds - self.paused_seconds, 0.0
            ),
            "between attempts": max(whole - within, 0.0),
        }

    def step_parts(self) -> dict[Part, float]:
        """Seconds of the steps that count by what they went into; empty where no record tells it."""
        parts = self.series.parts
        known = {part: float(np.nansum(seconds)) for part, seconds in parts.items() if np.isfinite(seconds).any()}
        return known if len(known) == len(parts) else {}


def read(path: Path) -> Chronicle:
    """A run directory. RunDirectoryError: it is none, damaged, or has made no step yet."""
    run = RunDirectory(path)
    if not run.recipe.is_file():
        what = "it has no recipe.toml" if path.is_dir() else "there is no such folder"
        raise RunDirectoryError(f"{path} is no run directory ({what}): name one, as runs/mini")
    config = load_recipe(run.recipe)
    records, damaged = _records(run.metrics)
    counted, replaced = _what_counts(records)
    trained = [record for record in counted if record["kind"] == "train"]
    if not trained:
        raise RunDirectoryError(f"{path} has no step yet: {run.metrics.name} holds none; wait for the run's first step")
    evaluations: dict[str, list[Record]] = {}
    for record in sorted(_of(counted, "evaluation"), key=lambda one: one["step"]):
        evaluations.setdefault(str(record.get("source", "all")), []).append(record)
    return Chronicle(
        path=path,
        config=config,
        recipe=run.recipe.read_text(encoding="utf-8"),
        deepspeed=_object(run.deepspeed),
        status=_object(run.status),
        series=Series.of(trained),
        replaced=Series.of(_of(replaced, "train")),
        evaluations=evaluations,
        changes=_of(counted, "change"),
        alarms=_of(records, "alarm"),
        roll_backs=_of(records, "roll_back"),
        left_out=[record["step"] for record in _of(counted, "left_out")],
        saves=_of(counted, "save"),
        observations=_of(counted, "observation"),
        attempts=_attempts(run, records, replaced),
        evaluating_seconds=_total(records, "evaluation", "seconds"),
        saving_seconds=_total(records, "save", "held_seconds"),
        paused_seconds=_total(records, "time", "paused_seconds"),
        damaged_lines=damaged,
        last_sign=_sign(run),
    )


# ---------------------------------------------------------------- the records


def _records(path: Path) -> tuple[list[Record], int]:
    """All whole records in the order written, and how many other lines there are, but for one cut short at the end."""
    if not path.is_file():
        return [], 0
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    damaged = 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and _is_ours(record):
            records.append(record)
        else:
            damaged += bool(line.strip()) and number < len(lines)
    return records, damaged


def _is_ours(record: Record) -> bool:
    """Whether a trainer can have written it: numbers where numbers stand, none that no run comes to."""
    places = all(type(record.get(name)) is int and 0 <= record[name] <= MOST_STEPS for name in ("step", "attempt"))
    words = isinstance(record.get("kind"), str) and isinstance(record.get("source", ""), str)
    numbers = (record[name] for name in NUMBERS if record.get(name) is not None)  # null: it was not finite
    return places and words and all(abs(_number(value)) <= LARGEST for value in numbers)


def _what_counts(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Records of the run as it stands, each step once and in order, and those that a resume or a roll back put out of
    use."""
    counted: list[Record] = []
    replaced: list[Record] = []
    attempt = None
    for record in records:
        begins = record["attempt"] != attempt and record["kind"] in ("train", "left_out", "evaluation", "change")
        if begins or record["kind"] == "roll_back":
            attempt = record["attempt"]
            behind = record["step"] - (record["kind"] in ("train", "left_out"))  # the step that is gone on from
            replaced += [one for one in counted if one["step"] > behind]
            counted = [one for one in counted if one["step"] <= behind]
        counted.append(record)
    latest = {(one["kind"], one["step"], one.get("source")): one for one in counted}
    counted = sorted(latest.values(), key=lambda one: one["step"])  # stable: within a step as written
    return counted, replaced


def _of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _total(records: Iterable[Record], kind: str, name: str) -> float:
    numbers = [_number(record[name]) for record in _of(records, kind) if name in record]
    return float(np.nansum(numbers))


def _warm_up(opens: NDArray[np.bool_], seconds: Array, samples: Array) -> NDArray[np.bool_]:
    """The first steps of each attempt, as `clock.warm_up_steps` tells them; at least the first."""
    found = opens.copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        paces = np.nan_to_num(seconds / samples, posinf=0.0)
    bounds = [*np.flatnonzero(opens), len(opens)]
    for first, end in pairwise(bounds):
        found[first : first + warm_up_steps(paces[first:end].tolist())] = True
    return found


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


# ---------------------------------------------------------------- attempts and files


def _attempts(run: RunDirectory, records: Sequence[Record], replaced: Sequence[Record]) -> list[Attempt]:
    facts = {one.get("attempt"): _facts(one) for one in run.attempts() if isinstance(one, dict)}
    by_number: dict[int, list[Record]] = {number: [] for number in facts if type(number) is int}
    for record in records:
        by_number.setdefault(record["attempt"], []).append(record)
    gone = [record["attempt"] for record in replaced if record["kind"] == "train"]
    attempts = []
    for number, own in sorted(by_number.items()):
        steps = [record["step"] for record in own if record["kind"] == "train"]
        seconds = [_number(record.get("step_seconds")) for record in own if record["kind"] == "train"]
        ends = [end for record in own if (end := _instant(record.get("at"))) is not None]
        fact = facts.get(number, {})
        attempts.append(
            Attempt(
                number,
                fact,
                min(steps, default=None),
                max(steps, default=None),
                gone.count(number),
                float(np.nansum(seconds)),
                _instant(fact.get("started_at")),
                max(ends, default=None),
            )
        )
    return attempts


def _facts(attempt: Record) -> Record:
    """What environment.json tells of an attempt, less what is not of the kind that a run writes."""
    kinds = {"versions": dict, "world_size": int, "recipe_changes": list}
    return {name: value for name, value in attempt.items() if isinstance(value, kinds.get(name, object))}


def _instant(value: object) -> float | None:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError):
        return None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing or damaged: what it says is shown beside the rest."""
    try:
        read = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _sign(run: RunDirectory) -> float | None:
    """The newest sign of life of any rank."""
    signs = [_number(_object(path).get("at")) for path in run.signs.glob("rank-*.json")]
    return max((sign for sign in signs if np.isfinite(sign)), default=None)
