"""Changes asked for by name: real runs that go on with another batch, other windows, other data; what they read is held
against the arithmetic and against what `trace` would say. A launch makes several runs, one after the other.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.train
from data_pipeline.history import History
from data_pipeline.loader import Batch
from data_pipeline.prepare import Options, prepare
from data_pipeline.recorded_run import read_run
from data_pipeline.shards import DataFormatError
from data_pipeline.steps import Steps
from pretrain.changes import check_names
from pretrain.checkpoint import model_config
from pretrain.config import RecipeError, parse_recipe, to_toml
from pretrain.engine import process_group
from pretrain.inputs import Inputs
from pretrain.metrics import Report, all_records
from pretrain.resuming import choose, refuse_other_run
from pretrain.run_directory import CheckpointError
from pretrain.runtime import Ranks
from pretrain.step import StepResult, train_step
from tests.command_line import run_command
from tests.pretrain.test_ramp import checkpoint, short, state_of
from tests.pretrain.test_resume import tensors_of
from tests.ranks import run_ranks

Tables = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """A start of a run: its recipe's tables, its directory, --resume and every --change."""

    tables: dict[str, Any]
    path: Path
    changes: tuple[str, ...] = ()
    resume: str = "auto"
    probe: Path | None = None  # where the engine's state is to be written before the first step


