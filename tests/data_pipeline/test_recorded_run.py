"""What did step N train on? Asked of a run's own files, held against the batches that the loader gives."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.loader import Loader
from data_pipeline.order import SampleOrder, Stage
from data_pipeline.prepare import prepare
from data_pipeline.recorded_run import read_run
from data_pipeline.shards import Collection, DataFormatError
from data_pipeline.steps import Steps
from data_pipeline.stream import TokenStream
from tests.data_pipeline.conftest import SmallCollection
from tokenizer.codec import Codec

SEQ_LEN, BATCH, MICRO, STEPS = 64, 6, 2, 20
RECIPE = """
seed = 11
[model]
seq_len = 64
[data]
path = "{path}"
tokenizer = "unused"
[[data.stages]]
from_tokens = 0
weights = {{ lines = 3.0, files = 1.0 }}
[[data.stages]]
from_tokens = 3200
weights = {{ files = 1.0 }}
[batch]
global_batch_size = 6
micro_batch_size = 2
[schedule]
max_steps = 60
"""


@dataclass(frozen=True)
class MadeRun:
    path: Path
    order: SampleOrder
    collection: Collection


@pytest.fixture
def made(small: SmallCollection, tmp_path: Path) -> MadeRun:
    """A run directory as pretrain leaves it behind step 20: a checkpoint of step 18, records of all steps."""
    collection = small.collection
    tokens = {name: source.splits["train"].tokens for name, source in collection.sources.items()}
    stages = [Stage(0, {"lines": 3, "files": 1}), Stage(50, {"files": 1})]
    order = SampleOrder(seed=11, seq_len=SEQ_LEN, tokens=tokens, stages=stages)
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000018"
    checkpoint.mkdir(parents=True)
    (run / "recipe.toml").write_text(RECIPE.format(path=collection.path))
    (run / "checkpoints" / "latest").write_text("step-00000018\n")
    state = {
        "global_step": 18, "consumed_samples": 18 * BATCH, "tokens_seen": 18 * BATCH * SEQ_LEN,
        "global_batch_size": BATCH, "order": {**order.describe(), "content_sha256": collection.content_sha256},
    }  # fmt: skip
    (checkpoint / "state.json").write_text(json.dumps(state, indent=2))
    records = [{"kind": "train", "step": step, "loss": 1.0} for step in range(1, STEPS + 1)]
    lines = [json.dumps(record) for record in [*records, {"kind": "evaluation", "step": 18}]]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "st')
    return MadeRun(run, order, collection)


def test_a_run_is_read_from_its_own_files(made: MadeRun) -> None:
    found = read_run(made.path)
    assert found.order.describe() == made.order.describe()
    assert (found.steps, found.micro_batch_size, found.step, found.max_steps) == (Steps(BATCH), MICRO, STEPS, 60)
    assert found.checked_against == made.path / "checkpoints" / "step-00000018"
    (made.path / "metrics.jsonl").unlink()
    assert read_run(made.path).step == 18
    shutil.rmtree(made.path / "checkpoints")
    bare = read_run(made.path)
    assert (bare.step, bare.checked_against) == (0, None)


def test_a_long_record_is_read_from_its_end(made: MadeRun) -> None:
    with (made.path / "metrics.jsonl").open("w") as file:
        for step in range(1, 5001):
            file.write(json.dumps({"kind": "train", "step": step, "loss": 1 / 3}) + "\n")
    assert read_run(made.path).step == 5000


# ---------------------------------------------------------------- trace --step


@pytest.mark.parametrize("step", [1, 8, 9, 20])
def test_a_step_lists_what_its_batches_held(
    made: MadeRun, small: SmallCollection, codec: Codec, run_command: Callable, step: int
) -> None:
    """Steps 8 and 9 lie on both sides of the second stage's beginning. Three ranks read the step, two rows each."""
    code, out, err = run_command("trace", made.path, "--step", step, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["run_step"], told["reached"], told["step"]) == (STEPS, True, step)
    by_sample: dict[int, list[dict[str, Any]]] = {}
    for one in told["reads"]:
        by_sample.setdefault(one["sample"], []).append(one)
    streams = {name: TokenStream(source.splits["train"]) for name, source in made.collection.sources.items()}
    eos, seen = codec.eos_id, []
    for rank in range(3):
        with Loader(
            made.order, streams, rank=rank, world_size=3, micro_batch_size=MICRO, gradient_accumulation_steps=1,
            first_sample=(step - 1) * BATCH,
        ) as loader:  # fmt: skip
            batch = next(loader)
        for row, sample in enumerate(batch.samples.tolist()):
            window = np.append(batch.inputs[row], batch.targets[row, -1])
            parts = np.split(window, np.flatnonzero(window == eos) + 1)
            parts = [part for part in parts if len(part)]
            assert [one["stop"] - one["start"] for one in by_sample[sample]] == [len(part) for part in parts]
            for one, part in zip(by_sample[sample], parts, strict=True):
                assert one["text"] == codec.decode(part[part != eos])
                assert one["step"] == step
                stored = small.documents[one["source"]]["train"][one["document"]]
                assert (one["file"], one["position"]) == (stored.path, stored.position)
            seen.append(sample)
    assert sorted(seen) == sorted(by_sample) == list(range((step - 1) * BATCH, step * BATCH))


