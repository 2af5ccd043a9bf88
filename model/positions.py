"""Positions: RoPE turns each pair of dimensions of q and k by an angle that grows with the position.

Since only the difference of two angles survives in q·k, attention sees relative distance (Su et al. 2021, eq. 34).
Which dimensions make a pair is a convention, the layout: "rotate_half" pairs i with i + head_dim/2 (Hugging Face),
"interleaved" 2i with 2i + 1 (the paper, Meta, llama.cpp). Weights learnt under one give nonsense under the other, and
no error, until the rows of q_proj and k_proj are reordered: `reorder`.

Suffixes: b batch, t positions, h heads, d the head's dimensions (the tables hold one column per pair, d/2).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def rope_tables(head_dim: int, seq_len: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(-2i/head_dim) for pair i: two (seq_len, head_dim/2) fp32 tensors on the CPU.

    The angles are formed in float64 from integers: in fp32 the angle at position 2047 is already 1e-4 off, in bf16
    positions past 256 are not even distinct.
    """
    position_t1 = torch.arange(seq_len, device="cpu").to(torch.float64)[:, None]
    exponent_d = torch.arange(0, head_dim, 2, device="cpu").to(torch.float64) / head_dim
    angle_td = position_t1 * base**-exponent_d
    return angle_td.cos().to(torch.float32), angle_td.sin().to(torch.float32)


def positions_within_documents(documents_bt: Tensor) -> Tensor:
    """How far each token is from the first of its document, (b, t) int64, where a new number begins a document."""
    index_t = torch.arange(documents_bt.shape[1], device=documents_bt.device)
    begins_bt = torch.ones_like(documents_bt, dtype=torch.bool)
    begins_bt[:, 1:] = documents_bt[:, 1:] != documents_bt[:, :-1]
    return index_t - torch.where(begins_bt, index_t, 0).cummax(dim=1).values


def rotate(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor, layout: str = "rotate_half") -> Tensor:
    """Turn each pair of dimensions by the tables' angles, pairs as the layout has them; same shape and dtype as x.

    Half-precision x meets the fp32 tables in fp32 and is rounded once, at the end.
    """
    if not torch.is_grad_enabled():  # a Function of our own takes longer to call than a single token to compute
        return _turn(x_bhtd, cos_td, sin_td, layout)
    turned_bhtd: Tensor = _Rotation.apply(x_bhtd, cos_td, sin_td, layout)  # type: ignore[no-untyped-call]
    return turned_bhtd


class _Rotation(torch.autograd.Function):
    """A rotation; backward turns the gradient by the opposite angles, so nothing but the tables is kept for it."""

    @staticmethod
    def forward(ctx: Any, x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos_td, sin_td)
        ctx.layout = layout
        return _turn(x_bhtd, cos_td, sin_td, layout)

    @staticmethod
    def backward(ctx: Any, grad_bhtd: Tensor) -> tuple[Tensor, None, None, None]:
        cos_td, sin_td = ctx.saved_tensors
        return _turn(grad_bhtd, cos_td, -sin_td, ctx.layout), None, None, None


def _turn(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor, layout: str) -> Tensor:
    exact_bhtd = x_bhtd.to(torch.promote_types(x_bhtd.dtype, cos_td.dtype))
    both_td = cos_td.repeat_interleave(2, dim=-1) if layout == "interleaved" else torch.cat((cos_td, cos_td), dim=-1)
    turned_bhtd = exact_bhtd * both_td
    (one, other), (turned_one, turned_other) = _pairs(exact_bhtd, layout), _pairs(turned_bhtd, layout)
    turned_one.addcmul_(other, sin_td, value=-1)
    turned_other.addcmul_(one, sin_td)
    return turned_bhtd.to(x_bhtd.dtype)


def _pairs(x_bhtd: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dimension of every pair."""
    if layout == "interleaved":
        return x_bhtd[..., 0::2], x_bhtd[..., 1::2]
    half = x_bhtd.shape[-1] // 2
    return x_bhtd[..., :half], x_bhtd[..., half:]


def reorder(weights: Mapping[str, Tensor], head_dim: int, *, have: str, want: str) -> dict[str, Tensor]:
    """A model's weights by name, made for one layout, so that they give the same logits under another.

    The rows of each head in q_proj and k_proj, (heads · head_dim, d_model), change places; the scores q·k are sums of
    the same products in another order. Other weights are given on as they are. There and back is the identity, bit for
    bit.
    """
    if have == want:
        return dict(weights)
    pairs = (2, head_dim // 2) if want == "interleaved" else (head_dim // 2, 2)
    return {
        name: weight.reshape(-1, *pairs, weight.shape[1]).transpose(1, 2).flatten(0, 2)
        if name.endswith(("q_proj.weight", "k_proj.weight"))
        else weight
        for name, weight in weights.items()
    }


class RotaryEmbedding(nn.Module):
    """The RoPE tables of one model: buffers that are never saved and stay fp32 and exact through every cast.

    `module.bfloat16()`, an engine's cast, and `to_empty()` after building on the meta device all go through `_apply`,
    which makes the tables anew on the device it moved them to, rather than keeping what the cast left of them.
    """

    cos_td: Tensor
    sin_td: Tensor

    def __init__(self, head_dim: int, seq_len: int, base: float) -> None:
        super().__init__()
        self.head_dim, self.seq_len, self.base = head_dim, seq_len, base
        self._make_tables(torch.get_default_device())

    def _make_tables(self, device: torch.device) -> None:
        cos_td, sin_td = rope_tables(self.head_dim, self.seq_len, self.base)
        self.register_buffer("cos_td", cos_td.to(device), persistent=False)
        self.register_buffer("sin_td", sin_td.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._make_tables(self.cos_td.device)
        return self

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each (length, head_dim/2) fp32, of the positions start .. start + length - 1.

        ValueError past the end of the tables; RuntimeError when something cast them behind `_apply`'s back.
        """
        self._check(start + length)
        return self.cos_td[start : start + length], self.sin_td[start : start + length]

    def within_documents(self, documents_bt: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (b, 1, t, head_dim/2) fp32, of positions that begin at 0 with every document of a row.

        Errors as above.
        """
        return self.at(positions_within_documents(documents_bt), stop=documents_bt.shape[1])

    def at(self, positions_bt: Tensor, *, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each (b, 1, t, head_dim/2) fp32, of any positions, all of them below `stop`.

        Errors as above, found without looking at a device's numbers.
        """
        self._check(stop)
        return self.cos_td[positions_bt][:, None], self.sin_td[positions_bt][:, None]

    def _check(self, stop: int) -> None:
        if stop > self.seq_len:
            raise ValueError(f"position {stop - 1} is past the model's seq_len = {self.seq_len}: shorten the input")
        if self.cos_td.dtype != torch.float32:
            raise RuntimeError(f"the RoPE tables were cast to {self.cos_td.dtype}: positions past 256 would be wrong")
