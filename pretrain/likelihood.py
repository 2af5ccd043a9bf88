"""How likely a model finds one text behind another, which is what tasks are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.loss import IGNORED
from pretrain.scoring import token_scores
from pretrain.subject import Subject
from tokenizer.codec import Codec


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation: log p in nats, how many ids it has, and whether each is the likeliest (greedy) one."""

    log_p: float
    tokens: int
    greedy: bool


def encode_pair(codec: Codec, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The ids of a context and of what follows it, cut where the context's own ids end.

    Both are encoded together, since ids depend on their neighbours; spaces at the context's end belong to what follows,
    where tokenizers put them. This is how lm-evaluation-harness does it.
    """
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    whole, ids = codec.encode(context + continuation), codec.encode(context)
    return ids, whole[len(ids) :]


def likelihoods(
    subject: Subject,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
    on_pairs: Callable[[int], None] = lambda pairs: None,
) -> list[Likelihood]:
    """For each (context ids, continuation ids), neither empty: how likely the continuation is.

    Where both are longer than the window, the context loses its first ids, and then the continuation. Pairs of about
    one length are computed together, the longest first; `on_pairs` hears how many more are done.
    """
    window = subject.config.seq_len
    rows = [[*context, *continuation][-(window + 1) :] for context, continuation in pairs]
    scored = [min(len(continuation), window) for _, continuation in pairs]
    found: list[Likelihood | None] = [None] * len(pairs)
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        longest = len(rows[batch[0]]) - 1
        inputs = np.full((len(batch), longest), subject.codec.eos_id, np.int64)
        targets = np.full((len(batch), longest), IGNORED, np.int64)
        for row, number in enumerate(batch):
            ids, count = rows[number], scored[number]
            inputs[row, : len(ids) - 1] = ids[:-1]
            targets[row, len(ids) - 1 - count : len(ids) - 1] = ids[-count:]
        losses, likeliest = token_scores(subject.model, inputs, targets, None, subject.device)
        for row, number in enumerate(batch):
            kept = targets[row] != IGNORED
            log_p = -float(losses[row].astype(np.float64).sum())
            found[number] = Likelihood(log_p, scored[number], bool(likeliest[row][kept].all()))
        on_pairs(len(batch))
    return [one for one in found if one is not None]
