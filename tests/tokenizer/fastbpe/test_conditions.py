from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.tokenizer.fastbpe.models import BYTES, CONTROLS, ranked, write_model
from tokenizer.fastbpe.conditions import MAX_PIECE_BYTES, why_not
from tokenizer.fastbpe.encoder import FastBPE, Unsupported
from tokenizer.model_file import ModelFile, PieceType

MODEL = ModelFile.parse(
    write_model(CONTROLS + BYTES + ranked(["ab", "a", "b"]), byte_fallback=True, dummy_prefix=False)
)
LAST = len(MODEL.pieces) - 1


def retyped(place: int, kind: PieceType) -> ModelFile:
    types = MODEL.types.copy()
    types[place] = kind
    return dataclasses.replace(MODEL, types=types)


def renamed(place: int, text: str) -> ModelFile:
    return dataclasses.replace(MODEL, pieces=[*MODEL.pieces[:place], text, *MODEL.pieces[place + 1 :]])


def rescored(score: float) -> ModelFile:
    scores = MODEL.scores.copy()
    scores[-1] = score
    return dataclasses.replace(MODEL, scores=scores)


def test_this_model_is_supported() -> None:
    assert why_not(MODEL) is None
    assert why_not(dataclasses.replace(MODEL, add_dummy_prefix=True)) is None
    assert why_not(rescored(-1e30)) is None


@pytest.mark.parametrize(
    "model, reason",
    [
        (dataclasses.replace(MODEL, model_type="unigram"), "unigram"),
        (dataclasses.replace(MODEL, model_type="word"), "word"),
        (dataclasses.replace(MODEL, normalizer="nmt_nfkc", has_charsmap=True), "normaliser 'nmt_nfkc'"),
        (dataclasses.replace(MODEL, remove_extra_whitespaces=True), "extra spaces"),
        (dataclasses.replace(MODEL, escape_whitespaces=False), "keeps spaces"),
        (dataclasses.replace(MODEL, treat_whitespace_as_suffix=True), "ends of words"),
        (retyped(LAST, PieceType.USER_DEFINED), r"user-defined symbols \(1\)"),
        (retyped(LAST, PieceType.UNUSED), r"unused pieces \(1\)"),
        (rescored(float("nan")), "not finite"),
        (rescored(float("inf")), "not finite"),
        (renamed(LAST, "é" * (MAX_PIECE_BYTES // 2 + 1)), f"{MAX_PIECE_BYTES + 2} bytes"),
    ],
)
def test_each_condition_is_one_clause(model: ModelFile, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason) as caught:
        FastBPE.build(model)
    assert str(caught.value) == why_not(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model, reason",
    [
        (renamed(LAST, "a"), "is there twice"),
        (renamed(LAST, ""), "is empty"),
        (renamed(4, "<0x00>"), "255 byte pieces"),
        (renamed(4, "<0x0g>"), "not of the form"),
        (renamed(4, "<0x0a>"), "not of the form"),
        (retyped(0, PieceType.CONTROL), "0 unknown pieces"),
        (retyped(1, PieceType.UNKNOWN), "2 unknown pieces"),
        (dataclasses.replace(MODEL, byte_fallback=False), "256 byte pieces"),
        (dataclasses.replace(MODEL, types=np.where(MODEL.types == 6, 1, MODEL.types)), "0 byte pieces"),
    ],
)
def test_what_sentencepiece_would_not_load_is_refused(model: ModelFile, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        FastBPE.build(model)


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pieces, 262 scores"):
        FastBPE.build(dataclasses.replace(MODEL, pieces=["a", "b", "c"], types=MODEL.types))
