"""`python -m benchmarks`: which benchmarks there are, what becomes of their reports, the table and its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import short
from benchmarks.memory import Comparison
from benchmarks.short import BENCHMARKS, REPORT, WORK, Row, Short

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
NOT_RUN = {"__main__", "corpus", "continuations", "data_peer_process"}  # what makes text, or is a part of another


def test_every_script_that_measures_has_a_short_form() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")}
    assert scripts - NOT_RUN == set(BENCHMARKS)
    command = ["make", "--dry-run", "--no-print-directory", "bench"]  # make may be what runs these tests
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert run.splitlines()[-1].endswith("python -m benchmarks")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_script_has_the_options_of_its_short_form(name: str) -> None:
    parts = FOLDER.glob(f"{name}_*.py") if name == "data" else []
    text = "".join(path.read_text("utf-8") for path in (FOLDER / f"{name}.py", *parts))
    asked = [argument for argument in BENCHMARKS[name].arguments if argument.startswith("--")]
    assert asked
    for option in asked:
        assert f'add_argument("{option}"' in text, option


# ---------------------------------------------------------------- rows

REPORTS: dict[str, Any] = {
    "tokenizer": {"ratio": {"english": {"zerohalf": 20.0}}, "times_one_thread": {"processes": 1.5, "megabytes": 9.0}},
    "tokenizer_training": {
        "sizes": [{"text_bytes": 2_000_000, "plain": {"cpu_time_ratio": 1.5, "memory_ratio": 1.1}}]
    },
    "model": [
        {"preset": "mini", "dtype": "bf16", "ratios": [{"of": "zerohalf", "to": "transformers", "median": 1.1}]}
    ],
    "loss": {"plain_bytes": 600, "chunked_bytes": 60, "time_ratio": 0.99},
    "generate": {
        "speed": [{"dtype": "float32", "batch_size": 8, "ratio": 1.1}],
        "late_cost": [{"dtype": "float32", "batch_size": 8, "ratio_beyond_attention": 1.02}],
    },
    "freed_memory": {"ratio": 1.2},
    "scaling_sweep": {
        "without_the_largest": [
            {"tokens": 8, "forecast": 4.0, "loss": 2.0}, {"tokens": 9, "forecast": 3.0, "loss": 2.0}
        ]
    },
    "overhead": {"found": [{"tokens": 2048, "stage": 2, "wall_ratio": 1.1, "cpu_ratio": 1.05, "data_wait": 0.001}]},
    "trainer": {"found": [{"ranks": 2, "stage": 2, "tokens": 2048, "wall_ratio": 1.3, "cpu_ratio": 1.2}]},
    "ranks": {"found": [{"stage": 2, "tokens": 4096, "speed_ratio": 1.8, "work_ratio": 1.1}]},
}  # fmt: skip
RATIOS = {
    "tokenizer": [20.0, 1.5], "tokenizer_training": [1.5, 1.1], "model": [1.1], "loss": [0.1, 0.99],
    "generate": [1.1, 1.02], "freed_memory": [1.2], "scaling_sweep": [1.5], "overhead": [1.1, 1.05, 0.001],
    "trainer": [1.3, 1.2], "ranks": [1.8, 1.1],
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_the_figures_of_a_report_are_rows(name: str) -> None:
    """Of those whose real reports no other test makes; the names in them are those that the scripts write."""
    rows = list(BENCHMARKS[name].rows(REPORTS[name]))
    assert [row.ratio for row in rows] == RATIOS[name]
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    for key in re.findall(r"\"(\w+)\": ", json.dumps(REPORTS[name])):
        if key not in ("english", "zerohalf", "plain"):  # what is measured, no field
            assert re.search(rf"\b{key}\b", text), key


def test_the_rows_of_memory_are_its_extremes() -> None:
    found = [
        Comparison("case", static, 100, {"forward": peak}, {"forward": 100})
        for static, peak in ((99, 105), (101, 95), (100, 100))
    ]
    report = [asdict(one) | {"static_ratio": one.static_ratio, "peak_ratio": one.peak_ratio} for one in found]
    assert [row.ratio for row in short.memory(report)] == [0.99, 1.01, 0.95, 1.05]


# ---------------------------------------------------------------- a run


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks of our own, each of which says one ratio."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    texts = {
        "good": "print('a library says [INFO] {'); print('[INFO]'); print('{\\n  \"ratio\": 2.0\\n}')",
        "filed": "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"ratio\": 0.5}'); print('{')",
        "beyond": "import sys; print('{\\n  \"ratio\": 3.0\\n}'); sys.exit(1)",
        "broken": "import sys; print('{'); sys.exit('error: no | compiler')",
        "silent": "pass",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    made = {name: Short((REPORT,) if name == "filed" else (WORK,), lambda r: iter([Row("speed", r["ratio"], "it")]))
            for name in texts}  # fmt: skip
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "BENCHMARKS", made)
    return tmp_path / "out"


def main(*arguments: str, code: int | str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(list(arguments))
    assert ended.value.code == code


def test_one_table_of_all_that_ran(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main("--out", str(scripts), code=1)
    table = json.loads((scripts / "table.json").read_text())
    assert {name: [row["ratio"] for row in entry["rows"]] for name, entry in table.items()} == {
        "good": [2.0], "filed": [0.5], "beyond": [3.0], "broken": [], "silent": []
    }  # fmt: skip
    assert [entry["failure"] for entry in table.values()][:2] == [None, None]
    text = (scripts / "table.md").read_text()
    assert capsys.readouterr().out == text
    for line in (
        "| `good.py` | speed | 2 | it |",
        "| `beyond.py` | **failed** | | ended with 1: without a word |",
        "| `broken.py` | **failed** | | ended with 1: error: no / compiler |",
    ):
        assert line in text
    assert "no report" in table["silent"]["failure"]


def test_one_benchmark_again_leaves_the_others_figures(scripts: Path) -> None:
    main("good", "filed", "--out", str(scripts), code=0)
    (scripts.parent / "benchmarks" / "good.py").write_text("print('{\\n  \"ratio\": 7.0\\n}')")
    main("good", "--out", str(scripts), code=0)
    table = json.loads((scripts / "table.json").read_text())
    assert [entry["rows"][0]["ratio"] for entry in table.values()] == [7.0, 0.5]


def is_running(pid: int) -> bool:
    """Not a process that has ended and that nobody has asked about yet."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_that_hangs_is_ended_and_what_it_started(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = "import os, pathlib, subprocess, sys, time; sleep = 'import time; time.sleep(600)'; "
    started += "child = subprocess.Popen([sys.executable, '-c', sleep]); "
    started += f"pathlib.Path({str(scripts / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)"
    (scripts.parent / "benchmarks" / "good.py").write_text(started)
    limit = 1
    while not (scripts / "pids").exists():  # on a busy machine Python takes that long to start
        limit *= 2
        monkeypatch.setattr(bench, "LIMIT_SECONDS", limit)
        main("good", "--out", str(scripts), code=1)
    assert f"took more than {limit} s" in (scripts / "table.md").read_text()
    for pid in (scripts / "pids").read_text().split():
        assert not is_running(int(pid))


