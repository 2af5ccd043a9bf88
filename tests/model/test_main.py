import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import run_command
from tests.ranks import root


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("model", *arguments)


def run_cold(*arguments: str) -> subprocess.CompletedProcess[str]:
    """By a new Python, which imports torch itself."""
    command = [sys.executable, "-m", "model", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=root(), env=environment, capture_output=True, text=True, check=False)


def test_count_prints_the_table() -> None:
    outcome = run("count", "0.5b")
    assert outcome.returncode == 0
    for figure in ("502,193,664", "453,040,128", "90.2 %", "36,864 B", "75.5 MB", "110,592 B", "8.04 GB"):
        assert figure in outcome.stdout


def test_count_reads_a_recipe_whatever_else_it_holds(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = 'seed = 1\n[model]\npreset = "mini"\nn_layers = 6\n[unheard.of]\nx = 1\n'
    recipe.write_text(text, encoding="utf-8-sig")
    report = json.loads(run("count", str(recipe), "--json").stdout)
    assert report["config"]["n_layers"] == 6
    assert report["parameters"] == report["parts"][-1]["parameters"] < 35_926_528
    assert report["flops_per_token"]["causal"] < report["flops_per_token"]["full"]
    assert report["kv_cache_bytes_per_token"] == 3_072


def test_verify_reports_every_check(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "mini"\nn_layers = 1\nseq_len = 64\nvocab_size = 300\n', encoding="utf-8")
    outcome = run_cold("verify", str(recipe), "--json")
    assert outcome.returncode == 0, outcome.stdout
    report = json.loads(outcome.stdout)
    assert report["passed"]
    assert [check["passed"] for check in report["checks"]] == [True] * 5


def test_a_failed_check_says_why_and_exits_1(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "mini"\nn_layers = 1\nseq_len = 64\ninit_std = 0.3\n', encoding="utf-8")
    outcome = run("verify", str(recipe))
    assert outcome.returncode == 1
    assert "2. shapes        pass" in outcome.stdout
    assert "3. initial loss  FAIL" in outcome.stdout
    assert "   likely    loss too " in outcome.stdout
    assert "of 5 checks passed" in outcome.stdout


def test_a_model_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "mini"\nn_layers = 1000\nd_ff = 10000000\n', encoding="utf-8")
    outcome = run("verify", str(recipe))
    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1)
    assert "GB in fp32 and this machine has" in outcome.stderr


def test_a_window_of_one_token_cannot_be_verified(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "mini"\nn_layers = 1\nseq_len = 1\n', encoding="utf-8")
    outcome = run("verify", str(recipe))
    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1)
    assert "seq_len = 1" in outcome.stderr


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "taken as a recipe's path it is no file"),
        ("[model\n", "not valid TOML"),
        ("seed = 1\n", "no [model] table"),
        ('[model]\npreset = "mini"\nn_head = 4\n', 'unknown key "n_head"'),
        ("seed = " + "[" * 5000, "brackets nested too deep"),
        ("seed = " + "9" * 5000, "too many digits"),
        ('[model]\npreset = "mini"\nnorm_eps = ' + "9" * 400, "norm_eps = a number of 1329 bits"),
    ],
    ids=range(7),
)
def test_bad_recipes_end_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    recipe = tmp_path / "recipe.toml"
    if text is not None:
        recipe.write_text(text, encoding="utf-8")
    outcome = run("count", str(recipe))
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1
    assert words in outcome.stderr


def test_a_seed_beyond_64_bits_is_one_line() -> None:
    outcome = run("verify", "mini", "--seed", "9" * 20)
    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1)
    assert "--seed" in outcome.stderr


def test_an_unknown_preset_names_the_nearest() -> None:
    outcome = run("verify", "minni")
    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1)
    assert 'did you mean "mini"?' in outcome.stderr


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "mini"\nhead_dim = 32\n', encoding="utf-8")
    outcome = run("count", str(recipe))
    assert outcome.returncode == 0
    assert outcome.stderr.startswith("warning: head_dim = 32")
    assert outcome.stderr.count("\n") == 1
