"""Reports as a person sees them: in a real headless Chromium (`make browser`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain import compare
from pretrain.chronicle import read
from pretrain.page import render
from pretrain.report import page
from pretrain.samples import Samples
from tests.browser import Page, browser
from tests.pretrain.written_run import evaluation, train, write_run

pytestmark = pytest.mark.browser

LONG = "a source with a rather long name, " * 3
EVIL = "<script>document.title = 'evil'</script><img src=x onerror=alert(1)>"

CUT_TEXT = """(() => {
  const cut = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll('text')) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
          || box.bottom > frame.bottom + 1) cut.push(text.textContent);
    }
  }
  for (const one of document.querySelectorAll('h1, h2, h3, p, .tile *, li, figcaption, pre, th, td'))
    if (one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline') cut.push(one.textContent);
  return cut;
})()"""
OVERLAPS = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2)
        found.push([a, b]);
    }));
  }
  return found;
})()"""
SIZES = "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(box => [box.width, box.height])"
LINES = """[...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('path')].filter(path =>
  /stroke: var\\(--c[0-9]/.test(path.getAttribute('style')) && path.getBoundingClientRect().width > 5).length)"""
CONTRAST = """(() => {
  const light = colour => { const [r, g, b] = colour.match(/[0-9.]+/g).map(Number);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('svg text')].map(text => Math.abs(light(getComputedStyle(text).fill) - paper));
})()"""
CELLS = "[...document.querySelectorAll('tr')].map(row => [...row.children].map(cell => cell.innerText))"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def run(path: Path, **options: object) -> Path:
    records = [
        *(train(step, loss=None if step in (40, 41) else 2 + 6 / step) for step in range(1, 81)),
        *(evaluation(step, source) for step in (20, 40, 60) for source in ("english", "中文", EVIL, LONG, "all")),
        *(train(step, 2, tokens_per_second=1.5e6) for step in (*range(61, 100), *range(120, 140))),
        *(evaluation(139, source, 2, loss=2.5) for source in ("english", "中文", EVIL, LONG, "all")),
    ]
    return write_run(path, records, attempts=2, **options)  # type: ignore[arg-type]


def written(path: Path) -> dict[str, Path]:
    """A report and a comparison of runs with all that is special."""
    one, other, short = run(path / "one"), run(path / EVIL.replace("/", "")), write_run(path / "short", [train(1)])
    samples = Samples("step-00000139", "seed 1", [("The", " end of " + EVIL + "我们" * 300), ("x" * 400, "\n\n")])
    runs = [read(one), read(other), read(short)]
    pages = {
        "report": page(runs[0], samples), "short": page(runs[2], None),
        "compare": compare.page(runs, False, ["these runs have different tokenizers"]),
    }  # fmt: skip
    for name, made in pages.items():
        (path / f"{name}.html").write_text(render(made), encoding="utf-8")
    return {name: path / f"{name}.html" for name in pages}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return written(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("name", ["report", "short", "compare"])
@pytest.mark.parametrize("width, dark", [(1280, False), (1280, True), (760, False), (400, False)])
def test_a_page_is_whole_quiet_and_readable(
    tab: Page, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    tab.open(pages[name], width=width, dark=dark)
    assert tab.ask("document.readyState") == "complete"
    assert tab.requests() == [pages[name].resolve().as_uri()]
    assert tab.complaints() == []
    assert tab.ask("document.title") != "evil"
    assert tab.ask("document.querySelectorAll('script, img').length") == 0
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(CUT_TEXT) == []
    assert tab.ask(OVERLAPS) == []
    sizes = tab.ask(SIZES)
    assert len(sizes) >= 6
    assert all(w > 0.7 * min(width, 480) and h > 100 for w, h in sizes)
    assert min(tab.ask(CONTRAST)) > 100
    if name == "report":
        assert min(tab.ask(LINES)) >= 1
    assert len(tab.picture()) > 10_000


def test_what_is_read_is_what_the_run_wrote(tab: Page, pages: dict[str, Path]) -> None:
    tab.open(pages["report"], width=1280)
    records = [json.loads(line) for line in (pages["report"].parent / "one" / "metrics.jsonl").read_text().splitlines()]
    last = next(one for one in reversed(records) if one["kind"] == "evaluation" and one["source"] == "all")
    rows = tab.ask(CELLS)
    row = next(row for row in rows if row[:2] == ["all", "139"])
    assert row[3:6] == [f"{last['loss']:.4f}", f"{last['perplexity']:.2f}", f"{last['bits_per_byte']:.4f}"]
    tiles = dict(tab.ask("[...document.querySelectorAll('.tile')].map(t => t.innerText.split('\\n').slice(0, 2))"))
    assert tiles["step"] == "139"
    assert tiles["tokens"] == "139,000"
    shown = tab.ask("document.body.innerText")
    assert EVIL in shown
    assert "made again later (20 steps)" in shown
    assert "not finite (2)" in shown


def test_the_test_sees_what_is_wrong(tab: Page, tmp_path: Path) -> None:
    """A page that fetches, complains and cuts."""
    (tmp_path / "bad.html").write_text(
        "<script>console.error('x')</script><img src='none.png'><svg width='20' height='20'><text x='5' y='9'>a long "
        "word</text><text x='6' y='9'>another</text></svg>"
    )
    tab.open(tmp_path / "bad.html", width=400)
    assert len(tab.requests()) == 2
    assert tab.complaints()
    assert tab.ask(CUT_TEXT)
    assert tab.ask(OVERLAPS)