# ---------------------------------------------------------------- the page


def test_the_page_has_the_last_table(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = scripts.parent / "performance.md"
    monkeypatch.setattr(bench, "PAGE", page)
    page.write_text(f"before\n\n{bench.BEGIN}\n\nold\n\n{bench.END}\n\nbehind\n")
    main("--page", "--out", str(scripts), code="error: there is no table yet: run `make bench` first")
    main("good", "--out", str(scripts), code=0)
    for _ in range(2):
        bench.main(["--page", "--out", str(scripts)])
        text = page.read_text()
        assert text.startswith(f"before\n\n{bench.BEGIN}\n\n| benchmark |")
        assert text.endswith(f"\n\n{bench.END}\n\nbehind\n")
        assert text.count("good.py") == 1
        assert "old" not in text
    page.write_text("no place")
    main("--page", "--out", str(scripts), code=f"error: {page} has no lines {bench.BEGIN} and {bench.END}")


def test_a_damaged_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("{broken")
    with pytest.raises(SystemExit) as ended:
        bench.main(["--page", "--out", str(tmp_path)])
    assert str(ended.value).startswith(f"error: {tmp_path}/table.json is damaged")


def test_the_real_page_has_a_place_for_it() -> None:
    text = bench.PAGE.read_text("utf-8")
    assert text.count(bench.BEGIN) == text.count(bench.END) == 1
    assert text.index(bench.BEGIN) < text.index(bench.END)


def test_an_unknown_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main("nothing", code=2)
    assert "no benchmark 'nothing': there are data, tokenizer" in capsys.readouterr().err


def test_the_module_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--page" in done.stdout
