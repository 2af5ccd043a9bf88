"""What a model costs, by arithmetic alone: parameters, FLOPs, KV cache, static memory. No torch.

verify.py holds these sums against the built module, so neither can be wrong alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from model.config import ModelConfig, checkpointing_period

FEEDFORWARDS = {"swiglu": "SwiGLU", "relu": "ReLU feed-forward", "gelu": "GELU feed-forward"}

BF16_BYTES = 2
FP32_BYTES = 4

FLOPS_FORMULA = (
    "training FLOPs per token = 6 · weights of the matrices + 12 · n_layers · n_heads · head_dim · (keys per query),"
    " with seq_len keys per query if attention is full, (seq_len + 1) / 2 if causal"
)
MLA_FLOPS = "MLA's attention takes 6 · n_layers · n_heads · (2 · head_dim + mla_rope_dim) a key"
WINDOW_FLOPS = "of sliding_window keys no query meets more"
STATIC_MEMORY_FORMULA = (
    "bf16 weights 2 + bf16 gradients 2 + fp32 master 4 + two fp32 AdamW moments 8 = 16 B/parameter, unsharded,"
    " gradients accumulated in bf16"
)


@dataclass(frozen=True)
class Part:
    """One line of the parameter table: `share` is its part of a block ("block") or of the model ("model")."""

    name: str
    parameters: int
    share: float
    share_of: str


@dataclass(frozen=True)
class Flops:
    """Training FLOPs per token (forward 1/3, backward 2/3; recomputation not counted), by FLOPS_FORMULA."""

    matrices: int
    attention_causal: int
    attention_full: int

    @property
    def causal(self) -> int:
        """What the model needs: a query meets (seq_len + 1) / 2 keys on average."""
        return self.matrices + self.attention_causal

    @property
    def full(self) -> int:
        """The common overcount, each query meeting all seq_len keys; an MFU from it flatters."""
        return self.matrices + self.attention_full


EMBEDDINGS = ("embed_tokens.weight", "positions.weight")  # matrices whose rows are looked up


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix as optimizers mean it: logits of how residual streams mix multiply no vector."""
    return len(shape) == 2 and not name.endswith(".mixing_logits")


Shapes = Iterator[tuple[str, tuple[int, ...]]]  # name and shape


def parameter_count(config: ModelConfig) -> int:
    """All parameters; a tied head counts once, with the embedding."""
    outside = _sum(_before_blocks(config)) + _sum(_behind_blocks(config))
    return outside + config.n_layers * _sum(_block(config))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter, in the order in which the module has them; a tied head is the embedding."""
    block = dict(_block(config))
    shapes = dict(_before_blocks(config))
    for layer in range(config.n_layers):
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in block.items()})
    return shapes | dict(_behind_blocks(config))


def parameter_parts(config: ModelConfig) -> list[Part]:
    """The parameter table, part by part, a matrix with its bias; the last line is the whole."""
    block, total = _sum(_block(config)), parameter_count(config)

    def of_block(name: str, parameters: int) -> Part:
        return Part(name, parameters, parameters / block, "block")

    def of_model(name: str, parameters: int) -> Part:
        return Part(name, parameters, parameters / total, "model")

    def each(shapes: Shapes) -> Iterator[Part]:
        layers: dict[str, int] = {}
        for name, shape in shapes:
            layer = name.split(".")[1]
            layers[layer] = layers.get(layer, 0) + math.prod(shape)
        return (of_block(layer, parameters) for layer, parameters in layers.items())

    embedding = config.vocab_size * config.d_model
    streams = _sum(_streams(config))
    return [
        *each(_attention(config)),
        of_block("attention", _sum(_attention(config))),
        *each(_feedforward(config)),
        of_block(FEEDFORWARDS[config.ffn], _sum(_feedforward(config))),
        of_block("two norms", 2 * _sum(_norm(config, "norm"))),
        *([of_block("streams' gates and mixing", streams)] if streams else []),
        of_model("block", block),
        of_model(f"{config.n_layers} blocks", config.n_layers * block),
        *(
            [of_model("embedding, shared with the output", embedding)]
            if config.tied
            else [of_model("embedding", embedding), of_model("output", embedding)]
        ),
        *([of_model("positions", config.seq_len * config.d_model)] if config.positions == "learned" else []),
        *([of_model("last norm", _sum(_norm(config, "norm")))] if config.norm_place == "pre" else []),
        of_model("model", total),
    ]


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> Flops:
    """Training FLOPs per token at a window of `seq_len` (the config's by default), causal and full attention apart.

    A multiply-add is 2 FLOPs and backward costs twice forward, hence 6 per weight; attention's two products, q·k and
    scores·v, take 2 · 2 · n_heads · head_dim forward per key (PaLM, appendix B), with MLA q·k over rotary dimensions
    too. Embedding look-up, norms, RoPE, softmax, mixing of residual streams are not counted; the head is.
    """
    window = config.seq_len if seq_len is None else seq_len
    most = window if config.sliding_window is None else min(window, config.sliding_window)  # keys that a query meets
    shapes = (*_attention(config), *_feedforward(config))
    weights = config.n_layers * sum(math.prod(shape) for name, shape in shapes if is_matrix(name, shape))
    weights += config.vocab_size * config.d_model
    per_key = 6 * config.n_layers * config.n_heads * (2 * config.head_dim + (config.mla_rope_dim or 0))
    met = most * (most + 1) // 2 + (window - most) * most  # by all queries of a window, each its own past
    return Flops(
        matrices=6 * weights,
        attention_causal=per_key * met // window,
        attention_full=per_key * most,
    )


def recomputed_flops_per_token(config: ModelConfig, checkpointing: str) -> int:
    """FLOPs per token that activation checkpointing adds, by the rules of `flops_per_token`, attention causal.

    One forward pass, a third of a block's FLOPs, for each block that is run again in backward; the head never is. Of
    "selective" none count: products and attention are kept.
    """
    period = checkpointing_period(checkpointing)
    if period == 0 or checkpointing == "selective":
        return 0
    flops = flops_per_token(config)
    blocks = flops.causal - 6 * config.vocab_size * config.d_model
    run_again = -(-config.n_layers // period)
    return blocks // 3 * run_again // config.n_layers


def flops_formula(config: ModelConfig) -> str:
    """FLOPS_FORMULA, and what beside it holds for this model."""
    beside = [MLA_FLOPS] if config.attention == "mla" else []
    beside += [WINDOW_FLOPS] if config.sliding_window is not None else []
    return "; ".join((FLOPS_FORMULA, *beside))


def kv_cache_bytes_per_token(
    config: ModelConfig, bytes_per_value: int = BF16_BYTES, *, kv_heads: int | None = None
) -> int:
    """2 · n_layers · kv_heads · head_dim · bytes_per_value; pass kv_heads = n_heads for full multi-head attention.

    MLA holds one latent and one rotary key a token and layer: n_layers · (mla_latent + mla_rope_dim) · bytes_per_value.
    A sliding window spares reading, not holding: every token is counted.
    """
    if config.attention == "mla" and kv_heads is None:
        assert config.mla_latent is not None
        assert config.mla_rope_dim is not None
        return config.n_layers * (config.mla_latent + config.mla_rope_dim) * bytes_per_value
    heads = config.n_kv_heads if kv_heads is None else kv_heads
    return 2 * config.n_layers * heads * config.head_dim * bytes_per_value


def static_memory_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of training state by part, by STATIC_MEMORY_FORMULA; activations and logits are not in it."""
    parameters = parameter_count(config)
    return {
        "weights": BF16_BYTES * parameters,
        "gradients": BF16_BYTES * parameters,
        "master weights": FP32_BYTES * parameters,
        "first moment": FP32_BYTES * parameters,
        "second moment": FP32_BYTES * parameters,
    }


# ---------------------------------------------------------------- names and shapes, in the order of the module


def _before_blocks(config: ModelConfig) -> Shapes:
    yield "embed_tokens.weight", (config.vocab_size, config.d_model)
    if config.positions == "learned":
        yield "positions.weight", (config.seq_len, config.d_model)


def _behind_blocks(config: ModelConfig) -> Shapes:
    if config.norm_place == "pre":
        yield from _norm(config, "norm")
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, config.d_model)


