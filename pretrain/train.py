"""The loop: from the first step, or behind a checkpoint, to the last one or a wish to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from data_pipeline.loader import Batch, Loader, evaluation_size
from data_pipeline.stream import TokenStream
from model.accounting import parameter_count
from model.transformer import Transformer
from pretrain.acceleration import compiles, multiply_in_tf32
from pretrain.alive import SignOfLife
from pretrain.attempt import agree, begin
from pretrain.checkpoint import fill, load_weights, measured_at
from pretrain.clock import Clock
from pretrain.config import RunConfig
from pretrain.efficiency import Efficiency
from pretrain.engine import TIMEOUT_MINUTES, TrainingEngine, process_group
from pretrain.evaluate import Score, evaluate, isolates_documents
from pretrain.guard import Guard, pass_over
from pretrain.health import TrainingDivergedError
from pretrain.histograms import Spreads
from pretrain.inputs import Inputs, refuse_devices
from pretrain.keeper import Kept
from pretrain.metrics import Report
from pretrain.observing import Observer
from pretrain.receipts import Receipt
from pretrain.resolve import rounding_warnings, zero_stage
from pretrain.retention import Retention
from pretrain.run_directory import RunDirectory
from pretrain.runtime import (
    Ranks,
    auto_compute,
    is_lost_peer,
    one_ranks_fault,
    pick_device,
    precision_note,
    seed_everything,
)
from pretrain.saving import Checkpoints, SaveResult
from pretrain.schedule import jump, learning_rate
from pretrain.state import Measured, TrainState
from pretrain.step import train_step
from pretrain.stopping import (
    WRITTEN_BYTES_PER_SECOND,
    Poll,
    StopAgreedError,
    Stopping,
    StopRequest,
    first_reason,
    heeding,
)
from pretrain.training_samples import TrainingSamples
from pretrain.wandb_sink import refuse_without_wandb
from pretrain.watchdog import watching_for_hangs

Outcome = Literal["finished", "stopped"]
T = TypeVar("T")


def train(
    config: RunConfig,
    path: Path,
    ranks: Ranks,
    *,
    resume: str = "auto",
    stop: StopRequest | None = None,
    grace_seconds: float | None = None,
    timeout_minutes: float = TIMEOUT_MINUTES,
    command: str = "the same command",
    kept: Kept | None = None,
    changes: Sequence[str] = (),
) -> Outcome:
    """Train until max_steps, or until a rank is asked to stop: by a signal, the stop file, or a deadline in `stop`.

    Then the last whole step is saved. `grace_seconds` is what a rank has behind a signal before it is killed, None for
    no limit: slow saves are warned of. `timeout_minutes` is how long a rank waits for the others. `command` is what
    goes on with this run, as its receipts tell it; `kept`: this rank's keeper, where `launch run` started it.
    """
    device = pick_device(ranks.local_rank, ranks.accelerator)
    clock = Clock(device)
    with one_ranks_fault() if ranks.local_rank == 0 else nullcontext():  # each machine reads files of its own
        inputs = Inputs.check(config, ranks.world_size, auto_compute(device))
    samples = TrainingSamples(config, inputs.codec)
    refuse_without_wandb(config.logging.wandb)
    compiled = compiles(config, zero_stage(inputs.deepspeed), device)
    multiply_in_tf32(config, inputs.compute, device)
    schedule = config.schedule
    directory = RunDirectory(path)
    if stop is None:
        stop = StopRequest(directory.stop_file)
        stop.install(speaks=ranks.is_first)
    seed_everything(config.seed)
    with ExitStack() as stack:
        stack.enter_context(clock)
        stack.enter_context(process_group(device, timeout_minutes))
        stop.begin()
        try:
            refuse_devices(ranks, inputs.compute)
        except RuntimeError as error:
            if stop.reason is None or not is_lost_peer(error):
                raise
            return "stopped"  # nothing has begun: the signal met another rank before it could note it, and ended that
        sharing = agree(path, ranks, inputs, resume, changes)
        efficiency = Efficiency.of(config, device, inputs.compute, ranks.world_size)
        report = stack.enter_context(
            Report(directory, config, active=ranks.is_first, clock=clock, efficiency=efficiency)
        )
        attempt = begin(directory, sharing, inputs, resume, changes, report.say, timeout_minutes)
        number, resumed_from, shelf = attempt.number, attempt.resumed_from, attempt.shelf
        inputs = inputs.behind(attempt.history)
        if kept is not None:
            kept.begins(number, directory.log(number, ranks.rank))
        receipt = Receipt(directory, number, ranks.rank, ranks.world_size, command)
        stack.enter_context(receipt.of_failure())
        life = SignOfLife(directory.sign(ranks.rank), attempt=number, rank=ranks.rank, world_size=ranks.world_size)
        stack.enter_context(life)
        if attempt.initial is not None:
            report.say(f"initial weights from {attempt.initial}")
        for note in (precision_note(config.precision, device), compiled.note, *rounding_warnings(config)):
            if note is not None:
                report.say(note)
        engine = build_engine(inputs, ranks, device, attempt.initial)
        asynchronous = config.checkpoint.asynchronous

        def save_ended(result: SaveResult) -> None:
            report.save_ended(
                result.step, held_seconds=result.held_seconds, seconds=result.seconds, failure=result.failure
            )
            if result.failure is not None:
                return
            receipt.save_seconds = result.seconds
            if stop.deadline is not None:
                stop.deadline.measured_save(result.seconds)
            report.saved(result.seconds, grace_seconds, waits_for_another=asynchronous)

        checkpoints = Checkpoints(
            directory.checkpoints, Retention.of(config.checkpoint), ranks, report.say,
            asynchronous=asynchronous, on_end=save_ended, shelf=shelf,
        )  # fmt: skip
        stack.callback(checkpoints.close)
        if stop.deadline is not None:
            stop.deadline.save_in_flight = lambda: checkpoints.in_flight
        state = TrainState() if resumed_from is None else checkpoints.load(resumed_from, engine)
        guard = Guard(inputs, directory, sharing, report, resumed_from)
        spreads = Spreads(engine, config.logging.histogram_every_steps)
        observer = Observer(engine, config.health, guard.monitor, report.observation)
        stack.enter_context(watching_for_hangs(life, engine, directory.alarms, guard.monitor))
        unscored = resumed_from is not None and lacks_evaluation(resumed_from, state, config)
        measured = None if resumed_from is None else Measured.of(measured_at(resumed_from))  # of the last whole step
        if shelf is not None:
            shelf.clear()
        receipt.state = life.state = state
        reader = stack.enter_context(ExitStack())

        def batches_from_here() -> Iterator[Batch]:
            """What is read from where `state` is on; nothing more of what was read before."""
            reader.close()
            fresh = heeding(reader.enter_context(loader(inputs, ranks, state)), stop)
            return life.reading(observer.reading(fresh))

        batches = batches_from_here()
        stopping = Stopping(stop, engine.sum_over_ranks)
        report.begins(
            number, state, resumed_from, inputs.order, inputs.steps,
            heldout_tokens=heldout_tokens(inputs),
            first_save_seconds=0.0 if asynchronous else 16 * parameter_count(config.model) / WRITTEN_BYTES_PER_SECOND,
        )  # fmt: skip
        if resumed_from is not None:
            report.changed(state, attempt.history, changes, inputs.order)
        for line in guard.lines():
            report.say(line)
        jumped = None if resumed_from is None else jump(state.global_step, engine.learning_rate, schedule)
        if jumped is not None:
            report.say(jumped)
        if state.global_step >= schedule.max_steps:
            report.say(f"step {state.global_step}: schedule.max_steps = {schedule.max_steps} is reached")

        stack.enter_context(one_ranks_fault())
        first_step, steps = state.global_step, inputs.steps
        try:
            if unscored:
                with clock.during("evaluation"):
                    scores, seconds = timed(lambda: heldout_scores(engine, inputs, ranks, stopping, life.goes_on))
                    texts = samples.write(engine.transformer)
                report.scores(state, scores, seconds, texts)
            while state.global_step < schedule.max_steps:
                lr = learning_rate(state.global_step, schedule)
                plan = inputs.plan.of_step(state.global_step, steps)
                if guard.leaves_out(state.global_step + 1):
                    pass_over(batches, plan, stopping)
                    state.advance(plan, 0)
                    report.left_out(state, steps.samples(state.global_step - 1))
                    measured = replace(measured or Measured.of({}), heldout_loss=None)
                    stop_wanted = False
                else:
                    observer.before(state.global_step + 1)
                    guard.stops()
                    with clock.step(), spreads.seen(state.global_step + 1):
                        result = train_step(
                            engine, batches, plan, lr, stopping=stopping, allows=guard.judge.allows, clock=clock
                        )
                    state.advance(plan, result.tokens)
                    report.step(
                        state, loss=result.loss, z_loss=result.z_loss, tokens=result.tokens, lr=lr,
                        grad_norm=result.grad_norm, loss_scale=result.loss_scale, overflowed=result.overflowed,
                        skipped_steps=engine.skipped_steps,
                    )  # fmt: skip
                    if spreads.due(state.global_step):
                        report.histograms(state.global_step, spreads.take())
                    guard.judged(state.global_step, result)
                    observer.after(
                        state.global_step, own_seconds=clock.step_seconds["data"] + clock.step_seconds["forward"],
                        step_seconds=clock.last_step, updated=not (result.overflowed or result.held),
                    )  # fmt: skip
                    with clock.during("save"):
                        earlier = guard.act(state, checkpoints, engine)
                    if earlier is not None:
                        measured, batches = earlier, batches_from_here()
                        continue
                    alarms = tuple(guard.monitor.harm)
                    measured = Measured(result.loss, result.grad_norm, result.overflowed or result.held, alarms=alarms)
                    stop_wanted = result.stop_wanted
                last = state.global_step == schedule.max_steps
                with clock.during("save"):
                    if saves_before_the_end(state, config):
                        checkpoints.make_room(engine)
                    checkpoints.poll()
                if stop.deadline is not None:
                    stop.deadline.measured_step(report.step_seconds)
                if stop_wanted and not last:
                    raise StopAgreedError
                if due(state, config.evaluation.every_steps) or last:
                    life.does("evaluates")
                    with clock.during("evaluation"):
                        scores, seconds = timed(lambda: heldout_scores(engine, inputs, ranks, stopping, life.goes_on))
                        texts = samples.write(engine.transformer)
                    report.scores(state, scores, seconds, texts)
                    measured = replace(measured, heldout_loss=scores["all"].loss)
                if last:
                    life.does("saves")
                    with clock.during("save"):
                        checkpoints.save_last(engine, state, described(inputs, guard), measured)
                elif due(state, config.checkpoint.every_steps):
                    life.does("saves")
                    with clock.during("save"):
                        checkpoints.save(engine, state, described(inputs, guard), measured)
        except StopAgreedError:
            life.does("saves")
            reason = first_reason(ranks.gather(stop.reason))
            if measured is not None:
                measured = replace(measured, alarms=tuple(guard.monitor.harm))
                with clock.during("save"):
                    checkpoints.save_last(engine, state, described(inputs, guard), measured)
            when = " before a step was made" if state.global_step == first_step else ""
            report.ends("stopped", state, f"stopped by {reason}{when}; resume with {command}")
            receipt.write("stopped", reason)
            receipt.bring(sharing)
            return "stopped"
        except TrainingDivergedError:  # on all ranks
            checkpoints.finish()
            raise
        report.ends("finished", state, f"finished: {state.tokens_seen:,} tokens")
        receipt.write("finished", None)
        receipt.bring(sharing)
        return "finished"


def build_engine(inputs: Inputs, ranks: Ranks, device: torch.device, initial: Path | None = None) -> TrainingEngine:
    """The model inside a DeepSpeed engine, its weights equal on all ranks: drawn with one seed, or a checkpoint's."""
    config = inputs.config
    model = Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))
    if initial is not None:
        fill(model, load_weights(initial)[1], initial)
    model.activation_checkpointing = config.memory.activation_checkpointing
    model.loss_chunk_tokens = config.memory.loss_chunk_tokens
    model.z_loss = config.loss.z_loss
    if compiles(config, zero_stage(inputs.deepspeed), device).on:
        model.compile_blocks()
    return TrainingEngine(model, config, inputs.deepspeed, ranks, device)


