"""Every optimizer under every ZeRO stage, on two real ranks, beside a plain process; exact on resume."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.order import SampleOrder
from model.transformer import Transformer
from pretrain.adamw import PiecewiseAdamW, direction
from pretrain.checkpoint import CheckpointError
from pretrain.config import RunConfig, parse_recipe
from pretrain.eight_bit import BLOCK, EightBitAdamW, dequantize, levels, quantize
from pretrain.engine import TrainingEngine, process_group
from pretrain.inputs import optimizer_identity
from pretrain.muon import Matrix, OrthogonalizingAdamW, cut, orthogonalize, rounds, spread
from pretrain.optimizer import build_optimizer, parameter_groups
from pretrain.resolve import resolve, rounding_warnings
from pretrain.resuming import refuse_other_run
from pretrain.rounding import add_kahan, add_nearest, add_stochastic, generator_of
from pretrain.runtime import Ranks
from pretrain.step import train_step
from tests.pretrain.test_engine import build_model, global_batch, micro_batches, plan_of
from tests.pretrain.test_engine import recipe as engine_recipe
from tests.ranks import run_ranks

FP32 = {"compute": "fp32"}
BF16 = {"compute": "bf16", "master": "bf16", "accumulate": "bf16"}
STEPS, RATES = 3, (1e-3, 3e-3, 2e-3)
CLIPPING = 0.1  # the gradient's norm is about 1

# name → optimizer, precision, stages
CASES: dict[str, tuple[str, dict[str, str], tuple[int, ...]]] = {
    "adamw": ("adamw", FP32, (1, 2, 3)),
    "muon": ("muon", FP32, (0, 1, 2, 3)),
    "adamw8bit": ("adamw8bit", FP32, (1, 2, 3)),
    "kahan": ("adamw", {**BF16, "compensation": "kahan"}, (1, 2, 3)),
    "stochastic": ("adamw", {**BF16, "compensation": "stochastic"}, (1, 2, 3)),
    "nearest, fp32 moments": ("adamw", {**BF16, "moments": "fp32"}, (2,)),
    "muon in bf16, summed in fp32": ("muon", {"compute": "bf16"}, (1,)),
    "muon, kahan": ("muon", {**BF16, "compensation": "kahan"}, (2,)),
}
RUNS = [(name, stage) for name, (_, _, stages) in CASES.items() for stage in stages]

TABLES: dict[str, Any] = {
    "model": {"preset": "mini"}, "data": {"path": "a", "tokenizer": "b"},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "schedule": {"peak_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "max_steps": 10},
    "evaluation": {"every_steps": 5}, "checkpoint": {"every_steps": 5},
}  # fmt: skip
PLAIN = {"master": "bf16", "accumulate": "bf16"}


def recipe(name: str) -> RunConfig:
    optimizer, precision, _ = CASES[name]
    small = {"n_layers": 1, "d_model": 64, "n_heads": 1, "n_kv_heads": 1, "d_ff": 96}
    config = engine_recipe(model=small, memory="none", **precision)
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"name": optimizer, "gradient_clipping": CLIPPING})}
    )


def build(ranks: Ranks, config: RunConfig, stage: int) -> TrainingEngine:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 1 and config.precision.compute == "fp32":
        zero["round_robin_gradients"] = True  # in bf16 the gradients are read, which DeepSpeed then does wrong
    if stage == 3:  # nothing stays whole, and the hidden matrices are several sub-groups
        kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero.update({f"stage3_{name}": 0 for name in kept}, sub_group_size=5_000)
    resolved = resolve({"zero_optimization": zero}, config, ranks.world_size)
    return TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu"))


def states(engine: TrainingEngine) -> list[Tensor]:
    """Masters and optimizer state of this rank."""
    zero = engine._engine.optimizer
    optimizer = getattr(zero, "optimizer", zero)
    return [
        value
        for weights, state in optimizer.state.items()
        for value in (weights, *state.values())
        if isinstance(value, Tensor)
    ]


def whole(engine: TrainingEngine) -> dict[str, Tensor]:
    """The masters with what Kahan summation keeps beside them, whole, in fp32; on the first rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine._engine.module.embed_tokens.weight.dtype == torch.float32:
        return engine.gather_weights()
    if engine.zero_stage < 3 and states(
        engine
    ):  # DeepSpeed has linked the states that were there behind the first group
        engine._engine.optimizer._hp_optimizer_states_linked = False
        engine._engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine._engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter).float()
        if getattr(engine._engine.optimizer.optimizer, "compensation", "none") == "kahan" and states(engine):
            found[name] = found[name] + safe_get_full_optimizer_state(parameter, "lost").float()
    return {name: master.clone() for name, master in found.items()}


