"""Offloading on the real engine: the same stage's updates bit for bit, resumed exactly; what is not so is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pretrain.config import PROJECT_ROOT, RecipeError, RunConfig
from pretrain.engine import TrainingEngine, process_group
from pretrain.resolve import OFFLOAD_KEYS, OFFLOAD_REFUSED, OFFLOAD_STAGE, read_json, resolve
from pretrain.runtime import Ranks
from pretrain.step import StepResult, train_step
from tests.pretrain.recipe import recipe as smallest_recipe
from tests.pretrain.test_engine import build_model, micro_batches, plan_of, recipe
from tests.pretrain.test_fp16 import overflows_at, with_fp16
from tests.pretrain.test_resolve import deepspeed_source
from tests.ranks import run_ranks

SMALL = {"d_model": 64, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "d_ff": 64}
IN_MAIN_MEMORY = {"device": "cpu", "pin_memory": True}
OPTIMIZER = ("offload_optimizer",)
BOTH = ("offload_optimizer", "offload_param")
STEPS, SAVED = 3, 2


class Case(NamedTuple):
    """A stage with precisions, and which sections are offloaded."""

    stage: int
    compute: str
    master: str
    accumulate: str
    sections: tuple[str, ...]
    compensation: str = "none"
    clipping: float | str = "off"


# With clipping, the last bit of the norm, summed in another order, is in every weight: so only fp32 has it.
CASES = [
    *(Case(stage, "fp32", "fp32", "fp32", OPTIMIZER, clipping=0.5) for stage in (1, 2, 3)),
    *(Case(stage, "bf16", "fp32", "fp32", OPTIMIZER) for stage in (1, 2, 3)),
    Case(2, "bf16", "fp32", "bf16", OPTIMIZER),
    *(Case(stage, "fp16", "fp32", "fp32", OPTIMIZER) for stage in (1, 2, 3)),
    Case(3, "fp32", "fp32", "fp32", BOTH, clipping=0.5),
    Case(3, "bf16", "fp32", "bf16", BOTH),
    Case(3, "bf16", "bf16", "fp32", ("offload_param",), compensation="kahan"),
]


def config_of(case: Case) -> RunConfig:
    whole = recipe(
        model=SMALL, memory="none", compute=case.compute, master=case.master, accumulate=case.accumulate,
        compensation=case.compensation,
    )  # fmt: skip
    optimizer = whole.optimizer.model_copy(update={"gradient_clipping": case.clipping})
    precision = whole.precision.model_copy(update={"initial_scale_power": 8})
    return whole.model_copy(update={"optimizer": optimizer, "precision": precision})


def build(ranks: Ranks, case: Case, sections: tuple[str, ...]) -> TrainingEngine:
    config = config_of(case)
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": 10_000}
    if case.stage == 3:  # a model this small would be gathered once and stay whole on every rank
        kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero.update({f"stage3_{name}": 0 for name in kept})
    zero.update(dict.fromkeys(sections, IN_MAIN_MEMORY))
    resolved = resolve({"zero_optimization": zero}, config, ranks.world_size)
    return TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu"))


def steps_of(engine: TrainingEngine, case: Case, ranks: Ranks, count: int) -> list[StepResult]:
    """Steps on one batch whose ranks have unequal numbers of targets; in fp16 the second overflows on one rank."""
    config = config_of(case)
    batches, plan = micro_batches(config, ranks, ignored=True), plan_of(config, ranks)
    overflows = (2,) if case.compute == "fp16" and ranks.rank == 1 else ()
    with overflows_at(overflows):
        return [train_step(engine, batches, plan, lr=1e-2) for _ in range(count)]


def offloads(engine: TrainingEngine) -> dict[str, bool]:
    """What DeepSpeed itself says that it offloads."""
    zero = engine._engine.optimizer
    held = getattr(zero, "cpu_offload", getattr(zero, "offload_optimizer", False))
    return {"offload_optimizer": bool(held), "offload_param": bool(getattr(zero, "offload_param", False))}


def offload_case(ranks: Ranks, folder: Path) -> dict[str, dict[str, Any]]:
    """Per case: the steps and last weights without offloading, with it, resumed, and resumed from the other kind."""
    found: dict[str, dict[str, Any]] = {}
    with with_fp16(), process_group(torch.device("cpu")):
        for number, case in enumerate(CASES):
            results: dict[str, Any] = {}
            saved = {}
            for name, sections in (("plain", ()), ("offloaded", case.sections)):
                engine = build(ranks, case, sections)
                steps = steps_of(engine, case, ranks, SAVED)
                saved[name] = folder / f"{number}-{name}" / "step"
                engine.save(saved[name])
                steps += steps_of(engine, case, ranks, STEPS - SAVED)
                results[name] = (steps, engine.gather_weights(), engine.skipped_steps)
            results["offloads"] = offloads(engine)
            results["optimizer"] = type(engine._engine.optimizer.optimizer).__name__
            engine = build(ranks, case, case.sections)
            for name, source in (("resumed", "offloaded"), ("moved", "plain")):
                engine.load(saved[source])
                steps = steps_of(engine, case, ranks, STEPS - SAVED)
                results[name] = (steps, engine.gather_weights(), engine.skipped_steps)
            found[str(number)] = results
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, offload_case, tmp_path_factory.mktemp("offload"))


def name_of(case: Case) -> str:
    return f"zero{case.stage}-{case.compute}-{case.master}-{case.accumulate}-{'-'.join(case.sections)}"


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of a tensor's."""
    assert first.keys() == second.keys() != set()
    pairs = [(first[name].float(), second[name].float()) for name in first]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_updates_are_those_of_the_same_stage_without_offloading(
    case: Case, results: list[dict[str, dict[str, Any]]]
) -> None:
    """Unequal token counts, two accumulated micro-steps, clipping in fp32, an overflow on one rank in fp16."""
    found = results[0][str(CASES.index(case))]
    assert found["offloads"] == {section: section in case.sections for section in OFFLOAD_STAGE}
    (plain, plain_weights, plain_skipped), (steps, weights, skipped) = found["plain"], found["offloaded"]
    assert (skipped, plain_skipped) == (1, 1) if case.compute == "fp16" else (skipped, plain_skipped) == (0, 0)
    assert [step.loss_scale for step in steps] == [step.loss_scale for step in plain]
    for step, reference in zip(steps, plain, strict=True):
        assert step.loss == pytest.approx(reference.loss, rel=1e-6)
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=2e-6)
    assert steps[0].grad_norm > 0.5, "nothing to clip"
    assert distance(weights, plain_weights) <= (1e-6 if case.clipping != "off" else 0.0)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_saved_and_loaded_goes_on_bit_for_bit(case: Case, results: list[dict[str, dict[str, Any]]]) -> None:
    found = results[0][str(CASES.index(case))]
    (whole, weights, _), (steps, resumed_weights, _) = found["offloaded"], found["resumed"]
    assert steps == whole[SAVED:]
    assert distance(resumed_weights, weights) == 0.0


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_checkpoint_of_the_same_stage_goes_on_offloaded(case: Case, results: list[dict[str, dict[str, Any]]]) -> None:
    found = results[0][str(CASES.index(case))]
    (plain, weights, _), (steps, moved_weights, _) = found["plain"], found["moved"]
    assert [step.loss for step in steps] == [step.loss for step in plain[SAVED:]]
    assert distance(moved_weights, weights) <= (1e-6 if case.clipping != "off" else 0.0)


