"""What a pass through the model holds beside parameters, their gradients and optimizer state, by arithmetic. No torch.

Which tensors live at once follows from transformer.py and what it calls: a block keeps for backward what its autograd
Functions save (attention_cpu.py, norms.py, positions.py, feedforward.py); the loss forms its gradients in the forward
pass (loss.py). On CPUs these sums are held against all that torch's allocator gives out, temporaries inside kernels
included. Those for GPUs follow the same code; what differs there is said where it stands.

A pass is a row of `Moment`s, and what it needs is the largest. Parameters' gradients grow while activations shrink, so
a moment of backward says how many have formed by then, for the caller to count by its own rules (their dtype,
partitions, buckets, a matrix's gradient on its way to be added to the one before). Both run evenly from block to block,
so of each kind of block only the last and the first need to be looked at.

LEGEND names the symbols of the formulas. What a formula says is what is computed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from model.accounting import parameter_count
from model.config import COMPONENTS, ModelConfig, checkpointing_period

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
    "w": "bytes of a number of the compute dtype",
    "x": "bytes of the fp32 copies that half precision is lifted to and rounded from, 0 in fp32",
    "c": "tokens of the loss's first chunk",
    "e": "tokens of the largest chunk behind the first",
    "u": "rows of the head's gradient that are cast at a time",
    "q": "queries whose scores are formed at a time in attention's backward on CPUs",
    "s": "those scores",
    "m": "threads of torch on a CPU",
    "a": "scores that a thread of torch's attention on CPUs holds",
    "j": "slots of the KV cache a row",
}

# What a block keeps for backward: the inputs of both norms and of the matrices; q, k, v and what attention gave; gate,
# up and their product; in fp32 a number a token for each norm, and one a query.
ALL = "b·t·w·(4·d + 2·h·k + 2·kv·k + 3·f) + 4·b·t·(h + 2)"
UP_TO_ATTENTION = "b·t·w·(2·d + 2·h·k + 2·kv·k) + 4·b·t·(h + 1)"
PRODUCTS = "b·t·w·(3·d + 2·h·k + 2·kv·k + 2·f) + 4·b·t·h"  # "selective": its input, and what COSTLY_OPERATIONS gave
INPUT = "b·t·w·d"

# As attention_cpu.py has them, and loss.py.
MOST_TOKENS = 1024
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


@dataclass(frozen=True)
class Pass:
    """One micro-batch of one rank, and how it is computed.

    `compute_bytes`: 2 for bf16 and fp16, 4 for fp32. `checkpointing` as `Transformer.activation_checkpointing`.
    `documents`: each attends to itself only. `fused_loss`: Liger's kernel, which loss.py takes on GPUs that have it.
    `threads`: torch's on a CPU, since attention there takes room for each. The z-loss takes no room.

    Compiled blocks hold the same, since to the compiler our autograd Functions are single steps (seen on a CPU).
    """

    micro_batch_size: int
    seq_len: int
    compute_bytes: int
    checkpointing: str = "none"
    loss_chunk_tokens: int = 1024
    device: Literal["cpu", "cuda"] = "cpu"
    documents: bool = False
    fused_loss: bool = False
    threads: int = 1

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def attends_by_products(self) -> bool:
        """Whether attention's backward is that of attention_cpu.py."""
        return self.device == "cpu" and not self.documents and self.seq_len <= MOST_TOKENS

    def is_run_again(self, layer: int) -> bool:
        period = checkpointing_period(self.checkpointing)
        return period > 0 and layer % period == 0


def unmodelled(config: ModelConfig) -> str | None:
    """What to say of a model whose blocks hold other tensors than those counted here, or None.

    The sums are those of Llama's block, whatever the config. Norms behind, LayerNorm and biases hold about as much, two
    matrices a third of the feed-forward's less, and residual streams several times the stream. Parameters and their
    training state are counted for every choice (model/accounting.py).
    """
    table = config.to_dict()
    others = [f"{name} = {json.dumps(table[name])}" for name in COMPONENTS if name in table]
    if not others:
        return None
    return f"activations are counted as those of Llama's block; not modelled: {', '.join(others)}"


def buffers(config: ModelConfig) -> tuple[Held, ...]:
    """What the model holds for good beside its parameters, whatever the dtype of these."""
    return (_held("RoPE tables", "4·T·k", {"T": config.seq_len, "k": config.head_dim}),)