def _block(config: ModelConfig) -> Shapes:
    if config.norm_place == "pre":
        yield from _norm(config, "input_layernorm")
    yield from _attention(config)
    yield from _norm(config, "post_attention_layernorm")
    yield from _feedforward(config)
    if config.norm_place != "pre":
        yield from _norm(config, "post_feedforward_layernorm")
    yield from _streams(config)


def _attention(config: ModelConfig) -> Shapes:
    d, heads, k = config.d_model, config.n_heads, config.head_dim
    if config.attention == "mla":
        assert config.mla_latent is not None
        assert config.mla_rope_dim is not None
        yield from _linear(config, "self_attn.q_proj", heads * (k + config.mla_rope_dim), d)
        yield from _linear(config, "self_attn.kv_a_proj_with_mqa", config.mla_latent + config.mla_rope_dim, d)
        yield "self_attn.kv_a_layernorm.weight", (config.mla_latent,)
        yield from _linear(config, "self_attn.kv_b_proj", heads * 2 * k, config.mla_latent)
    else:
        yield from _linear(config, "self_attn.q_proj", heads * k, d)
        yield from _linear(config, "self_attn.k_proj", config.n_kv_heads * k, d)
        yield from _linear(config, "self_attn.v_proj", config.n_kv_heads * k, d)
    yield from _linear(config, "self_attn.o_proj", d, heads * k)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (k,)
        yield "self_attn.k_norm.weight", (k,)


def _feedforward(config: ModelConfig) -> Shapes:
    if config.ffn == "swiglu":
        yield from _linear(config, "mlp.gate_proj", config.d_ff, config.d_model)
    yield from _linear(config, "mlp.up_proj", config.d_ff, config.d_model)
    yield from _linear(config, "mlp.down_proj", config.d_model, config.d_ff)


def _streams(config: ModelConfig) -> Shapes:
    for sublayer in ("attention", "mlp") if config.residual == "hyper" else ():
        yield f"{sublayer}_streams.read_gates", (config.n_streams,)
        yield f"{sublayer}_streams.write_gates", (config.n_streams,)
        yield f"{sublayer}_streams.mixing_logits", (config.n_streams, config.n_streams)


def _linear(config: ModelConfig, name: str, outputs: int, inputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if config.bias:
        yield f"{name}.bias", (outputs,)


def _norm(config: ModelConfig, name: str) -> Shapes:
    yield f"{name}.weight", (config.d_model,)
    if config.norm == "layer":
        yield f"{name}.bias", (config.d_model,)


def _sum(shapes: Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)
