"""Proof at load that a fast encoder gives SentencePiece's ids, on texts made to bring differences out.

Which texts, and what for:

- every piece of the vocabulary spelled out, so that each merge is made and every place inside a piece is passed;
- every piece overlapping its next in rank, as `ab` and `bc` do in `abc`, where the better score must win;
- chains of pieces, of any rank or near in rank, of which each begins with the last character of the one before: long
  texts without a place to cut;
- runs of one character, random sequences of pieces, random characters of all planes, the probe text, nothing at all.

Two faults are found for certain in a trained vocabulary, where each piece was made, when its turn came, out of two
that stand side by side in it by the merges before. A merge that gives another's piece: the piece spelled out shows it.
Two neighbouring merges X·Y and Y·Z in the wrong order: wherever they compete, the text XYZ by itself shows it, because
no merge has crossed its ends yet; and where they share no symbol, they don't disturb each other.

What can be missed: merges distant in rank in the wrong order (caught if a chain has them, more likely the more others
stand between), what shows only in texts of many kilobytes, what depends on chance, as threads do. For those there are
the tests, and the second encoding of random documents in production.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise, starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenizer.model_file import ModelFile, PieceType, TokenizerError
from tokenizer.reference import Encoder, split

ADVICE = "report the text; with tokenizer/fastbpe/_core* removed, SentencePiece itself encodes"

_GROUP = 32  # spellings in one text: one a text takes SentencePiece five times as long, all in one twice
_CHAINS = 3000
_SEQUENCES = 300
_RUNS = 60
_RANDOM_TEXTS = 200


def self_test(encoder: Encoder, reference: Encoder, model: ModelFile, probe: str, *, seed: int = 0) -> None:
    """Raise TokenizerError, naming the text, unless both encoders give the same ids for all texts.

    The encoder gets them twice: the second time they come out of its caches.
    """
    texts = list(probe_texts(model, probe, seed=seed))
    raw = [text.encode("utf-8") for text in texts]
    expected = reference.encode(raw)
    for _ in range(2):
        given = encoder.encode(raw)
        if all(map(np.array_equal, given, expected)):
            continue
        for text, ids, right in zip(texts, split(*given), split(*expected), strict=True):
            if not np.array_equal(ids, right):
                raise TokenizerError(
                    f"the encoder fails its self-test: {difference(ids, right)} {text!a:.200}; {ADVICE}"
                )
        raise AssertionError("equal ids text by text, unequal ones as a whole")


def difference(ids: npt.NDArray[Any], right: npt.NDArray[Any]) -> str:
    """Where two unequal rows of ids part, in words that a text may follow."""
    shorter = min(len(ids), len(right))
    apart = np.flatnonzero(ids[:shorter] != right[:shorter])
    if not len(apart):
        return f"{len(ids)} tokens where SentencePiece gives {len(right)}, in"
    place = int(apart[0])
    return f"token {place} is {ids[place]} where SentencePiece gives {right[place]}, in"


def probe_texts(model: ModelFile, probe: str, *, seed: int = 0) -> Iterator[str]:
    """The texts named above, of at most some kilobytes each. The same seed gives the same ones."""
    chance = random.Random(seed)
    pieces = [piece.replace("\u2581", " ") for piece in model.pieces]
    known = set("".join(pieces))
    foreign = next((chr(code) for code in range(1, 0xD800) if chr(code) not in known), "")
    normal = np.flatnonzero(model.types == PieceType.NORMAL)
    ranked = [pieces[i] for i in normal[np.argsort(-model.scores[normal], kind="stable")] if pieces[i]]

    yield from ("", " ", probe)
    apart = [*pieces, *chain.from_iterable(starmap(_overlapping, pairwise(ranked)))]
    for start in range(0, len(apart), _GROUP):
        yield foreign + foreign.join(apart[start : start + _GROUP])
    for number, text in enumerate(_chains(ranked, chance)):
        yield text.removeprefix(" ") if model.add_dummy_prefix and number % 4 < 2 else text
    for _ in range(_SEQUENCES):
        yield "".join(chance.choices(pieces, k=chance.randrange(40)))
    for character in chance.choices(sorted(known), k=_RUNS):
        yield character * chance.randrange(300)
    for _ in range(_RANDOM_TEXTS):
        yield "".join(_random_character(chance) for _ in range(chance.randrange(40)))


def _chains(ranked: list[str], chance: random.Random) -> Iterator[str]:
    beginning_with = defaultdict(list)
    for rank, piece in enumerate(ranked):
        if len(piece) > 1:
            beginning_with[piece[0]].append(rank)
    for number in range(_CHAINS if ranked else 0):
        rank = chance.randrange(len(ranked))
        text = ranked[rank]
        for _ in range(60 if number % 50 == 0 else chance.choice((1, 1, 1, 2, 2, 3, 4, 8))):
            ranks = beginning_with.get(text[-1]) or [rank]
            if number % 2:
                rank = chance.choice(ranks)
            else:  # the nearest on one side or the other
                rank = ranks[min(max(bisect(ranks, rank) - chance.randrange(2), 0), len(ranks) - 1)]
            text += ranked[rank][1:]
        yield text


def _overlapping(one: str, other: str) -> list[str]:
    """Every text shorter than both together that begins with one of two pieces and ends with the other."""
    texts = []
    for first, second in ((one, other), (other, one)):
        length = second.find(first[-1]) + 1
        while 0 < length < min(len(first), len(second)):
            if first.endswith(second[:length]):
                texts.append(first + second[length:])
            length = second.find(first[-1], length) + 1
    return texts


def _random_character(chance: random.Random) -> str:
    """Any character; one, two, three and four bytes of UTF-8 equally often."""
    code = chance.randrange(chance.choice((0x80, 0x800, 0x10000, 0x110000)))
    return chr(code) if not 0xD800 <= code < 0xE000 else " "
