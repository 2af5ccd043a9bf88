"""Drawings that stand in a page: nothing of the data is lost, nothing is hidden, nothing is fetched."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from pretrain.plots import Curve, plot, smooth, thin


def test_thinning_keeps_every_extreme_both_ends_and_where_it_is_broken() -> None:
    rng = np.random.default_rng(1)
    x = np.arange(100_000.0)
    y = rng.normal(size=len(x))
    spikes, holes = rng.choice(np.arange(1, len(x) - 1), (2, 20), replace=False)
    y[spikes] += 100 * np.sign(y[spikes])
    y[holes] = np.nan
    kept = thin(x, y)
    assert len(kept) <= 3000
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(x) - 1)
    columns = (x / x[-1] * 600).astype(int)
    for column in range(600):
        within, shown = np.flatnonzero(columns == column), kept[columns[kept] == column]
        assert np.nanmax(y[within]) == np.nanmax(y[shown])
        assert np.nanmin(y[within]) == np.nanmin(y[shown])
        assert np.isnan(y[within]).any() == np.isnan(y[shown]).any()


@pytest.mark.parametrize("count", [0, 1, 2, 3000])
def test_few_points_all_stay(count: int) -> None:
    x = np.zeros(count)  # as FLOPs are that nobody counted
    assert thin(x, x).tolist() == list(range(count))


def test_a_mean_counts_finite_numbers_around_each_and_fills_no_hole() -> None:
    y = np.array([1.0, 3.0, np.nan, 5.0, 9.0])
    assert smooth(y, 3)[[0, 1, 3, 4]].tolist() == [2.0, 2.0, 7.0, 7.0]
    assert np.isnan(smooth(y, 3)[2])
    assert smooth(y, 1)[[0, 4]].tolist() == [1.0, 9.0]


def test_numbers_that_are_not_finite_are_crosses_and_are_counted() -> None:
    x = np.arange(10.0)
    y = np.where(x == 4, np.nan, np.where(x == 5, np.inf, x))
    made = plot("t", [Curve("loss", x, y, 0)], x_label="step", y_label="loss")
    assert [(one.label, one.look) for one in made.legend] == [("loss", "line"), ("not finite (2)", "cross")]
    assert made.svg.count("var(--bad)") >= 2


def test_a_line_is_interrupted_where_steps_are_missing() -> None:
    x = np.array([1.0, 2.0, 7.0, 8.0])
    whole, broken = (
        plot("t", [Curve("", x, x, 0, breaks=breaks)], x_label="step", y_label="y").svg
        for breaks in (None, np.array([False, False, True, False]))
    )
    lines = [
        re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--c0\); stroke-width: 1.7', svg) for svg in (whole, broken)
    ]
    assert [line[0].count("M") for line in lines] == [1, 2]


@pytest.mark.parametrize("y", [[], [1.0], [np.nan], [0.0, 0.0], [np.nan, 1.0, np.nan], [-1.0, 1e300]])
@pytest.mark.parametrize("log_y", [False, True])
def test_whatever_is_there_is_drawn(y: list[float], log_y: bool) -> None:
    curve = Curve("loss", np.arange(float(len(y))), np.array(y, dtype=float), 0)
    ET.fromstring(plot("t", [curve], x_label="step", y_label="loss", log_y=log_y).svg)


def test_labels_are_text_whatever_they_hold() -> None:
    name = '<script>alert("$\\alpha_")</script> _x & 中文'
    made = plot(name, [Curve(name, np.arange(3.0), np.arange(3.0), 0)], x_label=name, y_label="y")
    assert "<script" not in made.svg
    assert name in [text.text for text in ET.fromstring(made.svg).iter("text")]
    assert ET.fromstring(made.svg).get("aria-label") == name


def test_two_drawings_in_a_page_share_no_name_and_know_no_address() -> None:
    curve = Curve("a", np.arange(3.0), np.arange(3.0), 0)
    svgs = [plot("t", [curve], x_label="x", y_label="y").svg for _ in range(2)]
    names = [set(re.findall(r'\sid="([^"]*)"', svg)) for svg in svgs]
    assert names[0]
    assert not names[0] & names[1]
    for svg, own in zip(svgs, names, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]*)', svg)) <= own
        assert "http" not in svg
        assert not re.search(r"#[0-9a-f]{6}", svg.replace("#ffffff", ""))  # no colour but the page's
