"""Ablations: variants and their budget by hand, verdicts by hand, and a real one through the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from data_pipeline.loader import evaluation_batches
from model.accounting import flops_per_token, kv_cache_bytes_per_token, parameter_count
from model.cache import KVCache
from pretrain import ablate, inspection, pace
from pretrain.ablate import Ablation, results, train, write_recipes
from pretrain.ablation_report import draw_inside, draw_learnt, markdown, result_tables
from pretrain.chronicle import read
from pretrain.config import PROJECT_ROOT, RecipeError, load_recipe, parse_recipe, to_toml
from pretrain.inspection import Activity, Inspected, inspect
from pretrain.pace import Pace, paces
from pretrain.variants import fit, ladder, product, read_axis, variant
from tests.command_line import run_command
from tests.pretrain.recipe import recipe
from tests.pretrain.written_run import evaluation, write_run
from tests.pretrain.written_run import train as step
from tests.ranks import root

MODEL = recipe().model  # mini: d_model 512, 12 layers, 8 heads, 2 kv heads, head_dim 64, d_ff 1408
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


INSPECTED = Inspected([1.0, float("inf")], 5.0, Activity([4.0, 5.0], [0.0, 0.25], [0.0, 0.0], [0.5, 2.0]))


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
    assert [one.label for one in ladder(MODEL)][7:] == ["QK-Norm", "MLA for GQA, QK-Norm", "hyper"]


def test_results_of_made_runs(tmp_path: Path):
    made = product(MODEL, [read_axis("qk_norm=false,true")])
    ablation = Ablation(recipe(), made, 2, "parameters", tmp_path)
    for one, losses in zip(made, ([3.0, 3.2], [2.8, 3.01]), strict=True):
        for seed, heldout in enumerate(losses):
            records = [step(at, loss=4.0 + seed) for at in range(1, 4)]
            write_run(ablation.run_path(one, seed), [*records, evaluation(3, loss=heldout)])
    speeds = [Pace(100.0, 1.0, 1.0, 1.0), Pace(90.0, 0.9, 0.8, 0.95)]
    found = results(ablation, lambda run: INSPECTED, speeds)
    first, second = found["variants"]
    assert first["training_loss"]["mean"] == 4.5
    assert first["heldout_loss"]["mean"] == pytest.approx(3.1)
    assert first["heldout_loss"]["deviation"] == pytest.approx(0.2 / 2**0.5)
    assert second["from_reference"]["mean"] == pytest.approx(-0.195)
    assert second["from_reference"]["standard_error"] == pytest.approx(0.005)
    assert (second["from_reference"]["alone"], second["from_reference"]["together"]) == ("better", "better")
    assert found["noise"] == {"deviation": pytest.approx(0.005), "freedom": 1, "comparisons": 1}
    assert (found["seeds"], found["tokens"]) == ([1, 2], 100 * 32 * 1024)
    assert first["by_layer"]["gradient_norm"] == [1.0, None]
    assert first["by_layer"]["largest_logit"] == [4.0, 5.0]
    assert second["pace"] == {"tokens_per_second": 90.0, "ratio": 0.9, "lowest": 0.8, "highest": 0.95}
    learnt, cost, inside = (table.rows[1] for table in result_tables(found))
    assert learnt == ["qk_norm=true", "4.5000 ± 0.7071", "2.9050 ± 0.1485", "-0.1950 ± 0.0050", "better", "better"]
    assert cost[6:] == ["6,144", "90", "0.90 (0.80 to 0.95)"]
    assert inside[2:] == ["1 ?", "5.0 ± 0.0", "4 5", "0.5 2", "0% 25%"]
    assert "| qk_norm=true | 4.5000 ± 0.7071 |" in markdown(result_tables(found))
    draw_learnt(ablation, tmp_path / "learnt.png")
    draw_inside(found, tmp_path / "inside.png")
    for name in ("learnt.png", "inside.png"):
        assert imread(tmp_path / name)[..., :3].std() > 0.05, "a picture with something on it"


def test_a_real_one(tiny_recipe, tmp_path: Path, monkeypatch):
    """Two variants of one budget of FLOPs through the trainer, which did as many; documents do not see each other, in
    training and where it is looked into. Started again, nothing is trained; another question is refused."""
    tables = tiny_recipe(schedule={"max_steps": 3}, checkpoint={"every_steps": 3}, data={"packing": "concat_masked"})
    config = parse_recipe(tables)
    made = fit(product(config.model, [read_axis("attention=gqa,mla")]), "flops", "d_ff")
    ablation = Ablation(config, made, 1, "flops", tmp_path / "out")
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
    done = [float(read(ablation.run_path(one, 0)).series.flops[-1]) for one in made]
    assert done[0] == pytest.approx(ablation.tokens * flops_per_token(config.model).causal)
    wider = replace(made[1].model, d_ff=made[1].model.d_ff + 1)
    unit = flops_per_token(wider).causal - flops_per_token(made[1].model).causal
    assert abs(done[1] - done[0]) <= ablation.tokens * unit / 2, "within half a unit of d_ff"
    assert made[1].model.d_ff != config.model.d_ff
    for one in made:
        assert load_recipe(ablation.run_path(one, 0) / "recipe.toml").model == one.model
        inspected = inspect(ablation.run_path(one, 0))
        assert len(inspected.gradient_norms) == len(inspected.activity.residual_rms) == 2
        assert all(norm > 0 for norm in inspected.gradient_norms)
        assert inspected.largest_logit > 0
    monkeypatch.setattr(inspection, "evaluation_batches", ending_in_the_middle)
    path = ablation.run_path(made[0], 0)
    isolated = inspect(path)
    monkeypatch.setattr(inspection, "isolates_documents", lambda packing: False)
    assert inspect(path).gradient_norms != isolated.gradient_norms, "documents were looked at as in training"
    other = Ablation(config.model_copy(update={"seed": 5}), made, 1, "flops", tmp_path / "out")
    clash = Ablation(config.model_copy(update={"compile": not config.compile}), made, 1, "flops", tmp_path / "out")
    write_recipes(other)
    with pytest.raises(RecipeError, match="another ablation"):
        write_recipes(clash)


def ending_in_the_middle(stream, seq_len, batch_size, eos_id, *rest):
    """The held-out windows, each with the end of a document in it."""
    for inputs, targets in evaluation_batches(stream, seq_len, batch_size, eos_id, *rest):
        inputs[:, seq_len // 2] = eos_id
        yield inputs, targets


def test_paces_are_compared_within_a_round(monkeypatch):
    """A round in which all takes ten times as long changes no ratio; the fastest step of all is the rate."""
    turns = iter([pace._Turn(3 * busy, busy) for busy in (1.0, 2.0, 10.0, 25.0, 1.0, 2.0)])
    monkeypatch.setattr(pace, "_turn", lambda *_: next(turns))
    first, second = paces(recipe(), [MODEL, MODEL], torch.device("cpu"), rounds=3)
    assert (first.ratio, first.lowest, first.highest) == (1.0, 1.0, 1.0)
    assert (second.ratio, second.lowest, second.highest) == (0.5, 0.4, 0.5)
    assert (first.tokens_per_second, second.tokens_per_second) == (4 * 1024 / 3, 4 * 1024 / 6)


def test_every_row_of_a_ladder_has_a_pace_and_a_cache_as_large_as_is_said(tiny_recipe):
    config = parse_recipe(tiny_recipe(batch={"micro_batch_size": 1}, precision={"compute": "auto"}))
    models = [one.model for one in ladder(config.model)]
    assert all(one.tokens_per_second > 0 for one in paces(config, models, torch.device("cpu"), rounds=1))
    for model in models:
        cache = KVCache(model, batch_size=1, max_tokens=64, dtype=torch.bfloat16)
        assert cache.nbytes == 64 * kv_cache_bytes_per_token(model)


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
        (["--axis", "rope_base=1e4,10000"], "twice"),
        (["--axis", "ffn=relu,gelu", "--set", "batch.global_batch_size=3"], "global_batch_size"),
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_run_outlives_its_ablation(number: signal.Signals, tmp_path: Path):
    """Where `ablate` is ended its run is asked to save and stop, and so is gone a little later."""
    (tmp_path / "pretrain.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    script = (
        "import signal, sys; from pathlib import Path; from pretrain import ablate; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        "ablate.PROJECT_ROOT = Path(sys.argv[1]); ablate.start_run(Path('x'), Path(sys.argv[1]) / 'run')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=PROJECT_ROOT)
    log = tmp_path / "run.log"
    until(lambda: log.exists() and "here" in log.read_text())
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    process.wait(30)
    until(lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_failed_says_why(tmp_path: Path):
    log = tmp_path / "run.log"
    assert ablate.last_error(log) == ""
    log.write_text("step 1\nerror: runs/x is in use by another run\nstep 2\n")
    assert ablate.last_error(log) == " (runs/x is in use by another run)"


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


def test_the_ladder_of_the_paper_is_that_of_its_recipe():
    made = fit(ladder(load_recipe(root() / "docs" / "ladder.toml").model), "parameters", "d_ff")
    shown = json.loads((root() / "docs" / "ladder.json").read_bytes())["variants"]
    assert [(one.label, one.model.d_ff, parameter_count(one.model)) for one in made][: len(shown)] == [
        (row["label"], row["d_ff"], row["parameters"]) for row in shown
    ]


def test_what_a_choice_needs_comes_with_it():
    mla = variant("x", MODEL, {"attention": "mla"})
    assert mla.brought == {"mla_latent": 128, "mla_rope_dim": 32, "n_kv_heads": 8}
    assert variant("x", mla.model, {"attention": "gqa"}).brought == {"mla_latent": None, "mla_rope_dim": None}
    assert variant("x", MODEL, {"residual": "hyper"}).brought == {"n_streams": 4}
