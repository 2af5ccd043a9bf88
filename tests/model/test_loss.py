from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.loss import IGNORED, LossSum, next_token_loss
from model.transformer import Transformer
from tests.model.conftest import lively, random_ids, seeded


def plain_loss(model: Transformer, ids_bt: Tensor, targets_bt: Tensor) -> Tensor:
    logits_btv = model(ids_bt)
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
def test_equals_the_plain_loss_and_its_gradients(tiny_config: ModelConfig, tied: bool, chunk_tokens: int) -> None:
    model = lively(Transformer(replace(tiny_config, tied=tied)))
    model.loss_chunk_tokens = chunk_tokens
    ids_bt, targets_bt = random_ids(model.config, 2, 19), random_ids(model.config, 2, 19, seed=8)
    targets_bt[0, 3:9] = IGNORED
    plain = plain_loss(model, ids_bt, targets_bt)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    loss_sum, token_count = model(ids_bt, targets_bt)
    assert (loss_sum.dtype, int(token_count)) == (torch.float32, 32)
    torch.testing.assert_close(loss_sum, plain, rtol=1e-6, atol=0)
    for (name, _), chunked, whole in zip(
        model.named_parameters(), torch.autograd.grad(loss_sum, list(model.parameters())), expected, strict=True
    ):
        assert (chunked - whole).norm() <= 2e-6 * whole.norm(), name


class WatchedHead(nn.Linear):
    """Counts its calls and the most tokens it saw at once."""

    def __init__(self) -> None:
        super().__init__(16, 300, bias=False)
        self.calls, self.most_tokens = 0, 0

    def forward(self, hidden_cd: Tensor) -> Tensor:
        self.calls += 1
        self.most_tokens = max(self.most_tokens, hidden_cd.shape[0])
        return super().forward(hidden_cd)


def test_no_logits_are_kept_for_backward_and_never_more_than_a_chunk() -> None:
    head, kept = WatchedHead(), []
    hidden_btd = torch.randn(2, 50, 16, generator=seeded(0)).requires_grad_()
    targets_bt = torch.randint(300, (2, 50), generator=seeded(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        loss_sum, _ = next_token_loss(head, hidden_btd, targets_bt, chunk_tokens=30)
    assert head.calls == 4
    assert not [shape for shape in kept if 300 in shape and shape != head.weight.shape]
    loss_sum.backward()
    assert (head.calls, head.most_tokens) == (8, 30)


def test_nothing_to_predict_is_a_zero_sum_of_zero_tokens(tiny: Transformer) -> None:
    ids_bt = random_ids(tiny.config, 1, 6)
    outcome = tiny(ids_bt, torch.full_like(ids_bt, IGNORED))
    assert isinstance(outcome, LossSum)
    assert (outcome.loss_sum.item(), outcome.token_count.item()) == (0.0, 0)
    outcome.loss_sum.backward()
    assert all(not parameter.grad.any() for parameter in tiny.parameters())


def test_the_sum_is_fp32_in_a_bf16_model(tiny: Transformer) -> None:
    ids_bt, targets_bt = random_ids(tiny.config, 2, 30), random_ids(tiny.config, 2, 30, seed=8)
    tiny.bfloat16()
    loss_sum, _ = tiny(ids_bt, targets_bt)
    assert loss_sum.dtype == torch.float32
    hidden_nd = tiny.hidden(ids_bt).flatten(0, 1)
    expected = F.cross_entropy(tiny.lm_head(hidden_nd).double(), targets_bt.flatten(), reduction="sum")
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
