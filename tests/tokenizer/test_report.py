from __future__ import annotations

import json

import pytest

from tokenizer.codec import Codec, TokenizerError
from tokenizer.report import report, total


def test_counts_are_those_of_the_texts_and_their_ids(codec: Codec, texts: list[str]) -> None:
    one = report(codec, "real", iter(texts))
    ids = [codec.encode(text) for text in texts]
    assert one.documents == len(texts)
    assert one.text_bytes == sum(len(text.encode()) for text in texts)
    assert one.tokens == sum(map(len, ids))
    assert one.words == sum(len(text.split()) for text in texts)
    assert one.characters == sum(map(len, texts))
    assert one.byte_tokens == sum(codec.is_byte(token_id) for document in ids for token_id in document)
    used = {token_id for document in ids for token_id in document if not codec.is_byte(token_id)}
    assert set(one.used.nonzero()[0].tolist()) == used
    assert one.round_trip_failures == one.space_mark_documents == 0
    figures = json.loads(json.dumps(one.figures()))
    assert figures["bytes_per_token"] == one.text_bytes / one.tokens
    assert figures["vocabulary_used"] == len(used) / (codec.vocab_size - 260)
    assert figures["vocabulary_used"] > 0.95


def test_characters_outside_the_vocabulary_are_byte_tokens(codec: Codec) -> None:
    figures = report(codec, "emoji", ["😀" * 10]).figures()
    assert (figures["tokens"], figures["byte_fallback_rate"], figures["bytes_per_token"]) == (40, 1.0, 1.0)


def test_the_space_mark_is_counted_apart_from_failures(codec: Codec) -> None:
    one = report(codec, "marks", ["a\u2581b", "plain", "\u2581\u2581"])
    assert (one.space_mark_documents, one.round_trip_failures) == (2, 0)


def test_all_sources_together(codec: Codec, texts: list[str]) -> None:
    parts = [report(codec, "first", texts[:3]), report(codec, "rest", texts[3:])]
    together, at_once = total(parts), report(codec, "all", texts)
    assert together.figures() == at_once.figures()


def test_nothing_gives_no_ratios(codec: Codec) -> None:
    figures = report(codec, "none", []).figures()
    assert figures["documents"] == 0
    assert figures["bytes_per_token"] is None


def test_a_lone_surrogate_is_refused(codec: Codec) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        report(codec, "bad", ["\ud800"])
