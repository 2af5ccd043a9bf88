"""`make soak`: hundreds of megabytes through the codec and through SentencePiece, every id compared.

The text is the sample corpus under random mutations, as long as it takes; or, when the environment variable
ZEROHALF_CORPUS_DIR names a folder, the corpus that lies there, and then the same mutations of it.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from data_pipeline.corpus import Document, find_files, plan_units, read_piece
from tokenizer.codec import Codec
from tokenizer.train import train

pytestmark = pytest.mark.soak

SAMPLE_CORPUS = Path(__file__).resolve().parents[2] / "data_pipeline" / "sample_corpus"
CORPUS = Path(os.environ.get("ZEROHALF_CORPUS_DIR", SAMPLE_CORPUS))
VOCAB_SIZE = 16_000 if CORPUS == SAMPLE_CORPUS else 32_000
MAX_GROWTH_BYTES = 200_000_000


def corpus() -> Iterator[str]:
    """The documents as they are."""
    pieces = (piece for unit in plan_units(find_files(str(CORPUS)).files, unit_bytes=1 << 26) for piece in unit)
    for item in (item for piece in pieces for item in read_piece(piece, "text", lambda _: None)):
        if isinstance(item, Document):
            yield item.text


def mutated(texts: list[str], chance: random.Random) -> str:
    """A text made of one or several, changed in a way or two that no author would."""
    text = chance.choice(texts)
    for _ in range(chance.randint(1, 3)):
        way = chance.randrange(8)
        if way == 0:
            other = chance.choice(texts)
            text = text[: chance.randrange(len(text) + 1)] + other[chance.randrange(len(other) + 1) :]
        elif way == 1:
            text = chance.choice((str.upper, str.lower, str.swapcase, str.title))(text)
        elif way == 2:
            lines = text.split("\n")
            chance.shuffle(lines)
            text = "\n".join(lines)
        elif way == 3:
            for _ in range(chance.randrange(100)):
                place = chance.randrange(len(text) + 1)
                text = text[:place] + random_insertion(chance) + text[place:]
        elif way == 4:
            text = text.replace(" ", chance.choice(("", "  ", "\n", "\t", "\u3000", "\u2581")))
        elif way == 5:
            words = text.split(" ")
            chance.shuffle(words)
            text = " ".join(words)
        elif way == 6:
            text = text[::-1]
        elif chance.randrange(10) == 0:
            text = "".join(chance.choices(texts, k=100))
    return text


def random_insertion(chance: random.Random) -> str:
    code = chance.randrange(chance.choice((0x80, 0x800, 0x10000, 0x110000)))
    character = chr(code) if not 0xD800 <= code < 0xE000 else "</s>"
    return character * chance.choice((1, 1, 1, 2, 30))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp("sweep") / "tokenizer"
    train(corpus(), folder, vocab_size=VOCAB_SIZE, sample_bytes=20_000_000)
    codec = Codec.load(folder)
    assert codec.encoder == "fastbpe", codec.encoder_note
    return codec


@pytest.mark.parametrize(
    "workers, least_bytes", [({}, 200_000_000), ({"threads": 2}, 50_000_000), ({"processes": 2}, 50_000_000)], ids=str
)
def test_every_id_of_hundreds_of_megabytes(
    workers: dict[str, int], least_bytes: int, codec: Codec, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=(codec.folder / "tokenizer.model").read_bytes())
    chance = random.Random(str(workers))
    originals = []
    for text in corpus():
        originals.append(text)
        if len(originals) == 3000:
            break
    waiting: deque[str] = deque()
    read_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal read_bytes
        source = corpus()
        while read_bytes < least_bytes:
            text = next(source, None)
            if text is None or chance.randrange(4) == 0:
                text = mutated(originals, chance)
            read_bytes += len(text.encode("utf-8"))
            waiting.append(text)
            yield text

    documents = tokens = mismatches = 0
    peak_before = peak_bytes()
    for ids in codec.encode_documents(texts(), **workers):
        right = reference.encode(waiting.popleft(), return_type="numpy")
        documents += 1
        tokens += len(right)
        mismatches += len(ids) != len(right) or bool((ids != right).any())
    growth = peak_bytes() - peak_before
    with capsys.disabled():
        print(
            f"\n{workers or 'one thread'}: {documents} documents, {read_bytes} bytes, {tokens} tokens, "
            f"{mismatches} mismatches; memory grew by {growth / 1e6:.0f} MB"
        )
    assert not waiting
    assert read_bytes >= least_bytes
    assert mismatches == 0
    assert growth < MAX_GROWTH_BYTES


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
