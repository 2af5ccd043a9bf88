"""The decoder again, in float64 numpy, written from the formulas with plain loops and none of the model's code."""

from collections.abc import Mapping

import numpy as np

from model.config import ModelConfig

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.0)


def gelu(x: Array) -> Array:
    """GPT-2's, with a hyperbolic tangent in the place of the error function."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rope(x: Array, base: float) -> Array:
    """x (tokens, head_dim), token number = position; each pair (i, i + head_dim/2) as one complex number."""
    half = x.shape[1] // 2
    turned = np.empty_like(x)
    for position in range(x.shape[0]):
        for i in range(half):
            angle = position * base ** (-2.0 * i / x.shape[1])
            z = complex(x[position, i], x[position, i + half]) * np.exp(1j * angle)
            turned[position, i], turned[position, i + half] = z.real, z.imag
    return turned


def turned(x: Array, config: ModelConfig) -> Array:
    return rope(x, config.rope_base) if config.positions == "rope" else x


def attention(x: Array, q_w: Array, k_w: Array, v_w: Array, o_w: Array, config: ModelConfig) -> Array:
    """x (tokens, d_model). Head by head, query by query: query head h reads key/value head h // (q/kv)."""
    tokens, size = x.shape[0], config.head_dim
    heads = np.zeros((tokens, config.n_heads * size))
    for h in range(config.n_heads):
        g = h // (config.n_heads // config.n_kv_heads)
        q = turned(x @ q_w[h * size : (h + 1) * size].T, config)
        k = turned(x @ k_w[g * size : (g + 1) * size].T, config)
        v = x @ v_w[g * size : (g + 1) * size].T
        for t in range(tokens):
            scores = q[t] @ k[: t + 1].T / np.sqrt(size)
            heads[t, h * size : (h + 1) * size] = softmax(scores) @ v[: t + 1]
    return heads @ o_w.T


def logits(ids: Array, weights: Mapping[str, Array], config: ModelConfig) -> Array:
    """ids (tokens,) -> (tokens, vocab_size), from a state dict of float64 arrays."""
    x = weights["embed_tokens.weight"][ids]
    for layer in range(config.n_layers):

        def weight(name: str, prefix: str = f"layers.{layer}.") -> Array:
            return weights[f"{prefix}{name}.weight"]

        projections = [weight(f"self_attn.{name}_proj") for name in "qkvo"]
        normed = rms_norm(x, weight("input_layernorm"), config.norm_eps)
        x = x + attention(normed, *projections, config)
        matrices = [weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")]
        x = x + swiglu(rms_norm(x, weight("post_attention_layernorm"), config.norm_eps), *matrices)
    return rms_norm(x, weights["norm.weight"], config.norm_eps) @ weights["lm_head.weight"].T


def sinkhorn(logits: Array) -> Array:
    """Rows and columns scaled by vectors u and v (Sinkhorn & Knopp 1967), iterated far beyond what is needed."""
    matrix = np.exp(logits)
    v = np.ones(matrix.shape[1])
    for _ in range(2000):
        u = 1 / (matrix @ v)
        v = 1 / (matrix.T @ u)
    return u[:, None] * matrix * v[None, :]


def family_logits(ids: Array, weights: Mapping[str, Array], config: ModelConfig) -> Array:
    """As `logits`, for every norm, norm place, bias, feed-forward, residual and kind of position but scaled RoPE."""
    x = weights["embed_tokens.weight"][ids]
    if config.positions == "learned":
        x = x + weights["positions.weight"][: len(ids)]
    if config.positions == "sinusoidal":
        x = x * np.sqrt(config.d_model)
        for position in range(len(ids)):
            for i in range(0, config.d_model, 2):
                angle = position / 10000 ** (i / config.d_model)
                x[position, i] += np.sin(angle)
                x[position, i + 1] += np.cos(angle)

    def norm(x: Array, name: str) -> Array:
        if config.norm == "layer":
            return layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)
        return rms_norm(x, weights[f"{name}.weight"], config.norm_eps)

    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def with_bias(name: str) -> Array:
        """A matrix for inputs that have a 1 behind them."""
        matrix = weights[f"{name}.weight"]
        return np.column_stack((matrix, weights.get(f"{name}.bias", np.zeros(len(matrix)))))

    def attend(x: Array, block: str) -> Array:
        projections = [with_bias(f"{block}self_attn.{name}_proj") for name in "qkv"]
        ones = np.column_stack((x, np.ones(len(x))))
        o_w = weights[f"{block}self_attn.o_proj.weight"]
        return attention(ones, *projections, o_w, config) + weights.get(f"{block}self_attn.o_proj.bias", 0.0)

    def feed(x: Array, block: str) -> Array:
        up = linear(x, f"{block}mlp.up_proj")
        if config.ffn == "swiglu":
            inner = silu(linear(x, f"{block}mlp.gate_proj")) * up
        else:
            inner = {"relu": relu, "gelu": gelu}[config.ffn](up)
        return linear(inner, f"{block}mlp.down_proj")

    streams = np.array([x] * config.n_streams)
    for layer in range(config.n_layers):
        block = f"layers.{layer}."
        if config.norm_place != "pre":
            alpha = (2 * config.n_layers) ** 0.25 if config.norm_place == "deepnorm" else 1.0
            x = norm(alpha * x + attend(x, block), f"{block}post_attention_layernorm")
            x = norm(alpha * x + feed(x, block), f"{block}post_feedforward_layernorm")
        elif config.residual == "plain":
            x = x + attend(norm(x, f"{block}input_layernorm"), block)
            x = x + feed(norm(x, f"{block}post_attention_layernorm"), block)
        else:
            for part, before, sublayer in (
                ("attention", "input_layernorm", attend),
                ("mlp", "post_attention_layernorm", feed),
            ):
                gates = {name: weights[f"{block}{part}_streams.{name}"] for name in ("read_gates", "write_gates")}
                mixing = sinkhorn(weights[f"{block}{part}_streams.mixing_logits"])
                read = sum(gate * stream for gate, stream in zip(gates["read_gates"], streams, strict=True))
                out = sublayer(norm(read, f"{block}{before}"), block)
                streams = np.array(
                    [
                        sum(mixing[i, j] * streams[j] for j in range(config.n_streams)) + gates["write_gates"][i] * out
                        for i in range(config.n_streams)
                    ]
                )
            x = streams.mean(axis=0)
    if config.norm_place == "pre":
        x = norm(x, "norm")
    return x @ weights["lm_head.weight"].T
