"""Causal self-attention with grouped queries, and the cache of what it has already seen.

Suffixes: b batch, t tokens, d model width, h heads (query heads for q, key/value heads for k and v),
k the dimensions of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.positions import rotate


class KVCache:
    """Keys and values of the tokens a model has read, allocated once for `max_tokens`.

    It holds key/value heads only (never their copies for each query head):
    2 · n_layers · n_kv_heads · head_dim values a token. `length` tokens are filled, the same number in every layer;
    the model moves it on when all layers have appended.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.n_layers, batch_size, config.n_kv_heads, max_tokens, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.max_tokens = max_tokens
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, as allocated."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def append(self, layer: int, k_bhtk: Tensor, v_bhtk: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; give back views of all of that layer's, old and new.

        ValueError when they do not fit.
        """
        stop = self.length + k_bhtk.shape[2]
        if stop > self.max_tokens:
            raise ValueError(f"{stop} tokens do not fit a KV cache of {self.max_tokens}: allocate it larger")
        self.keys[layer, :, :, self.length : stop] = k_bhtk
        self.values[layer, :, :, self.length : stop] = v_bhtk
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as filled, once every layer has appended them."""
        self.length += tokens


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): query head h reads key/value head h // (n_heads / n_kv_heads).

    Consecutive query heads share a key/value head, the Hugging Face order. Scores are scaled by 1/sqrt(head_dim),
    which keeps their variance at 1 for unit-variance q and k.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.grouped = config.n_heads != config.n_kv_heads
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, q_width, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.d_model, bias=False)

    def forward(self, x_btd: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        q_bhtk = rotate(self._heads(self.q_proj(x_btd)), *rotation)
        k_bhtk = rotate(self._heads(self.k_proj(x_btd)), *rotation)
        v_bhtk = self._heads(self.v_proj(x_btd))
        if cache is not None:
            k_bhtk, v_bhtk = cache.append(self.layer, k_bhtk, v_bhtk)
        mask = causal_mask(q_bhtk.shape[2], k_bhtk.shape[2], q_bhtk.device)
        out_bhtk = F.scaled_dot_product_attention(
            q_bhtk, k_bhtk, v_bhtk, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        out_btd: Tensor = self.o_proj(out_bhtk.transpose(1, 2).flatten(2))
        return out_btd

    def _heads(self, x_btd: Tensor) -> Tensor:
        return x_btd.view(*x_btd.shape[:2], -1, self.head_dim).transpose(1, 2)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """(queries, keys) booleans, True where the query may look; None when they are the same tokens.

    The queries are the *last* tokens among the keys, so query i may see keys 0 .. keys - queries + i. For equal
    numbers that is what `is_causal` means, and the fused kernels need no mask in memory. With a cache it is not:
    `is_causal` aligns the first query with the first key.
    """
    if queries == keys:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)
