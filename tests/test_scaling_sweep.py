"""The sweep of benchmarks/scaling_sweep.py: a real run of it, what it makes of scores, and that its paper says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scaling_sweep as sweep
from benchmarks.scaling_sweep import SIZES, TOKENS, TUNING_TOKENS, Score, Trial
from pretrain.scaling_law import CONSTANTS, ScalingLaw, read_law
from tests.conftest import VOCAB_SIZE

DOCS = Path(__file__).resolve().parents[1] / "docs"
LAW = ScalingLaw("made", "", 1.0, 40.0, 60.0, 0.3, 0.25)


def made_loss(trial: Trial) -> float:
    """A law's, and worse at every rate but one; another seed's a little off."""
    worse = 1.0 if trial.peak_lr == sweep.RATES[1] else 1.1
    return LAW.loss(trial.parameters, trial.tokens) * worse * (1 + 1e-4 * (trial.seed - 1))


def test_a_trial_is_a_real_run_and_done_once(
    collection: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "VOCAB_SIZE", VOCAB_SIZE)
    monkeypatch.setattr(sweep, "EVALUATION_TOKENS", 512)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "data").symlink_to(collection)
    (tmp_path / "tokenizer").symlink_to(tokenizer)
    trial, recipe = Trial(32, 1, 2 * sweep.BATCH * sweep.SEQ_LEN, 2e-3, seed=3), sweep.write_recipe(tmp_path)
    done = sweep.run(trial, recipe, tmp_path)
    assert (done["step"], done["source"]) == (2, "all")
    ran = (tmp_path / "runs" / trial.name / "recipe.toml").read_text(encoding="utf-8")
    for line in ("seed = 3", "d_model = 32", "peak_lr = 0.002", "min_lr = 0.0002", "max_steps = 2"):
        assert f"\n{line}\n" in f"\n{ran}"
    recipe.unlink()  # a second run would need it
    assert sweep.run(trial, recipe, tmp_path) == done


def test_each_size_goes_on_with_its_best_rate() -> None:
    scores = sweep.sweep(made_loss)
    assert len({score.trial for score in scores}) == len(scores)
    chosen = sweep.best_of_each(scores)
    assert len(chosen) == len(SIZES) * len(TOKENS)
    assert {score.trial.peak_lr for score in chosen} == {sweep.RATES[1]}
    assert {score.trial.seed for score in chosen} == {1}
    tried = [score.trial for score in scores if score.trial.peak_lr != sweep.RATES[1]]
    assert {trial.tokens for trial in tried} == {TUNING_TOKENS}


def test_what_made_the_scores_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "BOOTSTRAPS", 10)
    judged = sweep.judge(sweep.sweep(made_loss))
    for name in CONSTANTS:
        assert judged["law"][name] == pytest.approx(getattr(LAW, name), rel=1e-3)
    assert judged["largest_residual"] < 1e-5
    assert len(judged["seeds_apart"]["losses"]) == 3
    assert judged["seeds_apart"]["standard_deviation"] > 0
    for one in judged["without_the_largest"]:
        assert one["forecast"] == pytest.approx(one["loss"], rel=1e-3)
    (tmp_path / "law.json").write_text(json.dumps(judged), encoding="utf-8")
    assert read_law(tmp_path / "law.json") == sweep.law_of(judged)
    sweep.plot(judged, tmp_path / "law.png")
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")


def test_losses_that_no_law_made_are_far_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "BOOTSTRAPS", 2)
    scores = sweep.sweep(made_loss)
    wild = [Score(one.trial, one.loss * (1.2 if one.trial.tokens == TOKENS[-1] else 1.0)) for one in scores]
    assert sweep.judge(wild)["largest_residual"] > 0.02


# ---------------------------------------------------------------- the paper


def test_the_paper_has_the_figures_of_the_sweep() -> None:
    judged = json.loads((DOCS / "scaling.json").read_text(encoding="utf-8"))
    paper = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert sweep.to_text(judged) in paper
    assert {(one["d_model"], one["n_layers"]) for one in judged["points"]} == set(SIZES)
    assert {one["tokens"] for one in judged["points"]} == set(TOKENS)
    for one in judged["without_the_largest"]:
        assert f"| {one['tokens']:,} | {one['loss']:.3f} | {one['forecast']:.3f} |" in paper
    assert f"{judged['seeds_apart']['standard_deviation']:.3f}" in paper
    assert f"{judged['largest_residual']:.1%}" in paper


def test_the_law_of_the_paper_is_that_of_its_points() -> None:
    judged = json.loads((DOCS / "scaling.json").read_text(encoding="utf-8"))
    scores = [Score(Trial(**{key: one[key] for key in Trial.__dataclass_fields__}), one["loss"])
              for one in judged["trials"]]  # fmt: skip
    points = [sweep.point(score) for score in sweep.best_of_each(scores)]
    law, again = sweep.law_of(judged), sweep.fit(points, "", "").law
    for parameters in (10**5, 10**6):
        assert again.loss(parameters, 2**19) == pytest.approx(law.loss(parameters, 2**19), rel=1e-4)
