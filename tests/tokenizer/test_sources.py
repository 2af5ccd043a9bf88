"""The command line takes every source: standard input, addresses, data sets, .txt by line or block, nested fields."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tokenizer", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, check=False)


def documents(*arguments: object, stdin: bytes = b"") -> Any:
    done = run("report", *arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {source["name"]: source["documents"] for source in report["sources"]}, report["dropped"]


def test_a_tokenizer_from_standard_input_and_a_report_on_every_source(texts: list[str], tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"meta": {"body": text}}).encode() + b"\n" for text in [*texts, None])
    folder = tmp_path / "t"
    made = run(
        "train", "--input", "-", "--stdin-kind", "jsonl.gz", "--text-field", "meta.body", "--vocab-size", 600,
        "--out", folder, "--json", stdin=gzip.compress(lines),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (source,) = json.loads(made.stdout)["inputs"]
    assert (source["name"], source["documents"], source["dropped"]) == ("-", len(texts), {"null_text": 1})

    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.txt").write_text("one\nblock\n\ntwo\n\n")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines)
    counts, dropped = documents(
        folder, "--text-field", "meta.body", "--txt-documents", "block", "--input", f"there=file://{tmp_path}/a.jsonl",
        "--input", f"set=hf:{tmp_path}/set", "--input", f"text={tmp_path / 'b.txt'}", "--input", "in=-",
        stdin=lines,
    )  # fmt: skip
    assert counts == {"there": len(texts), "set": len(texts), "text": 2, "in": len(texts)}
    assert dropped == {name: {} if name == "text" else {"null_text": 1} for name in counts}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--input", "a=-", "--input", "b=-"], b"once"),
        (["--input", "-", "--stdin-kind", "docx"], b"'docx' is no kind of input"),
        (["--input", "-", "--txt-documents", "page"], b"'page' is no way to cut"),
        (["--input", "nosuchscheme://a/b.txt"], b"Protocol not known"),
        (["--input", "-"], b"no text"),
    ],
)
def test_a_source_that_is_none_is_one_line(tokenizer_folder: Path, arguments: list[str], words: bytes) -> None:
    done = run("report", tokenizer_folder, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert words in done.stderr
