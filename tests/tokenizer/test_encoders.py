"""Differential fuzz: whatever the text and the model, the codec's ids are those of SentencePieceProcessor.encode."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from tokenizer.codec import Codec
from tokenizer.folder import MODEL_FILE

STRINGS = 2500  # a model

SPACES = " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
SPELLINGS = (
    "<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<0xE2>", "<|endoftext|>", "<|reserved_0|>", "[MASK]", "\u2581",
    "\u2585", "\u2581\u2581", " \u2581 ", "\x00", "\x01", "\ufffd", "\ufffe", "\U0010ffff", "ﷺ", "ﬁ", "①", "가", "각",
    "İ", "ß",
)  # fmt: skip
EMOJI = ("👩‍👩‍👧‍👦", "👍🏽", "🇨🇳🇩🇪", "🏳️‍🌈", "❤️", "1️⃣", "\u200d", "\ufe0f", "🧑🏿‍🚀")
MARKS = "\u0300\u0301\u0308\u0323\u0345\u20dd\u093f\u0bbe\u0e31\u302a\u3099\U0001d165"
RTL = "שלום עולם مرحبا بالعالم\u202e\u202c\u200f\u200e\u061c "


def any_character(chance: random.Random) -> str:
    """Of any plane; one, two, three and four bytes of UTF-8 equally often."""
    code = chance.randrange(chance.choice((0x80, 0x800, 0x10000, 0x110000)))
    return chr(code) if not 0xD800 <= code < 0xE000 else "\ue000"


def strings(seed: int, words: list[str], pieces: list[str]) -> Iterator[str]:
    """Strings of many kinds, each a mixture of fragments of one to three kinds."""
    chance = random.Random(seed)
    kinds: list[Callable[[], str]] = [
        lambda: chance.choice(words),
        lambda: chance.choice(words).upper(),
        lambda: chance.choice(pieces).replace("\u2581", " "),
        lambda: chance.choice(pieces),
        lambda: any_character(chance),
        lambda: chr(chance.randrange(0x4E00, 0xA000)),
        lambda: chance.choice(SPACES),
        lambda: chance.choice(SPACES) * chance.randrange(40),
        lambda: any_character(chance) * chance.randrange(100),
        lambda: chance.choice(SPELLINGS),
        lambda: chance.choice(EMOJI),
        lambda: chance.choice("aeéxнわ") + "".join(chance.choices(MARKS, k=chance.randrange(6))),
        lambda: "".join(chance.choices(RTL, k=chance.randrange(8))),
        lambda: str(chance.randrange(10 ** chance.randrange(1, 20))),
        lambda: "".join(chance.choices("ab", k=chance.randrange(90))),
        lambda: "\x00" * chance.randrange(5),
    ]
    yield from ("", *SPELLINGS, *SPACES, *EMOJI)
    for _ in range(STRINGS):
        mixture = chance.sample(kinds, chance.randint(1, 3))
        yield "".join(chance.choice(mixture)() for _ in range(chance.choice((1, 2, 5, 20))))
    yield "".join(
        map(chr, (*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE0200), *range(0x10FF00, 0x110000)))
    )


LOSSLESS: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "byte_fallback": True,
    "pad_id": 3,
    "vocab_size": 1200,
    "max_sentence_length": 1 << 20,
    "minloglevel": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bpe": ("fastbpe", {"model_type": "bpe", "add_dummy_prefix": False}),
    "bpe, dummy prefix": ("fastbpe", {"model_type": "bpe"}),
    "bpe, across spaces": (
        "fastbpe",
        {
            "model_type": "bpe",
            "add_dummy_prefix": False,
            "split_by_whitespace": False,
            "split_by_unicode_script": False,
        },
    ),
    "bpe, no bytes": ("fastbpe", {"model_type": "bpe", "byte_fallback": False}),
    "bpe, control symbols": ("fastbpe", {"model_type": "bpe", "control_symbols": "<|reserved_0|>,<|endoftext|>"}),
    "bpe, symbols in text": ("sentencepiece", {"model_type": "bpe", "user_defined_symbols": "<|endoftext|>,道可"}),
    "bpe, nfkc": ("sentencepiece", {"model_type": "bpe", "normalization_rule_name": "nfkc"}),
    "bpe, spaces squeezed": ("sentencepiece", {"model_type": "bpe", "remove_extra_whitespaces": True}),
    "unigram": ("sentencepiece", {"model_type": "unigram", "add_dummy_prefix": False}),
    "unigram, dummy prefix, nfkc": ("sentencepiece", {"model_type": "unigram", "normalization_rule_name": "nfkc"}),
}


@pytest.fixture(scope="module", params=MODELS)
def both(
    request: pytest.FixtureRequest, texts: list[str], fast: object
) -> tuple[Codec, sentencepiece.SentencePieceProcessor]:
    """A codec and SentencePiece, of one model of each kind."""
    encoder, options = MODELS[request.param]
    sample = [*texts[:2], texts[-1]] if options["model_type"] == "unigram" else [*texts[:5], texts[-1]]
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample), model_writer=writer, **{**LOSSLESS, **options}
    )
    codec = Codec(Path(request.param), {MODEL_FILE: writer.getvalue()})
    assert codec.encoder == encoder
    return codec, sentencepiece.SentencePieceProcessor(model_proto=writer.getvalue())


def assert_same(
    codec: Codec, reference: sentencepiece.SentencePieceProcessor, texts: list[str], *, unknown: bool
) -> None:
    controls = set(codec.control_ids.values()) - ({codec.unk_id} if unknown else set())
    controls |= {token_id for token_id in range(codec.vocab_size) if reference.is_control(token_id)}
    for text, ids in zip(texts, codec.encode_documents(texts), strict=True):
        right = reference.encode(text)
        assert ids.dtype == np.uint32
        assert ids.tolist() == right, f"{text[:300]!a}"
        assert controls.isdisjoint(right), f"{text[:300]!a}"


def test_ids_are_those_of_sentencepiece(
    both: tuple[Codec, sentencepiece.SentencePieceProcessor], texts: list[str]
) -> None:
    codec, reference = both
    words = " ".join(texts[:3]).split()[:3000]
    pieces = [codec.piece(token_id) for token_id in range(codec.vocab_size)]
    fuzz = list(strings(sum(map(ord, str(codec.folder))), words, pieces))
    unknown = not any(map(codec.is_byte, range(codec.vocab_size)))
    assert_same(codec, reference, fuzz, unknown=unknown)
    assert_same(codec, reference, fuzz, unknown=unknown)  # out of the caches
    assert_same(codec, reference, texts, unknown=unknown)
    for text in fuzz[:: len(fuzz) // 50]:
        assert codec.encode(text) == reference.encode(text)
        assert codec.encode(text, bos=True, eos=True) == [codec.bos_id, *reference.encode(text), codec.eos_id]


@pytest.mark.parametrize("both", [name for name, (encoder, _) in MODELS.items() if encoder == "fastbpe"], indirect=True)
def test_words_of_half_a_million_characters(both: tuple[Codec, sentencepiece.SentencePieceProcessor]) -> None:
    codec, reference = both
    for letters in ("a", "etaoin", " ", "\u2581", "\x00", "道可", "\U0001f600", "ab ", "e\u0301"):
        text = "".join(random.Random(0).choices(letters, k=500_000))
        assert codec.encode(text) == reference.encode(text), letters


def test_the_sample_corpus(texts: list[str], codec: Codec) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=(codec.folder / MODEL_FILE).read_bytes())
    folder = Path(__file__).resolve().parents[2] / "data_pipeline" / "sample_corpus"
    sample = [
        json.loads(line)["text"] for path in sorted(folder.glob("*.jsonl")) for line in path.open(encoding="utf-8")
    ]
    assert_same(codec, reference, sample, unknown=False)
