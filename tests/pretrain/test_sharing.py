"""Machines without a shared file system: rank processes whose run directory of one name lies in several places."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.train
import pretrain.transfer
from data_pipeline.durable import file_sha256
from data_pipeline.prepare import Options, prepare
from pretrain.checkpoint import list_checkpoints, load_model, read_manifest, verify
from pretrain.config import parse_recipe
from pretrain.engine import process_group
from pretrain.inputs import Inputs
from pretrain.joining import join
from pretrain.metrics import Report, read_metrics
from pretrain.parts import Shelf, every_file, part_manifest
from pretrain.resuming import choose, newest_whole, preview, preview_text
from pretrain.run_directory import CheckpointError, RunDirectory
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints
from pretrain.sharing import Sharing, discover
from pretrain.state import TrainState
from pretrain.train import train
from pretrain.transfer import Carried, Courier
from tests.command_line import run_command
from tests.pretrain.test_resume import assert_same_checkpoint
from tests.ranks import live_ranks, run_ranks

Tables = Callable[..., dict[str, Any]]

RUN = Path("run")  # relative: another folder in every place
DATA = "/proc/self/cwd/data"  # the same
SHORT: dict[str, dict[str, Any]] = {"schedule": {"max_steps": 6}, "evaluation": {"every_steps": 6}}
EVERY = {"every_steps": 2, "keep_last": 3}
BETWEEN = "killed between the renames"
KILL = "killed behind step 5"


def as_node(ranks: Ranks, places: Sequence[Path]) -> Ranks:
    """Become a rank of one of `len(places)` machines, each of which has a place of its own and as many ranks."""
    node, local_rank = divmod(ranks.rank, ranks.world_size // len(places))
    os.chdir(places[node])
    os.environ["LOCAL_RANK"] = str(local_rank)
    return Ranks(ranks.rank, local_rank, ranks.world_size)


def train_case(ranks: Ranks, places: Sequence[Path], tables: dict[str, Any], event: object = None) -> str:
    """A run on several machines. On the last of them something may happen: a stop file at a step, or a kill."""
    ranks = as_node(ranks, places)
    record, commit = Report.step, Checkpoints._commit

    def record_and_ask(self: Report, state: TrainState, **figures: Any) -> None:
        record(self, state, **figures)
        if ranks.rank == ranks.world_size - 1:
            if state.global_step == event:
                (RUN / "stop").touch()
            if (state.global_step, event) == (5, KILL):
                os.kill(os.getpid(), signal.SIGKILL)

    def die_before(self: Checkpoints, flight: Any, manifest: Any) -> Any:
        if event == BETWEEN and flight.step == 4 and ranks.rank == ranks.world_size - 1:
            while not (places[0] / flight.folder / "manifest.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, flight, manifest)

    with mock.patch.object(Report, "step", record_and_ask), mock.patch.object(Checkpoints, "_commit", die_before):
        return train(parse_recipe(tables), RUN, ranks)


def checkpoints_of(place: Path) -> dict[str, Path]:
    return {path.name: path for path in list_checkpoints(place / RUN / "checkpoints")}


def attempts_of(place: Path) -> list[dict[str, Any]]:
    return RunDirectory(place / RUN).attempts()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Tables) -> Path:
    """Where two ranks have run that share their file system."""
    place = tmp_path_factory.mktemp("shared")
    recipe = tiny_recipe(**SHORT, checkpoint=EVERY)
    assert run_ranks(2, train_case, [place], recipe) == ["finished"] * 2
    return place


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Tables) -> list[Path]:
    """Where two machines have run that share none, after a kill in the middle of a commit."""
    places = [tmp_path_factory.mktemp("node-a"), tmp_path_factory.mktemp("node-b")]
    recipe = tiny_recipe(**SHORT, checkpoint={**EVERY, "placement": "per_node"})
    with live_ranks(2, train_case, places, recipe, BETWEEN) as started:
        for process, _ in started:
            process.join()
        assert started[1][0].exitcode == -signal.SIGKILL
    assert [list(checkpoints_of(place)) for place in places] == [["step-00000002", "step-00000004"], ["step-00000002"]]
    assert run_ranks(2, train_case, places, recipe) == ["finished"] * 2
    return places


def losses(place: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(place / RUN / "metrics.jsonl")]


def test_each_machine_keeps_its_part_and_a_kill_between_their_commits_costs_that_checkpoint(
    parted: list[Path], shared: Path
) -> None:
    assert [attempts_of(place)[-1]["resumed_from"] for place in parted] == ["run/checkpoints/step-00000002"] * 2
    assert [attempts_of(place)[-1]["attempt"] for place in parted] == [2, 2]
    assert [attempts_of(place)[-1].get("first_host") for place in parted] == [None, platform.node()]
    assert (parted[0] / RUN / "checkpoints" / "step-00000004.damaged").is_dir()
    assert losses(parted[0]) == losses(shared)
    whole = checkpoints_of(shared)
    assert list(whole) == ["step-00000002", "step-00000004", "step-00000006"]
    for place in parted:
        assert list(checkpoints_of(place)) == list(whole)
        assert not list((place / RUN / "checkpoints").glob("*.partial"))
        assert {path.name for path in (place / RUN).iterdir()} >= {"recipe.toml", "environment.json", "tokenizer"}
    for name in ("step-00000004", "step-00000006"):
        files = [read_manifest(checkpoints_of(place)[name])["files"] for place in parted]
        assert files[0].keys() & files[1].keys() == {"state.json"}
        assert {**files[0], **files[1]} == read_manifest(whole[name])["files"]
        assert [
            path.exists()
            for path in (parted[1] / RUN / "checkpoints" / name / n for n in ("model.json", "weights.safetensors"))
        ] == [False, False]
    receipts = [json.loads((parted[0] / RUN / "receipts" / f"rank-0000{rank}.json").read_text()) for rank in (0, 1)]
    assert [(one["rank"], one["attempt"], one["state"]) for one in receipts] == [(0, 2, "finished"), (1, 2, "finished")]
    assert [path.name for path in (parted[1] / RUN / "receipts").iterdir()] == ["rank-00001.json"]


def shelf_case(ranks: Ranks, places: Sequence[Path], damaged: Sequence[tuple[int, str]]) -> list[Any]:
    """What a resume takes where a file of a place's newest checkpoint is flipped, or all of it gone (no name)."""
    ranks = as_node(ranks, places)
    taken: list[Any] = []
    with process_group(torch.device("cpu")):
        sharing = discover(RUN, ranks)
        for number, name in damaged:
            folder = Path(f"{RUN}-{len(taken)}")
            if sharing.leads:
                shutil.copytree(RUN, folder)
                newest = list_checkpoints(folder / "checkpoints")[-1]
                if sharing.home == number:
                    flip(newest / name) if name else shutil.rmtree(newest)
            said: list[str] = []
            ranks.barrier()
            chosen = Shelf(folder / "checkpoints", sharing, gathers=False).choose("auto", said.append)
            taken.append(
                (
                    chosen and chosen.name.partition(".")[0],
                    said,
                    sorted(p.name for p in (folder / "checkpoints").glob("*.damaged")),
                )
            )
            ranks.barrier()
            if sharing.leads:
                shutil.rmtree(folder)
    return taken


