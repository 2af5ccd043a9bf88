"""Standard input: kept on disk first, so that it can be cut, continued after a kill, compared with what comes later."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.corpus import CorpusError
from data_pipeline.prepare import Options, PrepareError, PrepareReport, parse_inputs, prepare
from data_pipeline.verification import verify_collection
from tests.data_pipeline.conftest import real_texts
from tests.data_pipeline.test_prepare import tree

SMALL = Options(validation_fraction=0.2, unit_bytes=20_000)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lines() -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\nno JSON\n" for text in real_texts(20))


class Stdin:
    """Pipes bytes into `prepare`, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Path, out: Path) -> None:
        self.monkeypatch, self.tokenizer, self.out = monkeypatch, tokenizer, out

    def prepare(self, content: bytes | None, *, kind: str = "jsonl", workers: int = 1) -> PrepareReport:
        stream = None if content is None else io.TextIOWrapper(io.BytesIO(content))
        self.monkeypatch.setattr(sys, "stdin", stream)
        return prepare({"s": ["-"]}, self.tokenizer, self.out, SMALL, workers=workers, stdin_kind=kind)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path, tmp_path: Path) -> Stdin:
    return Stdin(monkeypatch, tokenizer_folder, tmp_path / "out")


def test_it_becomes_what_a_file_of_it_becomes(
    stdin: Stdin, lines: bytes, tmp_path: Path, tokenizer_folder: Path
) -> None:
    report = stdin.prepare(lines)
    assert report.units > 5
    (tmp_path / "<stdin>.jsonl").write_bytes(lines)
    prepare({"s": [tmp_path / "<stdin>.jsonl"]}, tokenizer_folder, tmp_path / "file", SMALL)
    here, there = tree(stdin.out / "s"), tree(tmp_path / "file" / "s")
    differ = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
    assert sorted(differ) == ["ledger.jsonl", "manifest.json"]
    manifest = json.loads(here["manifest.json"])
    pieces = manifest["provenance"]["files"]
    assert {piece["path"] for piece in pieces} == {"<stdin>.jsonl"}
    assert pieces[0]["sha256"] == hashlib.sha256(lines[: pieces[0]["bytes"]]).hexdigest()
    assert here["ledger.jsonl"] == there["ledger.jsonl"].replace(json.dumps(str(tmp_path))[1:-1].encode() + b"/", b"")
    (plan_file,) = json.loads((stdin.out / ".prepare" / "plan.json").read_bytes())["sources"]["s"]["files"]
    assert plan_file == {
        "path": "<stdin>.jsonl",
        "size": len(lines),
        "tag": f"sha256={hashlib.sha256(lines).hexdigest()}",
    }
    assert not (stdin.out / ".prepare" / "stdin").exists()
    verify_collection(stdin.out, full=True)


def test_a_whole_collection_is_found_whole_with_the_same_input_or_none(stdin: Stdin, lines: bytes) -> None:
    stdin.prepare(lines)
    before = tree(stdin.out)
    for again in (lines, b"", None):
        report = stdin.prepare(again)
        assert report.units_done_before == report.units
        assert tree(stdin.out) == before
    with pytest.raises(PrepareError, match="other bytes on standard input"):
        stdin.prepare(lines[:-1])
    with pytest.raises(PrepareError, match=r"<stdin>"):
        stdin.prepare(lines, kind="txt")
    assert tree(stdin.out) == before


KILLED_BEHIND_ITS_SECOND_UNIT = """
import os, sys
from pathlib import Path
from data_pipeline import prepare
from data_pipeline.unit import UnitWork

units, publish = [], UnitWork.publish
def publish_and_die(work):
    units.append(publish(work))
    if len(units) == 2:
        os.kill(os.getpid(), 9)
    return units[-1]
UnitWork.publish = publish_and_die
options = prepare.Options(validation_fraction=0.2, unit_bytes=20_000)
prepare.prepare({"s": ["-"]}, Path(sys.argv[1]), Path(sys.argv[2]), options)
"""


