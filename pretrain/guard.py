"""What a run does about its health: alarms at the end of every step, and what the recipe says is to be done about them.

    guard.judge.allows(loss, norm)        before the update: may it be made?
    guard.judged(step, result)            behind it: the step's own alarms
    guard.monitor.raise_alarm(…)          whatever else is watched
    guard.act(state, checkpoints, engine) stop, go back, or go on
    guard.stops()                         stop at once, where what was found needs no step to tell

All ranks do the same, since all of them have the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain import left_out
from pretrain.alarm_batch import save_batch
from pretrain.checkpoint import read_json
from pretrain.health import Alarm, Condition, Monitor, TrainingDivergedError
from pretrain.rolling_back import go_back, record
from pretrain.spikes import Judge
from pretrain.state import Measured
from pretrain.stopping import Stopping, StopWantedError

if TYPE_CHECKING:
    from data_pipeline.loader import Batch
    from pretrain.batching import BatchPlan
    from pretrain.engine import TrainingEngine
    from pretrain.inputs import Inputs
    from pretrain.metrics import Report
    from pretrain.run_directory import RunDirectory
    from pretrain.saving import Checkpoints
    from pretrain.sharing import Sharing
    from pretrain.state import TrainState
    from pretrain.step import StepResult

# Of these the samples of the step are not to blame.
NOT_OF_THE_BATCH: frozenset[Condition] = frozenset({"skipped_steps", "rank_mismatch", "late_rank", "hang"})


class Guard:
    """The health of one attempt. Its methods are called on all ranks together."""

    def __init__(
        self, inputs: Inputs, directory: RunDirectory, sharing: Sharing, report: Report, resumed_from: Path | None
    ) -> None:
        """RunDirectoryError or CheckpointError where it cannot be told which steps the run leaves out."""
        self.table = inputs.config.health
        self._inputs = inputs
        self._directory = directory
        self._sharing = sharing
        self._report = report
        self.monitor = Monitor(self.table, report.alarm, report.say)
        recorded = sharing.ranks.on_first(lambda: left_out.read(directory.roll_backs))
        known = () if resumed_from is None else left_out.known_to(resumed_from)
        self.roll_backs = left_out.merged(recorded, known)
        if self.roll_backs != recorded:  # the run branches off from one that went back
            sharing.on_leaders(lambda: left_out.write(directory.roll_backs, self.roll_backs))
        self._go_on({} if resumed_from is None else read_json(resumed_from / "state.json"))

    def _go_on(self, stored: dict[str, Any]) -> None:
        """Know what was known when a checkpoint was saved, and what steps are left out since."""
        health = stored.get("health", {})
        self.monitor.goes_on(health.get("on", ()))
        self.judge = Judge(self.table, self.monitor, health)
        self._left_out = left_out.steps_left_out(self.roll_backs, self._inputs.reading)

    def lines(self) -> Iterator[str]:
        """What is to be said of earlier roll backs when a run goes on."""
        for one in self.roll_backs:
            if one.step in self._left_out:
                yield one.told()
            else:
                yield f"step {one.step} ({one.condition}) is no longer left out: it reads other samples by now"

    def described(self) -> dict[str, Any]:
        """What a checkpoint tells of it, under `health`."""
        on = {"on": sorted(self.monitor.on)} if self.monitor.on else {}
        gone_back = {"roll_backs": left_out.to_json(self.roll_backs)} if self.roll_backs else {}
        return {**self.judge.to_dict(), **on, **gone_back}

    def leaves_out(self, step: int) -> bool:
        """Whether a step, from 1, is not run."""
        return step in self._left_out

    def judged(self, step: int, result: StepResult) -> None:
        """Raise the alarms of a step's loss and gradient."""
        overflowed = result.overflowed and result.loss_scale is not None
        updated = not (result.overflowed or result.held)
        self.judge.judge(step, result.loss, result.grad_norm, updated=updated, overflowed=overflowed)

    def stops(self) -> None:
        """Before a step: TrainingDivergedError where an alarm since the last one says stop."""
        alarm = self.monitor.stopping
        if alarm is not None:
            raise TrainingDivergedError(f"{what_was_wrong(alarm)}; {remedy(alarm)}")

    def act(self, state: TrainState, checkpoints: Checkpoints, engine: TrainingEngine) -> Measured | None:
        """Do what this step's alarms ask for. None, or where the run goes on from an earlier step: what that measured;
        `state` is there by now.

        TrainingDivergedError: it stops.
        """
        alarms = self.monitor.take()
        if any(alarm.condition not in NOT_OF_THE_BATCH for alarm in alarms) and self.table.save_batch:
            self._save_batch(state.global_step)
        if not alarms or alarms[0].action not in ("stop", "roll_back"):
            return None
        alarm = alarms[0]
        if alarm.action == "stop":
            raise TrainingDivergedError(f"{what_was_wrong(alarm)}; {remedy(alarm)}")
        return self._go_back(alarm, state, checkpoints, engine)

    def _save_batch(self, step: int) -> None:
        if not self._sharing.ranks.is_first:
            return
        path = self._directory.alarms / f"step-{step:08d}.jsonl"
        try:
            save_batch(path, self._inputs, step)
        except (OSError, ValueError) as error:
            self._report.say(f"warning: step {step}: its documents are not saved: {error}")
        else:
            self._report.say(f"step {step}: its documents are in {path}")

    def _go_back(self, alarm: Alarm, state: TrainState, checkpoints: Checkpoints, engine: TrainingEngine) -> Measured:
        latest, most = alarm.step - self.table.roll_back_steps, self.table.roll_backs
        changes = self._inputs.reading.history.changes
        first = changes[-1].global_step if changes else 0  # samples and steps before it were of another kind
        reason = None
        if len(self.roll_backs) >= most:
            reason = f"the run has gone back {len(self.roll_backs)} times, health.roll_backs is {most}"
        elif any(one.step == alarm.step for one in self.roll_backs):
            reason = "the run has gone back for that step already"
        steps = range(first, latest + 1)
        gone = None if reason is not None else go_back(checkpoints, engine, self._sharing, steps, self._report.say)
        if gone is None:
            back = f"health.roll_back_steps {self.table.roll_back_steps}"
            reason = reason or (
                f"there is no healthy checkpoint of step {latest} or before ({back}) to go back to"
                f"{no_further(alarm.step, first)}"
                if latest > 0
                else f"{back} would go to before the first step"
            )
            raise TrainingDivergedError(f"{what_was_wrong(alarm)}; {reason}; {remedy(alarm)}")
        earlier, stored = gone
        made = left_out.RollBack.behind(alarm.step, alarm.condition, earlier.global_step, self._inputs.reading)
        made = self._sharing.ranks.broadcast(made)
        self.roll_backs = (*self.roll_backs, made)
        faults = record(self._directory, self._sharing, self.roll_backs)
        state.become(earlier)
        self._go_on(stored)
        self._report.rolled_back(state, {"alarm_step": made.step, "condition": made.condition, "left_out": [made.step]})
        self._report.say(f"went back to step {state.global_step}: step {made.step} is left out from now on")
        for fault in faults:
            self._report.say(f"warning: {fault}")
        return Measured.of(stored.get("measured", {}))


