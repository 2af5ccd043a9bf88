"""Cached sampling: the prompts in chunks, then one token a row at a time against the keys and values already computed.

Several prompts are read as one batch, each row at its own length and positions, so that the weights are read from
memory once for all of them. Suffixes: b rows of the batch, t tokens, d model width, v vocabulary, n new tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import KVCache
from model.transformer import Transformer

__all__ = ["KVCache", "Sampling", "generate", "generate_steps", "penalized", "probabilities"]

SMALLEST_SETTING = 1e-6  # of temperature and top_p: below, fp32 divides by nothing
CHUNK_TOKENS = 2048
LOOK_EVERY = 16  # tokens between two looks at what an accelerator found: each look waits for it


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen. ValueError for a setting out of range.

    temperature 0 takes the likeliest; None leaves a rule out. What each does, and in which order: `probabilities`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not SMALLEST_SETTING <= self.temperature < math.inf:
            raise ValueError(
                f"temperature = {self.temperature} must be 0 (take the likeliest) or at least {SMALLEST_SETTING}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} must be at least 1; leave it out to keep every id")
        if self.top_p is not None and not SMALLEST_SETTING <= self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} must be {SMALLEST_SETTING} to 1; leave it out to keep every id")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p} must be 0 to 1; leave it out to keep every id")
        if not SMALLEST_SETTING <= self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty} must be positive; 1 is none")


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    seed: int = 0,
    stop_id: int | None = None,
    known_ids: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[list[int]]:
    """Up to max_new_tokens ids that continue each prompt; neither the prompt nor the stop id is among them.

    Arguments and errors as of `generate_steps`, which draws them.
    """
    steps = generate_steps(
        model, prompts, max_new_tokens, sampling, seed=seed, known_ids=known_ids, chunk_tokens=chunk_tokens
    )
    look_every = 1 if model.embed_tokens.weight.device.type == "cpu" else LOOK_EVERY
    columns: list[Tensor] = []
    stopped_b: Tensor | None = None
    for n, ids_b in enumerate(steps, 1):
        columns.append(ids_b)
        if stop_id is None:
            continue
        stops_b = ids_b == stop_id
        stopped_b = stops_b if stopped_b is None else stopped_b | stops_b
        if n % look_every == 0 and stopped_b.all():
            break
    produced = torch.stack(columns, dim=1).tolist()
    return [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in produced]


@torch.inference_mode()
def generate_steps(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    known_ids: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[Tensor]:
    """The next id of every prompt, (b,) on the model's device, then the one behind it, max_new_tokens times or until
    nobody asks for more.

    Every row draws with the numbers that `seed` gives on the CPU, as it would alone: its ids depend on its own logits,
    not on the other rows or the device's generator (logits themselves differ by rounding with the number of rows).
    `known_ids` bounds the choice to ids below it: the tokenizer's, where the model's vocabulary is padded beyond them.
    Prompts are read `chunk_tokens` at a time, over all rows, which bounds the memory of activations.
    ValueError: no prompt, an empty one, an id outside the vocabulary, no room in seq_len, logits that are not finite.
    """
    _check_request(
        prompts, max_new_tokens, chunk_tokens, vocab_size=model.config.vocab_size, seq_len=model.config.seq_len
    )
    weight, rows = model.embed_tokens.weight, len(prompts)
    device = weight.device
    rooms = [len(ids) + max_new_tokens for ids in prompts]
    cache = KVCache(
        model.config,
        batch_size=rows,
        max_tokens=max(rooms),
        dtype=weight.dtype,
        device=device,
        text_lengths=rooms,
    )
    generator = torch.Generator().manual_seed(seed)
    finite = torch.ones((), dtype=torch.bool, device=device)
    look_every = 1 if device.type == "cpu" else LOOK_EVERY
    seen_bv = (
        None if sampling.repetition_penalty == 1 else _seen(prompts, model.config.vocab_size, device)[:, :known_ids]
    )

    last_bd = _read_prompts(model, prompts, cache, chunk_tokens)
    for n in range(1, max_new_tokens + 1):
        logits_bv = model.lm_head(last_bd)[:, :known_ids]
        finite &= logits_bv.sum(dtype=torch.float32).isfinite()
        if (n % look_every == 0 or n == max_new_tokens) and not finite:
            raise ValueError("the logits are not finite: the weights are damaged, or training diverged")
        if seen_bv is not None:
            logits_bv = penalized(logits_bv, seen_bv, sampling.repetition_penalty)
        if sampling.temperature == 0:
            ids_b = logits_bv.argmax(dim=-1)
        else:
            ids_b = _draw(probabilities(logits_bv, sampling), generator)
        if seen_bv is not None:
            seen_bv.scatter_(1, ids_b[:, None], True)
        yield ids_b
        if n < max_new_tokens:
            last_bd = model.hidden(ids_b[:, None], cache)[:, 0]


def penalized(logits_bv: Tensor, seen_bv: Tensor, penalty: float) -> Tensor:
    """Logits of ids that stand in the text already, divided by the penalty, or multiplied where they are negative
    (Keskar et al. 2019, CTRL, section 4.1, and transformers for the sign). The prompt counts."""
    less_bv = torch.where(logits_bv > 0, logits_bv / penalty, logits_bv * penalty)
    return torch.where(seen_bv, less_bv, logits_bv)


def _seen(prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    seen_bv = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(prompts):
        seen_bv[row, list(ids)] = True
    return seen_bv.to(device)


def probabilities(logits_bv: Tensor, sampling: Sampling) -> Tensor:
    """The fp32 probabilities, (…, vocab_size), that a next token is drawn from; temperature 0 is not asked here.

    In this order, as in transformers: divide the logits by the temperature; keep the top_k likeliest; of those the
    fewest whose probabilities reach top_p (nucleus sampling, Holtzman et al. 2019); of those the ones at least min_p
    times as likely as the likeliest (Nguyen et al. 2024). The likeliest always stays.
    """
    logits_bv = logits_bv.float()
    scaled_bv = (logits_bv - logits_bv.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        chances_bv = scaled_bv.softmax(dim=-1)
    else:
        chances_bv = _nucleus(scaled_bv, sampling.top_k, sampling.top_p)
    if sampling.min_p is not None:
        too_rare_bv = chances_bv < sampling.min_p * chances_bv.amax(dim=-1, keepdim=True)
        chances_bv = chances_bv.masked_fill(too_rare_bv, 0.0)
        chances_bv = chances_bv / chances_bv.sum(dim=-1, keepdim=True)
    return chances_bv


def _nucleus(scaled_bv: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
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
    weight, width, lengths = model.embed_tokens.weight, model.config.d_model, [len(ids) for ids in prompts]
    longest, columns = max(lengths), max(1, chunk_tokens // len(prompts))
    padded = [[*ids, *[0] * (longest - len(ids))] for ids in prompts]
    ids_bt = torch.tensor(padded, device=weight.device)
    last_bd = weight.new_empty(len(prompts), width)  # the weight's own shape is nothing where ZeRO-3 splits it
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
