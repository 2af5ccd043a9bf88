"""Cached sampling: the prompt in one pass, then one token at a time against the keys and values already computed."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import KVCache
from model.transformer import Transformer

__all__ = ["KVCache", "generate", "probabilities"]

SMALLEST_SETTING = 1e-6  # of temperature and top_p: below, fp32 divides by nothing


@torch.no_grad()
def generate(
    model: Transformer,
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    known_ids: int | None = None,
) -> list[int]:
    """Up to max_new_tokens ids that continue the prompt `ids`; the prompt and the stop id are not among them.

    temperature 0 takes the likeliest id; top_k and top_p narrow the choice (see `probabilities`). The draw is made on
    the CPU from `seed`, so it depends on the logits alone, not on the device's generator. `known_ids` bounds the choice
    to ids below it: the tokenizer's, where the model's vocabulary is padded beyond them.
    ValueError: empty prompt, an id outside the vocabulary, no room in seq_len, a setting out of range.
    """
    config, weight = model.config, model.embed_tokens.weight
    _check_request(ids, max_new_tokens, vocab_size=config.vocab_size, seq_len=config.seq_len)
    cache = KVCache(
        config, batch_size=1, max_tokens=len(ids) + max_new_tokens, dtype=weight.dtype, device=weight.device
    )
    generator = torch.Generator().manual_seed(seed)
    unread = list(ids)
    produced: list[int] = []
    while len(produced) < max_new_tokens:
        hidden_btd = model.hidden(torch.tensor([unread], device=weight.device), cache)
        logits_v = model.lm_head(hidden_btd[:, -1])[0, :known_ids].float().cpu()
        chances_v = probabilities(logits_v, temperature=temperature, top_k=top_k, top_p=top_p)
        token = int(torch.multinomial(chances_v, 1, generator=generator))
        if token == stop_id:
            break
        produced.append(token)
        unread = [token]
    return produced


def probabilities(logits_v: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The (vocab_size,) probabilities a next token is drawn from.

    In this order: divide the logits by the temperature, keep the top_k likeliest, then of those the fewest whose
    probabilities reach top_p (nucleus sampling, Holtzman et al. 2019). The likeliest always stays.
    ValueError for a setting out of range, or logits that are not finite.
    """
    if temperature != 0 and not temperature >= SMALLEST_SETTING:
        raise ValueError(f"temperature = {temperature} must be 0 (take the likeliest) or at least {SMALLEST_SETTING}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k} must be at least 1; leave it out to keep every id")
    if top_p is not None and not SMALLEST_SETTING <= top_p <= 1:
        raise ValueError(f"top_p = {top_p} must be {SMALLEST_SETTING} to 1; leave it out to keep every id")
    if not logits_v.isfinite().all():
        raise ValueError("the logits are not finite: the weights are damaged, or training diverged")
    if temperature == 0:
        return F.one_hot(logits_v.argmax(), logits_v.shape[0]).to(logits_v.dtype)
    ranked_v, ids_v = ((logits_v - logits_v.max()) / temperature).sort(descending=True, stable=True)
    if top_k is not None:
        ranked_v, ids_v = ranked_v[:top_k], ids_v[:top_k]
    chances_v = ranked_v.softmax(dim=-1)
    if top_p is not None:
        reached_before_v = chances_v.cumsum(dim=-1) - chances_v
        chances_v = chances_v.masked_fill(reached_before_v >= top_p, 0.0)
        chances_v = chances_v / chances_v.sum()
    return torch.zeros_like(logits_v).scatter_(0, ids_v, chances_v)


def _check_request(ids: Sequence[int], max_new_tokens: int, *, vocab_size: int, seq_len: int) -> None:
    if not ids:
        raise ValueError("the prompt has no tokens: start it with at least one, the end-of-document id for instance")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"the prompt holds id {outside[0]}, outside the vocabulary of {vocab_size}: another tokenizer?"
        )
    if len(ids) + max_new_tokens > seq_len:
        raise ValueError(
            f"{len(ids)} prompt tokens + {max_new_tokens} new ones exceed seq_len = {seq_len}: "
            f"ask for at most {max(seq_len - len(ids), 0)} or shorten the prompt"
        )
