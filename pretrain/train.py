"""The loop, and what stands before it: check, build, resume, train."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from data_pipeline.history import History
from data_pipeline.loader import Batch, Loader
from data_pipeline.order import SampleOrder
from data_pipeline.packing_plan import PackingPlan, read_order
from data_pipeline.shards import Collection, DataFormatError, open_collection
from data_pipeline.steps import Steps
from data_pipeline.stream import TokenStream
from model.loss import IGNORED
from model.transformer import Transformer
from pretrain.agreement import facts, facts_of_weights, refuse_differences
from pretrain.alive import SignOfLife
from pretrain.batching import BatchPlan, steps_of
from pretrain.changes import after, steps_of_identity
from pretrain.checkpoint import (
    fill,
    find,
    load_weights,
    measured_at,
    refuse_other_model,
    refuse_unhealthy,
    tokenizer_of,
    verify,
)
from pretrain.config import Compute, RecipeError, RunConfig, from_root, new_values, to_toml
from pretrain.engine import (
    TIMEOUT_MINUTES,
    TrainingEngine,
    device_refusal,
    process_group,
    read_json,
    resolve,
    rounding_warnings,
)
from pretrain.evaluate import Score, evaluate, isolates_documents
from pretrain.keeper import Kept
from pretrain.metrics import Report, TrainingDivergedError
from pretrain.parts import Shelf, named
from pretrain.receipts import Receipt
from pretrain.resuming import choose, clear_leftovers, converted_from, refuse_other_run, with_defaults
from pretrain.retention import Retention
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError, write_text
from pretrain.runtime import (
    Ranks,
    auto_compute,
    is_lost_peer,
    one_ranks_fault,
    pick_device,
    precision_note,
    refuse_without_compiler,
    seed_everything,
)
from pretrain.saving import Checkpoints, SaveResult
from pretrain.schedule import jump, learning_rate
from pretrain.sharing import clear_marks, discover, drop_if_empty
from pretrain.state import Measured, TrainState
from pretrain.stopping import (
    Poll,
    StopAgreedError,
    Stopping,
    StopRequest,
    StopWantedError,
    first_reason,
    heeding,
)
from tokenizer.codec import Codec

Outcome = Literal["finished", "stopped"]


# ---------------------------------------------------------------- one step


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured, over all ranks."""

    loss: float  # cross-entropy in nats per token: the mean over the step's tokens, before the update
    z_loss: float  # what loss.z_loss added to it
    tokens: int  # targets learnt from
    grad_norm: float  # of the whole gradient, before clipping
    loss_scale: float | None  # of that gradient while it was computed; None where it has none (bf16, fp32)
    overflowed: bool  # the gradient is not finite, so no weight was updated
    stop_wanted: bool  # by any rank


def train_step(
    engine: TrainingEngine,
    batches: Iterator[Batch],
    plan: BatchPlan,
    lr: float,
    *,
    stopping: Stopping | None = None,
) -> StepResult:
    """Accumulate one global batch and update the weights once.

    The gradient is that of (sum of all token losses) / (number of all target tokens), over micro-steps and ranks
    together, however the tokens are spread over them. DeepSpeed divides by the accumulation steps and averages over
    the ranks, so each micro-loss is scaled up by both before it goes in.

    Raises StopAgreedError, on all ranks, where one of them wants to stop before the update: the engine is then as
    behind the last whole step.
    """
    stopping = stopping or Stopping(None, engine.sum_over_ranks)
    micro_batches = []
    try:
        micro_batches = [next(batches) for _ in range(plan.gradient_accumulation_steps)]
        wish = stopping.wish(before_step=True)
    except StopWantedError:
        wish = True
    tokens, wishes = engine.sum_over_ranks(sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches), wish)
    stopping.heed(wishes)
    engine.set_global_batch_size(plan.global_batch_size)
    scale = plan.gradient_accumulation_steps * plan.world_size / tokens
    loss_sum, cross_entropy_sum = torch.zeros(2, dtype=torch.float64, device=engine.device).unbind()
    for number, batch in enumerate(micro_batches, 1):
        loss = engine.forward(batch.inputs, batch.targets, batch.documents)
        engine.backward(loss.loss_sum * scale)
        if number == len(micro_batches):
            engine.set_learning_rate(lr)  # not before: a checkpoint tells the rate of the last whole step
        engine.step()
        loss_sum += loss.loss_sum.detach()
        cross_entropy_sum += loss.cross_entropy_sum
        if number < len(micro_batches):
            try:
                stopping.between_micro_steps()
            except StopAgreedError:
                engine.drop_accumulation()
                raise
    total, cross_entropy, wishes = engine.sum_over_ranks(loss_sum, cross_entropy_sum, stopping.wish())
    return StepResult(
        loss=cross_entropy / tokens,
        z_loss=(total - cross_entropy) / tokens,
        tokens=int(tokens),
        grad_norm=engine.gradient_norm(),
        loss_scale=engine.loss_scale,
        overflowed=engine.overflowed,
        stop_wanted=wishes > 0,
    )