def test_a_step_is_shown_for_people(made: MadeRun, small: SmallCollection, run_command: Callable) -> None:
    code, out, _ = run_command("trace", made.path, "--step", 3)
    assert code == 0
    assert out.startswith(f"{made.path}, step 3: samples 12 to 17\n──── step 3, sample 12: ")
    assert any(f"{path}:" in out for path in small.inputs.rglob("*.*"))
    _, places, _ = run_command("trace", made.path, "--step", 3, "--no-text", "--no-files")
    assert all(line.startswith("──── step 3") for line in places.splitlines()[1:])
    assert str(small.inputs) not in places
    _, later, _ = run_command("trace", made.path, "--step", 21, "--no-text", "--no-files")
    assert "step 21: samples 120 to 125 (not reached yet: the run is at step 20)" in later
    shutil.rmtree(made.path / "checkpoints")
    code, _, err = run_command("trace", made.path, "--step", 1, "--no-files")
    assert (code, err) == (0, f"{made.path}: no checkpoint yet, so only the recipe says what it reads\n")


def test_a_batch_ramp_is_followed(made: MadeRun, run_command: Callable) -> None:
    """4 steps of 4, 12 of 2, then 6: each step's samples, each read's step, and how much there is to verify."""
    steps = Steps(BATCH, ((16, 4), (40, 2)))
    parts = ", ".join(f"{{ until_samples = {end}, global_batch_size = {size} }}" for end, size in steps.ramp)
    recipe = made.path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("micro_batch_size = 2", f"micro_batch_size = 2\nramp = [{parts}]"))
    code, _, err = run_command("trace", made.path, "--step", 1)
    assert (code, err.count("\n")) == (2, 1)
    assert "a global batch of 6, recipe.toml 4 until sample 16, then 2 until sample 40, then 6" in err
    edit_state(made.path, lambda state: state.update(batch_ramp=steps.ramp, consumed_samples=steps.samples_before(18)))
    for step in (1, 4, 5, 16, 17, 18):
        code, out, _ = run_command("trace", made.path, "--step", step, "--json", "--no-files")
        told = json.loads(out)
        assert (code, told["batch_ramp"]) == (0, [[16, 4], [40, 2]])
        assert {read["step"] for read in told["reads"]} == {step}
        assert sorted({read["sample"] for read in told["reads"]}) == list(steps.samples(step - 1))
    reads = json.loads(run_command("trace", made.path, "--doc", "files:0", "--json", "--no-files")[1])["reads"]
    assert len(reads) > 1
    assert all(read["step"] == steps.step_of(read["sample"]) + 1 for read in reads)
    assert max(read["sample"] for read in reads) < steps.samples_before(STEPS)
    _, out, _ = run_command("trace", made.path, "--step", 6, "--no-text", "--no-files")
    assert "step 6: samples 18 to 19\n" in out
    _, out, _ = run_command("verify", made.collection.path, "--epoch", "--run", made.path, "--json")
    read = sum(one["epochs"] * one["windows"] + one["windows_begun"] for one in json.loads(out)["epoch"])
    assert read == 4 * steps.samples_before(60)  # by one, two, three and four ranks


