"""The core under AddressSanitizer and UndefinedBehaviorSanitizer, with assertions in the containers."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from pathlib import Path

import pytest
import sentencepiece

from tests.tokenizer.fastbpe.models import BYTES, CONTROLS, random_model, random_texts, ranked, write_model
from tests.tokenizer.fastbpe.test_encoder import long_segment_model, worst_texts
from tokenizer.fastbpe.build import UNITS
from tokenizer.model_file import ModelFile

ROOT = Path(__file__).resolve().parents[3]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]


@pytest.fixture(scope="session")
def driver(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    sources = [Path(__file__).with_name("driver.cpp"), *(ROOT / "tokenizer" / "fastbpe" / name for name in UNITS)]
    command = [compiler, "-std=c++17", "-O1", "-g1", *SANITIZERS, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr or "library not found" in done.stderr:
        pytest.skip(f"{compiler} has no sanitizer libraries: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return program


def run(driver: Path, folder: Path, model: bytes, texts: list[bytes], cache_bytes: int) -> list[list[int]]:
    parsed = ModelFile.parse(model)
    dump = [struct.pack("<IBB", len(parsed.pieces), parsed.byte_fallback, parsed.add_dummy_prefix)]
    for piece, score, kind in zip(parsed.pieces, parsed.scores, parsed.types, strict=True):
        dump.append(struct.pack("<BfI", kind, score, len(piece.encode())) + piece.encode())
    (folder / "model").write_bytes(b"".join(dump))
    (folder / "texts").write_bytes(b"".join(struct.pack("<I", len(text)) + text for text in texts))
    done = subprocess.run(
        [driver, folder / "model", folder / "texts", str(cache_bytes)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [[int(token_id) for token_id in line.split()] for line in done.stdout.splitlines()]


def compare(driver: Path, folder: Path, model: bytes, texts: list[bytes], cache_bytes: int) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert run(driver, folder, model, texts, cache_bytes) == [reference.encode(text) for text in texts]


@pytest.mark.parametrize("seed", range(6))
def test_random_models_and_texts(driver: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(1000 + seed)
    model, alphabet = random_model(chance)
    compare(driver, tmp_path, model, random_texts(chance, alphabet, 300), chance.choice([0, 400, 1 << 14]))


def test_random_bytes_and_long_segments(driver: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    noise = [chance.randbytes(chance.randint(0, 200)) for _ in range(1000)]
    lengths = [b"ab " * length for length in range(90)]
    # A long segment makes exactly the room that its ids need, when they are many; then short ones follow.
    first = worst_texts(300_000)["one word"] + b"x y" * 40
    compare(driver, tmp_path, long_segment_model(), [first, *noise, *lengths, *worst_texts(10_000).values()], 400)


def test_32_bit_ids(driver: Path, tmp_path: Path) -> None:
    pieces = [f"{number:x}z" for number in range(66_000)] + list("0123456789abcdefz")
    model = write_model(CONTROLS + BYTES + ranked(pieces), byte_fallback=True, dummy_prefix=True)
    chance = random.Random(0)
    compare(driver, tmp_path, model, [f"{chance.randrange(70_000):x}z é".encode() * 5 for _ in range(200)], 2000)


def test_learned_model_on_real_text(driver: Path, tmp_path: Path, trained: dict[str, bytes], texts: list[str]) -> None:
    documents = [text.encode() for text in texts[:3] + texts[-1:]]
    compare(driver, tmp_path, trained["dummy prefix, no bytes"], documents, 4000)


def test_the_sanitizers_watch(compiler: str, driver: Path, tmp_path: Path) -> None:
    """A program that reads one byte too many stops: silence in the tests above means something."""
    (tmp_path / "bad.cpp").write_text("int main(int n, char**) { char* p = new char[n]; return p[n] + p[0]; }")
    command = [compiler, "-O1", *SANITIZERS, str(tmp_path / "bad.cpp"), "-o", str(tmp_path / "bad")]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([tmp_path / "bad"], capture_output=True, text=True, check=False)
    assert "heap-buffer-overflow" in done.stderr
