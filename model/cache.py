"""What a model keeps of the tokens it has read, so that the next one costs one token's work.

Suffixes: b batch, t new tokens, h key/value heads, j slots of the cache, k the dimensions of one head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig
from model.masks import causal_mask
from model.positions import Places


def held_widths(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(heads, width) of each tensor that one layer holds of a token.

    Keys and values: n_kv_heads of head_dim each, never their copies for each query head. MLA: the latent that keys and
    values are made from, and beside it the rotary part of the keys, once for all heads.
    """
    if config.attention == "mla":
        assert config.mla_latent is not None
        assert config.mla_rope_dim is not None
        return ((1, config.mla_latent + config.mla_rope_dim),)
    return ((config.n_kv_heads, config.head_dim),) * 2


class KVCache:
    """Keys and values (or MLA's latents) of the tokens that a model has read, allocated once for `max_tokens` a row,
    never copied.

    A token's slot is its position: row b fills slots 0 .. lengths[b] - 1, and each row has a length of its own. A pass
    over (b, t) ids appends t tokens to every row in every layer, then advances. To read texts of unequal length
    together, pad them on the right and `cut` the rows back: what stands past a row's length is seen by no later token,
    and overwritten by the next ones.
    With a sliding window it still holds every token (`nbytes` says so); what no later token can see is not read again.
    `text_lengths`: how long each row's text may become, where that is less than max_tokens; see `places`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        text_lengths: Sequence[int] | None = None,
    ) -> None:
        if text_lengths is not None and (len(text_lengths) != batch_size or max(text_lengths) > max_tokens):
            raise ValueError(f"texts of {list(text_lengths)} tokens do not fit {batch_size} rows of {max_tokens}")
        self.held = tuple(  # zeros: a masked score of 0 times NaN is NaN
            torch.zeros(config.n_layers, batch_size, heads, max_tokens, width, dtype=dtype, device=device)
            for heads, width in held_widths(config)
        )
        self.max_tokens = max_tokens
        self.text_length: int | tuple[int, ...] = max_tokens
        if text_lengths is not None:
            alike = len(set(text_lengths)) == 1
            self.text_length = text_lengths[0] if alike else tuple(text_lengths)
        self.window = config.sliding_window
        self.lengths = [0] * batch_size
        self._lengths_b = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows_b1 = torch.arange(batch_size, device=device)[:, None]
        self._slots_j = torch.arange(max_tokens, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held for keys and values, as allocated."""
        return sum(held.untyped_storage().nbytes() for held in self.held)

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have one length, which needs neither a mask nor a scatter to add a token."""
        return min(self.lengths) == max(self.lengths)

    @property
    def first(self) -> int:
        """The first slot that any row's next token can see: 0, unless a window has left it behind in all rows."""
        return 0 if self.window is None else max(0, min(self.lengths) - self.window + 1)

    def positions(self, tokens: int) -> Tensor:
        """(b, tokens) int64: where the next `tokens` of each row stand."""
        return self._lengths_b[:, None] + self._slots_j[:tokens]

    def places(self, tokens: int) -> Places:
        """The same for `model.positions`: a slice of its tables where all rows stand at one position.

        A text's length is what it may become: angles that depend on it (`rope_scaling` "dynamic") are settled before
        the first token and hold for all, so that a key never has to be turned again.
        """
        positions_bt = None if self.is_even else self.positions(tokens)
        return Places(self.longest, self.longest + tokens, positions_bt, self.text_length)

    def mask(self, tokens: int) -> Tensor | None:
        """Which slots, from `first`, the next `tokens` of each row may look at: those up to their own, and with a
        window the last of those. Broadcasts to (b, h, t, j).

        None as in `causal_mask`. To be made once for all layers.
        """
        first, stop = self.first, self.longest + tokens
        if self.is_even:
            return causal_mask(tokens, stop - first, self._slots_j.device, self.window)
        slots_j, positions_bt1 = self._slots_j[first:stop], self.positions(tokens)[:, :, None]
        seen_btj = slots_j <= positions_bt1
        if self.window is not None:
            seen_btj &= slots_j > positions_bt1 - self.window
        return seen_btj[:, None]

    def append(self, layer: int, *new_bhtk: Tensor) -> list[Tensor]:
        """Store what one layer holds of the new tokens, keys and values or what `held_widths` names; give back views
        of that layer's slots, from `first` to the longest row's last.

        ValueError when they do not fit, or are of another number of rows.
        """
        rows, tokens = new_bhtk[0].shape[0], new_bhtk[0].shape[2]
        if rows != len(self.lengths):
            raise ValueError(f"a KV cache of {len(self.lengths)} rows is given {rows}")
        first, start, stop = self.first, self.longest, self.longest + tokens
        if stop > self.max_tokens:
            raise ValueError(f"{stop} tokens do not fit a KV cache of {self.max_tokens}: allocate it larger")
        positions_bt = None if self.is_even else self.positions(tokens)
        views = []
        for held, one_bhtk in zip(self.held, new_bhtk, strict=True):
            held_bhjk = held[layer]
            if positions_bt is None:
                held_bhjk.narrow(2, start, tokens).copy_(one_bhtk)
            else:
                held_bhjk[self._rows_b1, :, positions_bt] = one_bhtk.transpose(1, 2)
            views.append(held_bhjk.narrow(2, first, stop - first))
        return views

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
