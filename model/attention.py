"""Causal self-attention with grouped queries, and which choice of attention a model has: `build_attention`.

Suffixes: b batch, t tokens, d model width, h heads (query heads for q, key/value heads for k and v), k the dimensions
of one head.
"""

import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.config import ModelConfig
from model.kernels import Kernel
from model.masks import Mask
from model.mla import LatentAttention
from model.norms import RMSNorm
from model.positions import Rotation, turning


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): query head h reads key/value head h // (n_heads / n_kv_heads).

    Consecutive query heads share a key/value head, the Hugging Face order; n_kv_heads = n_heads is multi-head attention
    (MHA), 1 is multi-query (MQA). Scores are scaled by 1/sqrt(head_dim), which keeps their variance at 1 for
    unit-variance q and k.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.turn = turning(config)
        self.grouped = config.n_heads != config.n_kv_heads
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, q_width, bias=config.bias)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(q_width, config.d_model, bias=config.bias)
        self.kernel = Kernel()

    def forward(
        self,
        x_btd: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q_bhtk, k_bhtk, v_bhtk = self.heads(x_btd)
        if cache is None:
            q_bhtk = self.turn(q_bhtk, *rotation)
            k_bhtk = self.turn(k_bhtk, *rotation)
        else:  # both at once: what a single token costs is the number of calls
            heads_bhtk = self.turn(torch.cat((q_bhtk, k_bhtk), dim=1), *rotation)
            q_bhtk, k_bhtk = torch.split(heads_bhtk, [q_bhtk.shape[1], k_bhtk.shape[1]], dim=1)
            k_bhtk, v_bhtk = cache.append(self.layer, k_bhtk, v_bhtk)
        out_bhtk = self.kernel(q_bhtk, k_bhtk, v_bhtk, mask, self.grouped)
        out_btd: Tensor = self.o_proj(out_bhtk.transpose(1, 2).flatten(2))
        return out_btd

    def heads(self, x_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (b, n_heads, t, head_dim), k and v (b, n_kv_heads, t, head_dim), before they are turned."""
        return self._split(self.q_proj(x_btd)), self._split(self.k_proj(x_btd)), self._split(self.v_proj(x_btd))

    def _split(self, x_btd: Tensor) -> Tensor:
        return x_btd.view(*x_btd.shape[:2], -1, self.head_dim).transpose(1, 2)


class NormedAttention(Attention):
    """With QK-Norm: each head of q and of k is RMS-normed before it is turned (Henry et al. 2020; Qwen3's layout).

    One weight of head_dim for all query heads, one for all key heads. However large q and k grow, a score stays within
    sqrt(head_dim) times the two weights' largest values.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def heads(self, x_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_bhtk, k_bhtk, v_bhtk = super().heads(x_btd)
        return self.q_norm(q_bhtk), self.k_norm(k_bhtk), v_bhtk


def build_attention(config: ModelConfig, layer: int) -> nn.Module:
    """The choice that the config names; called with (x_btd, rotation, cache, mask), it gives back (b, t, d_model)."""
    if config.attention == "mla":
        return LatentAttention(config, layer)
    return NormedAttention(config, layer) if config.qk_norm else Attention(config, layer)
