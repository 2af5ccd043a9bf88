from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.fastbpe.models import BYTES, CONTROLS, ranked, write_model
from tests.tokenizer.plain_bpe import PlainBPE, swap_results, swap_scores
from tokenizer.codec import PROBE_TEXT, TokenizerError
from tokenizer.model_file import ModelFile, PieceType
from tokenizer.reference import Reference, split
from tokenizer.selftest import difference, probe_texts, self_test


class Remembered:
    """The right answers for the probe texts, found once."""

    def __init__(self, model: bytes) -> None:
        self.file = ModelFile.parse(model)
        self.texts = [text.encode() for text in probe_texts(self.file, PROBE_TEXT)]
        self.answer = Reference(model).encode(self.texts)

    def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        assert texts == self.texts
        return self.answer

    def fails(self, mutant: ModelFile, fast: Callable[[ModelFile], PlainBPE]) -> bool:
        try:
            self_test(fast(mutant), self, self.file, PROBE_TEXT)
        except TokenizerError:
            return True
        return False


@pytest.fixture(scope="module")
def right(tokenizer_folder: Path) -> Remembered:
    return Remembered((tokenizer_folder / "tokenizer.model").read_bytes())


@pytest.fixture(scope="module")
def learned(right: Remembered) -> list[int]:
    """The ids of pieces that merges make, the first merge first."""
    ids = np.flatnonzero(right.file.types == PieceType.NORMAL)
    ids = ids[np.argsort(-right.file.scores[ids], kind="stable")]
    return [token_id for token_id in ids.tolist() if len(right.file.pieces[token_id]) > 1]


def test_two_right_encoders_pass(right: Remembered, fast: Callable[[ModelFile], PlainBPE]) -> None:
    self_test(PlainBPE(right.file), right, right.file, PROBE_TEXT)
    self_test(fast(right.file), right, right.file, PROBE_TEXT)


@pytest.mark.parametrize("seed", range(4))
def test_two_merges_that_give_each_others_result_are_caught(
    seed: int, right: Remembered, learned: list[int], fast: Callable[[ModelFile], PlainBPE]
) -> None:
    chance = random.Random(seed)
    for _ in range(30):
        one, other = chance.sample(learned, 2)
        assert right.fails(swap_results(right.file, one, other), fast), (one, other)


def small_vocabulary(chance: random.Random, letters: str) -> list[str]:
    """Thirty pieces as training makes them: each of two symbols that the merges before leave side by side in it."""
    learned: list[str] = []
    while len(learned) < 30:
        word = "".join(chance.choices([*letters, *learned], k=2))
        model = ModelFile.parse(handmade([*learned, *letters]))
        ids, _ = PlainBPE(model).encode([word.replace("\u2581", " ").encode()])
        if len(ids) == 2 and len(word) < 5:
            learned.append(word)
    return learned


def handmade(words: Sequence[str], *, dummy_prefix: bool = False) -> bytes:
    return write_model([*CONTROLS, *BYTES, *ranked(words)], byte_fallback=True, dummy_prefix=dummy_prefix)


def test_neighbouring_scores_exchanged_are_caught_wherever_it_matters(fast: Callable[[ModelFile], PlainBPE]) -> None:
    """In small vocabularies, where every short text can be tried: what any of them shows, the self-test must find."""
    letters = "abc\u2581"
    short = ["".join(text).encode() for length in range(6) for text in product("abc ", repeat=length)]
    matters = 0
    for seed in range(12):
        words = [*small_vocabulary(random.Random(seed), letters), *letters]
        right = Remembered(handmade(words, dummy_prefix=seed % 2 == 1))
        ids, _ = fast(right.file).encode(short)
        first = len(right.file.pieces) - len(words)
        for one, other in pairwise(range(first, first + len(words) - len(letters))):
            mutant = swap_scores(right.file, one, other)
            if not np.array_equal(fast(mutant).encode(short)[0], ids):
                matters += 1
                assert right.fails(mutant, fast), (seed, right.file.pieces[one], right.file.pieces[other])
    assert matters > 20


def test_answers_out_of_a_cache_are_tested_too(right: Remembered) -> None:
    class Forgetful:
        calls = 0

        def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
            self.calls += 1
            ids, ends = right.answer
            return (ids, ends) if self.calls == 1 else (ids[::-1], ends)

    with pytest.raises(TokenizerError):
        self_test(Forgetful(), right, right.file, PROBE_TEXT)


def test_a_failure_names_the_text_in_one_line(right: Remembered) -> None:
    class Short:
        """Lacks the last id of one text."""

        def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
            rows = split(*right.answer)
            rows[2] = rows[2][:-1]
            return np.concatenate(rows), np.cumsum([len(row) for row in rows], dtype=np.uint64)

    with pytest.raises(
        TokenizerError, match=r"^[^\n]*tokens where SentencePiece gives \d+, in .The quick brown[^\n]*$"
    ):
        self_test(Short(), right, right.file, PROBE_TEXT)


def test_differences_are_told_by_place_and_ids() -> None:
    row = np.array([7, 8, 9])
    assert difference(np.array([7, 5, 9]), row) == "token 1 is 5 where SentencePiece gives 8, in"
    assert difference(row[:2], row) == "2 tokens where SentencePiece gives 3, in"
    assert difference(row, row[:0]) == "3 tokens where SentencePiece gives 0, in"


def test_the_texts_hold_what_they_should(right: Remembered) -> None:
    texts = list(probe_texts(right.file, PROBE_TEXT))
    together = "\x01".join(texts)
    assert texts == list(probe_texts(right.file, PROBE_TEXT))
    assert texts != list(probe_texts(right.file, PROBE_TEXT, seed=1))
    apart = set(together.split("\x01"))  # which is in no piece
    assert apart.issuperset(piece.replace("\u2581", " ") for piece in right.file.pieces)
    assert {ord(character) >> 16 for character in together} == set(range(17))
    assert max(map(len, texts)) < 10_000


@pytest.mark.parametrize("normal", [[], ["a"], [""], ["ab"]])
def test_tiny_vocabularies_have_texts_too(normal: list[str]) -> None:
    assert len(list(probe_texts(ModelFile.parse(handmade(normal)), PROBE_TEXT))) > 100
