"""Causal self-attention with grouped queries, the masks it runs under, and the cache of what it has already seen.

Suffixes: b batch, t tokens, d model width, h heads (query heads for q, key/value heads for k and v),
k the dimensions of one head.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model.config import ModelConfig
from model.positions import rotate

Mask: TypeAlias = Tensor | BlockMask


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

    def forward(
        self,
        x_btd: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q_bhtk = rotate(self._heads(self.q_proj(x_btd)), *rotation)
        k_bhtk = rotate(self._heads(self.k_proj(x_btd)), *rotation)
        v_bhtk = self._heads(self.v_proj(x_btd))
        if cache is not None:
            k_bhtk, v_bhtk = cache.append(self.layer, k_bhtk, v_bhtk)
        if mask is None:
            mask = causal_mask(q_bhtk.shape[2], k_bhtk.shape[2], q_bhtk.device)
        out_bhtk = attend(q_bhtk, k_bhtk, v_bhtk, mask, grouped=self.grouped)
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


def document_mask(documents_bt: Tensor) -> Mask:
    """Causal attention confined to documents: token i sees token j <= i of the same number in its row.

    To be made once for all layers. On a GPU it is a block mask, which lets flex_attention leave out the blocks between
    documents; where that does not run, and on a CPU, it is (b, 1, t, t) booleans. A masked score is exactly 0 after
    the softmax, so no number of one document enters another's.
    """
    if documents_bt.device.type == "cuda" and compiled_flex_attention() is not None:
        return block_mask(documents_bt)
    return boolean_mask(documents_bt)


def boolean_mask(documents_bt: Tensor) -> Tensor:
    """`document_mask` as scaled_dot_product_attention takes it: (b, 1, t, t), True where query t may look."""
    return (documents_bt[:, None, :, None] == documents_bt[:, None, None, :]).tril()


def block_mask(documents_bt: Tensor) -> BlockMask:
    """`document_mask` as flex_attention takes it: which blocks of 128 x 128 scores hold any that count, and a rule."""

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_bt[row, query] == documents_bt[row, key])

    batch, tokens = documents_bt.shape
    return create_block_mask(is_seen, batch, None, tokens, tokens, device=documents_bt.device)


def attend(q_bhtk: Tensor, k_bhtk: Tensor, v_bhtk: Tensor, mask: Mask | None, *, grouped: bool) -> Tensor:
    """Softmax attention under a mask, None being causal among equally many queries and keys; shape of q."""
    if isinstance(mask, BlockMask):
        flex = compiled_flex_attention()
        assert flex is not None, "a block mask is made only where flex_attention runs"
        out_bhtk: Tensor = flex(q_bhtk, k_bhtk, v_bhtk, block_mask=mask, enable_gqa=grouped)
        return out_bhtk
    return F.scaled_dot_product_attention(
        q_bhtk, k_bhtk, v_bhtk, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


@functools.cache
def compiled_flex_attention() -> Callable[..., Any] | None:
    """flex_attention, compiled; None, with a warning, where it does not compile or gives other numbers than SDPA.

    Tried once a process on a small case in bf16, output and gradients, since it depends on GPU, driver and compiler.
    """
    flex = torch.compile(flex_attention)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    q_bhtk, k_bhtk, v_bhtk, gradient_bhtk = (
        torch.randn(2, heads, 256, 64, dtype=torch.bfloat16, device=device, generator=generator).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    documents_bt = torch.arange(256, device=device).div(90, rounding_mode="floor").expand(2, -1).contiguous()
    mask = boolean_mask(documents_bt)
    try:
        ours = flex(q_bhtk, k_bhtk, v_bhtk, block_mask=block_mask(documents_bt), enable_gqa=True)
        theirs = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, attn_mask=mask, enable_gqa=True)
        our_all, their_all = (
            [out, *torch.autograd.grad(out, (q_bhtk, k_bhtk, v_bhtk), gradient_bhtk)] for out in (ours, theirs)
        )
        pairs = zip(our_all, their_all, strict=True)
        errors = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
        fault = None if all(error < 0.05 for error in errors) else f"output and gradients are off by {errors}"
    except Exception as error:  # a compiler may fail in any way; whatever it is, attention goes on without it
        fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if fault is None:
        return flex
    warnings.warn(f"flex_attention does not run here ({fault}): document masks take the slower way", stacklevel=2)
    return None
