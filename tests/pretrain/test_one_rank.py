"""A run of one rank gives the same numbers, bit for bit, whether DeepSpeed reduces its gradients or not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import Held, measured
from benchmarks.memory_cases import SHAPES, Case, of_stage
from benchmarks.memory_cases import recipe as memory_recipe
from pretrain import engine as engine_module
from pretrain.batching import BatchPlan, steps_of
from pretrain.engine import TrainingEngine, process_group
from pretrain.memory import budget
from pretrain.resolve import refusal, resolve
from pretrain.runtime import Ranks
from pretrain.step import train_step
from tests.pretrain.test_accumulation import CLIPPED, build_model, config_of, micro_batches
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PRECISIONS = (
    ("bf16", "fp32", "fp32"),
    ("bf16", "fp32", "bf16"),
    ("bf16", "bf16", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("fp32", "fp32", "fp32"),
    ("fp16", "fp32", "fp32"),
    ("fp16", "fp32", "fp16"),
)
CASES = [
    (stage, *precision, overlap)
    for stage in (0, 1, 2)
    for precision in PRECISIONS
    for overlap in (False, True)
    if refusal(stage, *precision) is None and (not overlap or (stage == 2 and precision in PRECISIONS[:2]))
]


def state_of(engine: TrainingEngine) -> list[torch.Tensor]:
    """Weights, masters and what the optimizer keeps for them."""
    optimizer = getattr(engine._engine.optimizer, "optimizer", engine._engine.optimizer)
    masters = engine._partitions()
    kept = [value for master in masters for value in optimizer.state[master].values()]
    tensors = [*engine.gather_weights().values(), *masters, *(one for one in kept if isinstance(one, torch.Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


def trained(ranks: Ranks, stage: int, compute: str, master: str, sums: str, overlap: bool) -> dict[str, Any]:
    """Two steps of 4 and 8 micro-steps: losses, norms, state, and how many gradients were summed over the one rank."""
    config = config_of(CLIPPED, compute=compute, master=master, accumulate=sums)
    plan, steps = BatchPlan.from_config(config, 1), steps_of(config.batch)
    zero = {"stage": stage, **({"overlap_comm": True} if overlap else {})}
    resolved = resolve({"zero_optimization": zero}, config, 1)
    engine = TrainingEngine(build_model(config), config, resolved, ranks, CPU)
    batches, results = micro_batches(ranks), []
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced:
        for step in range(2):
            result = train_step(engine, batches, plan.of_step(step, steps), 1e-2)
            results.append((result.loss, result.grad_norm, result.loss_scale, result.overflowed))
    of_ranks = [call.kwargs.get("tensor", *call.args[:1]) for call in reduced.call_args_list]
    return {"results": results, "state": state_of(engine), "reductions": sum(one.numel() > 100 for one in of_ranks)}


def both_ways(ranks: Ranks, cases: list[tuple[Any, ...]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    from deepspeed.accelerator import get_accelerator

    found = []
    with (
        process_group(CPU),
        mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True),
    ):
        for case in cases:
            ours = trained(ranks, *case)
            with mock.patch.object(engine_module, "leave_out_reductions"):
                found.append((ours, trained(ranks, *case)))
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]]:
    (found,) = run_ranks(1, both_ways, CASES)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_deepspeeds_reductions(case, outcomes):
    ours, theirs = outcomes[case]
    assert ours["results"] == theirs["results"]
    assert len(ours["state"]) == len(theirs["state"]) > 0
    for one, other in zip(ours["state"], theirs["state"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_gradient_is_summed_over_one_rank(case, outcomes):
    ours, theirs = outcomes[case]
    assert theirs["reductions"] > 0
    assert ours["reductions"] == 0


# ---------------------------------------------------------------- memory


def held(ranks: Ranks, chosen: list[Case]) -> list[Held]:
    with process_group(CPU):
        return [measured(ranks, case) for case in chosen]


def test_the_budget_counts_no_buckets() -> None:
    """What one rank holds in backward, where several ranks have buckets, within 1 %."""
    chosen = []
    for stage, sums in ((1, "fp32"), (2, "bf16"), (2, "fp32")):
        config = memory_recipe(SHAPES["small"], precision={"accumulate": sums})
        resolved = resolve(of_stage(stage, SHAPES["small"].buckets_divided_by), config, 1)
        chosen.append(Case(f"zero{stage} sums {sums}", config, resolved, "bf16"))
    (found,) = run_ranks(1, held, chosen)
    for case, one in zip(chosen, found, strict=True):
        predicted = budget(case.config, case.deepspeed, 1, compute="bf16", device="cpu")
        assert predicted.static_bytes == pytest.approx(one.static_bytes, rel=0.01), case.name
        assert predicted.at("backward") == pytest.approx(one.moments["backward"], rel=0.01), case.name
        assert "reduce buckets" not in {part.name for part in predicted.parts}
