"""What a pass through the model holds beside parameters, their gradients and optimizer state, by arithmetic. No torch.

Which tensors live at once follows from transformer.py and the files it reads: a block keeps for backward what its
autograd Functions save (attention_cpu.py, norms.py, positions.py, feedforward.py), the loss forms its gradients in the
forward pass (loss.py). tests/model/test_activations.py holds these sums against the bytes that torch's allocator has
given out at its peak, temporaries inside kernels included.

A pass is a row of `Moment`s, of which one is the largest. Gradients of parameters grow while activations shrink: so a
moment of backward says how many parameters have theirs by then, for the caller to count by its own rules (in which
dtype, partitioned or not), beside those of earlier micro-batches. As both run evenly from block to block, the largest
moment is in the last block or in the first one.

LEGEND names the symbols of the formulas; what a formula says is what is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from model.accounting import parameter_count
from model.config import ModelConfig, checkpointing_period

LEGEND = {
    "b": "rows of the micro-batch",
    "t": "tokens of a row",
    "T": "model.seq_len",
    "d": "d_model",
    "f": "d_ff",
    "v": "vocab_size",
    "L": "blocks",
    "P": "blocks that keep all they computed, of those that backward has yet to come to",
    "C": "blocks that are to run again, of the same",
    "h": "query heads",
    "kv": "key/value heads",
    "k": "head_dim",
    "w": "bytes of a number of the compute dtype",
    "c": "tokens of a chunk of the loss",
    "e": "tokens of the largest one behind the first",
    "r": "queries whose scores the attention's backward forms at a time",
    "s": "those scores",
    "m": "threads of torch on a CPU",
    "j": "slots of the KV cache a row",
}


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

    `compute_bytes`: 2 for bf16 and fp16, 4 for fp32. `documents`: each attends to itself only. `fused_loss`: Liger's
    kernel, which loss.py takes on GPUs that have it. `threads`: those of torch on a CPU, whose attention takes room for
    each.
    """

    micro_batch_size: int
    seq_len: int
    compute_bytes: int
    checkpointing: str = "none"
    loss_chunk_tokens: int = 1024
    device: Literal["cpu", "cuda"] = "cpu"
    documents: bool = False
    compiled: bool = False
    fused_loss: bool = False
    threads: int = 1


# What a block keeps for backward: the inputs of both norms and of the matrices, q, k, v and the output of attention,
# gate, up and their product; in fp32 a number a token for each norm, and one a query.
KEEPS_ALL = "b·t·w·(4·d + 2·h·k + 2·kv·k + 3·f) + 4·b·t·(h + 2)"
KEEPS_PRODUCTS = (
    "b·t·w·(3·d + 2·h·k + 2·kv·k + 2·f) + 4·b·t·h"  # "selective": its input, outputs of matrices, attention
)
KEEPS_INPUT = "b·t·w·d"


def buffers(config: ModelConfig) -> tuple[Held, ...]:
    """What the model holds for good beside its parameters."""
    return (_held("RoPE tables", "4·T·k", {"T": config.seq_len, "k": config.head_dim}),)


