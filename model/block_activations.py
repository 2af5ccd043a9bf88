"""What one block holds while it is computed, forward and backward, as formulas: component by component. No torch.

Each component says what its autograd Functions keep for backward and what it has beside that while it runs, as its code
does it; a block puts them in its order (blocks.py). On a way back a component finds all that was kept before it, and
gives back its own.

Symbols are those of `activations.LEGEND`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig, checkpointing_period

# As attention_cpu.py has them.
MOST_TOKENS = 1024


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

    @property
    def is_half(self) -> bool:
        return self.compute_bytes == 2

    @functools.cached_property
    def _period(self) -> int:
        return checkpointing_period(self.checkpointing)

    def is_run_again(self, layer: int) -> bool:
        return self._period > 0 and layer % self._period == 0

    def hides(self, config: ModelConfig) -> bool:
        """Whether a sliding window is shorter than the rows."""
        return config.sliding_window is not None and self.seq_len > config.sliding_window


@dataclass(frozen=True)
class Kept:
    """Tensors with so many numbers a token, each named by its formula: of the compute dtype, and of fp32."""

    numbers: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.numbers + other.numbers, self.exact + other.exact)

    def __str__(self) -> str:
        """`b·t·w·(4·d + 2·h·k) + 4·b·t·(h + 2)`."""
        return _text(self)


@functools.lru_cache(maxsize=1024)
def _text(kept: Kept) -> str:
    kinds = (("b·t·w", kept.numbers), ("4·b·t", kept.exact))
    return " + ".join(f"{each}·({_counted(names)})" for each, names in kinds if names) or "0"


def _counted(names: Iterable[str]) -> str:
    """Equal ones put together, those that are plain numbers added up."""
    counts = Counter(names)
    ones = counts.pop("1", 0)
    texts = [name if count == 1 else f"{count}·{name}" for name, count in counts.items()]
    return " + ".join([*texts, *([str(ones)] if ones else [])])


@dataclass(frozen=True)
class Scene:
    """A moment within a block: what it keeps by then, and the largest of some formulas of what is beside that.

    `formed`: beginnings of the names of those of its parameters that have their gradient by then.
    """

    name: str
    own: Kept
    beside: tuple[str, ...]
    formed: tuple[str, ...] = ()


How = Literal["keeps", "drops", "evaluates"]  # training, with what backward wants or without; or no gradients at all

NOTHING = Kept()
STREAM = Kept(("d",))


def keeps(config: ModelConfig, work: Pass, layer: int) -> str:
    """What a block that isn't run again keeps for backward."""
    return str(_Block(config, work, layer).all)


def keeps_run_again(config: ModelConfig, work: Pass, layer: int) -> str:
    """What one keeps that is: its input and, "selective", what COSTLY_OPERATIONS gave."""
    block = _Block(config, work, layer)
    return str(block.input + block.products if work.checkpointing == "selective" else block.input)


def forward(config: ModelConfig, work: Pass, layer: int, how: How) -> list[Scene]:
    """A block's scenes, beside what those before it keep."""
    return list(_Block(config, work, layer).forward(how))


def backward(config: ModelConfig, work: Pass, layer: int) -> list[Scene]:
    """The same of backward, in its order, beside what the blocks before it keep."""
    return list(_Block(config, work, layer).backward())


def norm_statistics(config: ModelConfig, work: Pass) -> Kept:
    """What a norm over the model's width keeps beside its input.

    On a CPU LayerNorm's mean and deviation are of the compute dtype once they are formed.
    """
    if config.norm == "rms":
        return Kept(exact=("1",))
    return Kept(("1", "1")) if work.device == "cpu" else Kept(exact=("1", "1"))


def norm_gradients(config: ModelConfig, work: Pass, width: str = "d", *, rms: bool | None = None) -> str:
    """What a norm's backward has at most, the gradient that it is given among it."""
    is_rms = config.norm == "rms" if rms is None else rms
    if work.device == "cuda" or not is_rms:
        return f"2·b·t·w·{width}"
    return f"b·t·(14 + w)·{width}" if work.is_half else f"b·t·(8 + w)·{width}"


# ---------------------------------------------------------------- blocks


