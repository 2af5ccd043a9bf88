"""What attention can be besides Llama's: biases, QK-Norm, a sliding window; each against a formula of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from model import kernels
from model.attention import Attention, NormedAttention, build_attention
from model.attention_cpu import causal_attention_on_cpu
from model.cache import KVCache
from model.config import ModelConfig
from model.kernels import attend
from model.masks import Band, additive, block_mask, boolean_mask, causal_mask, window_block_mask, window_mask
from model.positions import rope_tables
from model.rope_scaling import plain
from model.transformer import Transformer
from model.verify import check_cache
from tests.model import reference
from tests.model.conftest import lively, random_ids, seeded

CPU = torch.device("cpu")
CHOICES: list[dict[str, Any]] = [
    {"bias": True},
    {"qk_norm": True},
    {"sliding_window": 3},
    {"sliding_window": 10},
    {"bias": True, "qk_norm": True, "sliding_window": 4},
]


def drawn(module: nn.Module) -> nn.Module:
    generator = seeded(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module


def by_formula(x: np.ndarray, weights: dict[str, np.ndarray], config: ModelConfig) -> np.ndarray:
    """x (tokens, d_model); head by head, query by query, in float64."""

    def heads(name: str, count: int) -> np.ndarray:
        y = x @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", 0.0)
        y = y.reshape(len(x), count, config.head_dim)
        if f"{name}_norm.weight" in weights:
            y = reference.rms_norm(y, weights[f"{name}_norm.weight"], config.norm_eps)
        if name == "v" or config.positions != "rope":
            return y
        return np.stack([reference.rope(y[:, h], config.rope_base) for h in range(count)], axis=1)

    q, k, v = (heads(n, c) for n, c in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads)))
    out = np.zeros_like(q)
    for h in range(config.n_heads):
        g = h // (config.n_heads // config.n_kv_heads)
        for t in range(len(x)):
            first = 0 if config.sliding_window is None else max(0, t - config.sliding_window + 1)
            scores = q[t, h] @ k[first : t + 1, g].T / math.sqrt(config.head_dim)
            out[t, h] = reference.softmax(scores) @ v[first : t + 1, g]
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0.0)


def distance_from_the_formula(config: ModelConfig) -> float:
    attention = drawn(build_attention(config, 0)).double()
    x_btd = torch.randn(1, 11, config.d_model, dtype=torch.float64, generator=seeded(0))
    angle_td = torch.arange(11.0, dtype=torch.float64)[:, None] * plain(config.head_dim, config.rope_base)
    rotation = (angle_td.cos(), angle_td.sin())
    mask = additive(window_mask(11, config.sliding_window, CPU), torch.float64)
    out_td = attention(x_btd, rotation if config.positions == "rope" else (), None, mask)[0].detach().numpy()
    weights = {name: parameter.detach().numpy() for name, parameter in attention.named_parameters()}
    return float(np.abs(out_td - by_formula(x_btd[0].numpy(), weights, config)).max())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("choice", [*CHOICES, {"positions": "none"}], ids=str)
def test_against_the_formula(tiny_config: ModelConfig, choice: dict[str, Any], kv_heads: int) -> None:
    assert distance_from_the_formula(replace(tiny_config, n_kv_heads=kv_heads, **choice)) < 1e-12


def norm_after_turning(self: NormedAttention, x_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Half of it, at least: the norm's weight meets dimensions that RoPE has mixed."""
    q_bhtk, k_bhtk, v_bhtk = Attention.heads(self, x_btd)
    turn, self.turn = self.turn, lambda x, *angles: self.q_norm(turn(x, *angles))
    return q_bhtk, k_bhtk, v_bhtk


