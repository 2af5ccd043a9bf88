"""A small real tokenizer and real text: the standard library's own sources, Chinese, odd characters."""

import os
from pathlib import Path

import pytest

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
    """Source files of the standard library between 1 and 20 kB, always the same ones for one Python."""
    folder = Path(os.__file__).parent
    files = [path for path in sorted(folder.glob("*.py")) if 1000 < path.stat().st_size < 20_000]
    return [path.read_text(encoding="utf-8") for path in files[:count]]


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
