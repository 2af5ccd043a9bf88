"""What a model costs, by arithmetic alone: parameters, FLOPs, KV cache, static memory. No torch.

verify.py holds these sums against the built module, so neither can be wrong alone.
"""

from dataclasses import dataclass

from model.config import ModelConfig

BF16_BYTES = 2
FP32_BYTES = 4

FLOPS_FORMULA = (
    "training FLOPs per token = 6 · weights of the matrices + 12 · n_layers · n_heads · head_dim · (keys per query),"
    " with seq_len keys per query if attention is full, (seq_len + 1) / 2 if causal"
)
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


def parameter_count(config: ModelConfig) -> int:
    """All parameters; a tied head counts once, with the embedding."""
    embeddings = (1 if config.tied else 2) * config.vocab_size * config.d_model
    return embeddings + config.n_layers * _block(config) + config.d_model


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter, in the order in which the module has them; a tied head is the embedding."""
    d, q_width, kv_width = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    block = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (q_width, d),
        "self_attn.k_proj": (kv_width, d),
        "self_attn.v_proj": (kv_width, d),
        "self_attn.o_proj": (d, q_width),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (config.d_ff, d),
        "mlp.up_proj": (config.d_ff, d),
        "mlp.down_proj": (d, config.d_ff),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, d)}
    for layer in range(config.n_layers):
        shapes.update({f"layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    shapes["norm.weight"] = (d,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def parameter_parts(config: ModelConfig) -> list[Part]:
    """The parameter table, part by part; the last line is the whole."""
    d, block, total = config.d_model, _block(config), parameter_count(config)
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def of_block(name: str, parameters: int) -> Part:
        return Part(name, parameters, parameters / block, "block")

    def of_model(name: str, parameters: int) -> Part:
        return Part(name, parameters, parameters / total, "model")

    embedding = config.vocab_size * d
    return [
        of_block("q_proj", d * q_width),
        of_block("k_proj", d * kv_width),
        of_block("v_proj", d * kv_width),
        of_block("o_proj", q_width * d),
        of_block("attention", _attention(config)),
        of_block("gate_proj", d * config.d_ff),
        of_block("up_proj", d * config.d_ff),
        of_block("down_proj", config.d_ff * d),
        of_block("SwiGLU", _feedforward(config)),
        of_block("two norms", 2 * d),
        of_model("block", block),
        of_model(f"{config.n_layers} blocks", config.n_layers * block),
        *(
            [of_model("embedding, shared with the output", embedding)]
            if config.tied
            else [of_model("embedding", embedding), of_model("output", embedding)]
        ),
        of_model("last norm", d),
        of_model("model", total),
    ]


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> Flops:
    """Training FLOPs per token at a window of `seq_len` (the config's by default), causal and full attention apart.

    A multiply-add is 2 FLOPs and backward costs twice forward, hence 6 per weight; attention's two products, q·k and
    scores·v, take 2 · 2 · n_heads · head_dim forward per key (PaLM, appendix B). Embedding look-up, norms, RoPE,
    softmax are not counted; the head is.
    """
    window = config.seq_len if seq_len is None else seq_len
    weights = config.n_layers * (_attention(config) + _feedforward(config)) + config.vocab_size * config.d_model
    per_key = 12 * config.n_layers * config.n_heads * config.head_dim
    return Flops(
        matrices=6 * weights,
        attention_causal=per_key * (window + 1) // 2,
        attention_full=per_key * window,
    )


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


def _attention(config: ModelConfig) -> int:
    return 2 * config.d_model * (config.n_heads + config.n_kv_heads) * config.head_dim


def _feedforward(config: ModelConfig) -> int:
    return 3 * config.d_model * config.d_ff


def _block(config: ModelConfig) -> int:
    return _attention(config) + _feedforward(config) + 2 * config.d_model
