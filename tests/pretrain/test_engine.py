"""The real engine on two real ranks: gradients as a plain process has them, every stage and precision offered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.loader import Batch
from model.transformer import Transformer
from pretrain.batching import BatchPlan
from pretrain.config import RunConfig, parse_recipe
from pretrain.engine import TrainingEngine, process_group
from pretrain.resolve import refusal, resolve
from pretrain.runtime import Ranks
from pretrain.step import train_step
from tests.ranks import run_ranks

SEQ_LEN = 48
VOCAB_SIZE = 512


def recipe(
    *, model: dict[str, Any] | None = None, memory: str = "full", z_loss: float = 0.0, **precision: str
) -> RunConfig:
    return parse_recipe(
        {
            "model": {
                "preset": "mini", "vocab_size": VOCAB_SIZE, "d_model": 128, "n_layers": 2,
                "n_heads": 2, "n_kv_heads": 1, "d_ff": 256, "seq_len": SEQ_LEN, **(model or {}),
            },
            "data": {"path": "unused", "tokenizer": "unused"},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "schedule": {"peak_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "max_steps": 10},
            "optimizer": {"gradient_clipping": "off"},
            "precision": precision,
            "memory": {"activation_checkpointing": memory, "loss_chunk_tokens": 37},
            "loss": {"z_loss": z_loss},
            "evaluation": {"every_steps": 5},
            "checkpoint": {"every_steps": 5},
        }
    )  # fmt: skip


def build_model(config: RunConfig) -> Transformer:
    model = Transformer(config.model, generator=torch.Generator().manual_seed(7))
    model.activation_checkpointing = config.memory.activation_checkpointing
    model.loss_chunk_tokens = config.memory.loss_chunk_tokens
    model.z_loss = config.loss.z_loss
    return model


def global_batch(config: RunConfig, *, ignored: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of one step; with `ignored`, rows have very unequal numbers of targets."""
    tokens = np.random.default_rng(3).integers(0, VOCAB_SIZE, (config.batch.global_batch_size, SEQ_LEN + 1))
    targets = tokens[:, 1:].copy()
    if ignored:
        for row in range(len(targets)):
            targets[row, : row * 6] = -100
    return tokens[:, :-1].copy(), targets


def micro_batches(config: RunConfig, ranks: Ranks, *, ignored: bool = False) -> Iterator[Batch]:
    """The global batch again and again, this rank's rows of it."""
    inputs, targets = global_batch(config, ignored=ignored)
    micro = config.batch.micro_batch_size
    while True:
        for start in range(0, len(inputs), micro * ranks.world_size):
            rows = slice(start + ranks.rank * micro, start + (ranks.rank + 1) * micro)
            yield Batch(inputs=inputs[rows], targets=targets[rows], samples=np.arange(len(inputs))[rows])


def build(ranks: Ranks, config: RunConfig, stage: int) -> TrainingEngine:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # a model this small would be gathered once and stay whole on every rank
        kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero.update({f"stage3_{name}": 0 for name in kept})
    resolved = resolve({"zero_optimization": zero}, config, ranks.world_size)
    return TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu"))


def plan_of(config: RunConfig, ranks: Ranks) -> BatchPlan:
    return BatchPlan(config.batch.global_batch_size, config.batch.micro_batch_size, ranks.world_size, SEQ_LEN)


# ---------------------------------------------------------------- gradients


# What the loss and the checkpoints meet under every stage: a weight used twice, or two; blocks run again, or in part.
VARIANTS: dict[str, dict[str, Any]] = {
    "tied-full": {"memory": "full"},
    "tied-selective-z": {"memory": "selective", "z_loss": 0.01},
    "untied-every-2-z": {"memory": "every-2", "z_loss": 0.01, "model": {"tied": False}},
}


def gradients_case(ranks: Ranks, variants: list[str], stages: list[int]) -> dict[tuple[str, int], Any]:
    """The loss and the whole gradient of the accumulated global batch, read before the update."""
    from deepspeed.utils import safe_get_full_grad

    found: dict[tuple[str, int], Any] = {}
    with process_group(torch.device("cpu")):
        for variant, stage in itertools.product(variants, stages):
            config = recipe(compute="fp32", **VARIANTS[variant])
            engine = build(ranks, config, stage)
            assert stage != 3 or not any(parameter.numel() for parameter in engine._engine.module.parameters())
            gradients: dict[str, torch.Tensor] = {}

            def keep(
                allows: Any = None, engine: Any = engine, gradients: dict[str, Any] = gradients, step: Any = engine.step
            ) -> None:
                if engine._engine.is_gradient_accumulation_boundary():
                    named = engine._engine.module.named_parameters()
                    gradients.update({name: safe_get_full_grad(parameter).clone() for name, parameter in named})
                step(allows)

            engine.step = keep  # type: ignore[method-assign]
            step = train_step(engine, micro_batches(config, ranks, ignored=True), plan_of(config, ranks), lr=1e-3)
            found[variant, stage] = (step.loss, step.z_loss, gradients)
    return found if ranks.is_first else {}


