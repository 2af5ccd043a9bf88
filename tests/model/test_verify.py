"""The checks pass on the model as it is, and each names the fault that is planted for it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import PRESETS, ModelConfig
from model.transformer import Transformer
from model.verify import CHECK_NAMES, Check, check_initial_loss, check_parameters, verify
from tests.model.conftest import random_ids, seeded

SMALL = replace(PRESETS["mini"], n_layers=2, d_ff=256, vocab_size=512, d_model=128, seq_len=64)


def checks(config: ModelConfig = SMALL, **settings: object) -> dict[str, Check]:
    return {check.name: check for check in verify(config, **settings)}


def failed(outcome: dict[str, Check]) -> dict[str, str]:
    return {name: " ".join(check.likely_causes) for name, check in outcome.items() if not check.passed}


def test_the_mini_preset_passes() -> None:
    outcome = checks(PRESETS["mini"])
    assert tuple(outcome) == CHECK_NAMES
    assert failed(outcome) == {}
    assert "35,926,528" in outcome["parameters"].expected
    assert "35,926,528" in outcome["parameters"].measured
    assert "8.4202" in outcome["initial loss"].expected
    assert "over 1,024 tokens" in outcome["initial loss"].measured


@pytest.mark.parametrize(
    "change", [{}, {"tied": False}, {"n_kv_heads": 8}, {"n_kv_heads": 1}, {"seq_len": 7}, {"seq_len": 2}]
)
def test_other_configs_pass(change: dict[str, object]) -> None:
    assert failed(checks(replace(SMALL, **change))) == {}


def test_classic_passes() -> None:
    outcome = checks(PRESETS["classic"])
    assert failed(outcome) == {}
    assert "16,803,840, published 16,803,840" in outcome["parameters"].expected


TIED = replace(SMALL, d_model=512, norm_place="post")


def test_behind_post_norms_a_tied_head_knows_what_was_read() -> None:
    """By the logit of the read token the loss is far above what unit-variance logits alone explain, as predicted."""
    outcome = checks(TIED)
    assert failed(outcome) == {}
    assert "by the logit of the token that was read" in outcome["initial loss"].formula
    plain = math.log(512) + 0.02**2 * 512 / 2
    assert float(outcome["initial loss"].expected.split()[0]) > plain + 1
    assert failed(checks(replace(TIED, norm_place="deepnorm", norm="layer"))) == {}
    assert failed(checks(replace(SMALL, positions="sinusoidal", d_model=512))) == {}


def test_that_logit_excuses_neither_deviation_nor_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def loud(config: ModelConfig, generator: torch.Generator) -> Transformer:
        model = Transformer(config, generator)
        with torch.no_grad():
            model.embed_tokens.weight.mul_(1.5)
        return model

    assert "standard deviation" in failed(checks(TIED, build=loud))["initial loss"]
    from model.norms import RMSNorm

    original = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x_btd: original(self, x_btd) * 2**0.5)
    assert "initial loss" in failed(checks(TIED))


def test_a_window_that_is_too_wide_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, sliding_window=9)
    outcome = checks(config)
    assert failed(outcome) == {}
    assert "each of the next 9" in outcome["causality"].expected
    assert "the last 15 within" in outcome["causality"].expected
    from model import transformer

    original = transformer.window_mask
    monkeypatch.setattr(transformer, "window_mask", lambda tokens, window, device: original(tokens, window + 1, device))
    assert "sliding window" in failed(checks(config))["causality"]


Sdpa = Callable[..., Tensor]


def mask_off(original: Sdpa) -> Sdpa:
    return lambda q, k, v, *, is_causal, **settings: original(q, k, v, **settings)


def mask_off_by_one(original: Sdpa) -> Sdpa:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, attn_mask: Tensor | None, **rest: object) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(diagonal=1 + k.shape[2] - q.shape[2])
        return original(q, k, v, attn_mask=mask, **rest)

    return attend


def no_looking_back(original: Sdpa) -> Sdpa:
    def attend(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return original(q, k, v, attn_mask=torch.eye(q.shape[2], k.shape[2], dtype=torch.bool), enable_gqa=True)

    return attend


@pytest.mark.parametrize(
    "mutant, words",
    [(mask_off, "causal mask"), (mask_off_by_one, "causal mask"), (no_looking_back, "does not look back")],
)
def test_causality_catches(monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Sdpa], Sdpa], words: str) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", mutant(F.scaled_dot_product_attention))
    assert words in failed(checks())["causality"]


def prefill_sees_everything(original: Sdpa) -> Sdpa:
    """Causal without a mask argument (a fresh full pass of more than the prompt), not when a chunk meets older keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, **rest: object) -> Tensor:
        return original(q, k, v, attn_mask=None if attn_mask is None else torch.ones_like(attn_mask), **rest)

    return attend


def prefill_aligned_to_the_first_key(original: Sdpa) -> Sdpa:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **rest: object) -> Tensor:
        return original(q, k, v, is_causal=q.shape[2] > 1, **rest)

    return attend


