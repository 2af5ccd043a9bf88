"""Multi-head latent attention: the formula, DeepSeek-V2's own module, and a cache of latents that gives the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding

from model.attention import build_attention
from model.cache import KVCache
from model.config import ModelConfig, ModelConfigError
from model.masks import additive, document_mask, window_mask
from model.mla import LatentAttention
from model.positions import build_positions, one_text, reorder
from model.rope_scaling import plain
from model.transformer import Transformer
from model.verify import check_cache, check_causality
from tests.model import reference
from tests.model.conftest import lively, random_ids, seeded

CPU = torch.device("cpu")
CHOICES: list[dict[str, Any]] = [{}, {"bias": True}, {"sliding_window": 4}, {"rope_layout": "interleaved"}]
SCALED = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 12}


@pytest.fixture
def config(tiny_config: ModelConfig) -> ModelConfig:
    return replace(tiny_config, n_kv_heads=4, attention="mla", mla_latent=40, mla_rope_dim=16)


def attention_of(config: ModelConfig) -> LatentAttention:
    attention = build_attention(config, 0)
    assert isinstance(attention, LatentAttention)
    generator = seeded(3)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return attention


def by_formula(x: np.ndarray, weights: dict[str, np.ndarray], config: ModelConfig) -> np.ndarray:
    """x (tokens, d_model); the keys and values of every head written out (DeepSeek-V2, eq. 9 to 19)."""
    size, rope, latent = config.head_dim, config.mla_rope_dim, config.mla_latent

    def linear(name: str, y: np.ndarray) -> np.ndarray:
        return y @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    down = linear("kv_a_proj_with_mqa", x)
    c = reference.rms_norm(down[:, :latent], weights["kv_a_layernorm.weight"], config.norm_eps)
    k_shared = reference.rope(down[:, latent:], config.rope_base)
    q, kv = linear("q_proj", x), linear("kv_b_proj", c)
    out = np.zeros((len(x), config.n_heads * size))
    for h in range(config.n_heads):
        q_h, kv_h = q[:, h * (size + rope) :][:, : size + rope], kv[:, h * 2 * size :][:, : 2 * size]
        query = np.concatenate([q_h[:, :size], reference.rope(q_h[:, size:], config.rope_base)], axis=1)
        key = np.concatenate([kv_h[:, :size], k_shared], axis=1)
        for t in range(len(x)):
            scores = query[t] @ key[: t + 1].T / math.sqrt(size + rope)
            out[t, h * size : (h + 1) * size] = reference.softmax(scores) @ kv_h[: t + 1, size:]
    return linear("o_proj", out)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", ["whole", "token by token", "in chunks"])
def test_against_the_formula(config: ModelConfig, bias: bool, way: str) -> None:
    """Token by token is the absorbed way from the first token on."""
    config = replace(config, bias=bias)
    assert distance_from_the_formula(config, way) < 1e-12


def distance_from_the_formula(config: ModelConfig, way: str) -> float:
    attention = attention_of(config).double()
    x_btd = torch.randn(1, 11, config.d_model, dtype=torch.float64, generator=seeded(0))
    angle_td = torch.arange(11.0, dtype=torch.float64)[:, None] * plain(16, config.rope_base)
    cos_td, sin_td = angle_td.cos(), angle_td.sin()
    sizes = {"whole": [11], "token by token": [1] * 11, "in chunks": [4, 1, 5, 1]}[way]
    cache = None if way == "whole" else KVCache(config, batch_size=1, max_tokens=11, dtype=torch.float64)
    parts, start = [], 0
    with torch.no_grad():
        for size in sizes:
            stop = start + size
            mask = None if cache is None else cache.mask(size)
            parts.append(attention(x_btd[:, start:stop], (cos_td[start:stop], sin_td[start:stop]), cache, mask))
            if cache is not None:
                cache.advance(size)
            start = stop
    weights = {name: parameter.detach().numpy() for name, parameter in attention.named_parameters()}
    return float(np.abs(torch.cat(parts, dim=1)[0].numpy() - by_formula(x_btd[0].numpy(), weights, config)).max())


def unscaled(self: LatentAttention, q_k: Tensor, q_r: Tensor, held: Tensor, mask: Tensor | None) -> Tensor:
    scale = math.sqrt((self.head_dim + self.rope_dim) / (self.latent + self.rope_dim))
    return absorbed(self, q_k * scale, q_r * scale, held, mask)


def without_the_bias_of_values(
    self: LatentAttention, q_k: Tensor, q_r: Tensor, held: Tensor, mask: Tensor | None
) -> Tensor:
    return absorbed(self, q_k, q_r, held, mask) - self.kv_b_proj.bias.view(4, 2, 1, -1)[:, 1]


def without_rotary_part(self: LatentAttention, q_k: Tensor, q_r: Tensor, held: Tensor, mask: Tensor | None) -> Tensor:
    return absorbed(self, q_k, q_r * 0, held, mask)


absorbed = LatentAttention._absorbed


@pytest.mark.parametrize("mutant", [unscaled, without_the_bias_of_values, without_rotary_part])
def test_formula_and_cache_check_catch_what_absorbing_can_lose(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Tensor]
) -> None:
    config = replace(config, bias=True)
    model = lively(Transformer(config)).eval()
    monkeypatch.setattr(LatentAttention, "_absorbed", mutant)
    assert distance_from_the_formula(config, "token by token") > 1e-3
    with torch.no_grad():
        assert not check_cache(model, seeded(5)).passed


def rotary_parts_unturned(self: LatentAttention, x_btd: Tensor, rotation: Any) -> Tensor:
    latent_btc, k_btr = torch.split(self.kv_a_proj_with_mqa(x_btd), [self.latent, self.rope_dim], dim=-1)
    return torch.cat((self.kv_a_layernorm(latent_btc), k_btr), dim=-1)[:, None]


def latent_unnormed(self: LatentAttention, x_btd: Tensor, rotation: Any) -> Tensor:
    latent_btc, k_btr = torch.split(self.kv_a_proj_with_mqa(x_btd), [self.latent, self.rope_dim], dim=-1)
    return torch.cat((latent_btc[:, None], self.turn(k_btr[:, None], *rotation)), dim=-1)


@pytest.mark.parametrize("mutant", [rotary_parts_unturned, latent_unnormed])
def test_the_formula_catches_latents_made_wrong(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(LatentAttention, "_latents", mutant)
    assert distance_from_the_formula(config, "whole") > 1e-3


# ---------------------------------------------------------------- DeepSeek-V2's own


@pytest.fixture
def theirs() -> Callable[[ModelConfig, LatentAttention, Tensor], Tensor]:
    def compute(config: ModelConfig, attention: LatentAttention, x_btd: Tensor) -> Tensor:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
        if config.rope_scaling == "yarn":
            rope.update(
                rope_type="yarn",
                factor=config.rope_scaling_factor,
                original_max_position_embeddings=config.rope_original_seq_len,
                mscale=1.0,
                mscale_all_dim=1.0,
            )
        their_config = DeepseekV2Config(
            hidden_size=config.d_model,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_heads,
            q_lora_rank=None,
            kv_lora_rank=config.mla_latent,
            qk_rope_head_dim=config.mla_rope_dim,
            qk_nope_head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            head_dim=config.mla_rope_dim,
            max_position_embeddings=config.seq_len,
            rope_parameters=rope,
            attn_implementation="eager",
        )
        module = DeepseekV2Attention(their_config, 0)
        module.load_state_dict(attention.state_dict())  # all names and shapes are theirs
        module.kv_a_layernorm.variance_epsilon = config.norm_eps
        tokens = x_btd.shape[1]
        angles = DeepseekV2RotaryEmbedding(their_config)(x_btd, torch.arange(tokens)[None])
        mask = torch.full((tokens, tokens), -math.inf).triu(1)[None, None]
        return module(x_btd, mask, position_embeddings=angles)[0]

    return compute


@torch.no_grad()
@pytest.mark.parametrize("scaling", [{}, SCALED], ids=["plain", "yarn"])
def test_equals_transformers(config: ModelConfig, scaling: dict[str, Any], theirs: Callable[..., Tensor]) -> None:
    """YaRN as theirs with mscale_all_dim: not cos and sin but the whole score is made larger."""
    config = replace(config, rope_layout="interleaved", **scaling)
    attention = attention_of(config)
    x_btd = torch.randn(2, 30, config.d_model, generator=seeded(0))
    _, rotation = build_positions(config)(x_btd, one_text(30))
    expected = theirs(config, attention, x_btd)
    assert (attention(x_btd, rotation) - expected).abs().max() < 1e-5 * expected.abs().max()


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("choice", [*CHOICES, SCALED, SCALED | {"rope_scaling": "dynamic"}], ids=str)
@torch.no_grad()
def test_the_cache_gives_the_logits_of_the_full_pass(config: ModelConfig, choice: dict[str, Any]) -> None:
    """In one chunk, in three, token by token, and in rows of unequal lengths; and the past stays the past."""
    model = lively(Transformer(replace(config, **choice))).eval()
    outcome = check_cache(model, seeded(5))
    assert outcome.passed, outcome.measured
    if "sliding_window" not in choice:
        assert check_causality(model, seeded(5)).passed


def test_bytes_of_the_cache_by_hand(config: ModelConfig) -> None:
    """8 heads of 64, one layer, 4096 tokens, bf16: 8 MiB of keys and values; of latents 0.5, with 32 rotary numbers
    0.75.
    """
    sizes = {"n_layers": 1, "n_heads": 8, "n_kv_heads": 8, "seq_len": 4096}

    def mebibytes(config: ModelConfig) -> float:
        return KVCache(config, batch_size=1, max_tokens=4096, dtype=torch.bfloat16, device="meta").nbytes / 2**20

    mla = replace(config, mla_latent=64, mla_rope_dim=32, **sizes)
    assert mebibytes(replace(mla, attention="gqa", mla_latent=None, mla_rope_dim=None)) == 8
    assert mebibytes(mla) == 0.75
    assert mebibytes(mla) * 64 / (64 + 32) == 0.5
    (held,) = KVCache(mla, batch_size=2, max_tokens=7).held
    assert held.shape == (1, 2, 1, 7, 96)


@torch.no_grad()
def test_a_step_attends_the_latents_themselves(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or value of a head is made of a cached token: kv_b_proj gives one token's, whatever the cache holds."""
    model = lively(Transformer(config)).eval()
    cache = KVCache(config, batch_size=2, max_tokens=30)
    model(random_ids(config, 2, 20), cache=cache)
    monkeypatch.setattr(LatentAttention, "_expanded", None)
    made: list[int] = []
    for layer in model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda _, given, out: made.append(out.shape[-2]))
    assert model(random_ids(config, 2, 1), cache=cache).isfinite().all()
    assert made == [1] * config.n_layers


