"""`pretrain report` and `pretrain compare` as a person runs them, on runs as a trainer leaves them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pretrain.chronicle import read
from pretrain.config import parse_recipe
from pretrain.page import render
from pretrain.report import page
from pretrain.runtime import Ranks
from pretrain.samples import PROMPTS, Samples, samples
from pretrain.train import train as train_run
from tests.command_line import run_command
from tests.pretrain.written_run import evaluation, train, write_run
from tests.ranks import run_ranks

EVIL = "<script>alert(1)</script>&\"'"
ADDRESSES = {"src", "href", "srcset", "action", "data", "poster", "background"}


class Checked(HTMLParser):
    """A page's text and tables; fails at what runs a script, fetches something or is not closed."""

    VOID = ("meta", "br", "path", "use")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "object", "embed", "link", "img", "base", "form")
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ADDRESSES or (value or "").startswith("#"), (tag, name, value)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert not self.open or self.open[-1] != "style" or not re.search(r"url\(|@import", data)
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def pretrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return run_command("pretrain", *arguments, environment=environment)


def train_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> str:
    return train_run(parse_recipe(tables), path, ranks)


@pytest.fixture(scope="module")
def real_run(tiny_recipe: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, evaluated at each second, saved at each third; then two steps more."""
    path = tmp_path_factory.mktemp("report") / "run"
    for steps in (6, 8):
        tables = tiny_recipe(
            schedule={"max_steps": steps},
            evaluation={"every_steps": 2, "max_tokens": 128},
            checkpoint={"every_steps": 3},
        )
        assert run_ranks(1, train_case, tables, path) == ["finished"]
    return path


# ---------------------------------------------------------------- a real run


def test_a_real_run_is_reported_with_the_numbers_it_wrote(real_run: Path) -> None:
    done = pretrain("report", real_run, "--prompt", "The", "--json", "--sample", "best")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    records = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in records if one["kind"] == "train"]
    assert [one["step"] for one in steps] == list(range(1, 9))
    assert (told["state"], told["step"], told["tokens"]) == ("finished", 8, steps[-1]["tokens"])
    assert (told["loss"], told["final_loss"]) == (steps[-1]["loss"], pytest.approx(sum(s["loss"] for s in steps) / 8))
    assert told["training_seconds"] == pytest.approx(sum(one["step_seconds"] for one in steps))
    assert told["flops"] == pytest.approx(
        sum(one["model_flops_per_second"] * one["step_seconds"] for one in steps), rel=1e-6
    )
    last = [one for one in records if one["kind"] == "evaluation" and one["step"] == 8]
    assert {one["source"] for one in last} == set(told["heldout"]) == {"all", "code", "english"}
    assert [told["heldout"][one["source"]]["last"] for one in last] == last
    assert [one["first_step"] for one in told["attempts"]] == [1, 7]
    assert told["memory"]["device"] == "cpu"
    assert told["memory"]["measured_bytes"] == steps[-1]["peak_memory_bytes"]
    ((prompt, text),) = told["samples"]["texts"]
    assert (prompt, bool(text)) == ("The", True)
    shown = Checked((real_run / "report.html").read_text(encoding="utf-8"))
    row = next(row for row in shown.rows if row[:2] == ["all", "8"])
    of_all = told["heldout"]["all"]["last"]
    assert row[2:4] == [f"{of_all['tokens']:,}", f"{of_all['loss']:.4f}"]
    assert text.strip() in "".join(shown.text)


def test_samples_are_the_same_each_time_and_others_with_another_seed(real_run: Path) -> None:
    texts = [samples(real_run, "newest", PROMPTS, seed, "cpu").texts for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert [prompt for prompt, _ in texts[0]] == list(PROMPTS)


def test_a_run_that_cannot_write_gets_its_page_all_the_same_unless_prompts_were_given(
    real_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(real_run, run, ignore=shutil.ignore_patterns("step-*"))
    done = pretrain("report", run)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("warning: no samples: ")
    done = pretrain("report", run, "--prompt", "The")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# ---------------------------------------------------------------- runs of all kinds


def test_all_text_is_text(tmp_path: Path) -> None:
    records = [train(1), train(2), evaluation(2), evaluation(2, EVIL)]
    path = write_run(tmp_path / "<b>run", records, facts={"git_commit": EVIL, "versions": {EVIL: EVIL}})
    html = render(page(read(path), Samples(EVIL, EVIL, [(EVIL, EVIL)])))
    assert "<script" not in html
    assert "".join(Checked(html).text).count(EVIL) > 8


def test_runs_of_all_kinds_have_a_page_that_says_what_is_special(tmp_path: Path) -> None:
    old = {name: value for name, value in train(1).items() if name != "peak_memory_bytes"}
    larger = {"name": "global_batch_size", "from": 8, "to": 16}
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
        "one-step": ([train(1)], {}, "nothing has been evaluated yet"),
        "running": ([train(1), train(2)], {"state": "running"}, "no rank gives a sign of life"),
        "diverged": ([train(1), train(2, loss=None, grad_norm=None)], {"state": "failed"}, "loss of 1 step is not"),
        "all-bad": ([train(1, loss=None, grad_norm=None)], {"state": "failed"}, "not finite"),
        "cut": ([train(1), train(2)], {"end": b'{"kind": "train", "st'}, "finished"),
        "damaged": ([train(1), train(2)], {"end": b"\xff\n"}, "1 damaged line of metrics.jsonl"),
        "gap": ([train(1), train(2), train(9)], {}, "records of steps are missing in 1 place"),
        "branch": ([train(101), train(102)], {}, "the records begin with step 101"),
        "old": ([old], {"facts": {"versions": None}}, "step"),
        "resumed": (
            [train(1), train(2), train(3), train(2, 2), train(3, 3), train(4, 3)],
            {"attempts": 3, "facts": {"recipe_changes": ["schedule.max_steps = 7"]}},
            "schedule.max_steps = 7",
        ),
        "changed": (
            [
                train(1), train(2),
                {"kind": "change", "step": 2, "attempt": 2, "changed": [larger]},
                train(3, 2, tokens=4000, tokens_per_second=4000.0),
            ],
            {"attempts": 2},
            "global_batch_size: 8 → 16",
        ),
    }  # fmt: skip
    for name, (records, options, words) in cases.items():
        shown = Checked(render(page(read(write_run(tmp_path / name, records, **options)), None)))
        assert words in "".join(shown.text), name
    assert "Tokens learnt from in a step" in "".join(shown.text)


def test_a_long_run_is_a_small_page_soon(tmp_path: Path) -> None:
    records = (train(step, loss=100.0 if step == 54_321 else 2.0) for step in range(1, 100_001))
    path = write_run(tmp_path / "run", records)
    started = time.process_time()
    html = render(page(read(path), None))
    assert len(html) < 3_000_000
    assert time.process_time() - started < 60  # some 4 s on a quiet machine
    Checked(html)


def test_bad_input_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    run, other = (write_run(tmp_path / name, [train(1)]) for name in ("run", "other"))
    empty = write_run(tmp_path / "empty", [])
    for arguments, words in (
        (("report", tmp_path), "no recipe.toml"),
        (("report", tmp_path / "nowhere"), "no such folder"),
        (("report", empty), "no step yet"),
        (("report", run, "--no-samples", "--prompt", "x"), "--no-samples"),
        (("report", run, "--no-samples", "--html", tmp_path / "no" / "page.html"), "folder that is there"),
        (("compare", run), "1 run to compare"),
        (("compare", run, empty), "no step yet"),
        (("compare", run, other, "--html", tmp_path), "folder that is there"),
    ):
        done = pretrain(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert words in done.stderr
    assert not list(tmp_path.rglob("*.html"))


# ---------------------------------------------------------------- compare


def test_runs_are_compared_by_what_differs_alone(real_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(real_run, other)
    recipe = (other / "recipe.toml").read_text()
    (other / "recipe.toml").write_text(recipe.replace("beta1 = 0.9\n", "beta1 = 0.8\n"))
    done = pretrain("compare", real_run, other, "--json", "--html", tmp_path / "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["differences"] == {"optimizer.beta1": ["0.9", "0.8"]}
    assert told["loss_per_token_compares"] is True
    assert told["runs"][0]["heldout"] == told["runs"][1]["heldout"]
    shown = Checked((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert ["optimizer.beta1", "0.9", "0.8"] in shown.rows
    done = pretrain("compare", real_run, other)
    assert "optimizer.beta1" in done.stdout
    assert "seed" not in done.stdout


def test_of_other_tokenizers_bits_per_byte_compare_and_losses_do_not(tmp_path: Path, real_run: Path) -> None:
    other = write_run(tmp_path / "other", [train(1), train(2), evaluation(2, loss=1.0, bits_per_byte=1.234567)])
    done = pretrain("compare", real_run, other, "--html", tmp_path / "page.html")
    assert done.returncode == 0
    assert "bits per byte do" in done.stdout
    assert "(per own token)" in done.stdout
    assert "1.2346" in done.stdout
    text = "".join(Checked((tmp_path / "page.html").read_text(encoding="utf-8")).text)
    assert "Held-out bits per byte, all sources" in text
    assert "Held-out loss, all sources" not in text