def described(inputs: Inputs, guard: Guard) -> dict[str, Any]:
    """What a checkpoint tells beside its state: whose it is, and how the run is."""
    return {**inputs.identity, "health": guard.described()}


def lacks_evaluation(checkpoint: Path, state: TrainState, config: RunConfig) -> bool:
    """Whether the run was stopped in the evaluation that was due behind this checkpoint's step."""
    wanted = due(state, config.evaluation.every_steps) or state.global_step >= config.schedule.max_steps
    return wanted and measured_at(checkpoint).get("heldout_loss", 0.0) is None


def saves_before_the_end(state: TrainState, config: RunConfig) -> bool:
    """Whether a later step than this one is saved that is not the last."""
    every = config.checkpoint.every_steps
    return (state.global_step // every + 1) * every < config.schedule.max_steps


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What `function` gives, and the seconds it took."""
    started = time.perf_counter()
    return function(), time.perf_counter() - started


def due(state: TrainState, every_steps: int) -> bool:
    return state.global_step % every_steps == 0


def heldout_scores(
    engine: TrainingEngine,
    inputs: Inputs,
    ranks: Ranks,
    stopping: Stopping | None = None,
    goes_on: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """The validation split of every source, scored by all ranks together; `goes_on` is called as they get on.

    StopAgreedError: one wants to stop.
    """
    poll = Poll(stopping or Stopping(None, engine.sum_over_ranks))

    def on_tokens(done: int, total: int) -> None:
        goes_on()
        poll()

    return evaluate(
        engine.forward_only,
        {name: source.splits["validation"] for name, source in inputs.collection.sources.items()},
        seq_len=inputs.plan.seq_len,
        batch_size=inputs.plan.micro_batch_size,
        eos_id=inputs.collection.eos_id,
        vocab_size=inputs.config.model.vocab_size,
        max_tokens=inputs.config.evaluation.max_tokens,
        isolated=isolates_documents(inputs.config.data.packing),
        ranks=ranks,
        device=engine.device,
        on_tokens=on_tokens,
    )


def heldout_tokens(inputs: Inputs) -> int:
    """How many an evaluation scores."""
    splits = (source.splits["validation"] for source in inputs.collection.sources.values())
    seq_len, most = inputs.plan.seq_len, inputs.config.evaluation.max_tokens
    return sum(evaluation_size(one.tokens, one.text_bytes, seq_len, most).tokens for one in splits if one.tokens)


def loader(inputs: Inputs, ranks: Ranks, state: TrainState) -> Loader:
    """This rank's micro-batches, from the first sample that `state` has not consumed."""
    return Loader(
        inputs.order,
        {name: TokenStream(source.splits["train"]) for name, source in inputs.collection.sources.items()},
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch_size=inputs.plan.micro_batch_size,
        gradient_accumulation_steps=inputs.plan.gradient_accumulation_steps,
        first_sample=state.consumed_samples,
        eos_id=inputs.collection.eos_id,
        plan=inputs.packed,
        steps=inputs.steps,
    )
