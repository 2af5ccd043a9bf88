"""A small real tokenizer and real text: programs of the sample corpus, Chinese, odd characters."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_pipeline.__main__ import main
from data_pipeline.filters import is_validation
from data_pipeline.prepare import Options, prepare
from data_pipeline.shards import Collection
from tokenizer.codec import Codec
from tokenizer.train import train

CHINESE = "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？人不知而不愠，不亦君子乎？"
ODD_TEXTS = [
    "tab\tnewline\n\n  spaces   ",
    "NUL \0 inside",
    "</s><s><|endoftext|>",
    "\u2028\u0085\v\f",
    "😀é\ufeff",
    "\u2581",
]


def real_texts(count: int) -> list[str]:
    """Source files of the sample corpus between 1 and 20 kB, the same ones on every machine."""
    path = Path(__file__).parents[2] / "data_pipeline" / "sample_corpus" / "code.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_bytes().splitlines()]
    return [text for text in texts if 1000 < len(text.encode()) < 20_000][:count]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [*real_texts(60), *(CHINESE * n for n in range(1, 20)), *ODD_TEXTS]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    train(texts, folder, vocab_size=800, provenance={})
    return folder


@pytest.fixture(scope="session")
def other_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "other"
    train(texts, folder, vocab_size=700, provenance={})
    return folder


@pytest.fixture(scope="session")
def codec(tokenizer_folder: Path) -> Codec:
    return Codec.load(tokenizer_folder)


@dataclass(frozen=True)
class Stored:
    """A document that a collection holds: where its text came from, and the text."""

    path: str
    position: int
    text: str


@dataclass(frozen=True)
class SmallCollection:
    """Two sources of many small units, some documents dropped, and what it must hold: by source and split, in order."""

    collection: Collection
    inputs: Path
    documents: dict[str, dict[str, list[Stored]]]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_folder: Path) -> SmallCollection:
    """`lines`: a .jsonl cut into ranges and one of few lines, some of them no documents. `files`: .txt in groups."""
    folder = tmp_path_factory.mktemp("small")
    inputs = folder / "in"
    (inputs / "files").mkdir(parents=True)
    documents: dict[str, dict[str, list[Stored]]] = {
        name: {"train": [], "validation": []} for name in ("lines", "files")
    }

    def stored(source: str, path: Path, position: int, text: str) -> None:
        split = "validation" if is_validation(text.encode(), 0.2) else "train"
        documents[source][split].append(Stored(str(path), position, text))

    for name, lot in (("a.jsonl", texts[20:70]), ("b.jsonl", texts[70:75])):
        path, lines = inputs / name, []
        for number, text in enumerate(lot):
            if number % 7 == 3:
                lines.append(['{"text": "brief"}', "", '{"text": null}', "no json"][number // 7 % 4])
            lines.append(json.dumps({"text": text}))
            stored("lines", path, len(lines), text)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number, text in enumerate(texts[:20]):
        path = inputs / "files" / f"{number:02}.txt"
        path.write_text("" if number % 6 == 1 else text, encoding="utf-8", newline="")
        if number % 6 != 1:
            stored("files", path, 1, text)
    out = folder / "out"
    options = Options(validation_fraction=0.2, min_chars=6, unit_bytes=20_000)
    sources = {"lines": [inputs / "a.jsonl", inputs / "b.jsonl"], "files": [inputs / "files"]}
    return SmallCollection(prepare(sources, tokenizer_folder, out, options).collection, inputs, documents)


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A verb run in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["data_pipeline", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@contextmanager
def units_held_elsewhere(lock: Path, first: int = 0, count: int = 0) -> Iterator[None]:
    """Another process holds units of a `.prepare/lock` (count 0: all from `first` on) while the block runs."""
    code = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'ab')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX, int(sys.argv[3]), int(sys.argv[2]))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(lock), str(first), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.communicate()