@dataclass
class Seen:
    """What one rank read in a start, each step its samples and their tokens, and what was said of changes."""

    steps: list[dict[int, list[int]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def starts_case(ranks: Ranks, starts: list[Start]) -> list[Seen]:
    found: list[Seen] = []
    probe: list[Path | None] = [None]

    def watched(batches: Iterator[Batch], read: dict[int, list[int]]) -> Iterator[Batch]:
        for batch in batches:
            for sample, inputs, targets in zip(batch.samples.tolist(), batch.inputs, batch.targets, strict=True):
                read[sample] = [*inputs.tolist(), int(targets[-1])]
            yield batch

    def step(engine: Any, batches: Iterator[Batch], plan: Any, lr: float, **wishes: Any) -> StepResult:
        if probe[0] is not None:
            engine.save(probe[0])
            probe[0] = None
        found[-1].steps.append({})
        return train_step(engine, watched(batches, found[-1].steps[-1]), plan, lr, **wishes)

    def say(report: Report, message: str) -> None:
        found[-1].told += [message] if re.search("is changed|converted", message) else []

    with (
        process_group(torch.device("cpu")),
        mock.patch.object(pretrain.train, "process_group", return_value=nullcontext()),
        mock.patch.object(pretrain.train, "train_step", step),
        mock.patch.object(Report, "say", say),
    ):
        for start in starts:
            found.append(Seen())
            probe[0] = start.probe
            config = parse_recipe(start.tables)
            ended = pretrain.train.train(config, start.path, ranks, resume=start.resume, changes=start.changes)
            assert ended == "finished"
    return found


def together(seen: list[list[Seen]], start: int) -> list[dict[int, list[int]]]:
    """What all ranks read in each step of a start."""
    by_rank = [rank[start].steps for rank in seen]
    return [{sample: row for rank in ranks for sample, row in rank.items()} for ranks in zip(*by_rank, strict=True)]


def assert_traced(path: Path, first_step: int, steps: list[dict[int, list[int]]]) -> None:
    """What the run's own files say of these steps is what was read: samples, and every token of them."""
    recorded = read_run(path)
    for number, rows in enumerate(steps, first_step + 1):
        samples = recorded.steps.samples(number - 1)
        assert sorted(rows) == list(samples)
        part, reads = recorded.documents_of(number)
        assert {read.sample for read in reads} == set(samples)
        for sample in samples:
            address = part.order.locate(sample)
            length = part.order.seq_len
            window = part.streams[address.source].read(address.window * length, (address.window + 1) * length + 1)
            assert rows[sample] == window.tolist(), (number, sample)


@pytest.fixture(scope="session")
def other_collection(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of `collection`, and other text beside it."""
    folder = tmp_path_factory.mktemp("changes") / "other"
    inputs = {"chinese": [corpus / "chinese.jsonl"], "code": [corpus / "code.jsonl"]}
    prepare(inputs, tokenizer, folder, Options(validation_fraction=0.05))
    return folder


SLOWER = {  # RoPE's angles
    "rope_base": 5e4, "rope_scaling": "yarn", "rope_scaling_factor": 2.0, "rope_original_seq_len": 64
}  # fmt: skip
SLOWED = [f"model.{field}" for field in SLOWER]


@dataclass(frozen=True)
class Made:
    path: Path
    tables: list[dict[str, Any]]  # of each start
    seen: list[list[Seen]]


@pytest.fixture(scope="module")
def made(tiny_recipe: Tables, other_collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two ranks, accumulating: batch 8 to step 3, 16 to step 5, the same command to 6, then all else at once to 8, back
    to the first data and windows to 10."""
    path = tmp_path_factory.mktemp("changed") / "run"
    first = short(tiny_recipe, 3)
    grown, longer = (short(tiny_recipe, end, batch={"global_batch_size": 16}) for end in (5, 6))
    other = short(
        tiny_recipe, 8, batch={"global_batch_size": 12}, model={"seq_len": 32, **SLOWER},
        data={"path": str(other_collection)},
    )  # fmt: skip
    back = short(tiny_recipe, 10, batch={"global_batch_size": 12}, model=SLOWER)
    batch, rest = ("global_batch_size",), ("data", "seq_len", "model", "global_batch_size")
    starts = [
        Start(first, path),
        Start(grown, path, batch, probe=path.parent / "grown"),
        Start(longer, path, batch),
        Start(other, path, rest, probe=path.parent / "other"),
        Start(back, path, ("data", "seq_len")),
    ]
    return Made(path, [start.tables for start in starts], run_ranks(2, starts_case, starts))


def test_a_changed_run_reads_the_next_samples_and_its_files_say_which(made: Made) -> None:
    """No sample comes twice or is left out; of every step the run's files tell samples and tokens."""
    sizes = Steps(12, ((24, 8), (72, 16)))
    first_steps = (0, 3, 5, 6, 8)
    for start, first in enumerate(first_steps):
        steps = together(made.seen, start)
        assert [sorted(rows) for rows in steps] == [list(sizes.samples(first + n)) for n in range(len(steps))]
        assert_traced(made.path, first, steps)
    assert read_run(made.path).steps == sizes
    assert [state_of(made.path, step)["consumed_samples"] for step in (3, 5, 6, 8, 10)] == [24, 56, 72, 96, 120]
    tokens = [state_of(made.path, step)["tokens_seen"] for step in (6, 8, 10)]
    assert tokens == [72 * 64, 72 * 64 + 24 * 32, 72 * 64 + 24 * 32 + 24 * 64]


def test_a_change_is_told_and_recorded_once(made: Made) -> None:
    told = [seen.told for seen in made.seen[0]]
    assert told[:3] == [
        [],
        ["step 3: global_batch_size is changed from 8 to 16"],
        ["--change global_batch_size: nothing is changed, the checkpoint has it as the recipe does, since step 3"],
    ]
    assert [line.split(" is changed")[0] for line in told[3]] == [
        f"step 6: {name}" for name in ("seq_len", "data", "global_batch_size", *SLOWED)
    ]
    assert told[3][-1] == "step 6: model.rope_original_seq_len is changed from None to 64"
    assert "from their first window: chinese, code" in told[3][1]
    assert re.search(r"code goes on behind \d+ windows, english goes on behind", told[4][1])
    attempts = json.loads((made.path / "environment.json").read_text())["attempts"]
    assert [len(attempt["changes"]) for attempt in attempts] == [0, 1, 1, 2, 3]
    names = [[one["name"] for one in change["changed"]] for change in attempts[-1]["changes"]]
    assert names == [
        ["global_batch_size"], ["seq_len", "data", "global_batch_size", *SLOWED], ["seq_len", "data"]
    ]  # fmt: skip
    assert state_of(made.path, 10)["changes"] == attempts[-1]["changes"]
    records = [one for one in all_records(made.path / "metrics.jsonl") if one["kind"] == "change"]
    assert [(one["step"], one["attempt"]) for one in records] == [(3, 2), (6, 4), (8, 5)]
    assert records[0]["changed"] == [{"name": "global_batch_size", "from": 8, "to": 16}]


def test_weights_and_optimizer_are_untouched(made: Made) -> None:
    """Before its first step a run that changed all it may holds what the checkpoint holds, bit for bit; what it is is
    another model."""
    before, after = (asdict(model_config(checkpoint(made.path, step))) for step in (6, 8))
    assert {key: after[key] for key in after if before[key] != after[key]} == {"seq_len": 32, **SLOWER}
    for name, step in (("grown", 3), ("other", 6)):
        stored, loaded = checkpoint(made.path, step) / "engine", made.path.parent / name
        files = sorted(path.name for path in stored.glob("*optim_states.pt"))
        assert len(files) == 2
        for file in files:
            ours, theirs = (tensors_of(torch.load(one / file, weights_only=False)) for one in (stored, loaded))
            assert len(ours) == len(theirs) > 3
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_document_is_found_in_every_part(made: Made) -> None:
    """Documents read in steps of all parts are found by asking the other way round."""
    recorded = read_run(made.path)
    for step in (1, 5, 9):
        part, reads = recorded.documents_of(step)
        assert part.collection.content_sha256 == recorded.collection.content_sha256
        for read in reads[::5]:
            _, found, others = recorded.reads_of(read.source, read.document, 10)
            assert read in found
            assert [(other.start, other.stop) for other in others] == ([(72, 96)] if read.source == "english" else [])
    part, reads = recorded.documents_of(8)
    named = read_run(made.path, part.collection.path)
    for read in reads[::5]:
        _, found, others = named.reads_of(read.source, read.document, 10)
        assert read in found
        assert bool(others) == (read.source == "chinese")
    code = next(read for read in reads if read.source == "code")
    steps = {recorded.steps.step_of(read.sample) for read in recorded.reads_of("code", code.document, 10)[1]}
    assert 6 in steps or 7 in steps
    with pytest.raises(ValueError, match="no source is called 'chinese'"):
        recorded.reads_of("chinese", 0, 10)


def identity_of(tables: dict[str, Any], ranks: int = 2) -> dict[str, Any]:
    return Inputs.check(parse_recipe(tables), ranks).identity


def with_values(tables: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    return {**tables, **{name: {**tables.get(name, {}), **values} for name, values in changes.items()}}


def test_what_is_not_named_is_refused_and_the_option_told(made: Made, other_collection: Path) -> None:
    newest, tables = checkpoint(made.path, 10), made.tables[-1]
    assert refuse_other_run(newest, identity_of(tables)).to_json() == state_of(made.path, 10)["changes"]
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"batch": {"global_batch_size": 8}}, (), "this run has 8 until sample 24, then 16 until sample 72, then 8:"),
        ({"batch": {"global_batch_size": 8}}, ("data",), "from step 10 on: --change global_batch_size --change data"),
        ({"model": {"seq_len": 32}}, ("global_batch_size",), "seq_len was 64 and is now 32"),
        ({"model": {"seq_len": 32}}, (), "on: --change seq_len"),
        ({"data": {"path": str(other_collection)}}, (), "on: --change data"),
        ({"data": {"stages": [{"from_tokens": 0, "weights": {"code": 1.0}}]}}, (), "on: --change data"),
        ({"model": {"norm_eps": 1e-4}}, (), "model.norm_eps = 1e-06, this run has 0.0001: resume with the same"),
        ({"model": {"norm_eps": 1e-4}}, (), "on: --change model"),
        ({"model": {"d_ff": 512}}, (), "model.d_ff = 256, this run has 512: resume with the same model.d_ff"),
        (
            {"model": {"d_ff": 512}},
            ("model",),
            "with another d_ff no run can go on from it, nor start from its weights",
        ),
        ({"model": {"n_heads": 4}}, ("model",), "with another n_heads no run can go on"),
        ({"model": {"rope_layout": "interleaved"}}, ("model",), "import them again with --rope-layout interleaved"),
        ({"optimizer": {"name": "muon"}}, ("model", "data"), "optimizer.name = adamw, this run has muon"),
        ({"precision": {"master": "bf16"}}, ("model", "data"), "precision.master = fp32, this run has bf16"),
    ]
    for changes, names, words in cases:
        with pytest.raises(CheckpointError, match=re.escape(words)) as refused:
            refuse_other_run(newest, identity_of(with_values(tables, **changes)), names)
        assert "\n" not in str(refused.value)
        hopeless = "model" in changes and names == ("model",)
        assert ("--change model" in str(refused.value)) == (hopeless or "norm_eps" in str(changes))
    several = with_values(tables, batch={"global_batch_size": 4}, model={"seq_len": 32, "d_ff": 512})
    with pytest.raises(CheckpointError) as refused:
        refuse_other_run(newest, identity_of(several), ("data",))
    assert "\n" not in str(refused.value)
    for words in (
        "is another run's in 3 things: (1) seq_len was 64 and is now 32: resume with the same model.seq_len, or --ch",
        "this run has ", "or --change global_batch_size", "(3) was written with model.d_ff = 256, this run has 512",
        "each --change is one from step 10 on, beside --change data",
    ):  # fmt: skip
        assert words in str(refused.value)
    with pytest.raises(CheckpointError, match="seed was 11 and is now 12"):
        refuse_other_run(newest, identity_of({**tables, "seed": 12}), ("data", "model"))
    foreign = identity_of(with_values(tables, data={"path": str(other_collection)}))
    assert len(refuse_other_run(newest, foreign, ["data"]).changes) == 4
    foreign["data"]["tokenizer"] = "ab" * 32
    with pytest.raises(CheckpointError, match=r"was trained with the tokenizer \w{12}, .* was written with abababab"):
        refuse_other_run(newest, foreign, ["data"])
    with pytest.raises(RecipeError, match="--change batch: there are global_batch_size, seq_len, data, model"):
        check_names(["data", "batch"])
    with pytest.raises(RecipeError, match="--change seqlen: did you mean seq_len"):
        check_names(["seqlen"])


def test_a_ramp_goes_on_behind_a_change_in_whole_steps(made: Made) -> None:
    newest, names = checkpoint(made.path, 10), ("global_batch_size",)
    part = {"until_samples": 128, "global_batch_size": 4}
    ramp = with_values(made.tables[-1], batch={"global_batch_size": 32, "ramp": [part]})
    made_now = refuse_other_run(newest, identity_of(ramp), names)
    ours = Steps(32, ((128, 4),))
    assert made_now.steps(ours) == Steps(32, ((24, 8), (72, 16), (120, 12), (128, 4)))
    assert dict(made_now.changes[-1].changed[0]) == {"name": "global_batch_size", "from": 12, "to": 4}
    uneven = with_values(made.tables[-1], batch={"ramp": [{"until_samples": 144, "global_batch_size": 16}]})
    with pytest.raises(CheckpointError, match="from 120 until 144 are no whole steps of 16: set until_samples to 136"):
        refuse_other_run(newest, identity_of(uneven), names)


def test_stages_that_have_not_begun_and_a_mixture_by_name(made: Made) -> None:
    """`from_tokens` counts the run's tokens: 72 windows of 64, 24 of 32, and 24 of 64 lie behind step 10."""
    newest, now = checkpoint(made.path, 10), 72 * 64 + 24 * 32 + 24 * 64
    by_windows = {name: one["windows"] for name, one in state_of(made.path, 10)["order"]["sources"].items()}
    same = {"from_tokens": 0, "weights": {name: float(count) for name, count in by_windows.items()}}
    later = {"from_tokens": now + 640, "weights": {"code": 1.0}}
    planned = with_values(made.tables[-1], data={"stages": [same, later]})
    history = refuse_other_run(newest, identity_of(planned))
    inputs = Inputs.check(parse_recipe(planned), 2).behind(history)
    assert [one["first_sample"] for one in inputs.order.describe()["stages"]] == [96, 130]
    at_once = with_values(made.tables[-1], data={"stages": [same, {**later, "from_tokens": now - 640}]})
    with pytest.raises(CheckpointError, match="--change data"):
        refuse_other_run(newest, identity_of(at_once))
    history = refuse_other_run(newest, identity_of(at_once), ("data",))
    order = Inputs.check(parse_recipe(at_once), 2).behind(history).order
    assert order.locate(120).source == order.locate(121).source == "code"
    assert order.begin is not None
    assert order.begin.given == inputs.order.counts(120)  # no window is lost or comes twice
    assert history.changes[-1].changed[0]["to"]["slots"] == {"code": 1}


def test_stages_within_windows_of_a_new_length_begin_with_the_next(
    made: Made, tiny_recipe: Tables, tmp_path: Path
) -> None:
    """Windows of 48 behind 24 of 64: none of the stages begins with one, and two are within the first."""
    newest, names = checkpoint(made.path, 3), ("seq_len",)
    by_windows = {name: float(one["windows"]) for name, one in state_of(made.path, 3)["order"]["sources"].items()}
    code = {"code": 1.0}
    starts = {
        0: by_windows,
        24 * 64 + 20: code,
        24 * 64 + 40: by_windows,
        24 * 64 + 64: code,
        24 * 64 + 960: by_windows,
    }
    stages = [{"from_tokens": start, "weights": weights} for start, weights in starts.items()]
    recipe = with_values(made.tables[0], model={"seq_len": 48}, data={"stages": stages})
    identity = identity_of(recipe)
    history = refuse_other_run(newest, identity, names)
    order = Inputs.check(parse_recipe(recipe), 2).behind(history).order
    told = order.describe()["stages"]
    assert [one["first_sample"] for one in told] == [24, 25, 26, 44]  # of the two within the first window the last

    later = with_values(recipe, data={"stages": stages[:1]})  # of a stage that has begun nothing is looked at any more
    assert Inputs.check(parse_recipe(later), 2).behind(history).order.describe()["stages"][0] == told[0]
    with pytest.raises(CheckpointError, match="on: --change seq_len"):
        refuse_other_run(newest, identity)
    says = "data.stages from_tokens 1556 is not a multiple of model.seq_len 48: use 1536 or 1584"
    with pytest.raises(RecipeError, match=says):
        choose(tmp_path, "auto", identity, changes=names)  # a fresh run
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(parse_recipe(recipe)))
    for run in ((), ("--run", tmp_path, "--change", "seq_len")):
        answer = run_command("pretrain", "plan", file, *run)
        assert (answer.returncode, answer.stderr) == (2, f"error: {says}\n")
    whole = with_values(recipe, model={"seq_len": 64})
    with pytest.raises(RecipeError, match=r"1556 is not a multiple of model\.seq_len 64"):
        refuse_other_run(newest, identity_of(whole))


