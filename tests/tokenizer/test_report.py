from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tokenizer.candidates import Candidate, Ids, open_candidate
from tokenizer.codec import Codec, TokenizerError
from tokenizer.model_file import PieceType
from tokenizer.report import (
    Placed,
    Source,
    as_data,
    figures,
    judge,
    remarks,
    renyi_efficiency,
    shown,
    source_figures,
    table,
    total,
)

LEARNED = ["a", "b", "ab", " ", "道", "never"]


class Toy(Candidate):
    """Greedy, longest piece first: simple enough to count by hand. Ids: 0 unknown, 1 special, 2 to 257 bytes."""

    name = "toy"
    kind = "toy"
    no_byte_fallback = None

    def __init__(self, *, loses: str = "") -> None:
        self.types = np.array(
            [PieceType.UNKNOWN, PieceType.CONTROL, *[PieceType.BYTE] * 256, *[PieceType.NORMAL] * len(LEARNED)],
            dtype=np.uint8,
        )
        self.spelling = [b"?", b"<s>", *(bytes([byte]) for byte in range(256)), *(one.encode() for one in LEARNED)]
        self._loses = loses

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        for text in texts:
            ids: list[int] = []
            place = 0
            while place < len(text):
                best = max((piece for piece in LEARNED if text.startswith(piece, place)), key=len, default="")
                ids += [258 + LEARNED.index(best)] if best else [2 + byte for byte in text[place].encode()]
                place += len(best) or 1
            yield np.array(ids, dtype=np.uint32)

    def decode(self, documents: Sequence[Ids]) -> list[str]:
        whole = (b"".join(self.spelling[token_id] for token_id in ids).decode() for ids in documents)
        return [text.replace(self._loses, "") if self._loses else text for text in whole]


def placed(*texts: str) -> list[Placed]:
    return [Placed(text, f"file:{number}") for number, text in enumerate(texts, 1)]


def toy(*texts: str, name: str = "source", **options: str) -> Source:
    return judge([Toy(**options)], name, placed(*texts))


def one_row(source: Source) -> dict[str, object]:
    return figures(source, source.usages[0])


# ---------------------------------------------------------------- by hand


def test_figures_by_hand() -> None:
    # ab · a | ab · é = "ab", " ", "a" and "ab", " ", two bytes
    source = toy("ab a", "ab é")
    assert (source.documents, source.text_bytes, source.characters, source.words) == (2, 9, 8, 4)
    row = one_row(source)
    assert row["tokens"] == 7
    assert row["bytes_per_token"] == 9 / 7
    assert row["tokens_per_word"] == 7 / 4
    assert row["tokens_per_character"] == 7 / 8
    assert (row["byte_tokens"], row["byte_fallback_rate"]) == (2, 2 / 7)
    assert (row["byte_characters"], row["byte_character_rate"]) == (1, 1 / 8)
    assert (row["pieces_used"], row["vocabulary_used"], row["pieces_never_seen"]) == (3, 3 / 6, 3)
    assert row["never_seen_examples"] == ["b", "道", "never"]
    assert [(one["text"], one["characters"], one["count"]) for one in row["longest_tokens"]] == [
        ("ab", 2, 2),
        (" ", 1, 2),
        ("a", 1, 1),
    ]
    frequent = [(one["text"], one["count"]) for one in row["most_frequent_tokens"]]
    assert frequent == [("ab", 2), (" ", 2), ("\\xa9", 1), ("\\xc3", 1), ("a", 1)]  # é is C3 A9
    shares = np.array([2, 2, 1, 1, 1]) / 7
    assert row["renyi_efficiency"] == pytest.approx(math.log((shares**2.5).sum()) / -1.5 / math.log(264))
    assert (row["unknown_tokens"], row["special_tokens"], row["round_trip_failures"]) == (0, 0, 0)


def test_characters_of_two_three_and_four_bytes_count_once() -> None:
    row = one_row(toy("éあ😀"))
    assert (row["byte_tokens"], row["byte_characters"], row["byte_character_rate"]) == (9, 3, 1.0)


def test_documents_that_come_back_changed_are_counted_and_named() -> None:
    source = toy("aaa", "a b a", " ", loses=" ")
    row = one_row(source)
    assert row["round_trip_failures"] == 2
    assert row["round_trip_examples"] == [
        {"place": "file:2", "character": 1, "expected": " b a", "got": "ba"},
        {"place": "file:3", "character": 0, "expected": " ", "got": ""},
    ]
    assert "CHANGED: 2 of 3 documents" in remarks(source)
    assert "file:2, character 1: '␣b␣a' became 'ba'" in remarks(source)


def test_a_special_id_or_an_unknown_one_out_of_text_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "encode", lambda self, texts: iter([np.array([1, 1, 0, 258], dtype=np.uint32)]))
    source = toy("<s><s>?a")
    row = one_row(source)
    assert (row["special_tokens"], row["unknown_tokens"]) == (2, 1)
    assert "SPECIAL: text became a special id 2 times" in remarks(source)
    assert "UNKNOWN: 1 tokens" in remarks(source)


