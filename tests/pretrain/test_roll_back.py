"""Going back in real runs on two ranks: bit for bit a fresh start with the same step left out, killed anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.history import Change, History, Read
from data_pipeline.order import Begin, PlannedRows, SampleOrder, Stage
from data_pipeline.reading import Reading
from data_pipeline.recorded_run import read_run
from data_pipeline.shards import DataFormatError
from data_pipeline.steps import Steps
from pretrain.checkpoint import measured_at, saved
from pretrain.chronicle import read as read_chronicle
from pretrain.config import load_recipe
from pretrain.engine import process_group
from pretrain.left_out import RollBack, abandoned, known_to, read, steps_left_out, write
from pretrain.metrics import read_metrics
from pretrain.prospects import of_run
from pretrain.report import notes
from pretrain.run_directory import RunDirectoryError
from pretrain.runtime import Ranks
from pretrain.state import Measured
from tests.pretrain.test_health_run import (
    BAD,
    STEPS,
    Leg,
    Told,
    alarms_of,
    legs_case,
    legs_of,
    records_of,
    saved_steps,
    tables_of,
)
from tests.pretrain.test_resume import assert_same_checkpoint
from tests.pretrain.test_sharing import RUN, as_node
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]
STAGES = (2, 3)
OTHER_STAGES = (0, 1)  # in the soak
BACK = 3  # the newest checkpoint three steps or more before the bad one; that of step 6 lies behind it
BACKWARDS: dict[str, Any] = {"loss_spike": "roll_back"}
THROUGH = [*range(1, BAD + 1), *range(BACK + 1, BAD), *range(BAD + 1, STEPS + 1)]
CHANGED = 6  # behind which step, a saved one, a change is made by name
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {  # of the runs that make one: in which table
    "seq_len": ("model", {"seq_len": 16}),
    "global_batch_size": ("batch", {"global_batch_size": 16}),
    "killed": ("batch", {"global_batch_size": 16}),
}
STRUCK = {  # behind which part of a roll back the process is lost: the steps that the next start runs
    "loaded": [*range(7, BAD + 1), *range(BACK + 1, BAD), STEPS],
    "recorded": [*range(BACK + 1, BAD), STEPS],
}


class Made:
    """The runs of this file, in three launches of two ranks."""

    def __init__(self, home: Path, tiny_recipe: Tables, stages: Sequence[int], *, alone: bool = False) -> None:
        """`alone`: without the runs that are the same under every stage."""
        self.home = home
        self.told: dict[str, tuple[Told, Told]] = {}
        bad = {BAD: 9.0}
        one = tables_of(tiny_recipe, 2, **BACKWARDS)
        twice = {**bad, STEPS: 9.0}
        nearer = tables_of(tiny_recipe, 2, **BACKWARDS, roll_back_steps=2)
        often = {**one, "checkpoint": {"every_steps": 1, "keep_last": STEPS}}
        whole = {f"zero{stage}": tables_of(tiny_recipe, stage, **BACKWARDS) for stage in stages}
        first = {
            **{at: Leg(one, self.of(at), bad, struck_in=at) for at in STRUCK},
            "twice": Leg(one, self.of("twice"), twice),
            "too-often": Leg(tables_of(tiny_recipe, 2, **BACKWARDS, roll_backs=1), self.of("too-often"), twice),
            "often": Leg(often, self.of("often"), {7: 9.0, 9: 9.0}),
            "marked": Leg(nearer, self.of("marked"), bad, {6: 3000.0}),
            "changed": Leg(one, self.of("changed"), end=CHANGED),
        }
        self._launch(
            {name: Leg(tables, self.of(name), bad) for name, tables in whole.items()}
            | {f"fresh-{name}": Leg(tables, self.of(f"fresh-{name}"), end=BACK) for name, tables in whole.items()}
            | ({} if alone else first)
        )
        for name in whole:
            shutil.copy(self.of(name) / "roll_backs.json", self.of(f"fresh-{name}"))
        again = {f"fresh-{name}": Leg(tables, self.of(f"fresh-{name}"), bad) for name, tables in whole.items()}
        if alone:
            self._launch(again)
            return
        for name in CHANGES:
            shutil.copytree(self.of("changed"), self.of(name))
        self._launch(
            again
            | {at: Leg(one, self.of(at), bad) for at in STRUCK}
            | {"behind": self._behind_a_change(one, "seq_len")}
            | {
                name: self._behind_a_change(nearer, name)._replace(struck_in=at)
                for name, at in (("global_batch_size", None), ("killed", "recorded"))
            }
            | {"killed again": self._behind_a_change(nearer, "killed")}
        )

    def _behind_a_change(self, tables: dict[str, Any], name: str) -> Leg:
        table, value = CHANGES[name]
        changed = {**tables, table: {**tables[table], **value}}
        return Leg(changed, self.of(name), {BAD: 9.0}, changes=tuple(value))

    def of(self, name: str) -> Path:
        return self.home / name

    def _launch(self, legs: dict[str, Leg]) -> None:
        first, second = run_ranks(2, legs_case, [*legs.values()])
        self.told.update(zip(legs, zip(first, second, strict=True), strict=True))


@pytest.fixture(scope="module")
def made(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("back"), tiny_recipe, STAGES)


@pytest.mark.soak
def test_other_stages_go_back_as_well(tiny_recipe: Tables, tmp_path: Path) -> None:
    made = Made(tmp_path, tiny_recipe, OTHER_STAGES, alone=True)
    for stage in OTHER_STAGES:
        test_a_run_goes_back_and_leaves_the_step_out(stage, made)
        test_it_is_bit_for_bit_a_fresh_start_with_the_same_step_left_out(stage, made)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_back_and_leaves_the_step_out(stage: int, made: Made) -> None:
    run = made.of(f"zero{stage}")
    first, second = made.told[f"zero{stage}"]
    assert first[:2] == second[:2] == ("finished", THROUGH)
    for step, one, other in zip(THROUGH, first.read, second.read, strict=True):
        assert sorted(one + other) == [*range(8 * (step - 1), 8 * step)], "a step reads its samples in every pass"
    assert alarms_of(run) == [(BAD, "loss_spike", "roll_back")]
    (one,) = read(run / "roll_backs.json")
    assert (one.step, one.condition, one.to_step) == (BAD, "loss_spike", BACK)
    assert (one.first_sample, one.samples) == (8 * (BAD - 1), 8)
    (record,) = records_of(run, "roll_back")
    assert (record["step"], record["alarm_step"], record["left_out"]) == (BACK, BAD, [BAD])
    assert [(left["step"], left["first_sample"], left["samples"]) for left in records_of(run, "left_out")] == [
        (BAD, 8 * (BAD - 1), 8)
    ]
    assert saved_steps(run) == [3, 6, 9]
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    assert known_to(last) == (one,)
    assert known_to(run / "checkpoints" / f"step-{BACK:08d}") == ()
    state = json.loads((last / "state.json").read_text())
    assert (state["consumed_samples"], state["tokens_seen"]) == (8 * STEPS, 8 * 32 * (STEPS - 1))


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_bit_for_bit_a_fresh_start_with_the_same_step_left_out(stage: int, made: Made) -> None:
    """Of the fresh one the first four steps were run without any fault, in a process that was then lost."""
    assert made.told[f"fresh-zero{stage}"][0].ran == [*range(BACK + 1, BAD), *range(BAD + 1, STEPS + 1)]
    one, other = made.of(f"zero{stage}"), made.of(f"fresh-zero{stage}")
    for step in (3, 6, 9):
        name = f"step-{step:08d}"
        assert_same_checkpoint(one / "checkpoints" / name, other / "checkpoints" / name)
    losses = [{a["step"]: a["loss"] for a in read_metrics(run / "metrics.jsonl")} for run in (one, other)]
    losses[0].pop(BAD)  # of the first pass
    assert losses[0] == losses[1]


@pytest.mark.parametrize("at", STRUCK)
def test_killed_within_a_roll_back_the_next_start_ends_where_it_would_have(at: str, made: Made) -> None:
    run = made.of(at)
    assert [told[:2] for told in made.told[at]] == [("finished", STRUCK[at])] * 2
    assert len(read(run / "roll_backs.json")) == 1
    assert saved_steps(run) == [3, 6, 9]
    name = f"checkpoints/step-{STEPS:08d}/weights.safetensors"
    assert (run / name).read_bytes() == (made.of("zero2") / name).read_bytes()


def test_trace_plan_and_report_tell_of_the_step_that_is_left_out(made: Made) -> None:
    run = made.of("zero2")
    assert read_run(run).left_out == {BAD}
    config = load_recipe(run / "recipe.toml")
    found = of_run(config, 2, 2, run, "auto", ())
    assert found.report["resume"]["left_out"] == [BAD]
    told = f"step {BAD} (loss_spike) is left out since the run went back to step {BACK}"
    assert any(told in line for line in found.lines)
    chronicle = read_chronicle(run)
    assert (chronicle.left_out, chronicle.series.step.tolist()) == ([BAD], [n for n in range(1, STEPS + 1) if n != BAD])
    assert any(f"went back to step {BACK} for an alarm in step {BAD}" in note for note in notes(chronicle))


def test_a_run_goes_back_as_often_as_it_may(made: Made) -> None:
    """The last step is bad too: the second time it goes back to step 6, and ends without either."""
    run, later = made.of("twice"), STEPS
    assert made.told["twice"][0][:2] == ("finished", [*THROUGH, 7])
    assert [(one.step, one.to_step) for one in read(run / "roll_backs.json")] == [(BAD, BACK), (later, 6)]
    assert [one["step"] for one in records_of(run, "left_out")] == [BAD, BAD, STEPS]
    assert saved_steps(run) == [3, 6, 9]
    outcome = made.told["too-often"][0].outcome
    assert outcome.startswith(f"step {later}: loss_spike ")
    assert "the run has gone back 1 times, health.roll_backs is 1; nothing of this step was saved" in outcome
    assert saved_steps(made.of("too-often")) == [3, 6]


def test_a_step_left_out_behind_a_roll_back_tells_what_lies_before_it(made: Made) -> None:
    """The second roll back ends just before the step that the first one left out: its checkpoint has the loss of the
    step before, not that of the one which was run last."""
    run = made.of("often")
    assert made.told["often"][0][:2] == ("finished", [*range(1, 8), 5, 6, 8, 9, 8])
    assert [(one.step, one.to_step) for one in read(run / "roll_backs.json")] == [(7, 4), (9, 6)]
    before, behind = (measured_at(run / "checkpoints" / f"step-{step:08d}") for step in (6, 7))
    assert behind == before
    assert "alarms" not in behind


def test_a_checkpoint_with_an_alarm_is_passed_over(made: Made) -> None:
    """That of step 6 was saved under the alarm of a gradient norm, which was only warned of."""
    run = made.of("marked")
    assert made.told["marked"][0].outcome == "finished"
    assert alarms_of(run)[:2] == [(6, "grad_norm_spike", "warn"), (BAD, "loss_spike", "roll_back")]
    (one,) = read(run / "roll_backs.json")
    assert one.to_step == 3
    marked = run / "checkpoints" / "step-00000006"  # of the second pass, which meets it again
    assert measured_at(marked)["alarms"] == ["grad_norm_spike"]
    assert measured_at(marked)["healthy"] is True, "its numbers are finite, and a run may be resumed from it"
    assert not saved(marked).healthy


def test_a_run_never_goes_back_to_before_a_change(made: Made) -> None:
    """Three steps before the alarm lies a checkpoint, that of step 3; the change was made behind step 6."""
    run = made.of("seq_len")
    outcome, ran, _ = made.told["behind"][0]
    assert ran == [7, BAD]
    assert outcome.startswith(f"step {BAD}: loss_spike ")
    assert (
        "there is no healthy checkpoint of step 5 or before (health.roll_back_steps 3) to go back to, and no roll back "
        "goes to before step 6, where the run was changed by name: health.roll_back_steps 2 or less reaches back to "
        "there; nothing of this step was saved"
    ) in outcome
    assert saved_steps(run) == [3, 6], "nothing is removed"
    assert not (run / "roll_backs.json").exists(), "nor recorded"


def test_a_run_goes_back_to_its_change_and_killed_there_ends_where_it_would_have(made: Made) -> None:
    run, killed = made.of("global_batch_size"), made.of("killed")
    assert made.told["global_batch_size"][0][:2] == ("finished", [7, BAD, 7, STEPS])
    assert made.told["killed"][0][:2] == ("struck", [7, BAD])
    assert made.told["killed again"][0][:2] == ("finished", [7, STEPS])
    name = f"checkpoints/step-{STEPS:08d}/weights.safetensors"
    assert (run / name).read_bytes() == (killed / name).read_bytes()
    for path in (run, killed):
        (one,) = read(path / "roll_backs.json")
        assert (one.step, one.to_step, one.first_sample, one.samples) == (BAD, CHANGED, 8 * 6 + 16, 16)
        assert read_run(path).left_out == {BAD}


def test_a_change_behind_a_step_that_is_left_out_is_none_to_it(made: Made) -> None:
    config = load_recipe(made.of("zero2") / "recipe.toml")
    changed = config.model_copy(update={"model": replace(config.model, seq_len=16)})
    found = of_run(changed, 2, 2, made.of("zero2"), "auto", ("seq_len",))
    assert (found.report["resume"]["global_step"], found.report["resume"]["left_out"]) == (STEPS, [BAD])


def test_another_mixture_before_it_has_the_step_run_again(made: Made, tmp_path: Path) -> None:
    """A stage that had not begun where the run is may be another: the alarm's step then reads other windows."""
    run = tmp_path / "run"
    shutil.copytree(made.of("zero2"), run)
    for step in (6, STEPS):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (run / "checkpoints" / "latest").write_text(f"step-{BACK:08d}\n")
    text = (run / "recipe.toml").read_text()
    stored = json.loads((run / "checkpoints" / f"step-{BACK:08d}" / "state.json").read_text())
    mixed = ", ".join(f"{name} = {count}" for name, count in stored["order"]["stages"][0]["slots"].items())
    whole = f"[[data.stages]]\nfrom_tokens = 0\nweights = {{ {mixed} }}\n"
    for first, left in ((8 * BAD, {BAD}), (8 * (BAD - 1), set())):  # a stage that begins behind it, and one with it
        stage = f"[[data.stages]]\nfrom_tokens = {32 * first}\nweights = {{ code = 1.0 }}\n"
        (run / "recipe.toml").write_text(f"{text}\n{whole}{stage}")
        assert read_run(run).left_out == left
        found = of_run(load_recipe(run / "recipe.toml"), 2, 2, run, "auto", ())
        assert found.report["resume"]["left_out"] == sorted(left)


