"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values out of one latent a token.

A token's keys and values of all heads are linear in a latent c of mla_latent numbers, so c is all that has to be kept
of it (eq. 9 to 11). RoPE would stand between the latent and the keys: so position has a part of its own, mla_rope_dim
numbers of each query head and one key for all heads (eq. 14 to 19). A head's score of query t and key s:

    (q_t · (W_k c_s) + q'_t · k'_s) / sqrt(head_dim + mla_rope_dim)        its value: W_v c_s

Queries are full: the low rank that the paper gives them too saves activations in training, not a byte of cache.
Modules and parameters have the names and the order of transformers' DeepseekV2Attention.

Suffixes: b batch, t tokens, s keys, d model width, h heads, k the dimensions of one head, r its rotary ones, c those of
the latent.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig
from model.kernels import Kernel
from model.masks import Mask
from model.norms import RMSNorm
from model.positions import Rotation, turning
from model.rope_scaling import attention_factor


class LatentAttention(nn.Module):
    """Several tokens: keys and values are made from the latents, and attention is that of any other model. One token
    against a cache: W_k goes to the query and W_v to the output, so that the latents themselves are attended (page 7),
    and what is read of the cache is mla_latent + mla_rope_dim numbers a token, whatever the number of heads.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mla_latent is not None
        assert config.mla_rope_dim is not None
        self.layer, self.turn = layer, turning(config)
        self.n_heads, self.head_dim = config.n_heads, config.head_dim
        self.latent, self.rope_dim = config.mla_latent, config.mla_rope_dim
        self.sharpened = attention_factor(config) ** 2  # scores as YaRN wants them; the tables leave it to us
        self.q_proj = nn.Linear(config.d_model, config.n_heads * (config.head_dim + self.rope_dim), bias=config.bias)
        self.kv_a_proj_with_mqa = nn.Linear(config.d_model, self.latent + self.rope_dim, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(self.latent, config.norm_eps)
        self.kv_b_proj = KeysAndValues(self.latent, config.n_heads, config.head_dim, config.bias)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=config.bias)
        self.kernel = Kernel()

    def forward(
        self,
        x_btd: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q_bhtk, q_bhtr = self._queries(x_btd, rotation)
        held_b1s = self._latents(x_btd, rotation)
        if cache is not None:
            (held_b1s,) = cache.append(self.layer, held_b1s)
        if cache is not None and x_btd.shape[1] == 1:
            out_bhtk = self._absorbed(q_bhtk, q_bhtr, held_b1s, mask)
        else:
            out_bhtk = self._expanded(q_bhtk, q_bhtr, held_b1s, mask)
        out_btd: Tensor = self.o_proj(out_bhtk.transpose(1, 2).flatten(2))
        return out_btd

    def _queries(self, x_btd: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """(b, h, t, k) and, turned, (b, h, t, r)."""
        q_bhtx = self.q_proj(x_btd).view(*x_btd.shape[:2], self.n_heads, -1).transpose(1, 2)
        if self.sharpened != 1:
            q_bhtx = q_bhtx * self.sharpened
        q_bhtk, q_bhtr = torch.split(q_bhtx, [self.head_dim, self.rope_dim], dim=-1)
        return q_bhtk, self.turn(q_bhtr, *rotation)

    def _latents(self, x_btd: Tensor, rotation: Rotation) -> Tensor:
        """(b, 1, t, c + r), what a cache holds: the normed latent and, turned, the key that all heads share."""
        latent_btc, k_btr = torch.split(self.kv_a_proj_with_mqa(x_btd), [self.latent, self.rope_dim], dim=-1)
        k_b1tr = self.turn(k_btr[:, None], *rotation)
        return torch.cat((self.kv_a_layernorm(latent_btc)[:, None], k_b1tr), dim=-1)

    def _expanded(self, q_bhtk: Tensor, q_bhtr: Tensor, held_b1s: Tensor, mask: Mask | None) -> Tensor:
        """Keys and values made from the latents. Values are lengthened by zeros: fused kernels know one width."""
        latent_bsc, k_bsr = torch.split(held_b1s[:, 0], [self.latent, self.rope_dim], dim=-1)
        both_bshx = self.kv_b_proj(latent_bsc).view(*latent_bsc.shape[:2], self.n_heads, 2 * self.head_dim)
        k_bhsk, v_bhsk = torch.split(both_bshx.transpose(1, 2), self.head_dim, dim=-1)
        k_bhsr = k_bsr[:, None].expand(-1, self.n_heads, -1, -1)
        out_bhtx = self.kernel(
            torch.cat((q_bhtk, q_bhtr), dim=-1),
            torch.cat((k_bhsk, k_bhsr), dim=-1),
            F.pad(v_bhsk, (0, self.rope_dim)),
            mask,
            False,
        )
        out_bhtk: Tensor = out_bhtx[..., : self.head_dim]
        return out_bhtk

    def _absorbed(self, q_bhtk: Tensor, q_bhtr: Tensor, held_b1s: Tensor, mask: Mask | None) -> Tensor:
        """All heads attend the latents. The kernel divides by sqrt(c + r), where sqrt(k + r) is wanted."""

        def mean_latents(q_bhtc: Tensor) -> Tensor:
            both_bhtx = torch.cat((q_bhtc, q_bhtr), dim=-1)
            both_bhtx = both_bhtx * math.sqrt((self.latent + self.rope_dim) / (self.head_dim + self.rope_dim))
            mean_bhtx: Tensor = self.kernel(both_bhtx, held_b1s, held_b1s, mask, True)
            return mean_bhtx[..., : self.latent]

        out_bhtk: Tensor = self.kv_b_proj(q_bhtk, mean_latents)
        return out_bhtk


class KeysAndValues(nn.Linear):
    """W_k and W_v of all heads: of each head the rows that make keys, then those that make values.

    Both ways to use them are its forward, since an engine that splits weights over ranks (ZeRO-3) has a module's whole
    only while that runs.
    """

    def __init__(self, latent: int, n_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__(latent, n_heads * 2 * head_dim, bias=bias)
        self.n_heads, self.head_dim = n_heads, head_dim

    def forward(self, x: Tensor, mean_latents: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Of latents (b, s, c) the keys and values (b, s, h · 2k); of queries (b, h, t, k), given what takes them as
        (b, h, t, c) to each head's average of the latents, what the heads give, (b, h, t, k).

        q · (W_k c) is (W_kᵀ q) · c, and the sum of p (W_v c) is W_v (sum of p c). A bias on keys adds the same to all
        scores of a query, which the softmax doesn't see; one on values passes the average unchanged.
        """
        if mean_latents is None:
            return super().forward(x)
        w_k_hkc, w_v_hkc = torch.split(self.weight.view(self.n_heads, 2 * self.head_dim, -1), self.head_dim, dim=1)
        out_bhtk = torch.matmul(mean_latents(torch.matmul(x, w_k_hkc)), w_v_hkc.mT)
        if self.bias is not None:
            out_bhtk = out_bhtk + self.bias.view(self.n_heads, 2, 1, self.head_dim)[:, 1]
        return out_bhtk
