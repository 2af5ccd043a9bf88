"""What a run says while it runs: to metrics.jsonl, to the sinks beside it, to a person, to status.json.

The numbers come together here: the loop's, the clock's, and what follows from both. Where they go is each a file:
records.py (metrics.jsonl), sinks.py (curves), progress.py (a bar, or lines in a log).
"""

from __future__ import annotations

import math
import resource
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from data_pipeline.history import History
from data_pipeline.order import SampleOrder
from data_pipeline.steps import Steps
from pretrain.batching import steps_of
from pretrain.changes import told, unchanged
from pretrain.clock import PARTS, STEP_PARTS, Clock
from pretrain.config import RunConfig, to_toml
from pretrain.efficiency import Efficiency
from pretrain.evaluate import Score
from pretrain.health import Alarm, TrainingDivergedError
from pretrain.plan import Reading
from pretrain.progress import Pace, ProgressView, Repeated, format_duration
from pretrain.records import MetricsLog, all_records, read_metrics
from pretrain.resolve import SMALLEST_LOSS_SCALE
from pretrain.run_directory import RunDirectory, RunState
from pretrain.sinks import Histogram, Sinks
from pretrain.state import TrainState
from pretrain.writing import is_full

__all__ = ["MetricsLog", "Report", "TrainingDivergedError", "all_records", "format_duration", "read_metrics"]