def steps_case(ranks: Ranks, folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Each run's norms, gradients and masters of three steps; then what a step at rate 0 changes, and a resume."""
    from deepspeed.utils import safe_get_full_grad

    found: dict[tuple[str, int], dict[str, Any]] = {}
    with process_group(torch.device("cpu")):
        for name, stage in RUNS:
            config = recipe(name)
            place = folder / f"{name.replace(' ', '-')}-{stage}"
            engine, batches = build(ranks, config, stage), micro_batches(config, ranks, ignored=True)
            plan, masters, norms, gradients = plan_of(config, ranks), [whole(engine)], [], []
            compute = config.precision.compute

            def keep(
                allows: Any = None,
                engine: Any = engine,
                gradients: list[Any] = gradients,
                step: Any = engine.step,
                compute: str = compute,
            ) -> None:
                if compute == "bf16" and engine._engine.is_gradient_accumulation_boundary():
                    named = engine._engine.module.named_parameters()
                    gradients.append({name: safe_get_full_grad(p).float().clone() for name, p in named})
                step(allows)

            engine.step = keep  # type: ignore[method-assign]
            for number, rate in enumerate(RATES):
                if number == STEPS - 1:
                    engine.save(place)
                norms.append(train_step(engine, batches, plan, rate).grad_norm)
                masters.append(whole(engine))
            again = build(ranks, config, stage)
            again.load(place)
            decays = [group["weight_decay"] for group in again._engine.optimizer.param_groups]
            train_step(again, batches, plan, RATES[-1])
            resumed = [
                torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(states(engine), states(again), strict=True)
            ]
            train_step(again, batches, plan, 0.0)
            weights = whole(again)
            for group in again._engine.optimizer.param_groups:
                group["weight_decay"] = 0.25
            again.load(place)
            loaded = [group["weight_decay"] for group in again._engine.optimizer.param_groups]
            found[name, stage] = {
                "norms": norms, "masters": masters, "gradients": gradients, "resumed": resumed,
                "still": all(torch.equal(masters[-1][n], w) for n, w in weights.items()),
                "recipe's": decays[0] == 0.1 and set(loaded) == {0.25},
            }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], dict[str, Any]]]:
    """By rank."""
    return run_ranks(2, steps_case, tmp_path_factory.mktemp("saved"))