def cached_first_chunk_not_causal(original: Sdpa) -> Sdpa:
    """A cache gives views into itself: their layout tells them from the keys of a pass without one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **rest: object) -> Tensor:
        cached = k.untyped_storage().nbytes() > q.untyped_storage().nbytes()
        return original(q, k, v, is_causal=is_causal and not cached, **rest)

    return attend


@pytest.mark.parametrize(
    "mutant", [prefill_sees_everything, prefill_aligned_to_the_first_key, cached_first_chunk_not_causal]
)
def test_cache_catches_a_prefill_that_is_not_causal(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Sdpa], Sdpa]
) -> None:
    config = replace(SMALL, n_heads=2, n_kv_heads=2)
    monkeypatch.setattr(F, "scaled_dot_product_attention", mutant(F.scaled_dot_product_attention))
    outcome = failed(checks(config))
    assert list(outcome) == ["cache"]
    assert "not causal" in outcome["cache"]


def test_cache_catches_positions_that_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.positions import Places, RotaryEmbedding, Rotation

    original = RotaryEmbedding.rotation

    def restarted(self: RotaryEmbedding, places: Places) -> Rotation:
        return original(self, Places(0, places.stop - places.start))

    monkeypatch.setattr(RotaryEmbedding, "rotation", restarted)
    assert list(failed(checks())) == ["cache"]


def rows_keep_their_padding(self: KVCache, lengths: Sequence[int]) -> None:
    """Every row goes on from the end of the longest."""


def rows_see_what_stands_past_them(self: KVCache, tokens: int) -> Tensor:
    return torch.ones(tokens, self.longest + tokens, dtype=torch.bool).tril(diagonal=self.longest)


def rows_stand_at_one_position(self: KVCache, tokens: int) -> Tensor:
    return torch.full((len(self.lengths), 1), self.longest) + torch.arange(tokens)


@pytest.mark.parametrize(
    "method, mutant",
    [
        ("cut", rows_keep_their_padding),
        ("mask", rows_see_what_stands_past_them),
        ("positions", rows_stand_at_one_position),
    ],
)
def test_cache_catches_rows_that_share_one_length(
    monkeypatch: pytest.MonkeyPatch, method: str, mutant: Callable[..., Tensor | None]
) -> None:
    monkeypatch.setattr(KVCache, method, mutant)
    assert list(failed(checks())) == ["cache"]


def test_cache_catches_expanded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with a key/value head for every query head: right logits, four times the memory."""
    from model import verify as module

    class Expanded(KVCache):
        @property
        def nbytes(self) -> int:
            return super().nbytes * 4

    monkeypatch.setattr(module, "KVCache", Expanded)
    assert "stored once for every query head" in failed(checks())["cache"]


def test_parameters_catches_a_lost_tie() -> None:
    def untie(config: ModelConfig, generator: torch.Generator) -> Transformer:
        model = Transformer(config, generator)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    outcome = failed(checks(build=untie))
    assert "not tied" in outcome["parameters"]


def test_parameters_catches_a_bias() -> None:
    def biased(config: ModelConfig, generator: torch.Generator) -> Transformer:
        model = Transformer(config, generator)
        model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.zeros(config.d_ff))
        return model

    assert "a bias" in failed(checks(build=biased))["parameters"]


def test_parameters_compares_a_preset_with_the_published_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "mini", SMALL)
    model = Transformer(SMALL)
    check = check_parameters(model)
    assert not check.passed
    assert "published 35,926,528" in check.expected


def test_shapes_catches_heads_that_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, enable_gqa, **rest: original(*args, **rest))
    outcome = checks()
    assert list(outcome) == ["parameters", "shapes"]
    assert "not expanded" in failed(outcome)["shapes"]


def test_initial_loss_catches_unshifted_targets() -> None:
    model = Transformer(PRESETS["mini"], seeded(0))
    ids_bt = random_ids(model.config, 2, 256)
    with torch.no_grad():
        unshifted = check_initial_loss(model, ids_bt, ids_bt)
        shifted = check_initial_loss(model, ids_bt[:, :-1], ids_bt[:, 1:])
    assert shifted.passed
    assert not unshifted.passed
    assert "not shifted" in unshifted.likely_causes[0]


def test_initial_loss_catches_too_large_an_initialisation() -> None:
    def loud(config: ModelConfig, generator: torch.Generator) -> Transformer:
        model = Transformer(config, generator)
        with torch.no_grad():
            model.embed_tokens.weight.mul_(5)
        return model

    assert "standard deviation" in failed(checks(build=loud))["initial loss"]


def test_initial_loss_catches_lost_norm_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last norm whose mean square came out ten times too small, as sums in half precision can."""
    from model.norms import RMSNorm

    original = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x_btd: original(self, x_btd) * 10**0.5)
    assert "norm statistics" in failed(checks())["initial loss"]
