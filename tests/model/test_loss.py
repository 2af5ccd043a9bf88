from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model import loss
from model.config import ModelConfig
from model.loss import IGNORED, Head, LossSum, fused_kernel, next_token_loss
from model.transformer import Transformer
from tests.model.conftest import lively, random_ids, seeded
from tests.model.dispatched import LiveBytes, Products


def plain_loss(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, z_loss: float = 0.0) -> Tensor:
    """Cross-entropy and z-loss of all logits at once, by autograd."""
    logits_nv = (hidden_nd @ weight_vd.T).float()
    counts_n = targets_n != IGNORED
    log_z_n = logits_nv.logsumexp(dim=-1)
    return F.cross_entropy(logits_nv, targets_n, reduction="sum") + z_loss * (log_z_n.square() * counts_n).sum()


def case(tokens: int, width: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a weight, both with gradients, and targets of which every fifth is ignored."""
    generator = seeded(0)
    hidden_nd = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight_vd = (torch.randn(vocab, width, generator=generator) / width**0.5).to(dtype).requires_grad_()
    targets_n = torch.randint(vocab, (tokens,), generator=generator)
    targets_n[::5] = IGNORED
    return hidden_nd, weight_vd, targets_n


def chunked(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, chunk_tokens: int, z_loss: float = 0.0) -> LossSum:
    return next_token_loss(hidden_nd[None], weight_vd, targets_n[None], chunk_tokens, z_loss)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
def test_equals_the_plain_loss_and_its_gradients(tiny_config: ModelConfig, tied: bool, chunk_tokens: int) -> None:
    model = lively(Transformer(replace(tiny_config, tied=tied)))
    model.loss_chunk_tokens = chunk_tokens
    ids_bt, targets_bt = random_ids(model.config, 2, 19), random_ids(model.config, 2, 19, seed=8)
    targets_bt[0, 3:9] = IGNORED
    plain = F.cross_entropy(model(ids_bt).flatten(0, 1), targets_bt.flatten(), reduction="sum")
    expected = torch.autograd.grad(plain, list(model.parameters()))
    loss_sum, token_count, cross_entropy_sum = model(ids_bt, targets_bt)
    assert (loss_sum.dtype, int(token_count)) == (torch.float32, 32)
    torch.testing.assert_close(loss_sum, plain, rtol=1e-6, atol=0)
    assert torch.equal(cross_entropy_sum, loss_sum)
    assert not cross_entropy_sum.requires_grad
    for (name, _), ours, theirs in zip(
        model.named_parameters(), torch.autograd.grad(loss_sum, list(model.parameters())), expected, strict=True
    ):
        assert distance(ours, theirs) <= 2e-6, name


@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.03])
def test_equals_the_plain_z_loss_and_its_gradients(z_loss: float) -> None:
    hidden_nd, weight_vd, targets_n = case(61, 24, 190)
    plain, without = (plain_loss(hidden_nd, weight_vd, targets_n, factor) for factor in (z_loss, 0.0))
    loss_sum, _, cross_entropy_sum = chunked(hidden_nd, weight_vd, targets_n, 13, z_loss)
    torch.testing.assert_close(loss_sum, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(cross_entropy_sum, without, rtol=1e-6, atol=0)
    assert (loss_sum > cross_entropy_sum) == (z_loss > 0)
    inputs = (hidden_nd, weight_vd)
    for ours, theirs in zip(torch.autograd.grad(loss_sum, inputs), torch.autograd.grad(plain, inputs), strict=True):
        assert distance(ours, theirs) <= 2e-6


def test_the_head_with_targets_is_the_loss_and_without_them_the_logits() -> None:
    hidden_nd, weight_vd, targets_n = case(30, 24, 190)
    head = Head(24, 190)
    head.weight.data.copy_(weight_vd)
    torch.testing.assert_close(head(hidden_nd), hidden_nd @ weight_vd.T)
    ours, theirs = head(hidden_nd[None], targets_n[None], 7, 0.1), chunked(hidden_nd, weight_vd, targets_n, 7, 0.1)
    assert all(map(torch.equal, ours, theirs))


def test_a_factor_scales_the_gradients_and_they_can_be_asked_for_twice() -> None:
    hidden_nd, weight_vd, targets_n = case(61, 24, 190)
    loss_sum = chunked(hidden_nd, weight_vd, targets_n, 13).loss_sum
    inputs = (hidden_nd, weight_vd)
    once = torch.autograd.grad(loss_sum, inputs, retain_graph=True)
    scaled = torch.autograd.grad(loss_sum * 1024.0, inputs, retain_graph=True)
    again = torch.autograd.grad(loss_sum, inputs)
    assert all(map(torch.equal, once, again))
    assert all(torch.equal(one * 1024.0, other) for one, other in zip(once, scaled, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_it_changes_nothing(reentrant: bool) -> None:
    hidden_nd, weight_vd, targets_n = case(61, 24, 190)

    def loss_of(hidden_nd: Tensor, weight_vd: Tensor) -> Tensor:
        return chunked(hidden_nd, weight_vd, targets_n, 13, 1e-3).loss_sum

    inputs = (hidden_nd, weight_vd)
    outcomes = loss_of(*inputs), checkpoint(loss_of, *inputs, use_reentrant=reentrant)
    for outcome in outcomes:
        outcome.backward()
    assert torch.equal(*outcomes)
    for one in inputs:
        assert one.grad is not None
        assert distance(one.grad / 2, torch.autograd.grad(loss_of(*inputs), one)[0]) < 1e-6


def test_nothing_to_predict_is_a_zero_sum_of_zero_tokens(tiny: Transformer) -> None:
    ids_bt = random_ids(tiny.config, 1, 6)
    tiny.z_loss = 0.1
    outcome = tiny(ids_bt, torch.full_like(ids_bt, IGNORED))
    assert isinstance(outcome, LossSum)
    assert [one.item() for one in outcome] == [0.0, 0, 0.0]
    outcome.loss_sum.backward()
    assert all(not parameter.grad.any() for parameter in tiny.parameters())


@pytest.mark.parametrize("target", [-1, 30])
def test_a_target_that_is_no_id_is_an_error(target: int) -> None:
    hidden_nd, weight_vd, targets_n = case(20, 8, 30)
    targets_n[3] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked(hidden_nd, weight_vd, targets_n, 7)


# ---------------------------------------------------------------- in half precision


def test_the_sum_is_fp32_in_a_bf16_model(tiny: Transformer) -> None:
    ids_bt, targets_bt = random_ids(tiny.config, 2, 30), random_ids(tiny.config, 2, 30, seed=8)
    tiny.bfloat16()
    loss_sum = tiny(ids_bt, targets_bt).loss_sum
    assert loss_sum.dtype == torch.float32
    hidden_nd = tiny.hidden(ids_bt).flatten(0, 1)
    expected = F.cross_entropy(tiny.lm_head(hidden_nd).double(), targets_bt.flatten(), reduction="sum")
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("chunk_tokens", [4, 64, 4096])
def test_many_chunks_lose_nothing_of_a_bf16_gradient(chunk_tokens: int) -> None:
    """1,024 chunks summed in bf16 would be off by 4 % and more; in fp32 they are as good as one."""
    hidden_nd, weight_vd, targets_n = case(4096, 16, 40, torch.bfloat16)
    with torch.no_grad():
        hidden_nd += 2  # one direction that all tokens share, so that the sum grows
    inputs = (hidden_nd, weight_vd)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = torch.autograd.grad(plain_loss(exact[0], exact[1], targets_n), exact)
    ours = torch.autograd.grad(chunked(*inputs, targets_n, chunk_tokens).loss_sum, inputs)
    assert [one.dtype for one in ours] == [torch.bfloat16] * 2
    assert all(distance(*pair) < 0.006 for pair in zip(ours, expected, strict=True))


def test_a_factor_is_not_rounded_to_bf16() -> None:
    """1 + 3/1024 in bf16 is 1: all gradients would be off by the same 0.3 %, beside random rounding."""
    hidden_nd, weight_vd, targets_n = case(200, 64, 300, torch.bfloat16)
    loss_sum, inputs = chunked(hidden_nd, weight_vd, targets_n, 64).loss_sum, (hidden_nd, weight_vd)
    once = torch.autograd.grad(loss_sum, inputs, retain_graph=True)
    scaled = torch.autograd.grad(loss_sum * (1 + 3 / 1024), inputs)
    for one, other in zip(once, scaled, strict=True):
        assert other.double().norm() / one.double().norm() == pytest.approx(1 + 3 / 1024, abs=3e-4)


# ---------------------------------------------------------------- what it holds and computes


def test_no_logits_are_computed_twice_and_without_gradients_none_are_formed() -> None:
    hidden_nd, weight_vd, targets_n = case(61, 24, 190)
    with Products() as products:
        loss_sum = chunked(hidden_nd, weight_vd, targets_n, 13).loss_sum
        assert products.counts["mm"] == 3 * 5
        loss_sum.backward()
        assert products.counts["mm"] == 3 * 5
    with Products() as products, torch.no_grad():
        evaluated = chunked(hidden_nd, weight_vd, targets_n, 13).loss_sum
    assert products.counts["mm"] == 5
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, loss_sum)


def peak_bytes(of: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> int:
    """The peak of forward and backward at 8 × 2048 tokens, d_model 1536 and 32,000 ids, on the meta device."""
    hidden_nd, weight_vd = (
        torch.empty(rows, 1536, dtype=dtype, device="meta", requires_grad=True) for rows in (8 * 2048, 32000)
    )
    targets_n = torch.zeros(8 * 2048, dtype=torch.int64, device="meta")
    with LiveBytes().outside(hidden_nd, weight_vd, targets_n) as live:
        of(hidden_nd, weight_vd, targets_n).backward()
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def test_its_peak_is_a_fifth_of_the_plain_loss(dtype: torch.dtype, z_loss: float) -> None:
    def plain(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor) -> Tensor:
        return F.cross_entropy((hidden_nd @ weight_vd.T).float(), targets_n, reduction="sum")

    def ours(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor) -> Tensor:
        return chunked(hidden_nd, weight_vd, targets_n, 2048, z_loss).loss_sum

    most, least = peak_bytes(plain, dtype), peak_bytes(ours, dtype)
    print(f"{dtype}: {most / 1e9:.2f} GB, {least / 1e9:.2f} GB: {most / least:.2f}")
    assert most > 3 * 8 * 2048 * 32000 * 4 - 1e6
    assert most / least >= 5


# ---------------------------------------------------------------- the fused kernel, as far as a CPU goes


@pytest.fixture
def forgotten() -> Iterator[None]:
    fused_kernel.cache_clear()
    yield
    fused_kernel.cache_clear()


class LigerFusedLinearCrossEntropyFunction:
    """Liger's signature (0.8), and the plain loss behind it; `wrong` changes what comes out."""

    calls = 0
    wrong: Callable[[Tensor], Tensor] = staticmethod(lambda loss_sum: loss_sum)

    @classmethod
    def apply(
        cls, _input: Tensor, weight: Tensor, target: Tensor, bias: None, ce_weight: None, ignore_index: int,
        lse_square_scale: float, label_smoothing: float, reduction: str, softcap: None, return_z_loss: bool,
        accum_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        assert (ignore_index, label_smoothing, reduction) == (IGNORED, 0.0, "sum")
        assert (return_z_loss, accum_dtype) == (True, torch.float32)
        cls.calls += 1
        loss_sum = plain_loss(_input, weight, target, lse_square_scale)
        return cls.wrong(loss_sum), loss_sum - plain_loss(_input, weight, target), None, None


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> type[LigerFusedLinearCrossEntropyFunction]:
    """A stand-in for the package, and a CPU taken for a device that it runs on."""
    stand_in = type("StandIn", (LigerFusedLinearCrossEntropyFunction,), {})
    name = "liger_kernel.ops.fused_linear_cross_entropy"
    module = ModuleType(name)
    module.LigerFusedLinearCrossEntropyFunction = stand_in  # type: ignore[attr-defined]
    for part in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(loss, "FUSED_ON", ("cpu",))
    return stand_in


def test_a_kernel_with_the_right_numbers_is_taken(liger: type[LigerFusedLinearCrossEntropyFunction]) -> None:
    hidden_nd, weight_vd, targets_n = case(61, 24, 190)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = chunked(hidden_nd, weight_vd, targets_n, 13, 0.03)
    assert liger.calls == 2  # proved, then used
    torch.testing.assert_close(ours.loss_sum, plain_loss(hidden_nd, weight_vd, targets_n, 0.03))
    torch.testing.assert_close(ours.cross_entropy_sum, plain_loss(hidden_nd, weight_vd, targets_n).detach())
    with torch.no_grad():
        chunked(hidden_nd, weight_vd, targets_n, 13, 0.03)
    assert liger.calls == 2


def gradients_lost(loss_sum: Tensor) -> Tensor:
    loss_sum.register_hook(lambda gradient: gradient * float("nan"))
    return loss_sum


def fails(loss_sum: Tensor) -> Tensor:
    raise RuntimeError("no PTX for this device\nand more")


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda loss_sum: loss_sum * 1.1, "loss and gradients are off by"),
        (lambda loss_sum: 1.1 * loss_sum - 0.1 * loss_sum.detach(), "loss and gradients are off by"),
        (gradients_lost, "loss and gradients are off by"),
        (fails, r"RuntimeError: no PTX for this device\)"),
    ],
    ids=["loss", "gradient", "nan", "fails"],
)
def test_a_kernel_that_fails_or_differs_is_not_taken_and_it_is_said_once(
    liger: type[LigerFusedLinearCrossEntropyFunction], wrong: Callable[[Tensor], Tensor], says: str
) -> None:
    liger.wrong = staticmethod(wrong)
    hidden_nd, weight_vd, targets_n = case(61, 24, 190)
    with pytest.warns(UserWarning, match=rf"^Liger's fused loss does not run here \({says}.* in chunks$"):
        loss_sum = chunked(hidden_nd, weight_vd, targets_n, 13).loss_sum
    torch.testing.assert_close(loss_sum, plain_loss(hidden_nd, weight_vd, targets_n))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunked(hidden_nd, weight_vd, targets_n, 13)
    assert liger.calls == 1


@pytest.mark.usefixtures("forgotten")
def test_where_it_is_not_installed_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "FUSED_ON", ("cpu",))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.warns(UserWarning, match=r"\(liger_kernel is not installed\): the loss is computed in chunks"):
        chunked(*case(20, 8, 30), 7)


def test_a_cpu_asks_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "fused_kernel", None)
    chunked(*case(20, 8, 30), 7)
