"""The command line: what it prints, and that bad input is one line and exit 2."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.__main__ import main
from data_pipeline.verification import verify_collection
from tests.data_pipeline.conftest import CHINESE, real_texts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "pages.jsonl"
    lines = [json.dumps({"text": text}) for text in [*real_texts(20), *(CHINESE * n for n in range(1, 20))]]
    path.write_text("\n".join([*lines, '{"text": null}']) + "\n")
    return path


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, tokenizer_folder: Path) -> Path:
    """Made by a real process, from another working directory."""
    out = tmp_path_factory.mktemp("made") / "c"
    done = subprocess.run(
        [sys.executable, "-m", "data_pipeline", "prepare", "--input", f"en={corpus_file}", f"again={corpus_file}",
         "--tokenizer", str(tokenizer_folder), "--out", str(out), "--workers", "2", "--validation-fraction", "0.2",
         "--unit-bytes", "50000"],
        capture_output=True, text=True, check=False, cwd=out.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "en: 1 dropped: null_text" in done.stdout
    assert "MB/s" in done.stdout
    return out


def without_remarks(stderr: str) -> str:
    """Without what the machine decides: every ten seconds how far the work is; that no compiled encoder is there."""
    remarks = (", ETA ", "encoded by SentencePiece itself")
    return "".join(line for line in stderr.splitlines(keepends=True) if not any(remark in line for remark in remarks))


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["data_pipeline", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, without_remarks(captured.err)


def test_a_second_run_finds_it_complete(
    collection: Path, corpus_file: Path, tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = ["prepare", f"en={corpus_file}", f"again={corpus_file}", "--tokenizer", tokenizer_folder,
                 "--out", collection, "--validation-fraction", 0.2, "--unit-bytes", 50000]  # fmt: skip
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "complete already" in out
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    report = json.loads(out)
    assert (code, report["units_done_before"]) == (0, report["units"])
    assert report["sources"]["en"]["dropped"] == {"null_text": 1}
    assert report["sources"]["en"]["train"]["documents"] + report["sources"]["en"]["validation"]["documents"] == 39


def test_the_call_behind_all_parts_says_that_it_wrote_the_manifests(
    corpus_file: Path, tokenizer_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = ["prepare", f"en={corpus_file}", "--tokenizer", tokenizer_folder, "--out", tmp_path / "x",
                 "--unit-bytes", 50000]  # fmt: skip
    for part in ("1/2", "2/2"):
        assert run(monkeypatch, capsys, *arguments, "--units", part)[0] == 0
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert f"units were done before; wrote the manifests that make {tmp_path / 'x'} a collection\n" in out
    assert "complete already" not in out
    assert "complete already" in run(monkeypatch, capsys, *arguments)[1]


def test_verify_says_ok_or_names_file_and_fault(
    collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([collection], [collection, "--full"]):
        code, out, _ = run(monkeypatch, capsys, "verify", *arguments)
        assert (code, "ok: " in out) == (0, True)
    _, out, _ = run(monkeypatch, capsys, "verify", collection, "--full", "--json")
    assert json.loads(out)["ok"] is True
    copy = tmp_path / "c"
    shutil.copytree(collection, copy)
    shard = copy / "en" / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:5000] + b"\xff\x00" + content[5002:])
    assert run(monkeypatch, capsys, "verify", copy)[0] == 0
    code, _, err = run(monkeypatch, capsys, "verify", copy, "--full")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {shard}: token block 0 is damaged")
    shard.write_bytes(content[:-2])
    code, _, err = run(monkeypatch, capsys, "verify", copy)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {shard}: ")


def test_inspect_shows_sums_documents_and_windows(
    collection: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "inspect", collection)
    assert (code, "again" in out, "validation" in out) == (0, True, True)
    chosen = ["inspect", collection, "--source", "en"]
    code, out, _ = run(monkeypatch, capsys, *chosen, "--split", "validation", "--document", 0, "--json")
    (segment,) = json.loads(out)["segments"]
    assert segment["ended"] is True
    code, out, _ = run(monkeypatch, capsys, *chosen, "--split", "validation", "--document", 0)
    assert (code, segment["text"] in out, "end of document" in out) == (0, True, True)
    code, out, _ = run(monkeypatch, capsys, *chosen, "--window", 2, "--seq-len", 64, "--json")
    shown = json.loads(out)["segments"]
    assert sum(segment["tokens"] for segment in shown) == 65
    assert all("ids" not in segment for segment in shown)


def test_inspect_shows_where_documents_begin_end_and_came_from(
    collection: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A window that holds the end of one document and the beginning of the next, with ids."""
    chosen = ["inspect", collection, "--source", "en", "--seq-len", 200]
    lines = corpus_file.read_text().splitlines()
    for window in range(100):
        _, out, _ = run(monkeypatch, capsys, *chosen, "--window", window, "--ids", "--json")
        segments = json.loads(out)["segments"]
        if len(segments) > 1:
            break
    assert [segment["ended"] for segment in segments] == [True] * (len(segments) - 1) + [segments[-1]["ended"]]
    assert [segment["begins"] for segment in segments[1:]] == [True] * (len(segments) - 1)
    for segment in segments:
        file, _, position = segment["place"].rpartition(":")
        assert file == str(corpus_file)
        assert segment["text"] in json.loads(lines[int(position) - 1])["text"]
        assert len(segment["ids"]) == segment["tokens"]
        assert (segment["ids"][-1] == 2) == segment["ended"]
    _, out, _ = run(monkeypatch, capsys, *chosen, "--window", window, "--ids")
    first, second = segments[:2]
    assert f"──── document {second['document']}, {second['place']}, {second['tokens']} tokens ────" in out
    assert f"──── ids ────\n{' '.join(map(str, first['ids']))}\n──── end of document (EOS) ────" in out
    moved = tmp_path / "moved"
    shutil.move(corpus_file, moved)
    _, out, _ = run(monkeypatch, capsys, *chosen, "--window", window)
    _, without, _ = run(monkeypatch, capsys, *chosen, "--window", window, "--no-files")
    shutil.move(moved, corpus_file)
    assert f"source unknown: {corpus_file}" in out
    assert "No such file or directory" in out
    assert str(corpus_file) not in without


