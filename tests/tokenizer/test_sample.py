from __future__ import annotations

import pytest

from tokenizer.codec import TokenizerError
from tokenizer.sample import MAX_CHARACTERS, MIN_SAMPLE_BYTES, Sample


def drawn(texts: list[str], *, max_bytes: int = 10_000_000, seed: int = 0, weight: float = 1.0) -> Sample:
    sample = Sample(max_bytes=max_bytes, seed=seed)
    for text in texts:
        sample.add(text, weight)
    return sample


def test_long_documents_are_cut_and_lose_nothing(texts: list[str]) -> None:
    for text in [*texts, "".join(texts), "no-space" * 20_000, "words and words " * 9_000, "\n" * 50_000, "中" * 40_000]:
        sample = drawn([text])
        pieces = [piece.decode() for piece in sample.pieces()]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= MAX_CHARACTERS
        assert sample.cuts == len(pieces) - 1


def test_cuts_fall_before_line_breaks_or_spaces_where_there_are_any(texts: list[str]) -> None:
    lines = drawn(["".join(texts)])
    assert all(piece.startswith(b"\n") for piece in list(lines.pieces())[1:])
    words = drawn(["some  words " * 9_000])
    assert all(piece.startswith(b" ") for piece in list(words.pieces())[1:])
    assert not any(piece.endswith((b" ", b"\n")) for piece in list(words.pieces())[:-1])
    assert (lines.cuts_inside_words, words.cuts_inside_words) == (0, 0)
    assert drawn(["x" * 100_000]).cuts_inside_words == 100_000 // MAX_CHARACTERS


def test_the_budget_holds_and_the_sample_spreads_over_the_stream() -> None:
    texts = [f"{number:06d} " + "x" * (number % 190) for number in range(40_000)]
    sample = drawn(texts, max_bytes=400_000)
    numbers = [int(piece[:6]) for piece in sample.pieces()]
    assert 390_000 < sample.sampled_bytes == sum(len(piece) for piece in sample.pieces()) <= 400_000
    assert numbers == sorted(numbers)
    for quarter in range(4):
        share = sum(number // 10_000 == quarter for number in numbers) / len(numbers)
        assert abs(share - 0.25) < 0.03
    mean_length = sample.sampled_bytes / len(sample)
    assert abs(mean_length - sample.text_bytes / sample.documents) < 3  # long texts are neither favoured nor shunned


def test_a_sample_depends_on_the_seed_alone() -> None:
    texts = [str(number) * 9 for number in range(20_000)]
    one, again, other = (list(drawn(texts, max_bytes=200_000, seed=seed).pieces()) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize("weight", [0.25, 1, 2, 2.5])
def test_a_weight_is_how_often_a_text_counts(weight: float) -> None:
    sample = drawn(["ten bytes!"] * 4_000, weight=weight)
    assert abs(len(sample) / 4_000 - weight) < 0.04


def test_weights_shape_a_sample_that_is_full() -> None:
    sample = Sample(max_bytes=MIN_SAMPLE_BYTES, seed=0)
    for _ in range(20_000):
        sample.add("a" * 10, 3)
        sample.add("b" * 10, 1)
    share = sum(piece.startswith(b"a") for piece in sample.pieces()) / len(sample)
    assert abs(share - 0.75) < 0.02


def test_the_reserved_character_costs_itself_only() -> None:
    sample = drawn(["left\u2585right", "\u2585\u2585"])
    assert list(sample.pieces()) == [b"left", b"right"]
    assert sample.reserved_characters == 3


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e6])
def test_senseless_weights_are_refused(weight: float) -> None:
    with pytest.raises(TokenizerError, match="weight"):
        drawn(["x"], weight=weight)