# ---------------------------------------------------------------- before the first step


@dataclass(frozen=True)
class Inputs:
    """What a run reads and counts, checked before any process group exists."""

    config: RunConfig
    compute: Compute  # what precision.compute is on this device
    plan: BatchPlan  # of the steps behind the batch ramp, where there is one
    deepspeed: dict[str, Any]
    collection: Collection
    codec: Codec
    order: SampleOrder
    packed: PackingPlan | None
    identity: dict[str, Any]  # what a checkpoint must share with the run that resumes from it

    @property
    def steps(self) -> Steps:
        """Which samples each step reads, those before the last change included."""
        return steps_of_identity(self.identity)

    def behind(self, history: History) -> Inputs:
        """What a run reads and counts that goes on behind these changes: its order begins with the last of them."""
        identity = after(self.identity, history)
        order = SampleOrder.of(identity["order"]) if "begin" in identity["order"] else self.order
        return replace(self, order=order, identity=identity)

    @classmethod
    def check(cls, config: RunConfig, world_size: int, auto: Compute = "bf16") -> Inputs:
        """Open all that one process can open; precision.compute = "auto" stands for `auto`.

        Raises RecipeError, DataFormatError or TokenizerError: one clear line.
        """
        compute = config.precision.compute_where(auto)
        plan = BatchPlan.from_config(config, world_size)
        deepspeed = resolve(read_json(from_root(config.deepspeed.config)), config, world_size, auto)
        collection = open_collection(from_root(config.data.path))
        codec = Codec.load(from_root(config.data.tokenizer))
        refuse_other_tokenizer(config, collection, codec)
        refuse_nothing_held_out(config, collection)
        order, packed = sample_order(config, collection)
        identity: dict[str, Any] = {
            "model": config.model.to_dict(),
            "order": {**order.describe(), "content_sha256": collection.content_sha256},
            "global_batch_size": config.batch.global_batch_size,
            **({"batch_ramp": [list(part) for part in steps_of(config.batch).ramp]} if config.batch.ramp else {}),
            "data": {
                "path": config.data.path,
                "stages": [stage.model_dump() for stage in config.data.stages],
                "streams": collection.streams,
                "tokenizer": codec.fingerprint,
            },
            "world_size": world_size,
            "zero_stage": deepspeed["zero_optimization"]["stage"],
            "precision": {
                "compute": compute,
                "master": config.precision.master,
                "accumulate": config.precision.accumulate,
            },
        }
        for table, values in optimizer_identity(config).items():
            identity[table] = {**identity.get(table, {}), **values}
        return cls(config, compute, plan, deepspeed, collection, codec, order, packed, identity)


