"""In training: how well the model predicts held-out text: loss, perplexity, bits per byte, beside two baselines.

Every token of a validation split, each document's EOS included, is scored exactly once: the split is one stream, an EOS
is put before it as the first context, and windows of seq_len follow each other without overlap. A model that was
trained with documents isolated is scored with the same masks, also where its rows were packed. Bits per byte divides
by the UTF-8 bytes of the source text, so it does not depend on the tokenizer:

    bits per byte = (sum of token losses in nats) / ln 2 / (bytes of text)

Baselines, from the same tokens: uniform = ln(vocab_size), and the unigram entropy −Σ p ln p over those tokens' own
frequencies, which no model that ignores context can beat on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.loader import Scored, evaluation_batches, evaluation_size
from data_pipeline.order import PackingMode
from data_pipeline.packing import number_documents
from data_pipeline.shards import DataFormatError, Split
from data_pipeline.stream import TokenStream
from model.loss import IGNORED, LossSum
from pretrain.runtime import Ranks

Forward = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None], LossSum]


@dataclass(frozen=True)
class Score:
    """The score of one source, or of all of them together."""

    tokens: int  # scored, EOS included
    text_bytes: float  # UTF-8 bytes of the source text they stand for; an estimate unless bytes_exact
    bytes_exact: bool
    loss: float  # nats per token
    uniform: float  # ln(vocab_size), nats per token
    unigram: float  # entropy of these tokens' frequencies, nats per token

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / math.log(2) / self.text_bytes

    def to_dict(self) -> dict[str, float | int | bool]:
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def isolates_documents(packing: PackingMode) -> bool:
    """Whether a model trained on rows so packed is to see one document at a time."""
    return packing != "concat"


def evaluate(
    forward: Forward,
    splits: Mapping[str, Split],
    *,
    seq_len: int,
    batch_size: int,
    eos_id: int,
    vocab_size: int,
    max_tokens: int | None,
    isolated: bool,
    ranks: Ranks,
    device: torch.device,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Score]:
    """Score every source's split, the work shared by all ranks; the sources together are "all".

    `forward` takes inputs, targets and, if documents are `isolated`, their numbers, else None, each (batch_size,
    seq_len), and gives a LossSum; every rank calls it equally often.
    `max_tokens` bounds the tokens scored of each source, to whole windows evenly spread over it (bits per byte is then
    an estimate). A source without held-out tokens is left out. `on_tokens` hears about how many tokens all ranks have
    scored, and how many there are.
    """
    sizes = {
        source: evaluation_size(split.tokens, split.text_bytes, seq_len, max_tokens)
        for source, split in splits.items()
        if split.tokens > 0
    }
    if not sizes:
        raise DataFormatError("no source has held-out tokens: prepare the data with a larger --validation-fraction")
    done, total = 0, sum(size.tokens for size in sizes.values())
    parts: dict[str, tuple[Scored, float, NDArray[np.int64]]] = {}
    for source, size in sizes.items():
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        counts = np.zeros(vocab_size)
        with closing(TokenStream(splits[source])) as stream:
            for inputs, targets in evaluation_batches(
                stream, seq_len, batch_size, eos_id, ranks.rank, ranks.world_size, max_tokens
            ):
                documents = number_documents(inputs, eos_id) if isolated else None
                loss_sum += forward(inputs, targets, documents).cross_entropy_sum
                scored = targets[targets != IGNORED]
                counts += np.bincount(scored, minlength=vocab_size)
                done = min(done + len(scored) * ranks.world_size, total)
                on_tokens(done, total)
        local = torch.cat([loss_sum.view(1), torch.from_numpy(counts).to(device)])
        summed = ranks.sum(local).cpu().numpy()
        parts[source] = (size, float(summed[0]), summed[1:].astype(np.int64))
    scores = {source: _score([part], vocab_size) for source, part in parts.items()}
    return {**scores, "all": _score(list(parts.values()), vocab_size)}


def _score(parts: Sequence[tuple[Scored, float, NDArray[np.int64]]], vocab_size: int) -> Score:
    tokens = sum(size.tokens for size, _, _ in parts)
    counts = np.sum([counts for _, _, counts in parts], axis=0)
    assert counts.sum() == tokens, f"{counts.sum()} targets scored, {tokens} expected"
    frequencies = counts[counts > 0] / tokens
    return Score(
        tokens=tokens,
        text_bytes=sum(size.text_bytes for size, _, _ in parts),
        bytes_exact=all(size.is_exact for size, _, _ in parts),
        loss=sum(loss for _, loss, _ in parts) / tokens,
        uniform=math.log(vocab_size),
        unigram=float(-(frequencies * np.log(frequencies)).sum()),
    )
