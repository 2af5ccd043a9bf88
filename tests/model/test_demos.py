"""The demonstrations: each number that can be had by hand is, each picture is drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model.config import ModelConfigError
from model.demos import gallery
from model.demos.demo import NAMES, Demo, run, save_picture
from tests.command_line import run_command


@pytest.fixture(scope="module")
def demos() -> dict[str, Demo]:
    return {name: run(name) for name in NAMES}


@pytest.fixture
def numbers(demos: dict[str, Demo], request: pytest.FixtureRequest) -> Any:
    return demos[request.param].numbers


def near(value: float, digits: int = 4) -> Any:
    return pytest.approx(value, abs=0.5 * 10**-digits)


def test_every_file_is_one_of_them() -> None:
    files = {path.stem for path in Path(gallery.__file__).parent.glob("*.py")}
    assert files - {"__init__", "demo", "gallery"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_can_be_written_and_lines_read(name: str, demos: dict[str, Demo]) -> None:
    demo = demos[name]
    assert json.loads(json.dumps(demo.numbers))
    assert all(len(line) <= 130 and "nan" not in line for line in demo.lines)


@pytest.mark.parametrize("numbers", ["norm"], indirect=True)
def test_norm(numbers: Any) -> None:
    assert [numbers[key] for key in ("mean", "variance", "deviation")] == [4, 5, near(2.2361)]
    assert numbers["layer"] == near(0) or [round(x, 4) for x in numbers["layer"]] == [-1.3416, -0.4472, 0.4472, 1.3416]
    assert (numbers["rms"], numbers["pair_rms"], numbers["turns_rms"]) == (near(4.5826), near(3.5355), near(2))
    assert [round(x, 4) for x in numbers["pair_normed"]] == [0.8485, 1.1314]
    for factor, normed in numbers["scaled"].items():
        sign = math.copysign(1, float(factor))
        assert normed == pytest.approx([sign * x for x in numbers["rms_normed"]], abs=1e-5)
    assert (numbers["gains"]["1.2"], numbers["gains"]["0.8"]) == (near(8.9, 1), near(0.069, 3))
    assert list(numbers["normed_gains"].values()) == pytest.approx([1, 1, 1], abs=1e-4)


@pytest.mark.parametrize("numbers", ["rope"], indirect=True)
def test_rope(numbers: Any) -> None:
    scores = list(numbers["scores"].values())
    assert len(scores) == 6
    assert len({f"{score:.10f}" for score in scores}) == 1
    assert abs(numbers["by_distance"]["8"] - scores[0]) > 0.01
    slowest = {dim: (waves[0], waves[-1]) for dim, waves in numbers["wavelengths"].items()}
    assert slowest["64"] == (near(6.28, 2), near(47_117, 0))
    assert slowest["128"] == (near(6.28, 2), near(54_410, 0))


@pytest.mark.parametrize("numbers", ["positions"], indirect=True)
def test_positions(numbers: Any) -> None:
    found = numbers["by_distance"]
    assert max(found["none"]) - min(found["none"]) < 1e-6
    for name in ("sinusoidal", "rope"):
        assert found[name][0] == max(found[name])
        assert found[name][0] > 2 * found[name][32]


@pytest.mark.parametrize("numbers", ["gradient_flow"], indirect=True)
def test_gradient_flow(numbers: Any) -> None:
    """Xiong et al. 2020: in Post-LN the last layers get much more than the first; in Pre-LN hardly."""
    ratios = numbers["last_over_first"]
    assert ratios["post"] > 2 * ratios["pre"]
    assert all(0 < norm < 1e3 for norms in numbers["norms"].values() for norm in norms)


@pytest.mark.parametrize("numbers", ["residual_init"], indirect=True)
def test_residual_init(numbers: Any) -> None:
    ends = {int(depth): (found["scaled"][-1], found["unscaled"][-1]) for depth, found in numbers.items()}
    assert max(scaled for scaled, _ in ends.values()) < 2 * min(scaled for scaled, _ in ends.values())
    assert ends[96][1] > 5 * ends[6][1]
    assert all(unscaled > 2 * scaled for scaled, unscaled in ends.values())


@pytest.mark.parametrize("numbers", ["kv_cache"], indirect=True)
def test_kv_cache(numbers: Any) -> None:
    mib = 2**20
    assert [size / mib for size in numbers["wide"].values()] == [64, 16, 8, 2]
    assert [size / mib for size in numbers["narrow"].values()] == [8, 4, 2, 0.75, 0.625]
    assert numbers["0.5b"] == 36_864 * 2048
    assert numbers["0.5b multi-head"] == 3 * numbers["0.5b"]


@pytest.mark.parametrize("numbers", ["qk_norm"], indirect=True)
def test_qk_norm(numbers: Any) -> None:
    first, last = numbers["rows"][0], numbers["rows"][-1]
    assert last["plain"] == pytest.approx(32 * first["plain"], rel=1e-4)
    assert last["normed"] == pytest.approx(first["normed"], rel=1e-4)
    assert all(row["normed"] <= numbers["bound"] == 8 for row in numbers["rows"])
    assert last["plain_entropy"] < 0.5 < 4 < last["normed_entropy"]


@pytest.mark.parametrize("numbers", ["activations"], indirect=True)
def test_activations(numbers: Any) -> None:
    assert numbers["silu_slope_error"] < 1e-12
    assert numbers["lowest"]["silu"] == (near(-1.278, 3), near(-0.2785))
    at = numbers["x"].index(1.0)
    assert numbers["silu"]["value"][at] == near(0.7311)
    assert numbers["gelu"]["value"][at] == pytest.approx(0.8413, abs=5e-4)
    assert numbers["relu"]["slope"][: numbers["x"].index(0.0)] == [0, 0, 0]


@pytest.mark.parametrize("numbers", ["gate"], indirect=True)
def test_gate(numbers: Any) -> None:
    assert numbers["gate"] == [1, -2]
    assert numbers["silu"] == pytest.approx([0.7311, -0.2384], abs=1e-4)
    assert numbers["out"] == pytest.approx([3 * 0.731059, 0.238406], abs=1e-4)
    assert (numbers["relu_parameters"], numbers["swiglu_parameters"]) == (2_099_712, 2_359_296)
    assert numbers["d_ff"] == {"512": 1536, "1536": 4096}


@pytest.mark.parametrize("numbers", ["softmax_scale"], indirect=True)
def test_softmax_scale(numbers: Any) -> None:
    for row in numbers["rows"]:
        assert row["variance"] == pytest.approx(row["head_dim"], rel=0.1)
        assert row["scaled_variance"] == pytest.approx(1, rel=0.1)
        assert row["plain_largest"] > 2 * row["scaled_largest"]
    first, last = numbers["rows"][0], numbers["rows"][-1]
    assert last["plain_gradient"] < 1e-3 * first["plain_gradient"]
    assert last["scaled_gradient"] == pytest.approx(first["scaled_gradient"], rel=0.3)


@pytest.mark.parametrize("numbers", ["tying"], indirect=True)
def test_tying(numbers: Any) -> None:
    saved = {name: found["saved"] for name, found in numbers["counts"].items()}
    assert saved == {"mini": 2_097_152, "0.5b": 49_152_000}
    assert numbers["counts"]["0.5b"]["tied"] == 502_193_664
    assert numbers["gradient_error"] < 1e-9


@pytest.mark.parametrize("numbers", ["loss"], indirect=True)
def test_loss(numbers: Any) -> None:
    assert numbers["uniform"] == near(10.3735)
    assert numbers["equal_logits"] == near(10.3735)
    assert numbers["expected_0.5b"] == near(10.681, 3)
    assert numbers["initial"] == pytest.approx(numbers["expected"], abs=0.15)
    assert numbers["unshifted"] < numbers["uniform"] - 0.3


def test_pictures_are_for_a_slide(demos: dict[str, Demo], tmp_path: Path) -> None:
    for name in ("rope", "kv_cache"):
        save_picture(demos[name], tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.size == (1600, 900)


@pytest.mark.soak
def test_the_gallery_shows_all(tmp_path: Path) -> None:
    page = gallery.write(tmp_path / "gallery").read_text(encoding="utf-8")
    for name in NAMES:
        assert (tmp_path / "gallery" / f"{name}.png").stat().st_size > 10_000
        assert f'src="{name}.png"' in page


def test_an_unknown_one_names_the_nearest() -> None:
    with pytest.raises(ModelConfigError, match='did you mean "rope"'):
        run("rop")


def test_the_verb(tmp_path: Path) -> None:
    done = run_command("model", "demo", "gate", "--json")
    assert json.loads(done.stdout)["relu_parameters"] == 2_099_712
    for arguments, words in (
        (("demo",), "takes a NAME"),
        (("demo", "gate", "--all"), "takes a NAME"),
        (("demo", "gate", "--plot", tmp_path / "x.txt"), "must end in .png"),
        (("demo", "gate", "--plot", tmp_path / "no" / "x.png"), "there is no folder"),
    ):
        done = run_command("model", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert words in done.stderr
