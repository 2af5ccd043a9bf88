"""The decoder again, in float64 numpy, written from the formulas with plain loops and none of the model's code."""

from collections.abc import Mapping

import numpy as np

from model.config import ModelConfig

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


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


def attention(x: Array, q_w: Array, k_w: Array, v_w: Array, o_w: Array, config: ModelConfig) -> Array:
    """x (tokens, d_model). Head by head, query by query: query head h reads key/value head h // (q/kv)."""
    tokens, size = x.shape[0], config.head_dim
    heads = np.zeros((tokens, config.n_heads * size))
    for h in range(config.n_heads):
        g = h // (config.n_heads // config.n_kv_heads)
        q = rope(x @ q_w[h * size : (h + 1) * size].T, config.rope_base)
        k = rope(x @ k_w[g * size : (g + 1) * size].T, config.rope_base)
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
