"""The memory budget: by hand where that is easy, and against what live engines hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.memory import compared
from benchmarks.memory_cases import COMPONENTS, MLA, SHAPES, Case, Shape, cases, component_cases, of_stage, recipe
from model.accounting import parameter_count, parameter_shapes
from model.config import PRESETS
from model.transformer import Transformer
from pretrain.config import RecipeError, RunConfig
from pretrain.engine_memory import PIECE, QUANTIZED_BLOCK
from pretrain.memory import MOMENTS, Budget, budget
from pretrain.memory_sizes import RankSizes, group_sizes
from pretrain.resolve import resolve
from tests.pretrain.recipe import recipe as smallest_recipe

TINY = Shape(
    {
        "preset": "mini", "vocab_size": 256, "d_model": 128, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1,
        "d_ff": 352, "seq_len": 32,
    },
    "full", 16, 1000,
)  # fmt: skip
MINI = parameter_count(PRESETS["mini"])


def budget_of(
    stage: int, ranks: int = 2, device: Any = "cuda", zero: dict[str, Any] | None = None, **tables: Any
) -> Budget:
    """Of `mini` in one micro-step, in bf16 unless `precision` says otherwise."""
    config = smallest_recipe(batch={"global_batch_size": ranks, "micro_batch_size": 1}, **tables)
    resolved = resolve({"zero_optimization": {"stage": stage, **(zero or {})}}, config, ranks)
    return budget(config, resolved, ranks, compute=config.precision.compute_where("bf16"), device=device)


def bytes_of(found: Budget, *names: str) -> int:
    return sum(part.bytes for part in found.parts if part.name in names)


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_the_module(tied: bool) -> None:
    config = replace(PRESETS["mini"], n_layers=2, d_model=64, d_ff=96, vocab_size=128, tied=tied)
    built = {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())


@pytest.mark.parametrize(
    "stage, precision, per_parameter",
    [  # weights, gradients behind the last backward, an accumulation buffer, masters and two moments
        (0, {"accumulate": "bf16"}, 2 + 2 + 4 + 8),
        (1, {"accumulate": "fp32"}, 2 + 2 + 4 + (4 + 8) / 2),
        (2, {"accumulate": "fp32"}, 2 + 4 / 2 + (4 + 8) / 2),
        (3, {"accumulate": "fp32"}, 2 / 2 + 4 / 2 + (4 + 8) / 2),
        (2, {"accumulate": "fp32", "master": "bf16"}, 2 + 4 / 2 + (2 + 4) / 2),
        (2, {"accumulate": "fp32", "master": "bf16", "moments": "fp32"}, 2 + 4 / 2 + (2 + 8) / 2),
        (2, {"accumulate": "fp32", "master": "bf16", "compensation": "kahan"}, 2 + 4 / 2 + (2 + 4 + 2) / 2),
        (0, {"compute": "fp32"}, 4 + 4 + 8),
        (3, {"compute": "fp32"}, (4 + 4 + 4 + 8) / 2),
    ],
)
def test_the_training_state(stage: int, precision: dict[str, Any], per_parameter: float) -> None:
    """The table that was first measured on live engines, to a thousandth for padding and RoPE's tables."""
    small = {"reduce_bucket_size": 2, "stage3_param_persistence_threshold": 0} if stage == 3 else None
    found = budget_of(stage, precision=precision, zero=small)
    assert found.static_bytes / MINI == pytest.approx(per_parameter, rel=0.01)


def test_optimizers_have_their_own_states() -> None:
    hidden = sum(
        size for name, size in _named_sizes().items() if name.startswith("layers.") and "layernorm" not in name
    )
    plain = bytes_of(budget_of(2, 1), "moments")
    assert plain == pytest.approx(8 * MINI, rel=1e-6)
    muon = budget_of(2, 1, optimizer={"name": "muon"})
    assert bytes_of(muon, "momentum of hidden matrices") == 4 * hidden
    assert bytes_of(muon, "moments") == pytest.approx(8 * (MINI - hidden), rel=1e-6)
    eight = budget_of(2, 1, optimizer={"name": "adamw8bit"})
    assert bytes_of(eight, "8-bit moments of hidden matrices") == pytest.approx(2 * hidden * (1 + 4 / 256), rel=1e-6)


def _named_sizes() -> dict[str, int]:
    return {name: int(torch.Size(shape).numel()) for name, shape in parameter_shapes(PRESETS["mini"]).items()}


def test_groups_are_the_optimizers() -> None:
    from pretrain.optimizer import parameter_groups

    for table in ({}, {"decay_embeddings": False}, {"name": "muon"}, {"name": "adamw8bit", "decay_embeddings": False}):
        config = recipe(TINY, optimizer=table)
        built = parameter_groups(Transformer(config.model), config.optimizer)
        assert [[p.numel() for p in group["params"]] for group in built] == [list(g) for g in groups_of(config)]