class Report:
    """Everything a run says. Rates count the seconds of training steps alone: neither evaluations and saves nor pauses.

    Only the active one (the first rank's) writes; every rank's watches for numbers that are not finite.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        *,
        active: bool,
        clock: Clock | None = None,
        efficiency: Efficiency | None = None,
    ) -> None:
        self._directory = directory
        self._config = config
        self._active = active
        self._clock = clock or Clock()
        self._efficiency = efficiency or Efficiency.of(config)
        self._attempt: int | None = None
        self._state = TrainState()
        self._log: MetricsLog | None = None
        self._view = ProgressView(config.schedule.max_steps, active=active)
        self._sinks = Sinks(self.say)
        self._samples = steps_of(config.batch)
        self._pace = Pace()
        self._heldout_tokens = 0
        self._evaluations = Repeated(config.evaluation.every_steps, self._guessed_evaluation)
        self._saves = Repeated(config.checkpoint.every_steps)
        self._other_before = self._evaluated_before = 0.0
        self._forward_seconds, self._forward_tokens = 0.0, 0
        self._warned_of_grace = False
        self._warned_of_status = False
        self._writing_status = threading.Lock()  # an alarm may come from another thread
        self._last_alarm: Alarm | None = None

    def __enter__(self) -> Report:
        self._view.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._attempt is not None:
            self._write_status("failed")
        if self._log is not None:
            spent = {f"{part}_seconds": seconds for part, seconds in self._clock.laps().items()}
            self._log.write("time", self._state.global_step, {"wall_seconds": self._clock.wall_seconds, **spent})
        self._sinks.close()
        self._view.close()
        if self._log is not None:
            self._log.close()
        # They know `say`, and who knows itself stays until Python looks, with the run's lock.
        self._log, self._sinks = None, Sinks(lambda message: None)
        self._evaluations.guess = lambda: 0.0

    def say(self, message: str) -> None:
        """One line to the person who watches."""
        self._view.say(message)

    def begins(
        self,
        attempt: int,
        state: TrainState,
        resumed_from: Path | None,
        order: SampleOrder,
        steps: Steps,
        *,
        heldout_tokens: int = 0,
        first_save_seconds: float = 0.0,
    ) -> None:
        """The attempt is numbered and its first step is near: open the logs, say what will be read.

        `heldout_tokens` of an evaluation, and what a save may hold up training, tell the time left while none of them
        was measured.
        """
        self._attempt, self._state, self._samples, self._heldout_tokens = attempt, state, steps, heldout_tokens
        self._saves.guess = lambda: first_save_seconds
        if self._active:
            self._log = MetricsLog(self._directory.metrics, attempt=attempt, say=self.say)
            self._open_sinks(state.global_step)
        if resumed_from is not None:
            self.say(f"resumed from {resumed_from}: step {state.global_step}, {state.tokens_seen:,} tokens seen")
        for line in (*Reading.of(self._config, order, steps).lines(), *self._efficiency.lines()):
            self.say(line)
        self._write_status("running")

    def _open_sinks(self, global_step: int) -> None:
        from pretrain.tensorboard_sink import TensorBoardSink
        from pretrain.wandb_sink import WandbSink

        recipe = dict(_flat(tomllib.loads(to_toml(self._config))))
        run, logging = self._directory, self._config.logging
        if logging.tensorboard:
            self._sinks.open(
                TensorBoardSink.name, lambda: TensorBoardSink(run.tensorboard, global_step=global_step, recipe=recipe)
            )
        mode = logging.wandb
        if mode != "off":
            self._sinks.open(
                WandbSink.name, lambda: WandbSink(run.path, mode, project=logging.wandb_project, recipe=recipe)
            )

    def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A record; its numbers also go to the sinks, as KIND/NAME or KIND/SOURCE/NAME."""
        if self._log is None:
            return
        self._log.write(kind, step, values)
        prefix = f"{kind}/{values['source']}" if "source" in values else kind
        scalars = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._sinks.scalars(step, scalars)

    def changed(self, state: TrainState, history: History, names: Sequence[str], order: SampleOrder) -> None:
        """Record and say what this attempt changes in the run before its first step, of what was asked for by name."""
        made = history.made_at(state.global_step)
        if made is not None:
            self._write("change", state.global_step, {"changed": list(made.changed)})
        for line in (*told(made, order), *unchanged(names, history, made)):
            self.say(line)

    def step(
        self,
        state: TrainState,
        *,
        loss: float,
        z_loss: float,
        tokens: int,
        lr: float,
        grad_norm: float,
        loss_scale: float | None,
        overflowed: bool,
        skipped_steps: int,
    ) -> None:
        """Record the step that `state` now counts, of `tokens` targets.

        Raises TrainingDivergedError where a gradient overflowed in fp16 and no smaller loss scale is left to try.
        """
        self._state = state
        seconds = self._clock.last_step
        tokens_per_second = tokens / seconds
        self._write(
            "train",
            state.global_step,
            {
                "loss": loss,
                **({"z_loss": z_loss} if self._config.loss.z_loss else {}),
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": state.tokens_seen,
                "tokens_per_second": tokens_per_second,
                "step_seconds": seconds,
                **{f"{part}_seconds": self._clock.step_seconds[part] for part in STEP_PARTS},
                **self._efficiency.of_rate(tokens_per_second),
                **({} if loss_scale is None else {"loss_scale": loss_scale}),
                "skipped_steps": skipped_steps,
                "peak_memory_bytes": peak_memory_bytes(),
            },
        )
        if overflowed and loss_scale is not None and math.isfinite(loss):
            self._overflow(state.global_step, loss_scale, skipped_steps)
        self._measure_pace(state, seconds, tokens)
        end = self._config.schedule.max_steps
        due = state.global_step % self._config.logging.every_steps == 0 or state.global_step == end
        if due or self._view.is_live:
            mfu = self._efficiency.mfu(tokens_per_second)
            figures = [
                f"loss {loss:.4f}",
                f"lr {lr:.2e}",
                f"grad norm {grad_norm:.3f}",
                f"{tokens_per_second:,.0f} tokens/s",
                *([] if mfu is None else [f"MFU {mfu:.1%}"]),
                f"ETA {format_duration(self.seconds_left)}",
                f"{peak_memory_bytes() / 1e9:.2f} GB",
            ]
            self._view.step(state.global_step, figures, due=due)
        if due:
            self._write_status("running")

    def alarm(self, alarm: Alarm) -> None:
        """Record what was found to be wrong. May be called from another thread than the loop's."""
        self._last_alarm = alarm
        self._write("alarm", alarm.step, alarm.to_dict())
        self._write_status("running")

    def observation(self, step: int, values: Mapping[str, Any]) -> None:
        """Record what a step's look at itself found."""
        self._write("observation", step, values)

    def left_out(self, state: TrainState, samples: range) -> None:
        """Record a step that was not run, for an alarm in an earlier pass over it."""
        self._state = state
        self._write("left_out", state.global_step, {"first_sample": samples.start, "samples": len(samples)})
        self.say(
            f"step {state.global_step}: left out since an alarm: its samples {samples.start} to {samples.stop - 1} "
            "are used up, and nothing is learnt from them"
        )

    def rolled_back(self, state: TrainState, record: Mapping[str, Any]) -> None:
        """Record that the run goes on from `state` again, and what steps it will leave out."""
        self._state = state
        self._evaluations.done_step = self._saves.done_step = state.global_step
        self._write("roll_back", state.global_step, record)
        self._sinks.goes_back(state.global_step)
        self._write_status("running")

    def _measure_pace(self, state: TrainState, seconds: float, tokens: int) -> None:
        """What steps cost, with what was done between them; and forward passes, which evaluations are made of."""
        other, first = self._clock.seconds["other"], not self._forward_tokens
        between = other - self._other_before - self._clock.step_seconds["other"]
        self._other_before = other
        self._pace.add(seconds + max(between, 0.0), len(self._samples.samples(state.global_step - 1)))
        forward = self._clock.step_seconds["forward"]
        # Of the first step alone while there is no other: it is slower than any later one.
        self._forward_seconds = forward if self._pace.steps <= 2 else self._forward_seconds + forward
        self._forward_tokens = tokens if self._pace.steps <= 2 or first else self._forward_tokens + tokens

    def _guessed_evaluation(self) -> float:
        return self._heldout_tokens * self._forward_seconds / max(self._forward_tokens, 1)

    @property
    def seconds_left(self) -> float:
        """Until the last step is evaluated and saved, as far as that can be told now."""
        step, end = self._state.global_step, self._config.schedule.max_steps
        samples = self._samples.samples_before(end) - self._samples.samples_before(step)
        return self._pace.seconds_left(samples, step, end, (self._evaluations, self._saves))

    def _overflow(self, step: int, loss_scale: float, skipped_steps: int) -> None:
        """Said aloud: usual at first and behind each growth of the scale. At the smallest scale it is the end."""
        if loss_scale <= SMALLEST_LOSS_SCALE:
            raise TrainingDivergedError(
                f"step {step}: a gradient overflows fp16 even at the smallest loss scale, {loss_scale:g}; nothing of "
                "this step was saved: resume from the last checkpoint with a lower schedule.peak_lr or a longer warm-up"
            )
        self.say(
            f"warning: step {step}: a gradient overflowed in fp16, so the step updates nothing; its data and its place "
            f"in the schedule are used up ({skipped_steps} such so far); loss scale {loss_scale:g}, now halved"
        )

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """How weights and gradients are spread: for the sinks alone."""
        if histograms:
            self._sinks.histograms(step, histograms)

    def scores(
        self, state: TrainState, scores: Mapping[str, Score], seconds: float, texts: Mapping[str, str] | None = None
    ) -> None:
        """Record an evaluation, one record a source; all of them together tell what it took.

        `texts`: what the model wrote behind the recipe's prompts.
        """
        evaluating = self._clock.seconds["evaluation"]
        self._evaluations.was_done(state.global_step, evaluating - self._evaluated_before)
        self._evaluated_before = evaluating
        for source, score in scores.items():
            cost = {"seconds": seconds} if source == "all" else {}
            self._write("evaluation", state.global_step, {"source": source, **score.to_dict(), **cost})
        losses = "  ".join(f"{source} {score.loss:.4f}" for source, score in scores.items())
        tokens = scores["all"].tokens
        self.say(f"step {state.global_step}: held-out loss, {tokens:,} tokens in {seconds:.1f} s  {losses}")
        if texts:
            written = [{"prompt": prompt, "text": text} for prompt, text in texts.items()]
            self._write("samples", state.global_step, {"texts": written})
            self._sinks.texts(state.global_step, {f"samples/{prompt}": text for prompt, text in texts.items()})

    @property
    def step_seconds(self) -> float:
        """Of the last step, without evaluation and saving."""
        return self._clock.last_step

    def save_ended(self, step: int, *, held_seconds: float, seconds: float, failure: str | None) -> None:
        """Record a save: for how long the loop stood still, how long it took, and why there is no checkpoint."""
        self._saves.was_done(step, held_seconds)
        self._write("save", step, {"held_seconds": held_seconds, "whole_seconds": seconds, "failure": failure})

    def saved(self, seconds: float, grace_seconds: float | None, *, waits_for_another: bool = False) -> None:
        """Warn once where a save takes more than half of what a rank has behind a signal before it is killed.

        `waits_for_another`: the save that a stop makes may first have to wait for one that is being written.
        """
        needed = 2 * seconds if waits_for_another else seconds
        if grace_seconds is not None and needed > grace_seconds / 2 and not self._warned_of_grace:
            self._warned_of_grace = True
            also = ", which a stop may have to await and then to do again" if waits_for_another else ""
            self.say(
                f"warning: saving took {seconds:.1f} s{also}, more than half of the {grace_seconds:g} s between a "
                f"signal and the end: rather stop by the file {self._directory.stop_file} or by `python -m launch "
                "run`, which have no such limit, or have the signal sent earlier and say so with --grace-seconds"
            )

    def ends(self, outcome: Literal["stopped", "finished"], state: TrainState, message: str) -> None:
        self._write_status(outcome)
        self.say(f"step {state.global_step}: {message}; peak memory {peak_memory_bytes() / 1e9:.2f} GB on this rank")
        self.say(f"time: {time_line(self._clock)}")

    def _write_status(self, state: RunState) -> None:
        if not self._active or self._attempt is None:
            return
        with self._writing_status:
            self._replace_status(state, self._attempt)

    def _replace_status(self, state: RunState, attempt: int) -> None:
        try:
            self._directory.write_status(
                state,
                attempt=attempt,
                global_step=self._state.global_step,
                max_steps=self._config.schedule.max_steps,
                seconds_left=round(self.seconds_left, 3) if state == "running" and self._pace.steps else None,
                alarm=None if self._last_alarm is None else self._last_alarm.told(),
            )
        except OSError as error:
            if not is_full(error) and not self._warned_of_status:  # the one before stays
                self._warned_of_status = True
                self.say(f"warning: status.json is not written: {error}; the run goes on")


def time_line(clock: Clock) -> str:
    """The wall and its parts, those below a thousandth of it left out: 3 min 05 s = data 0.2 % + forward 31.0 % …"""
    spent, wall = clock.laps(), clock.wall_seconds
    shares = [f"{part} {spent[part] / wall:.1%}" for part in PARTS if spent[part] >= wall / 1000]
    return f"{format_duration(wall)} = {' + '.join(shares)}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, bool | float | str]]:
    """The values of nested tables by their whole names; lists as text."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def peak_memory_bytes() -> int:
    """The most this process has held: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
