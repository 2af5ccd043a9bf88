"""What a run finds when it looks at itself: faults put into real runs are found at the next look, and by name; looking
changes no bit of what is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pretrain import train as training
from pretrain.checkpoint import list_checkpoints, measured_at
from pretrain.config import parse_recipe
from pretrain.engine import TrainingEngine, process_group
from pretrain.health import TrainingDivergedError
from pretrain.inspection import Activity
from pretrain.observing import latest, stride, together, update_ratios
from pretrain.records import read_metrics
from pretrain.replicas import checksums
from pretrain.runtime import Ranks
from tests.pretrain.test_fp16 import SMALL, with_fp16
from tests.pretrain.test_undisturbed import trained
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]

OFF = dict.fromkeys(("update_ratio", "attention_logit", "dead_units", "rank_mismatch", "late_rank", "hang"), "off")
ALWAYS = {"observe_every_steps": 1, "hash_every_steps": 1, "late_rank": "off"}  # lateness is a matter of load


# ---------------------------------------------------------------- nothing is disturbed


# Stage, packing, other tables.
SETTINGS: list[tuple[int, str, dict[str, Any]]] = [
    (0, "concat", {"precision": {"accumulate": "bf16"}, "model": {"qk_norm": True, "sliding_window": 16}}),
    (1, "concat_masked", {"precision": {"compute": "fp16", "accumulate": "fp32"}}),
    (2, "concat_masked", {"model": {"attention": "mla", "mla_latent": 32, "mla_rope_dim": 16, "ffn": "gelu"}}),
    (3, "concat_masked", {"model": {"residual": "hyper", "n_streams": 2}}),
]


@contextmanager
def one_process_group() -> Iterator[None]:
    """For several runs in one process, where DeepSpeed knows no second one."""
    with (
        process_group(torch.device("cpu")),
        with_fp16(),
        mock.patch.object(training, "process_group", return_value=nullcontext()),
    ):
        yield


def trains(ranks: Ranks, runs: dict[Path, dict[str, Any]]) -> None:
    with one_process_group():
        for path, tables in runs.items():
            assert training.train(parse_recipe(tables), path, ranks) == "finished"


def test_training_is_the_same_bit_for_bit(tiny_recipe: Tables, tmp_path: Path) -> None:
    """Looking at every step, and never; every ZeRO stage, masks, families, full activation checkpointing."""
    runs: dict[Path, dict[str, Any]] = {}
    for stage, packing, tables in SETTINGS:
        for name, health in (("always", ALWAYS), ("never", OFF)):
            runs[tmp_path / f"{stage}-{name}"] = tiny_recipe(
                **{**tables, "model": {**SMALL, **tables.get("model", {})}}, data={"packing": packing}, health=health,
                deepspeed={"config": f"ds_configs/zero{stage}.json"}, schedule={"max_steps": 3},
                checkpoint={"every_steps": 2, "keep_last": 9}, evaluation={"every_steps": 9, "max_tokens": 512},
            )  # fmt: skip
    run_ranks(2, trains, runs)
    for stage, _, tables in SETTINGS:
        always, never = tmp_path / f"{stage}-always", tmp_path / f"{stage}-never"
        assert len(trained(always)) > 10
        assert trained(always) == trained(never)
        assert not read_metrics(never / "metrics.jsonl", "observation")
        seen = read_metrics(always / "metrics.jsonl", "observation")
        assert [one["step"] for one in seen] == [1, 2, 3]
        assert all(0 < one["update_ratio"] < 1 for one in seen if "update_ratio" in one)
        assert any("update_ratio" in one for one in seen)
        assert all(one["attention_logit"] > 0 and one["residual_rms_by_layer"][0] > 0 for one in seen)
        assert not read_metrics(always / "metrics.jsonl", "alarm"), tables


# ---------------------------------------------------------------- faults in real runs

Spoil = Callable[[TrainingEngine], None]


@contextmanager
def spoilt(step: int, spoil: Spoil) -> Iterator[None]:
    """Something happens to the engine behind an optimizer step, as metrics count them."""
    train_step, made = training.train_step, [0]

    def then(engine: TrainingEngine, *arguments: Any, **settings: Any) -> Any:
        result = train_step(engine, *arguments, **settings)
        made[0] += 1
        if made[0] == step:
            spoil(engine)
        return result

    with mock.patch.object(training, "train_step", then):
        yield


def nothing(engine: TrainingEngine) -> None:
    """A clean run."""


def flip_on_the_second_rank(engine: TrainingEngine) -> None:
    """One bit of what it holds alike with others: a master under ZeRO-0, else a weight."""
    if engine.ranks.rank == 1:
        held = engine.replicas()
        name = next((one for one in held if one.endswith("(master)")), "layers.0.input_layernorm.weight")
        flat = held[name].view(-1)
        flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])[3] ^= 1 << 5


def sharpen(engine: TrainingEngine) -> None:
    """All queries of the second layer are a million times larger."""
    change(engine, "layers.1.self_attn.q_proj.weight", lambda weight: weight.mul_(1e6))


def mute(engine: TrainingEngine) -> None:
    """Nothing drives the first layer's units beyond ReLU's zero."""
    change(engine, "layers.0.mlp.up_proj.bias", lambda bias: bias.fill_(-100.0))


def change(engine: TrainingEngine, name: str, how: Callable[[Tensor], object]) -> None:
    """A parameter, its masters and what is made of them."""
    for one, master in engine.masters():
        if one == name:
            how(master)
    weight = engine.transformer.get_parameter(name)
    for held in (weight, getattr(weight, "ds_tensor", None)):
        if held is not None:
            how(held.data)


def stride_out(engine: TrainingEngine) -> None:
    """From here on the rate is a thousand times what the schedule says."""
    set_learning_rate = engine.set_learning_rate
    engine.set_learning_rate = lambda lr: set_learning_rate(1000 * lr)  # type: ignore[method-assign]


def dawdle(engine: TrainingEngine) -> None:
    """In the next step each of the second rank's two forward passes takes a second more."""
    naps = [1.0, 1.0]
    if engine.ranks.rank == 1:
        engine.transformer.register_forward_pre_hook(lambda *_: time.sleep(naps.pop()) if naps else None)