# ---------------------------------------------------------------- training


@torch.no_grad()
def test_documents_read_as_they_do_alone(config: ModelConfig) -> None:
    model = lively(Transformer(config)).eval()
    ids_bt = random_ids(config, 1, 30)
    documents_bt = (torch.arange(30) >= 12).long()[None]
    logits_btv = model(ids_bt, documents_bt=documents_bt)
    for start, stop in ((0, 12), (12, 30)):
        alone_btv = model(ids_bt[:, start:stop])
        assert (logits_btv[:, start:stop] - alone_btv).abs().max() < 1e-5 * alone_btv.abs().max()


@pytest.mark.parametrize("masked", ["causal", "window", "documents"])
def test_gradients_are_those_of_float64(config: ModelConfig, masked: str) -> None:
    """fp32 takes the kernels of training on CPUs, float64 torch's own."""
    attention = attention_of(config)
    x_btd = torch.randn(2, 70, config.d_model, generator=seeded(0))
    documents_bt = (torch.arange(70) >= 31).long().expand(2, -1)
    angle_td = torch.arange(70.0, dtype=torch.float64)[:, None] * plain(16, config.rope_base)
    found = []
    for dtype in (torch.float32, torch.float64):
        mask = {
            "causal": None,
            "window": additive(window_mask(70, 9, CPU), dtype),
            "documents": additive(document_mask(documents_bt), dtype),
        }[masked]
        attention.to(dtype)
        out = attention(x_btd.to(dtype), (angle_td.cos().to(dtype), angle_td.sin().to(dtype)), None, mask)
        found.append(torch.autograd.grad(out.square().sum(), list(attention.parameters())))
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)) < 1e-5