class _Block:
    """Where norms and streams stand: see blocks.py."""

    def __init__(self, config: ModelConfig, work: Pass, layer: int) -> None:
        self.config, self.work = config, work
        self.is_first = layer == 0
        self.is_last = layer == config.n_layers - 1
        self.attention = _Latent(config, work) if config.attention == "mla" else _Grouped(config, work)
        self.feedforward = _FeedForward(config, work)
        self.statistics = norm_statistics(config, work)
        self.is_post = config.norm_place != "pre"
        self.is_hyper = config.residual == "hyper"

    @property
    def before_attention(self) -> Kept:
        """Of a norm its input and its output, which the matrices behind it keep; without one the stream alone."""
        return STREAM if self.is_post else self.streams(self.is_first) + STREAM + self.statistics + STREAM

    @property
    def before_feedforward(self) -> Kept:
        written = STREAM + self.streams(False) if self.is_hyper else NOTHING
        return self.before_attention + self.attention.kept + written + STREAM + self.statistics + STREAM

    @property
    def all(self) -> Kept:
        behind = STREAM + self.statistics if self.is_post else STREAM if self.is_hyper else NOTHING
        return self.before_feedforward + self.feedforward.kept + behind

    @property
    def input(self) -> Kept:
        return Kept(("n·d",)) if self.is_hyper and not self.is_first else STREAM

    @property
    def products(self) -> Kept:
        mixed = Kept(exact=("d", "n·d", "d", "n·d")) if self.is_hyper else NOTHING
        return self.attention.products + STREAM + self.feedforward.products + STREAM + mixed

    def streams(self, is_input: bool) -> Kept:
        """The streams in fp32, which both of their products keep; in fp32 those that came, at first copies of one."""
        if not self.is_hyper:
            return NOTHING
        return Kept(exact=("d",)) if is_input and not self.work.is_half else Kept(exact=("n·d",))

    def forward(self, how: How) -> Iterator[Scene]:
        if self.is_hyper:
            yield from self._forward_in_streams(how)
            return
        before = self.before_attention
        yield from self.attention.forward(before, how)
        if self.is_post:
            before = Kept(("d", "d", "d")) if how != "keeps" else self.before_feedforward + STREAM
        else:
            before = Kept(("d", "d", "d")) if how != "keeps" else self.before_feedforward
        yield from self.feedforward.forward(before, how)

    def _forward_in_streams(self, how: How) -> Iterator[Scene]:
        """Streams as they came and as the first sublayer left them are there until the block is done, beside their
        copies in fp32 where these are others.
        """
        came = Kept(("n·d",)) if self.work.is_half or how != "keeps" else NOTHING
        lifted = Kept(exact=("n·d",)) if self.work.is_half else NOTHING
        mixing = "12·b·t·n·d"
        read = STREAM + self.statistics + STREAM
        if how != "keeps":
            yield from self.attention.forward(came + lifted + read, how)
            yield from self.feedforward.forward(came + came + lifted + Kept(("d", "d")), how)
            yield Scene("mixing of streams", came + came + lifted + STREAM, (mixing,))
        else:
            yield from self.attention.forward(came + self.before_attention, how)
            yield from self.feedforward.forward(came + came + self.before_feedforward, how)
            yield Scene("mixing of streams", came + came + self.all, (mixing,))

    def backward(self) -> Iterator[Scene]:
        formed: tuple[str, ...] = ()
        gradients = norm_gradients(self.config, self.work)
        passing = "b·t·w·d"
        if self.is_post:
            yield Scene("last norm", self.all, (gradients,))
            formed = ("post_feedforward_layernorm",)
        if self.is_hyper:
            # What "selective" kept is given back only when all of the block is there again.
            cached = Kept(exact=("n·d",)) if self.work.checkpointing == "selective" else NOTHING
            yield Scene("mixing of streams", self.all + cached, ("12·b·t·n·d + 4·b·t·d",))
            passing = "4·b·t·n·d"
        yield from self.feedforward.backward(self.before_feedforward, passing, formed)
        formed = (*formed, "mlp.")
        own = self.before_attention + self.attention.kept
        if self.is_post:
            yield Scene("norm", own + STREAM + self.statistics, (gradients,), formed)
        elif self.is_hyper:
            own_streams = own + STREAM + self.streams(False)
            yield Scene("norm", own_streams + STREAM + self.statistics, (f"{passing} + {gradients}",), formed)
            yield Scene("reading of streams", own_streams, ("12·b·t·n·d", "8·b·t·n·d + b·t·w·n·d"), formed)
        else:
            yield Scene("norm", own + STREAM + self.statistics, (f"{passing} + {gradients}",), formed)
        formed = (*formed, "post_attention_layernorm", "self_attn.o_proj")
        yield from self.attention.backward(self.before_attention, passing, formed)
        if not self.is_post:
            own = self.streams(self.is_first) + STREAM + self.statistics
            formed = (*formed, "self_attn.")
            yield Scene("first norm", own, (f"{passing} + {gradients}",), formed)


