"""The compiled core, or the one reason to skip these tests: a machine that can't build it."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from tokenizer.fastbpe import encoder
from tokenizer.fastbpe.encoder import FastBPE, Unsupported
from tokenizer.model_file import ModelFile

Check = Callable[..., FastBPE]


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C++ compiler. Without one nothing here can run; with one, a core that isn't built is a failure."""
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    found = next((name for name in names if name and shutil.which(name)), None)
    if found is None:
        pytest.skip("no C++ compiler: the compiled encoder can't be built, SentencePiece encodes")
    return found


@pytest.fixture(scope="session", autouse=True)
def _core_is_built(compiler: str) -> None:
    try:
        encoder._core()
    except Unsupported as reason:
        pytest.fail(f"{compiler} is here, but {reason}")


@pytest.fixture(scope="session")
def check() -> Check:
    """Encode texts by FastBPE and by SentencePiece and demand equal ids; the FastBPE that did it comes back."""

    def check(model: bytes, texts: list[bytes], *, cache_bytes: int = 1 << 16, fast: FastBPE | None = None) -> FastBPE:
        reference = sentencepiece.SentencePieceProcessor(model_proto=model)
        fast = fast or FastBPE.build(ModelFile.parse(model), cache_bytes=cache_bytes)
        ids, ends = fast.encode(texts)
        assert len(ends) == len(texts)
        begin = 0
        for text, end in zip(texts, ends.tolist(), strict=True):
            assert ids[begin:end].tolist() == reference.encode(text), text[:300]
            begin = end
        assert begin == len(ids)
        return fast

    return check


def train(texts: list[str], **options: object) -> bytes:
    """A SentencePiece model of 900 pieces, whitespace kept."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 20,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def trained(texts: list[str], tokenizer_folder: Path) -> dict[str, bytes]:
    """Models learned from real text, one of each kind."""
    return {
        "as we train": (tokenizer_folder / "tokenizer.model").read_bytes(),
        "dummy prefix, no bytes": train(texts, add_dummy_prefix=True, byte_fallback=False),
        "dummy prefix, bytes": train(texts, add_dummy_prefix=True, byte_fallback=True),
        "across spaces": train(texts, add_dummy_prefix=False, byte_fallback=True, split_by_whitespace=False),
    }
