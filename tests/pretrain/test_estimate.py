"""pretrain estimate: its sums by hand, its refusals in one line."""

from __future__ import annotations

import json
import sys
import warnings

import pytest

from model.accounting import flops_per_token
from pretrain import __main__ as command_line
from pretrain.config import PROJECT_ROOT, RecipeError, load_recipe, parse_recipe, to_toml
from pretrain.device_peaks import PEAKS
from pretrain.estimate import Devices, estimate
from pretrain.scaling_law import BESIROGLU, HOFFMANN
from tests.pretrain.recipe import recipe

RECIPES = PROJECT_ROOT / "pretrain" / "recipes"
HALF_B = str(RECIPES / "0.5b.toml")
MINI = str(RECIPES / "mini.toml")


@pytest.fixture
def command(capsys, monkeypatch):
    """`python -m pretrain estimate ARGUMENTS` in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command sets its own
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pretrain", "estimate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


# ---------------------------------------------------------------- sums


def test_the_reference_recipe_by_hand():
    figures = estimate(load_recipe(HALF_B)).to_dict()
    tokens = 20_000 * 524_288
    assert figures["parameters"] == 502_193_664
    assert figures["parameters_without_embeddings"] == 502_193_664 - 32_000 * 1536  # tied: once
    assert figures["tokens"] == tokens
    assert figures["tokens_per_parameter"] == pytest.approx(20.88, abs=5e-3)
    assert figures["flops_6nd"] == 6 * 502_193_664 * tokens
    matrices = 18 * (6_291_456 + 18_874_368) + 49_152_000  # of all blocks, and of the output
    attention = 12 * 18 * 12 * 128 * 2049 // 2
    assert figures["flops"] == (6 * matrices + attention) * tokens
    assert figures["optimal_tokens_at_20"] == 20 * 502_193_664
    assert figures["days"] is None
    assert figures["devices"] is None


def test_an_untied_output_is_no_part_of_the_smaller_count():
    tied, untied = (estimate(recipe(model={"preset": "mini", "tied": tied})) for tied in (True, False))
    assert untied.parameters - tied.parameters == 4096 * 512
    assert untied.without_embeddings == tied.without_embeddings


def test_days_by_hand():
    config = load_recipe(HALF_B)
    made = estimate(config, Devices.asked(8, "a100", None, 0.5, "bf16"))
    tokens = 20_000 * 524_288
    assert made.days == pytest.approx(flops_per_token(config.model).causal * tokens / (8 * 312e12 * 0.5) / 86_400)
    assert made.days == pytest.approx(0.326, abs=1e-3)
    twice = estimate(config, Devices.asked(16, None, 312.0, 0.5, "bf16"))
    assert twice.days == pytest.approx(made.days / 2)


def test_a_batch_ramp_counts_what_it_reads():
    plain, ramped = (
        estimate(recipe(batch={"global_batch_size": 32, "micro_batch_size": 4, "ramp": ramp}))
        for ramp in ([], [{"until_samples": 160, "global_batch_size": 16}])
    )
    assert plain.tokens == 100 * 32 * 1024
    assert ramped.tokens == (10 * 16 + 90 * 32) * 1024


def test_laws_of_the_recipe():
    made = estimate(load_recipe(MINI))
    for law, found in zip((BESIROGLU, HOFFMANN), made.to_dict()["laws"], strict=True):
        assert found["expected_loss"] == pytest.approx(law.loss(35_926_528, 720_896_000))
        assert found["expected_loss"] == pytest.approx(found["E"] + found["of_size"] + found["of_data"])
        best = found["optimum_at_these_flops"]
        assert 6 * best["parameters"] * best["tokens"] == pytest.approx(made.flops_6nd)
        assert best["loss"] <= found["expected_loss"]
        assert found["outside"] == [
            "1.9 times fewer parameters than its smallest, 7e+07",
            "6.9 times fewer tokens than its smallest, 5e+09",
        ]
    assert estimate(load_recipe(HALF_B)).to_dict()["laws"][0]["outside"] == []


def test_a_law_that_expects_less_than_chance_is_told():
    """0.6 tokens a parameter of a model of 1.6 M: 18.6 nats, of 8.3 that a uniform guess has."""
    found = estimate(load_recipe(str(RECIPES / "demo.toml"))).to_dict()["laws"][0]
    assert found["expected_loss"] > 8.318
    assert found["outside"][-1] == "worse than knowing nothing, ln(vocab_size) = 8.32: it says nothing here"


def test_peaks_are_dense():
    """The figures with sparsity that datasheets print first: 624 for A100, 1,979 for H100 and H200."""
    assert PEAKS["a100"].flops == 624e12 / 2
    assert PEAKS["h100"].flops == PEAKS["h200"].flops == 1979e12 / 2
    assert all("sparsity, halved" in peak.source for name, peak in PEAKS.items() if name in ("h100", "h200", "l4"))


# ---------------------------------------------------------------- the command


def test_what_is_printed_names_formulas_and_sources(command):
    code, out, err = command(HALF_B, "--devices", 8, "--device", "h100", "--mfu", "0.4")
    assert (code, err) == (0, "")
    for words in (
        "N = 502,193,664: all of them, embeddings included",
        "453,041,664 without embeddings",
        "D = 10,485,760,000: 20.9 per parameter",
        "by matrices and causal attention",
        "by 6·N·D",
        "days              0.1285 = 3.08 hours on 8 × h100",
        "days = causal FLOPs / (devices · peak FLOP/s · MFU · 86,400)",
        "989.5 TFLOP/s dense (NVIDIA H100 datasheet",
        "arXiv 2203.15556",
        "arXiv 2404.10102",
        "E 1.8172, A 482.01, B 2085.43, alpha 0.3478, beta 0.3658",
        "E 1.69, A 406.4, B 410.7, alpha 0.34, beta 0.28",
        "for yours they do not",
    ):
        assert words in out, words
    assert max(map(len, out.splitlines())) <= 130


def test_json_is_the_same(command):
    code, out, _ = command(MINI, "--json", "--set", "schedule.max_steps=500")
    assert code == 0
    assert json.loads(out) == estimate(load_recipe(MINI, ["schedule.max_steps=500"])).to_dict()


def test_a_law_of_ones_own_comes_first(command, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"E": 1, "A": 10, "B": 20, "alpha": 0.5, "beta": 0.5, "name": "mine"}', encoding="utf-8")
    code, out, _ = command(MINI, "--fit", path, "--json")
    assert code == 0
    laws = json.loads(out)["laws"]
    assert [law["name"] for law in laws] == ["mine", "Besiroglu et al.", "Hoffmann et al."]
    assert laws[0]["expected_loss"] == pytest.approx(1 + 10 / 35_926_528**0.5 + 20 / 720_896_000**0.5)
    assert laws[0]["optimal_tokens"] == pytest.approx(4 * 35_926_528)  # (20 / 10)² · N


def test_ranks_that_do_not_divide_the_batch_are_told(command):
    code, out, _ = command(MINI, "--devices", 7, "--device", "a100")
    assert code == 0
    assert "note: as it is, the recipe does not start on them:" in out
    assert "note:" not in command(MINI, "--devices", 8, "--device", "a100")[1]


def test_data_that_is_opened_adds_epochs(command, tiny_recipe, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(parse_recipe(tiny_recipe())), encoding="utf-8")
    code, out, err = command(path, "--check-data", "--json")
    assert (code, err) == (0, "")
    epochs = json.loads(out)["reading"]["epochs"]
    assert epochs.keys() == {"code", "english"}
    assert all(count > 0 for count in epochs.values())
    assert "\nepochs in " in command(path, "--check-data")[1]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--devices", "0", "--device", "a100"], "--devices 0: must be at least 1"),
        (["--devices", "8"], "--devices 8 of which kind? Add --device a10|a100"),
        (["--device", "h1000"], "--device 'h1000': known are a10, a100"),
        (["--device", "a100", "--peak-tflops", "300"], "give one of them"),
        (["--peak-tflops", "nan"], "--peak-tflops nan"),
        (["--peak-tflops", "-1"], "--peak-tflops -1"),
        (["--device", "a100", "--mfu", "40"], "--mfu 40: a share of the peak"),
        (["--mfu", "nan"], "--mfu nan"),
        (["--device", "a100", "--set", "precision.compute=fp32"], "give --peak-tflops X"),
        (["--fit", "nowhere.json"], "nowhere.json: there is no such file"),
        (["--fit", str(RECIPES)], "recipes"),
        (["--check-data"], "data/mini"),
        (["--set", "schedule.max_step=3"], "did you mean schedule.max_steps?"),
    ],
)
def test_bad_input_is_one_line(command, arguments, says):
    code, out, err = command(MINI, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_devices_without_a_peak_are_refused_before_anything_else():
    with pytest.raises(RecipeError, match="of which kind"):
        Devices.asked(2, None, None, 0.4, "bf16")
    assert Devices.asked(1, None, None, 0.4, "fp32") is None
