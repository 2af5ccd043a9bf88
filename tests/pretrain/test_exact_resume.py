"""Interrupted twice and resumed, a run is the run that never was: every kind of engine and optimizer, bit for bit.

Compared are the samples read, every loss, norm and rate, and every checkpoint on the way: weights, masters, moments,
step counts, generator states. SOAK_SEED draws where the runs are interrupted; SOAK_KINDS is how many kinds of engine of
each stage are tried in `make soak`, drawn too, instead of all.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import pretrain.train
from data_pipeline.loader import Batch
from pretrain.checkpoint import list_checkpoints
from pretrain.config import RecipeError, parse_recipe
from pretrain.engine import process_group
from pretrain.inputs import Inputs
from pretrain.metrics import Report, all_records, read_metrics
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints
from pretrain.state import TrainState
from pretrain.step import train_step
from tests.pretrain.test_fp16 import with_fp16
from tests.pretrain.test_resume import assert_same_checkpoint
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]

STEPS = 4  # each of them saved
OFFLOADS = ("", "_offload", "_offload_param")  # of ds_configs/zeroN….json


class Kind(NamedTuple):
    """What may make a difference to what is saved and how it comes back."""

    stage: int
    optimizer: str = "adamw"
    compute: str = "bf16"
    master: str = "fp32"
    accumulate: str = "bf16"
    moments: str = "master"
    compensation: str = "none"
    checkpointing: str = "none"
    offload: str = ""
    asynchronous: bool = False

    def tables(self, tiny_recipe: Tables) -> dict[str, Any]:
        names = ("compute", "master", "accumulate", "moments", "compensation")
        return tiny_recipe(
            model={"d_model": 64, "n_layers": 2, "n_heads": 1, "d_ff": 96, "seq_len": 32},
            batch={"global_batch_size": 8, "micro_batch_size": 2},
            schedule={"max_steps": STEPS},
            optimizer={"name": self.optimizer},
            precision={name: getattr(self, name) for name in names} | {"initial_scale_power": 8},
            memory={"activation_checkpointing": self.checkpointing},
            evaluation={"every_steps": STEPS, "max_tokens": 32},
            checkpoint={"every_steps": 1, "keep_last": STEPS, "asynchronous": self.asynchronous},
            deepspeed={"config": f"ds_configs/zero{self.stage}{self.offload}.json"},
        )

    def is_offered(self, tiny_recipe: Tables) -> bool:
        """Whether a run of it starts: what an engine cannot hold is refused."""
        try:
            Inputs.check(parse_recipe(self.tables(tiny_recipe)), 2)
        except RecipeError:
            return False
        return True


class StruckError(Exception):
    pass


class Leg(NamedTuple):
    tables: dict[str, Any]
    path: Path
    end: int  # behind this step's save and the next step it is interrupted; STEPS: it goes to its end


def legs_case(ranks: Ranks, legs: Sequence[Leg]) -> list[list[list[int]]]:
    """The samples that this rank reads, of each step of each leg. Each is a run of its own, in one process group."""
    found = []
    with (
        with_fp16(),
        process_group(torch.device("cpu")),  # DeepSpeed can't be started twice in a process
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
    ):
        for leg in legs:
            read: list[list[int]] = []
            with interrupted_behind(leg.end, read):
                try:
                    assert pretrain.train.train(parse_recipe(leg.tables), leg.path, ranks) == "finished"
                    assert leg.end == STEPS
                except StruckError:
                    assert leg.end < STEPS
            ranks.barrier()
            found.append(read)
    return found


def interrupted_behind(end: int, read: list[list[int]]) -> Any:
    """Patches: note the samples of each step; end the run abruptly behind step `end + 1`, whose save is not begun.

    A save that is still being written then is waited for: else an earlier checkpoint would be the newest one.
    """

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            read[-1].extend(batch.samples.tolist())
            yield batch

    def step(engine: Any, batches: Iterator[Batch], *rest: Any, **wishes: Any) -> Any:
        read.append([])
        return train_step(engine, watched(batches), *rest, **wishes)

    class Watched(Report):
        reached = 0

        def step(self, state: TrainState, **figures: Any) -> None:
            super().step(state, **figures)
            Watched.reached = state.global_step

    class Struck(Checkpoints):
        def poll(self) -> None:
            if Watched.reached == end + 1:
                self.finish()
                raise StruckError
            super().poll()

    return mock.patch.multiple(pretrain.train, train_step=step, Report=Watched, Checkpoints=Struck)


def kept_up_to(step: int, source: Path, target: Path) -> None:
    """A copy of a run as it was behind the save of `step`, but for the steps it recorded later."""
    shutil.copytree(source, target)
    for checkpoint in list_checkpoints(target / "checkpoints"):
        if checkpoint.name > f"step-{step:08d}":
            shutil.rmtree(checkpoint)


def show_exact(kinds: Sequence[Kind], tiny_recipe: Tables, home: Path, draw: random.Random) -> None:
    """Run each kind through, then from a step drawn, interrupted at another, and from there to the end."""
    drawn = [sorted(draw.sample(range(1, STEPS), 2)) for _ in kinds]
    tables = [kind.tables(tiny_recipe) for kind in kinds]
    paths = [home / str(number) for number in range(len(kinds))]
    samples = [run_ranks(2, legs_case, [Leg(t, path / "whole", STEPS) for t, path in zip(tables, paths, strict=True)])]
    for path, (first, _) in zip(paths, drawn, strict=True):
        kept_up_to(first, path / "whole", path / "first")
    ends = [second for _, second in drawn]
    for source, target, end_at in (("first", "first", ends), ("first", "second", [STEPS] * len(kinds))):
        if source != target:
            for path, end in zip(paths, ends, strict=True):
                kept_up_to(end, path / source, path / target)
        legs = [Leg(t, path / target, end) for t, path, end in zip(tables, paths, end_at, strict=True)]
        samples.append(run_ranks(2, legs_case, legs))
    for number, (kind, path, (first, second)) in enumerate(zip(kinds, paths, drawn, strict=True)):
        print(f"{tuple(kind)}: resumed behind {first}, then behind {second}")
        whole = path / "whole"
        for rank in (0, 1):
            read, *resumed = (launch[rank][number] for launch in samples)
            assert len(read) == STEPS
            assert resumed == [read[first : second + 1], read[second:]], (kind, "other samples")
        attempts = json.loads((path / "second" / "environment.json").read_text())["attempts"]
        sources = [one["resumed_from"] and Path(one["resumed_from"]).name for one in attempts]
        assert sources == [None, f"step-{first:08d}", f"step-{second:08d}"]
        expected = {one["step"]: one for one in read_metrics(whole / "metrics.jsonl")}
        records = [one for one in all_records(path / "second" / "metrics.jsonl") if one["kind"] == "train"]
        assert Counter(one["attempt"] for one in records) == {1: STEPS, 2: second + 1 - first, 3: STEPS - second}
        for one in records:
            for figure in ("loss", "grad_norm", "lr", "tokens"):
                assert one[figure] == expected[one["step"]][figure], (kind, one["attempt"], one["step"], figure)
        assert len({one["loss"] for one in records}) == STEPS, "nothing was learnt"
        for checkpoint in list_checkpoints(whole / "checkpoints"):
            for resumed_path in ("first", "second"):
                other = path / resumed_path / "checkpoints" / checkpoint.name
                if other.exists():
                    assert_same_checkpoint(checkpoint, other)
        assert (path / "second" / "checkpoints" / f"step-{STEPS:08d}").exists()


SOME = [  # with those that test_resume.py kills, each stage has both dtypes of masters
    Kind(1, accumulate="fp32"),
    Kind(1, master="bf16"),
    Kind(1, "adamw8bit", master="bf16", checkpointing="full"),
    Kind(2, "muon", master="bf16", accumulate="fp32", compensation="kahan", asynchronous=True),
    Kind(3, accumulate="fp32", asynchronous=True),
    Kind(3, master="bf16", compensation="stochastic"),
]


def test_interrupted_twice_it_ends_as_ever(tiny_recipe: Tables, tmp_path: Path) -> None:
    show_exact(SOME, tiny_recipe, tmp_path, random.Random(2))


def all_kinds(tiny_recipe: Tables, stage: int) -> list[Kind]:
    """What a stage offers: optimizers, dtypes, compensation, checkpointing, offloading, and ways to save."""
    choices = itertools.product(
        [stage], ("adamw", "muon", "adamw8bit"), ("bf16", "fp16", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"),
        ("master", "fp32"), ("none", "kahan", "stochastic"), ("none", "full"), OFFLOADS,
    )  # fmt: skip
    kinds = []
    for kind in itertools.starmap(Kind, choices):
        named = f"zero{stage}{kind.offload}.json"
        there = (pretrain.config.PROJECT_ROOT / "ds_configs" / named).is_file()
        twice = (kind.master, kind.moments) == ("fp32", "fp32")  # "master" means the same
        if there and not twice and kind.is_offered(tiny_recipe):
            kinds.append(kind)
    return kinds


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_same_of_all_that_is_offered(stage: int, asynchronous: bool, tiny_recipe: Tables, tmp_path: Path) -> None:
    seed = os.environ.get("SOAK_SEED", "1")
    draw = random.Random(f"{seed} {stage} {asynchronous}")
    offered = all_kinds(tiny_recipe, stage)
    chosen = draw.sample(offered, min(len(offered), int(os.environ.get("SOAK_KINDS", len(offered)))))
    print(f"ZeRO-{stage}: {len(chosen)} of {len(offered)} kinds, seed {seed}", flush=True)
    kinds = [kind._replace(asynchronous=asynchronous) for kind in chosen]
    show_exact(kinds, tiny_recipe, tmp_path, draw)