def test_damage_on_one_machine_costs_the_checkpoint_on_all(parted: list[Path]) -> None:
    newest = [list(checkpoints_of(place).values())[-1] for place in parted]
    files = [[str(path.relative_to(one)) for path in sorted(one.rglob("*")) if path.is_file()] for one in newest]
    damaged = [(number, name) for number in (0, 1) for name in [*files[number], ""]]
    first, second = run_ranks(2, shelf_case, parted, damaged)
    assert len(first) == len(damaged) > 12
    for (number, name), (chosen, said, aside), (other_chosen, _, others_aside) in zip(
        damaged, first, second, strict=True
    ):
        assert chosen == other_chosen == "step-00000004", (number, name)
        assert len(said) == 1, (number, name)
        assert said[0].endswith("; trying the one before it")
        assert (name or "all machines together lack") in said[0]
        assert {"step-00000006.damaged"} <= ({*aside} | {*others_aside}), (number, name)


def choosing_case(ranks: Ranks, places: Sequence[Path], asked: Sequence[tuple[str, str]]) -> list[Any]:
    """What is chosen for `folder` and `resume`: its place, and the files that are found there; or the error."""
    ranks = as_node(ranks, places)
    answers: list[Any] = []
    with process_group(torch.device("cpu")):
        sharing = discover(RUN, ranks)
        for folder, resume in asked:
            shelf = Shelf(Path(folder, "checkpoints"), sharing, gathers=False)
            try:
                chosen = shelf.choose(resume, print)
                answers.append(None if chosen is None else (str(chosen), sorted(p.name for p in chosen.rglob("*.pt"))))
                shelf.clear()
            except CheckpointError as error:
                answers.append(str(error))
    return answers