def test_killed_it_continues_to_the_same_bytes(stdin: Stdin, lines: bytes, tokenizer_folder: Path) -> None:
    """Killed while input comes in, and while it is worked on; then with the same input, and with none."""
    stdin.prepare(lines)
    whole = tree(stdin.out)
    out = stdin.out = stdin.out.with_name("killed")
    command = [sys.executable, "-c", KILLED_BEHIND_ITS_SECOND_UNIT, str(tokenizer_folder), str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(lines[: len(lines) // 2])
        process.stdin.flush()
        while not list(out.glob(".prepare/stdin/.*.tmp")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert not list(out.glob(".prepare/stdin/*.jsonl"))
    assert subprocess.run(command, cwd=ROOT, input=lines, check=False).returncode == -signal.SIGKILL
    (kept,) = out.glob(".prepare/stdin/*")
    assert kept.read_bytes() == lines
    kept.write_bytes(lines[:-1] + b"x")
    with pytest.raises(PrepareError, match="damaged"):
        stdin.prepare(None)
    kept.write_bytes(lines)
    with pytest.raises(PrepareError, match="other bytes"):
        stdin.prepare(lines + b"\n")
    shutil.copytree(out, out.with_name("copy"))
    for stdin.out, again in ((out, lines), (out.with_name("copy"), b"")):
        assert stdin.prepare(again).units_done_before == 2
        assert tree(stdin.out) == whole


def test_what_was_kept_and_is_gone_must_come_again(stdin: Stdin, lines: bytes) -> None:
    stdin.prepare(lines)
    whole = tree(stdin.out)
    (stdin.out / "manifest.json").unlink()
    with pytest.raises(PrepareError, match="pipe it in again"):
        stdin.prepare(b"")
    with pytest.raises(PrepareError, match="other bytes"):
        stdin.prepare(b'{"text": "something else"}\n')
    assert not list(stdin.out.glob(".prepare/stdin/*"))
    stdin.prepare(lines)
    assert tree(stdin.out) == whole


def test_no_input_or_twice_or_of_no_kind_is_one_line(
    stdin: Stdin, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nothing in (b"", None):
        with pytest.raises(PrepareError, match="standard input is empty"):
            stdin.prepare(nothing)
    with pytest.raises(CorpusError, match="no kind of input"):
        stdin.prepare(b"x", kind="docx")
    with pytest.raises(PrepareError, match="read once"):
        prepare({"a": ["-"], "b": ["-"]}, tokenizer_folder, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    with pytest.raises(CorpusError, match="no such file"):
        prepare({"a": ["-"], "b": [tmp_path / "nothing.txt"]}, tokenizer_folder, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    primary, secondary = os.openpty()
    with os.fdopen(secondary) as terminal, os.fdopen(primary):
        monkeypatch.setattr(sys, "stdin", terminal)
        with pytest.raises(PrepareError, match="standard input is empty"):
            prepare({"s": ["-"]}, tokenizer_folder, stdin.out)


def test_kinds_that_are_read_from_their_end(stdin: Stdin) -> None:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), buffer)
    source = stdin.prepare(buffer.getvalue(), kind="parquet").collection.sources["s"]
    assert source.manifest["documents_read"] == 3


def test_inputs_that_are_no_paths_stay_strings() -> None:
    arguments = ["-", "a=s3://b/c.jsonl", "s3://b/dir/", "hf:user/Set@v1:en", "https://h/x.y.jsonl?a=b", "k=-"]
    assert parse_inputs(arguments) == {
        "stdin": ["-"], "a": ["s3://b/c.jsonl"], "dir": ["s3://b/dir/"], "Set": ["hf:user/Set@v1:en"],
        "x": ["https://h/x.y.jsonl?a=b"], "k": ["-"],
    }  # fmt: skip