def groups_of(config: RunConfig) -> tuple[tuple[int, ...], ...]:
    return group_sizes(config.model, config.optimizer.name, config.optimizer.decay_embeddings)[0]


def test_pieces_are_the_optimizers() -> None:
    from pretrain import adamw, eight_bit

    assert PIECE == adamw.PIECE
    assert QUANTIZED_BLOCK == eight_bit.BLOCK


def test_partitions_cut_flat_groups() -> None:
    """Of tensors of 6, 3, 5 elements on two ranks the first has 6 and 1 of 3, padding included 8."""
    facts = RankSizes.of(recipe(TINY), resolve(of_stage(2, 1), recipe(TINY), 2), 2, "bf16", "cpu")
    facts = replace(facts, groups=((6, 3, 5),))
    assert (facts.partitions, facts.owned, facts.largest_piece) == ((8,), 9, 6)
    assert replace(facts, ranks=3, groups=((6, 3, 5),)).partitions == ((6,))
    assert replace(facts, stage=3, groups=((6, 3, 5),)).partitions == (3 + 2 + 3,)


def test_offloaded_states_are_main_memorys() -> None:
    kept = budget_of(2)
    given: Any = smallest_recipe(batch={"global_batch_size": 2, "micro_batch_size": 1})
    resolved = resolve({"zero_optimization": {"stage": 2}}, given, 2)
    resolved["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    moved = budget(given, resolved, 2, compute="bf16", device="cuda")
    states = bytes_of(kept, "masters", "moments")
    assert kept.static_bytes - moved.static_bytes == states - bytes_of(moved, "buffer for a gradient")
    assert moved.peak_bytes("host") > kept.peak_bytes("host") + states


def test_a_budget_adds_up_and_says_when_most_is_held() -> None:
    found = budget_of(2)
    assert found.peak_bytes() == max(found.at(moment) for moment in MOMENTS) == found.at(found.peak_moment)
    assert found.at("backward") == sum(part.bytes for part in found.parts_at("backward"))
    assert all(part.formula and part.bytes > 0 for part in found.parts)
    assert bytes_of(found, "copy of the weights, first rank") == found.at("saving", "host") == 2 * MINI


def test_what_asynchronous_saving_copies_is_in_main_memory_from_the_first_save_on() -> None:
    checkpoint = {"every_steps": 50, "asynchronous": True}
    found, kept = budget_of(2, checkpoint=checkpoint), budget_of(2)
    copied = bytes_of(found, "copy of weights, first rank", "copy of masters", "copy of moments")
    assert copied == pytest.approx((2 + 12 / 2) * MINI, rel=1e-4)
    assert {moment: found.at(moment, "host") for moment in MOMENTS[1:]} == dict.fromkeys(MOMENTS[1:], copied)
    assert [found.at(moment) for moment in MOMENTS] == [kept.at(moment) for moment in MOMENTS]
    assert found.at("start", "host") == kept.at("start", "host")
    on_cpu = [budget_of(2, device="cpu", checkpoint=table) for table in (checkpoint, {"every_steps": 50})]
    assert on_cpu[0].static_bytes - on_cpu[1].static_bytes == copied
    assert on_cpu[0].state_bytes == on_cpu[1].state_bytes


def test_later_micro_steps_hold_the_earlier_sums() -> None:
    one, two = (
        budget(config, resolve(of_stage(2, 1), config, 2), 2, compute="bf16", device="cuda")
        for config in (recipe(SHAPES["mini"], micro_steps) for micro_steps in (1, 2))
    )
    gradients = bytes_of(two, "gradients")
    assert two.at("forward") - one.at("forward") == gradients
    assert two.at("step") == one.at("step")


@pytest.mark.parametrize("ramp, last, accumulates", [(4, 2, True), (2, 4, True), (2, 2, False)])
def test_any_part_of_a_ramp_may_accumulate(ramp: int, last: int, accumulates: bool) -> None:
    batch = {
        "global_batch_size": last, "micro_batch_size": 1, "ramp": [{"until_samples": 16, "global_batch_size": ramp}],
    }  # fmt: skip
    config = smallest_recipe(batch=batch)
    resolved = resolve({"zero_optimization": {"stage": 2}}, config, 2)
    assert RankSizes.of(config, resolved, 2, "bf16", "cuda").later is accumulates


def test_muon_orthogonalizes_hidden_matrices_alone() -> None:
    found = budget_of(3, 8, optimizer={"name": "muon"})
    assert bytes_of(found, "orthogonalization") == 8 * 512 * 1408 + 6 * 512**2


def test_the_start_holds_the_whole_model() -> None:
    """mini on 64 ranks under ZeRO-3: in fp32, with a head to be tied, in main memory, then in bf16 on the device."""
    small = {"reduce_bucket_size": 2, "stage3_param_persistence_threshold": 0}
    found = budget_of(3, 64, zero=small)
    assert bytes_of(found, "model in fp32", "head, before it is tied") == found.at("start", "host")
    assert found.at("start", "host") == 4 * (MINI + 4096 * 512)
    assert found.at("start") == 2 * MINI + bytes_of(found, "RoPE tables")
    assert {part.lives for part in found.parts if part.static} == {"always", "after start"}
    assert budget_of(3, 64, device="cpu", zero=small).at("start") > 4 * MINI


def test_what_the_engine_cannot_hold_has_no_budget() -> None:
    config = smallest_recipe()
    resolved = resolve({"zero_optimization": {"stage": 2}}, config, 2)
    resolved["zero_optimization"]["stage"] = 0
    with pytest.raises(RecipeError, match="unsupported mix"):
        budget(config, resolved, 2, compute="bf16", device="cpu")


# ---------------------------------------------------------------- live engines


def test_live_engines_hold_what_is_predicted() -> None:
    """Two ranks, every stage and every precision it runs: static and start within 2 %, the peak within 10 %."""
    found = compared(
        [*cases(TINY, [0, 1, 2, 3]), *without_buckets(), *saved_from_copies(), *with_components(), kept_whole()]
    )
    assert len(found) == 22 + 3 + 4 + 4 + 1
    assert [one.line() for one in found if not one.is_within] == []
    at_start = {one.case: one.moments_predicted["start"] / one.moments_measured["start"] for one in found}
    assert {case: ratio for case, ratio in at_start.items() if abs(ratio - 1) > 0.02} == {}
    whole = found[-1]
    ratios = [whole.moments_predicted[moment] / whole.moments_measured[moment] for moment in ("step", "saving")]
    assert ratios == pytest.approx([1, 1], abs=0.05)


def kept_whole() -> Case:
    """All parameters are small to ZeRO-3, which has them whole between steps."""
    case = next(cases(TINY, [3]))
    zero = {**case.deepspeed["zero_optimization"], "stage3_param_persistence_threshold": 10**6}
    return replace(case, name="kept whole", deepspeed={**case.deepspeed, "zero_optimization": zero})


def with_components() -> Iterator[Case]:
    """Every component in one of some models, much of whose peak is activations; each apart: the soak."""
    models = {
        "the 2017 block, QK-Norm": (1, {**COMPONENTS["the 2017 block"], "qk_norm": True}),
        "DeepNorm, window, no positions": (2, {"norm_place": "deepnorm", "sliding_window": 48, "positions": "none"}),
        "GPT-2's block": (3, COMPONENTS["GPT-2's block"]),
        "MLA, streams, YaRN": (3, {**COMPONENTS["YaRN"], **MLA, "residual": "hyper", "n_streams": 3}),
    }
    shape = SHAPES["components"]
    for name, (stage, choice) in models.items():
        chosen = replace(shape, model={**shape.model, "seq_len": 160, **choice})
        yield replace(next(cases(chosen, [stage])), name=f"zero{stage} {name}")


def without_buckets() -> Iterator[Case]:
    for case in cases(TINY, [1, 2, 3]):
        if case.name.endswith("bf16 master fp32 sums bf16"):
            zero = {**case.deepspeed["zero_optimization"], "contiguous_gradients": False}
            yield replace(case, name=f"{case.name}, no buffer", deepspeed={**case.deepspeed, "zero_optimization": zero})


def saved_from_copies() -> Iterator[Case]:
    """One of each kind of engine, with asynchronous saving."""
    chosen = (
        "zero0 bf16 master fp32 sums bf16",
        "zero1 bf16 master fp32 sums fp32",
        "zero2 bf16 master bf16 sums fp32",
    )
    for case in cases(TINY, [0, 1, 2, 3]):
        if case.name in (*chosen, "zero3 bf16 master fp32 sums fp32"):
            saving = case.config.checkpoint.model_copy(update={"asynchronous": True})
            yield replace(
                case, name=f"{case.name}, copied", config=case.config.model_copy(update={"checkpoint": saving})
            )


@pytest.mark.soak
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_live_engines_with_each_component_hold_what_is_predicted(checkpointing: str) -> None:
    shape = replace(SHAPES["components"], checkpointing=checkpointing)
    found = compared(list(component_cases(shape, range(4))))
    assert len(found) == 4 * len(COMPONENTS)
    assert [one.line() for one in found if not one.is_within or abs(one.peak_ratio - 1) > 0.05] == []


@pytest.mark.soak
def test_live_engines_of_mini_hold_what_is_predicted() -> None:
    """Without fp16, which a CPU computes some fifty times slower."""
    found = compared([case for case in cases(SHAPES["mini"], [0, 1, 2, 3]) if case.compute != "fp16"])
    assert [one.line() for one in found if not one.is_within] == []