def test_files_that_are_gone_are_said_so_and_the_text_is_still_there(
    made: MadeRun, small: SmallCollection, run_command: Callable, tmp_path: Path
) -> None:
    shutil.move(small.inputs, tmp_path / "moved")
    try:
        code, out, _ = run_command("trace", made.path, "--step", 2, "--json")
    finally:
        shutil.move(tmp_path / "moved", small.inputs)
    assert code == 0
    for one in json.loads(out)["reads"]:
        assert one["text"]
        assert one["file"] is None
        assert "cannot be read" in one["lost"]


# ---------------------------------------------------------------- trace --doc


def test_steps_and_documents_agree(made: MadeRun, run_command: Callable) -> None:
    """Every read of a source that the steps tell of is told of its document too, and nothing else is."""
    quickly = ("--json", "--no-files", "--no-text")
    forwards, backwards = [], []
    for step in range(1, STEPS + 1):
        _, out, _ = run_command("trace", made.path, "--step", step, *quickly)
        forwards += [one for one in json.loads(out)["reads"] if one["source"] == "files"]
    for number in range(made.collection.sources["files"].splits["train"].documents):
        _, out, _ = run_command("trace", made.path, "--doc", f"files:{number}", *quickly)
        told = json.loads(out)
        assert (told["source"], told["document"], told["steps"]) == ("files", number, STEPS)
        backwards += told["reads"]
    for reads in (forwards, backwards):
        reads.sort(key=lambda one: (one["sample"], one["document"]))
    assert backwards == forwards
    assert len(forwards) > 60


def test_steps_still_to_come_can_be_asked_for(made: MadeRun, run_command: Callable) -> None:
    counts = {}
    for steps in (0, STEPS, 200):
        _, out, _ = run_command("trace", made.path, "--doc", "files:2", "--steps", steps, "--json", "--no-files")
        told = json.loads(out)
        counts[steps] = len(told["reads"])
        assert all(one["step"] <= steps for one in told["reads"])
    assert counts[0] == 0
    assert counts[200] > counts[STEPS]
    _, out, _ = run_command("trace", made.path, "--doc", "files:2", "--steps", 200, "--no-files", "--no-text")
    assert out.startswith(f"{made.path}, steps 1 to 200: document files:2 was read {counts[200]} times\n")


def test_the_only_source_needs_no_name(
    tmp_path: Path, small: SmallCollection, tokenizer_folder: Path, run_command: Callable
) -> None:
    made = prepare({"only": [small.inputs / "a.jsonl"]}, tokenizer_folder, tmp_path / "data").collection
    (tmp_path / "run").mkdir()
    without_stages = re.sub(r"\[\[data.stages\]\].*(?=\[batch\])", "", RECIPE, flags=re.DOTALL)
    (tmp_path / "run" / "recipe.toml").write_text(without_stages.format(path=made.path))
    asked = ("--steps", 200, "--no-files", "--no-text")
    told = [run_command("trace", tmp_path / "run", "--doc", doc, *asked) for doc in ("2", "only:2")]
    assert told[0] == told[1]
    assert "document only:2 was read" in told[0][1]
    for doc in (":2", "2:", "only", "-2"):
        code, _, err = run_command("trace", tmp_path / "run", f"--doc={doc}", *asked)
        assert (code, "say SOURCE:D" in err) == (2, True)


# ---------------------------------------------------------------- verify --epoch --run


def test_the_epochs_of_a_run_are_counted_to_its_last_step(made: MadeRun, run_command: Callable) -> None:
    code, out, _ = run_command("verify", made.collection.path, "--epoch", "--run", made.path, "--json")
    assert code == 0
    counts = made.order.counts(60 * BATCH)
    for one in json.loads(out)["epoch"]:
        assert one["epochs"] * one["windows"] + one["windows_begun"] == counts[one["source"]]
    _, out, _ = run_command("verify", made.collection.path, "--epoch", "--seq-len", SEQ_LEN)
    windows = made.order.windows["lines"]
    assert f"epoch: 4 ranks, lines: 1 whole epochs of {windows:,} windows, each window once\n" in out


# ---------------------------------------------------------------- refusals


