"""What a run reads and counts, opened and checked before anything begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.history import History
from data_pipeline.order import SampleOrder
from data_pipeline.packing_plan import PackingPlan, read_order
from data_pipeline.reading import Reading
from data_pipeline.shards import Collection, DataFormatError, open_collection
from data_pipeline.steps import Steps
from pretrain.batching import BatchPlan, steps_of
from pretrain.changes import after, reading_of, steps_of_identity
from pretrain.checkpoint import find, refuse_other_model, refuse_unhealthy, tokenizer_of, verify
from pretrain.config import Compute, RecipeError, RunConfig, from_root
from pretrain.engine import device_refusal
from pretrain.resolve import read_json, resolve
from pretrain.resuming import with_defaults
from pretrain.run_directory import CheckpointError
from pretrain.runtime import Ranks
from tokenizer.codec import Codec


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

    @property
    def reading(self) -> Reading:
        """What each step reads, those before the last change included."""
        return reading_of(self.identity)

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

    Earlier versions wrote none of it (`resuming.with_defaults`): they had nothing but the defaults.
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