# Of each: ZeRO stage, what happens behind which step, other keys of [health]; at which step which condition is found,
# and words that say where.
FAULTS: dict[str, tuple[int, int, Spoil, dict[str, Any], int, str, str]] = {
    "flip-0": (0, 1, flip_on_the_second_rank, {"hash_every_steps": 4}, 4, "rank_mismatch", "rank 1 differs in "),
    "flip-2": (2, 3, flip_on_the_second_rank, {"hash_every_steps": 2}, 4, "rank_mismatch",
               "rank 1 differs in layers.0.input_layernorm.weight"),
    "flip-3": (3, 3, flip_on_the_second_rank, {"hash_every_steps": 2, "rank_mismatch": "warn"}, 4, "rank_mismatch",
               "rank 1 differs in layers.0.input_layernorm.weight"),
    "scores": (2, 1, sharpen, {"attention_logit": "stop"}, 2, "attention_logit", "layer 1's attention"),
    "units": (3, 1, mute, {}, 2, "dead_units", "layer 0's feed-forward units, 100.0% dead"),
    "update": (3, 3, stride_out, {}, 4, "update_ratio", "the update of layers."),
    "late": (1, 1, dawdle, {}, 2, "late_rank", "rank 1 takes "),
}  # fmt: skip
OTHERS_OFF = dict.fromkeys(OFF, "off")


