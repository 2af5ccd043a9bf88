"""A run looks at itself every so many steps: how far a step moved the weights, what its blocks do with a micro-batch,
whether all ranks hold the same weights, whether one of them is late.

Nothing of this changes a bit of what is trained. The update is measured on evenly spaced elements of each matrix, so
that no second copy of the weights is held; the blocks are watched in one more forward pass, without gradients, over the
micro-batch that the rank had last. Ranks exchange what they found in one collective of such a step; an ordinary step
costs a look at its number. What is found is recorded, and said to the Monitor by numbers that all ranks have alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from data_pipeline.loader import Batch
from model.accounting import is_matrix
from pretrain import replicas
from pretrain.config import HealthTable
from pretrain.health import Condition, Monitor
from pretrain.inspection import Activity, watching

if TYPE_CHECKING:
    from pretrain.engine import TrainingEngine

SAMPLED = 4096  # elements of a matrix, of each rank's part, at least if it has as many: the norms are right to 2 %
# A rank is late only where it costs the others so much of a step.
WORTH_A_STEP = 0.1


@dataclass(frozen=True)
class Lateness:
    """A rank's own part of a step, which no other can lengthen: seconds, the mean of steps since it was last asked."""

    rank: int  # the latest
    own_seconds: float
    median_seconds: float  # of all ranks, the lower one of two
    step_seconds: float


class Observer:
    """One rank's. All ranks call it at the same steps; `step` is the one being made, the first is 1."""

    def __init__(
        self,
        engine: TrainingEngine,
        table: HealthTable,
        monitor: Monitor,
        record: Callable[[int, dict[str, Any]], None] = lambda step, values: None,
    ) -> None:
        """`record` writes down what a step's observation found."""
        self._engine, self._ranks = engine, engine.ranks
        self._table, self._monitor, self._record = table, monitor, record
        self._batch: Batch | None = None  # the last that was read
        self._before: dict[str, list[Tensor]] | None = None
        self._own_seconds: list[float] = []
        self._step_seconds: list[float] = []
        self._is_first = True

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`batches`; the last one is kept in mind."""
        for batch in batches:
            self._batch = batch
            yield batch

    def before(self, step: int) -> None:
        """Just before a step is made: are the weights that it uses the same everywhere?"""
        self._before = None
        if self._wants("rank_mismatch") and step % self._table.hash_every_steps == 0 and self._ranks.world_size > 1:
            found = replicas.compare(self._ranks, self._engine.replicas())
            self._judge(step, "rank_mismatch", None if found is None else float(len(found.ranks)), 0.0, str(found))
        if self._wants("update_ratio") and step % self._table.observe_every_steps == 0:
            self._before = self._sample()

    def after(self, step: int, *, own_seconds: float, step_seconds: float, updated: bool) -> None:
        """Just behind it. `own_seconds`: what this rank took for its data and forward passes; `updated`: the weights
        were."""
        if not self._is_first:  # it compiles, and touches memory for the first time
            self._own_seconds.append(own_seconds)
            self._step_seconds.append(step_seconds)
        self._is_first = False
        if step % self._table.observe_every_steps:
            return
        moved = self._moved() if updated and self._before is not None else None
        self._before = None
        activity = self._activity() if self._wants("attention_logit") or self._wants("dead_units") else None
        own = (_mean(self._own_seconds), _mean(self._step_seconds))
        everyones = self._ranks.gather((activity, moved, own))
        activities, sums, seconds = ([one[part] for one in everyones] for part in range(3))
        self._own_seconds, self._step_seconds = [], []
        values: dict[str, Any] = {}
        if moved is not None:
            values |= self._judge_updates(step, update_ratios(sums if self._engine.zero_stage else sums[:1]))
        if activity is not None:
            values |= self._judge_activity(step, together(activities))
        values |= self._judge_seconds(step, latest(seconds))
        self._record(step, values)

    def _wants(self, condition: Condition) -> bool:
        return bool(getattr(self._table, condition) != "off")

    # ------------------------------------------------------------ measuring

    def _sample(self) -> dict[str, list[Tensor]]:
        """Of each matrix the parts that this rank updates, evenly spaced elements of them."""
        shapes = {
            name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._engine.transformer.named_parameters()
        }
        found: dict[str, list[Tensor]] = {name: [] for name, shape in shapes.items() if is_matrix(name, shape)}
        for name, master in self._engine.masters():
            if name in found and len(master):
                found[name].append(master[:: stride(len(master))].clone())
        return found

    def _moved(self) -> dict[str, tuple[float, float]]:
        """Of each matrix the sums of squares over this rank's parts: of its update, and of itself before."""
        assert self._before is not None
        after = {name: iter(parts) for name, parts in self._sample().items()}
        sizes: dict[str, list[int]] = {name: [] for name in after}
        for name, master in self._engine.masters():
            if name in sizes and len(master):
                sizes[name].append(len(master))
        moved = {}
        for name, parts in self._before.items():
            update = weight = 0.0
            for before, size in zip(parts, sizes[name], strict=True):
                share = size / len(before)
                update += float((next(after[name]).double() - before.double()).square().sum()) * share
                weight += float(before.double().square().sum()) * share
            moved[name] = (update, weight)
        return moved

    def _activity(self) -> Activity:
        assert self._batch is not None, "a step has read a batch"
        with watching(self._engine.transformer) as watched:
            self._engine.forward_only(self._batch.inputs, self._batch.targets, self._batch.documents)
        return watched.activity()

    # ------------------------------------------------------------ judging

    def _judge(self, step: int, condition: Condition, value: float | None, limit: float, detail: str) -> None:
        """An alarm where a value is above its limit, or no number; else it is over."""
        if value is not None and not value <= limit:
            self._monitor.raise_alarm(step, condition, value, limit, detail)
        else:
            self._monitor.is_over(condition)

    def _judge_updates(self, step: int, ratios: Mapping[str, float]) -> dict[str, Any]:
        if not ratios:
            return {}
        name = max(ratios, key=lambda one: _rank_of(ratios[one]))
        detail = f"the update of {name} over the matrix itself, by their norms"
        self._judge(step, "update_ratio", ratios[name], self._table.update_ratio_above, detail)
        return {
            "update_ratio": ratios[name],
            "update_ratio_of": name,
            "update_ratio_median": statistics.median(ratios.values()),
        }

    def _judge_activity(self, step: int, activity: Activity) -> dict[str, Any]:
        logits = activity.largest_logits
        idle = [dead + saturated for dead, saturated in zip(activity.dead_units, activity.saturated_units, strict=True)]
        of_logits, of_units = (max(range(len(one)), key=lambda at: _rank_of(one[at])) for one in (logits, idle))
        if self._wants("attention_logit"):
            detail = f"the largest score of layer {of_logits}'s attention, before the softmax"
            self._judge(step, "attention_logit", logits[of_logits], self._table.attention_logit_above, detail)
        if self._wants("dead_units"):
            dead, saturated = activity.dead_units[of_units], activity.saturated_units[of_units]
            detail = f"of layer {of_units}'s feed-forward units, {dead:.1%} dead and {saturated:.1%} saturated"
            self._judge(step, "dead_units", idle[of_units], self._table.dead_units_above, detail)
        return {"attention_logit": logits[of_logits], "dead_units": max(activity.dead_units),
                "saturated_units": max(activity.saturated_units), **by_layer(activity)}  # fmt: skip

    def _judge_seconds(self, step: int, late: Lateness | None) -> dict[str, Any]:
        if late is None:
            return {}
        if self._wants("late_rank") and self._ranks.world_size > 1:
            costs = late.own_seconds - late.median_seconds > WORTH_A_STEP * late.step_seconds
            ratio = late.own_seconds / max(late.median_seconds, 1e-9) if costs else 1.0
            detail = (
                f"rank {late.rank} takes {late.own_seconds:.3f} s a step for its data and forward passes, the ranks' "
                f"median is {late.median_seconds:.3f} s"
            )
            self._judge(step, "late_rank", ratio, self._table.late_ratio, detail)
        return {"latest_rank": late.rank, "latest_own_seconds": late.own_seconds,
                "median_own_seconds": late.median_seconds}  # fmt: skip