def test_gradcheck(tiny_config: ModelConfig) -> None:
    sizes = {"d_model": 6, "n_heads": 2, "n_kv_heads": 2, "head_dim": 4}
    with pytest.warns(UserWarning, match="head_dim = 4"):
        config = replace(tiny_config, **sizes, attention="mla", mla_latent=3, mla_rope_dim=2, bias=True)
    attention = attention_of(config).double()
    angle_td = torch.arange(4.0, dtype=torch.float64)[:, None] * plain(2, 100.0)
    x_btd = torch.randn(1, 4, 6, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    weights = dict(attention.named_parameters())

    def function(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(attention, given, (x, (angle_td.cos(), angle_td.sin())))

    assert torch.autograd.gradcheck(function, (x_btd, *weights.values()))


# ---------------------------------------------------------------- what it is not


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"qk_norm": True}, "qk_norm is not for"),
        ({"positions": "learned"}, 'must be "rope"'),
        ({"mla_latent": None}, "needs mla_latent"),
        ({"n_kv_heads": 2}, "must be n_heads = 4"),
        ({**SCALED, "rope_scaling": "dynamic", "mla_rope_dim": 2}, "needs more than the 2 dimensions"),
    ],
)
def test_what_does_not_go_together_is_refused(config: ModelConfig, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        replace(config, **choice)


def test_its_weights_are_not_reordered(config: ModelConfig) -> None:
    weights = {f"layers.0.self_attn.{name}": weight for name, weight in attention_of(config).state_dict().items()}
    with pytest.raises(ValueError, match="MLA turns a part of each head alone"):
        reorder(weights, 64, have="rotate_half", want="interleaved")