def test_rolled_back_behind_a_change_it_is_made_again(made: Made, tmp_path: Path) -> None:
    """The newest checkpoints damaged: the same command changes the same from an older one on, another one refuses."""
    run = tmp_path / "run"
    for name in ("checkpoints/step-00000003", "checkpoints/step-00000005", "tokenizer"):
        shutil.copytree(made.path / name, run / name)
    shutil.copy(made.path / "recipe.toml", run / "recipe.toml")
    (run / "checkpoints" / "step-00000005" / "weights.safetensors").write_bytes(b"")
    identity = identity_of(made.tables[1])
    with pytest.raises(CheckpointError, match="--change global_batch_size"):
        choose(run / "checkpoints", "auto", identity)
    chosen = choose(run / "checkpoints", "auto", identity, changes=["global_batch_size"])
    assert chosen == checkpoint(run, 3)
    again = refuse_other_run(chosen, identity, ["global_batch_size"])
    assert again.to_json() == state_of(made.path, 5)["changes"]


def test_steps_behind_a_change_that_no_checkpoint_has_yet_are_traced(made: Made, tmp_path: Path) -> None:
    """Killed behind step 8, the newest checkpoint of step 6: the start's own record says what the steps read."""
    run = tmp_path / "run"
    shutil.copytree(checkpoint(made.path, 6), checkpoint(run, 6))
    (run / "checkpoints" / "latest").write_text("step-00000006\n")
    attempts = json.loads((made.path / "environment.json").read_text())["attempts"]
    (run / "environment.json").write_text(json.dumps({"attempts": attempts[:4]}))
    (run / "recipe.toml").write_text(to_toml(parse_recipe(made.tables[3])))
    assert_traced(run, 6, together(made.seen, 3))
    assert_traced(run, 3, together(made.seen, 1))
    assert read_run(run).checked_against == checkpoint(run, 6)