def test_only_a_few_of_many_changes_are_kept() -> None:
    many = toy(*["a b"] * 40, loses=" ")
    for source, failures in ((many, 40), (total([many, toy(*["a b"] * 4, loses=" ")]), 44)):
        assert source.usages[0].round_trip_failures == failures
        assert len(source.usages[0].changed) == 5


# ---------------------------------------------------------------- Rényi efficiency


@pytest.mark.parametrize(
    "counts, alpha, expected",
    [
        ([5, 5, 5, 5], 2.5, 1.0),  # all alike
        ([5, 5, 5, 5], 1.0, 1.0),
        ([9, 0, 0, 0], 2.5, 0.0),  # one only
        ([9, 0, 0, 0], 1.0, 0.0),
        ([7, 7, 0, 0], 2.5, 0.5),  # log 2 / log 4, whatever alpha
        ([7, 7, 0, 0], 0.5, 0.5),
        ([3, 1], 2.0, -math.log2(9 / 16 + 1 / 16)),  # 0.678: the collision entropy in bits
        ([3, 1], 1.0, -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))),  # 0.811: Shannon's
        ([1, 1, 2], 3.0, math.log(2 / 64 + 8 / 64) / -2 / math.log(3)),
    ],
)
def test_renyi_efficiency_by_hand(counts: list[int], alpha: float, expected: float) -> None:
    assert renyi_efficiency(np.array(counts), alpha) == pytest.approx(expected, abs=1e-12)


def test_renyi_efficiency_goes_over_into_shannons_and_falls_with_alpha() -> None:
    counts = np.array([900, 60, 30, 9, 1, 0])
    around = [renyi_efficiency(counts, alpha) for alpha in (0.5, 1 - 1e-6, 1, 1 + 1e-6, 2.5, 10)]
    assert around == sorted(around, key=lambda value: -(value or 0))
    assert around[1] == pytest.approx(around[2], abs=1e-5)
    assert around[3] == pytest.approx(around[2], abs=1e-5)


def test_renyi_efficiency_of_nothing_is_none() -> None:
    assert renyi_efficiency(np.array([0, 0])) is None
    assert renyi_efficiency(np.array([5])) is None
    with pytest.raises(ValueError, match="above 0"):
        renyi_efficiency(np.array([1, 2]), 0)


# ---------------------------------------------------------------- words or characters


@pytest.mark.parametrize(
    "text, unit",
    [
        ("plain English words", "word"),
        ("Ελληνικά και русский текст, 한국어 문장", "word"),
        ("道可道，非常道。", "character"),
        ("これはペンです", "character"),
        ("ภาษาไทย", "character"),
        ("use make menuconfig 配置内核 here", "character"),  # more than a tenth
        ("a long English sentence that names one Chinese word, 道, and goes on", "word"),
        ("\U00020000" * 3, "character"),
        ("", "word"),
    ],
)
def test_text_without_spaces_is_measured_by_character(text: str, unit: str) -> None:
    assert toy(text).unit == unit


def test_a_sum_is_measured_in_words_only_if_all_sources_are() -> None:
    english, chinese = toy("a b " * 100), toy("道")
    assert total([english, english]).unit == "word"
    assert total([english, chinese]).unit == "character"
    assert total([english, toy()]).unit == "word"


# ---------------------------------------------------------------- real tokenizers


def test_counts_are_those_of_the_texts_and_their_ids(codec: Codec, tokenizer_folder: Path, texts: list[str]) -> None:
    source = judge([open_candidate(tokenizer_folder, "ours")], "real", placed(*texts))
    ids = [codec.encode(text) for text in texts]
    row = one_row(source)
    assert source.documents == len(texts)
    assert source.text_bytes == sum(len(text.encode()) for text in texts)
    assert source.words == sum(len(text.split()) for text in texts)
    assert source.characters == sum(map(len, texts))
    assert row["tokens"] == sum(map(len, ids))
    assert row["byte_tokens"] == sum(codec.is_byte(token_id) for document in ids for token_id in document)
    used = {token_id for document in ids for token_id in document if not codec.is_byte(token_id)}
    assert row["pieces_used"] == len(used)
    assert row["vocabulary_used"] == len(used) / (codec.vocab_size - 260)
    assert row["vocabulary_used"] > 0.95
    assert set(source.usages[0].never_seen().tolist()) == set(range(260, codec.vocab_size)) - used
    assert (row["round_trip_failures"], row["space_mark_documents"], row["special_tokens"]) == (0, 0, 0)


def test_the_space_mark_is_counted_apart_from_failures(tokenizer_folder: Path) -> None:
    source = judge([open_candidate(tokenizer_folder, "ours")], "marks", placed("a\u2581b", "plain", "\u2581\u2581"))
    row = one_row(source)
    assert (row["space_mark_documents"], row["round_trip_failures"]) == (2, 0)
    assert "U+2581 stood in 2 documents" in remarks(source)


