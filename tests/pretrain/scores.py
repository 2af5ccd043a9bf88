"""A checkpoint's scores as `pretrain evaluate` finds them."""

from __future__ import annotations

from pathlib import Path

from pretrain.evaluation import Score, evaluate_subject, texts_for
from pretrain.subject import open_subject


def scores_of(path: Path, data: Path | None = None, *, batch_size: int, max_tokens: int | None) -> dict[str, Score]:
    subject = open_subject(path)
    texts = texts_for(subject, [] if data is None else [str(data)], max_tokens=max_tokens)
    return evaluate_subject(subject, texts, batch_size=batch_size, max_tokens=max_tokens).scores