def norms_exchanged(self: NormedAttention, x_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_bhtk, k_bhtk, v_bhtk = Attention.heads(self, x_btd)
    return self.k_norm(q_bhtk), self.q_norm(k_bhtk), v_bhtk


@pytest.mark.parametrize("mutant", [norm_after_turning, norms_exchanged])
def test_the_formula_catches_a_norm_in_the_wrong_place(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(NormedAttention, "heads", mutant)
    assert distance_from_the_formula(replace(tiny_config, qk_norm=True)) > 0.01


@pytest.mark.parametrize("error", [-1, 1])
def test_the_formula_catches_a_window_off_by_one(tiny_config: ModelConfig, error: int) -> None:
    config = replace(tiny_config, sliding_window=3)
    attention = drawn(build_attention(config, 0))
    x_btd = torch.randn(1, 11, config.d_model, generator=seeded(0))
    rotation = rope_tables(config.head_dim, 11, config.rope_base)
    masks = [additive(window_mask(11, window, CPU), torch.float32) for window in (3, 3 + error)]
    right, wrong = (attention(x_btd, rotation, None, mask) for mask in masks)
    assert (right - wrong).abs().max() > 0.01


def test_parameters_by_hand(tiny_config: ModelConfig) -> None:
    """d 256 with 8 heads of 32: 163,840 for 2 key/value heads without biases, 263,168 for 8 with."""
    sizes = {"d_model": 256, "n_heads": 8, "head_dim": 32}
    with pytest.warns(UserWarning, match="head_dim = 32"):
        grouped = replace(tiny_config, n_kv_heads=2, **sizes)
    with pytest.warns(UserWarning, match="head_dim = 32"):
        full = replace(tiny_config, n_kv_heads=8, bias=True, **sizes)
    counts = [sum(p.numel() for p in build_attention(config, 0).parameters()) for config in (grouped, full)]
    assert counts == [163_840, 263_168]


def test_names_and_order_are_qwen3s(tiny_config: ModelConfig) -> None:
    names = [name for name, _ in build_attention(replace(tiny_config, qk_norm=True), 0).named_parameters()]
    assert names == [f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]


def scores_of(attention: Attention, x_btd: Tensor) -> Tensor:
    q_bhtk, k_bhtk, _ = attention.heads(x_btd)
    k_bhtk = k_bhtk.repeat_interleave(q_bhtk.shape[1] // k_bhtk.shape[1], dim=1)
    return q_bhtk @ k_bhtk.mT / math.sqrt(attention.head_dim)


@torch.no_grad()
def test_qk_norm_bounds_scores(tiny_config: ModelConfig) -> None:
    """k times 8: without the norm scores grow by 8, with it they stay what they were, within sqrt(head_dim)."""
    x_btd = torch.randn(4, 20, tiny_config.d_model, generator=seeded(1))
    growth = {}
    for qk_norm in (False, True):
        attention = build_attention(replace(tiny_config, qk_norm=qk_norm), 0)
        before = scores_of(attention, x_btd)
        attention.k_proj.weight *= 8
        after = scores_of(attention, x_btd)
        growth[qk_norm] = float(after.abs().max() / before.abs().max())
    assert after.abs().max() <= math.sqrt(tiny_config.head_dim)
    assert growth[False] == pytest.approx(8)
    assert growth[True] == pytest.approx(1, abs=1e-3)


def test_the_scale_keeps_the_variance_of_scores_at_one() -> None:
    """What is divided by is read off the kernel: one key of q · k / scale against one of score 0, by their shares."""
    for width in (16, 64, 128):
        q, k = torch.randn(2, 4000, width, dtype=torch.float64, generator=seeded(2))
        keys_bhtk = torch.stack((k, torch.zeros_like(k)), dim=1)[:, None]
        values_bhtk = torch.zeros_like(keys_bhtk)
        values_bhtk[:, :, 0] = 1.0
        share = attend(q[:, None, None], keys_bhtk, values_bhtk, None, grouped=False)[:, 0, 0, 0]
        scores = torch.logit(share)
        assert torch.allclose(scores, (q * k).sum(-1) / math.sqrt(width))
        assert float(scores.var()) == pytest.approx(1, abs=0.06)


# ---------------------------------------------------------------- the window, along every way that a mask can take


def test_masks_of_a_window_by_hand() -> None:
    assert window_mask(4, None, CPU) is window_mask(4, 4, CPU) is causal_mask(4, 4, CPU, 4) is None
    band = window_mask(4, 2, CPU)
    assert isinstance(band, Band)
    assert (band.window, band.seen_tt.int().tolist()) == (2, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
    late = causal_mask(2, 5, CPU, 3)
    assert late is not None
    assert late.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert causal_mask(1, 3, CPU, 3) is None
    documents = boolean_mask(torch.tensor([[0, 0, 0, 1, 1]]), 2)[0, 0]
    assert documents.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    group, index = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    distance = index[:, None] - index
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill((distance < 0) | (distance >= window), -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("window", [2, 63, 64, 65, 100, 149])
@pytest.mark.parametrize("tokens", [65, 150, 200])
def test_training_on_a_cpu_is_the_formula(tokens: int, window: int) -> None:
    band = additive(window_mask(tokens, window, CPU), torch.float32)
    given = [torch.randn(2, heads, tokens, 16, generator=seeded(heads)).requires_grad_() for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in given]
    upstream = torch.randn(2, 4, tokens, 16, generator=seeded(9))
    assert isinstance(band, Band) == (window < tokens)
    pairs = []
    for out, at in ((causal_attention_on_cpu(*given, band), given), (windowed(*exact, window), exact)):
        pairs.append([out.detach(), *torch.autograd.grad(out, at, upstream.to(out.dtype))])
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(*pairs, strict=True)]
    assert max(errors) < 2e-6


def test_training_in_bf16_stays_close() -> None:
    band = additive(window_mask(200, 50, CPU), torch.bfloat16)
    given = [torch.randn(2, 4, 200, 64, generator=seeded(n)).bfloat16().requires_grad_() for n in range(3)]
    exact = [x.detach().double().requires_grad_() for x in given]
    ours = torch.autograd.grad(attend(*given, band, grouped=False).sum(), given)
    theirs = torch.autograd.grad(windowed(*exact, 50).sum(), exact)
    assert max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)) < 0.01


def test_the_way_on_a_cpu_is_taken_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        kernels, "causal_attention_on_cpu", lambda *given: calls.append(given) or causal_attention_on_cpu(*given)
    )
    given = [torch.randn(1, 2, 70, 16, generator=seeded(n)).requires_grad_() for n in range(3)]
    band = additive(window_mask(70, 9, CPU), torch.float32)
    trained = attend(*given, band, grouped=False)
    assert len(calls) == 1
    with torch.no_grad():
        assert (attend(*given, band, grouped=False) - trained).abs().max() < 1e-6
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_block_masks_give_what_the_booleans_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled_flex_attention", lambda: flex_attention)
    generator = seeded(1)
    given = [torch.randn(2, heads, 300, 64, generator=generator) for heads in (4, 2, 2)]
    documents_bt = (torch.rand(2, 300, generator=generator) < 0.03).cumsum(dim=1)
    for window in (17, 128, 200):
        ours = attend(*given, window_block_mask(300, window, CPU), grouped=True)
        assert (ours - windowed(*given, window)).abs().max() < 1e-5
        ours = attend(*given, block_mask(documents_bt, window), grouped=True)
        theirs = attend(*given, boolean_mask(documents_bt, window), grouped=True)
        assert (ours - theirs).abs().max() < 1e-5
    assert (ours - windowed(*given, 200)).abs().max() > 0.1


def test_a_window_spares_blocks() -> None:
    """8 x 8 blocks of 128, of which a window of 128 meets the diagonal and the one beside it: 15 of 36 causal ones."""
    blocks = [int(window_block_mask(1024, window, CPU).to_dense().sum()) for window in (128, 1024)]
    assert blocks == [15, 36]


@torch.no_grad()
@pytest.mark.parametrize("way", ["plain", "documents", "cache"])
def test_a_token_sees_the_window_and_no_more(tiny_config: ModelConfig, way: str) -> None:
    """In one layer: itself and 4 before are seen, the fifth is not, bit for bit. Both ways."""
    model = lively(Transformer(replace(tiny_config, n_layers=1, sliding_window=5))).eval()

    def logits(ids_bt: Tensor) -> Tensor:
        if way == "documents":
            return model(ids_bt, documents_bt=torch.zeros_like(ids_bt))
        if way == "plain":
            return model(ids_bt)
        cache = KVCache(model.config, batch_size=1, max_tokens=30)
        return torch.cat([model(part, cache=cache) for part in ids_bt.split([3, 14, 1, 1, 7, 4], dim=1)], dim=1)

    ids_bt = random_ids(model.config, 1, 30)
    before = logits(ids_bt)
    for place in (0, 6, 13, 17, 18, 22):
        changed_bt = ids_bt.clone()
        changed_bt[0, place] = (changed_bt[0, place] + 1) % model.config.vocab_size
        moved_t = (logits(changed_bt) - before)[0].abs().amax(dim=-1)
        assert moved_t[:place].max() == 0 if place else True
        assert moved_t[place : place + 5].min() > 1e-3
        assert moved_t[place + 5 :].max() == 0


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_cache_gives_the_logits_of_the_full_pass(tiny_config: ModelConfig, choice: dict[str, Any]) -> None:
    """In one chunk, in three, token by token, and in rows of unequal lengths."""
    model = lively(Transformer(replace(tiny_config, **choice))).eval()
    with torch.no_grad():
        outcome = check_cache(model, seeded(5))
    assert outcome.passed, outcome.measured


def window_one_longer(self: KVCache, tokens: int) -> Tensor | None:
    stop = self.longest + tokens
    return causal_mask(tokens, stop - self.first, CPU, 4)


@pytest.mark.parametrize(
    "name, mutant",
    [
        ("mask", window_one_longer),
        ("first", property(lambda self: max(0, min(self.lengths) - 3 + 2))),
        ("first", property(lambda self: max(0, self.longest - 3 + 1))),
    ],
)
def test_the_cache_check_catches_a_window_misplaced(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any
) -> None:
    model = lively(Transformer(replace(tiny_config, sliding_window=3))).eval()
    monkeypatch.setattr(KVCache, name, mutant)
    with torch.no_grad():
        assert not check_cache(model, seeded(5)).passed


@torch.no_grad()
def test_a_step_reads_no_more_than_the_window(tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the cache holds every token."""
    model = lively(Transformer(replace(tiny_config, sliding_window=5))).eval()
    keys: list[int] = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, *a, **s: keys.append(k.shape[2]) or original(q, k, *a, **s)
    )
    cache = KVCache(model.config, batch_size=2, max_tokens=40)
    model(random_ids(model.config, 2, 30), cache=cache)
    keys.clear()
    model(random_ids(model.config, 2, 1), cache=cache)
    assert keys == [5] * 3
    assert cache.nbytes == KVCache(replace(model.config, sliding_window=None), batch_size=2, max_tokens=40).nbytes


def test_gradcheck(tiny_config: ModelConfig) -> None:
    with pytest.warns(UserWarning, match="head_dim = 4"):
        config = replace(tiny_config, d_model=6, head_dim=4, bias=True, qk_norm=True, sliding_window=2)
    attention = drawn(build_attention(config, 0)).double()
    rotation = tuple(table.double() for table in rope_tables(4, 4, 100.0))
    mask = additive(window_mask(4, 2, CPU), torch.float64)
    x_btd = torch.randn(1, 4, 6, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    weights = dict(attention.named_parameters())

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(attention, dict(zip(weights, values, strict=True)), (x, rotation, None, mask))

    assert torch.autograd.gradcheck(function, (x_btd, *weights.values()))


@pytest.mark.parametrize(
    "choice", [CHOICES[-1], {"attention": "mla", "mla_latent": 40, "mla_rope_dim": 16, "n_kv_heads": 4}], ids=str
)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointed_gradients_are_equal_bit_for_bit(
    tiny_config: ModelConfig, choice: dict[str, Any], mode: str
) -> None:
    model = lively(Transformer(replace(tiny_config, **choice)))
    ids_bt = random_ids(tiny_config, 2, 40)
    weights = list(model.parameters())
    plain = torch.autograd.grad(model(ids_bt, ids_bt).loss_sum, weights)
    model.activation_checkpointing = mode
    assert all(map(torch.equal, torch.autograd.grad(model(ids_bt, ids_bt).loss_sum, weights), plain))
