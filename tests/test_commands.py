"""What all five command lines have in common, each run as a user runs it: a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pretrain.config import parse_recipe, to_toml
from tests.command_line import run_command
from tests.test_papers import PACKAGES, commands, faults

ROOT = Path(__file__).resolve().parents[1]
VERBS = [(package, verb) for package in PACKAGES for verb in commands(package)]
WITHOUT_ARGUMENTS = [("launch", "check"), ("launch", "demo")]
# Imported by what a verb does, never by its help.
HEAVY = ("torch", "deepspeed", "pyarrow", "datasets", "matplotlib", "tensorboard")


def python(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Words go in and come out in UTF-8, whatever the language of the machine."""
    return subprocess.run(
        [sys.executable, *(str(argument).encode() for argument in arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONUTF8": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def command(package: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command whose imports were tested elsewhere: the process has them in memory."""
    environment = {**os.environ, "PYTHONUTF8": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return run_command(package, *arguments, environment=environment)


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on stdout, and on stderr one line that says all these words."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("package, verb", [*((package, None) for package in PACKAGES), *VERBS])
def test_help_ends_with_examples_and_comes_without_heavy_imports(package: str, verb: str | None) -> None:
    done = python("-X", "importtime", "-m", package, *([verb] if verb else []), "--help")
    assert done.returncode == 0
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "typer" in imported
    assert not imported & set(HEAVY)
    _, heading, examples = done.stdout.rpartition("\n  Examples:\n")
    assert heading
    lines = [line.strip() for line in examples.splitlines()]
    assert all(line.startswith((f"python -m {package} ", f"deepspeed --module {package} ")) for line in lines)
    assert verb is None or any(line.split()[3] == verb for line in lines)
    assert not faults(examples)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_argument_means_help(package: str) -> None:
    done = python("-m", package)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: python -m {package} ")


# ---------------------------------------------------------------- usage errors


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_verb_is_one_line(package: str) -> None:
    assert_one_line(python("-m", package, "frob"), "frob", "--help")


@pytest.mark.parametrize("package", PACKAGES)
def test_without_a_stderr_errors_are_not_on_stdout(package: str) -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", package, "frob"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("package, verb", VERBS)
def test_an_unknown_option_is_one_line(package: str, verb: str) -> None:
    assert_one_line(command(package, verb, "--frob"), "--frob", "--help")


@pytest.mark.parametrize("package, verb", [pair for pair in VERBS if pair not in WITHOUT_ARGUMENTS])
def test_a_missing_argument_is_one_line(package: str, verb: str) -> None:
    assert_one_line(command(package, verb), "Missing", "--help")


@pytest.mark.parametrize(
    "verb, option",
    [
        ("tokenizer train", "--vocab-size"),
        ("data_pipeline prepare", "--workers"),
        ("data_pipeline inspect", "--document"),
        ("data_pipeline trace", "--step"),
        ("model verify", "--seed"),
        ("pretrain plan", "--world-size"),
        ("pretrain evaluate", "--batch-size"),
        ("pretrain generate", "--top-p"),
        ("launch run", "--ranks"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_line(verb: str, option: str) -> None:
    assert_one_line(command(*verb.split(), option, "many"), option, "--help")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tokenizer", "encode", "absent\nfolder", "text"],
        ["data_pipeline", "verify", "absent\nfolder"],
        ["model", "count", "absent\nfile"],
        ["pretrain", "plan", "absent\nfile"],
        ["launch", "run", "absent\nfile"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_error_is_one_line_whatever_it_tells(arguments: list[str]) -> None:
    assert_one_line(command(*arguments), "absent")


# ---------------------------------------------------------------- the ends of a process


@pytest.mark.parametrize(
    "package, form", [*((package, "{}/__init__.py") for package in PACKAGES), ("pretrain", "{}.py")]
)
def test_a_package_of_our_name_from_elsewhere_is_named(package: str, form: str, tmp_path: Path) -> None:
    sibling = "model" if package != "model" else "tokenizer"
    impostor = tmp_path / "elsewhere" / form.format(sibling)
    impostor.parent.mkdir(parents=True)
    impostor.touch()
    path = os.pathsep.join([str(tmp_path / "elsewhere"), str(ROOT)])
    done = python("-m", package, "--help", cwd=tmp_path, PYTHONPATH=path)
    assert_one_line(done, f"package {sibling} would come from {impostor}", f"not from {ROOT}")


@pytest.mark.parametrize("arguments", [*([package] for package in PACKAGES), ["model", "count", "mini"]])
def test_a_reader_that_leaves_is_not_told_so(arguments: list[str]) -> None:
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [*([package] for package in PACKAGES), ["model", "count", "mini"]])
def test_a_closed_stdout_is_no_error(arguments: list[str]) -> None:
    """As `>&-` leaves it: Python has no sys.stdout then."""
    assert_silent_with_closed_stdout(*arguments)


def assert_silent_with_closed_stdout(*arguments: object) -> None:
    command = ["bash", "-c", '"$@" >&-', "bash", sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


ENDLESS_VERIFY = """
import model.verify, sys
once = model.verify.check_shapes
def for_ever(*arguments):
    while True:
        once(*arguments)
model.verify.check_shapes = for_ever
from model.__main__ import main
sys.argv = ["model", "verify", "mini"]
main()
"""


def test_an_interrupt_ends_without_a_traceback() -> None:
    """In the midst of the second check, which is made to last: the interrupt cannot come too late."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", ENDLESS_VERIFY],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("1. parameters")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "")


# ---------------------------------------------------------------- --json


def strictly(text: str) -> Any:
    """The value of JSON as its standard has it: Python's parser alone takes NaN and Infinity too."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def report(*arguments: object) -> Any:
    done = python("-m", *arguments)
    assert done.returncode == 0, done.stderr
    return strictly(done.stdout)


def test_the_rule_sees_what_is_no_json() -> None:
    assert strictly('{"a": [1e5, null]}') == {"a": [1e5, None]}
    for constant in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(AssertionError, match=constant):
            strictly(f'{{"a": [{constant}]}}')


def test_every_report_is_strict_json(tmp_path: Path) -> None:
    """The whole road in its smallest form; a source of one short document has no held-out text and no window."""
    lines = (ROOT / "data_pipeline" / "sample_corpus" / "english.jsonl").read_text(encoding="utf-8").splitlines()
    text, short = tmp_path / "text.jsonl", tmp_path / "short.jsonl"
    text.write_text("\n".join(lines[:12]) + "\n", encoding="utf-8")
    short.write_text('{"text": "道"}\n', encoding="utf-8")
    tokenizer, data = tmp_path / "tokenizer", tmp_path / "data"

    trained = report("tokenizer", "train", "--input", text, "--vocab-size", 400, "--out", tokenizer, "--json")
    assert trained["vocab_size"] == 400
    ids = report("tokenizer", "encode", tokenizer, "道 </s>", "--json")["ids"]
    assert report("tokenizer", "decode", tokenizer, *ids, "--json") == {"text": "道 </s>"}
    assert_silent_with_closed_stdout("tokenizer", "decode", tokenizer, *ids)
    fitted = report("tokenizer", "report", tokenizer, "--input", text, "--input", f"short={short}", "--json")
    assert fitted["all"]["documents"] == 13

    prepare = ("data_pipeline", "prepare", f"text={text}", f"short={short}", "--tokenizer", tokenizer, "--out", data)
    assert report(*prepare, "--validation-fraction", 0.3, "--workers", 1, "--json")["sources"].keys() == {
        "text",
        "short",
    }
    assert report("data_pipeline", "verify", data, "--full", "--json")["ok"]
    assert report("data_pipeline", "inspect", data, "--json")["sources"]["short"]["validation"]["tokens"] in (0, 4)
    shown = report("data_pipeline", "inspect", data, "--source", "text", "--document", 0, "--json")
    assert shown["segments"][0]["ended"]

    recipe, run = tmp_path / "tiny.toml", tmp_path / "run"
    sizes = {"d_model": 64, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "d_ff": 64, "seq_len": 64}
    tables: dict[str, Any] = {
        "model": {"preset": "mini", "vocab_size": 400, **sizes},
        "data": {"path": str(data), "tokenizer": str(tokenizer)},
        "batch": {"global_batch_size": 1, "micro_batch_size": 1},
        "schedule": {"peak_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 1, "max_steps": 2},
        "evaluation": {"every_steps": 2, "max_tokens": 128},
        "checkpoint": {"every_steps": 2},
        "logging": {"tensorboard": False},
    }
    recipe.write_text(to_toml(parse_recipe(tables)), encoding="utf-8")
    assert report("model", "count", recipe, "--json")["parameters"] > 0
    assert len(report("model", "verify", recipe, "--json")["checks"]) == 5
    assert report("pretrain", "plan", recipe, "--device-memory", "2GB", "--json")["parameters"] > 0
    assert report("launch", "run", recipe, "--dry-run", "--json")["world_size"] == 1
    done = python("-m", "pretrain", "run", recipe, "--run", run)
    assert done.returncode == 0, done.stderr
    assert "all" in report("pretrain", "evaluate", run, "--json")["scores"]
    assert report("pretrain", "generate", run, "--prompt", "道", "--max-new-tokens", 2, "--json")["prompt"] == "道"
    assert "model.safetensors" in report("pretrain", "export", run, "--out", tmp_path / "hf", "--json")["files"]
    assert report("pretrain", "import", tmp_path / "hf", "--out", tmp_path / "back", "--json")["model"]["seq_len"] == 64
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        strictly(line)

    traced = report("data_pipeline", "trace", run, "--step", 2, "--json")
    assert (traced["run_step"], traced["reached"]) == (2, True)
    assert traced["checked_against"].endswith("step-00000002")
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    (read,) = (one for one in traced["reads"] if one["sample"] == 1 and one["stop"] > one["start"] + 1)
    assert read["text"] in documents[read["position"] - 1]
    back = report("data_pipeline", "trace", run, "--doc", f"text:{read['document']}", "--json")
    assert read["sample"] in [one["sample"] for one in back["reads"]]
    counted = report("data_pipeline", "verify", data, "--sample", 5, "--epoch", "--run", run, "--json")
    assert {one["windows_begun"] for one in counted["epoch"] if one["source"] == "text"} == {2}
    exported = report("data_pipeline", "convert", data, "--to", "nanogpt", "--out", tmp_path / "nanogpt", "--json")
    assert str(tmp_path / "nanogpt" / "text" / "train.bin") in exported["files"]