@pytest.fixture(scope="module")
def engine_gradients() -> dict[tuple[str, int], Any]:
    return run_ranks(2, gradients_case, list(VARIANTS), [0, 1, 2, 3])[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_a_plain_process(variant: str, engine_gradients: dict[tuple[str, int], Any]) -> None:
    """Tied weights × activation checkpointing × chunked loss × accumulation × unequal token counts, ZeRO 0 to 3."""
    config = recipe(compute="fp32", **VARIANTS[variant])
    model = build_model(config)
    model.activation_checkpointing = "none"
    inputs, targets = (torch.from_numpy(array) for array in global_batch(config, ignored=True))
    logits = model(inputs).flatten(0, 1)
    cross_entropy = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100)
    z_loss = config.loss.z_loss * logits.logsumexp(-1)[targets.flatten() != -100].square().mean()
    (cross_entropy + z_loss).backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}

    for stage in (0, 1, 2, 3):
        loss, reported_z_loss, gradients = engine_gradients[variant, stage]
        assert loss == pytest.approx(cross_entropy.item(), rel=1e-6)
        assert reported_z_loss == pytest.approx(z_loss.item(), rel=1e-5, abs=1e-12)
        assert gradients.keys() == plain.keys()
        for name, gradient in gradients.items():
            reference = plain[name]
            assert reference is not None
            assert (gradient - reference).norm() <= 1e-6 * reference.norm(), (stage, name)


# ---------------------------------------------------------------- precision

OFFERED = [
    (stage, master, accumulate)
    for stage in (0, 1, 2, 3)
    for master in ("fp32", "bf16")
    for accumulate in ("fp32", "bf16")
    if refusal(stage, "bf16", master, accumulate) is None
]


def first_update_case(ranks: Ranks) -> list[float]:
    """The norm of the first update of all weights, by stage."""
    norms = []
    config = recipe(compute="bf16", accumulate="bf16")
    initial = {name: p.detach().bfloat16().float() for name, p in build_model(config).named_parameters()}
    with process_group(torch.device("cpu")):
        for stage in (0, 1, 2, 3):
            engine = build(ranks, config, stage)
            train_step(engine, micro_batches(config, ranks), plan_of(config, ranks), lr=0.1)
            weights = engine.gather_weights()
            squares = [(weights[name].float() - initial[name]).square().sum().item() for name in weights]
            norms.append(sum(squares) ** 0.5)
    return norms


def test_first_update_is_the_same_at_every_stage() -> None:
    """AdamW's step count begins at 1 everywhere: DeepSpeed's dry step to make the optimizer's state must leave none."""
    norms = run_ranks(2, first_update_case)[0]
    assert max(norms) / min(norms) < 1.01, norms


def precision_case(ranks: Ranks, offered: list[tuple[int, str, str]]) -> list[dict[str, Any]]:
    results = []
    with process_group(torch.device("cpu")):
        for stage, master, accumulate in offered:
            config = recipe(compute="bf16", master=master, accumulate=accumulate)
            engine = build(ranks, config, stage)
            batches = micro_batches(config, ranks)
            steps = [train_step(engine, batches, plan_of(config, ranks), lr=1e-3) for _ in range(6)]
            module = engine._engine.module
            dtypes = {p.dtype for p in module.parameters()}
            optimizer = engine._engine.optimizer
            masters = {p.dtype for group in optimizer.param_groups for p in group["params"]}
            states = {
                tensor.dtype
                for state in getattr(optimizer, "optimizer", optimizer).state.values()
                for key, tensor in state.items()
                if key != "step"
            }
            results.append(
                {
                    "losses": [step.loss for step in steps],
                    "norms": [step.grad_norm for step in steps],
                    "weights": dtypes,
                    "masters": masters,
                    "states": states,
                    "rope": module.positions.cos_td.dtype,
                    "rope_exact": torch.equal(module.positions.cos_td, Transformer(config.model).positions.cos_td),
                    "gathered": {name: tuple(w.shape) for name, w in engine.gather_weights().items()},
                }
            )
    return results


@pytest.fixture(scope="module")
def precision_results() -> dict[tuple[int, str, str], list[dict[str, Any]]]:
    by_rank = run_ranks(2, precision_case, OFFERED)
    return {offered: [by_rank[0][i], by_rank[1][i]] for i, offered in enumerate(OFFERED)}


@pytest.mark.parametrize("offered", OFFERED, ids=lambda o: f"zero{o[0]}-master-{o[1]}-accumulate-{o[2]}")
def test_every_offered_precision_trains(
    offered: tuple[int, str, str], precision_results: dict[tuple[int, str, str], list[dict[str, Any]]]
) -> None:
    """The dtypes are those the recipe names, the loss falls, and the ranks agree."""
    _, master, _ = offered
    first, second = precision_results[offered]
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0] - 0.1
    assert all(np.isfinite(first["norms"]))
    assert min(first["norms"]) > 0
    assert first["weights"] == {torch.bfloat16}
    wanted = torch.bfloat16 if master == "bf16" else torch.float32
    assert first["states"] == {wanted}
    assert first["rope"] == torch.float32
    assert first["rope_exact"]
    config = recipe()
    whole = {name: tuple(p.shape) for name, p in Transformer(config.model).named_parameters()}
    assert first["gathered"] == whole
    assert second["gathered"] == {}
