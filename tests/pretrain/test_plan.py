from __future__ import annotations

import json
import subprocess
import sys

import pytest

from data_pipeline.order import SampleOrder, Stage
from pretrain.config import PROJECT_ROOT, RecipeError, load_recipe
from pretrain.plan import Reading, parse_memory, plan
from tests.pretrain.recipe import recipe

RECIPES = PROJECT_ROOT / "pretrain" / "recipes"


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pretrain", "plan", *arguments], capture_output=True, text=True, cwd=PROJECT_ROOT
    )


def test_the_reference_recipe():
    figures = plan(load_recipe(RECIPES / "0.5b.toml"), 8).to_dict()
    assert figures["parameters"] == 502_193_664
    assert figures["tokens_per_step"] == 524_288
    assert figures["gradient_accumulation_steps"] == 4
    assert figures["total_tokens"] == figures["tokens_per_step"] * figures["max_steps"]
    assert figures["zero_stage"] == 2
    assert figures["verdict"] is None
    budgets = figures["static_memory"]["budgets"]
    assert [(row["stage"], row["accumulate"]) for row in budgets] == [
        (stage, accumulate) for stage in range(4) for accumulate in ("bf16", "fp32")
    ]
    assert [row["stage"] for row in budgets if row["refused"]] == [0]
    assert [(row["stage"], row["accumulate"]) for row in budgets if row["configured"]] == [(2, "fp32")]
    json.dumps(figures)


def test_a_plan_of_auto_says_what_it_counts():
    made = plan(recipe(precision={"compute": "auto"}), 2)
    assert "bf16 (auto: fp16 on a GPU without bf16) compute" in made.to_text()
    assert made.to_dict()["precision"]["compute"] == "auto"
    rows = plan(recipe(precision={"compute": "fp16"}), 2).to_dict()["static_memory"]["budgets"]
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


def test_the_verdict_counts_the_allowance():
    config = load_recipe(RECIPES / "0.5b.toml")
    verdict = plan(config, 1, 10 * 10**9).verdict
    assert verdict is not None
    assert verdict.static_bytes / 1e9 == pytest.approx(9.04, abs=0.005)
    assert verdict.static_bytes < verdict.device_memory_bytes < verdict.needed_bytes
    assert not verdict.fits
    assert "does not fit" in plan(config, 1, 10 * 10**9).to_text()
    fitting = plan(config, 1, verdict.needed_bytes).verdict
    assert fitting is not None
    assert fitting.fits


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


def test_the_command_reports_and_fails_when_it_cannot_fit():
    fits = command("pretrain/recipes/0.5b.toml", "--device-memory", "12GB")
    assert fits.returncode == 0
    assert "static only: activations not counted yet" in fits.stdout
    assert "8.04" in fits.stdout
    assert "10.04" in fits.stdout
    too_small = command("pretrain/recipes/0.5b.toml", "--device-memory", "9GiB", "--json")
    assert too_small.returncode == 2
    assert json.loads(too_small.stdout)["verdict"]["fits"] is False


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["pretrain/recipes/mini.toml", "--world-size", "3"], "use 48 or 72"),
        (["pretrain/recipes/mini.toml", "--world-size", "0"], "world size 0"),
        (["pretrain/recipes/mini.toml", "--set", "schedule.peek_lr=1"], "did you mean schedule.peak_lr"),
        (["pretrain/recipes/mini.toml", "--set", "deepspeed.config=ds_configs/zero0.json"], "ZeRO-0"),
        (["pretrain/recipes/mini.toml", "--device-memory", "24"], "24GB or 22GiB"),
        (["nowhere.toml"], "no such recipe file"),
    ],
)
def test_bad_input_is_one_error_line(arguments, says):
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_planning_imports_neither_torch_nor_deepspeed():
    code = "import sys, pretrain.__main__, pretrain.plan; print({'torch', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, check=True)
    assert done.stdout.strip() == "set()"


def test_help_shows_examples():
    assert "python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8" in command("--help").stdout
