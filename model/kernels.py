"""Softmax attention itself: which kernel computes it, by mask, device and number of queries.

Suffixes: b batch, t tokens, h heads (query heads for q, key/value heads for k and v), g queries of a key/value head, k
the dimensions of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from model import attention_cpu
from model.attention_cpu import causal_attention_on_cpu
from model.masks import Band, Mask, compiled_flex_attention


class Kernel(nn.Module):
    """`attend` as a module without parameters: each attention has one, so that a forward hook on it sees the queries,
    keys and mask that are multiplied, whatever made them."""

    def forward(self, q_bhtk: Tensor, k_bhtk: Tensor, v_bhtk: Tensor, mask: Mask | None, grouped: bool) -> Tensor:
        return attend(q_bhtk, k_bhtk, v_bhtk, mask, grouped=grouped)


def attend(q_bhtk: Tensor, k_bhtk: Tensor, v_bhtk: Tensor, mask: Mask | None, *, grouped: bool) -> Tensor:
    """Softmax attention under a mask; shape of q. None is causal among equally many queries and keys, and one query
    that sees all keys.

    With one query a token's heads, grouped by the key/value head they read, are so many queries of that head: a view,
    where kernels without grouped heads would copy keys and values for each query head.
    """
    if isinstance(mask, BlockMask):
        flex = compiled_flex_attention()
        assert flex is not None, "a block mask is made only where flex_attention runs"
        out_bhtk: Tensor = flex(q_bhtk, k_bhtk, v_bhtk, block_mask=mask, enable_gqa=grouped)
        return out_bhtk
    if isinstance(mask, Band):
        if _suits_cpu_training(q_bhtk):
            return causal_attention_on_cpu(q_bhtk, k_bhtk, v_bhtk, mask)
        mask = mask.seen_tt
    queries, causal = q_bhtk.shape[2], mask is None and q_bhtk.shape[2] > 1
    assert mask is not None or queries in (1, k_bhtk.shape[2]), "these queries and keys need a mask"
    if causal and _suits_cpu_training(q_bhtk):
        return causal_attention_on_cpu(q_bhtk, k_bhtk, v_bhtk)
    if queries > 1 or not grouped:
        return F.scaled_dot_product_attention(
            q_bhtk, k_bhtk, v_bhtk, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
    q_bhgk = q_bhtk.view(q_bhtk.shape[0], k_bhtk.shape[1], -1, q_bhtk.shape[3])
    out_bhgk = F.scaled_dot_product_attention(q_bhgk, k_bhtk, v_bhtk, attn_mask=mask, is_causal=False, enable_gqa=False)
    return out_bhgk.reshape(q_bhtk.shape)


def _suits_cpu_training(q_bhtk: Tensor) -> bool:
    """Whether these queries' gradients are wanted, on a CPU, where CausalAttentionOnCPU is the faster way to them."""
    return (
        q_bhtk.device.type == "cpu"
        and q_bhtk.requires_grad
        and torch.is_grad_enabled()
        and q_bhtk.dtype in attention_cpu.DTYPES
        and q_bhtk.shape[2] <= attention_cpu.MOST_TOKENS
    )
