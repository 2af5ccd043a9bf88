"""What a run says while it runs: metrics.jsonl, TensorBoard, a progress line.

metrics.jsonl is appended to and never rewritten. Every record carries `kind` ("train", "evaluation", "save",
"change"), `step` and `attempt`; after a resume the replayed steps appear again with the next attempt's number, so
nothing that was once reported is lost and a reader takes the last record of each step (`read_metrics`).

A full disk ends no run here: what a save that fails has filled it gives back. Records wait for that in main memory.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from data_pipeline.history import History
from data_pipeline.order import SampleOrder
from data_pipeline.steps import Steps
from model.accounting import flops_per_token
from pretrain.batching import steps_of
from pretrain.changes import told, unchanged
from pretrain.config import RunConfig
from pretrain.evaluate import Score
from pretrain.plan import Reading
from pretrain.resolve import SMALLEST_LOSS_SCALE
from pretrain.run_directory import RunDirectory, RunState, now
from pretrain.state import TrainState
from pretrain.writing import is_full


class MetricsLog:
    """Appends records to metrics.jsonl and scalars to TensorBoard. Only the first rank makes one."""

    def __init__(
        self,
        path: Path,
        tensorboard: Path | None,
        *,
        attempt: int,
        global_step: int,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.attempt = attempt
        self._say = say
        self._path = path
        _end_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._writer: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides from the plots what an earlier attempt wrote beyond the step resumed from.
            self._writer = SummaryWriter(str(tensorboard), purge_step=global_step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record, `values` in full precision, null where one is not finite (JSON has no infinity).

        Numbers also go to TensorBoard, as KIND/NAME or KIND/SOURCE/NAME.
        """
        finite = {name: None if _is_not_finite(value) else value for name, value in values.items()}
        record = {"kind": kind, "step": step, "attempt": self.attempt, **finite, "at": now()}
        waited = bool(self._unwritten)
        self._unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
        if not self._append() and not waited:
            self._say(f"warning: {self._path}: the disk is full: records wait in main memory until there is room")
        if self._writer is not None:
            prefix = f"{kind}/{values['source']}" if "source" in values else kind
            scalars = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self._plot(lambda writer: [writer.add_scalar(name, value, step) for name, value in scalars.items()])

    def close(self) -> None:
        if not self._append():
            lost = self._unwritten.count(b"\n")
            self._say(f"warning: {self._path}: the disk is full: {lost} of its records are lost")
        self._file.close()
        self._plot(lambda writer: writer.close())

    def _append(self) -> bool:
        """Write what is not yet written; False where the disk is full, perhaps within a line that goes on later."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not is_full(error):
                raise
        return not self._unwritten

    def _plot(self, draw: Callable[[Any], object]) -> None:
        """Have TensorBoard's writer do something. Its thread ends at the first error, and with it the plots."""
        if self._writer is None:
            return
        try:
            draw(self._writer)
        except OSError as error:
            if not is_full(error):
                raise
            self._writer = None
            self._say("warning: the disk is full: TensorBoard has no more of this attempt, metrics.jsonl has all of it")


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _end_torn_line(path: Path) -> None:
    """A kill can leave half a line at the end; begin the next record on a line of its own."""
    if path.exists() and path.stat().st_size > 0:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_metrics(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The records of one kind, in step order, the last attempt's where a step was run more than once.

    Evaluation records are told apart by their source as well. Half-written lines (a kill) are passed over.
    """
    latest: dict[tuple[int, str], dict[str, Any]] = {}
    for record in all_records(path):
        if record["kind"] == kind:
            latest[record["step"], record.get("source", "")] = record
    return [latest[key] for key in sorted(latest)]


def all_records(path: Path) -> list[dict[str, Any]]:
    """Every whole record, in the order written."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:  # empty, or cut short by a kill
            continue
    return records


def format_duration(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


class TrainingDivergedError(RuntimeError):
    """A loss or a gradient stopped being a finite number."""


class Report:
    """Everything a run says: metrics.jsonl, TensorBoard, status.json, a bar on a terminal or plain lines in a log.

    Rates count the seconds spent in training steps; evaluation and saving are left out, and so is an attempt's first
    step (compilation, first touches of memory). Only the active one (the first rank's) writes; every rank's watches
    for numbers that are not finite.
    """

    def __init__(self, directory: RunDirectory, config: RunConfig, *, active: bool) -> None:
        self._directory = directory
        self._config = config
        self._active = active
        self._attempt: int | None = None
        self._state = TrainState()
        self._log: MetricsLog | None = None
        self._bar: Progress | None = None
        self._samples = steps_of(config.batch)
        self._steps = 0
        self._warned_of_grace = False
        self._warned_of_status = False
        self._step_seconds = 0.0
        self._steady_seconds = 0.0
        self._steady_samples = 0
        self._flops_per_token = flops_per_token(config.model).causal

    def __enter__(self) -> Report:
        if self._active and sys.stderr.isatty():
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("train", total=self._config.schedule.max_steps, figures="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._attempt is not None:
            self._write_status("failed")
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.close()
            self._log = None  # it knows `say`, and who knows itself stays until Python looks, with the run's lock

    def say(self, message: str) -> None:
        """One line to the person who watches."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        elif self._active:
            print(message, file=sys.stderr, flush=True)

    def begins(
        self, attempt: int, state: TrainState, resumed_from: Path | None, order: SampleOrder, steps: Steps
    ) -> None:
        """The attempt is numbered and its first step is near: open the logs, say what will be read."""
        self._attempt, self._state, self._samples = attempt, state, steps
        if self._active:
            tensorboard = self._directory.tensorboard if self._config.logging.tensorboard else None
            self._log = MetricsLog(
                self._directory.metrics, tensorboard, attempt=attempt, global_step=state.global_step, say=self.say
            )
        if resumed_from is not None:
            self.say(f"resumed from {resumed_from}: step {state.global_step}, {state.tokens_seen:,} tokens seen")
        for line in Reading.of(self._config, order, steps).lines():
            self.say(line)
        self._write_status("running")

    def changed(self, state: TrainState, history: History, names: Sequence[str], order: SampleOrder) -> None:
        """Record and say what this attempt changes in the run before its first step, of what was asked for by name."""
        made = history.made_at(state.global_step)
        if self._log is not None and made is not None:
            self._log.write("change", state.global_step, {"changed": list(made.changed)})
        for line in (*told(made, order), *unchanged(names, history, made)):
            self.say(line)

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._step_seconds = time.perf_counter() - started
        self._steps += 1
        if self._steps > 1:
            self._steady_seconds += self._step_seconds

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

        Raises TrainingDivergedError where a number is not finite, unless it is a gradient that overflowed in fp16 and
        a smaller loss scale is left to try.
        """
        self._state = state
        tokens_per_second = tokens / self._step_seconds
        if self._log is not None:
            self._log.write(
                "train",
                state.global_step,
                {
                    "loss": loss,
                    **({"z_loss": z_loss} if self._config.loss.z_loss else {}),
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "tokens": state.tokens_seen,
                    "tokens_per_second": tokens_per_second,
                    "step_seconds": self._step_seconds,
                    "model_flops_per_second": self._flops_per_token * tokens_per_second,
                    "mfu": None,
                    **({} if loss_scale is None else {"loss_scale": loss_scale}),
                    "skipped_steps": skipped_steps,
                    "peak_memory_bytes": peak_memory_bytes(),
                },
            )
        if overflowed and loss_scale is not None and math.isfinite(loss):
            self._overflow(state.global_step, loss_scale, skipped_steps)
        elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise TrainingDivergedError(
                f"step {state.global_step}: loss {loss}, gradient norm {grad_norm}; nothing of this step was saved: "
                "resume from the last checkpoint with a lower schedule.peak_lr or a longer warm-up"
            )
        max_steps = self._config.schedule.max_steps
        samples = self._samples.samples(state.global_step - 1)
        if self._steps > 1:
            self._steady_samples += len(samples)
        first_pace = self._step_seconds / len(samples)
        seconds_a_sample = self._steady_seconds / self._steady_samples if self._steady_samples else first_pace
        samples_left = self._samples.samples_before(max_steps) - samples.stop
        figures = (
            f"loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  {tokens_per_second:,.0f} tokens/s  "
            f"ETA {format_duration(seconds_a_sample * samples_left)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, figures=figures)
        if state.global_step % self._config.logging.every_steps == 0 or state.global_step == max_steps:
            if self._bar is None:
                self.say(f"step {state.global_step}/{max_steps}  {figures}")
            self._write_status("running")

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

    def scores(self, state: TrainState, scores: Mapping[str, Score], seconds: float) -> None:
        """Record an evaluation, one record a source; all of them together tell what it took."""
        for source, score in scores.items():
            cost = {"seconds": seconds} if source == "all" else {}
            if self._log is not None:
                self._log.write("evaluation", state.global_step, {"source": source, **score.to_dict(), **cost})
        losses = "  ".join(f"{source} {score.loss:.4f}" for source, score in scores.items())
        tokens = scores["all"].tokens
        self.say(f"step {state.global_step}: held-out loss, {tokens:,} tokens in {seconds:.1f} s  {losses}")

    @property
    def step_seconds(self) -> float:
        """Of the last step, without evaluation and saving."""
        return self._step_seconds

    def save_ended(self, step: int, *, held_seconds: float, seconds: float, failure: str | None) -> None:
        """Record a save: for how long the loop stood still, how long it took, and why there is no checkpoint."""
        if self._log is not None:
            self._log.write("save", step, {"held_seconds": held_seconds, "whole_seconds": seconds, "failure": failure})

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

    def _write_status(self, state: RunState) -> None:
        if not self._active or self._attempt is None:
            return
        try:
            self._directory.write_status(
                state,
                attempt=self._attempt,
                global_step=self._state.global_step,
                max_steps=self._config.schedule.max_steps,
            )
        except OSError as error:
            if not is_full(error) and not self._warned_of_status:  # the one before stays
                self._warned_of_status = True
                self.say(f"warning: status.json is not written: {error}; the run goes on")


def peak_memory_bytes() -> int:
    """The most this process has held: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
