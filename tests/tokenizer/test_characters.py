from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from tokenizer import characters
from tokenizer.characters import count_characters, normalizer


def test_characters_are_counted_over_all_texts() -> None:
    found = count_characters((text.encode() for text in ["aab", "道\n"] * 300), None)
    assert {chr(code): int(count) for code, count in enumerate(found.counts) if count} == {
        "a": 600, "b": 300, "道": 300, "\n": 300,
    }  # fmt: skip
    assert (found.texts, found.changed_texts, found.changed_characters) == (600, 0, {})


def test_counting_costs_by_the_character_and_not_by_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time it takes says nothing about the training, as with texts of a line."""
    batches: list[int] = []
    count = characters._count

    def counted(text: str, counts: Any) -> float:
        batches.append(len(text))
        return count(text, counts)

    monkeypatch.setattr(characters, "_count", counted)
    found = count_characters([b"a line\n"] * 20_000 + ["\U0010ffff".encode()] * 300_000, None)
    assert sum(batches) == 440_000
    assert len(batches) == 2
    assert [int(found.counts[code]) for code in (ord("a"), 0x10FFFF)] == [20_000, 300_000]


def test_the_space_mark_counts_as_a_space() -> None:
    found = count_characters([b"a b\xe2\x96\x81c"], None)
    assert found.counts[ord(" ")] == 2
    assert found.alphabet_size(1.0, " ") == 4


def test_the_alphabet_is_the_fewest_characters_and_the_required_ones() -> None:
    found = count_characters([b"a" * 90 + b"b" * 9 + b"c"], None)
    assert [found.alphabet_size(coverage, "") for coverage in (0.9, 0.91, 0.99, 0.995, 1.0)] == [1, 2, 2, 3, 3]
    assert found.alphabet_size(0.9, "ab\n") == 3


def test_the_default_coverage_is_the_highest_that_fits() -> None:
    text = "".join(chr(0x4E00 + rank) * (1 + 10**6 // (rank + 1) ** 2) for rank in range(5000))
    found = count_characters([text.encode()], None)
    assert found.fitting_coverage(5001, "\n") == 0.9995
    coverage = found.fitting_coverage(150, "\n")
    assert 0.98 < coverage < 0.9995
    assert found.alphabet_size(coverage, "\n") <= 150 < found.alphabet_size(coverage + 0.0005, "\n")
    assert found.fitting_coverage(10, "\n") == 0.98  # the least that SentencePiece takes


def test_nfkc_is_unicodes_and_leaves_the_layout_alone() -> None:
    normalize = normalizer("nfkc")
    assert normalize is not None
    assert normalizer("identity") is None
    layout = "a\tb\r\n\n   c\v\f\x85\u2028 \n"
    assert normalize(layout) == layout
    for text in ("ｆｕｌｌ，１２", "ﬁne ① ㎏ ½", "e\u0301", "\u3000\u00a0", "한국어"):
        assert normalize(text) == unicodedata.normalize("NFKC", text)


@pytest.fixture
def lossy() -> list[bytes]:
    return [text.encode() for text in ["plain", "１，２，３", "cafe\u0301", "\u3000"]]


def test_what_nfkc_changes_is_counted(lossy: list[bytes]) -> None:
    found = count_characters(lossy, normalizer("nfkc"))
    assert found.changed_characters == {"，": 2, "\u3000": 1, "１": 1, "２": 1, "３": 1}
    assert (found.texts, found.changed_texts) == (4, 3)
    assert [found.counts[ord(character)] for character in "ée, "] == [1, 0, 2, 1]
    assert found.loss() == (
        "nfkc does not give texts back as they were: it changes 3 of 4 texts of the sample and replaces 6 characters "
        "(2 × U+FF0C ，, 1 × U+3000, 1 × U+FF11 １); identity loses nothing"
    )