def forward(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """Training up to the loss, which holds what all blocks keep, a chunk's logits and the gradients of its head.

    Where all blocks are run again, the last one itself may hold more than that.
    """
    symbols = _symbols(config, work)
    inputs, last = _inputs(work, symbols), config.n_layers - 1
    before = (*inputs, *_kept(work, symbols, last))
    is_dropped = work.is_run_again(last) and work.checkpointing != "selective"
    ends = _held("hidden states, their gradient, the last norm", "3·b·t·w·d + 4·b·t", symbols)
    moments = [
        Moment("forward of the last block, attention", (*before, _attention(work, symbols))),
        Moment(
            "forward of the last block, feed-forward",
            (*before, _held("the block", "b·t·w·(3·d + 3·f)" if is_dropped else ALL, symbols)),
        ),
        Moment("loss", (*inputs, *_kept(work, symbols, config.n_layers), ends, _loss(work, symbols, True))),
    ]
    if work.documents and work.device == "cuda":
        moments.insert(
            0, Moment("mask of documents", (*inputs, _held("the mask before its blocks", "4·b·t·t", symbols)))
        )
    return tuple(moments)


def backward(config: ModelConfig, work: Pass, passing: int = 0) -> tuple[Moment, ...]:
    """From the head to the embedding; a block that was run again holds all of its own while it is gone through.

    `gradients` of each moment: those of the parameters that are done with when it comes. The block in which they pass
    the number `passing` (what an engine collects before it reduces, say) is among the moments, and the next one.
    """
    symbols, last = _symbols(config, work), config.n_layers - 1
    inputs = _inputs(work, symbols)
    heads = config.n_heads * config.head_dim
    block = 2 * config.d_model * (1 + heads + config.n_kv_heads * config.head_dim) + 3 * config.d_model * config.d_ff
    embedding = config.vocab_size * config.d_model
    head = (_held("gradient of the head, which waits for the embedding's", "w·v·d", symbols),) if config.tied else ()
    behind_blocks = 0 if config.tied else embedding

    kept = (*inputs, *_kept(work, symbols, config.n_layers), _held("last norm", "b·t·w·d + 4·b·t", symbols))
    moments = [
        Moment("head", (*kept, _held("gradients of hidden states and head", _head_gradients(work), symbols))),
        Moment(
            "last norm",
            (*kept, *head, _held("gradients of the norm", _norm_gradients(work), symbols)),
            behind_blocks,
        ),
    ]
    passed = last - max(0, passing - behind_blocks - config.d_model) // block
    layers = {*_telling_layers(config, work), *(layer for layer in (passed, passed - 1) if layer >= 0)}
    for layer in sorted(layers, reverse=True):
        before = (*inputs, *_kept(work, symbols, layer), *head)
        at_down = behind_blocks + config.d_model + (last - layer) * block + config.d_model * config.d_ff
        at_output = at_down + config.d_model * (2 * config.d_ff + 1 + heads)
        for name, own, gradients, formed in (
            ("feed-forward", ALL, "b·t·w·(d + 2·f)", at_down),
            ("attention", UP_TO_ATTENTION, f"b·t·w·(d + h·k) + {_attention_gradients(work, symbols)}", at_output),
            ("RoPE", "2·b·t·w·d + 4·b·t", "b·t·w·(d + h·k + 2·kv·k) + b·t·h·k·(x + w) + 6·t·k", at_output),
        ):
            its = (_held("the block", own, symbols), _held("gradients within it", gradients, symbols))
            moments.append(Moment(f"block {layer}, {name}", (*before, *its), formed))
    at_end = _held("gradients of the embedding", "b·t·w·d + w·v·d", symbols)
    moments.append(Moment("embedding", (*inputs, *head, at_end), parameter_count(config) - embedding))
    return tuple(moments)


def evaluation(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """A forward pass with targets and without gradients: one block at a time, then the loss."""
    symbols = _symbols(config, work)
    inputs = _inputs(work, symbols)
    return (
        Moment("attention", (*inputs, _attention(work, symbols))),
        Moment("feed-forward", (*inputs, _held("a block", "b·t·w·(3·d + 3·f)", symbols))),
        Moment("loss", (*inputs[:1], _held("hidden states", "b·t·w·d", symbols), _loss(work, symbols, False))),
    )


def generation(
    config: ModelConfig, *, rows: int, prompt_tokens: int, new_tokens: int, compute_bytes: int, chunk_tokens: int = 2048
) -> tuple[Moment, ...]:
    """Prompts, the longest of `prompt_tokens`, read `chunk_tokens` at a time over all rows, and continued with a cache.

    The choice of a token is counted with top_k and top_p; without, it takes less.
    """
    columns = min(prompt_tokens, max(1, chunk_tokens // rows))
    symbols = _symbols(config, Pass(rows, columns, compute_bytes)) | {"j": prompt_tokens + new_tokens}
    cache = _held("KV cache", "2·L·b·j·kv·k·w", symbols)
    mask = " + t·j·(1 + w)" if columns < prompt_tokens else ""
    attention = f"b·t·w·(2·d + 2·h·k + 3·kv·k) + b·t·(h + kv)·k·(x + w) + 4·t·k{mask}"
    return (
        Moment("prompts, attention", (cache, _held("a block", attention, symbols))),
        Moment("prompts, feed-forward", (cache, _held("a block", "b·t·w·(3·d + 3·f)", symbols))),
        Moment("a token", (cache, _held("logits, sorted, as chances", "b·v·(w + x/2 + 28) + 4·v", symbols))),
    )


# ---------------------------------------------------------------- formulas that depend on the kernel


def _attention(work: Pass, symbols: Mapping[str, int]) -> Held:
    """A block's first half: RoPE's copies of q, the kernel's room, or the output of o_proj beside all the others."""
    return _largest(
        "the block",
        symbols,
        "b·t·w·(2·d + h·k + 2·kv·k) + 4·b·t + b·t·h·k·(x + w) + 4·t·k",
        f"{UP_TO_ATTENTION}{_kernel(work, 4)}",
        f"{UP_TO_ATTENTION} + b·t·w·d",
    )


def _attention_gradients(work: Pass, symbols: Mapping[str, int]) -> str:
    """What attention's backward makes, the gradients of q, k and v among it.

    On a GPU that is FlashAttention's: q's gradient in fp32 before it is rounded, those of k and v for each query head.
    """
    grouped = symbols["h"] > symbols["kv"]
    if work.device == "cuda":
        return f"b·t·w·(h·k + 2·kv·k{' + 2·h·k' if grouped else ''}) + 4·b·t·h·(k + 1)"
    if not work.attends_by_products:
        return f"b·t·w·(h·k + 2·kv·k){_kernel(work, 8 if work.compute_bytes == 4 else 14)}"
    copies = "b·t·w·(2·h·k + 2·kv·k) + " if work.micro_batch_size > 1 else ""  # a head's tokens side by side
    exact = f"{copies}b·t·kv·k·{8 if work.compute_bytes == 2 else 4} + 8·b·t·h"
    candidates = [f"{exact} + b·t·w·h·k + 8·b·t·kv·k + 12·s + 2·w·q·k"]
    if work.compute_bytes == 2:
        candidates.append(f"{exact} + 8·b·t·h·k")
    return _largest("", symbols, *candidates).formula


def _kernel(work: Pass, bytes_each: int) -> str:
    """The room of torch's attention on a CPU, behind other terms."""
    return f" + {bytes_each}·m·a" if work.device == "cpu" else ""


def _norm_gradients(work: Pass) -> str:
    if work.device == "cuda":
        return "2·b·t·w·d"
    return "b·t·(14 + w)·d" if work.compute_bytes == 2 else "b·t·(8 + w)·d"


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
    """What comes with the micro-batch; on a GPU the mask of documents is a few bytes a block of 128 x 128 scores."""
    if not work.documents:
        return (_held("ids and targets", "16·b·t", symbols),)
    mask = "b·t·t·w + 4·b·t·k" if work.device == "cpu" else "b·t·t/1024 + 4·b·t·k"
    return (
        _held("ids, targets, numbers of documents", "24·b·t", symbols),
        _held("mask and RoPE tables of documents", mask, symbols),
    )


def _kept(work: Pass, symbols: Mapping[str, int], layers: int) -> tuple[Held, ...]:
    """What the first `layers` blocks keep for backward."""
    again = sum(map(work.is_run_again, range(layers)))
    counts = {**symbols, "A": layers - again, "R": again}
    keeps = PRODUCTS if work.checkpointing == "selective" else INPUT
    kept = (
        _held("blocks that keep all", f"A·({ALL})", counts),
        _held("blocks that are run again", f"R·({keeps})", counts),
    )
    return tuple(held for held in kept if held.bytes)


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
    whole_chunks = t // CHUNK * CHUNK
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
        "w": work.compute_bytes,
        "x": 8 if work.compute_bytes == 2 else 0,
        "c": chunk,
        "e": min(chunk, work.tokens - chunk),
        "u": min(config.vocab_size, CAST_ROWS),
        "q": rows * group * min(CHUNK, t),
        "s": rows * group * max(CHUNK * whole_chunks, (t - whole_chunks) * t),
        "m": work.threads,
        "a": (256 if t >= 768 else 64 if t >= 192 else 32) * min(512, t),
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