# ---------------------------------------------------------------- what the JSON may say


def zero_with(stage: int, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **sections}}


@pytest.mark.parametrize("path", sorted((PROJECT_ROOT / "ds_configs").glob("*_offload*.json")), ids=lambda p: p.stem)
def test_the_files_here_differ_from_those_of_their_stage_in_the_sections_alone(path: Path) -> None:
    whole = read_json(path)
    zero = whole["zero_optimization"]
    sections = {section: zero.pop(section) for section in OFFLOAD_STAGE if section in zero}
    assert sections == dict.fromkeys(BOTH if path.stem.endswith("_param") else OPTIMIZER, IN_MAIN_MEMORY)
    assert whole == read_json(path.with_name(f"{path.stem.partition('_')[0]}.json"))


@pytest.mark.parametrize("path", sorted((PROJECT_ROOT / "ds_configs").glob("*_offload*.json")), ids=lambda p: p.stem)
def test_nothing_about_offloading_is_left_implicit(path: Path) -> None:
    ds_json = read_json(path)
    resolved = resolve(ds_json, smallest_recipe(), 2)
    assert resolved["zero_force_ds_cpu_optimizer"] is False
    for section in OFFLOAD_STAGE:
        if section in ds_json["zero_optimization"]:
            del ds_json["zero_optimization"][section]["pin_memory"]
    assert resolve(ds_json, smallest_recipe(), 2) == resolved
    assert all("pin_memory" not in part for part in ds_json["zero_optimization"].values() if isinstance(part, dict))