def test_machines_in_another_order_and_too_few_of_them(parted: list[Path], tmp_path: Path) -> None:
    places = [tmp_path / "b", tmp_path / "a"]  # of rank 0 now what was of rank 1
    for source, place in zip(reversed(parted), places, strict=True):
        shutil.copytree(source, place)
        lost = place / "lost" / "checkpoints" / "step-00000006"
        shutil.copytree(source / RUN / "checkpoints" / "step-00000006", lost)
        manifest = read_manifest(lost)
        every = {**every_file(manifest), "rng-00002.pt": {"bytes": 1, "sha256": "0" * 64}}
        part = part_manifest(manifest["files"], every, manifest["part"]["number"], ["a", "b", "c"])
        (lost / "manifest.json").write_text(json.dumps(part))
        older = place / "older" / "checkpoints"  # the same, and one before it that is whole here
        shutil.copytree(lost, older / lost.name)
        shutil.copytree(source / RUN / "checkpoints" / "step-00000004", older / "step-00000004")
        (older / "latest").write_text(lost.name)
    before, newest = f"{RUN}/checkpoints/step-00000004", f"{RUN}/checkpoints/step-00000006"
    asked = [
        (str(RUN), "auto"),
        (str(RUN), "never"),
        (str(RUN), before),
        ("branch", before),
        ("lost", "auto"),
        ("none", "auto"),
        ("older", "auto"),
    ]
    first, second = run_ranks(2, choosing_case, places, asked)
    optimizers = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    header = "mp_rank_00_model_states.pt"
    assert first[0] == (
        f"{newest}.fetched.partial",
        sorted([optimizers[0], optimizers[1], header, "rng-00000.pt", "rng-00001.pt"]),
    )
    assert second[0][0] == f"{newest}.fetched.partial"
    assert {optimizers[1], header, "rng-00001.pt"} <= set(second[0][1])
    for answers in (first, second):
        assert "run/checkpoints already holds checkpoints" in answers[1]
        assert "goes on behind step-00000004, to step-00000006" in answers[2]
        assert answers[3][0] == "branch/checkpoints/step-00000004.fetched.partial"
        assert (
            "lack 1 of 11 files, rng-00002.pt among them; 1 more had parts of it: start on all machines" in answers[4]
        )
        assert answers[5] is None
        assert answers[6][0] == "older/checkpoints/step-00000004.fetched.partial"
    for place in places:
        older = place / "older" / "checkpoints"
        assert sorted(path.name for path in older.iterdir()) == ["latest", "step-00000004", "step-00000006.incomplete"]
        assert (older / "latest").read_text() == "step-00000004\n"
        assert [path.name for path in (place / "lost" / "checkpoints").iterdir()] == ["step-00000006"]
        assert not list(place.rglob("*.partial"))


