"""Accumulated micro-steps of two ranks equal one large batch of a plain process, at every ZeRO stage.

The steps' global batches grow and shrink (a batch ramp), rows have very unequal numbers of targets, the first
micro-batch has none at all, and in the last step one rank has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.loader import Batch
from model.transformer import Transformer
from pretrain.batching import BatchPlan, steps_of
from pretrain.config import RunConfig
from pretrain.engine import TrainingEngine, process_group
from pretrain.resolve import resolve
from pretrain.runtime import Ranks
from pretrain.step import train_step
from tests.pretrain.recipe import recipe
from tests.ranks import run_ranks

SEQ_LEN, VOCAB_SIZE, MICRO, STAGES = 24, 128, 2, (0, 1, 2, 3)
STEPS, SAMPLES = 3, 8 + 16 + 4
CLIPPED = 0.3  # below the norm of each step's gradient


def config_of(clipping: float | str = "off", **precision: str) -> RunConfig:
    return recipe(
        model={
            "vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 1, "n_kv_heads": 1, "d_ff": 96,
            "seq_len": SEQ_LEN,
        },
        batch={
            "global_batch_size": 4,
            "micro_batch_size": MICRO,
            "ramp": [
                {"until_samples": 8, "global_batch_size": 8},
                {"until_samples": 24, "global_batch_size": 16},
            ],
        },
        optimizer={"gradient_clipping": clipping},
        precision=precision,
    )  # fmt: skip


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all samples, each (28, SEQ_LEN)."""
    tokens = np.random.default_rng(3).integers(0, VOCAB_SIZE, (SAMPLES, SEQ_LEN + 1))
    targets = tokens[:, 1:].copy()
    for row in range(SAMPLES):
        targets[row, : row * 5 % SEQ_LEN] = -100
    targets[:MICRO] = targets[-MICRO:] = -100  # the first micro-batch; the second rank's part of the last step
    return tokens[:, :-1].copy(), targets


def micro_batches(ranks: Ranks, first_sample: int = 0) -> Iterator[Batch]:
    inputs, targets = rows()
    for start in range(first_sample + ranks.rank * MICRO, SAMPLES, ranks.world_size * MICRO):
        mine = slice(start, start + MICRO)
        yield Batch(inputs[mine], targets[mine], np.arange(SAMPLES)[mine])


def build_model(config: RunConfig) -> Transformer:
    model = Transformer(config.model, generator=torch.Generator().manual_seed(7))
    for name, parameter in model.named_parameters():  # gains that are not all 1, so that none is like another
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(len(parameter), generator=torch.Generator().manual_seed(len(name)))
    return model


def build(config: RunConfig, stage: int, ranks: Ranks, **json: str) -> TrainingEngine:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # else a model this small stays whole on every rank
        kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero.update({f"stage3_{name}": 0 for name in kept})
    resolved = resolve({"zero_optimization": zero, **json}, config, ranks.world_size)
    return TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu"))


# ---------------------------------------------------------------- fp32: a plain process


def plain_process(clipping: float | str) -> list[dict[str, Any]]:
    """One process, one forward and backward a step, torch's own clipping and AdamW at rate 0: the first moments are
    sums of all clipped gradients so far."""
    config = config_of(clipping, compute="fp32")
    model, (inputs, targets) = build_model(config), map(torch.from_numpy, rows())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95))
    found = []
    for step in range(STEPS):
        mine = steps_of(config.batch).samples(step)
        logits = model(inputs[mine.start : mine.stop]).flatten(0, 1)
        wanted = targets[mine.start : mine.stop].flatten()
        loss = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        largest = float("inf") if clipping == "off" else float(clipping)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        tokens = int((wanted != -100).sum())
        found.append({"loss": loss.item(), "norm": norm.item(), "tokens": tokens, "moments": moments})
    return found


def moments_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Every parameter's whole first moment, on all ranks."""
    from deepspeed.utils import safe_get_full_optimizer_state

    named = engine._engine.module.named_parameters()
    if engine.zero_stage == 0:
        return {name: engine._engine.optimizer.state[p]["exp_avg"].clone() for name, p in named}
    if engine.zero_stage < 3:  # DeepSpeed links states behind the first group's step, when the second has none yet
        engine._engine.optimizer._hp_optimizer_states_linked = False
        engine._engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {name: safe_get_full_optimizer_state(p, "exp_avg").clone() for name, p in named}


def fp32_case(ranks: Ranks, settings: list[tuple[int, float | str]]) -> list[list[dict[str, Any]]]:
    found = []
    with process_group(torch.device("cpu")):
        for stage, clipping in settings:
            config = config_of(clipping, compute="fp32")
            engine, batches = build(config, stage, ranks), micro_batches(ranks)
            assert engine._engine.gradient_clipping() == (0.0 if clipping == "off" else clipping)
            found.append([])
            for step in range(STEPS):
                plan = BatchPlan.from_config(config, ranks.world_size).of_step(step, steps_of(config.batch))
                done = train_step(engine, batches, plan, lr=0.0)
                assert engine._engine.global_steps == step + 1
                figures = {"loss": done.loss, "norm": done.grad_norm, "tokens": done.tokens}
                found[-1].append({**figures, "moments": moments_of(engine)})
    return found


