"""Text from a checkpoint: prompts → ids → continuations → text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from model.generate import generate
from pretrain.checkpoint import load_model, tokenizer_of
from pretrain.config import RecipeError
from pretrain.runtime import pick_device
from tokenizer.codec import Codec

BATCH_SIZE = 16  # prompts continued at a time: more would only hold more of the cache


def continue_prompts(
    checkpoint: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    accelerator: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Each prompt with its continuation, which ends at EOS or after `max_new_tokens`.

    A prompt stands where a document begins in training: behind an EOS. Prompts are continued as one batch, up to
    BATCH_SIZE of them, and each draws as if it were alone. Raises RecipeError for a prompt too long, a setting out of
    range, or a model whose weights are not finite.
    """
    model = load_model(checkpoint, pick_device(0, accelerator))
    codec = Codec.load(tokenizer_of(checkpoint))
    ids = [[codec.eos_id, *codec.encode(prompt)] for prompt in prompts]
    for number, row in enumerate(ids, 1):
        if len(row) + max_new_tokens > model.config.seq_len:
            which = "the prompt" if len(ids) == 1 else f"prompt {number}"
            raise RecipeError(
                f"{which}'s {len(row)} tokens and {max_new_tokens} new ones exceed the model's seq_len "
                f"{model.config.seq_len}: shorten the prompt or --max-new-tokens"
            )
    for first in range(0, len(prompts), BATCH_SIZE):
        batch = slice(first, first + BATCH_SIZE)
        try:
            produced = generate(
                model,
                ids[batch],
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop_id=codec.eos_id,
                known_ids=codec.vocab_size,
            )
        except ValueError as error:
            raise RecipeError(f"cannot generate from {checkpoint}: {error}") from None
        yield from zip(prompts[batch], map(codec.decode, produced), strict=True)
