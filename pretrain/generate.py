"""Text from a checkpoint: prompt → ids → continuation → text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from model.generate import generate
from pretrain.checkpoint import load_model, run_of
from pretrain.config import RecipeError
from pretrain.runtime import pick_device
from tokenizer.codec import Codec


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

    A prompt stands where a document begins in training: behind an EOS. Raises RecipeError for a prompt too long, a
    setting out of range, or a model whose weights are not finite.
    """
    model = load_model(checkpoint).to(pick_device(0, accelerator))
    codec = Codec.load(run_of(checkpoint).tokenizer)
    for prompt in prompts:
        ids = [codec.eos_id, *codec.encode(prompt)]
        if len(ids) + max_new_tokens > model.config.seq_len:
            raise RecipeError(
                f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones exceed the model's seq_len "
                f"{model.config.seq_len}: shorten the prompt or --max-new-tokens"
            )
        try:
            produced = generate(
                model,
                ids,
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
        yield prompt, codec.decode(produced)
