from __future__ import annotations

import struct
import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.tokenizer.test_report import toy
from tokenizer.codec import TokenizerError
from tokenizer.plot import check_plot_path, draw


def draw_figure(monkeypatch: pytest.MonkeyPatch, path: Path, *names: str) -> Figure:
    """The figure that `draw` saved, sources of these names in it."""
    saved: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (saved.append(figure), save(figure, *a, **k)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as for a glyph that the font lacks
        draw([toy("ab a道" * (place + 1), name=name) for place, name in enumerate(names)], path)
    (figure,) = saved
    return figure


def test_a_picture_is_written_alone_and_of_some_size(tmp_path: Path) -> None:
    draw([toy("ab a", name="one"), toy("道", name="two")], tmp_path / "report.png")
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]
    content = (tmp_path / "report.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1200
    assert height >= 600


def test_bars_are_as_high_as_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = draw_figure(monkeypatch, tmp_path / "report.png", "one", "two").axes
    # "ab a道" is 7 bytes in 4 tokens, however often it is repeated, and as a whole
    assert [bar.get_height() for bar in left.patches] == [7 / 4] * 3
    assert [label.get_text() for label in left.get_xticklabels()] == ["one", "two", "all"]
    assert left.get_ylabel() == "UTF-8 bytes per token"
    curve = right.lines[0].get_ydata()
    assert list(curve) == [1 / 4] * 4  # ab, space, a, 道: a quarter each
    assert right.get_xlabel().startswith("tokens, most frequent first")
    assert right.get_ylabel() == "share of all tokens"


def test_one_source_has_no_bar_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, _ = draw_figure(monkeypatch, tmp_path / "report.png", "one").axes
    assert len(left.patches) == 1


@pytest.mark.parametrize("name", ["中文語料", "$\\bad{$ and \\", "x" * 200, "emoji 😀", ""])
def test_any_name_can_be_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, _ = draw_figure(monkeypatch, tmp_path / "report.png", name).axes
    (label,) = (label.get_text() for label in left.get_xticklabels())
    assert label.isascii()
    assert len(label) <= 60


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_formats_follow_the_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"report{suffix}"
    check_plot_path(path)
    draw([toy("ab")], path)
    assert path.stat().st_size > 1000


def test_an_empty_source_is_drawn_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (saved.append(figure), Path(path).touch()))
    draw([toy("ab", name="one"), toy(name="none")], tmp_path / "report.png")
    assert [bar.get_height() for bar in saved[0].axes[0].patches] == [2.0, 0.0, 2.0]


def test_places_where_no_picture_can_stand_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for path, message in (
        (tmp_path / "report.gif", r"\.png"),
        (tmp_path / "report", r"\.png"),
        (tmp_path / "folder.png", "is a folder"),
        (tmp_path / "absent" / "report.png", "cannot write into"),
    ):
        with pytest.raises(TokenizerError, match=message):
            check_plot_path(path)


def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(TokenizerError, match="cannot write into"):
        check_plot_path(tmp_path / "report.png")
