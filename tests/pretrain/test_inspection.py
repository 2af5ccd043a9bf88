"""What hooks see of a model's pass: scores under every kind of mask, units and stream by hand; nothing is changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from model.config import ModelConfig
from model.masks import (
    Band,
    Mask,
    additive,
    block_mask,
    boolean_mask,
    causal_mask,
    document_mask,
    seen_of_row,
    window_mask,
)
from model.transformer import Transformer
from pretrain import inspection
from pretrain.inspection import Activity, largest_score, watching

pytestmark = pytest.mark.filterwarnings("ignore:head_dim")
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 24,
    "seq_len": 32, "norm_eps": 1e-5, "tied": True,
}  # fmt: skip
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 11 + [1]])


def by_hand(q: Tensor, k: Tensor, seen: Tensor) -> float:
    """Every pair, one after the other."""
    found, group = 0.0, q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            for query in range(q.shape[2]):
                for key in range(k.shape[2]):
                    if bool(seen.expand(q.shape[0], 1, *seen.shape[-2:])[row, 0, query, key]):
                        score = float(q[row, head, query].double() @ k[row, head // group, key].double())
                        found = max(found, abs(score) / math.sqrt(q.shape[3]))
    return found


def masks() -> dict[str, tuple[Mask | None, Tensor]]:
    """Each kind that an attention is given for 12 tokens, and what it lets see, (b or 1, 1, t, s)."""
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    near = causal.triu(-4)
    band = window_mask(12, 5, CPU)
    assert isinstance(band, Band)
    documents = boolean_mask(DOCUMENTS)
    return {
        "causal": (None, causal),
        "window": (band, near),
        "window, additive": (additive(band, torch.bfloat16), near),
        "documents": (additive(document_mask(DOCUMENTS), torch.bfloat16), documents),
        "documents in a window": (additive(document_mask(DOCUMENTS, 3), torch.float32), documents.triu(-2)),
        "booleans": (documents, documents),
        "block mask": (block_mask(DOCUMENTS), documents),
        "block mask in a window": (block_mask(DOCUMENTS, 3), documents.triu(-2)),
        "block mask for all rows": (create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 5), None, None, 12, 12,
                                                      device="cpu"), near),
    }  # fmt: skip


@pytest.mark.parametrize("case", masks())
@pytest.mark.parametrize("at_once", [1, 100, 1 << 22])
def test_only_scores_that_are_seen_count(case: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SCORES_AT_ONCE", at_once)
    mask, seen = masks()[case]
    for row in (0, 1):
        ours = seen_of_row(mask, row, range(2, 9), 12, 12, CPU).expand(1, 7, 12)
        assert torch.equal(ours, seen.expand(2, 1, 12, 12)[row, :, 2:9])
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        q, k = (torch.randn(2, heads, 12, 8, generator=generator) for heads in (4, 2))
        assert float(largest_score(q, k, mask)) == pytest.approx(by_hand(q, k, seen), rel=1e-5)


def test_of_many_tokens_the_first_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.ones(3, 1, 5, 4) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    found = []
    for most in (4, 9, 10, 15):
        monkeypatch.setattr(inspection, "MOST_TOKENS", most)
        found.append(float(largest_score(q, q, None)))
    assert found == [2.0, 2.0, 8.0, 18.0]  # |q·k| / 2


def test_queries_behind_a_cache_are_the_last_tokens() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 2, 7, 8, generator=generator)
    mask = causal_mask(3, 7, CPU)
    assert mask is not None
    assert float(largest_score(q, k, mask)) == pytest.approx(by_hand(q, k, mask[None, None]), rel=1e-5)
    assert seen_of_row(None, 0, range(1), 1, 7, CPU).tolist() == [[True] * 7]
    one = q[:, :, :1]
    assert float(largest_score(one, k, None)) == pytest.approx(by_hand(one, k, torch.ones(1, 1, 1, 7)), rel=1e-5)


def small(**fields: Any) -> Transformer:
    return Transformer(ModelConfig(**{**SMALL, **fields}), torch.Generator().manual_seed(5))


def activity_of(model: Transformer, documents: Tensor | None = None) -> Activity:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(6))
    with watching(model) as watched, torch.no_grad():
        model(ids, documents_bt=documents)
    return watched.activity()


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mla": {"attention": "mla", "n_kv_heads": 4, "mla_latent": 16, "mla_rope_dim": 4},
    "qk-norm in a window": {"qk_norm": True, "sliding_window": 4},
    "relu": {"ffn": "relu", "bias": True, "norm_place": "post", "norm": "layer"},
    "streams": {"residual": "hyper", "n_streams": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_watched_and_none_changed(kind: str) -> None:
    model = small(**KINDS[kind])
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(6))
    for documents in (None, DOCUMENTS):
        before = model(ids, documents_bt=documents)
        with watching(model) as watched:
            during = model(ids, documents_bt=documents)
        assert torch.equal(before, during)
        activity = watched.activity()
        assert all(len(one) == 2 for one in vars(activity).values())
        assert all(logit > 0 for logit in activity.largest_logits)
        assert all(rms > 0 for rms in activity.residual_rms)
        assert activity.dead_units == activity.saturated_units == [0, 0] or kind == "relu"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_documents_hide_does_not_count() -> None:
    """A key that only a later document meets: its score is gone with the mask."""
    model = small(positions="none")
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight.normal_(generator=torch.Generator().manual_seed(1))
            block.self_attn.k_proj.weight.normal_(generator=torch.Generator().manual_seed(2))
    alone = activity_of(model, torch.arange(12).expand(2, -1).contiguous())
    together = activity_of(model)
    assert all(one < both for one, both in zip(alone.largest_logits, together.largest_logits, strict=True))


def test_units_and_stream_by_hand() -> None:
    """Of 24 units 6 that nothing moves, 4 that everything drives; a stream that is given."""
    model = small(ffn="relu", bias=True)
    first, second = (block.mlp for block in model.layers)
    with torch.no_grad():
        first.up_proj.bias[:6] = -50
        first.up_proj.bias[6:10] = 50
        second.up_proj.bias.fill_(-50)
        model.layers[1].self_attn.o_proj.weight.zero_()
        model.layers[1].self_attn.o_proj.bias.zero_()
        second.down_proj.bias.fill_(0)
    activity = activity_of(model)
    assert activity.dead_units == [0.25, 1.0]
    assert activity.saturated_units == [pytest.approx(4 / 24), 0.0]
    assert activity.residual_rms[0] == activity.residual_rms[1]  # the second block adds nothing


def test_gates_that_stay_open_are_saturated() -> None:
    model = small(bias=True)
    with torch.no_grad():
        model.layers[0].mlp.gate_proj.bias[:12] = 7
        model.layers[0].mlp.up_proj.bias[:4] = -0.6  # so that these are below 0 with every token, and not dead
        model.layers[1].mlp.gate_proj.bias[:3] = -60  # silu(-60) · up is 1e-25 or so
        model.layers[1].mlp.gate_proj.bias[3:5] = 5  # open, and not yet linear
    activity = activity_of(model)
    assert activity.saturated_units == [0.5, 0.0]
    assert activity.dead_units == [0.0, pytest.approx(3 / 24)]


def test_compiled_blocks_are_watched_and_stay_compiled() -> None:
    model = small()
    calls: list[int] = []
    for block in model.layers:  # what `compile_blocks` sets, without a compiler
        block._compiled_call_impl = lambda *inputs, block=block: calls.append(1) or block._call_impl(*inputs)
    activity = activity_of(model)
    assert not calls
    assert len(activity.largest_logits) == 2
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert calls == [1, 1]