def faults(ranks: Ranks, runs: dict[Path, tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """How each run ended."""
    ends: dict[str, str] = {}
    with one_process_group():
        for path, (name, tables) in runs.items():
            _, step, spoil, *_ = FAULTS[name]
            with spoilt(step, spoil):
                try:
                    ends[name] = training.train(parse_recipe(tables), path, ranks)
                except TrainingDivergedError as error:
                    ends[name] = str(error)
    return ends


def test_faults_are_found_at_the_next_look_and_named(tiny_recipe: Tables, tmp_path: Path) -> None:
    runs = {}
    for name, (stage, _, _, health, _, condition, _) in FAULTS.items():
        policy = {condition: "stop" if condition == "rank_mismatch" else "warn"}
        tables = tiny_recipe(
            model={**SMALL, "n_layers": 2, "ffn": "relu", "bias": True},
            deepspeed={"config": f"ds_configs/zero{stage}.json"},
            precision={"accumulate": "bf16"}, memory={"activation_checkpointing": "none"},
            health={**OTHERS_OFF, "observe_every_steps": 2, "hash_every_steps": 99, **policy, **health},
            schedule={"max_steps": 5}, checkpoint={"every_steps": 2, "keep_last": 9},
            evaluation={"every_steps": 9, "max_tokens": 128},
        )  # fmt: skip
        runs[tmp_path / name] = (name, tables)
    first, second = run_ranks(2, faults, runs)
    assert first == second
    for name, (_, _, _, _, step, condition, words) in FAULTS.items():
        path = tmp_path / name
        alarms = read_metrics(path / "metrics.jsonl", "alarm")
        assert alarms, name
        assert (alarms[0]["step"], alarms[0]["condition"]) == (step, condition)
        assert words in alarms[0]["detail"], alarms[0]
        stops = alarms[0]["action"] == "stop"
        assert first[name].startswith(f"step {step}: {condition}") if stops else first[name] == "finished"
        saved = {one.name: one for one in list_checkpoints(path / "checkpoints")}
        assert (f"step-{step:08d}" in saved) is not stops
        assert "step-00000002" in saved or step == 2
        if not stops:
            doubted = measured_at(saved[f"step-{step:08d}"]).get("alarms", [])
            assert doubted == ([] if condition == "late_rank" else [condition])


# ---------------------------------------------------------------- by hand


def test_a_sample_tells_the_norm_of_an_update() -> None:
    """Two ranks' parts of a matrix whose columns differ by a factor of a thousand."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(512, 1408, generator=generator) * torch.logspace(0, 3, 1408)
    update = torch.randn(512, 1408, generator=generator)
    parts = []
    for w, u in zip(weight.view(2, -1), update.view(2, -1), strict=True):
        apart = stride(len(w))
        assert apart % 2 == 1
        share = len(w) / len(w[::apart])
        sums = [float(one[::apart].double().square().sum()) * share for one in (u, w)]
        parts.append({"matrix": (sums[0], sums[1]), "zero": (1.0, 0.0)})
    found = update_ratios(parts)
    assert found == {"matrix": pytest.approx(float(update.norm() / weight.norm()), rel=0.05)}


def test_what_ranks_found_as_one() -> None:
    one = Activity([1.0, float("nan")], [0.5, 0.0], [0.0, 0.2], [3.0, 1.0])
    other = Activity([2.0, 9.0], [0.25, 0.5], [0.5, 0.1], [4.0, 1.0])
    found = together([one, other])
    assert found.largest_logits[0] == 2
    for logits in (found.largest_logits, together([other, one]).largest_logits):
        assert logits[1] != logits[1]  # what is no number is worse than any
    assert found.dead_units == [0.25, 0.0]
    assert found.saturated_units == [0.0, 0.1]
    assert found.residual_rms == [pytest.approx(12.5**0.5), 1.0]


def test_the_latest_of_two_is_measured_by_the_other() -> None:
    late = latest([(1.0, 4.0), (3.0, 4.0)])
    assert late is not None
    assert (late.rank, late.own_seconds, late.median_seconds, late.step_seconds) == (1, 3.0, 1.0, 4.0)
    assert latest([(None, None), (1.0, 2.0)]) is None


def test_checksums_see_every_bit_and_every_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.replicas.AT_ONCE", 64)
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.int8):
        tensor = (torch.randn(300, generator=torch.Generator().manual_seed(2)) * 20).to(dtype)
        ((plain, weighted),) = checksums([tensor])
        spelled = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
        for place in (0, 63, 64, 299):
            for bit in (0, 5):
                spelled[place] ^= 1 << bit
                assert checksums([tensor])[0][0] != plain
                spelled[place] ^= 1 << bit
        swapped = tensor.clone()
        swapped[[3, 40]] = swapped[[40, 3]]
        assert checksums([swapped])[0] != [plain, weighted]
        assert checksums([tensor.clone()]) == [[plain, weighted]]
    assert checksums([]) == []