def forward(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """The forward pass of training up to the loss, which forms the gradients of its head."""
    n = _symbols(config, work)
    inputs, last = _inputs(work, n), config.n_layers - 1
    below = _kept(config, work, n, last)
    attention = "b·t·w·(2·d + 2·h·k + 2·kv·k) + 4·b·t·(h + 1) + " + _kernel(n)
    kept = {
        "none": "b·t·w·(2·d + 2·h·k + 2·kv·k)",
        "selective": "b·t·w·(2·d + 2·h·k + 2·kv·k)",
    }.get(work.checkpointing, "b·t·w·d")
    loss = (
        *_kept(config, work, n, config.n_layers),
        _held("last norm", "b·t·w·d + 4·b·t", n),
        _held("hidden states and their gradients", "2·b·t·w·d", n),
        _loss_peak(work, n, gradients=True),
    )
    return (
        Moment("last block, attention", (*inputs, *below, _held("attention", attention, n))),
        Moment(
            "last block, feed-forward",
            (*inputs, *below, _held("attention", kept, n), _held("feed-forward", "b·t·w·(2·d + 3·f)", n)),
        ),
        Moment("loss", (*inputs, *loss)),
    )


def backward(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """The backward pass, from the head to the embedding."""
    n = _symbols(config, work)
    inputs, last = _inputs(work, n), config.n_layers - 1
    block = 2 * config.d_model + _matrices(config)
    total, embedding = parameter_count(config), config.vocab_size * config.d_model
    head = (_held("gradient of the head, until the embedding's joins it", "w·v·d", n),) if config.tied else ()
    formed = 0 if config.tied else embedding
    all_kept = (*inputs, *_kept(config, work, n, config.n_layers), _held("last norm", "b·t·w·d + 4·b·t", n))
    norm = "b·t·(14 + w)·d" if work.compute_bytes == 2 else "b·t·(8 + w)·d"
    moments = [
        Moment("head", (*all_kept, _held("gradients of hidden states and head", _head_backward(work, n), n)), 0),
        Moment("last norm", (*all_kept, *head, _held("gradients of the norm", norm, n)), formed),
    ]
    for layer in _telling_layers(config, work):
        below = (*inputs, *_kept(config, work, n, layer), *head)
        above = formed + config.d_model + (last - layer) * block
        at_attention = (
            above + 3 * config.d_model * config.d_ff + config.d_model * (1 + config.n_heads * config.head_dim)
        )
        moments += [
            Moment(
                f"block {layer}, feed-forward",
                (*below, _held("the block", KEEPS_ALL, n), _held("its gradients", "b·t·w·(d + 2·f)", n)),
                above + config.d_model * config.d_ff,
            ),
            Moment(
                f"block {layer}, attention",
                (
                    *below,
                    _held("the block", "b·t·w·(2·d + 2·h·k + 2·kv·k) + 4·b·t·(h + 1)", n),
                    _held("its gradients", "b·t·w·(d + h·k) + " + _attention_backward(work, n), n),
                ),
                at_attention,
            ),
            Moment(
                f"block {layer}, RoPE",
                (
                    *below,
                    _held("the block", "2·b·t·w·d + 4·b·t", n),
                    _held(
                        "its gradients",
                        f"b·t·w·(d + h·k + 2·kv·k) + {10 if work.compute_bytes == 2 else 4}·b·t·h·k + 6·t·k",
                        n,
                    ),
                ),
                at_attention,
            ),
        ]
    moments.append(
        Moment(
            "embedding",
            (*inputs, *head, _held("gradient of the embedding", "b·t·w·d + w·v·d", n)),
            total - embedding,
        )
    )
    return tuple(moments)


def evaluation(config: ModelConfig, work: Pass) -> tuple[Moment, ...]:
    """A forward pass with targets and without gradients."""
    n = _symbols(config, work)
    inputs = _inputs(work, n)
    rope = 10 if work.compute_bytes == 2 else 4
    return (
        Moment(
            "attention",
            (*inputs, _held("a block", f"b·t·w·(3·d + h·k + 2·kv·k) + {rope}·b·t·h·k + 4·t·k", n)),
        ),
        Moment("feed-forward", (*inputs, _held("a block", "b·t·w·(3·d + 3·f)", n))),
        Moment("loss", (*inputs[:1], _held("hidden states", "b·t·w·d", n), _loss_peak(work, n, gradients=False))),
    )


def generation(
    config: ModelConfig, *, rows: int, prompt_tokens: int, new_tokens: int, compute_bytes: int, chunk_tokens: int = 2048
) -> tuple[Moment, ...]:
    """Reading `rows` prompts, the longest of prompt_tokens, and continuing them by new_tokens with a KV cache."""
    columns = min(prompt_tokens, max(1, chunk_tokens // rows))
    n = _symbols(config, Pass(rows, columns, compute_bytes)) | {"j": prompt_tokens + new_tokens}
    cache = _held("KV cache", "2·L·b·j·kv·k·w", n)
    rope = 10 if compute_bytes == 2 else 4
    return (
        Moment(
            "prompt, attention",
            (cache, _held("a block", f"b·t·w·(3·d + h·k + 2·kv·k) + {rope}·b·t·(h + kv)·k + b·t·j·(1 + w)", n)),
        ),
        Moment("prompt, feed-forward", (cache, _held("a block", "b·t·w·(3·d + 3·f)", n))),
        Moment("token", (cache, _held("logits and chances", "b·v·(w + 4·8)", n))),
    )


def _symbols(config: ModelConfig, work: Pass) -> dict[str, int]:
    b, t = work.micro_batch_size, work.seq_len
    group = config.queries_per_kv_head
    rows = min(b * config.n_kv_heads, max(1, work.threads * (1 << 20) // (group * 64 * t)))
    chunk = min(work.loss_chunk_tokens, b * t)
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
        "c": chunk,
        "e": min(chunk, b * t - chunk),
        "r": rows * group * min(64, t),
        "s": rows * group * max(64 * (t // 64 * 64), t % 64 * t),
        "m": work.threads,
    }


def _held(name: str, formula: str, symbols: Mapping[str, int]) -> Held:
    return Held(name, _value(formula, symbols), formula)


def _largest(name: str, symbols: Mapping[str, int], *formulas: str) -> Held:
    return max((_held(name, formula, symbols) for formula in formulas), key=lambda held: held.bytes)


def _value(formula: str, symbols: Mapping[str, int]) -> int:
    value: int = eval(_compiled(formula), {"__builtins__": {}}, dict(symbols))
    return value


@functools.cache
def _compiled(formula: str) -> CodeType:
    return compile(formula.replace("·", "*"), "<formula>", "eval")


def _matrices(config: ModelConfig) -> int:
    heads = 2 * config.d_model * (config.n_heads + config.n_kv_heads) * config.head_dim
    return heads + 3 * config.d_model * config.d_ff


def _is_own(work: Pass) -> bool:
    return work.device == "cpu" and not work.documents and work.seq_len <= 1024


def _inputs(work: Pass, n: Mapping[str, int]) -> tuple[Held, ...]:
    if not work.documents:
        return (_held("ids and targets", "16·b·t", n),)
    return (
        _held("ids, targets, numbers of documents", "24·b·t", n),
        _held("mask and RoPE tables of documents", "b·t·t·w + 4·b·t·k", n),
    )


def _kept(config: ModelConfig, work: Pass, n: Mapping[str, int], layers: int) -> tuple[Held, ...]:
    """What the first `layers` blocks keep for backward."""
    period = checkpointing_period(work.checkpointing)
    again = len(range(0, layers, period)) if period else 0
    symbols = {**n, "P": layers - again, "C": again}
    keeps = KEEPS_PRODUCTS if work.checkpointing == "selective" else KEEPS_INPUT
    kept = (
        _held("blocks that keep all", f"P·({KEEPS_ALL})", symbols),
        _held("blocks that run again", f"C·({keeps})", symbols),
    )
    return tuple(held for held in kept if held.bytes)


def _telling_layers(config: ModelConfig, work: Pass) -> list[int]:
    """The last and the first block of each kind."""
    period, layers = checkpointing_period(work.checkpointing), range(config.n_layers)
    again = [layer for layer in layers if period and layer % period == 0]
    plain = [layer for layer in layers if layer not in again]
    return sorted({kind[end] for kind in (again, plain) if kind for end in (0, -1)}, reverse=True)


def _kernel(n: Mapping[str, int]) -> str:
    return f"4·m·{256 if n['t'] >= 768 else 64 if n['t'] >= 192 else 32}·({min(512, n['t'])} + 2 + k)"


def _attention_backward(work: Pass, n: Mapping[str, int]) -> str:
    if work.device == "cuda":
        grouped = "2·h·k + " if n["h"] > n["kv"] else ""
        return f"b·t·w·({grouped}h·k + 2·kv·k) + 4·b·t·h·(k + 1)"
    if not _is_own(work):
        return "b·t·w·(h·k + 2·kv·k) + m·256·512·" + ("12" if work.compute_bytes == 2 else "8")
    copies = "b·t·w·(2·h·k + 2·kv·k) + " if work.micro_batch_size > 1 else ""
    exact = "b·t·kv·k·8" if work.compute_bytes == 2 else "b·t·kv·k·4"
    candidates = [f"{copies}{exact} + b·t·w·h·k + 8·b·t·kv·k + 8·b·t·h + 12·s + 8·r·k"]
    if work.compute_bytes == 2:
        candidates.append(f"{copies}{exact} + 8·b·t·h·k + 8·b·t·h")
    return _largest("", n, *candidates).formula


def _loss_peak(work: Pass, n: Mapping[str, int], *, gradients: bool) -> Held:
    """Logits, their logarithms in fp32 (and, of half precision on a CPU, their fp32 copy), the head's gradient."""
    tokens = n["b"] * n["t"]
    if work.fused_loss and gradients:
        chunk = min(tokens, 1 << (-(-tokens // -(-n["v"] // n["d"])) - 1).bit_length())
        return _held("loss", "4·v·d + w·c·v + w·v·d", {**n, "c": chunk})
    lifted = 4 if work.compute_bytes == 2 and work.device == "cpu" else 0
    logits = f"c·v·(w + {4 + lifted})"
    if not gradients:
        return _held("logits of a chunk", logits, n)
    head = "4·v·d" if tokens > n["c"] else "0"
    return _largest(
        "logits of a chunk, gradient of the head",
        n,
        logits,
        logits.replace("c", "e") + f" + {head}",
        "w·c·v + w·v·d",
        f"w·e·v + w·v·d + {head}",
        f"w·v·d + {head}" if n["w"] == 2 else "0",
    )


def _head_backward(work: Pass, n: Mapping[str, int]) -> str:
    if work.fused_loss or n["b"] * n["t"] <= n["c"]:
        return "2·b·t·w·d + 2·w·v·d"
    return "2·b·t·w·d + (4 + w)·v·d"