def test_without_offloading_deepspeed_is_told_nothing_of_it() -> None:
    assert "zero_force_ds_cpu_optimizer" not in resolve(zero_with(2), smallest_recipe(), 2)


@pytest.mark.parametrize(
    "stage, section, values, says",
    [
        (0, "offload_optimizer", IN_MAIN_MEMORY, "does nothing at stage 0, stages 1, 2 and 3 have it"),
        (2, "offload_param", IN_MAIN_MEMORY, "does nothing at stage 2, stage 3 has it"),
        (2, "offload_optimizer", {}, 'write {"device": "cpu"}, or remove it'),
        (2, "offload_optimizer", None, "must say where to"),
        (2, "offload_optimizer", "cpu", "must say where to"),
        (2, "offload_optimizer", {"pin_memory": True}, "must say where to"),
        (2, "offload_optimizer", {"device": "none"}, "offload_optimizer.device = 'none': must be \"cpu\""),
        (2, "offload_optimizer", {"device": "gpu"}, "offload_optimizer.device = 'gpu': must be \"cpu\""),
        (3, "offload_optimizer", {"device": "nvme"}, "NVMe is not supported"),
        (3, "offload_param", {"device": "nvme", "nvme_path": "/tmp"}, "NVMe is not supported"),
        (2, "offload_optimizer", {**IN_MAIN_MEMORY, "pin_memory": 1}, "pin_memory = 1: must be true or false"),
        (2, "offload_optimizer", {**IN_MAIN_MEMORY, "pinned_memory": True}, "did you mean pin_memory?"),
        (3, "offload_optimizer", {**IN_MAIN_MEMORY, "ratio": 0.5}, "offload_optimizer.ratio: a part of the optimizer"),
        (3, "offload_optimizer", {**IN_MAIN_MEMORY, "super_offload": True}, "CPU Adam, which is not used here"),
        (3, "offload_param", {**IN_MAIN_MEMORY, "max_in_cpu": 10}, "offload_param.max_in_cpu: it belongs to NVMe"),
        (3, "zenflow", {}, "unknown or unsupported key zero_optimization.zenflow"),
    ],
)  # fmt: skip
def test_what_a_section_cannot_say_is_refused(stage: int, section: str, values: object, says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        resolve(zero_with(stage, **{section: values}), smallest_recipe(), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tables, says",
    [
        ({"optimizer": {"name": "muon"}}, 'set optimizer.name = "adamw" instead of "muon"'),
        ({"optimizer": {"name": "adamw8bit"}}, 'instead of "adamw8bit"'),
        ({"precision": {"master": "bf16"}}, 'keeps fp32 masters .*: set precision.master = "fp32"'),
        ({"precision": {"master": "bf16", "moments": "fp32"}}, "rounds their fp32 moments to bf16 at every resume"),
        ({"precision": {"master": "bf16", "compensation": "kahan"}}, 'set precision.master = "fp32"'),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_cannot_be_offloaded_is_refused_where_it_would_be(
    stage: int, tables: dict[str, Any], says: str
) -> None:
    config = smallest_recipe(**tables)
    with pytest.raises(RecipeError, match=says) as caught:
        resolve(zero_with(stage, offload_optimizer=IN_MAIN_MEMORY), config, 1)
    assert "\n" not in str(caught.value)
    assert resolve(zero_with(stage), config, 1)
    if stage == 3:
        assert resolve(zero_with(stage, offload_param=IN_MAIN_MEMORY), config, 1)


def test_the_keys_are_those_of_the_installed_deepspeed() -> None:
    fields = set(re.findall(r"^    (\w+): .*= ", deepspeed_source("runtime/zero/offload_config.py"), re.MULTILINE))
    assert fields == OFFLOAD_KEYS.keys() | OFFLOAD_REFUSED.keys()