def optimizer_identity(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What a checkpoint's optimizer state depends on, by table of the recipe; without what is the default.

    Earlier versions wrote none of it (`checkpoint.with_defaults`): they had nothing but the defaults.
    """
    chosen: dict[str, dict[str, Any]] = {
        "precision": {"moments": config.precision.moments_dtype, "compensation": config.precision.compensation},
        "optimizer": {"name": config.optimizer.name, "decay_embeddings": config.optimizer.decay_embeddings},
    }
    usual = with_defaults({"precision": {"master": config.precision.master}})
    return {
        table: kept
        for table, values in chosen.items()
        if (kept := {key: value for key, value in values.items() if usual[table][key] != value})
    }


def refuse_other_tokenizer(config: RunConfig, collection: Collection, codec: Codec) -> None:
    """Raises RecipeError where shards, tokenizer and model don't belong together."""
    if codec.fingerprint != collection.fingerprint:
        raise RecipeError(
            f"{config.data.path} was written with the tokenizer {collection.fingerprint[:12]}, {config.data.tokenizer} "
            f"is {codec.fingerprint[:12]}: set data.tokenizer = {config.data.path}/tokenizer, or prepare the data again"
        )
    if config.model.vocab_size < codec.vocab_size:
        raise RecipeError(
            f"model.vocab_size = {config.model.vocab_size}, but {config.data.tokenizer} gives ids up to "
            f"{codec.vocab_size - 1}: set model.vocab_size to {codec.vocab_size} or more"
        )


def refuse_nothing_held_out(config: RunConfig, collection: Collection) -> None:
    """Raises RecipeError where there is nothing to evaluate on."""
    if not any(source.splits["validation"].tokens for source in collection.sources.values()):
        documents = sum(source.splits["train"].documents for source in collection.sources.values())
        raise RecipeError(
            f"{config.data.path} holds {documents:,} documents to train on and none to evaluate on: "
            "prepare it again with a larger --validation-fraction"
        )


def sample_order(config: RunConfig, collection: Collection) -> tuple[SampleOrder, PackingPlan | None]:
    """The order in which this recipe reads this collection, and the rows it goes over if they are packed.

    Raises RecipeError where the two don't fit, DataFormatError where the plan is missing, damaged or of other data.
    """
    seq_len = config.model.seq_len
    stages = History().stages([(stage.from_tokens, stage.weights) for stage in config.data.stages], seq_len)
    try:
        return read_order(collection, packing=config.data.packing, seed=config.seed, seq_len=seq_len, stages=stages)
    except DataFormatError:
        raise
    except ValueError as error:
        raise RecipeError(f"{config.data.path}: {error}") from None


def initial_weights(inputs: Inputs) -> Path | None:
    """The checkpoint whose weights a new run starts from; None where they are drawn.

    Raises CheckpointError where its files are damaged, its model or its tokenizer another one.
    """
    if inputs.config.initial_weights is None:
        return None
    path = find(from_root(inputs.config.initial_weights))
    refuse_other_model(path, inputs.config.model)
    verify(path)
    refuse_unhealthy(path)
    codec = Codec.load(tokenizer_of(path))
    if codec.fingerprint != inputs.codec.fingerprint:
        raise CheckpointError(
            f"initial_weights {path} go with the tokenizer {codec.fingerprint[:12]}, {inputs.config.data.tokenizer} is "
            f"{inputs.codec.fingerprint[:12]}: prepare the data with --tokenizer {tokenizer_of(path)}"
        )
    return path


def refuse_devices(ranks: Ranks, compute: Compute) -> None:
    """Raises RecipeError, on every rank, where a rank's device cannot train in `compute`, or "auto" is two things."""
    refusals, computes = zip(*ranks.gather((device_refusal(compute), compute)), strict=True)
    reason = next(filter(None, refusals), None)
    if reason is not None:
        raise RecipeError(reason)
    if len(set(computes)) > 1:
        other = next(rank for rank, one in enumerate(computes) if one != computes[0])
        raise RecipeError(
            f'precision.compute = "auto" would be {computes[0]} on rank 0 and {computes[other]} on rank {other}: '
            "set it to one of them, or use GPUs of one kind"
        )


def begin_attempt(
    directory: RunDirectory,
    inputs: Inputs,
    resume: str,
    pids: list[int],
    say: Callable[[str], None],
    changes: Sequence[str] = (),
) -> tuple[int, Path | None, Path | None]:
    """Take the run directory, choose the checkpoint to go on from, and write down what will run. First rank only.

    `changes`: names of what may be another than the checkpoint's (changes.py); all that were ever made are recorded.
    Returns the attempt's number, the checkpoint, and, where there is none, what the initial weights are read from.
    Raises RunDirectoryError or CheckpointError, with the directory as it was, where another run is at work there or
    what it holds is not this run.
    """
    take(directory)
    chosen = choose(directory.checkpoints, resume, inputs.identity, say, changes)
    history = History() if chosen is None else refuse_other_run(chosen, inputs.identity, changes)
    initial = initial_weights(inputs) if chosen is None else None
    return write_down(directory, inputs, chosen, initial, pids, history), chosen, initial


def begin_attempts(
    shelf: Shelf,
    directory: RunDirectory,
    inputs: Inputs,
    resume: str,
    pids: list[int],
    say: Callable[[str], None],
    changes: Sequence[str] = (),
) -> tuple[int, Path | None, Path | None]:
    """The same where not all ranks have one run directory: in each home. All ranks together."""
    sharing = shelf.sharing
    sharing.on_leaders(lambda: take(directory))
    chosen = shelf.choose(resume, say)
    initial, history = None, History()
    if chosen is None:
        initial = sharing.on_leaders(lambda: initial_weights(inputs))[sharing.home]
        if inputs.config.initial_weights is not None:
            refuse_differences(sharing.ranks, lambda: facts_of_weights(initial))
    else:
        history = sharing.ranks.on_first(lambda: refuse_other_run(chosen, inputs.identity, changes))
    attempt = sharing.ranks.on_first(lambda: write_down(directory, inputs, chosen, initial, pids, history))
    others = sharing.leads and sharing.home > 0
    sharing.on_leaders(
        lambda: write_down(directory, inputs, chosen, initial, pids, history, attempt) if others else attempt
    )
    return attempt, chosen, initial


def take(directory: RunDirectory) -> None:
    """Take a run directory for this run, without what a kill left in it."""
    directory.lock()
    clear_marks(directory.path)
    directory.checkpoints.mkdir(exist_ok=True)
    clear_leftovers(directory.checkpoints)


def write_down(
    directory: RunDirectory,
    inputs: Inputs,
    chosen: Path | None,
    initial: Path | None,
    pids: list[int],
    history: History,
    attempt: int | None = None,
) -> int:
    """Record a start of the command and what will run; gives its number, which follows unless it is given."""
    recipe = to_toml(inputs.config)
    directory.attempts()  # damaged? then say so before anything is changed
    earlier = recipe
    for path in [directory.recipe, *([] if chosen is None else [chosen.parent.parent / directory.recipe.name])]:
        if path.exists():  # the run's own or, where it branches off, that of the run it comes from
            earlier = path.read_bytes().decode(errors="replace")
            break
    directory.stop_file.unlink(missing_ok=True)
    for left in (directory.receipts, directory.signs):  # by the attempt before
        shutil.rmtree(left, ignore_errors=True)
    inputs.codec.copy_to(directory.tokenizer)
    number = directory.begin_attempt(
        {
            "world_size": inputs.plan.world_size,
            "pids": pids,
            "resumed_from": None if chosen is None else str(named(chosen)),
            "converted_from": None if chosen is None else converted_from(chosen, inputs.identity),
            "initial_weights": None if initial is None else str(initial),
            "compute": inputs.compute,
            "recipe_changes": new_values(earlier, recipe),
            "changes": history.to_json(),
        },
        attempt,
    )
    write_text(directory.recipe, recipe)  # behind that record: what it says of samples before a change is not true
    write_text(directory.deepspeed, json.dumps(inputs.deepspeed, indent=2) + "\n")
    return number


def build_engine(inputs: Inputs, ranks: Ranks, device: torch.device, initial: Path | None = None) -> TrainingEngine:
    """The model inside a DeepSpeed engine, its weights equal on all ranks: drawn with one seed, or a checkpoint's."""
    config = inputs.config
    model = Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))
    if initial is not None:
        fill(model, load_weights(initial)[1], initial)
    model.activation_checkpointing = config.memory.activation_checkpointing
    model.loss_chunk_tokens = config.memory.loss_chunk_tokens
    model.z_loss = config.loss.z_loss
    if config.compile:
        model.compile_blocks()
    return TrainingEngine(model, config, inputs.deepspeed, ranks, device)