def no_further(step: int, change: int) -> str:
    """What else is to be said where an alarm at `step` finds nowhere to go back to, behind a change (0: none)."""
    if not change:
        return ""
    return (
        f", and no roll back goes to before step {change}, where the run was changed by name: "
        f"health.roll_back_steps {step - change} or less reaches back to there"
    )


def what_was_wrong(alarm: Alarm) -> str:
    if alarm.condition == "non_finite":
        return f"step {alarm.step}: {alarm.detail}"
    value = "" if alarm.value is None else f" {alarm.value:.6g}"
    limit = "" if alarm.threshold is None else f" is above {alarm.threshold:.6g}"
    return f"step {alarm.step}: {alarm.condition}{value}{limit} ({alarm.detail})"


def remedy(alarm: Alarm) -> str:
    """What a person can do about a run that an alarm has ended."""
    if alarm.condition == "non_finite":
        what = "with a lower schedule.peak_lr or a longer warm-up"
    else:
        what = f'when you know why, or go on all the same with health.{alarm.condition} = "warn"'
    return f"nothing of this step was saved: resume from the last checkpoint {what}"


def pass_over(batches: Iterator[Batch], plan: BatchPlan, stopping: Stopping) -> None:
    """Use up the data of a step that is left out. StopAgreedError, on all ranks, where one of them wants to stop."""
    try:
        for _ in range(plan.gradient_accumulation_steps):
            next(batches)
        wish = stopping.wish(before_step=True)
    except StopWantedError:
        wish = True
    (wishes,) = stopping.sum_over_ranks(wish)
    stopping.heed(wishes)