def test_inspect_writes_a_card(
    collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card, plot = tmp_path / "card.md", tmp_path / "pictures" / "lengths.png"
    plot.parent.mkdir()
    code, out, _ = run(monkeypatch, capsys, "inspect", collection, "--card", card, "--plot", plot, "--seq-len", 99)
    assert (code, "again" in out) == (0, True)
    text = card.read_text()
    assert "## Training windows of 99 tokens" in text
    assert "- en, dropped: 1 null_text" in text
    assert "![lengths of documents](pictures/lengths.png)" in text
    assert plot.stat().st_size > 5000
    assert {path.name for path in tmp_path.iterdir()} == {"card.md", "pictures"}


def test_verify_samples_and_counts_epochs(
    collection: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = ["verify", collection, "--sample", 9, "--epoch", "--seq-len", 32]
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "sample: 9 documents give the stored ids from their source files\n" in out
    assert out.count("each window once") == 8
    _, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    report = json.loads(out)
    assert (report["sample"], len(report["epoch"])) == ({"documents_equal": 9}, 8)
    kept = tmp_path / "kept"
    shutil.copy2(corpus_file, kept)
    corpus_file.write_bytes(corpus_file.read_bytes().replace(b"a", b"A"))
    code, out, err = run(monkeypatch, capsys, *arguments)
    shutil.move(kept, corpus_file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"0 documents equal their source, but 9 cannot be compared: {corpus_file} has changed" in err


def test_convert_there_and_back(
    collection: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, out, _ = run(monkeypatch, capsys, "convert", collection, "--to", "llmc", "--out", tmp_path / "l")
    assert code == 0
    assert f"{tmp_path / 'l' / 'en_train_000000.bin'}  " in out
    back = ["convert", "--from", "llmc", "--tokenizer", tokenizer_folder, "--out", tmp_path / "back"]
    for name in ("en", "again"):
        back += [
            "--train",
            f"{name}={tmp_path}/l/{name}_train_*.bin",
            "--validation",
            f"{name}={tmp_path}/l/{name}_val_*",
        ]
    code, out, _ = run(monkeypatch, capsys, *back)
    assert code == 0
    assert f"{tmp_path / 'back'}: written whole" in out
    sums = []
    for path in (collection, tmp_path / "back"):
        _, out, _ = run(monkeypatch, capsys, "inspect", path, "--json")
        sources = json.loads(out)["sources"]
        sums.append([[sources[n][s][k] for k in ("tokens", "documents", "text_bytes")] for n in ("en", "again")
                     for s in ("train", "validation")])  # fmt: skip
    assert sums[0] == sums[1]
    code, out, _ = run(monkeypatch, capsys, "inspect", tmp_path / "back", "--source", "en", "--document", 0)
    assert (code, "document 0, converted from llmc token files" in out) == (0, True)
    code, _, err = run(monkeypatch, capsys, "verify", tmp_path / "back", "--full", "--sample", 3)
    assert (code, err.count("\n"), "there is no text to read again" in err) == (2, 1, True)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["verify", "{tmp}/nothing"], "no such folder"),
        (["verify", "{tmp}"], "manifest.json"),
        (["inspect", "{made}", "--document", "0"], "which source"),
        (["inspect", "{made}", "--source", "fr", "--document", "0"], "no source 'fr'"),
        (["inspect", "{made}", "--source", "en", "--document", "100000"], "does not exist"),
        (["inspect", "{made}", "--source", "en", "--split", "test", "--window", "0"], "no split"),
        (["inspect", "{made}", "--source", "zz"], "no source 'zz'"),
        (["inspect", "{made}", "--split", "test"], "no split 'test'"),
        (["inspect", "{made}", "--source", "en", "--document", "9" * 30], "does not exist"),
        (["inspect", "{made}", "--source", "en", "--window", "9" * 30, "--seq-len", "9" * 9], "does not exist"),
        (["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{tmp}/o", "--unit-bytes", "9" * 23], "--unit-bytes 9"),
        (["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{tmp}/o", "--max-chars", "9" * 23], "--max-chars 9"),
        (
            [
                "prepare",
                "{file}",
                "--tokenizer",
                "{tok}",
                "--out",
                "{tmp}/o",
                "--min-chars",
                "9" * 23,
                "--max-chars",
                "9" * 24,
            ],
            "--min-chars 9",
        ),
        (["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{tmp}/o", "--text-field", "\udcff"], "not UTF-8"),
        (["inspect", "{made}", "--source", "en", "--document", "0", "--window", "0"], "not both"),
        (["prepare", "--tokenizer", "{tok}", "--out", "{tmp}/o"], "no input"),
        (["prepare", "{tmp}/none.txt", "--tokenizer", "{tok}", "--out", "{tmp}/o"], "no such file"),
        (["prepare", "{file}", "--tokenizer", "{tmp}/none", "--out", "{tmp}/o"], "no such tokenizer"),
        (["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{tmp}/o", "--validation-fraction", "2"], "fraction"),
        (
            ["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{tmp}/o", "--min-chars", "9", "--max-chars", "3"],
            "9",
        ),
        (["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{file}/o"], "Not a directory"),
        (["prepare", "{file}", "--tokenizer", "{tok}", "--out", "{made}"], "was begun with"),
        (["verify", "{made}", "--epoch"], "say --seq-len, or --run"),
        (["verify", "{made}", "--epoch", "--seq-len", "8", "--run", "{tmp}"], "say --seq-len, or --run"),
        (["verify", "{made}", "--epoch", "--seq-len", "9" * 9], "no source has the 1,000,000,000 tokens"),
        (["verify", "{made}", "--epoch", "--run", "{tmp}"], "no recipe.toml"),
        (["verify", "{made}", "--sample", "0"], "--sample"),
        (["inspect", "{made}", "--card", "{tmp}/no/card.md"], "there is no folder"),
        (["inspect", "{made}", "--plot", "{tmp}/no/x.svg"], "no/x.svg: there is no folder"),
        (["inspect", "{made}", "--card", ""], "is no name of a file"),
        (["inspect", "{made}", "--card", "/"], "is no name of a file"),
        (["inspect", "{made}", "--card", "{tmp}"], "is no plain file"),
        (["inspect", "{made}", "--card", "/dev/full"], "is no plain file"),
        (["inspect", "{made}", "--card", "{tmp}/c.md", "--seq-len", str(2**63)], "--seq-len"),
        (["inspect", "{made}", "--plot", "{tmp}/x.bmp"], "a picture is drawn as .png"),
        (["convert", "{made}", "--out", "{tmp}/o"], "say --to or --from"),
        (["convert", "{made}", "--to", "gguf", "--out", "{tmp}/o"], "say --to or --from"),
        (["convert", "{made}", "--to", "megatron", "--from", "llmc", "--out", "{tmp}/o"], "say --to or --from"),
        (["convert", "--to", "megatron", "--out", "{tmp}/o"], "--to takes a collection"),
        (["convert", "{tmp}", "--to", "megatron", "--out", "{tmp}/o"], "manifest.json"),
        (["convert", "{made}", "--to", "megatron", "--out", "{made}"], "exists already"),
        (["convert", "{made}", "--to", "megatron", "--out", "{file}/o"], "Not a directory"),
        (["convert", "--from", "llmc", "--out", "{tmp}/o"], "--from needs --train"),
        (["convert", "--from", "llmc", "--train", "{file}", "--out", "{tmp}/o"], "--from needs --train"),
        (["convert", "--from", "llmc", "--train", "x={file}", "--tokenizer", "{tok}", "--out", "{tmp}/o"], "magic"),
        (
            ["convert", "--from", "llmc", "--train", "x={tmp}/*.bin", "--tokenizer", "{tok}", "--out", "{tmp}/o"],
            "*.bin",
        ),
        (
            ["convert", "--from", "megatron", "--train", "x={tmp}/n", "--tokenizer", "{tok}", "--out", "{tmp}/o"],
            "n.bin",
        ),
        (
            [
                "convert",
                "--from",
                "llmc",
                "--train",
                "x={file}",
                "--validation",
                "y={file}",
                "--tokenizer",
                "{tok}",
                "--out",
                "{tmp}/o",
            ],
            "no --train files",
        ),
        (
            [
                "convert",
                "--from",
                "llmc",
                "--train",
                "x={file}",
                "--validation",
                "x={file}",
                "--tokenizer",
                "{tok}",
                "--validation-fraction",
                "0.1",
                "--out",
                "{tmp}/o",
            ],
            "leave --validation-fraction away",
        ),
        (
            [
                "convert",
                "--from",
                "llmc",
                "--train",
                "x={file}",
                "--tokenizer",
                "{tok}",
                "--validation-fraction",
                "1",
                "--out",
                "{tmp}/o",
            ],
            "not in [0, 1)",
        ),
        (
            [
                "convert",
                "--from",
                "llmc",
                "--train",
                "x={file}",
                "--tokenizer",
                "{tok}",
                "--eos",
                "both",
                "--out",
                "{tmp}/o",
            ],
            "--eos is first or last",
        ),
        (
            [
                "convert",
                "--from",
                "megatron",
                "--train",
                "x={file}",
                "--tokenizer",
                "{tok}",
                "--eos",
                "last",
                "--out",
                "{tmp}/o",
            ],
            "--eos is for files without an index",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], words: str, collection: Path, corpus_file: Path, tokenizer_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = {"tmp": tmp_path, "made": collection, "tok": tokenizer_folder, "file": corpus_file}
    code, out, err = run(monkeypatch, capsys, *(argument.format(**places) for argument in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert words in err
    assert not (tmp_path / "o").exists()


def test_a_full_disk_is_one_line_and_the_next_run_continues(tmp_path: Path, tokenizer_folder: Path) -> None:
    """A limit on the size of files stands in for the full disk: the write fails half-way."""
    lines = [json.dumps({"text": f"{number} {text}"}) for number in range(3) for text in real_texts(60)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "data_pipeline", "prepare", str(tmp_path / "x.jsonl"), "--out",
               str(tmp_path / "out"), "--tokenizer", str(tokenizer_folder), "--workers", "1"]  # fmt: skip
    for limit, code in (("ulimit -f 400; ", 2), ("", 0)):
        done = subprocess.run(
            ["bash", "-c", limit + '"$@"', "bash", *command], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == code, done.stderr
        if limit:
            (line,) = without_remarks(done.stderr).splitlines()
            assert "File too large" in line
        assert (tmp_path / "out" / "manifest.json").exists() == (code == 0)
        assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_stops_every_verb_that_writes_in_one_line(collection: Path, tmp_path: Path) -> None:
    """It names what was to be written, and nothing of it stays; the collection itself is whole as before."""
    data = shutil.copytree(collection, tmp_path / "data")
    for out, command in (
        ("foreign", ["convert", str(data), "--to", "nanogpt", "--out", str(tmp_path / "foreign")]),
        ("data/_packing/best_fit-2", ["pack", str(data), "--seq-len", "2"]),
        ("card.md", ["inspect", str(data), "--card", str(tmp_path / "card.md")]),
        ("lengths.png", ["inspect", str(data), "--plot", str(tmp_path / "lengths.png")]),
    ):
        line = 'ulimit -f 1; exec "$@"'
        done = subprocess.run(
            ["bash", "-c", line, "bash", sys.executable, "-m", "data_pipeline", *command],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 2, (command, done.stderr)
        (said,) = done.stderr.splitlines()
        assert said == f"error: {tmp_path / out}: File too large; make room and start again"
        assert not (tmp_path / out).exists()
        assert not list(tmp_path.rglob(".*tmp")), command
    verify_collection(data, full=True)


def test_of_two_at_once_one_writes(tmp_path: Path, corpus_file: Path, tokenizer_folder: Path) -> None:
    command = [sys.executable, "-m", "data_pipeline", "prepare", str(corpus_file), "--tokenizer", str(tokenizer_folder),
               "--out", str(tmp_path / "out"), "--unit-bytes", "5000", "--workers", "1"]  # fmt: skip
    both = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in "ab"
    ]
    results = [(*process.communicate(), process.returncode) for process in both]
    assert 0 in [code for _, _, code in results]
    for out, err, code in results:
        complaint = without_remarks(err)
        if code == 0:
            assert complaint == ""
        else:
            assert (code, out, complaint.count("\n")) == (2, "", 1)
            assert "another `prepare` is writing" in complaint
    verify_collection(tmp_path / "out", full=True)