def test_fp32_equals_a_plain_process() -> None:
    """Losses, gradients and their norms, clipped and not, of a growing and shrinking batch: 1e-6 relative."""
    settings = [(stage, clipping) for stage in STAGES for clipping in ("off", CLIPPED)]
    by_rank = run_ranks(2, fp32_case, settings)
    plain = {clipping: plain_process(clipping) for clipping in ("off", CLIPPED)}
    assert all(step["norm"] > 1.5 * CLIPPED for step in plain["off"])
    assert len({step["tokens"] for step in plain["off"]}) == STEPS
    for number, (stage, clipping) in enumerate(settings):
        for step, expected in enumerate(plain[clipping]):
            for found in (by_rank[rank][number][step] for rank in (0, 1)):
                where = (stage, clipping, step)
                assert found["tokens"] == expected["tokens"], where
                assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6), where
                assert found["norm"] == pytest.approx(expected["norm"], rel=1e-6), where
                assert found["moments"].keys() == expected["moments"].keys()
                for name, moment in found["moments"].items():
                    reference = expected["moments"][name]
                    assert (moment - reference).norm() <= 1e-6 * reference.norm(), (*where, name)


# ---------------------------------------------------------------- bf16: the exact sum of the same micro-gradients


# Stage, accumulation dtype, dtype in which the ranks' gradients are summed: the accumulation dtype unless the JSON says
# otherwise, and only fp32 keeps what fp32 accumulation promises.
NARROW = [(0, "bf16", "bf16"), (1, "bf16", "bf16"), (2, "bf16", "bf16"), (3, "bf16", "bf16"), (2, "fp32", "bf16")]
WIDE = [(1, "fp32", "fp32"), (2, "fp32", "fp32"), (3, "fp32", "fp32")]
MANTISSA_BITS = {"bf16": 7, "fp32": 23}


def bf16_case(ranks: Ranks, settings: list[tuple[int, str, str]]) -> list[dict[str, torch.Tensor]]:
    """The accumulated gradient of the second step's 16 samples, four micro-steps, as the optimizer would get it."""
    from deepspeed.utils import safe_get_full_grad

    found = []
    with process_group(torch.device("cpu")):
        for stage, accumulate, communicate in settings:
            config = config_of(compute="bf16", accumulate=accumulate)
            engine = build(config, stage, ranks, communication_data_type=communicate)
            gradients: dict[str, torch.Tensor] = {}

            def keep(
                allows: Any = None, engine: Any = engine, gradients: dict[str, Any] = gradients, step: Any = engine.step
            ) -> None:
                if engine._engine.is_gradient_accumulation_boundary():
                    named = engine._engine.module.named_parameters()
                    gradients.update({name: safe_get_full_grad(parameter).clone() for name, parameter in named})
                step(allows)

            engine.step = keep  # type: ignore[method-assign]
            plan = BatchPlan.from_config(config, ranks.world_size).of_step(1, steps_of(config.batch))
            train_step(engine, micro_batches(ranks, first_sample=8), plan, lr=0.0)
            found.append(gradients)
    return found if ranks.is_first else []


def micro_gradients() -> list[dict[str, torch.Tensor]]:
    """A plain bf16 process's gradients of the eight micro-batches of the second step, each scaled as `train_step`."""
    config = config_of(compute="bf16")
    model = build_model(config)
    for _, parameter in model.named_parameters():
        parameter.data = parameter.data.bfloat16()
    inputs, targets = (torch.from_numpy(array[8:24]) for array in rows())
    plan = BatchPlan.from_config(config, 2).of_step(1, steps_of(config.batch))
    scale = plan.gradient_accumulation_steps * 2 / int((targets != -100).sum())
    found = []
    for start in range(0, 16, MICRO):
        model.zero_grad()
        loss = model(inputs[start : start + MICRO], targets[start : start + MICRO])
        (loss.loss_sum * scale / plan.gradient_accumulation_steps).backward()
        found.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
    return found


def test_bf16_is_within_two_ulp_of_the_exact_sum() -> None:
    """Elementwise, against the float64 sum of the same micro-gradients over micro-steps and ranks.

    The ulp is that of the narrowest dtype a sum passes through (accumulation, or the sum over ranks), at the magnitude
    of what a rank adds up, Σ|micro-gradient|: k − 1 additions and one sum over ranks round by half an ulp each.
    """
    settings = [*NARROW, *WIDE]
    accumulated = run_ranks(2, bf16_case, settings)[0]
    parts = micro_gradients()
    ranks = [parts[0::2], parts[1::2]]
    for (stage, accumulate, communicate), gradients in zip(settings, accumulated, strict=True):
        bits = min(MANTISSA_BITS[accumulate], MANTISSA_BITS[communicate])
        worst = 0.0
        for name, gradient in gradients.items():
            exact = torch.stack([part[name] for part in parts]).sum(0) / 2
            added = torch.stack([torch.stack([part[name].abs() for part in one]).sum(0) for one in ranks]).amax(0)
            ulp = torch.exp2(added.clamp_min(1e-30).log2().floor() - bits)
            worst = max(worst, ((gradient.double() - exact).abs() / ulp).max().item())
        assert worst <= 2.0, (stage, accumulate, communicate, worst)
        assert worst > 0.0, "compared with itself"
