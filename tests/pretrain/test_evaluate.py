"""Scores against numbers by hand: every token once, exact bytes, the same result on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.shards import DataFormatError, open_collection
from data_pipeline.stream import TokenStream
from model.loss import IGNORED, LossSum
from model.transformer import Transformer
from pretrain.config import parse_recipe
from pretrain.engine import process_group
from pretrain.evaluate import evaluate
from pretrain.runtime import Ranks
from tests.conftest import VOCAB_SIZE
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def uniform_model(inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None) -> LossSum:
    """Every token as likely as any other."""
    count = torch.tensor(int((targets != IGNORED).sum()))
    loss = count * math.log(VOCAB_SIZE)
    return LossSum(2 * loss, count, loss)  # a penalty beside the cross-entropy is no part of a score


def scores_of(path: Path, forward: Any, ranks: Ranks, **options: Any) -> dict[str, Any]:
    collection = open_collection(path)
    settings = {"seq_len": 64, "batch_size": 5, "max_tokens": None, "isolated": False, **options}
    return evaluate(
        forward,
        {name: source.splits["validation"] for name, source in collection.sources.items()},
        eos_id=collection.eos_id,
        vocab_size=VOCAB_SIZE,
        ranks=ranks,
        device=CPU,
        **settings,
    )


def test_a_uniform_model_scores_what_the_formula_says(collection: Path) -> None:
    """ln V nats a token; bits per byte = tokens · log2 V / bytes of source text, for each source and together."""
    scores = scores_of(collection, uniform_model, Ranks(0, 0, 1))
    sources = open_collection(collection).sources
    assert list(scores) == ["code", "english", "all"]
    tokens = text_bytes = 0
    for name, source in sources.items():
        split = source.splits["validation"]
        assert scores[name].tokens == split.tokens
        assert scores[name].loss == pytest.approx(math.log(VOCAB_SIZE), rel=1e-6)
        assert scores[name].bits_per_byte == pytest.approx(
            split.tokens * math.log2(VOCAB_SIZE) / split.text_bytes, rel=1e-6
        )
        assert scores[name].bytes_exact
        tokens, text_bytes = tokens + split.tokens, text_bytes + split.text_bytes
    assert scores["all"].tokens == tokens
    assert scores["all"].bits_per_byte == pytest.approx(tokens * math.log2(VOCAB_SIZE) / text_bytes, rel=1e-6)
    assert scores["all"].perplexity == pytest.approx(VOCAB_SIZE, rel=1e-5)


def test_unigram_is_the_entropy_of_the_scored_tokens(collection: Path) -> None:
    scores = scores_of(collection, uniform_model, Ranks(0, 0, 1))
    pooled = []
    for name, source in open_collection(collection).sources.items():
        stream = TokenStream(source.splits["validation"])
        pooled.append(stream.read(0, stream.tokens))
        _, counts = np.unique(pooled[-1], return_counts=True)
        shares = counts / counts.sum()
        assert scores[name].unigram == pytest.approx(-(shares * np.log(shares)).sum())
    _, counts = np.unique(np.concatenate(pooled), return_counts=True)
    shares = counts / counts.sum()
    assert scores["all"].unigram == pytest.approx(-(shares * np.log(shares)).sum())


def test_a_cut_says_that_its_bytes_are_an_estimate(collection: Path) -> None:
    scores = scores_of(collection, uniform_model, Ranks(0, 0, 1), max_tokens=1000)
    assert scores["english"].tokens == 1000 // 64 * 64
    assert not scores["english"].bytes_exact
    assert not scores["all"].bytes_exact


def test_nothing_held_out_is_an_error(collection: Path) -> None:
    with pytest.raises(DataFormatError, match="larger --validation-fraction"):
        evaluate(
            uniform_model, {}, seq_len=64, batch_size=1, eos_id=2, vocab_size=VOCAB_SIZE, max_tokens=None,
            isolated=False, ranks=Ranks(0, 0, 1), device=CPU,
        )  # fmt: skip


def model_case(ranks: Ranks, tables: dict[str, Any], path: Path) -> dict[str, float]:
    model = Transformer(parse_recipe(tables).model, generator=torch.Generator().manual_seed(3))

    @torch.no_grad()
    def forward(inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None) -> LossSum:
        loss: LossSum = model(torch.from_numpy(inputs), torch.from_numpy(targets))
        return loss

    with process_group(CPU):
        return {name: score.loss for name, score in scores_of(path, forward, ranks, max_tokens=4096).items()}


def test_any_number_of_ranks_gives_the_same_scores(
    tiny_recipe: Callable[..., dict[str, Any]], collection: Path
) -> None:
    (alone,) = run_ranks(1, model_case, tiny_recipe(), collection)
    first, second = run_ranks(2, model_case, tiny_recipe(), collection)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-6)