def test_parts_are_no_checkpoint_for_one_machine_until_they_are_joined(
    parted: list[Path], shared: Path, tmp_path: Path, tiny_recipe: Tables
) -> None:
    place = tmp_path / "a"
    shutil.copytree(parted[0], place)
    recipe = tiny_recipe(**SHORT, checkpoint=EVERY)
    identity = Inputs.check(parse_recipe(recipe), 1).identity
    with pytest.raises(CheckpointError, match=r"step-00000006 is part 1 of 2, of .*join them with .* --gather COPY"):
        choose(place / RUN / "checkpoints", "auto", identity)
    folder = place / RUN / "checkpoints"
    with pytest.raises(CheckpointError, match=r"step-00000006 is part 1 of 2, of .*join them with .* --gather COPY"):
        preview(folder, "auto", lambda _: identity)
    found = preview(folder, "auto", lambda _: Inputs.check(parse_recipe(recipe), 2).identity, alone=False)
    assert found is not None
    assert (found["part"], found["global_step"]) == ("1 of 2", 6)
    assert "part 1 of 2, the machines must hold the rest between them" in preview_text(found, 2, 2)
    listed = run_command("pretrain", "checkpoints", place / RUN, "--verify", "--json")
    assert [(one["state"], one["part"]) for one in json.loads(listed.stdout)["checkpoints"]] == [
        ("whole", "1 of 2")
    ] * 3
    with pytest.raises(CheckpointError, match=r"is part 2 of 2, of "):
        load_model(parted[1] / RUN)
    answer = run_command("pretrain", "checkpoints", place / RUN, "--gather", tmp_path)
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert "is no copy of a run directory" in answer.stderr
    shutil.copytree(parted[1], tmp_path / "b")
    copy = checkpoints_of(tmp_path / "b")
    flip(copy["step-00000006"] / "rng-00001.pt")
    flip(place / RUN / "checkpoints" / "step-00000002" / "manifest.json")
    answer = run_command("pretrain", "checkpoints", place / RUN, "--gather", tmp_path / "b" / RUN)
    assert (answer.returncode, answer.stdout) == (1, "whole now: step-00000004\n"), answer.stderr
    assert "step-00000002/manifest.json is" in answer.stderr
    assert "rng-00001.pt is damaged" in answer.stderr
    part = place / RUN / "checkpoints" / "step-00000006"
    assert "part" in read_manifest(part)

    flip(place / RUN / "checkpoints" / "step-00000002" / "manifest.json")
    copies = [f"--gather={other / RUN}" for other in (tmp_path / "b", parted[1])]  # the first one's file is damaged
    answer = run_command("pretrain", "checkpoints", place / RUN, *copies, "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == {
        "run": str(place / RUN),
        "joined": ["step-00000002", "step-00000006"],
        "left": {},
    }
    for name, path in checkpoints_of(place).items():
        verify(path)
        if name != "step-00000002":  # saved by another attempt, at another time
            assert_same_checkpoint(path, checkpoints_of(shared)[name])
    chosen = choose(place / RUN / "checkpoints", "auto", identity)
    assert chosen is not None
    assert chosen.name == "step-00000006"


def test_a_part_that_no_copy_completes_is_passed_over_for_an_older_whole_one(
    parted: list[Path], tmp_path: Path
) -> None:
    """As behind a kill between two machines' commits: the other one has no part of the newest."""
    for place, name in zip(parted, "ab", strict=True):
        shutil.copytree(place, tmp_path / name)
    shutil.rmtree(checkpoints_of(tmp_path / "b")["step-00000006"])
    (checkpoints_of(tmp_path / "b")["step-00000002"] / "manifest.json").write_text("{")
    run = RunDirectory(tmp_path / "a" / RUN)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    joined = join(run, [tmp_path / "b" / RUN, tmp_path / "c" / RUN])
    assert [path.name for path in joined.whole] == ["step-00000004"]
    assert list(joined.left) == ["step-00000002", "step-00000006"]
    assert "b/run/checkpoints/step-00000002/manifest.json is missing or damaged" in joined.left["step-00000002"]
    assert "that holds step-00000006" in joined.left["step-00000006"]

    said: list[str] = []
    newest = newest_whole(run.checkpoints, said.append)
    assert newest == run.checkpoints / "step-00000004"
    assert len(said) == 1
    assert "step-00000006 is part 1 of 2, of " in said[0]
    assert said[0].endswith(
        "going on from step-00000004 instead, which is whole here: the part is renamed, to ….incomplete"
    )
    assert list(checkpoints_of(tmp_path / "a")) == ["step-00000002", "step-00000004"]
    assert (run.checkpoints / "step-00000006.incomplete" / "manifest.json").is_file()
    assert (run.checkpoints / "latest").read_text() == "step-00000004\n"


def test_another_stage_goes_on_from_parts(parted: list[Path], tmp_path: Path, tiny_recipe: Tables) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for source, place in zip(parted, places, strict=True):
        shutil.copytree(source, place)
    recipe = tiny_recipe(
        **{**SHORT, "schedule": {"max_steps": 7}}, checkpoint={**EVERY, "placement": "per_node"},
        deepspeed={"config": "ds_configs/zero3.json"},
    )  # fmt: skip
    assert run_ranks(2, train_case, places, recipe) == ["finished"] * 2
    assert [attempts_of(place)[-1]["converted_from"] for place in places] == [{"world_size": 2, "zero_stage": 2}] * 2
    assert not list((tmp_path / "b" / RUN / "checkpoints").glob("*.partial"))