def test_checkpoints_of_earlier_versions_can_be_changed(made: Made, other_collection: Path, tmp_path: Path) -> None:
    """They say neither where their data lay nor which text each source had: the run's recipe and its data do."""
    old, run = checkpoint(made.path, 3), tmp_path / "run"
    shutil.copytree(old, checkpoint(run, 3))
    shutil.copytree(made.path / "tokenizer", run / "tokenizer")
    state = state_of(run, 3)
    del state["data"]
    (checkpoint(run, 3) / "state.json").write_text(json.dumps(state))
    grown = identity_of(with_values(made.tables[0], data={"path": str(other_collection)}))
    recipe = (made.path / "recipe.toml").read_text()
    for text, given in ((recipe, state["consumed_samples"]), (recipe.replace('path = "', 'path = "/none'), 0)):
        (run / "recipe.toml").write_text(text)
        (change,) = refuse_other_run(checkpoint(run, 3), grown, ["data"]).changes
        begin = History((change,)).begin(grown["data"]["streams"], 64, "concat")
        assert change.read is not None
        assert begin is not None
        assert (change.read.path is not None) == bool(given)
        assert (begin.given["code"] > 0, begin.given["chinese"]) == (bool(given), 0)


def test_other_ranks_together_with_a_change(made: Made, tmp_path: Path) -> None:
    """One rank goes on where two were, with another batch and ZeRO stage, in a directory of its own."""
    tables = with_values(
        made.tables[-1], batch={"global_batch_size": 4}, deepspeed={"config": "ds_configs/zero1.json"},
        schedule={"max_steps": 12},
    )  # fmt: skip
    start = Start(tables, tmp_path / "one", ("global_batch_size",), str(checkpoint(made.path, 10)))
    seen = run_ranks(1, starts_case, [start])
    assert [sorted(rows) for rows in together(seen, 0)] == [list(range(120, 124)), list(range(124, 128))]
    assert_traced(tmp_path / "one", 10, together(seen, 0))
    assert "converted for 1 rank under ZeRO-1" in seen[0][0].told[0]
    assert seen[0][0].told[1] == "step 10: global_batch_size is changed from 12 to 4"
    recorded = read_run(tmp_path / "one")
    assert recorded.documents_of(2)[1] == read_run(made.path).documents_of(2)[1]


