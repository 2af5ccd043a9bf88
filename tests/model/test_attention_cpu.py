"""Attention's gradients on a CPU: those of the formula, for any number of tokens and heads; nothing kept in copies."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import attention_cpu, kernels
from model.attention_cpu import CausalAttentionOnCPU, causal_attention_on_cpu
from model.kernels import attend
from tests.model.conftest import seeded

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32, width: int = 16) -> Inputs:
    """q, k, v as a model has them: views of (b, t, h · k)."""
    q, k, v = (
        torch.randn(2, tokens, count * width, generator=seeded(number)).to(dtype).view(2, tokens, count, width)
        for number, count in enumerate((heads, kv_heads, kv_heads))
    )
    return q.transpose(1, 2).requires_grad_(), k.transpose(1, 2).requires_grad_(), v.transpose(1, 2).requires_grad_()


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    return scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf).softmax(-1) @ v


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def errors(function: Callable[..., Tensor], given: Inputs) -> list[float]:
    """Of output and gradients, relative to the formula's in float64."""
    exact = tuple(x.detach().double().requires_grad_() for x in given)
    upstream = torch.randn(given[0].shape, generator=seeded(9)).to(given[0].dtype)
    pairs = []
    for of, at in ((function, given), (by_formula, exact)):
        out = of(*at)
        pairs.append([out.detach(), *torch.autograd.grad(out, at, upstream.to(out.dtype))])
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(*pairs, strict=True)]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 150])
def test_gradients_are_those_of_the_formula(tokens: int, heads: int, kv_heads: int) -> None:
    assert max(errors(CausalAttentionOnCPU.apply, inputs(tokens, heads, kv_heads))) < 2e-6


def test_some_rows_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(150, 6, 3)
    monkeypatch.setattr(attention_cpu, "_SCORES_PER_THREAD", 1)
    assert max(errors(CausalAttentionOnCPU.apply, given)) < 2e-6


def test_in_bf16_it_is_no_less_exact_than_torch() -> None:
    given = inputs(300, 8, 2, torch.bfloat16, width=64)
    ours, theirs = errors(CausalAttentionOnCPU.apply, given), errors(by_torch, given)
    assert ours[0] == theirs[0]
    assert all(one < 1.3 * other for one, other in zip(ours, theirs, strict=True))
    assert max(ours) < 0.005


def test_what_is_kept_are_the_tensors_themselves_and_one_number_a_query() -> None:
    given = inputs(100, 8, 2)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = attend(*given, None, grouped=True)
    own = {x.untyped_storage().data_ptr() for x in (*given, out)}
    others = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in own]
    assert [tensor.shape for tensor in others] == [(2, 8, 100)]
    assert len(kept) == 5


@pytest.mark.parametrize(
    "case, uses_it",
    [("training", True), ("no gradient", False), ("a mask", False), ("many tokens", False), ("float64", False)],
)
def test_when_it_is_used(case: str, uses_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(*given: Tensor) -> Tensor:
        calls.append(given)
        return causal_attention_on_cpu(*given)

    monkeypatch.setattr(kernels, "causal_attention_on_cpu", spy)
    tokens = attention_cpu.MOST_TOKENS + 1 if case == "many tokens" else 70
    given = inputs(tokens, 2, 1, torch.float64 if case == "float64" else torch.float32)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if case == "a mask" else None
    with torch.set_grad_enabled(case != "no gradient"):
        out = attend(*given, mask, grouped=True)
    assert bool(calls) == uses_it
    assert float((out.detach() - by_torch(*given).detach()).abs().max()) < 2e-6


def test_a_second_derivative_is_refused() -> None:
    """The number kept for each query would count as a constant."""
    q, k, v = inputs(5, 2, 1)
    (gradient,) = torch.autograd.grad(CausalAttentionOnCPU.apply(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