# ---------------------------------------------------------------- what ranks found, as one


def stride(size: int) -> int:
    """How far elements of a sample lie apart. Odd: a power of two would meet the same columns in every row."""
    return max(1, size // SAMPLED) | 1 if size > 2 * SAMPLED else 1


def update_ratios(everyones: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """|ΔW| / |W| of each matrix, by the sums of squares over all ranks' parts; one that was all zero is left out."""
    sums: dict[str, tuple[float, float]] = {}
    for one in everyones:
        for name, (update, weight) in one.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + update, before[1] + weight)
    return {name: math.sqrt(update / weight) for name, (update, weight) in sums.items() if weight}


def together(activities: Iterable[Activity]) -> Activity:
    """All ranks' micro-batches as one: the largest score, no more dead units than any rank has, the mean square."""
    ranks = list(activities)

    def over_ranks(name: str, of: Callable[[list[float]], float]) -> list[float]:
        return [of(list(layer)) for layer in zip(*(getattr(one, name) for one in ranks), strict=True)]

    return Activity(
        over_ranks("largest_logits", _largest),
        over_ranks("dead_units", min),
        over_ranks("saturated_units", min),
        over_ranks("residual_rms", lambda values: math.sqrt(statistics.fmean(one * one for one in values))),
    )


def latest(everyones: list[tuple[float | None, float | None]]) -> Lateness | None:
    """Of each rank its own and all seconds of a step; None where no step was measured yet."""
    own = [seconds for seconds, _ in everyones if seconds is not None]
    whole = [seconds for _, seconds in everyones if seconds is not None]
    if len(own) < len(everyones) or not whole:
        return None
    rank = max(range(len(own)), key=own.__getitem__)
    return Lateness(rank, own[rank], statistics.median_low(own), statistics.fmean(whole))


def by_layer(activity: Activity) -> dict[str, list[float | None]]:
    """As metrics.jsonl has it; JSON has no infinity."""
    return {f"{name}_by_layer": [one if math.isfinite(one) else None for one in layers]
            for name, layers in asdict(activity).items()}  # fmt: skip


def _largest(values: list[float]) -> float:
    return max(values, key=_rank_of)


def _rank_of(value: float) -> float:
    """What is no number is worse than any."""
    return math.inf if math.isnan(value) else value


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
