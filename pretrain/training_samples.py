"""What the model writes behind fixed prompts while it is trained: the same draws each time, so that only it differs.

Nothing that is trained differs by a bit for it: no gradients, and random numbers of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain.config import RecipeError, RunConfig
from tokenizer.codec import Codec

if TYPE_CHECKING:
    from model.transformer import Transformer

SEED = 0
TEMPERATURE, TOP_P = 0.8, 0.95


class TrainingSamples:
    """The prompts of a recipe, ready to be continued."""

    def __init__(self, config: RunConfig, codec: Codec) -> None:
        """RecipeError where a prompt and what is to follow are longer than the model's windows."""
        logging, seq_len = config.logging, config.model.seq_len
        self._prompts, self._tokens, self._codec = logging.sample_prompts, logging.sample_tokens, codec
        # As `generate` has them: a prompt stands where a document begins in training.
        self._rows = [[codec.eos_id, *codec.encode(prompt)] for prompt in self._prompts]
        for prompt, row in zip(self._prompts, self._rows, strict=True):
            if len(row) + self._tokens > seq_len:
                raise RecipeError(
                    f"logging.sample_prompts: {prompt[:40]!r} has {len(row)} tokens, and sample_tokens {self._tokens} "
                    f"behind it exceed model.seq_len {seq_len}: shorten the prompt, or lower logging.sample_tokens"
                )

    def write(self, model: Transformer) -> dict[str, str]:
        """Each prompt's continuation, up to EOS. All ranks together: they draw alike, so that under ZeRO-3, where each
        forward pass needs all of them, none ends before the others."""
        import torch

        from model.generate import Sampling, generate_steps

        if not self._rows:
            return {}
        sampling = Sampling(TEMPERATURE, top_p=TOP_P)
        columns = []
        try:
            # Blocks that are compiled for training's windows would be compiled anew for each length of the cache.
            with torch.compiler.set_stance("force_eager"):
                for ids_b in generate_steps(
                    model, self._rows, self._tokens, sampling, seed=SEED, known_ids=self._codec.vocab_size
                ):
                    columns.append(ids_b.tolist())
        except ValueError as error:
            return dict.fromkeys(self._prompts, f"({error})")
        texts = {}
        for prompt, ids in zip(self._prompts, zip(*columns, strict=True), strict=True):
            end = ids.index(self._codec.eos_id) if self._codec.eos_id in ids else len(ids)
            texts[prompt] = self._codec.decode(list(ids[:end]))
        return texts