@functools.cache
def plain(name: str, *, as_adamw: bool = False) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Norms and weights of three steps on the whole batch in one process, by torch's optimizers where it has them."""
    config = recipe(name)
    table, model = config.optimizer, build_model(config)
    inputs, targets = (torch.from_numpy(array) for array in global_batch(config, ignored=True))
    groups, adamw = parameter_groups(model, table), {"betas": (table.beta1, table.beta2), "eps": table.eps}
    optimizers: list[torch.optim.Optimizer] = []
    if table.name == "muon":
        hidden, *groups = groups
        optimizers.append(
            torch.optim.Muon(
                hidden["params"], weight_decay=table.weight_decay, momentum=table.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )  # fmt: skip
    if table.name == "adamw8bit" and not as_adamw:
        optimizers.append(build_optimizer(model, config, 0.0))
    else:
        optimizers.append(torch.optim.AdamW(groups, foreach=False, **adamw))
    norms, weights = [], []
    for rate in RATES:
        model.zero_grad()
        logits = model(inputs).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        for group in itertools.chain(*(optimizer.param_groups for optimizer in optimizers)):
            group["lr"] = rate
        for optimizer in optimizers:
            optimizer.step()
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return norms, weights


def furthest(weights: dict[str, Tensor], others: dict[str, Tensor], initial: dict[str, Tensor]) -> float:
    """The largest distance of two weights, as a part of the way that the first has gone."""
    return max(float((weights[n] - others[n]).norm() / (weights[n] - initial[n]).norm()) for n in weights)


# Muon's matrices are cut to 8 bits of mantissa before they are orthogonalized: the last bit of a gradient may show.
@pytest.mark.parametrize("name, tolerance", [("adamw", 2e-4), ("muon", 4e-2), ("adamw8bit", 2e-3)])
def test_steps_equal_a_plain_process(name: str, tolerance: float, steps: list[dict[Any, Any]]) -> None:
    """Accumulated, clipped, partitioned: weights, and the norm before clipping."""
    norms, weights = plain(name)
    for stage in CASES[name][2]:
        run = steps[0][name, stage]
        assert min(run["norms"]) > 5 * CLIPPING
        assert run["norms"] == pytest.approx(norms, rel=5e-5)
        for ours, plains in zip(run["masters"][1:], weights, strict=True):
            assert furthest(plains, ours, run["masters"][0]) < tolerance, stage


def test_the_first_step_of_eight_bits_is_adamws_and_the_next_are_near(steps: list[dict[Any, Any]]) -> None:
    _, weights = plain("adamw8bit", as_adamw=True)
    for stage in CASES["adamw8bit"][2]:
        initial, first, _, third = steps[0]["adamw8bit", stage]["masters"]
        assert furthest(weights[0], first, initial) < 2e-4
        assert 1e-3 < furthest(weights[2], third, initial) < 0.1


def test_muon_is_the_same_in_every_precision(steps: list[dict[Any, Any]]) -> None:
    _, weights = plain("muon")
    for run in ("muon in bf16, summed in fp32", 1), ("muon, kahan", 2):
        initial, *masters = steps[0][run]["masters"]
        hidden = [name for name in initial if name.startswith("layers.") and name.endswith("proj.weight")]
        for ours, plains in zip(masters, weights, strict=True):
            for name in hidden:
                gone, way = ours[name] - initial[name], plains[name] - initial[name]
                assert torch.cosine_similarity(gone.flatten(), way.flatten(), 0) > 0.95, (run, name)


@pytest.mark.parametrize("name", ["kahan", "stochastic", "nearest, fp32 moments"])
def test_bf16_masters_follow_the_formula(name: str, steps: list[dict[Any, Any]]) -> None:
    """From the masters before a step and its gradient to those behind it: within what the rounding says, unbiased.

    The gradient is clipped by the norm that was reported: both are those of the whole gradient, before clipping.
    """
    config = recipe(name)
    table, moments = config.optimizer, {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision.moments_dtype]
    for stage in CASES[name][2]:
        run = steps[0][name, stage]
        first = {n: torch.zeros_like(w, dtype=moments) for n, w in run["masters"][0].items()}
        second = dict(first)
        for step, (rate, norm, gradients) in enumerate(zip(RATES, run["norms"], run["gradients"], strict=True), 1):
            total = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            assert norm == pytest.approx(total, rel=1e-6)
            wrong, spacings = [], []
            for parameter, gradient in gradients.items():
                g = (gradient.bfloat16() * torch.tensor(1 / ((norm + 1e-6) / CLIPPING))).float()
                m = first[parameter].float() * table.beta1 + (1 - table.beta1) * g
                v = second[parameter].float() * table.beta2 + (1 - table.beta2) * g * g
                first[parameter], second[parameter] = m.to(moments), v.to(moments)
                before, behind = run["masters"][step - 1][parameter].double(), run["masters"][step][parameter].double()
                decay = table.weight_decay if before.dim() == 2 else 0.0
                adam = (m / (1 - table.beta1**step)) / ((v / (1 - table.beta2**step)).sqrt() + table.eps)
                exact = before - rate * (adam.double() + decay * before)
                wrong.append((behind - exact).flatten())
                spacings.append(torch.exp2(exact.abs().clamp(min=1e-20).log2().floor() - 7).flatten())
            error, spacing = torch.cat(wrong), torch.cat(spacings)
            largest = {"kahan": 2**-6, "stochastic": 1.0}.get(name, 0.5)
            # A moment whose last bit differs shows in the update, by less than a hundredth.
            assert ((error.abs() - largest * spacing) < 0.01 * rate).all(), (stage, step)
            ratio = error / spacing
            assert abs(ratio.mean() / ratio.std() * math.sqrt(len(ratio))) < 4, (stage, step)


@pytest.mark.parametrize("name, stage", RUNS, ids=lambda value: str(value))
def test_a_resumed_run_goes_on_bit_for_bit(name: str, stage: int, steps: list[dict[Any, Any]]) -> None:
    """Masters, moments, momentum, codes and what Kahan summation keeps; and a rate of 0 moves none of the weights."""
    for by_rank in steps:
        assert len(by_rank[name, stage]["resumed"]) >= 8
        assert all(by_rank[name, stage]["resumed"])
        assert by_rank[name, stage]["still"]
        assert by_rank[name, stage]["recipe's"]  # its weight decay, though a checkpoint has one too


# ---------------------------------------------------------------- rounding


def test_updates_below_half_a_spacing() -> None:
    """2,000 steps of decay by 1e-4: rounded to the nearest nothing moves, Kahan summation and the mean of chance do."""
    weights = torch.randn(4_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    nearest, kahan, stochastic, lost = weights.clone(), weights.clone(), weights.clone(), torch.zeros_like(weights)
    generator = generator_of(torch.device("cpu"), 1)
    for _ in range(2_000):
        add_nearest(nearest, nearest.float() * -1e-4)
        add_kahan(kahan, kahan.float() * -1e-4, lost, generator)
        add_stochastic(stochastic, stochastic.float() * -1e-4, generator)
    assert torch.equal(nearest, weights)
    left = (1 - 1e-4) ** 2_000
    torch.testing.assert_close(kahan.float() + lost.float(), weights.float() * left, rtol=2e-3, atol=0)
    assert float((stochastic.float() / weights.float()).mean()) == pytest.approx(left, rel=2e-3)


@pytest.mark.parametrize("update", [3e-6, -1e-7])
def test_kahan_summation_has_no_smallest_update(update: float) -> None:
    """Weights of 1, as norm gains are: 2^-17 of them is 7.6e-6."""
    weights, generator = torch.ones(1_000).bfloat16(), generator_of(torch.device("cpu"), 3)
    lost = torch.zeros_like(weights)
    for _ in range(2_000):
        add_kahan(weights, torch.full((1_000,), update), lost, generator)
    way = (weights.double() - 1 + lost.double()).mean()
    assert float(way) == pytest.approx(2_000 * update, rel=0.05)


def test_what_is_not_finite_is_rounded_to_itself() -> None:
    bits = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -0x800000]  # a GPU's NaN, its negative, …, ∞, −∞
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32).repeat(500)
    weights, lost = torch.zeros(len(values)).bfloat16(), torch.zeros(len(values)).bfloat16()
    add_stochastic(weights, values, generator_of(torch.device("cpu"), 4))
    assert torch.equal(weights.isnan(), values.isnan())
    assert torch.equal(weights[values.isinf()].float(), values[values.isinf()])
    add_kahan(weights.zero_(), values, lost, generator_of(torch.device("cpu"), 4))
    assert not (weights + lost).isfinite().any()


