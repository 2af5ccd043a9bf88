"""What a pass through the model holds beside parameters, their gradients and optimizer state, by arithmetic. No torch.

Which tensors live at once follows from transformer.py and what it calls: blocks hold what block_activations.py says of
each of their components; the loss forms its gradients in the forward pass (loss.py). On CPUs these sums are held
against all that torch's allocator gives out, temporaries inside kernels included. Those for GPUs follow the same code;
what differs there is said where it stands.

A pass is a row of `Moment`s, and what it needs is the largest. Parameters' gradients grow while activations shrink, so
a moment of backward says how many have formed by then, for the caller to count by its own rules (their dtype,
partitions, buckets, a matrix's gradient on its way to be added to the one before). Both run evenly from block to block,
so of each kind of block only the last and the first need to be looked at.

LEGEND names the symbols of the formulas. What a formula says is what is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import CodeType

from model import block_activations
from model.accounting import parameter_count, parameter_shapes
from model.block_activations import norm_gradients, norm_statistics
from model.config import ModelConfig
from model.scenes import STREAM, Pass, Scene

LEGEND = {
    "b": "rows of the micro-batch",
    "t": "tokens of a row",
    "T": "seq_len of the model",
    "d": "d_model",
    "f": "d_ff",
    "v": "vocab_size",
    "L": "n_layers",
    "A": "blocks, of those before the moment, that keep all they computed",
    "R": "blocks, of the same, that are run again in backward",
    "h": "n_heads",
    "kv": "n_kv_heads",
    "k": "head_dim",
    "l": "mla_latent",
    "r": "mla_rope_dim",
    "n": "n_streams",
    "w": "bytes of a number of the compute dtype",
    "x": "bytes of the fp32 copies that half precision is lifted to and rounded from, 0 in fp32",
    "c": "tokens of the loss's first chunk",
    "e": "tokens of the largest chunk behind the first",
    "u": "rows of the head's gradient that are cast at a time",
    "q": "queries whose scores are formed at a time in attention's backward on CPUs",
    "s": "those scores",
    "p": "keys that they are scores with",
    "m": "threads of torch on a CPU",
    "a": "scores that a thread of torch's attention on CPUs holds",
    "y": "queries whose scores those are",
    "j": "slots of the KV cache a row",
}

# As attention_cpu.py has them, and loss.py.
CHUNK = 64
SCORES_PER_THREAD = 1 << 20
CAST_ROWS = 512


@dataclass(frozen=True)
class Held:
    """One kind of tensor that lives at a moment: its bytes, and the formula they come from."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Moment:
    """All that is held at one moment, and how many parameters have got their gradient of this pass by then.

    A gradient that is still in autograd's hands is among what is held: the head's, until a tied embedding's joins it.
    """

    name: str
    held: tuple[Held, ...]
    gradients: int = 0

    @property
    def bytes(self) -> int:
        return sum(held.bytes for held in self.held)


def buffers(config: ModelConfig) -> tuple[Held, ...]:
    """What the model holds for good beside its parameters, whatever the dtype of these."""
    if config.positions == "sinusoidal":
        return (_held("table of positions", "4·T·d", {"T": config.seq_len, "d": config.d_model}),)
    return (_rope_tables("RoPE tables", config),) if config.positions == "rope" else ()


def later_buffers(config: ModelConfig) -> tuple[Held, ...]:
    """The same from the first pass on: "dynamic" RoPE keeps the tables of a text longer than it was trained with."""
    trained = config.rope_original_seq_len or config.seq_len
    grows = config.rope_scaling == "dynamic" and config.seq_len > trained
    return (_rope_tables("RoPE tables of longer texts", config),) if grows else ()


def _rope_tables(name: str, config: ModelConfig) -> Held:
    if config.attention == "mla":
        return _held(name, "4·T·r", {"T": config.seq_len, "r": config.mla_rope_dim or 0})
    return _held(name, "4·T·k", {"T": config.seq_len, "k": config.head_dim})