def edit_state(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = run / "checkpoints" / "step-00000018" / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda state: state["order"].update(seed=12), "seed was 12 and is now 11"),
        (lambda state: state["order"].update(content_sha256="ab" * 32), "other tokens than this run reads"),
        (lambda state: state["order"]["sources"]["files"].update(tokens=5), "sources.files.tokens was 5"),
        (lambda state: state["order"]["stages"][1].update(first_sample=49), "stages"),
        (lambda state: state.update(global_batch_size=8), "a global batch of 8, recipe.toml 6"),
        (lambda state: state.pop("global_batch_size"), "damaged: it has no global batch"),
        (lambda state: state.update(batch_ramp=[[3]]), "damaged: it has no global batch"),
        (lambda state: state.update(batch_ramp=7), "damaged: it has no global batch"),
        (lambda state: state.update(order=3), "missing or damaged"),
        (lambda state: state.pop("consumed_samples"), "damaged"),
        (lambda state: state.update(consumed_samples="108"), "damaged: consumed_samples must be a whole number"),
        (lambda state: state.update(global_step=10**30), "damaged: global_step must be a whole number"),
        (lambda state: state.update(global_step=True), "damaged: global_step must be a whole number"),
        (lambda state: state["order"].update(stages=[3]), "damaged"),
    ],
)
def test_data_that_is_not_the_runs_is_refused(
    made: MadeRun, run_command: Callable, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit_state(made.path, change)
    for arguments in (("--step", 1), ("--doc", "files:0")):
        code, out, err = run_command("trace", made.path, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_stages_still_to_come_may_have_changed(made: MadeRun) -> None:
    recipe = made.path / "recipe.toml"
    more = "[[data.stages]]\nfrom_tokens = 128000\nweights = { lines = 1.0 }\n[batch]"
    recipe.write_text(recipe.read_text().replace("[batch]", more))
    assert len(read_run(made.path).order.describe()["stages"]) == 3
    recipe.write_text(recipe.read_text().replace("128000", "3840"))
    with pytest.raises(DataFormatError, match="not what this run reads"):
        read_run(made.path)


def test_a_collection_that_moved_can_be_named(made: MadeRun, tmp_path: Path, run_command: Callable) -> None:
    recipe = made.path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(made.collection.path), "data/elsewhere"))
    code, _, err = run_command("trace", made.path, "--step", 1)
    assert (code, err.count("\n")) == (2, 1)
    assert "data/elsewhere: no such folder" in err
    code, out, _ = run_command("trace", made.path, "--step", 1, "--data", made.collection.path, "--json")
    assert (code, json.loads(out)["collection"]) == (0, str(made.collection.path))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "say --step N or --doc"),
        (["--step", "1", "--doc", "files:0"], "one of the two"),
        (["--step", "0"], "--step"),
        (["--step", str(2**62)], "--step"),
        (["--doc", "files:0", "--steps", str(2**62)], "--steps"),
        (["--doc", "files"], "say SOURCE:D"),
        (["--doc", "files:-1"], "say SOURCE:D"),
        (["--doc", "fr:0"], "no source is called 'fr'"),
        (["--doc", "files:100000"], "document 100000 does not exist"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_line(
    made: MadeRun, run_command: Callable, arguments: list[str], words: str
) -> None:
    code, out, err = run_command("trace", made.path, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_folder_that_is_no_run_is_one_line(made: MadeRun, run_command: Callable, tmp_path: Path) -> None:
    cases = [(tmp_path / "none", "no such run directory"), (tmp_path, "it has no recipe.toml")]
    recipe = made.path / "recipe.toml"
    whole = recipe.read_text()
    for path, words in cases:
        code, _, err = run_command("trace", path, "--step", 1)
        assert (code, err.count("\n"), words in err) == (2, 1, True)
    for content, words in (
        (whole + "[", "damaged"), (whole.replace("seed = 11", ""), "is missing"),
        (whole.replace("lines = 3.0", "fr = 3.0"), "no source is called 'fr'"), ("[data]\npath = 3", "is missing"),
    ):  # fmt: skip
        recipe.write_text(content)
        code, _, err = run_command("trace", made.path, "--step", 1)
        assert (code, err.count("\n"), words in err) == (2, 1, True), err
    recipe.write_text(whole)
    (made.path / "checkpoints" / "latest").write_text("step-00000019\n")
    code, _, err = run_command("trace", made.path, "--step", 1)
    assert (code, err.count("\n"), "missing or damaged" in err) == (2, 1, True)


@pytest.mark.parametrize("content", [None, "{", '{"order": 3}', '{"order": {}, "global_step": -1}'])
def test_where_the_newest_checkpoint_is_gone_or_damaged_the_one_before_it_is_asked(
    made: MadeRun, run_command: Callable, content: str | None
) -> None:
    """As a resume does; here none has begun since."""
    checkpoints = made.path / "checkpoints"
    (checkpoints / "step-00000018" / "manifest.json").write_text("{}")
    for name in ("step-00000017", "step-00000019.partial", "step-00000019.damaged"):  # no manifest, no checkpoint
        (checkpoints / name).mkdir()
    (checkpoints / "latest").write_text("step-00000019\n")
    if content is not None:
        (checkpoints / "step-00000019").mkdir()
        (checkpoints / "step-00000019" / "state.json").write_text(content)
        (checkpoints / "step-00000019" / "manifest.json").write_text("{}")
    code, _, err = run_command("trace", made.path, "--step", 1)
    assert (code, err) == (0, "")
    assert read_run(made.path).checked_against == checkpoints / "step-00000018"


@pytest.mark.parametrize(
    "before, after, words",
    [
        ("seed = 11", 'seed = "a"', "seed must be a whole number from 0 to 18,446,744,073,709,551,615"),
        ("seed = 11", "seed = -1", "seed must be a whole number"),
        ("seq_len = 64", "seq_len = 0", "model.seq_len must be a whole number from 1 to 2,147,483,647"),
        ("seq_len = 64", "seq_len = 64.0", "model.seq_len must be"),
        ("seq_len = 64", "seq_len = [64]", "model.seq_len must be"),
        ("global_batch_size = 6", "global_batch_size = 0", "batch.global_batch_size must be"),
        ("micro_batch_size = 2", "micro_batch_size = true", "batch.micro_batch_size must be"),
        ("micro_batch_size = 2", "micro_batch_size = 2\nramp = 3", "is missing or of the wrong kind"),
        (
            "micro_batch_size = 2",
            "micro_batch_size = 2\nramp = [{until_samples = 7}]",
            "is missing or of the wrong kind",
        ),
        (
            "micro_batch_size = 2",
            "micro_batch_size = 2\nramp = [{until_samples = 7, global_batch_size = 4}]",
            "batch.ramp: the 7 samples from 0 until 7 are no whole steps of 4: set until_samples to 4 or 8",
        ),
        ("max_steps = 60", "max_steps = -60", "schedule.max_steps must be"),
        ("max_steps = 60", 'max_steps = "x"', "schedule.max_steps must be"),
        ("from_tokens = 3200", 'from_tokens = "3200"', "data.stages: from_tokens must be"),
        ("weights = { files = 1.0 }", "weights = [1.0]", "is missing or of the wrong kind"),
        ("weights = { files = 1.0 }", f"weights = {{ files = 1, lines = 0x{'f' * 400} }}", "does not fit"),
        ("[[data.stages]]\nfrom_tokens = 0", "[[other]]\nfrom_tokens = 0", "the first stage begins at sample 50"),
        ("seed = 11", f"seed = {'[' * 3000}", "damaged"),
        ("[data]", f"[data]\npacking = 0x{'f' * 5000}", "is missing or of the wrong kind"),
        ("lines = 3.0", f"lines = 0x{'f' * 5000}", "does not fit"),
    ],
)
def test_a_recipe_edited_by_hand_is_one_line(
    made: MadeRun, run_command: Callable, before: str, after: str, words: str
) -> None:
    recipe = made.path / "recipe.toml"
    assert before in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(before, after))
    for command in (
        ("trace", made.path, "--step", 1), ("verify", made.collection.path, "--epoch", "--run", made.path)
    ):  # fmt: skip
        code, out, err = run_command(*command)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert words in err


@pytest.mark.parametrize("line", ["[" * 30_000, '{"kind": "train", "step": "9"}', '{"kind": "train", "step": -1}'])
def test_damaged_metrics_are_one_line(made: MadeRun, run_command: Callable, line: str) -> None:
    (made.path / "metrics.jsonl").write_text(line + "\n")
    code, out, err = run_command("trace", made.path, "--step", 1)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "metrics.jsonl: damaged" in err


def test_more_steps_than_can_be_counted_are_one_line(made: MadeRun, run_command: Callable) -> None:
    recipe = made.path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("max_steps = 60", f"max_steps = {2**62}"))
    code, out, err = run_command("verify", made.collection.path, "--epoch", "--run", made.path)
    assert (code, out, err.count("\n"), "too many to count" in err) == (2, "", 1, True), err
    assert read_run(made.path).max_steps == 2**62
