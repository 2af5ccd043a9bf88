"""Cached sampling: the prompts in chunks, then one token a row at a time against the keys and values already computed.

Several prompts are read as one batch, each row at its own length and positions, so that the weights are read from
memory once for all of them. Suffixes: b rows of the batch, t tokens, d model width, v vocabulary, n new tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.cache import KVCache
from model.transformer import Transformer

__all__ = ["KVCache", "generate", "probabilities"]

SMALLEST_SETTING = 1e-6  # of temperature and top_p: below, fp32 divides by nothing
CHUNK_TOKENS = 2048
LOOK_EVERY = 16  # tokens between two looks at what an accelerator found: each look waits for it


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    known_ids: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[list[int]]:
    """Up to max_new_tokens ids that continue each prompt; neither the prompt nor the stop id is among them.

    temperature 0 takes the likeliest id; top_k and top_p narrow the choice (see `probabilities`). Every row draws with
    the numbers that `seed` gives on the CPU, as it would alone: its ids depend on its own logits, not on the other rows
    or the device's generator (logits themselves differ by rounding with the number of rows). `known_ids` bounds the
    choice to ids below it: the tokenizer's, where the model's vocabulary is padded beyond them. Prompts are read
    `chunk_tokens` at a time, over all rows, which bounds the memory of activations.
    ValueError: no prompt, an empty one, an id outside the vocabulary, no room in seq_len, a setting out of range,
    logits that are not finite.
    """
    _check_request(
        prompts, max_new_tokens, chunk_tokens, vocab_size=model.config.vocab_size, seq_len=model.config.seq_len
    )
    _check_settings(temperature, top_k, top_p)
    weight, rows = model.embed_tokens.weight, len(prompts)
    device = weight.device
    room = max(len(ids) for ids in prompts) + max_new_tokens
    cache = KVCache(model.config, batch_size=rows, max_tokens=room, dtype=weight.dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    new_bn = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
    stopped_b = torch.zeros(rows, dtype=torch.bool, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    look_every = 1 if device.type == "cpu" else LOOK_EVERY

    last_bd = _read_prompts(model, prompts, cache, chunk_tokens)
    for n in range(max_new_tokens):
        logits_bv = model.lm_head(last_bd)[:, :known_ids]
        finite &= logits_bv.sum(dtype=torch.float32).isfinite()
        if temperature == 0:
            ids_b = logits_bv.argmax(dim=-1)
        else:
            chances_bv = probabilities(logits_bv, temperature=temperature, top_k=top_k, top_p=top_p)
            ids_b = _draw(chances_bv, generator)
        new_bn[:, n] = ids_b
        if stop_id is not None:
            stopped_b |= ids_b == stop_id
        is_last = n == max_new_tokens - 1
        if is_last or n % look_every == look_every - 1:
            if not finite:
                raise ValueError("the logits are not finite: the weights are damaged, or training diverged")
            if is_last or (stop_id is not None and stopped_b.all()):
                break
        last_bd = model.hidden(ids_b[:, None], cache)[:, 0]
    produced = new_bn[:, : n + 1].tolist()
    return [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in produced]


def probabilities(logits_bv: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The fp32 probabilities, (…, vocab_size), that a next token is drawn from; temperature 0 is not asked here.

    In this order: divide the logits by the temperature, keep the top_k likeliest, then of those the fewest whose
    probabilities reach top_p (nucleus sampling, Holtzman et al. 2019). The likeliest always stays.
    """
    logits_bv = logits_bv.float()
    scaled_bv = (logits_bv - logits_bv.amax(dim=-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return scaled_bv.softmax(dim=-1)
    if top_k is not None and top_k < scaled_bv.shape[-1]:
        ranked_bv, ids_bv = scaled_bv.topk(top_k, dim=-1)
    else:
        ranked_bv, ids_bv = scaled_bv.sort(dim=-1, descending=True, stable=True)
    chances_bv = ranked_bv.softmax(dim=-1)
    if top_p is not None:
        reached_before_bv = chances_bv.cumsum(dim=-1) - chances_bv
        chances_bv = chances_bv.masked_fill(reached_before_bv >= top_p, 0.0)
        chances_bv = chances_bv / chances_bv.sum(dim=-1, keepdim=True)
    return torch.zeros_like(scaled_bv).scatter_(-1, ids_bv, chances_bv)


def _draw(chances_bv: Tensor, generator: torch.Generator) -> Tensor:
    """(b,) ids, each drawn by its row of probabilities, all rows by the same numbers.

    An exponential race: with one e ~ Exp(1) for each id, chance / e is largest for an id as often as its chance says.
    Rounding changes the winner only in a close finish; in sums over the vocabulary it would reach every id.
    """
    waits_v = torch.empty(chances_bv.shape[-1]).exponential_(generator=generator)
    return (chances_bv / waits_v.to(chances_bv.device)).argmax(dim=-1)


def _read_prompts(model: Transformer, prompts: Sequence[Sequence[int]], cache: KVCache, chunk_tokens: int) -> Tensor:
    """Fill the cache with the prompts; what the head reads of the last token of each, (b, d_model).

    Shorter prompts are padded on the right: their own tokens stand before the padding and cannot see it, and all rows
    are at one position, so no mask is needed beyond the causal one.
    """
    weight, lengths = model.embed_tokens.weight, [len(ids) for ids in prompts]
    longest, columns = max(lengths), max(1, chunk_tokens // len(prompts))
    padded = [[*ids, *[0] * (longest - len(ids))] for ids in prompts]
    ids_bt = torch.tensor(padded, device=weight.device)
    last_bd = weight.new_empty(len(prompts), weight.shape[1])
    for start in range(0, longest, columns):
        hidden_btd = model.hidden(ids_bt[:, start : start + columns], cache)
        for row, length in enumerate(lengths):
            if start < length <= start + columns:
                last_bd[row] = hidden_btd[row, length - 1 - start]
    cache.cut(lengths)
    return last_bd


def _check_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, chunk_tokens: int, *, vocab_size: int, seq_len: int
) -> None:
    if not prompts:
        raise ValueError("there is no prompt to continue: give at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens} must be at least 1")
    for number, ids in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not ids:
            raise ValueError(f"{which} has no tokens: start it with at least one, the end-of-document id for instance")
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{which} holds id {outside[0]}, outside the vocabulary of {vocab_size}: another tokenizer?"
            )
        if len(ids) + max_new_tokens > seq_len:
            raise ValueError(
                f"{which}: {len(ids)} prompt tokens + {max_new_tokens} new ones exceed seq_len = {seq_len}: "
                f"ask for at most {max(seq_len - len(ids), 0)} or shorten the prompt"
            )


def _check_settings(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature != 0 and not temperature >= SMALLEST_SETTING:
        raise ValueError(f"temperature = {temperature} must be 0 (take the likeliest) or at least {SMALLEST_SETTING}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k} must be at least 1; leave it out to keep every id")
    if top_p is not None and not SMALLEST_SETTING <= top_p <= 1:
        raise ValueError(f"top_p = {top_p} must be {SMALLEST_SETTING} to 1; leave it out to keep every id")
