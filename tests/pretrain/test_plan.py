from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings

import pytest

from data_pipeline.order import SampleOrder, Stage
from pretrain import __main__ as command_line
from pretrain.config import PROJECT_ROOT, RecipeError, load_recipe
from pretrain.device_memory import GB, described
from pretrain.memory import MOMENTS
from pretrain.plan import Reading, parse_memory, plan
from tests.pretrain.recipe import recipe

RECIPES = PROJECT_ROOT / "pretrain" / "recipes"
HALF_B = str(RECIPES / "0.5b.toml")
MINI = str(RECIPES / "mini.toml")


@pytest.fixture
def command(capsys, monkeypatch):
    """`python -m pretrain plan ARGUMENTS` in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command sets its own
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pretrain", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


def one_error_line(code, errors):
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


def test_the_reference_recipe():
    figures = plan(load_recipe(HALF_B), 8).to_dict()
    assert figures["parameters"] == 502_193_664
    assert figures["tokens_per_step"] == 524_288
    assert figures["gradient_accumulation_steps"] == 4
    assert figures["total_tokens"] == figures["tokens_per_step"] * figures["max_steps"]
    assert figures["zero_stage"] == 2
    assert figures["verdict"] is None
    checkpoint = figures["checkpoint"]  # masters and two moments in fp32; the weights in bf16, twice
    assert checkpoint["bytes"] == pytest.approx(16 * 502_193_664, rel=1e-6)
    assert (checkpoint["every_steps"], checkpoint["keep_last"]) == (1000, 3)
    assert figures["data"] == {
        "path": str(PROJECT_ROOT / "data/0.5b"),
        "tokenizer": str(PROJECT_ROOT / "tokenizers/0.5b"),
    }
    stages = figures["stages"]
    assert [(row["stage"], row["accumulate"]) for row in stages] == [
        (stage, accumulate) for stage in range(4) for accumulate in ("bf16", "fp32")
    ]
    assert [row["stage"] for row in stages if row["refused"]] == [0]
    (configured,) = [row for row in stages if row["configured"]]
    assert (configured["stage"], configured["accumulate"]) == (2, "fp32")
    assert configured["static_bytes"] == figures["memory"]["static_bytes"]
    assert configured["bytes_per_parameter"] == pytest.approx(2 + 14 / 8, abs=0.3)
    json.dumps(figures)


def test_the_budget_is_whole_part_by_part():
    made = plan(load_recipe(HALF_B), 8)
    memory, text = made.to_dict()["memory"], made.to_text(formulas=True)
    assert "formula" not in made.to_text()
    for moment in MOMENTS:
        parts = [part for part in memory["parts"] if moment in part["moments"] and part["place"] == "device"]
        assert sum(part["bytes"] for part in parts) == memory["moments"][moment]["device_bytes"]
    assert memory["moments"][memory["peak_moment"]]["device_bytes"] == memory["peak_bytes"]
    assert memory["peak_bytes"] == max(moment["device_bytes"] for moment in memory["moments"].values())
    for part in memory["parts"]:
        named = [line for line in text.splitlines() if line.endswith(f"  {part['name']}: {part['formula']}")]
        place = "    " if part["place"] == "device" else "host"
        assert any(line.startswith(f"  {part['bytes'] / 1e9:8.3f}  {place}  ") for line in named)
        assert set(re.findall(r"[A-Za-z]+", part["formula"])) - {"min", "max"} <= memory["symbols"].keys()
    assert f"{memory['peak_moment']}* {memory['peak_bytes'] / 1e9:.3f}" in text


def test_a_plan_of_auto_says_what_it_counts():
    made = plan(recipe(precision={"compute": "auto"}), 2)
    assert "bf16 (auto: fp16 on a GPU without bf16) compute" in made.to_text()
    assert made.to_dict()["precision"]["compute"] == "auto"
    rows = plan(recipe(precision={"compute": "fp16"}), 2).to_dict()["stages"]
    assert [(row["stage"], row["accumulate"]) for row in rows if not row["refused"]] == [
        (stage, accumulate) for stage in (1, 2, 3) for accumulate in ("fp16", "fp32")
    ]


@pytest.mark.parametrize(
    "text, size", [("24GB", 24 * 10**9), ("22GiB", 22 * 2**30), ("0.5 gb", 5 * 10**8), ("512MiB", 2**29)]
)
def test_sizes(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["24", "GB", "-1GB", "0GB", "24 G", "infGB", "24GBit", "9" * 500 + "GB", "9" * 30 + "GB"]
)
def test_sizes_without_a_number_or_unit_are_refused(text):
    with pytest.raises(RecipeError, match="24GB or 22GiB") as caught:
        parse_memory(text)
    assert len(str(caught.value)) < 200


def test_the_verdict_counts_peak_process_and_fragmentation():
    config = load_recipe(HALF_B)
    verdict = plan(config, 1, described(10 * GB)).verdict
    assert verdict is not None
    assert not verdict.fits
    assert "does not fit" in plan(config, 1, described(10 * GB)).to_text()
    need = verdict.need
    assert need.peak_bytes > verdict.static_bytes > 9 * GB
    assert need.total_bytes == need.peak_bytes + GB + round(0.05 * need.peak_bytes)
    exactly = plan(config, 1, described(need.total_bytes)).verdict
    assert exactly is not None
    assert exactly.fits
    figures = exactly.to_dict()
    assert (figures["needed_bytes"], figures["device_memory_bytes"]) == (need.total_bytes, need.total_bytes)


def test_what_does_not_fit_is_one_line_with_the_changes(command):
    assert command(HALF_B, "--device-memory", "80GB")[0] == 0
    code, shown, errors = command(HALF_B, "--device-memory", "9GiB", "--json")
    assert "does not fit: a rank needs " in one_error_line(code, errors)
    assert "and has 9.66 GB (as given): set " in errors
    assert errors.endswith(", or go on with --force\n")
    assert json.loads(shown)["verdict"]["fits"] is False
    code, shown, errors = command(HALF_B, "--device-memory", "9GiB", "--force")
    assert code == 0
    assert errors.startswith("warning: ")
    assert errors.count("\n") == 1
    assert "does not fit: a rank needs " in errors
    assert "--force" not in errors


def test_auto_asks_this_machine_whose_ranks_share_it(command):
    for ranks in (1, 2):
        code, shown, _ = command(
            str(RECIPES / "debug.toml"), "--device-memory", "auto", "--world-size", str(ranks), "--force", "--json"
        )
        assert code == 0
        figures = json.loads(shown)
        assert figures["memory"]["device"] == "cpu"
        assert ("ranks share" in figures["verdict"]["device_memory_is"]) is (ranks > 1)


@pytest.mark.parametrize("name, size", [("debug", "1GB"), ("demo", "4GB"), ("mini", "6GB")])
def test_what_runs_on_small_machines_is_not_refused(command, name, size):
    code, shown, errors = command(str(RECIPES / f"{name}.toml"), "--device", "cpu", "--device-memory", size)
    assert (code, errors) == (0, "")
    assert "on a CPU in " in shown


def test_fit_prints_lines_that_make_it_fit(command, tmp_path):
    code, shown, errors = command(HALF_B, "--device-memory", "24GB", "--world-size", "2", "--fit")
    assert (code, errors) == (0, "")
    sets = [word for word in shown.split("\nor ")[1].splitlines()[0].split() if word != "--set"]
    assert sets
    code, shown, errors = command(
        HALF_B, "--device-memory", "24GB", "--world-size", "2", "--json", *(f"--set={one}" for one in sets)
    )
    assert (code, errors) == (0, "")
    fitting = json.loads(shown)
    assert fitting["verdict"]["fits"]
    code, shown, errors = command(HALF_B, "--device-memory", "24GB", "--world-size", "2", "--fit", "--json")
    report = json.loads(shown)
    assert report["fit"]["set"] == sets
    assert report["memory"] == fitting["memory"]
    assert [one["needed_bytes"] <= 24 * GB for one in report["fit"]["tried"]] == [
        one is report["fit"]["tried"][-1] for one in report["fit"]["tried"]
    ]


def test_where_nothing_fits_the_smallest_is_said(command):
    code, shown, errors = command(HALF_B, "--device-memory", "1GiB", "--fit")
    assert "nothing fits 1 × 1.07 GB: the smallest, with " in one_error_line(code, errors)
    assert "a device of " in errors
    assert "configurations for 1 × 1.07 GB in the order tried" in shown


def test_epochs_are_stated_and_warned_about_above_the_limit():
    """3,200 samples, a tenth of them from 100 windows, the rest from 1,000; then the last 1,200 from the smaller."""
    order = SampleOrder(
        seed=1, seq_len=4, tokens={"large": 4001, "small": 401, "unread": 9},
        stages=[Stage(0, {"small": 0.1, "large": 0.9}), Stage(2000, {"small": 1})],
    )  # fmt: skip
    reading = Reading.of(recipe(), order)
    assert reading.epochs == {"large": 1.8, "small": 14.0, "unread": 0.0}
    assert reading.lines() == [
        "mixture from sample 0: of every 10 samples large 9, small 1",
        "mixture from sample 2,000: of every 1 samples small 1",
        "epochs in 3,200 samples: large 1.80, small 14.00, unread 0.00",
        "warning: small is read 14.00 times, data.warn_epochs is 4: give it less weight or more text, train for fewer "
        "steps, or raise that limit",
    ]
    for limit, warned in ((14.0, []), (13.9, ["small"]), (1.8, ["small"]), (1.7, ["large", "small"])):
        assert Reading.of(recipe(data={"warn_epochs": limit}), order).to_dict()["too_often"] == warned


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([MINI, "--world-size", "3"], "use 48 or 72"),
        ([MINI, "--world-size", "0"], "world size 0"),
        ([MINI, "--world-size", "0", "--fit", "--device-memory", "8GB"], "world size 0"),
        ([MINI, "--world-size", "9" * 30], "must be at least 1 and below 2^31"),
        ([MINI, "--world-size", "9" * 300, "--fit", "--device-memory", "8GB"], "world size a number of 997 bits"),
        ([MINI, "--world-size", "3", "--fit", "--device-memory", "8GB"], "cannot be divided over 3 ranks"),
        ([MINI, "--set", "schedule.peek_lr=1"], "did you mean schedule.peak_lr"),
        ([MINI, "--set", "deepspeed.config=ds_configs/zero0.json"], "ZeRO-0"),
        ([MINI, "--set", "deepspeed.config=ds_configs/zero9.json"], "no such DeepSpeed JSON"),
        ([MINI, "--set", "deepspeed.config=ds_configs/zero9.json", "--fit", "--device-memory", "8GB"], "no such Deep"),
        ([MINI, "--device-memory", "24"], "24GB or 22GiB"),
        ([MINI, "--device-memory", "0"], "24GB or 22GiB"),
        ([MINI, "--device-memory", "0GB", "--fit"], "24GB or 22GiB"),
        ([MINI, "--fit"], "--fit needs a device"),
        ([MINI, "--presets", "--device-memory", "8GB"], "leave out all but"),
        ([MINI, "--device-memory", "auto", "--device", "cuda"], "sees no GPU"),
        (["nowhere.toml"], "no such recipe file"),
        (["nowhere.toml", "--presets"], "no such recipe file"),
    ],
)
def test_bad_input_is_one_error_line(arguments, says, command):
    code, shown, errors = command(*arguments)
    assert says in one_error_line(code, errors)
    assert shown == ""
    assert len(errors) < 500


def test_planning_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys, pretrain.__main__, pretrain.plan, pretrain.device_presets; "
        "pretrain.device_memory.this_device(1, 'cpu'); print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, check=True)
    assert done.stdout.strip() == "set()"


def test_help_shows_examples(command):
    assert "python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8" in command("--help")[1]