@pytest.mark.parametrize("value", [1.5, -1.5, 0.0, 3.0e38, -1e-30])
def test_stochastic_rounding_leaves_what_bf16_holds_and_hits_both_neighbours_as_often_as_they_are_near(
    value: float,
) -> None:
    held = torch.full((100_000,), value).bfloat16()
    generator = generator_of(torch.device("cpu"), 2)
    same = held.clone()
    add_stochastic(same, torch.zeros(len(held)), generator)
    assert torch.equal(same, held)
    spacing = 2.0 ** (math.floor(math.log2(abs(value))) - 7) if value else 0.0
    add_stochastic(same, torch.full((len(held),), 0.25 * spacing), generator)
    reached = (same.float() - held.float()).double()
    assert set(reached.tolist()) <= {0.0, spacing}
    assert float(reached.mean()) == pytest.approx(0.25 * spacing, rel=0.03)


def test_random_numbers_depend_on_seed_rank_step_and_parameter_alone() -> None:
    def drawn(*key: int) -> list[int]:
        return torch.randint(2**16, (8,), generator=generator_of(torch.device("cpu"), *key)).tolist()

    assert drawn(1, 0, 5, 1) == drawn(1, 0, 5, 1)
    keys = [(1, 0, 5, 1), (2, 0, 5, 1), (1, 1, 5, 1), (1, 0, 6, 1), (1, 0, 5, 2), (10, 5, 1), (1, 0, 51)]
    assert len({tuple(drawn(*key)) for key in keys}) == len(keys)

    def stepped(seed: int = 3, rank: int = 0) -> list[tuple[float, ...]]:
        """Three groups, one after the other, as DeepSpeed does it."""
        weights = [torch.nn.Parameter(torch.ones(4_000, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = PiecewiseAdamW(
            [{"params": [one]} for one in weights], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, moments=torch.bfloat16,
            compensation="stochastic", seed=seed, rank=rank,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        for group in list(optimizer.param_groups):
            optimizer.param_groups = [group]
            optimizer.step()
            for one in weights:
                optimizer.state[one]  # DeepSpeed looks into the states of those, too, that have none yet
        return [tuple(one.tolist()) for one in weights]

    before = torch.get_rng_state()
    first = stepped()
    torch.manual_seed(int(before[0]) + 1)
    assert stepped() == first
    assert len(set(first + stepped(seed=4) + stepped(rank=1))) == 9


def test_what_bf16_loses_is_warned_of() -> None:
    plain_masters = "warning: bf16 masters lose every update below 1/512 of a weight"
    stuck = "warning: second moments in bf16 do not shrink with optimizer.beta2 = 0.999"
    for precision, beta2, says in (
        ({}, 0.999, []),
        (PLAIN, 0.95, [plain_masters]),
        (PLAIN, 0.999, [plain_masters, stuck]),
        ({**PLAIN, "compensation": "kahan"}, 0.95, []),
        ({**PLAIN, "compensation": "stochastic"}, 0.999, [stuck]),
        ({**PLAIN, "compensation": "kahan", "moments": "fp32"}, 0.999, []),
    ):
        found = rounding_warnings(parse_recipe({**TABLES, "precision": precision, "optimizer": {"beta2": beta2}}))
        assert len(found) == len(says)
        assert all(line.startswith(start) for line, start in zip(found, says, strict=True))
    slow = {"beta1": 0.999, "beta2": 0.99, "muon_momentum": 0.998}
    for name, keys in (("adamw", ["beta1"]), ("muon", ["beta1", "muon_momentum"])):
        precision = {**PLAIN, "compensation": "kahan"}
        found = rounding_warnings(parse_recipe({**TABLES, "precision": precision, "optimizer": {"name": name, **slow}}))
        assert [line.split("optimizer.")[1].split(" =")[0] for line in found] == keys
    for beta2, shrinks in ((0.999, False), (0.99, True)):
        moment = torch.ones(4).bfloat16()
        for _ in range(50):
            direction(torch.zeros(4), torch.zeros(4), moment, 1, (0.9, beta2), 1e-8)
        assert bool((moment < 1).all()) == shrinks


# ---------------------------------------------------------------- 8 bits


@pytest.mark.parametrize("signed", [True, False])
def test_each_moment_gets_the_nearest_level(signed: bool) -> None:
    table = levels(signed, torch.device("cpu"))
    assert len(set(table.tolist())) == 256
    assert (float(table.min()), float(table.max())) == (pytest.approx(-0.9929687) if signed else 0.0, 1.0)
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(5 * BLOCK + 17, generator=generator) * torch.logspace(-6, 3, 5 * BLOCK + 17)
    values = values if signed else values.square()
    values[BLOCK : 2 * BLOCK] = 0
    codes, scales = quantize(values, signed)
    assert codes.dtype == torch.uint8
    assert len(scales) == 6
    back = dequantize(codes, scales, signed)
    assert not back[BLOCK : 2 * BLOCK].any()
    each = scales.repeat_interleave(BLOCK)[: len(values), None] * table
    nearest = (each - values[:, None]).abs().amin(1)
    if not signed:  # one that is not 0 gets no 0
        assert torch.equal(codes > 0, values > 0)
        nearest = (each[:, 1:] - values[:, None]).abs().amin(1).where(values > 0, nearest)
    torch.testing.assert_close((back - values).abs(), nearest, rtol=1e-4, atol=1e-7 * float(values.abs().max()))
    assert torch.equal(quantize(back, signed)[0][:BLOCK], codes[:BLOCK]) or not signed


@pytest.mark.parametrize("ratio", [1e-3, 3e-4, 1e-4, 1e-5, 0.0])
def test_small_gradients_beside_large_ones_make_no_large_updates(ratio: float) -> None:
    """Rounded to 0, a second moment leaves eps to divide by: updates of 266 times the rate for rows of 1/1000."""
    weights = torch.nn.Parameter(torch.zeros(BLOCK))
    groups = [{"params": [weights], "hidden": True}]
    optimizer = EightBitAdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, moments=torch.float32)
    sizes = torch.full((BLOCK,), 1e-2)
    sizes[BLOCK // 2 :] *= ratio
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        before = weights.detach().clone()
        weights.grad = torch.randn(BLOCK, generator=generator) * sizes
        optimizer.step()
        moved = (weights.detach() - before)[BLOCK // 2 :].abs().max()
        assert float(moved) < 2, "AdamW's stay below 1.1"


# ---------------------------------------------------------------- Muon

SHAPES = [(40, 48), (100, 40), (16, 16), (24, 8), (8, 24), (64, 24)]
SIZES = [rows * columns for rows, columns in SHAPES]


def layouts(world_size: int) -> dict[str, list[Matrix]]:
    offsets = [0, *itertools.accumulate(SIZES)][:-1]
    partition = -(-sum(SIZES) // world_size) + 3
    return {"cut": cut(SHAPES, offsets, partition), "spread": spread(SHAPES, world_size)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 61, 5_000])
def test_pieces_cover_every_matrix_once_and_owners_share_the_work(world_size: int) -> None:
    for name, matrices in layouts(world_size).items():
        for matrix, (rows, columns) in zip(matrices, SHAPES, strict=True):
            assert (matrix.rows, matrix.columns) == (rows, columns)
            ends = itertools.accumulate((piece.size for piece in matrix.pieces), initial=0)
            assert [piece.start for piece in matrix.pieces] == list(ends)[:-1]
            assert sum(piece.size for piece in matrix.pieces) == rows * columns
            assert [piece.rank for piece in matrix.pieces] == sorted({piece.rank for piece in matrix.pieces})
        for rank in range(min(world_size, 70)):  # the pieces of a rank do not overlap
            held = sorted((p.offset, p.offset + p.size) for m in matrices if (p := m.on(rank)))
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(held)), name
        shared = [matrix for matrix in matrices if len(matrix.pieces) > 1]
        owned = [(owner, matrix) for together in rounds(matrices) for owner, matrix in together.items()]
        assert sorted(map(id, shared)) == sorted(id(matrix) for _, matrix in owned)
        assert all(matrix.on(owner) for owner, matrix in owned)
    if world_size in (2, 3):
        work = [sum(m.work for t in rounds(layouts(world_size)["spread"]) for o, m in t.items() if o == rank)
                for rank in range(world_size)]  # fmt: skip
        assert max(work) <= sum(work) - min(work)


def drawn_matrices(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def matrices_case(ranks: Ranks) -> dict[str, list[Tensor]]:
    """The matrices after three steps, by layout, put together again from the ranks' pieces."""
    found: dict[str, list[Tensor]] = {}
    with process_group(torch.device("cpu")):
        for name, matrices in layouts(ranks.world_size).items():
            generator = torch.Generator().manual_seed(5)
            held = [(number, piece) for number, matrix in enumerate(matrices) if (piece := matrix.on(ranks.rank))]
            size = max((piece.offset + piece.size for _, piece in held), default=0) + 3  # with padding

            def partition(size: int = size, held: Any = held, generator: Any = generator) -> Tensor:
                flat, drawn = torch.zeros(size), drawn_matrices(generator)
                for number, piece in held:
                    of_rank = drawn[number].view(-1)[piece.start : piece.start + piece.size]
                    flat[piece.offset : piece.offset + piece.size] = of_rank
                return flat

            flat = torch.nn.Parameter(partition())
            optimizer = OrthogonalizingAdamW(
                [{"params": [flat], "weight_decay": 0.1, "hidden": True}], lr=0.01, betas=(0.9, 0.95), eps=1e-8,
                moments=torch.float32, momentum=0.95, update_rms=0.2, rank=ranks.rank, world_size=ranks.world_size,
            )  # fmt: skip
            optimizer.layouts[flat] = matrices
            for _ in range(3):
                flat.grad = partition()
                optimizer.step()
            found[name] = [torch.zeros(shape) for shape in SHAPES]
            for number, piece in held:
                of_rank = flat.detach()[piece.offset : piece.offset + piece.size]
                found[name][number].view(-1)[piece.start : piece.start + piece.size] = of_rank
            for one in found[name]:
                dist.all_reduce(one)
    return found


def test_matrices_over_three_ranks_are_torchs_muon() -> None:
    """Whole on a rank, cut, one over all three, or all spread: the same gradients give torch's weights."""
    assert [len(matrix.pieces) for matrix in layouts(3)["cut"]] == [1, 3, 1, 1, 1, 1]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.nn.Parameter(weight) for weight in drawn_matrices(generator)]
    judge = torch.optim.Muon(weights, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for weight, gradient in zip(weights, drawn_matrices(generator), strict=True):
            weight.grad = gradient
        judge.step()
    for by_rank in run_ranks(3, matrices_case):
        for name, matrices in by_rank.items():
            for ours, judged in zip(matrices, weights, strict=True):
                torch.testing.assert_close(ours, judged.detach(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(40, 40), (24, 96), (96, 24)])
def test_an_update_has_the_size_of_adamws(shape: tuple[int, int]) -> None:
    """Singular values near 1; so the root mean square of update_rms · √max(rows, columns) · O is update_rms."""
    found = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(6))).float()
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25
    assert float(0.2 * math.sqrt(max(shape)) * found.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)
    assert not orthogonalize(torch.zeros(shape)).any()


# ---------------------------------------------------------------- what is decayed, what must be the same on resume


def names_of(model: Transformer, groups: list[dict[str, Any]]) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(parameter)] for parameter in group["params"]} for group in groups]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decayed", [True, False])
def test_what_is_decayed(tied: bool, decayed: bool) -> None:
    config = engine_recipe(model={"tied": tied})
    table = config.optimizer.model_copy(update={"decay_embeddings": decayed})
    model = Transformer(config.model)
    everything = {name for name, _ in model.named_parameters()}
    hidden = {name for name in everything if name.endswith("_proj.weight")}
    ends = {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    kept = ends - (set() if decayed else {"embed_tokens.weight"})
    groups = parameter_groups(model, table)
    assert names_of(model, groups) == [hidden | kept, everything - hidden - kept]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for name in ("muon", "adamw8bit"):
        groups = parameter_groups(model, table.model_copy(update={"name": name}))
        split = [hidden, kept, everything - hidden - kept]
        assert names_of(model, groups) == [names for names in split if names]
        assert [bool(group.get("hidden")) for group in groups] == [True, *[False] * (len(groups) - 1)]


def identity(**changes: dict[str, Any]) -> dict[str, Any]:
    config = parse_recipe({**TABLES, **changes})
    order = SampleOrder(seed=1, seq_len=64, tokens={"a": 1_000})
    found: dict[str, Any] = {
        "order": order.describe(), "global_batch_size": 8,
        "data": {"path": "a", "stages": [{"from_tokens": 0, "weights": {"a": 1.0}}]},
        "precision": {name: getattr(config.precision, name) for name in ("compute", "master", "accumulate")},
    }  # fmt: skip
    for table, values in optimizer_identity(config).items():
        found[table] = {**found.get(table, {}), **values}
    return found


@pytest.mark.parametrize(
    "written, resumed, says",
    [
        ({}, {"optimizer": {"name": "muon"}}, "optimizer.name = adamw, this run has muon"),
        ({"optimizer": {"name": "adamw8bit"}}, {}, "optimizer.name = adamw8bit, this run has adamw"),
        ({}, {"optimizer": {"decay_embeddings": False}}, "optimizer.decay_embeddings = True, this run has False"),
        (
            {"precision": {**PLAIN, "compensation": "kahan"}}, {"precision": PLAIN},
            "precision.compensation = kahan, this run has none",
        ),
        (
            {"precision": PLAIN}, {"precision": {**PLAIN, "moments": "fp32"}},
            "precision.moments = bf16, this run has fp32",
        ),
    ],
)  # fmt: skip
def test_another_state_of_the_optimizer_is_refused_by_name(
    written: dict[str, Any], resumed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(json.dumps({**identity(**written), "consumed_samples": 8}))
    refuse_other_run(tmp_path, identity(**written))
    with pytest.raises(CheckpointError, match=says):
        refuse_other_run(tmp_path, identity(**resumed))


def test_checkpoints_of_earlier_versions_say_nothing_of_it() -> None:
    """Nor do those of today whose optimizer was there already."""
    assert set(identity()["precision"]) == {"compute", "master", "accumulate"}
    assert "optimizer" not in identity()
    assert "optimizer" not in identity(precision={**PLAIN, "moments": "bf16"})