def forward(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """Training up to the loss, which holds what all blocks keep, a chunk's logits and the gradients of its head.

    Where all blocks are run again, the last one itself may hold more than that.
    """
    symbols = _symbols(config, work)
    inputs, masks, last = _inputs(work, symbols), _masks(config, work, symbols), config.n_layers - 1
    before = (*inputs, *masks, *_kept(config, work, symbols, last))
    drops = work.is_run_again(last) and work.checkpointing != "selective"
    scenes = block_activations.forward(config, work, last, "drops" if drops else "keeps")
    behind = (*inputs, *_masks_kept(config, work, symbols), *_kept(config, work, symbols, config.n_layers))
    ends = (_held("hidden states, their gradient", "2·b·t·w·d", symbols), *_last_norm(config, work, symbols))
    return (
        *_making_masks(config, work, symbols),
        *(Moment(f"forward of the last block, {one.name}", (*before, *_within(one, symbols))) for one in scenes),
        Moment("loss", (*behind, *ends, _loss(work, symbols, True))),
    )


def backward(config: ModelConfig, work: Pass, passing: int = 0) -> tuple[Moment, ...]:
    """From the head to the embedding; a block that was run again holds all of its own while it is gone through.

    `gradients` of each moment: those of the parameters that are done with when it comes. The block in which they pass
    the number `passing` (what an engine collects before it reduces, say) is among the moments, and the next one.
    """
    symbols, last = _symbols(config, work), config.n_layers - 1
    inputs = (*_inputs(work, symbols), *_masks_kept(config, work, symbols))
    sizes = _block_sizes(config)
    block = sum(sizes.values())
    embedding = config.vocab_size * config.d_model
    head = (_held("gradient of the head, which waits for the embedding's", "w·v·d", symbols),) if config.tied else ()
    behind_blocks = 0 if config.tied else embedding
    at_end = parameter_count(config) - embedding

    norm = _last_norm(config, work, symbols)
    kept = (*inputs, *_kept(config, work, symbols, config.n_layers), *norm)
    moments = [Moment("head", (*kept, _held("gradients of hidden states and head", _head_gradients(work), symbols)))]
    if norm:
        gradients = _held("gradients of the norm", norm_gradients(config, work), symbols)
        moments.append(Moment("last norm", (*kept, *head, gradients), behind_blocks))
        behind_blocks += config.d_model * (2 if config.norm == "layer" else 1)
    passed = last - max(0, passing - behind_blocks) // block
    layers = {*_telling_layers(config, work), *(layer for layer in (passed, passed - 1) if layer >= 0)}
    for layer in sorted(layers, reverse=True):
        before = (*inputs, *_kept(config, work, symbols, layer), *head)
        for scene in block_activations.backward(config, work, layer):
            formed = behind_blocks + (last - layer) * block
            formed += sum(size for name, size in sizes.items() if name.startswith(scene.formed))
            held = (*before, *_within(scene, symbols, "gradients within it"))
            moments.append(Moment(f"block {layer}, {scene.name}", held, formed))
    gradients = _held("gradients of the embedding", "b·t·w·d + w·v·d", symbols)
    return (*moments, Moment("embedding", (*inputs, *head, gradients), at_end))


def evaluation(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """A forward pass with targets and without gradients: one block at a time, then the loss."""
    symbols = _symbols(config, work)
    inputs, masks = _inputs(work, symbols), _masks(config, work, symbols)
    scenes = block_activations.forward(config, work, config.n_layers - 1, "evaluates")
    return (
        *_making_masks(config, work, symbols),
        *(Moment(one.name, (*inputs, *masks, *_within(one, symbols))) for one in scenes),
        Moment("loss", (*inputs, _held("hidden states", "b·t·w·d", symbols), _loss(work, symbols, False))),
    )


def generation(
    config: ModelConfig, *, rows: int, prompt_tokens: int, new_tokens: int, compute_bytes: int, chunk_tokens: int = 2048
) -> tuple[Moment, ...]:
    """Prompts, the longest of `prompt_tokens`, read `chunk_tokens` at a time over all rows, and continued with a cache.

    What a block has beside the cache is that of Llama's, whatever the components: the cache and logits are most.
    The choice of a token is counted with top_k and top_p; without, it takes less.
    """
    columns = min(prompt_tokens, max(1, chunk_tokens // rows))
    symbols = _symbols(config, Pass(rows, columns, compute_bytes)) | {"j": prompt_tokens + new_tokens}
    cache = _held("KV cache", "L·b·j·(l + r)·w" if config.attention == "mla" else "2·L·b·j·kv·k·w", symbols)
    mask = " + t·j·(1 + w)" if columns < prompt_tokens else ""
    attention = f"b·t·w·(2·d + 2·h·k + 3·kv·k) + b·t·(h + kv)·k·(x + w) + 4·t·k{mask}"
    return (
        Moment("prompts, attention", (cache, _held("a block", attention, symbols))),
        Moment("prompts, feed-forward", (cache, _held("a block", "b·t·w·(3·d + 3·f)", symbols))),
        Moment("a token", (cache, _held("logits, sorted, as chances", "b·v·(w + x/2 + 28) + 4·v", symbols))),
    )


# ---------------------------------------------------------------- head and loss


def _loss(work: Pass, symbols: Mapping[str, int], forms_gradients: bool) -> Held:
    """A chunk's logits and their logarithms in fp32, to which a CPU lifts half precision by a copy; or the products.

    Liger's kernel has one copy of its logits, and sums the head's gradient in fp32 by a product in both dtypes.
    """
    if work.fused_loss and forms_gradients:
        parts = -(-symbols["v"] // symbols["d"])
        chunk = min(work.tokens, 1 << (-(-work.tokens // parts) - 1).bit_length())
        return _held("the fused loss", "w·c·v + (8 + w)·v·d", {**symbols, "c": chunk})
    lifted = 4 if work.compute_bytes == 2 and work.device == "cpu" else 0
    logits = f"v·(w + {4 + lifted})"
    if not forms_gradients:
        return _held("logits of a chunk", f"c·{logits}", symbols)
    head = "4·v·d" if symbols["e"] else "0"
    candidates = [f"c·{logits}", f"e·{logits} + {head}", "w·c·v + w·v·d", f"w·e·v + w·v·d + {head}"]
    if work.compute_bytes == 2:
        candidates.append(f"w·v·d + {head} + 4·u·d")
    return _largest("logits of a chunk, gradient of the head", symbols, *candidates)


def _head_gradients(work: Pass) -> str:
    """As the loss left them, and multiplied by what comes from behind; Liger's kernel multiplies them in place."""
    if work.fused_loss:
        return "b·t·w·d + w·v·d"
    return f"2·b·t·w·d + {'(4 + w)' if work.tokens > work.loss_chunk_tokens else '2·w'}·v·d + 4·u·d"


# ---------------------------------------------------------------- sums


def _inputs(work: Pass, symbols: Mapping[str, int]) -> tuple[Held, ...]:
    """What comes with the micro-batch."""
    if not work.documents:
        return (_held("ids and targets", "16·b·t", symbols),)
    return (_held("ids, targets, numbers of documents", "24·b·t", symbols),)


def _masks(config: ModelConfig, work: Pass, symbols: Mapping[str, int]) -> tuple[Held, ...]:
    """What all blocks are told of who sees whom and where; on a GPU a few bytes a block of 128 x 128 scores."""
    each = "t·t·w" if work.device == "cpu" else "t·t/1024"
    if not work.documents:
        return (_held("mask of the window", each, symbols),) if work.hides(config) else ()
    mask = _held("mask of documents", f"b·{each}", symbols)
    if config.positions != "rope":
        places = (_held("places within documents", "8·b·t", symbols),) if config.positions == "learned" else ()
        return (mask, *places)
    table = "r" if config.attention == "mla" else "k"
    return (mask, _held("RoPE tables of documents", f"4·b·t·{table}", symbols))


def _masks_kept(config: ModelConfig, work: Pass, symbols: Mapping[str, int]) -> tuple[Held, ...]:
    """Those that backward needs: kernels of our own know a window by its number, unless blocks are run again."""
    if not work.documents and work.attends_by_products and work.checkpointing == "none":
        return ()
    return _masks(config, work, symbols)


def _making_masks(config: ModelConfig, work: Pass, symbols: Mapping[str, int]) -> tuple[Moment, ...]:
    """While a mask is made, before the first block."""
    if not work.documents and not work.hides(config):
        return ()
    rows = "b·" if work.documents else ""
    each = "(1 + 2·w)" if work.device == "cpu" else "4"
    held = _held("a mask, as it is made", f"{rows}{each}·t·t", symbols)
    return (Moment("mask", (*_inputs(work, symbols), held)),)


def _within(scene: Scene, symbols: Mapping[str, int], beside: str = "beside it") -> tuple[Held, ...]:
    return _held("the block", str(scene.own), symbols), _largest(beside, symbols, *scene.beside)


def _last_norm(config: ModelConfig, work: Pass, symbols: Mapping[str, int]) -> tuple[Held, ...]:
    """What the norm before the head keeps, where there is one."""
    if config.norm_place != "pre":
        return ()
    return (_held("the last norm", str(STREAM + norm_statistics(config, work)), symbols),)


def _kept(config: ModelConfig, work: Pass, symbols: Mapping[str, int], layers: int) -> tuple[Held, ...]:
    """What the first `layers` blocks keep for backward; the first alone where it differs."""
    again = [work.is_run_again(layer) for layer in range(layers)]
    found = []
    for name, symbol, is_again in (("blocks that keep all", "A", False), ("blocks that are run again", "R", True)):
        of_layer = block_activations.keeps_run_again if is_again else block_activations.keeps
        texts = [of_layer(config, work, layer) for layer in (0, 1)]
        count = again.count(is_again)
        if texts[0] != texts[1] and again[:1] == [is_again]:
            found.append(_held("the first block", texts[0], symbols))
            count -= 1
        found.append(_held(name, f"{symbol}·({texts[1]})", {**symbols, symbol: count}))
    return tuple(held for held in found if held.bytes)


@functools.lru_cache(maxsize=16)
def _block_sizes(config: ModelConfig) -> dict[str, int]:
    """Elements of a block's parameters, by name."""
    shapes = parameter_shapes(replace(config, n_layers=1))
    prefix = "layers.0."
    return {name.removeprefix(prefix): math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix)}


def _telling_layers(config: ModelConfig, work: Pass) -> list[int]:
    """The last and the first block of each kind, in the order of backward."""
    kinds: tuple[list[int], list[int]] = [], []
    for layer in range(config.n_layers):
        kinds[work.is_run_again(layer)].append(layer)
    return sorted({layer for kind in kinds for layer in (*kind[:1], *kind[-1:])}, reverse=True)


def _symbols(config: ModelConfig, work: Pass) -> dict[str, int]:
    b, t, group = work.micro_batch_size, work.seq_len, config.queries_per_kv_head
    chunk = min(work.loss_chunk_tokens, work.tokens)
    rows = min(b * config.n_kv_heads, max(1, work.threads * SCORES_PER_THREAD // (group * CHUNK * t)))
    whole_chunks, window = t // CHUNK * CHUNK, config.sliding_window or t
    rest = t - whole_chunks
    of_chunks = (CHUNK, min(whole_chunks, window + CHUNK - 1)) if whole_chunks else (0, 0)
    queries, keys = max(of_chunks, (rest, min(t, window + rest - 1)), key=math.prod)
    at_once = 256 if t >= 768 else 64 if t >= 192 else 32
    return {
        "b": b,
        "t": t,
        "T": config.seq_len,
        "d": config.d_model,
        "f": config.d_ff,
        "v": config.vocab_size,
        "L": config.n_layers,
        "h": config.n_heads,
        "kv": config.n_kv_heads,
        "k": config.head_dim,
        "l": config.mla_latent or 0,
        "r": config.mla_rope_dim or 0,
        "n": config.n_streams,
        "w": work.compute_bytes,
        "x": 8 if work.compute_bytes == 2 else 0,
        "c": chunk,
        "e": min(chunk, work.tokens - chunk),
        "u": min(config.vocab_size, CAST_ROWS),
        "q": rows * group * min(CHUNK, t),
        "s": rows * group * queries * keys,
        "p": rows * keys,
        "m": work.threads,
        "a": at_once * min(512, t),
        "y": at_once,
    }


def _held(name: str, formula: str, symbols: Mapping[str, int]) -> Held:
    return Held(name, _value(formula, symbols), formula)


def _largest(name: str, symbols: Mapping[str, int], *formulas: str) -> Held:
    return max((_held(name, formula, symbols) for formula in formulas), key=lambda held: held.bytes)


def _value(formula: str, symbols: Mapping[str, int]) -> int:
    return int(eval(_compiled(formula), {"__builtins__": {}}, dict(symbols)))


@functools.cache
def _compiled(formula: str) -> CodeType:
    """Python's own arithmetic reads a formula, so that the text that is shown and what is computed cannot differ."""
    return compile(formula.replace("·", "*"), "<formula>", "eval")
