"""Causal self-attention with grouped queries, the masks it runs under, and the cache of what it has already seen.

Suffixes: b batch, t tokens, d model width, h heads (query heads for q, key/value heads for k and v),
j slots of the cache, k the dimensions of one head.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model import attention_cpu
from model.attention_cpu import causal_attention_on_cpu
from model.config import ModelConfig
from model.positions import rotate

Mask: TypeAlias = Tensor | BlockMask


class KVCache:
    """Keys and values of the tokens that a model has read, allocated once for `max_tokens` a row, never copied.

    A token's slot is its position: row b fills slots 0 .. lengths[b] - 1, and each row has a length of its own. It
    holds key/value heads only (never their copies for each query head): 2 · n_layers · n_kv_heads · head_dim values a
    slot. A pass over (b, t) ids appends t tokens to every row in every layer, then advances. To read texts of unequal
    length together, pad them on the right and `cut` the rows back: what stands past a row's length is seen by no
    later token, and overwritten by the next ones.
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
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: a masked score of 0 times NaN is NaN
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.max_tokens = max_tokens
        self.lengths = [0] * batch_size
        self._lengths_b = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows_b1 = torch.arange(batch_size, device=device)[:, None]
        self._slots_j = torch.arange(max_tokens, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held for keys and values, as allocated."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have one length, which needs neither a mask nor a scatter to add a token."""
        return min(self.lengths) == max(self.lengths)

    def positions(self, tokens: int) -> Tensor:
        """(b, tokens) int64: where the next `tokens` of each row stand."""
        return self._lengths_b[:, None] + self._slots_j[:tokens]

    def mask(self, tokens: int) -> Tensor | None:
        """Which slots the next `tokens` of each row may look at: those up to their own. Broadcasts to (b, h, t, j).

        None as in `causal_mask`. To be made once for all layers.
        """
        stop = self.longest + tokens
        if self.is_even:
            return causal_mask(tokens, stop, self._slots_j.device)
        return (self._slots_j[:stop] <= self.positions(tokens)[:, :, None])[:, None]

    def append(self, layer: int, k_bhtk: Tensor, v_bhtk: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; give back views of that layer's slots, as many as the longest row has.

        ValueError when they do not fit, or are of another number of rows.
        """
        tokens = k_bhtk.shape[2]
        if k_bhtk.shape[0] != len(self.lengths):
            raise ValueError(f"a KV cache of {len(self.lengths)} rows is given {k_bhtk.shape[0]}")
        start, stop = self.longest, self.longest + tokens
        if stop > self.max_tokens:
            raise ValueError(f"{stop} tokens do not fit a KV cache of {self.max_tokens}: allocate it larger")
        keys_bhjk, values_bhjk = self.keys[layer], self.values[layer]
        if self.is_even:
            keys_bhjk.narrow(2, start, tokens).copy_(k_bhtk)
            values_bhjk.narrow(2, start, tokens).copy_(v_bhtk)
        else:
            positions_bt = self.positions(tokens)
            keys_bhjk[self._rows_b1, :, positions_bt] = k_bhtk.transpose(1, 2)
            values_bhjk[self._rows_b1, :, positions_bt] = v_bhtk.transpose(1, 2)
        return keys_bhjk.narrow(2, 0, stop), values_bhjk.narrow(2, 0, stop)

    def advance(self, tokens: int) -> None:
        """Count `tokens` more in every row, once every layer has appended them."""
        self.lengths = [length + tokens for length in self.lengths]
        self._lengths_b += tokens

    def cut(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row b: padding read with them, or a text to be changed.

        ValueError for a length that the row does not have.
        """
        if len(lengths) != len(self.lengths) or not all(
            0 <= kept <= held for kept, held in zip(lengths, self.lengths, strict=True)
        ):
            raise ValueError(f"rows of {self.lengths} tokens cannot be cut to {list(lengths)}")
        self.lengths = list(lengths)
        self._lengths_b.copy_(torch.tensor(self.lengths))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): query head h reads key/value head h // (n_heads / n_kv_heads).

    Consecutive query heads share a key/value head, the Hugging Face order. Scores are scaled by 1/sqrt(head_dim),
    which keeps their variance at 1 for unit-variance q and k.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.rope_layout = config.rope_layout
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
        q_bhtk, k_bhtk, v_bhtk = (self._heads(project(x_btd)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if cache is None:
            q_bhtk = rotate(q_bhtk, *rotation, self.rope_layout)
            k_bhtk = rotate(k_bhtk, *rotation, self.rope_layout)
        else:  # both at once: what a single token costs is the number of calls
            heads_bhtk = rotate(torch.cat((q_bhtk, k_bhtk), dim=1), *rotation, self.rope_layout)
            q_bhtk, k_bhtk = torch.split(heads_bhtk, [q_bhtk.shape[1], k_bhtk.shape[1]], dim=1)
            k_bhtk, v_bhtk = cache.append(self.layer, k_bhtk, v_bhtk)
        out_bhtk = attend(q_bhtk, k_bhtk, v_bhtk, mask, grouped=self.grouped)
        out_btd: Tensor = self.o_proj(out_bhtk.transpose(1, 2).flatten(2))
        return out_btd

    def _heads(self, x_btd: Tensor) -> Tensor:
        return x_btd.view(*x_btd.shape[:2], -1, self.head_dim).transpose(1, 2)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """(queries, keys) booleans, True where the query may look; None when they are the same tokens, or one query.

    The queries are the *last* tokens among the keys, so query i may see keys 0 .. keys - queries + i. For equal
    numbers that is what `is_causal` means, and the fused kernels need no mask in memory; one query sees all keys. Else
    it is not: `is_causal` aligns the first query with the first key.
    """
    if queries in (1, keys):
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


def additive(mask: Mask, dtype: torch.dtype) -> Mask:
    """A boolean mask as what is added to scores of q's dtype, 0 or -inf; a block mask as it is.

    scaled_dot_product_attention would make this of it in every layer, and keep each for backward.
    """
    if isinstance(mask, BlockMask):
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def block_mask(documents_bt: Tensor) -> BlockMask:
    """`document_mask` as flex_attention takes it: which blocks of 128 x 128 scores hold any that count, and a rule."""

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_bt[row, query] == documents_bt[row, key])

    batch, tokens = documents_bt.shape
    return create_block_mask(is_seen, batch, None, tokens, tokens, device=documents_bt.device)


def attend(q_bhtk: Tensor, k_bhtk: Tensor, v_bhtk: Tensor, mask: Mask | None, *, grouped: bool) -> Tensor:
    """Softmax attention under a mask; shape of q. None is causal among equally many queries and keys, and one query
    that sees all keys.

    With one query a token's heads, grouped by the key/value head they read, are so many queries of that head: a view,
    where kernels without grouped heads would copy keys and values for each query head.
    """
    out_bhtk: Tensor
    if isinstance(mask, BlockMask):
        flex = compiled_flex_attention()
        assert flex is not None, "a block mask is made only where flex_attention runs"
        out_bhtk = flex(q_bhtk, k_bhtk, v_bhtk, block_mask=mask, enable_gqa=grouped)
        return out_bhtk
    queries, causal = q_bhtk.shape[2], mask is None and q_bhtk.shape[2] > 1
    assert mask is not None or queries in (1, k_bhtk.shape[2]), "these queries and keys need a mask"
    if causal and _suits_cpu_training(q_bhtk):
        out_bhtk = causal_attention_on_cpu(q_bhtk, k_bhtk, v_bhtk)
        return out_bhtk
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