# ---------------------------------------------------------------- without a shared file system


def nodes_case(ranks: Ranks, runs: Sequence[tuple[list[Path], dict[str, Any]]]) -> list[Told]:
    """Each a run on two machines of one rank, whose run directory of one name lies in two places."""
    told = []
    with process_group(torch.device("cpu")):
        for places, tables in runs:
            leg = Leg(tables, RUN, {BAD: 9.0})
            told += legs_of(as_node(ranks, places), [leg])
    return told


@pytest.fixture(scope="module")
def nodes(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    home = tmp_path_factory.mktemp("nodes")
    places = {name: [home / name / node for node in ("a", "b")] for name in ("per_node", "gathered")}
    for place in (one for pair in places.values() for one in pair):
        place.mkdir(parents=True)
    runs = []
    for name, pair in places.items():
        tables = tables_of(tiny_recipe, 2, **BACKWARDS)
        tables["checkpoint"]["placement"] = name
        runs.append((pair, tables))
    first, second = run_ranks(2, nodes_case, runs)
    assert [one[:2] for one in first] == [one[:2] for one in second] == [("finished", THROUGH)] * 2
    return places


@pytest.mark.parametrize("placement", ["per_node", "gathered"])
def test_machines_without_a_shared_file_system_go_back_together(
    placement: str, nodes: dict[str, list[Path]], made: Made
) -> None:
    records = [read(place / RUN / "roll_backs.json") for place in nodes[placement]]
    assert records[0] == records[1]
    assert [(one.step, one.to_step) for one in records[0]] == [(BAD, BACK)]
    name = f"checkpoints/step-{STEPS:08d}/weights.safetensors"
    assert (nodes[placement][0] / RUN / name).read_bytes() == (made.of("zero2") / name).read_bytes()
    held = [saved_steps(place / RUN) for place in nodes[placement]]
    assert held == [[3, 6, 9], [3, 6, 9] if placement == "per_node" else []]
    assert not [*nodes[placement][1].glob("run/checkpoints/*.partial")]


# ---------------------------------------------------------------- by hand

MADE = RollBack(9, "loss_spike", 6, 64, 8, "ab", at="2026-01-01T00:00:00.000+00:00")
TOKENS = {"a": 100_000, "b": 50_000}


def reading(
    steps: Steps = Steps(8), history: History = History(), content: str = "ab", seq_len: int = 32, **order: Any
) -> Reading:
    described = SampleOrder(seed=1, seq_len=seq_len, tokens=TOKENS, **order).describe()
    return Reading(steps, history, {**described, "content_sha256": content})


def usual_weights() -> dict[str, float]:
    """Of a run without stages: its numbers of windows."""
    return {name: (count - 1) // 32 for name, count in TOKENS.items()}


def changed(sample: int, before: Reading) -> History:
    read = Read(before.order, None, {})
    return History((Change(sample // 8, sample, 0, [], read=read),))


def test_a_step_is_left_out_as_long_as_it_reads_the_same_samples() -> None:
    usual = reading()
    made = RollBack.behind(9, "loss_spike", 6, usual)
    assert (made.first_sample, made.samples) == (64, 8)
    planned = [PlannedRows({"a": 3000, "b": 1500}, sha256) for sha256 in ("c" * 64, "d" * 64)]
    same = [
        usual,
        reading(Steps(4, ((80, 8),))),
        reading(stages=[Stage(0, usual_weights()), Stage(72, {"a": 1})]),
        reading(history=changed(72, usual), seq_len=64, begin=Begin(72, {"a": 0, "b": 0})),
    ]
    assert [steps_left_out([made], one) for one in same] == [{9}] * len(same)
    others = [
        reading(Steps(4)),
        reading(Steps(8, ((16, 4),))),  # a ramp before it moves its samples
        reading(seq_len=64),
        reading(content="cd"),
        reading(packing="concat_masked"),
        *(reading(packing="best_fit", planned=plan) for plan in planned),
        reading(stages=[Stage(0, {"a": 1, "b": 1})]),
        reading(stages=[Stage(0, usual_weights()), Stage(64, {"a": 1})]),
        reading(history=changed(48, usual), begin=Begin(48, {"a": 0, "b": 0})),
    ]
    assert [steps_left_out([made], one) for one in others] == [frozenset()] * len(others)
    rows = RollBack.behind(9, "loss_spike", 6, others[5])
    assert [rows.leaves_out(one) for one in others[5:7]] == [True, False], "another plan has other rows"


def test_what_was_left_behind_is_told_from_what_came_later(tmp_path: Path) -> None:
    for step, known in ((4, []), (6, []), (8, []), (10, [MADE])):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        health = {"roll_backs": [vars(one) for one in known]}
        (folder / "state.json").write_text(json.dumps({"health": health}))
    assert abandoned(tmp_path, ()) == []
    assert abandoned(tmp_path, (MADE,)) == ["step-00000008"]
    later = replace(MADE, step=11, to_step=4)
    assert abandoned(tmp_path, (MADE, later)) == ["step-00000006", "step-00000008", "step-00000010"]


def test_a_damaged_record_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "roll_backs.json"
    assert read(path) == ()
    write(path, (MADE,))
    assert read(path) == (MADE,)
    whole = path.read_text()
    broken = ["{", "[]", '{"roll_backs": {}}', '{"roll_backs": [{"step": 9}]}', whole.replace("9", '"9"', 1)]
    impossible = {"step": (-5, 0, 6), "to_step": (-5, 9), "first_sample": (-1,), "samples": (0,)}
    for key, value in ((key, value) for key, values in impossible.items() for value in values):
        broken.append(json.dumps({"roll_backs": [{**vars(MADE), key: value}]}))
    for text in broken:
        path.write_text(text)
        with pytest.raises(RunDirectoryError, match=r"roll_backs.json is damaged: restore it"):
            read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(RunDirectoryError, match=r"^\S+roll_backs.json cannot be read \(Is a directory\), so [^\n]+$"):
        read(path)


def test_trace_tells_a_damaged_record_in_one_line(made: Made, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made.of("zero2"), run)
    (path := run / "roll_backs.json").write_text(json.dumps({"roll_backs": [{**vars(MADE), "step": -5}]}))
    with pytest.raises(DataFormatError, match=r"roll_backs.json: damaged"):
        read_run(run)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataFormatError, match=r"roll_backs.json: damaged"):
        read_run(run)


def test_what_a_step_measured_is_told_by_a_later_checkpoint() -> None:
    one = Measured(2.0, 1.0, alarms=("loss_spike",))
    told = one.to_dict(finite=True)
    assert told == {"loss": 2.0, "grad_norm": 1.0, "heldout_loss": None, "healthy": True, "alarms": ["loss_spike"]}
    assert Measured.of(told) == one
    assert Measured.of({}).to_dict(finite=True)["healthy"], "no step yet, and nothing is wrong"
    assert "alarms" not in Measured(2.0, 1.0).to_dict(finite=True)
