from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tokenizer.fastbpe.models import CONTROLS, ranked, write_model
from tokenizer.fastbpe import encoder
from tokenizer.fastbpe.build import HEADERS, UNITS, build_id
from tokenizer.fastbpe.encoder import FastBPE, Unsupported
from tokenizer.model_file import ModelFile

FOLDER = Path(encoder.__file__).parent
MODEL = ModelFile.parse(write_model(CONTROLS + ranked(["a"]), byte_fallback=False, dummy_prefix=False))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources and the built core, from which FastBPE loads during the test."""
    copy = tmp_path / "fastbpe"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(encoder, "_FOLDER", copy)
    encoder._core.cache_clear()
    yield copy
    encoder._core.cache_clear()


def reason() -> str:
    with pytest.raises(Unsupported) as caught:
        FastBPE.build(MODEL)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_sources_are_named() -> None:
    assert sorted(UNITS) == sorted(path.name for path in FOLDER.glob("*.cpp"))
    assert sorted(HEADERS) == sorted(path.name for path in FOLDER.glob("*.h"))


def test_the_core_loads_from_where_it_is_built(folder: Path) -> None:
    assert FastBPE.build(MODEL).encode([b"aa"])[0].tolist() == [3, 3]


@pytest.mark.parametrize("name", ["core.cpp", "cache.h"])
def test_a_build_of_other_sources_is_refused(folder: Path, name: str) -> None:
    with (folder / name).open("a") as file:
        file.write("// changed\n")
    assert "older than its sources; run `pip install -e .` again" in reason()


def test_moving_text_between_files_is_a_change(folder: Path) -> None:
    before = build_id(folder)
    first, second = (folder / name for name in UNITS)
    first.write_text(first.read_text() + second.read_text()[:1])
    second.write_text(second.read_text()[1:])
    assert build_id(folder) != before


def test_a_source_that_is_missing_is_a_reason(folder: Path) -> None:
    (folder / "core.h").unlink()
    assert "can't be loaded" in reason()


def test_no_core_is_a_reason(folder: Path) -> None:
    for path in folder.glob("_core*"):
        path.unlink()
    assert "isn't built" in reason()


@pytest.mark.parametrize("damage", ["empty", "text", "library"])
def test_something_else_in_its_place_is_a_reason(folder: Path, damage: str) -> None:
    (path,) = folder.glob("_core*")
    if damage == "library":  # one that loads and has none of the functions
        import _ctypes

        path.write_bytes(Path(_ctypes.__file__).read_bytes())
    else:
        path.write_bytes({"empty": b"", "text": b"not a library"}[damage])
    assert "can't be loaded" in reason()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other library formats")
@pytest.mark.parametrize("share", [0, 0.5, 0.97, 1])
def test_a_core_cut_short_is_a_reason_before_it_is_loaded(folder: Path, share: float) -> None:
    """Mapping it and reading what isn't there would end the process."""
    (path,) = folder.glob("_core*")
    content = path.read_bytes()
    path.write_bytes(content[: min(max(int(len(content) * share), 63), len(content) - 1)])
    assert "cut short; run `pip install -e .` again" in reason()


def test_the_structures_are_those_of_the_header() -> None:
    """Sizes as the compiler lays them out on 64-bit machines."""
    assert ctypes.sizeof(encoder._Vocabulary) == 48
    assert ctypes.sizeof(encoder._Counts) == 40