def test_data_that_moved_or_changed_since_are_told_of(made: Made, other_collection: Path) -> None:
    environment, moved = made.path / "environment.json", other_collection.with_name("moved")
    text = environment.read_text()
    other_collection.rename(moved)
    try:
        with pytest.raises(DataFormatError, match=r"no such folder.*samples 72 to 95 were read from tokens .* --data"):
            read_run(made.path).documents_of(8)
        reads = [read_run(made.path).documents_of(step)[1] for step in (6, 9)]
        reads.append(read_run(made.path, moved).documents_of(8)[1])
        shutil.copytree(read_run(made.path).collection.path, other_collection)
        with pytest.raises(DataFormatError, match=r"samples 72 to 95 were read from tokens .* by now: name them"):
            read_run(made.path).documents_of(8)
        shutil.rmtree(other_collection)
        for content, words in (("[3]", "does not tell what was changed"), ("[]", "knows of other changes of the run")):
            attempts = json.loads(text)["attempts"]
            environment.write_text(json.dumps({"attempts": [{**attempts[-1], "changes": json.loads(content)}]}))
            with pytest.raises(DataFormatError, match=words):
                read_run(made.path)
    finally:
        moved.rename(other_collection)
        environment.write_text(text)
    assert all(reads)


def test_a_plan_and_a_dry_run_tell_what_would_be_resumed(made: Made, tmp_path: Path) -> None:
    """Nothing is hashed or renamed: a checkpoint cut short is passed over, one with a flipped bit is not noticed."""
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(parse_recipe(with_values(made.tables[-1], batch={"global_batch_size": 16}))))
    for name in ("checkpoints/step-00000008", "checkpoints/step-00000010"):
        shutil.copytree(made.path / name, run / name)
    weights = checkpoint(run, 10) / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    plan = ["plan", recipe, "--world-size", "1", "--json", "--run", run]
    change, expected = ["--change", "global_batch_size"], {"name": "global_batch_size", "from": 12, "to": 16}
    done = run_command("pretrain", *plan, *change)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["resume"] == {
        "checkpoint": str(checkpoint(run, 10)), "global_step": 10,
        "tokens_seen": state_of(run, 10)["tokens_seen"], "written_by": {"world_size": 2, "zero_stage": 2},
        "converted": True, "changes": [expected], "told": ["step 10: global_batch_size is changed from 12 to 16"],
        "left_out": [],
    }  # fmt: skip
    done = run_command("pretrain", *plan)
    refused = json.loads(done.stdout)["resume"]["refused"]
    assert (done.returncode, done.stderr) == (2, f"error: {refused}\n")
    assert refused.endswith("from step 10 on: --change global_batch_size")
    done = run_command("pretrain", *(word for word in plan if word != "--json"), *change)
    assert done.stdout.startswith(f"resume            {checkpoint(run, 10)}, step 10; written by 2 ranks under ")
    assert done.stdout.split("\n")[1].strip() == "step 10: global_batch_size is changed from 12 to 16"
    weights.write_bytes(content[:-1])
    launch = ["run", recipe, "--ranks", "1", "--run", run, "--dry-run"]
    done = run_command("launch", *launch, *change, "--change", "seq_len", "--change", "data")  # step 8 read others
    assert done.returncode == 0
    assert f"{checkpoint(run, 8)}, step 8; converted from 2 ranks under ZeRO-2\n" in done.stdout
    assert "step 8: seq_len is changed from 32 to 64\n" in done.stdout
    assert re.search(r"step 8: data is changed from .*; code goes on behind \d+ windows", done.stdout)
    assert "--change global_batch_size --change seq_len --change data" in done.stdout
    shutil.rmtree(run)
    done = run_command("pretrain", *plan, *change)
    assert (done.returncode, json.loads(done.stdout)["resume"]) == (0, None)
