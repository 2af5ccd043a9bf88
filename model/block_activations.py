"""What one block holds while it is computed, forward and backward, as formulas: component by component. No torch.

Each component says what its autograd Functions keep for backward and what it has beside that while it runs, as its code
does it; a block puts them in its order (blocks.py). On a way back a component finds all that was kept before it, and
gives back its own.

Symbols are those of `activations.LEGEND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.config import ModelConfig
from model.scenes import NOTHING, STREAM, How, Kept, Pass, Scene


def keeps(config: ModelConfig, work: Pass, layer: int) -> str:
    """What a block that isn't run again keeps for backward."""
    return str(_block(config, work, layer).all)


def keeps_run_again(config: ModelConfig, work: Pass, layer: int) -> str:
    """What one keeps that is: its input and, "selective", what COSTLY_OPERATIONS gave."""
    block = _block(config, work, layer)
    return str(block.input + block.products if work.checkpointing == "selective" else block.input)


def forward(config: ModelConfig, work: Pass, layer: int, how: How) -> list[Scene]:
    """A block's scenes, beside what those before it keep."""
    return list(_block(config, work, layer).forward(how))


def backward(config: ModelConfig, work: Pass, layer: int) -> list[Scene]:
    """The same of backward, in its order, beside what the blocks before it keep."""
    return list(_block(config, work, layer).backward())


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
    """Pre-norm: a norm before each half, the sum behind it."""

    def __init__(self, config: ModelConfig, work: Pass, layer: int) -> None:
        self.work, self.is_first = work, layer == 0
        self.attention = _Latent(config, work) if config.attention == "mla" else _Grouped(config, work)
        self.feedforward = _FeedForward(config)
        self.normed = STREAM + norm_statistics(config, work)
        self.norm_gradients = norm_gradients(config, work)

    @property
    def before_attention(self) -> Kept:
        """Of a norm its input, and its output, which the matrices behind it keep."""
        return self.normed + STREAM

    @property
    def before_feedforward(self) -> Kept:
        return self.before_attention + self.attention.kept + self.normed + STREAM

    @property
    def all(self) -> Kept:
        return self.before_feedforward + self.feedforward.kept

    @property
    def input(self) -> Kept:
        return STREAM

    @property
    def products(self) -> Kept:
        return self.attention.products + STREAM + self.feedforward.products + STREAM

    def forward(self, how: How) -> Iterator[Scene]:
        yield from self.attention.forward(self.before_attention, how)
        dropped = STREAM + STREAM + STREAM
        yield from self.feedforward.forward(self.before_feedforward if how == "keeps" else dropped, how)

    def backward(self) -> Iterator[Scene]:
        yield from self.feedforward.backward(self.before_feedforward, "b·t·w·d", ())
        yield from self._backward_of_attention("b·t·w·d", self.before_attention + self.attention.kept, self.normed)

    def _backward_of_attention(self, passing: str, attended: Kept, first: Kept) -> Iterator[Scene]:
        """From the second norm on, given what is kept before it, and before the first; `passing`: the gradient of the
        stream that waits for this half's.
        """
        beside = f"{passing} + {self.norm_gradients}"
        yield Scene("norm", attended + self.normed, (beside,), ("mlp.",))
        formed = ("mlp.", "post_attention_layernorm", "self_attn.o_proj")
        yield from self.attention.backward(self.before_attention, passing, formed)
        yield Scene("first norm", first, (beside,), (*formed, "self_attn."))


class _PostNormBlock(_Block):
    """A norm behind each sum: of it the sum is kept, and its output, which is the stream."""

    @property
    def before_attention(self) -> Kept:
        return STREAM

    @property
    def all(self) -> Kept:
        return super().all + self.normed

    def forward(self, how: How) -> Iterator[Scene]:
        """What attention gave stays until the block is done."""
        yield from self.attention.forward(self.before_attention, how)
        kept = self.before_feedforward if how == "keeps" else STREAM + STREAM
        yield from self.feedforward.forward(kept + STREAM, how)

    def backward(self) -> Iterator[Scene]:
        formed: tuple[str, ...] = ("post_feedforward_layernorm",)
        yield Scene("last norm", self.all, (self.norm_gradients,))
        yield from self.feedforward.backward(self.before_feedforward, "b·t·w·d", formed)
        formed = (*formed, "mlp.")
        yield Scene("norm", STREAM + self.attention.kept + self.normed, (self.norm_gradients,), formed)
        formed = (*formed, "post_attention_layernorm", "self_attn.o_proj")
        yield from self.attention.backward(self.before_attention, "b·t·w·d", formed)


class _HyperBlock(_Block):
    """Pre-norm on several streams: both halves keep these in fp32, and what they write."""

    mixing = "12·b·t·n·d"  # the mixture, what is written to it, and their sum, in fp32

    def streams(self, is_input: bool = False) -> Kept:
        """In fp32 those that came, at first copies of one."""
        return Kept(exact=("d",)) if is_input and not self.work.is_half else Kept(exact=("n·d",))

    @property
    def before_attention(self) -> Kept:
        return self.streams(self.is_first) + super().before_attention

    @property
    def before_feedforward(self) -> Kept:
        return super().before_feedforward + STREAM + self.streams()

    @property
    def all(self) -> Kept:
        return super().all + STREAM

    @property
    def input(self) -> Kept:
        return STREAM if self.is_first else Kept(("n·d",))

    @property
    def products(self) -> Kept:
        return super().products + Kept(exact=("d", "n·d", "d", "n·d"))

    def forward(self, how: How) -> Iterator[Scene]:
        """Streams as they came and as the first half left them are there until the block is done, beside their copies
        in fp32 where these are others.
        """
        came = Kept(("n·d",)) if self.work.is_half or how != "keeps" else NOTHING
        if how == "keeps":
            yield from self.attention.forward(came + self.before_attention, how)
            yield from self.feedforward.forward(came + came + self.before_feedforward, how)
            yield Scene("mixing of streams", came + came + self.all, (self.mixing,))
            return
        lifted = self.streams() if self.work.is_half else NOTHING
        yield from self.attention.forward(came + lifted + super().before_attention, how)
        yield from self.feedforward.forward(came + came + lifted + STREAM + STREAM, how)
        yield Scene("mixing of streams", came + came + lifted + STREAM, (self.mixing,))

    def backward(self) -> Iterator[Scene]:
        """What "selective" kept is given back only when all of the block is there again."""
        cached = self.streams() if self.work.checkpointing == "selective" else NOTHING
        passing = "4·b·t·n·d"
        yield Scene("mixing of streams", self.all + cached, (f"{self.mixing} + 4·b·t·d",))
        yield from self.feedforward.backward(self.before_feedforward, passing, ())
        attended = self.before_attention + self.attention.kept + STREAM + self.streams()
        yield Scene("reading of streams", attended, (self.mixing, f"2·{passing} + b·t·w·n·d"), ("mlp.",))
        yield from self._backward_of_attention(passing, attended, self.streams(self.is_first) + self.normed)


def _block(config: ModelConfig, work: Pass, layer: int) -> _Block:
    """As blocks.build_block chooses."""
    if config.residual == "hyper":
        return _HyperBlock(config, work, layer)
    return (_Block if config.norm_place == "pre" else _PostNormBlock)(config, work, layer)


# ---------------------------------------------------------------- feed-forward


class _FeedForward:
    """Two matrices or, SwiGLU, three: what lies between them, feedforward.py."""

    def __init__(self, config: ModelConfig) -> None:
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