# ---------------------------------------------------------------- the run


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
    with one_ranks_fault() if ranks.local_rank == 0 else nullcontext():  # each machine reads files of its own
        inputs = Inputs.check(config, ranks.world_size, auto_compute(device))
    if config.compile:
        refuse_without_compiler(device)
    schedule = config.schedule
    directory = RunDirectory(path)
    if stop is None:
        stop = StopRequest(directory.stop_file)
        stop.install(speaks=ranks.is_first)
    seed_everything(config.seed)
    with ExitStack() as stack:
        stack.enter_context(process_group(device, timeout_minutes))
        stop.begin()
        try:
            refuse_devices(ranks, inputs.compute)
        except RuntimeError as error:
            if stop.reason is None or not is_lost_peer(error):
                raise
            return "stopped"  # nothing has begun: the signal met another rank before it could note it, and ended that
        plan_sha256 = inputs.identity["order"].get("plan_sha256")
        options = {"--resume": resume, "--change": " ".join(changes)}
        refuse_differences(
            ranks, lambda: facts(to_toml(config), options, inputs.deepspeed, inputs.collection, plan_sha256)
        )
        sharing = discover(path, ranks)
        refusal = sharing.refusal(path) if config.checkpoint.placement == "shared" else None
        if refusal is not None:
            sharing.on_leaders(lambda: drop_if_empty(path))
            raise RunDirectoryError(refusal)
        report = stack.enter_context(Report(directory, config, active=ranks.is_first))
        pids = ranks.gather(os.getpid())
        shelf = None
        if sharing.is_one:
            attempt, resumed_from, initial = ranks.on_first(
                lambda: begin_attempt(directory, inputs, resume, pids, report.say, changes)
            )
        else:
            shelf = Shelf(directory.checkpoints, sharing, gathers=config.checkpoint.placement == "gathered")
            attempt, resumed_from, initial = begin_attempts(shelf, directory, inputs, resume, pids, report.say, changes)
        history = History.of(ranks.on_first(lambda: directory.attempts()[-1]["changes"]))
        inputs = inputs.behind(history)
        if kept is not None:
            kept.begins(attempt, directory.log(attempt, ranks.rank))
        receipt = Receipt(directory, attempt, ranks.rank, ranks.world_size, command)
        stack.enter_context(receipt.of_failure())
        sign = directory.signs / f"rank-{ranks.rank:05d}.json"
        life = SignOfLife(sign, attempt=attempt, rank=ranks.rank, world_size=ranks.world_size)
        stack.enter_context(life)
        if initial is not None:
            report.say(f"initial weights from {initial}")
        for note in (precision_note(config.precision, device), *rounding_warnings(config)):
            if note is not None:
                report.say(note)
        engine = build_engine(inputs, ranks, device, initial)
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
        unscored = resumed_from is not None and lacks_evaluation(resumed_from, state, config)
        if shelf is not None:
            shelf.clear()
        receipt.state = life.state = state
        batches = life.reading(heeding(stack.enter_context(loader(inputs, ranks, state)), stop))
        stopping = Stopping(stop, engine.sum_over_ranks)
        report.begins(attempt, state, resumed_from, inputs.order, inputs.steps)
        if resumed_from is not None:
            report.changed(state, history, changes, inputs.order)
        jumped = None if resumed_from is None else jump(state.global_step, engine.learning_rate, schedule)
        if jumped is not None:
            report.say(jumped)
        if state.global_step >= schedule.max_steps:
            report.say(f"step {state.global_step}: schedule.max_steps = {schedule.max_steps} is reached")

        stack.enter_context(one_ranks_fault())
        first_step, steps = state.global_step, inputs.steps
        measured: Measured | None = None  # of the last whole step
        try:
            if unscored:
                report.scores(state, heldout_scores(engine, inputs, ranks, stopping))
            while state.global_step < schedule.max_steps:
                lr = learning_rate(state.global_step, schedule)
                plan = inputs.plan.of_step(state.global_step, steps)
                with report.timed_step():
                    result = train_step(engine, batches, plan, lr, stopping=stopping)
                state.advance(plan, result.tokens)
                last = state.global_step == schedule.max_steps
                report.step(
                    state, loss=result.loss, z_loss=result.z_loss, tokens=result.tokens, lr=lr,
                    grad_norm=result.grad_norm, loss_scale=result.loss_scale, overflowed=result.overflowed,
                    skipped_steps=engine.skipped_steps,
                )  # fmt: skip
                measured = Measured(result.loss, result.grad_norm, result.overflowed)
                if saves_before_the_end(state, config):
                    checkpoints.make_room(engine)
                checkpoints.poll()
                if stop.deadline is not None:
                    stop.deadline.measured_step(report.step_seconds)
                if result.stop_wanted and not last:
                    raise StopAgreedError
                if due(state, config.evaluation.every_steps) or last:
                    life.does("evaluates")
                    scores = heldout_scores(engine, inputs, ranks, stopping)
                    report.scores(state, scores)
                    measured = replace(measured, heldout_loss=scores["all"].loss)
                if last:
                    life.does("saves")
                    checkpoints.save_last(engine, state, inputs.identity, measured)
                elif due(state, config.checkpoint.every_steps):
                    life.does("saves")
                    checkpoints.save(engine, state, inputs.identity, measured)
        except StopAgreedError:
            life.does("saves")
            reason = first_reason(ranks.gather(stop.reason))
            if measured is not None:
                checkpoints.save_last(engine, state, inputs.identity, measured)
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


def lacks_evaluation(checkpoint: Path, state: TrainState, config: RunConfig) -> bool:
    """Whether the run was stopped in the evaluation that was due behind this checkpoint's step."""
    wanted = due(state, config.evaluation.every_steps) or state.global_step >= config.schedule.max_steps
    return wanted and measured_at(checkpoint).get("heldout_loss", 0.0) is None


def saves_before_the_end(state: TrainState, config: RunConfig) -> bool:
    """Whether a later step than this one is saved that is not the last."""
    every = config.checkpoint.every_steps
    return (state.global_step // every + 1) * every < config.schedule.max_steps


def due(state: TrainState, every_steps: int) -> bool:
    return state.global_step % every_steps == 0


def heldout_scores(
    engine: TrainingEngine, inputs: Inputs, ranks: Ranks, stopping: Stopping | None = None
) -> dict[str, Score]:
    """The validation split of every source, scored by all ranks together. StopAgreedError: one wants to stop."""
    poll = Poll(stopping or Stopping(None, engine.sum_over_ranks))
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
        on_tokens=lambda done, total: poll(),
    )


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
