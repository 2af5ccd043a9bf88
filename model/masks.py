"""Which tokens a token may look at: the past, the past of its own document, or a window of it that slides along.

Suffixes: b batch, t tokens (t, t: queries by keys), h heads, k the dimensions of one head.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention


class Band(NamedTuple):
    """A causal mask that ends in the past as well: a query sees itself and the window - 1 tokens before it.

    `seen_tt` says so as scaled_dot_product_attention takes it; kernels of our own need the number alone.
    """

    window: int
    seen_tt: Tensor


Mask: TypeAlias = Tensor | BlockMask | Band


def causal_mask(queries: int, keys: int, device: torch.device, window: int | None = None) -> Tensor | None:
    """(queries, keys) booleans, True where the query may look; None when they are the same tokens, or one query, and
    no window hides any of them.

    The queries are the *last* tokens among the keys, so query i may see keys 0 .. keys - queries + i, of those with a
    window the last `window`. For equal numbers that is what `is_causal` means, and the fused kernels need no mask in
    memory; one query sees all keys. Else it is not: `is_causal` aligns the first query with the first key.
    """
    if queries in (1, keys) and (window is None or keys <= window):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)
    return seen if window is None else seen.triu(diagonal=keys - queries - window + 1)


def window_mask(tokens: int, window: int | None, device: torch.device) -> Mask | None:
    """For equally many queries and keys: token i sees token j <= i with i - j < window.

    None where the window hides nothing. Else, to be made once for all layers: a block mask on a GPU, which lets
    flex_attention leave out the blocks outside the band; where that does not run, and on a CPU, a `Band`.
    """
    if window is None or tokens <= window:
        return None
    if device.type == "cuda" and compiled_flex_attention() is not None:
        return window_block_mask(tokens, window, device)
    seen_tt = causal_mask(tokens, tokens, device, window)
    assert seen_tt is not None, "a window shorter than the tokens hides some"
    return Band(window, seen_tt)


def document_mask(documents_bt: Tensor, window: int | None = None) -> Mask:
    """Causal attention confined to documents: token i sees token j <= i of the same number in its row, within a window
    if there is one.

    To be made once for all layers. On a GPU it is a block mask, which lets flex_attention leave out the blocks between
    documents; where that does not run, and on a CPU, it is (b, 1, t, t) booleans. A masked score is exactly 0 after
    the softmax, so no number of one document enters another's.
    """
    if documents_bt.device.type == "cuda" and compiled_flex_attention() is not None:
        return block_mask(documents_bt, window)
    return boolean_mask(documents_bt, window)


def boolean_mask(documents_bt: Tensor, window: int | None = None) -> Tensor:
    """`document_mask` as scaled_dot_product_attention takes it: (b, 1, t, t), True where query t may look."""
    seen_b1tt = (documents_bt[:, None, :, None] == documents_bt[:, None, None, :]).tril()
    return seen_b1tt if window is None else seen_b1tt.triu(diagonal=1 - window)


def seen_of_row(mask: Mask | None, row: int, queries: range, tokens: int, keys: int, device: torch.device) -> Tensor:
    """Which keys some of a row's `tokens` queries look at, as booleans that broadcast to (h, queries, keys), whatever
    kind the mask is of: what an attention's kernel does with it, for those who watch attention."""
    query_t1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key_s = torch.arange(keys, device=device)
    if isinstance(mask, BlockMask):
        row_, head = torch.tensor(row, device=device), torch.tensor(0, device=device)
        return mask.mask_mod(row_, head, query_t1, key_s).expand(len(queries), keys)
    if isinstance(mask, Tensor):
        of_row = mask[row if len(mask) > 1 else 0] if mask.dim() == 4 else mask
        part = of_row[..., queries.start : queries.stop, :]
        return part if part.dtype == torch.bool else part == 0
    query_t1 = query_t1 + keys - tokens  # the queries are the last tokens
    seen_ts = key_s <= query_t1
    return seen_ts if mask is None else seen_ts & (query_t1 - key_s < mask.window)


def additive(mask: Mask | None, dtype: torch.dtype) -> Mask | None:
    """A boolean mask as what is added to scores of q's dtype, 0 or -inf; a block mask, and none, as it is.

    scaled_dot_product_attention would make this of it in every layer, and keep each for backward.
    """
    if isinstance(mask, Band):
        return mask._replace(seen_tt=_added(mask.seen_tt, dtype))
    return _added(mask, dtype) if isinstance(mask, Tensor) else mask


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def block_mask(documents_bt: Tensor, window: int | None = None) -> BlockMask:
    """`document_mask` as flex_attention takes it: which blocks of 128 x 128 scores hold any that count, and a rule."""
    batch, tokens = documents_bt.shape

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_bt[row, query] == documents_bt[row, key])

    rule = is_seen if window is None else and_masks(is_seen, _within(window))
    return create_block_mask(rule, batch, None, tokens, tokens, device=documents_bt.device)


def _within(window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def is_near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return is_near


def window_block_mask(tokens: int, window: int, device: torch.device) -> BlockMask:
    """`window_mask` as flex_attention takes it, one for all rows and heads."""
    return create_block_mask(_within(window), None, None, tokens, tokens, device=device)


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