def test_gathered_checkpoints_are_whole_on_the_first_machine(shared: Path, tmp_path: Path, tiny_recipe: Tables) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    recipe = tiny_recipe(**SHORT, checkpoint={**EVERY, "placement": "gathered", "asynchronous": True})
    assert run_ranks(2, train_case, places, recipe, 5) == ["stopped"] * 2
    reasons = [json.loads((places[0] / RUN / "receipts" / f"rank-0000{r}.json").read_text())["reason"] for r in (0, 1)]
    assert reasons == ["the file run/stop on rank 1"] * 2
    assert [list(checkpoints_of(place)) for place in places] == [
        ["step-00000002", "step-00000004", "step-00000005"], []
    ]  # fmt: skip
    assert_same_checkpoint(checkpoints_of(places[0])["step-00000004"], checkpoints_of(shared)["step-00000004"])
    scored = run_command("pretrain", "evaluate", places[0] / RUN, "--max-tokens", 1024, "--json")
    assert scored.returncode == 0, scored.stderr

    alone = tmp_path / "alone"
    shutil.copytree(places[0], alone)
    shutil.rmtree(places[1] / RUN)
    assert run_ranks(2, train_case, places, recipe) == ["finished"] * 2
    assert_same_checkpoint(checkpoints_of(places[0])["step-00000006"], checkpoints_of(shared)["step-00000006"])
    assert losses(places[0]) == losses(shared)
    assert list((places[1] / RUN / "checkpoints").iterdir()) == []

    assert run_ranks(1, train_case, [alone], recipe) == ["finished"]
    assert attempts_of(alone)[-1]["converted_from"] == {"world_size": 2, "zero_stage": 2}
    assert losses(alone)[-1] == pytest.approx(losses(shared)[-1], rel=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("placement", ["per_node", "gathered"])
@pytest.mark.parametrize("stage, world_size", [(0, 2), (1, 4), (3, 2), (3, 4)])
def test_killed_and_resumed_equals_the_shared_run(
    stage: int, world_size: int, placement: str, asynchronous: bool, tmp_path: Path, tiny_recipe: Tables
) -> None:
    places = [tmp_path / name for name in ("shared", "a", "b")]
    for place in places:
        place.mkdir()
    tables = {
        **SHORT,
        "deepspeed": {"config": f"ds_configs/zero{stage}.json"},
        "precision": {"accumulate": "fp32" if stage else "bf16"},
    }
    assert run_ranks(world_size, train_case, places[:1], tiny_recipe(**tables, checkpoint=EVERY)) == (
        ["finished"] * world_size
    )
    recipe = tiny_recipe(**tables, checkpoint={**EVERY, "placement": placement, "asynchronous": asynchronous})
    with live_ranks(world_size, train_case, places[1:], recipe, KILL) as started:
        for process, _ in started:
            process.join()
    assert run_ranks(world_size, train_case, places[1:], recipe) == ["finished"] * world_size
    shared, first, second = places
    resumed_from = {one[-1]["resumed_from"] for one in map(attempts_of, (first, second))}
    assert len(resumed_from) == 1
    assert resumed_from <= {"run/checkpoints/step-00000002", "run/checkpoints/step-00000004"}
    assert losses(first) == losses(shared)
    if placement == "per_node":
        join(RunDirectory(first / RUN), [second / RUN])
    assert_same_checkpoint(checkpoints_of(first)["step-00000006"], checkpoints_of(shared)["step-00000006"])


# ---------------------------------------------------------------- before a run


def joined(*_: object) -> nullcontext[None]:
    """In place of `process_group`, of which a launch has one."""
    return nullcontext()


def refused_case(ranks: Ranks, places: Sequence[Path], cases: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """What runs that cannot begin say on this rank, each with a recipe a machine."""
    ranks = as_node(ranks, places)
    said = []
    with process_group(torch.device("cpu")), mock.patch.object(pretrain.train, "process_group", joined):
        for recipes in cases:
            try:
                said.append(train(parse_recipe(recipes[ranks.rank]), RUN, ranks))
            except (ValueError, OSError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_machines_that_differ_are_refused(
    tmp_path: Path, tiny_recipe: Tables, collection: Path, corpus: Path, tokenizer: Path
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    (places[0] / "data").symlink_to(collection)
    prepare(
        {"code": [corpus / "code.jsonl"], "english": [corpus / "english.jsonl"]},
        tokenizer,
        places[1] / "data",
        Options(validation_fraction=0.06),
    )
    plain, other = tiny_recipe(), tiny_recipe(schedule={"peak_lr": 2e-3})
    here = tiny_recipe(data={"path": DATA})
    first, second = run_ranks(2, refused_case, places, [(plain, plain), (plain, other), (here, here)])
    assert first == second
    folder, recipe, data = first
    assert folder.startswith(
        "RunDirectoryError: run is not one folder for all ranks: of 2 folders of this name rank 0 ("
    )
    assert 'checkpoint.placement = "per_node" or "gathered"' in folder
    assert "rank 1 (" in recipe
    assert "has another recipe than rank 0" in recipe
    assert "schedule.peak_lr is 0.002 there, 0.001 here: start all ranks with the same recipe and options" in recipe
    assert "has another data than rank 0" in data
    assert "split of code is " in data
    assert [list(place.iterdir()) for place in places] == [[places[0] / "data"], [places[1] / "data"]]


def carry_case(ranks: Ranks, places: Sequence[Path]) -> tuple[list[str], int]:
    """Files to and fro in small pieces: what was said of five walks, and the most that was held meanwhile."""
    ranks = as_node(ranks, places)
    sizes = {"big": 3_000_001, "small": 5, "empty": 0}
    said = []
    with process_group(torch.device("cpu")), mock.patch.object(pretrain.transfer, "CHUNK_BYTES", 10_000):
        courier = Courier(ranks)
        if ranks.is_first:
            for name, size in sizes.items():
                Path(name).write_bytes(bytes(range(256)) * (size // 256 + 1))
                os.truncate(name, size)
        hashes = ranks.on_first(lambda: {name: file_sha256(Path(name)) for name in sizes})
        files = [Carried(name, size, hashes[name], 0, 1) for name, size in sizes.items()]
        if not ranks.is_first:
            Path("linked").mkdir()
            Path("linked/big").symlink_to("../escaped")
        tracemalloc.start()
        for target in ("full", "linked", "whole", "other", "cut"):
            if target in ("full", "linked") and not ranks.is_first:  # no file gets larger than this
                room = 1_000_000 if target == "full" else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            if target == "cut" and ranks.is_first:
                os.truncate("big", 100)
            ranks.barrier()
            try:
                recorded = [replace(one, sha256=hashes["empty"]) for one in files] if target == "other" else files
                courier.carry(recorded, Path(), Path(target))
                said.append("carried")
            except OSError as error:
                said.append(str(error))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return said, peak


def test_files_are_carried_in_pieces_and_a_full_disk_is_told_on_all_ranks(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    (said, peak), (others, others_peak) = run_ranks(2, carry_case, places)
    assert said == others
    assert said == [
        "on rank 1: full/big: File too large",
        "on rank 1: linked/big: 'big' is outside its folder or behind a link: it is not carried",
        "carried",
        "on rank 1: other/big arrived from rank 0 with another sha256 than the recorded one",
        "on rank 0: big: it is shorter than was recorded",
    ]
    assert not (places[1] / "escaped").exists()
    assert max(peak, others_peak) < 1_000_000
    for name, size in (("big", 3_000_001), ("small", 5), ("empty", 0)):
        assert (places[1] / "whole" / name).stat().st_size == size
    assert (places[1] / "whole" / "big").read_bytes()[:300] == (bytes(range(256)) * 2)[:300]


def test_ranks_are_told_by_home() -> None:
    sharing = Sharing(Ranks(5, 1, 7), ((0, 1, 2, 6), (3,), (4, 5)), ("a", "a", "a", "b", "c", "c", "d"))
    assert [sharing.told(home) for home in range(3)] == ["ranks 0 to 2, 6 (a, d)", "rank 3 (b)", "ranks 4 to 5 (c)"]
    assert (sharing.home, sharing.members, sharing.leads) == (2, (4, 5), False)