# ---------------------------------------------------------------- feed-forward


class _FeedForward:
    """Two matrices or, SwiGLU, three: what lies between them, feedforward.py."""

    def __init__(self, config: ModelConfig, work: Pass) -> None:
        self.is_gated, self.is_relu = config.ffn == "swiglu", config.ffn == "relu"
        kept = {"swiglu": 3, "gelu": 2, "relu": 1}[config.ffn]  # ReLU's backward reads its output
        self.kept = Kept(("f",) * kept)
        self.products = Kept(("f", "f") if self.is_gated else ("f",))

    def forward(self, before: Kept, how: How) -> Iterator[Scene]:
        inner = ("f", "f", "f") if self.is_gated else ("f", "f")
        yield Scene("feed-forward", before + Kept(inner), ("0",))

    def backward(self, before: Kept, passing: str, formed: tuple[str, ...]) -> Iterator[Scene]:
        gradients = "b·t·w·f" if not (self.is_gated or self.is_relu) else "2·b·t·w·f"
        beside = f"{passing} + {gradients}"
        yield Scene("feed-forward", before + self.kept, (beside,), (*formed, "mlp.down_proj"))


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class _Widths:
    """Of a token in attention's kernel: queries, keys (as many values), and one head."""

    queries: str
    keys: str
    head: str


class _Attention:
    """What all kinds share: the kernel and what is before and behind it."""

    kept: Kept
    products: Kept
    copied_for_torch = ""  # of the output's gradient, which torch's kernel wants with a token's heads side by side

    def __init__(self, config: ModelConfig, work: Pass, widths: _Widths) -> None:
        self.config, self.work, self.widths = config, work, widths
        self.grouped = config.n_heads > config.n_kv_heads
        self.turns = config.positions == "rope"

    def forward(self, before: Kept, how: How) -> Iterator[Scene]:
        raise NotImplementedError

    def backward(self, before: Kept, passing: str, formed: tuple[str, ...]) -> Iterator[Scene]:
        raise NotImplementedError

    def room(self) -> str:
        """Of torch's attention on a CPU: for each thread some queries' scores, in half precision twice, and output."""
        return f"{6 if self.work.is_half else 4}·m·a + 4·m·y·{self.widths.head}" if self.work.device == "cpu" else "0"

    def gradients(self) -> tuple[str, ...]:
        """What attention's backward makes, the gradients of q, k and v among it.

        On a GPU that is FlashAttention's: q's gradient in fp32 before it is rounded, those of k and v for each query
        head.
        """
        work, q, kv, k = self.work, self.widths.queries, self.widths.keys, self.widths.head
        if work.device == "cuda":
            return (f"b·t·w·({q} + 2·{kv}{f' + 2·{q}' if self.grouped else ''}) + 4·b·t·h·({k} + 1)",)
        if not work.attends_by_products:
            return (f"{self.copied_for_torch}b·t·w·({q} + 2·{kv}) + {14 if work.is_half else 8}·m·a",)
        exact = f"{self._copies()}{8 if work.is_half else 4}·b·t·{kv} + 8·b·t·h"
        chunks = f"{exact} + b·t·w·{q} + 8·b·t·{kv}{f' + 2·w·q·{k}' if self.grouped else ''}"
        if not work.is_half:
            return (f"{chunks} + 8·s + w·p·{k}",)
        return f"{chunks} + 12·s", f"{chunks} + 8·s + (4 + w)·p·{k}", f"{exact} + 8·b·t·{q}"

    def _copies(self) -> str:
        """Of q, the output's gradient, k and v, so that a head's tokens lie side by side, before other terms."""
        if self.work.micro_batch_size == 1 or self.config.n_kv_heads == 1:
            return ""
        return f"b·t·w·(2·{self.widths.queries} + 2·{self.widths.keys}) + "


