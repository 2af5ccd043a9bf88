from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tokenizer.test_candidates import byte_level
from tokenizer.__main__ import main
from tokenizer.codec import MODEL_FILE, Codec

ROOT = Path(__file__).resolve().parents[2]
TRICKY = "line\r\n\ttab   three spaces </s> <s> 道可道\u2028\x00😀\n"


def run(*arguments: object, stdin: bytes = b"", cwd: Path = ROOT) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tokenizer", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, check=False, timeout=60)


def test_a_closed_standard_input_is_one_line(tokenizer_folder: Path) -> None:
    command = [
        "bash",
        "-c",
        '"$@" <&-',
        "bash",
        sys.executable,
        "-m",
        "tokenizer",
        "encode",
        tokenizer_folder,
        "--file",
        "-",
    ]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert b"standard input is closed" in done.stderr


def test_a_closed_stderr_hinders_no_work(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8")
    train = ["train", "--input", tmp_path / "a.txt", "--vocab-size", 500, "--out", tmp_path / "t"]
    report = ["report", tmp_path / "t", "--input", tmp_path / "a.txt", "--json"]
    for arguments in (train, report):
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "tokenizer", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        assert done.returncode == 0
    assert json.loads(done.stdout)["sources"][0]["documents"] == 1


def test_every_choice_of_a_training_arrives(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(texts[0] + "ｆｕｌｌ\n" * 9, encoding="utf-8")
    choices = ["--model-type", "unigram", "--normalization", "nfkc", "--split", "lines", "--reserve", 2, "--seed", 5]
    symbols = ["--control-symbol", "<|a|>", "--control-symbol", "<|b|>", "--user-symbol", "<u>"]
    sizes = ["--vocab-size", 599, "--vocab-multiple", 100]
    done = run("train", "--input", tmp_path / "a.txt", *sizes, *choices, *symbols, "--out", tmp_path / "t", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(b"nfkc does not give texts back")
    data = json.loads(done.stdout)
    assert data["symbols"] == {
        "<|a|>": 4, "<|b|>": 5, "<|reserved_0|>": 6, "<|reserved_1|>": 7, "<|reserved_2|>": 8, "<u>": 9,
    }  # fmt: skip
    named = ("vocab_size", "model_type", "normalization", "split", "changed_characters")
    assert [data[name] for name in named] == [600, "unigram", "nfkc", "lines", 36]
    assert data["inputs"][0]["name"] == "a.txt"
    description = json.loads((tmp_path / "t" / "description.json").read_text())
    assert description["options"]["seed"] == 5
    assert "| a.txt | 1.0 | 1 | " in (tmp_path / "t" / "training.md").read_text()
    said = run("train", "--input", tmp_path / "a.txt", "--vocab-size", 500, "--out", tmp_path / "t2").stdout.decode()
    assert re.search(r"^  measured  \d\.\d\d bytes per token on 0\.10 MB of the text trained on$", said, re.MULTILINE)


def test_an_interrupt_ends_a_training_at_once(tmp_path: Path) -> None:
    """SentencePiece itself looks at no signal, and this text would keep it busy for minutes."""
    chance = random.Random(0)
    (tmp_path / "a.txt").write_text("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=10_000_000)))
    command = [sys.executable, "-m", "tokenizer", "train", "--input", str(tmp_path / "a.txt"), "--vocab-size", "30000"]
    with subprocess.Popen([*command, "--out", str(tmp_path / "t")], cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"training on 9.9 MB: about ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (child := children.read_text().split()):
            time.sleep(0.01)
        while int(re.findall(r"rchar: (\d+)", Path(f"/proc/{child[0]}/io").read_text())[0]) < 9_900_000:
            time.sleep(0.01)  # it has not read the text yet
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait() == 130
    assert not Path(f"/proc/{child[0]}").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_terminal_sees_a_bar(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(texts[0] * 60, encoding="utf-8")
    screen, terminal = os.openpty()
    command = [sys.executable, "-m", "tokenizer", "train", "--input", str(tmp_path / "a.txt"), "--vocab-size", "500"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "t")], cwd=ROOT, stdout=subprocess.PIPE, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        seen = b""
        with contextlib.suppress(OSError):  # how the end of a terminal reads
            while data := os.read(screen, 1 << 16):
                seen += data
        os.close(screen)
        assert process.wait() == 0
    assert re.search(rb"training on [5-9]\.\d MB: about ", seen)
    assert re.search(rb"training.*%", seen)


def test_the_whole_chain_on_files(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for number, text in enumerate(texts[:5]):
        (tmp_path / "code" / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    lines = [json.dumps({"text": text}) for text in texts[5:]] + ['{"text": null}', "not json", '{"text": "\\ud800"}']
    for name in ("notes.md", "b.docx"):
        (tmp_path / "code" / name).touch()
    passed_over = f"{tmp_path / 'code'}: 2 files of other kinds passed over, the first {tmp_path / 'code' / 'b.docx'}\n"
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines))
    out = tmp_path / "tokenizer"

    inputs = ["--input", tmp_path / "code", "--input", f"{tmp_path / 'mixed.jsonl'}=1.5"]
    trained = run("train", *inputs, "--vocab-size", 700, "--out", out)
    assert trained.returncode == 0, trained.stderr
    assert b"700 ids" in trained.stdout
    assert passed_over in trained.stdout.decode()
    assert re.search(
        rb"^  source    [^ ]*/mixed\.jsonl: \d+\.\d% of the text trained on, \d\.", trained.stdout, re.MULTILINE
    )
    assert b" MB, weights applied, trained" in trained.stdout
    assert b"mixed.jsonl: dropped 3 documents" in trained.stdout
    assert b"first null_text: " in trained.stdout
    kept = json.loads((out / "description.json").read_text())["corpus"]["provenance"]["inputs"]
    assert [(one["name"], one["weight"], one["documents"]) for one in kept] == [
        ("code", 1.0, 5),
        ("mixed.jsonl", 1.5, len(texts) - 5),
    ]
    assert sum(kept[1]["dropped"].values()) == 3
    assert [one["ignored_files"] for one in kept] == [2, 0]
    assert "| dropped | ignored files | of the text trained on |" in (out / "training.md").read_text()

    (tmp_path / "tricky.txt").write_bytes(TRICKY.encode())
    encoded = run("encode", out, "--file", tmp_path / "tricky.txt")
    assert encoded.stdout.split() == [b"%d" % token_id for token_id in Codec.load(out).encode(TRICKY)]
    decoded = run("decode", out, "--file", "-", stdin=encoded.stdout)
    assert decoded.stdout == TRICKY.encode()

    reported = run("report", out, "--input", f"code={tmp_path / 'code'}", "--input", tmp_path / "mixed.jsonl", "--json")
    figures = json.loads(reported.stdout)
    assert [source["name"] for source in figures["sources"]] == ["code", str(tmp_path / "mixed.jsonl")]
    assert sum(figures["dropped"][str(tmp_path / "mixed.jsonl")].values()) == 3
    assert figures["all"]["documents"] == len(texts)
    assert figures["all"]["results"][0]["round_trip_failures"] == 0
    table = run("report", out, "--input", tmp_path / "mixed.jsonl")
    assert b"round trips: all " in table.stdout
    assert b"null_text" in table.stdout
    assert figures["ignored_files"] == {"code": 2, str(tmp_path / "mixed.jsonl"): 0}
    assert passed_over in run("report", out, "--input", tmp_path / "code").stdout.decode()


def test_tokenizers_side_by_side(texts: list[str], tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "code.txt").write_text(texts[0], encoding="utf-8", newline="")
    (tmp_path / "中文.txt").write_text(texts[-1], encoding="utf-8", newline="")
    inputs = ["--input", f"code={tmp_path / 'code.txt'}", "--input", f"中文={tmp_path / '中文.txt'}"]
    foreign = [
        "--against",
        f"bytes={byte_level(tmp_path / 'tokenizer.json')}",
        "--against",
        tokenizer_folder / MODEL_FILE,
    ]
    done = run("report", tokenizer_folder, *foreign, *inputs, "--json", "--plot", tmp_path / "report.png")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [one["name"] for one in data["tokenizers"]] == [tokenizer_folder.name, "bytes", MODEL_FILE]
    assert [one["name"] for one in data["sources"]] == ["code", "中文"]
    assert [one["unit"] for one in data["sources"]] == ["word", "character"]
    ours, foreign_bytes, same = data["all"]["results"]
    assert {**same, "tokenizer": None} == {**ours, "tokenizer": None}
    assert foreign_bytes["tokens"] > 2 * ours["tokens"]
    assert (tmp_path / "report.png").stat().st_size > 10_000
    said = run("report", tokenizer_folder, *foreign, *inputs).stdout.decode()
    assert "no rate of byte tokens: every piece is made of bytes" in said
    assert said.count("round trips: all 2 documents came back") == 3


def test_tokenizers_of_one_name_are_told_apart(tokenizer_folder: Path, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8")
    folder = str(tokenizer_folder)
    done = run(
        "report", folder, "--against", f"x={folder}", "--against", folder, "--input", tmp_path / "a.txt", "--json"
    )
    assert done.returncode == 2
    assert b"two tokenizers are called" in done.stderr
    other = tmp_path / "other" / tokenizer_folder.name
    shutil.copytree(tokenizer_folder, other)
    done = run("report", folder, "--against", other, "--input", tmp_path / "a.txt", "--json")
    assert [one["name"] for one in json.loads(done.stdout)["tokenizers"]] == [folder, str(other)]


def test_file_names_that_are_not_unicode_do_no_harm(texts: list[str], tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text(texts[0], encoding="utf-8")
    assert run("train", "--input", tmp_path / name, "--vocab-size", 400, "--out", tmp_path / "t").returncode == 0
    assert run("report", tmp_path / "t", "--input", tmp_path / name).returncode == 0


def test_encode_and_decode_on_the_command_line(tokenizer_folder: Path, codec: Codec) -> None:
    encoded = json.loads(run("encode", tokenizer_folder, "</s> 道", "--bos", "--eos", "--json").stdout)
    assert encoded["ids"] == codec.encode("</s> 道", bos=True, eos=True)
    assert encoded["pieces"] == [codec.piece(token_id) for token_id in encoded["ids"]]
    assert run("decode", tokenizer_folder, *encoded["ids"]).stdout == "</s> 道".encode()
    assert run("encode", tokenizer_folder, "").stdout == b"\n"


@pytest.mark.parametrize("command, words", [("encode", "no text to encode"), ("decode", "no ids to decode")])
def test_what_is_missing_is_said(
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenizer", command, str(tokenizer_folder)])
    with pytest.raises(SystemExit):
        main()
    error = capfd.readouterr().err
    assert error.startswith(f"error: {words}: give ")
    assert "--file" in error


ERRORS: dict[str, tuple[list[str], str]] = {
    "no such file": (["train", "--input", "{tmp}/absent.txt", "--vocab-size", "600", "--out", "{tmp}/t"], "absent.txt"),
    "empty corpus": (["train", "--input", "{tmp}/empty.txt", "--vocab-size", "600", "--out", "{tmp}/t"], "no text"),
    "cut corpus": (["train", "--input", "{tmp}/cut.jsonl.gz", "--vocab-size", "600", "--out", "{tmp}/t"], "cut"),
    "no weight": (["train", "--input", "{tmp}/a.txt=x", "--vocab-size", "600", "--out", "{tmp}/t"], "not a weight"),
    "a name in train": (
        ["train", "--input", "en={tmp}/a.txt", "--vocab-size", "600", "--out", "{tmp}/t"],
        "train takes PATH or PATH=WEIGHT, and no names",
    ),
    "a name and a weight in train": (
        ["train", "--input", "en={tmp}/a.txt=2", "--vocab-size", "600", "--out", "{tmp}/t"],
        "train takes PATH or PATH=WEIGHT, and no names: leave out en=",
    ),
    "a weight in a report": (["report", "{tokenizer}", "--input", "{tmp}/a.txt=2"], "weights belong to train"),
    "a name and a weight in a report": (
        ["report", "{tokenizer}", "--input", "en={tmp}/a.txt=0.5"],
        "weights belong to train; report takes PATH or NAME=PATH",
    ),
    "weight zero": (["train", "--input", "{tmp}/a.txt=0", "--vocab-size", "600", "--out", "{tmp}/t"], "above 0"),
    "too large": (["train", "--input", "{tmp}/a.txt", "--vocab-size", "9999", "--out", "{tmp}/t"], "largest possible"),
    "sample too small": (
        ["train", "--input", "{tmp}/a.txt", "--vocab-size", "600", "--out", "{tmp}/t", "--sample-bytes", "9"],
        "at least 100000",
    ),
    "unknown type": (
        ["train", "--input", "{tmp}/a.txt", "--vocab-size", "600", "--out", "{tmp}/t", "--model-type", "word"],
        "bpe or unigram",
    ),
    "fixed name": (
        ["train", "--input", "{tmp}/a.txt", "--vocab-size", "600", "--out", "{tmp}/t", "--user-symbol", "</s>"],
        "fixed ids",
    ),
    "room for symbols": (
        ["train", "--input", "{tmp}/a.txt", "--vocab-size", "600", "--out", "{tmp}/t", "--reserve", "340"],
        "at least 612",
    ),
    "occupied": (["train", "--input", "{tmp}/a.txt", "--vocab-size", "600", "--out", "{tokenizer}"], "--overwrite"),
    "no tokenizer": (["encode", "{tmp}/absent", "text"], "no such tokenizer"),
    "text twice": (["encode", "{tokenizer}", "text", "--file", "{tmp}/a.txt"], "either TEXT or --file, not both"),
    "ids twice": (["decode", "{tokenizer}", "5", "--file", "{tmp}/a.txt"], "either IDS or --file, not both"),
    "not UTF-8": (["encode", "{tokenizer}", "--file", "{tmp}/latin.txt"], "not UTF-8"),
    "no file": (["encode", "{tokenizer}", "--file", "{tmp}/absent"], "absent"),
    "no id": (["decode", "{tokenizer}", "12", "x"], "not an id"),
    "id too large": (["decode", "{tokenizer}", "99999"], "outside the vocabulary"),
    "id much too large": (["decode", "{tokenizer}", "9" * 5000], "not an id"),
    "nothing to report on": (["report", "{tokenizer}", "--input", "{tmp}/empty.txt"], "no text"),
    "nothing to judge": (["report", "{tmp}/absent", "--input", "{tmp}/a.txt"], "absent: No such file"),
    "no model": (["report", "{tokenizer}", "--against", "{tmp}/a.txt", "--input", "{tmp}/a.txt"], "a.txt: not a whole"),
    "no tokenizer.json": (
        ["report", "{tokenizer}", "--against", "x={tmp}/odd.json", "--input", "{tmp}/a.txt"],
        "odd.json: not a tokenizer.json",
    ),
    "no input": (["report", "{tokenizer}", "--input", "en={tmp}/absent.txt"], "absent.txt: no such file"),
    "picture of unknown kind": (
        ["report", "{tokenizer}", "--input", "{tmp}/a.txt", "--plot", "{tmp}/a.gif"],
        "must end in .png",
    ),
    "picture nowhere": (
        ["report", "{tokenizer}", "--input", "{tmp}/a.txt", "--plot", "{tmp}/absent/a.png"],
        "cannot write into the folder",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_exit_code_2(
    name: str,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("a few words")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "odd.json").write_text("{}")
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    before = sorted(tmp_path.iterdir())
    arguments, message = ERRORS[name]
    filled = [argument.format(tmp=tmp_path, tokenizer=tokenizer_folder) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["tokenizer", *filled])
    with pytest.raises(SystemExit) as caught:
        main()
    output = capfd.readouterr()
    lines = output.err.splitlines()
    assert (caught.value.code, len(lines), output.out) == (2, 1, ""), output.err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert sorted(tmp_path.iterdir()) == before


def test_an_error_ends_the_process_with_code_2() -> None:
    done = run("encode", "absent-folder", "text")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
