"""Next-token cross-entropy that never holds all logits.

Logits are the largest tensor of a small model by far: 16 × 2048 tokens × 32,000 ids are 4.2 GB in fp32, several times
over with their gradient. Here the head and the loss run chunk by chunk, and backward recomputes each chunk's logits,
at the price of one more pass through the head (about 3 % of a step of the 0.5B model).
The head is called as a module, so that engines which gather a module's weights when it runs (ZeRO-3) see the call.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


class LossSum(NamedTuple):
    """A sum over tokens and how many there were: a mean per batch would misweight batches of unequal size."""

    loss_sum: Tensor
    """() fp32, nats."""
    token_count: Tensor
    """() int64, targets that count."""


def next_token_loss(head: nn.Module, hidden_btd: Tensor, targets_bt: Tensor, chunk_tokens: int) -> LossSum:
    """Summed cross-entropy of head(hidden) against targets; targets of -100 are left out of sum and count.

    Holds about 16 bytes × chunk_tokens × vocab_size at a time, and nothing of the logits between forward and
    backward. Equal to the plain loss and its gradients within fp32 rounding.
    """
    hidden_nd, targets_n = hidden_btd.flatten(0, 1), targets_bt.flatten()
    loss_sum = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
    for hidden_cd, targets_c in zip(
        torch.split(hidden_nd, chunk_tokens), torch.split(targets_n, chunk_tokens), strict=True
    ):
        loss_sum = loss_sum + checkpoint(
            _chunk_loss, head, hidden_cd, targets_c, use_reentrant=False, preserve_rng_state=False
        )
    return LossSum(loss_sum, (targets_n != IGNORED).sum())


def _chunk_loss(head: nn.Module, hidden_cd: Tensor, targets_c: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden_cd).float(), targets_c, ignore_index=IGNORED, reduction="sum")
