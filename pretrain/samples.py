"""Texts that show what a run has learnt: the same prompts and seed each time, by its newest or its best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pretrain.checkpoint import BEST
from pretrain.run_directory import RunDirectory

PROMPTS = ("The", "She said", "我们")
NEW_TOKENS = 96
TEMPERATURE, TOP_P = 0.8, 0.95

Which = Literal["newest", "best"]


@dataclass(frozen=True)
class Samples:
    """Text that a checkpoint writes behind prompts, or why there is none."""

    checkpoint: str | None
    settings: str
    texts: Sequence[tuple[str, str]]
    missing: str | None = None


def samples(run: Path, which: Which, prompts: Sequence[str], seed: int, accelerator: str | None) -> Samples:
    """Continue the prompts. Raises as `open_subject` and `continue_prompts`, also where there is no checkpoint."""
    from model.generate import Sampling
    from pretrain.generate import continue_prompts
    from pretrain.subject import open_subject

    subject = open_subject(run if which == "newest" else RunDirectory(run).checkpoints / BEST, accelerator=accelerator)
    longest = max(len(subject.codec.encode(prompt)) for prompt in prompts) + 1
    length = max(1, min(NEW_TOKENS, subject.config.seq_len - longest))
    texts = continue_prompts(subject, prompts, Sampling(TEMPERATURE, top_p=TOP_P), max_new_tokens=length, seed=seed)
    settings = f"temperature {TEMPERATURE}, top-p {TOP_P}, seed {seed}, at most {length} new tokens"
    return Samples(subject.path.name, settings, list(texts))
