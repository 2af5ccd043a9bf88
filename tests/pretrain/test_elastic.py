"""Other ranks, another ZeRO stage: every master and state the same to the last bit, and the run goes on as it would."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import pretrain.train
from data_pipeline.loader import Batch
from pretrain.checkpoint import list_checkpoints
from pretrain.config import RunConfig, parse_recipe
from pretrain.eight_bit import BLOCK, decoded, dequantize, quantize
from pretrain.elastic import Layout, places
from pretrain.engine import TrainingEngine, process_group
from pretrain.metrics import Report, read_metrics
from pretrain.resolve import resolve
from pretrain.runtime import Ranks
from pretrain.state import TrainState
from pretrain.step import train_step
from tests.pretrain.test_engine import build_model, micro_batches, plan_of, recipe
from tests.pretrain.test_fp16 import overflows_at, with_fp16
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]

BF16 = {"compute": "bf16", "master": "bf16", "accumulate": "bf16"}
# name → optimizer, precision, the stages that have it
KINDS: dict[str, tuple[str, dict[str, str], tuple[int, ...]]] = {
    "adamw": ("adamw", {"compute": "bf16", "accumulate": "bf16"}, (0, 1, 2, 3)),
    "sums in fp32": ("adamw", {"compute": "bf16"}, (1, 2, 3)),
    "fp32": ("adamw", {"compute": "fp32"}, (0, 1, 2, 3)),
    "fp16": ("adamw", {"compute": "fp16"}, (1, 2, 3)),
    "kahan": ("adamw", {**BF16, "compensation": "kahan"}, (1, 2, 3)),
    "fp32 moments": ("adamw", {**BF16, "moments": "fp32"}, (1, 2, 3)),
    "muon": ("muon", {"compute": "fp32"}, (0, 1, 2, 3)),
    "adamw8bit": ("adamw8bit", {"compute": "bf16", "accumulate": "bf16"}, (0, 1, 2, 3)),
}
# Of the loss, between runs whose sums are made in another order: half a step of bf16's 8 bits, or fp32's noise.
ROUNDING = {kind: 1e-5 if precision["compute"] == "fp32" else 2**-9 for kind, (_, precision, _) in KINDS.items()}
STEPS, SAVED_AT = 20, (3, 11)  # the chains' steps, and behind which they change ranks or stage


class Place(NamedTuple):
    stage: int
    world_size: int
    zero: str = "{}"  # what the DeepSpeed JSON says beside the stage


class Chain(NamedTuple):
    """A run that goes on elsewhere, twice."""

    kind: str
    places: tuple[Place, Place, Place]

    def folder(self, home: Path, leg: int) -> Path:
        return home / f"{self.kind}-{'-'.join(f'{p.stage}x{p.world_size}' for p in self.places)}-{leg}"


OFFLOADED = '{"offload_optimizer": {"device": "cpu"}}'
CHAINS = [
    Chain("sums in fp32", (Place(1, 2), Place(1, 1), Place(1, 2))),
    Chain("kahan", (Place(2, 2), Place(2, 1), Place(2, 2))),
    Chain("adamw8bit", (Place(3, 2), Place(3, 1), Place(3, 2))),
    Chain("muon", (Place(1, 2), Place(3, 2), Place(2, 2))),
    # Another order of parameters, and gaps between them: other layouts too.
    Chain("fp32", (Place(1, 2, '{"round_robin_gradients": true}'), Place(1, 2), Place(0, 2))),
    Chain("fp16", (Place(2, 2, '{"parameter_alignment": true}'), Place(2, 2), Place(3, 2))),
    Chain("muon", (Place(3, 2), Place(3, 2, '{"sub_group_size": 20000}'), Place(3, 2))),
    Chain("adamw", (Place(0, 2), Place(3, 1, OFFLOADED), Place(1, 2, OFFLOADED))),
]


def config_of(kind: str, world_size: int) -> RunConfig:
    name, precision, _ = KINDS[kind]
    small = {"n_layers": 1, "d_model": 64, "n_heads": 1, "n_kv_heads": 1, "d_ff": 96}
    config = recipe(model=small, memory="none", **precision)
    return config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update={"name": name}),
            "batch": config.batch.model_copy(update={"global_batch_size": 12, "micro_batch_size": 12 // world_size}),
            "precision": config.precision.model_copy(update={"initial_scale_power": 8}),
        }
    )


def build(ranks: Ranks, kind: str, place: Place) -> TrainingEngine:
    zero: dict[str, Any] = {"stage": place.stage, **json.loads(place.zero)}
    if place.stage == 3:  # nothing stays whole, and there are several sub-groups
        kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero = {f"stage3_{name}": 0 for name in kept} | {"sub_group_size": 5_000} | zero
    config = config_of(kind, ranks.world_size)
    resolved = resolve({"zero_optimization": zero}, config, ranks.world_size)
    return TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu"))


def steps(engine: TrainingEngine, kind: str, count: int) -> list[float]:
    """The losses of so many steps on one batch; in fp16 the second step of the run overflows."""
    config = config_of(kind, engine.ranks.world_size)
    batches, plan = micro_batches(config, engine.ranks, ignored=True), plan_of(config, engine.ranks)
    with overflows_at((2,) if kind == "fp16" else ()):
        return [train_step(engine, batches, plan, 1e-3).loss for _ in range(count)]


def optimizer_of(engine: TrainingEngine) -> torch.optim.Optimizer:
    zero = engine._engine.optimizer
    found: torch.optim.Optimizer = getattr(zero, "optimizer", zero)
    return found


def whole(engine: TrainingEngine) -> dict[tuple[str, str], Tensor]:
    """Every weight, master and state by names, gathered by DeepSpeed, which knows nothing of pretrain/elastic.py.

    It has no way to gather moments of 8 bits: in the engine they become the numbers they stand for.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    zero, optimizer = engine._engine.optimizer, optimizer_of(engine)
    found = {(name, "weight"): weight for name, weight in engine.gather_weights().items()}
    counts = (engine.skipped_steps, engine._engine.global_steps, engine.learning_rate)
    found["", "counts"] = torch.tensor([*counts, *{float(state["step"]) for state in optimizer.state.values()}])
    if getattr(zero, "dynamic_loss_scale", False):
        scaler = zero.loss_scaler
        found["", "scale"] = torch.tensor([scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter])
    if getattr(zero, "round_robin_gradients", False):  # DeepSpeed gathers other parameters' masters then
        return {name: value.float().flatten().clone() for name, value in found.items()}
    keys: set[str] = set()
    for state in optimizer.state.values():
        for key in [key.removesuffix("_codes") for key in state if key.endswith("_codes")]:
            state[key] = dequantize(state.pop(f"{key}_codes"), state.pop(f"{key}_scales"), key == "exp_avg")
        keys |= {key for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    if 0 < engine.zero_stage < 3:
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for name, parameter in engine._engine.module.named_parameters():
        hidden = name.startswith("layers.") and name.endswith("proj.weight")
        own = keys & {"momentum"} if "momentum" in keys and hidden else keys - {"momentum"}
        if engine.zero_stage:
            with gathered_in_fp32(zero) if engine.zero_stage == 3 else nullcontext():
                found[name, "master"] = safe_get_full_fp32_param(parameter)
                found |= {(name, key): safe_get_full_optimizer_state(parameter, key) for key in own}
        else:
            master = masters[list(engine._sizes).index(name)]
            found[name, "master"] = master
            found |= {(name, key): optimizer.state[master][key] for key in own}
    return {name: value.detach().float().flatten().clone() for name, value in found.items()}


def gathered_in_fp32(zero: Any) -> Any:
    """DeepSpeed's ZeRO-3 gathers moments in the dtype of the masters, which would round fp32 ones beside bf16."""
    return mock.patch.object(zero, "master_weights_and_grads_dtype", torch.float32)


def differences(saved: dict[Any, Tensor], here: dict[Any, Tensor]) -> list[Any]:
    """What was saved and is not the same here, to the last bit."""
    return sorted(name for name in saved if name not in here or not torch.equal(saved[name], here[name]))


# ---------------------------------------------------------------- runs that go on elsewhere


Told = dict[tuple[Chain, int], tuple[list[Any], str, list[float]]]


def legs_case(
    ranks: Ranks, home: Path, legs: Sequence[tuple[Chain, int]], run: tuple[dict[str, Any], Path] | None = None
) -> tuple[Told, dict[Chain, list[float]], list[Any]]:
    """The legs of some chains: what differs when loaded, the layout it came from, and the losses of its steps; the
    losses of each chain's first leg had it gone on; and what `run` said and read."""
    told: Told = {}
    uninterrupted: dict[Chain, list[float]] = {}
    with with_fp16(), process_group(torch.device("cpu")):
        for chain, leg in legs:
            engine = build(ranks, chain.kind, chain.places[leg])
            differ, layout = [], "none"
            if leg:
                layout = str(engine.load(chain.folder(home, leg - 1) / "engine"))
                differ = differences(torch.load(chain.folder(home, leg - 1) / "whole.pt"), whole(engine))
            first, last = ((0, *SAVED_AT, STEPS)[leg + edge] for edge in (0, 1))
            losses = steps(engine, chain.kind, last - first)
            told[chain, leg] = differ if ranks.is_first else [], layout, losses
            if leg == 2:
                continue
            engine.save(chain.folder(home, leg) / "engine")
            numbers = whole(engine)
            if ranks.is_first:
                torch.save(numbers, chain.folder(home, leg) / "whole.pt")
            if leg == 0:
                uninterrupted[chain] = losses + steps(engine, chain.kind, STEPS - last)
        return told, uninterrupted, [] if run is None else watched_run(ranks, *run)


def watched_run(ranks: Ranks, tables: dict[str, Any], path: Path) -> tuple[list[str], list[int]]:
    """What a run of `pretrain run` says, and the samples that this rank reads for its steps."""
    said: list[str] = []
    read: list[int] = []

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            read.extend(batch.samples.tolist())
            yield batch

    def step(engine: Any, batches: Iterator[Batch], *rest: Any, **wishes: Any) -> Any:
        return train_step(engine, watched(batches), *rest, **wishes)

    with (
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
        mock.patch.object(pretrain.train, "train_step", step),
        mock.patch.object(Report, "say", lambda report, message: said.append(message)),
    ):
        assert pretrain.train.train(parse_recipe(tables), path, ranks) == "finished"
    return said, read


class Results(NamedTuple):
    told: Told
    uninterrupted: dict[Chain, list[float]]
    run: Path  # of 4 steps on 2 ranks, 4 on 1, 4 on 2
    said: list[list[str]]
    read: list[list[int]]  # samples of each of these three, in the order of steps
    whole_run: Path  # the same run on 2 ranks


@pytest.fixture(scope="module")
def results(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> Results:
    home = tmp_path_factory.mktemp("elastic")

    def run(stage: int, max_steps: int) -> dict[str, Any]:
        tables = tiny_recipe(
            deepspeed={"config": f"ds_configs/zero{stage}.json"},
            checkpoint={"every_steps": 99},
            evaluation={"every_steps": 99, "max_tokens": 128},
        )
        return {**tables, "schedule": {"name": "constant", "peak_lr": 1e-3, "warmup_steps": 2, "max_steps": max_steps}}

    legs = [(chain, leg) for leg in (0, 1, 2) for chain in CHAINS]
    alone = [(chain, leg) for chain, leg in legs if chain.places[leg].world_size == 1]
    behind = [(chain, leg) for chain, leg in legs if leg and (chain, leg) not in alone]
    launches = [
        run_ranks(2, legs_case, home, [(chain, 0) for chain in CHAINS], (run(2, 4), home / "run")),
        run_ranks(1, legs_case, home, alone, (run(3, 8), home / "run")),
        run_ranks(2, legs_case, home, behind, (run(1, 12), home / "run")),
        run_ranks(2, legs_case, home, [], (run(2, 12), home / "whole")),
    ]
    told: Told = {}
    for launch in launches:
        told.update(launch[0][0])
    said = [launch[0][2][0] for launch in launches[:3]]
    read = [[sample for rank in launch for sample in rank[2][1]] for launch in launches[:3]]
    return Results(told, launches[0][0][1], home / "run", said, read, home / "whole")


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_every_number_arrives_and_the_losses_go_on(chain: Chain, results: Results) -> None:
    legs = [results.told[chain, leg] for leg in (0, 1, 2)]
    for (differ, layout, _), earlier in zip(legs[1:], chain.places, strict=False):
        assert differ == []
        assert layout == f"{earlier.world_size} rank{'s'[: earlier.world_size - 1]} under ZeRO-{earlier.stage}"
    losses = [loss for _, _, part in legs for loss in part]
    expected = results.uninterrupted[chain]
    assert len(losses) == len(expected) == STEPS
    assert losses[: SAVED_AT[0]] == expected[: SAVED_AT[0]]
    assert losses == pytest.approx(expected, rel=ROUNDING[chain.kind])
    assert max(losses) - min(losses) > 0.5, "nothing was learnt"


def test_a_run_converts_by_itself_says_so_and_reads_the_same_samples(results: Results) -> None:
    folder = results.run / "checkpoints"
    assert not any("converted" in message for message in results.said[0])
    for said, step, there, here in (
        (results.said[1], 4, "2 ranks under ZeRO-2", "1 rank under ZeRO-3"),
        (results.said[2], 8, "1 rank under ZeRO-3", "2 ranks under ZeRO-1"),
    ):
        assert f"{folder}/step-{step:08d} was written by {there}: converted for {here}" in said
    attempts = json.loads((results.run / "environment.json").read_text())["attempts"]
    assert [attempt["converted_from"] for attempt in attempts] == [
        None,
        {"world_size": 2, "zero_stage": 2},
        {"world_size": 1, "zero_stage": 3},
    ]
    for number, samples in enumerate(results.read):
        assert sorted(samples) == list(range(number * 32, (number + 1) * 32))  # 4 steps of 8
    runs = (results.run, results.whole_run)
    ours, theirs = ({record["step"]: record for record in read_metrics(path / "metrics.jsonl")} for path in runs)
    assert ours.keys() == theirs.keys() == set(range(1, 13))
    for step, record in ours.items():
        assert record["loss"] == pytest.approx(theirs[step]["loss"], rel=ROUNDING["sums in fp32"])
        assert record["lr"] == theirs[step]["lr"]
        assert record["tokens"] == theirs[step]["tokens"]
    newest = [TrainState.of(list_checkpoints(path / "checkpoints")[-1]) for path in runs]
    assert newest[0] == newest[1]


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_element_has_one_place(stage: int, world_size: int) -> None:
    partitions = ((("a", 50), ("b", 1), ("c", 9)), (("d", 5),)) if stage else ((("a", 50),), (("b", 1),))
    gaps = [[2, 0, 0], [0]] if stage else [[0], [0]]
    flats = [sum(size for _, size in one) + sum(gap) for one, gap in zip(partitions, gaps, strict=True)]
    lengths = [-(-flat // world_size) for flat in flats]
    found = places(Layout(stage, world_size, partitions), lengths, gaps)
    for number, (partition, where) in enumerate(zip(partitions, found, strict=True)):
        taken: set[tuple[int, int]] = set()
        assert list(where) == [name for name, _ in partition]
        for name, size in partition:
            elements = [e for piece in where[name] for e in range(piece.start, piece.start + piece.size)]
            assert elements == list(range(size))
            for piece in where[name]:
                here = {(piece.rank, offset) for offset in range(piece.offset, piece.offset + piece.size)}
                assert len(here) == piece.size
                assert not here & taken
                taken |= here
        if stage == 1:
            assert max(offset for _, offset in taken) < lengths[number]


def test_what_is_converted_is_told_apart() -> None:
    here, elsewhere = Layout(2, 2, ((("a", 50), ("b", 1)),)), Layout(2, 1, ((("a", 50), ("b", 1)),))
    assert here.told_beside(elsewhere) == "2 ranks under ZeRO-2"
    reordered = Layout(2, 2, ((("b", 1), ("a", 50)),))
    assert here.told_beside(reordered) == "2 ranks under ZeRO-2, its parameters laid out otherwise"


def test_some_moments_of_8_bits_are_decoded_as_all_of_them() -> None:
    count = 3 * BLOCK + 17
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -6, count)
    codes, scales = quantize(values, True)
    for here in (slice(0, len(values)), slice(BLOCK - 1, 2 * BLOCK + 1), slice(700, 701)):
        assert torch.equal(decoded(codes, scales, here, signed=True), dequantize(codes, scales, True)[here])


# ---------------------------------------------------------------- all pairs, in `make soak`


def layouts(kinds: Sequence[str], *sizes: int) -> Iterator[tuple[str, Place]]:
    for kind, size in itertools.product(kinds, sizes):
        for stage in KINDS[kind][2]:
            yield kind, Place(stage, size)


def folder_of(home: Path, kind: str, place: Place) -> Path:
    return home / f"{kind}-{place.stage}-{place.world_size}"


def written_case(ranks: Ranks, home: Path, kinds: Sequence[str]) -> dict[tuple[str, Place], list[float]]:
    """Three steps in each layout, saved, with all of it whole beside it; then the losses of 20 steps more."""
    losses = {}
    with with_fp16(), process_group(torch.device("cpu")):
        for kind, place in layouts(kinds, ranks.world_size):
            engine, folder = build(ranks, kind, place), folder_of(home, kind, place)
            steps(engine, kind, 3)
            engine.save(folder / "engine")
            numbers = whole(engine)
            if ranks.is_first:
                torch.save(numbers, folder / "whole.pt")
            losses[kind, place] = steps(engine, kind, STEPS)
    return losses


def read_case(
    ranks: Ranks, home: Path, kinds: Sequence[str], sizes: Sequence[int]
) -> dict[tuple[str, Place, Place], tuple[list[Any], list[float]]]:
    """Each of these layouts' files in each engine of this world size: what differs, and the losses of 20 steps."""
    found = {}
    with with_fp16(), process_group(torch.device("cpu")):
        for kind, there in layouts(kinds, *sizes):
            for _, here in layouts([kind], ranks.world_size):
                engine = build(ranks, kind, here)
                engine.load(folder_of(home, kind, there) / "engine")
                differ = differences(torch.load(folder_of(home, kind, there) / "whole.pt"), whole(engine))
                found[kind, there, here] = differ if ranks.is_first else [], steps(engine, kind, STEPS)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_in_every_other(kind: str, tmp_path: Path) -> None:
    """On 1 to SOAK_RANKS (3) ranks."""
    sizes = range(1, int(os.environ.get("SOAK_RANKS", "3")) + 1)
    expected = {}
    for size in sizes:
        expected.update(run_ranks(size, written_case, tmp_path, [kind])[0])
    furthest = 0.0
    for size in sizes:
        for (_, there, here), (differ, losses) in run_ranks(size, read_case, tmp_path, [kind], sizes)[0].items():
            assert differ == [], (there, here)
            assert losses == pytest.approx(expected[kind, there], rel=ROUNDING[kind]), (there, here)
            off = (abs(ours / theirs - 1) for ours, theirs in zip(losses, expected[kind, there], strict=True))
            furthest = max(furthest, *off)
    pairs = len(expected) ** 2
    print(f"{kind}: {pairs} pairs, losses of {STEPS} steps differ by {furthest:.1e} of themselves at most", flush=True)
