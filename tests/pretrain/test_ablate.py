"""Ablations: variants and their budget by hand, verdicts by hand, and a real one through the trainer."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from model.accounting import flops_per_token, parameter_count
from pretrain.ablate import Ablation, difference, results, train, write_recipes
from pretrain.config import RecipeError, load_recipe, parse_recipe, to_toml
from pretrain.inspection import inspect, largest_score
from pretrain.variants import fit, ladder, product, read_axis, variant
from tests.command_line import run_command
from tests.pretrain.recipe import recipe
from tests.pretrain.written_run import evaluation, write_run
from tests.pretrain.written_run import train as step

MODEL = recipe().model  # mini: d_model 512, 12 layers, 8 heads, 2 kv heads, head_dim 64, d_ff 1408
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def test_every_combination_the_last_axis_fastest():
    axes = [read_axis("norm_place=pre,post"), read_axis("qk_norm=false,true"), read_axis("sliding_window=none,64")]
    made = product(MODEL, axes)
    assert [one.name for one in made][:3] == [
        "norm_place=pre,qk_norm=false,sliding_window=none",
        "norm_place=pre,qk_norm=false,sliding_window=64",
        "norm_place=pre,qk_norm=true,sliding_window=none",
    ]
    assert len(made) == 8
    assert made[0].model == MODEL
    assert (made[-1].model.norm_place, made[-1].model.qk_norm, made[-1].model.sliding_window) == ("post", True, 64)


def test_one_parameter_budget_by_hand():
    """SwiGLU has three matrices of 512 × d_ff, ReLU two: 1408 · 3 / 2 = 2112, exactly as many parameters."""
    reference, relu = fit(product(MODEL, [read_axis("ffn=swiglu,relu")]), "parameters", "d_ff")
    assert (reference.model.d_ff, relu.model.d_ff) == (1408, 2112)
    assert parameter_count(relu.model) == parameter_count(MODEL) == 35_926_528


def test_as_near_as_whole_numbers_come():
    """Six more kv heads: 2 matrices of 512 × 384 are 393,216 a layer, of SwiGLU 1536 a unit: 256 fewer, exactly."""
    _, multi_head = fit(product(MODEL, [read_axis("n_kv_heads=2,8")]), "parameters", "d_ff")
    assert multi_head.model.d_ff == 1408 - 256
    for one in fit(ladder(MODEL), "parameters", "d_ff"):
        gap = abs(parameter_count(one.model) - parameter_count(ladder(MODEL)[0].model))
        assert gap <= 12 * 3 * 512 / 2


def test_one_budget_of_flops():
    made = fit(ladder(MODEL), "flops", "d_ff")
    target = flops_per_token(made[0].model).causal
    assert all(abs(flops_per_token(one.model).causal - target) <= 6 * 12 * 3 * 512 / 2 for one in made)
    shallow = fit(product(MODEL, [read_axis("d_ff=1408,2816")]), "parameters", "n_layers")[1]
    assert shallow.model.n_layers == 7  # 12 blocks of 2,819,072 in blocks of 4,981,760: 6.8


def test_a_ladder_changes_one_thing_a_row():
    rows = [one.model for one in ladder(MODEL)]
    changed = [
        {key for key in vars(after) if getattr(after, key) != getattr(before, key)} for before, after in pairwise(rows)
    ]
    mla = {"attention", "qk_norm", "n_kv_heads", "mla_latent", "mla_rope_dim"}
    assert changed == [
        {"norm"}, {"bias"}, {"ffn"}, {"norm_place"}, {"positions"}, {"n_kv_heads"}, {"qk_norm"}, mla,
        {"residual", "n_streams"},
    ]  # fmt: skip
    assert rows[6] == MODEL


def test_verdicts_by_hand():
    """Differences −0.1 and −0.3: mean −0.2, deviation 0.1414, standard error 0.1: 12.7 of them are more than 0.2."""
    apart = difference([2.9, 2.7], [3.0, 3.0])
    assert apart.mean == pytest.approx(-0.2)
    assert apart.standard_error == pytest.approx(0.1)
    assert apart.verdict == "within the noise"
    assert difference([2.80, 2.79], [3.0, 3.0]).verdict == "better"  # 0.205 is more than 12.7 · 0.005
    assert difference([3.20, 3.21], [3.0, 3.0]).verdict == "worse"
    assert difference([2.0], [3.0]).verdict == "one seed: no verdict"
    assert difference([float("nan"), 3.0], [3.0, 3.0]).verdict == "not finite"


def test_results_of_made_runs(tmp_path: Path):
    made = product(MODEL, [read_axis("qk_norm=false,true")])
    ablation = Ablation(recipe(), made, 2, "parameters", tmp_path)
    for one, losses in zip(made, ([3.0, 3.2], [2.8, 3.01]), strict=True):
        for seed, heldout in enumerate(losses):
            records = [step(at, loss=4.0 + seed) for at in range(1, 4)]
            write_run(ablation.run_path(one, seed), [*records, evaluation(3, loss=heldout)])
    found = results(ablation, lambda run: {"gradient_norms": [1.0, 3.0], "largest_logit": 5.0})
    first, second = found["variants"]
    assert first["training_loss"]["mean"] == 4.5
    assert first["heldout_loss"]["mean"] == pytest.approx(3.1)
    assert first["heldout_loss"]["deviation"] == pytest.approx(0.2 / 2**0.5)
    assert second["from_reference"]["mean"] == pytest.approx(-0.195)
    assert second["from_reference"]["standard_error"] == pytest.approx(0.005)
    assert second["from_reference"]["verdict"] == "better"
    assert (found["seeds"], found["tokens"]) == ([1, 2], 100 * 32 * 1024)
    assert first["gradient_norms_by_layer"] == [1.0, 3.0]


def test_scores_that_no_query_sees_do_not_count():
    q = torch.tensor([[1.0, 0.0], [2.0, 0.0]]).view(1, 1, 2, 2)
    k = torch.tensor([[3.0, 0.0], [-4.0, 0.0]]).view(1, 1, 2, 2)
    assert largest_score(q, k, None) == pytest.approx(8 / 2**0.5)
    k[0, 0, 1] = 0
    assert largest_score(q, k, None) == pytest.approx(6 / 2**0.5)
    q[0, 0, 1], k[0, 0, 1] = 0, torch.tensor([99.0, 0.0])  # only the first query would meet it, and may not
    assert largest_score(q, k, None) == pytest.approx(3 / 2**0.5)


def test_a_real_one(tiny_recipe, tmp_path: Path):
    """Two variants through the trainer; started again, nothing is trained; another question is refused."""
    config = parse_recipe(tiny_recipe(schedule={"max_steps": 3}, checkpoint={"every_steps": 3}))
    made = fit(product(config.model, [read_axis("attention=gqa,mla")]), "parameters", "d_ff")
    ablation = Ablation(config, made, 1, "parameters", tmp_path / "out")
    said: list[str] = []

    def start(path: Path, run: Path) -> int:
        return run_command("pretrain", "run", path, "--run", run, environment=ENVIRONMENT).returncode

    write_recipes(ablation)
    train(ablation, said.append, start)
    assert [line.partition(",")[0] for line in said] == [
        f"run {n} of 2: attention={x}" for n, x in ((1, "gqa"), (2, "mla"))
    ]

    def refuse(path: Path, run: Path) -> int:
        raise AssertionError(f"{run} is finished")

    train(ablation, said.append, refuse)
    assert said[-1] == "2 of 2 runs are finished already"
    for one in made:
        assert load_recipe(ablation.run_path(one, 0) / "recipe.toml").model == one.model
        inspected = inspect(ablation.run_path(one, 0))
        assert len(inspected.gradient_norms) == 2
        assert all(norm > 0 for norm in inspected.gradient_norms)
        assert inspected.largest_logit > 0
    other = Ablation(config.model_copy(update={"compile": True}), made, 1, "parameters", tmp_path / "out")
    with pytest.raises(RecipeError, match="another ablation"):
        write_recipes(other)


def test_a_run_that_fails_is_told(tmp_path: Path):
    ablation = Ablation(recipe(), product(MODEL, [read_axis("ffn=swiglu,relu")]), 1, "parameters", tmp_path)
    with pytest.raises(RecipeError, match=r"ffn=swiglu/seed-1 ended with code 2: see .*seed-1\.log"):
        train(ablation, lambda line: None, lambda path, run: 2)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "--axis NAME=A,B"),
        (["--ladder", "--axis", "ffn=relu,gelu"], "one of the two"),
        (["--axis", "fnn=relu,gelu"], "did you mean ffn?"),
        (["--axis", "ffn"], "NAME=VALUE,VALUE"),
        (["--axis", "ffn=relu"], "1 variant to compare"),
        (["--axis", "ffn=relu,relu"], "twice"),
        (["--axis", "ffn=relu,tanh"], "variant ffn=tanh cannot be built: ffn = 'tanh' is unknown"),
        (["--axis", "residual=plain,hyper", "--axis", "norm_place=pre,post"], "residual=hyper,norm_place=post cannot"),
        (["--axis", "seq_len=64,128"], "same tokens"),
        (["--axis", "d_ff=256,512"], "--fit n_layers"),
        (["--axis", "n_heads=8,x"], "'x' is no int"),
        (["--ladder", "--seeds", "0"], "--seeds 0"),
        (["--axis", "d_model=64,512"], "make the recipe's model larger"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe()), encoding="utf-8")
    out = tmp_path / "out"
    done = run_command("pretrain", "ablate", path, "--out", out, *arguments, environment=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr
    assert not out.exists()


def test_a_dry_run_trains_nothing(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe()), encoding="utf-8")
    done = run_command(
        "pretrain",
        "ablate",
        path,
        "--ladder",
        "--dry-run",
        "--json",
        "--out",
        tmp_path / "out",
        environment=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["name"] for row in told["variants"]][:2] == ["classic", "RMSNorm"]
    assert told["flops"] == 2 * told["tokens"] * sum(row["flops_per_token"] for row in told["variants"])
    assert not (tmp_path / "out").exists()


def test_what_a_choice_needs_comes_with_it():
    mla = variant("x", MODEL, {"attention": "mla"})
    assert mla.brought == {"mla_latent": 128, "mla_rope_dim": 32, "n_kv_heads": 8}
    assert variant("x", mla.model, {"attention": "gqa"}).brought == {"mla_latent": None, "mla_rope_dim": None}
    assert variant("x", MODEL, {"residual": "hyper"}).brought == {"n_streams": 4}
