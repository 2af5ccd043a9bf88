"""Causal attention for training on CPUs: torch's kernel forward, a backward of matrix products.

Up to some thousand tokens torch's own backward on CPUs takes twice its forward's time, where the products alone would
take as much as that. This one recomputes the scores of some queries at a time, as FlashAttention does (Dao et al. 2022,
algorithm 4), all query heads that share a key/value head in one product. So keys and values are neither copied for each
query head nor kept in copies, and their gradients are summed in fp32.

Suffixes: b batch, t tokens, h heads, k the dimensions of one head; r rows, which are pairs of a sequence and a
key/value head; g query heads of a row; c queries of a chunk, x those of all heads of a row; s keys.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.masks import Band

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_TOKENS = 1024  # beyond, torch's kernel is as fast (benchmarks/model.py)
_CHUNK = 64  # queries
_SCORES_PER_THREAD = 1 << 20


class CausalAttentionOnCPU(torch.autograd.Function):
    """softmax(q · kᵀ / √head_dim) · v, causal, queries and keys the same tokens; within a band's window, if given one.

    q (b, h, t, k), k and v (b, h / g, t, k), in one of DTYPES. Kept for backward: these, the output, and one fp32
    number a query.
    """

    @staticmethod
    def forward(ctx: Any, q_bhtk: Tensor, k_bhtk: Tensor, v_bhtk: Tensor, band: Band | None = None) -> Tensor:
        out_bhtk, log_z_bht = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_bhtk, k_bhtk, v_bhtk, dropout_p=0.0, is_causal=True, attn_mask=None if band is None else band.seen_tt
        )
        ctx.window = q_bhtk.shape[2] if band is None else band.window
        ctx.save_for_backward(q_bhtk, k_bhtk, v_bhtk, out_bhtk, log_z_bht)
        return out_bhtk  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bhtk: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """With P the probabilities, O the output and dO its gradient:

        dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O)), dQ = dS K / √head_dim, dK = dSᵀ Q / √head_dim.
        """
        q_bhtk, k_bhtk, v_bhtk, out_bhtk, log_z_bht = ctx.saved_tensors
        batch, heads, tokens, width = q_bhtk.shape
        rows, group, dtype = batch * k_bhtk.shape[1], heads // k_bhtk.shape[1], q_bhtk.dtype
        q_rgtk, grad_rgtk = (x.reshape(rows, group, tokens, width) for x in (q_bhtk, grad_bhtk))
        k_rsk, v_rsk = (x.reshape(rows, tokens, width) for x in (k_bhtk, v_bhtk))
        exact_k_rsk, exact_v_rsk = k_rsk.float() / math.sqrt(width), v_rsk.float()
        minus_log_z_rgt = log_z_bht.reshape(rows, group, tokens).neg()
        minus_mean_rgt = (grad_bhtk.float() * out_bhtk).sum(-1).neg_().reshape(rows, group, tokens)
        grad_q_rgtk = torch.empty_like(q_rgtk)
        grad_k_rsk, grad_v_rsk = torch.zeros_like(exact_k_rsk), torch.zeros_like(exact_v_rsk)
        is_later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool).triu(1)

        rows_at_once = max(1, torch.get_num_threads() * _SCORES_PER_THREAD // (group * _CHUNK * tokens))
        for row in range(0, rows, rows_at_once):
            for begin in range(0, tokens, _CHUNK):
                end = min(begin + _CHUNK, tokens)
                first = max(0, begin - ctx.window + 1)  # the farthest key that any query of the chunk sees
                r, c, s = slice(row, row + rows_at_once), slice(begin, end), slice(first, end)
                q_rxk, grad_rxk = q_rgtk[r, :, c].flatten(1, 2), grad_rgtk[r, :, c].flatten(1, 2)
                minus_log_z_rx1, minus_mean_rx1 = (
                    x[r, :, c].flatten(1, 2).unsqueeze(2) for x in (minus_log_z_rgt, minus_mean_rgt)
                )
                p_rxs = torch.baddbmm(minus_log_z_rx1, q_rxk.float(), exact_k_rsk[r, s].mT)
                p_rgcs = p_rxs.view(-1, group, end - begin, end - first)
                p_rgcs[..., begin - first :].masked_fill_(is_later[: end - begin, : end - begin], -math.inf)
                if end > ctx.window:  # some key is out of some query's sight: only among the first of them
                    size = end - begin
                    is_too_far = torch.ones(size, size, dtype=torch.bool).tril(begin - first - ctx.window)
                    p_rgcs[..., :size].masked_fill_(is_too_far, -math.inf)
                p_rxs.exp_()
                grad_s_rxs = torch.baddbmm(minus_mean_rx1, grad_rxk.float(), exact_v_rsk[r, s].mT).mul_(p_rxs)
                p_rxs, grad_s_rxs = p_rxs.to(dtype), grad_s_rxs.to(dtype)
                grad_v_rsk[r, s] += p_rxs.mT @ grad_rxk
                grad_k_rsk[r, s] += grad_s_rxs.mT @ q_rxk
                grad_q_rgtk[r, :, c] = (grad_s_rxs @ k_rsk[r, s]).view(-1, group, end - begin, width)
        scale = 1.0 / math.sqrt(width)
        return (
            grad_q_rgtk.mul_(scale).reshape(q_bhtk.shape),
            grad_k_rsk.mul_(scale).to(dtype).reshape(k_bhtk.shape),
            grad_v_rsk.to(dtype).reshape(v_bhtk.shape),
            None,
        )


_apply = CausalAttentionOnCPU.apply


def causal_attention_on_cpu(q_bhtk: Tensor, k_bhtk: Tensor, v_bhtk: Tensor, band: Band | None = None) -> Tensor:
    """`CausalAttentionOnCPU`, behind `keep_whole` as one step also of compiled code."""
    out_bhtk: Tensor = _apply(q_bhtk, k_bhtk, v_bhtk, band)  # type: ignore[no-untyped-call]
    return out_bhtk


def keep_whole() -> None:
    """Have compilers leave it as it is: they would unroll the loop over chunks.

    Called before something is compiled, not on import: torch._dynamo, which knows compilers, takes a second to import.
    """
    global _apply
    _apply = torch.compiler.disable(CausalAttentionOnCPU.apply)  # type: ignore[no-untyped-call]