class _Grouped(_Attention):
    """attention.py: MHA, GQA, MQA, with QK-Norm or without."""

    def __init__(self, config: ModelConfig, work: Pass) -> None:
        super().__init__(config, work, _Widths("h·k", "kv·k", "k"))
        self.normed = Kept(("h·k", "kv·k"), ("h", "kv")) if config.qk_norm else NOTHING
        self.heads = Kept(("h·k", "kv·k", "kv·k"))
        self.kept = self.normed + self.heads + Kept(("h·k",), ("h",))
        self.products = self.heads + Kept(("h·k",), ("h",))

    def forward(self, before: Kept, how: How) -> Iterator[Scene]:
        normed = NOTHING if how != "keeps" else self.normed
        if self.config.qk_norm:
            is_torchs = how == "evaluates" and self.work.is_half and self.work.device == "cpu"
            yield Scene("QK-Norm", before + self.heads, ("12·b·t·h·k" if is_torchs else "b·t·h·k·(x + w)",))
        if self.turns:
            yield Scene("RoPE", before + normed + self.heads, ("b·t·h·k·(x + w) + 4·t·k",))
        own = before + normed + self.heads + Kept(("h·k",), ("h",))
        yield Scene("attention", own, (self.room(), "b·t·w·d"))

    def backward(self, before: Kept, passing: str, formed: tuple[str, ...]) -> Iterator[Scene]:
        beside = tuple(f"{passing} + b·t·w·h·k + {gradients}" for gradients in self.gradients())
        yield Scene("attention", before + self.kept, beside, formed)
        passed = f"{passing} + b·t·w·(h·k + 2·kv·k)"
        if self.turns:
            turned = f"{passed} + b·t·h·k·(x + w) + 6·t·k"
            yield Scene("RoPE", before + self.normed, (turned,), formed)
        if self.config.qk_norm:
            norms = norm_gradients(self.config, self.work, "h·k", rms=True)
            yield Scene("QK-Norm", before + self.normed, (f"{passing} + 2·b·t·w·kv·k + {norms}",), formed)
        yield Scene("heads", before, (f"{passed} + 2·b·t·w·d",), formed)


class _Latent(_Attention):
    """mla.py: keys and values made from a latent, so that attention is that of full heads, k + r wide."""

    copied_for_torch = "b·t·w·h·(k + r) + "

    def __init__(self, config: ModelConfig, work: Pass) -> None:
        full = "h·(k + r)"
        super().__init__(config, work, _Widths(full, full, "(k + r)"))
        self.latent = Kept(("(l + r)",), ("1",))
        self.held = Kept(("(l + r)",))
        self.heads = Kept((full, full, full))
        self.output = Kept((full,), ("h",))
        self.kept = self.latent + self.held + self.heads + self.output + Kept(("h·k",))
        self.products = self.held + Kept((full, "2·h·k", full), ("h",))

    def forward(self, before: Kept, how: How) -> Iterator[Scene]:
        own = before + self.held + (NOTHING if how != "keeps" else self.latent) + self.heads + self.output
        queries = "b·t·w·(h·(k + r) + h·r)"
        yield Scene("attention", own, (f"{queries} + 2·b·t·w·h·k + {self.room()}", f"{queries} + b·t·w·(h·k + d)"))

    def backward(self, before: Kept, passing: str, formed: tuple[str, ...]) -> Iterator[Scene]:
        own = before + self.latent + self.held
        attended = own + self.heads + self.output
        beside = tuple(f"{passing} + b·t·w·h·(k + r) + {gradients}" for gradients in self.gradients())
        yield Scene("attention", attended, beside, formed)
        yield Scene("keys and values", own, (f"{passing} + b·t·w·(3·h·(k + r) + 5·h·k)",), formed)

    def _copies(self) -> str:
        return ""  # of what was put together for the kernel