def test_all_sources_together_are_as_one(tokenizer_folder: Path, texts: list[str]) -> None:
    candidates = [open_candidate(tokenizer_folder, "ours"), Toy()]
    parts = [judge(candidates, "first", placed(*texts[7:9])), judge(candidates, "rest", placed(*texts[9:]))]
    at_once = judge(candidates, "all", placed(*texts[7:]))
    together = source_figures(total(parts))
    assert {**together, "unit": None} == {**source_figures(at_once), "unit": None}


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    whole = source_figures(judge([Toy()], "x", placed(*texts[-4:], *"ab道")))
    monkeypatch.setattr("tokenizer.report._BATCH_CHARACTERS", 1)
    assert source_figures(judge([Toy()], "x", placed(*texts[-4:], *"ab道"))) == whole


def test_the_first_tokenizer_is_what_the_others_are_measured_by(tokenizer_folder: Path, texts: list[str]) -> None:
    source = judge([open_candidate(tokenizer_folder, "ours"), Toy()], "real", placed(*texts[8:]))
    ours, other = (figures(source, usage) for usage in source.usages)
    assert ours["tokens_to_first"] == 1.0
    assert other["tokens_to_first"] == other["tokens"] / ours["tokens"]
    assert other["tokens_to_first"] > 1.5


def test_nothing_gives_no_ratios() -> None:
    row = one_row(toy())
    assert row["tokens"] == 0
    ratios = ("tokens_to_first", "bytes_per_token", "tokens_per_word", "byte_fallback_rate", "renyi_efficiency")
    assert {row[key] for key in ratios} == {None}
    assert "-" in table([toy()])


def test_a_lone_surrogate_is_refused_by_its_place() -> None:
    with pytest.raises(TokenizerError, match="file:2: lone surrogate U\\+D800 at character 1"):
        toy("good", "a\ud800")


# ---------------------------------------------------------------- shown to people and programs


def test_the_data_is_plain_and_always_the_same(tokenizer_folder: Path, texts: list[str]) -> None:
    def data() -> str:
        candidates = [open_candidate(tokenizer_folder, "ours"), Toy()]
        sources = [
            judge(candidates, name, placed(*texts[part])) for name, part in (("a", slice(8, 10)), ("b", slice(10, 17)))
        ]
        return json.dumps(as_data(sources), allow_nan=False)

    assert data() == data()
    parsed = json.loads(data())
    assert [one["name"] for one in parsed["tokenizers"]] == ["ours", "toy"]
    assert [one["name"] for one in parsed["sources"]] == ["a", "b"]
    assert [row["tokenizer"] for row in parsed["all"]["results"]] == ["ours", "toy"]
    assert parsed["all"]["documents"] == 9
    assert parsed["tokenizers"][1]["pieces_learned"] == len(LEARNED)


def columns(line: str) -> int:
    """Terminal columns, for the characters of these tests: Han take two."""
    return sum(2 if "\u4e00" <= character <= "\u9fff" else 1 for character in line)


def test_wide_names_keep_the_columns_straight() -> None:
    lines = table([toy("ab", name="english"), toy("道" * 12_345, name="中文語料")]).splitlines()
    assert len({columns(line) for line in lines[1:]}) == 1
    assert lines[3].startswith("中文語料")


def test_the_table_of_one_tokenizer_leaves_out_what_compares() -> None:
    alone = table([toy("ab a")])
    assert "to first" not in alone
    assert "toy" not in alone
    both = table([judge([Toy(), Toy()], "source", placed("ab a"))])
    assert "to first" in both
    assert both.count("toy") == 2
    assert both.count("source") == 2  # the heading, and the first of two lines
    efficiency = math.log(3 * (1 / 3) ** 2.5) / -1.5 / math.log(264)
    row = f"source 1 0.00 toy 3 1.000 1.333 1.500 - 0.00% 0.00% 50.0% 3 {efficiency:.3f} 0"
    assert " ".join(both.splitlines()[2].split()) == row


def test_a_missing_rate_has_its_reason() -> None:
    level = Toy()
    level.no_byte_fallback = "every piece is made of bytes"
    source = judge([level], "source", placed("ab"))
    row = one_row(source)
    assert (row["byte_tokens"], row["byte_fallback_rate"], row["byte_character_rate"]) == (None, None, None)
    assert "no rate of byte tokens: every piece is made of bytes" in remarks(source)


def test_tokens_are_shown_in_one_line() -> None:
    assert shown("  a\n\t道\x00") == r"'␣␣a\n\t道\x00'"
    assert shown("x" * 100) == "'" + "x" * 40 + "'…"


def test_longest_tokens_and_those_never_seen_are_listed() -> None:
    said = remarks(toy("ab 道"))
    assert "2 characters, 1 times: 'ab'" in said
    assert "most frequent: 'ab' 33.3%, '␣' 33.3%, '道' 33.3%\n" in said
    assert "never seen: 3 learned pieces, the first: 'a' 'b' 'never'" in said


def test_parts_of_characters_are_shown_as_bytes() -> None:
    level = Toy()
    level.spelling[258 + LEARNED.index("never")] = b"\xe9\x81"
    assert "b'\\xe9\\x81'" in remarks(judge([level], "source", placed("ab")))
