"""Positions: what tells a model where a token stands, chosen once by `build_positions`.

Attention by itself sees a set. "rope" turns each pair of dimensions of q and k by an angle that grows with position;
since only the difference of two angles survives in q·k, attention sees relative distance (Su et al. 2021, eq. 34).
"sinusoidal" and "learned" add a vector for each position to the embedding; "none" leaves the causal mask as the only
hint. Every choice is called with the embedding and the `Places` of a pass, and gives back what enters the first block
and the angles for its attention, if any.

Which dimensions RoPE pairs is a convention, the layout: "rotate_half" pairs i with i + head_dim/2 (Hugging Face),
"interleaved" 2i with 2i + 1 (the paper, Meta, llama.cpp). Weights learnt under one give nonsense under the other, and
no error, until the rows of q_proj and k_proj are reordered: `reorder`.

Suffixes: b batch, t positions, h heads, d the head's dimensions (RoPE's tables hold one column per pair, d/2) or, where
something is added to the embedding, the model's width.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from model import rope_scaling
from model.config import ModelConfig

Rotation: TypeAlias = tuple[Tensor, ...]  # cos and sin, each (t, d/2) or (b, 1, t, d/2); nothing where nothing turns


@dataclass(frozen=True)
class Places:
    """Where the tokens of one pass stand in their texts: at start .. stop - 1 in every row or, where positions_bt is
    given, at those, all of them below stop.

    `length` is how long the text is or will be, which "dynamic" angles depend on: of all rows, or of each. None where a
    row holds several texts, whose lengths the positions tell.
    """

    start: int
    stop: int
    positions_bt: Tensor | None = None
    length: int | tuple[int, ...] | None = None

    def rows_of(self, table_td: Tensor) -> Tensor:
        """A table's rows for these places: (t, d), a view, or (b, t, d)."""
        return table_td[self.start : self.stop] if self.positions_bt is None else table_td[self.positions_bt]


def one_text(tokens: int) -> Places:
    """Every row is one text, read from its beginning."""
    return Places(0, tokens, length=tokens)


def within_documents(documents_bt: Tensor) -> Places:
    """Positions begin at 0 with every document of a row."""
    return Places(0, documents_bt.shape[1], positions_within_documents(documents_bt))


def rope_tables(head_dim: int, seq_len: int, base: float, frequencies_d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(-2i/head_dim), or of position · frequencies_d[i], for pair i: two
    (seq_len, head_dim/2) fp32 tensors on the CPU.

    The angles are formed in float64 from integers: in fp32 the angle at position 2047 is already 1e-4 off, in bf16
    positions past 256 are not even distinct.
    """
    position_t1 = torch.arange(seq_len, device="cpu").to(torch.float64)[:, None]
    angle_td = position_t1 * (rope_scaling.plain(head_dim, base) if frequencies_d is None else frequencies_d)
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


def turning(config: ModelConfig) -> Callable[..., Tensor]:
    """What attention does to q and k with the angles that `build_positions` gives: turn them, or leave them."""
    return functools.partial(rotate, layout=config.rope_layout) if config.positions == "rope" else unturned


def unturned(x_bhtd: Tensor) -> Tensor:
    return x_bhtd


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


_TURNED = tuple(f"{part}.{kind}" for part in ("q_proj", "k_proj", "q_norm", "k_norm") for kind in ("weight", "bias"))


def reorder(weights: Mapping[str, Tensor], head_dim: int, *, have: str, want: str) -> dict[str, Tensor]:
    """A model's weights by name, made for one layout, so that they give the same logits under another.

    The rows of each head in q_proj and k_proj, (heads · head_dim, d_model), change places, and so do their biases and
    the weights of QK-Norm; the scores q·k are sums of the same products in another order. Other weights are given on as
    they are. There and back is the identity, bit for bit.
    ValueError for MLA's weights.
    """
    if have == want:
        return dict(weights)
    if any(name.endswith("kv_a_proj_with_mqa.weight") for name in weights):
        raise ValueError("MLA turns a part of each head alone: its weights cannot be reordered for another RoPE layout")
    pairs = (2, head_dim // 2) if want == "interleaved" else (head_dim // 2, 2)
    return {
        name: weight.reshape(-1, *pairs, *weight.shape[1:]).transpose(1, 2).flatten(0, 2)
        if name.endswith(_TURNED)
        else weight
        for name, weight in weights.items()
    }


class Positions(nn.Module):
    """What all choices share: positions end at seq_len, and tables are buffers that are never saved and stay fp32 and
    exact through every cast.

    `module.bfloat16()`, an engine's cast, and `to_empty()` after building on the meta device all go through `_apply`,
    which makes the tables anew on the device it moved them to, rather than keeping what the cast left of them.
    Itself it is the choice "none".
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len

    def forward(self, x_btd: Tensor, places: Places) -> tuple[Tensor, Rotation]:
        """The embedding with its places told, if it is there that they are told, and the angles for attention.

        ValueError past seq_len; RuntimeError when something cast the tables behind `_apply`'s back.
        """
        self._check(places.stop)
        return x_btd, ()

    def exact_tables(self) -> dict[str, Tensor]:
        """By name, in fp32, on the CPU."""
        return {}

    def _make_tables(self, device: torch.device) -> None:
        for name, table in self.exact_tables().items():
            self.register_buffer(name, table.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Positions":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if (table := next(self.buffers(), None)) is not None:
            self._make_tables(table.device)
        return self

    def _check(self, stop: int) -> None:
        if stop > self.seq_len:
            raise ValueError(f"position {stop - 1} is past the model's seq_len = {self.seq_len}: shorten the input")
        if (table := next(self.buffers(), None)) is not None and table.dtype != torch.float32:
            raise RuntimeError(f"the tables were cast to {table.dtype}: positions past 256 would be wrong")


class RotaryEmbedding(Positions):
    """RoPE: the embedding stays as it is, attention is given angles.

    `frequencies` computes those of the pairs where they are not base^(-2i/head_dim), `factor` is what cos and sin are
    multiplied by: see `model.rope_scaling`.
    """

    cos_td: Tensor
    sin_td: Tensor

    def __init__(
        self,
        head_dim: int,
        seq_len: int,
        base: float,
        frequencies: Callable[[], Tensor] | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__(seq_len)
        self.head_dim, self.base = head_dim, base
        self.frequencies, self.factor = frequencies, factor
        self._make_tables(torch.get_default_device())

    def exact_tables(self) -> dict[str, Tensor]:
        frequencies_d = None if self.frequencies is None else self.frequencies()
        cos_td, sin_td = rope_tables(self.head_dim, self.seq_len, self.base, frequencies_d)
        return {"cos_td": cos_td * self.factor, "sin_td": sin_td * self.factor}

    def forward(self, x_btd: Tensor, places: Places) -> tuple[Tensor, Rotation]:
        return x_btd, self.rotation(places)

    def rotation(self, places: Places) -> Rotation:
        """cos and sin, (t, head_dim/2) where all rows stand at the same places, else (b, 1, t, head_dim/2); fp32."""
        self._check(places.stop)
        return self._rows(places, self.cos_td, self.sin_td)

    def _rows(self, places: Places, cos_td: Tensor, sin_td: Tensor) -> Rotation:
        cos, sin = places.rows_of(cos_td), places.rows_of(sin_td)
        return (cos, sin) if places.positions_bt is None else (cos[:, None], sin[:, None])


class DynamicRotaryEmbedding(RotaryEmbedding):
    """RoPE whose base grows with the text once that is longer than `trained`: `model.rope_scaling.dynamic_base`.

    The length that counts is that of the whole pass, in packed rows that of each document, with a cache what each row
    has room for. So a document in a row is read as it would be alone, and a token read from the cache as without.
    """

    def __init__(self, head_dim: int, seq_len: int, base: float, scaling_factor: float, trained: int) -> None:
        super().__init__(head_dim, seq_len, base)
        self.scaling_factor, self.trained = scaling_factor, trained
        self._grown: tuple[int, torch.device, tuple[Tensor, Tensor]] | None = None
        self._turning: tuple[tuple[int, ...], torch.device, Tensor] | None = None

    def rotation(self, places: Places) -> Rotation:
        longest = max(places.length) if isinstance(places.length, tuple) else places.length or places.stop
        if longest <= self.trained:
            return super().rotation(places)
        self._check(places.stop)
        if isinstance(places.length, int):
            return self._rows(places, *self._tables_for(min(places.length, self.seq_len)))
        if places.length is not None:
            return self._of_each_row(places, places.length)
        assert places.positions_bt is not None, "one text a row has a length"
        return self._within_texts(places.positions_bt)

    def _tables_for(self, length: int) -> tuple[Tensor, Tensor]:
        """Those of a text of this length, kept until another is asked for."""
        device = self.cos_td.device
        if self._grown is None or self._grown[:2] != (length, device):
            cos_td, sin_td = rope_tables(self.head_dim, self.seq_len, self.base, self._frequencies_at(length))
            self._grown = length, device, (cos_td.to(device), sin_td.to(device))
        return self._grown[2]

    def _frequencies_at(self, length: int) -> Tensor:
        """Of a text of this length, (head_dim/2,) float64 on the CPU."""
        base = self.base
        if length > self.trained:
            grown = min(length, self.seq_len) / self.trained
            base = rope_scaling.dynamic_base(self.head_dim, self.base, self.scaling_factor, grown)
        return rope_scaling.plain(self.head_dim, base)

    def _of_each_row(self, places: Places, lengths: tuple[int, ...]) -> Rotation:
        """Angles of rows whose texts have these lengths; the frequencies are kept until others are asked for."""
        device = self.cos_td.device
        if self._turning is None or self._turning[:2] != (lengths, device):
            frequencies_bd = torch.stack([self._frequencies_at(length) for length in lengths])
            self._turning = lengths, device, frequencies_bd.to(device)
        positions_bt = places.positions_bt
        if positions_bt is None:
            positions_bt = torch.arange(places.start, places.stop, device=device)[None]
        angle_b1td = (positions_bt[..., None] * self._turning[2][:, None])[:, None]
        return angle_b1td.cos().to(torch.float32), angle_b1td.sin().to(torch.float32)

    def _within_texts(self, positions_bt: Tensor) -> Rotation:
        """Each token's angles by the length of its own text, which ends where positions begin again."""
        lengths_bt = lengths_of_texts(positions_bt)
        grown_bt = (lengths_bt.to(torch.float64) / self.trained).clamp(min=1)
        base_bt1 = rope_scaling.dynamic_base(self.head_dim, self.base, self.scaling_factor, grown_bt)[..., None]
        pair_d = torch.arange(0, self.head_dim, 2, device=positions_bt.device).to(torch.float64) / self.head_dim
        angle_b1td = (positions_bt[..., None] * base_bt1**-pair_d)[:, None]
        return angle_b1td.cos().to(torch.float32), angle_b1td.sin().to(torch.float32)


def lengths_of_texts(positions_bt: Tensor) -> Tensor:
    """(b, t) int64: how many tokens the text of each token has, where position 0 begins a text."""
    tokens = positions_bt.shape[1]
    index_t = torch.arange(tokens, device=positions_bt.device)
    next_begin_bt = torch.full_like(positions_bt, tokens)
    next_begin_bt[:, :-1] = torch.where(positions_bt[:, 1:] == 0, index_t[1:], tokens)
    end_bt = next_begin_bt.flip(1).cummin(dim=1).values.flip(1)
    return end_bt - (index_t - positions_bt)


class Sinusoidal(Positions):
    """sqrt(d_model) · embedding + a fixed table of waves (Vaswani et al. 2017, sections 3.4 and 3.5).

    PE(position, 2i) = sin(position / 10000^(2i/d_model)), PE(position, 2i + 1) = the cosine. The waves have amplitude 1
    and an embedding as it is drawn some hundredths, so without the root a token would hardly show beside its place.
    """

    table_td: Tensor

    def __init__(self, d_model: int, seq_len: int) -> None:
        super().__init__(seq_len)
        self.d_model = d_model
        self._make_tables(torch.get_default_device())

    def exact_tables(self) -> dict[str, Tensor]:
        cos_td, sin_td = rope_tables(self.d_model, self.seq_len, 10000.0)
        return {"table_td": torch.stack((sin_td, cos_td), dim=-1).flatten(1)[:, : self.d_model]}

    def forward(self, x_btd: Tensor, places: Places) -> tuple[Tensor, Rotation]:
        self._check(places.stop)
        placed_btd = torch.add(places.rows_of(self.table_td), x_btd, alpha=math.sqrt(self.d_model))
        return placed_btd.to(x_btd.dtype), ()


class Learned(Positions):
    """embedding + a weight for each position, learnt like the embedding itself (GPT-2)."""

    def __init__(self, d_model: int, seq_len: int) -> None:
        super().__init__(seq_len)
        self.weight = nn.Parameter(torch.zeros(seq_len, d_model))

    def forward(self, x_btd: Tensor, places: Places) -> tuple[Tensor, Rotation]:
        self._check(places.stop)
        return x_btd + places.rows_of(self.weight), ()


def build_positions(config: ModelConfig) -> Positions:
    """The choice that the config names.

    MLA turns only the part of q and k that it keeps for it, and enlarges its scores by itself.
    """
    if config.positions == "none":
        return Positions(config.seq_len)
    if config.positions == "sinusoidal":
        return Sinusoidal(config.d_model, config.seq_len)
    if config.positions == "learned":
        return Learned(config.d_model, config.seq_len)
    head_dim, factor = config.head_dim, rope_scaling.attention_factor(config)
    if config.attention == "mla":
        assert config.mla_rope_dim is not None
        head_dim, factor = config.mla_rope_dim, 1.0
    if config.rope_scaling == "none":
        return RotaryEmbedding(head_dim, config.seq_len, config.rope_base)
    if config.rope_scaling == "dynamic":
        return DynamicRotaryEmbedding(
            head_dim,
            config.seq_len,
            config.rope_base,
            config.rope_scaling_factor,
            rope_scaling.trained_length(config),
        )
    frequencies = functools.partial(rope_scaling.frequencies, config, head_dim)
    return RotaryEmbedding(head_dim, config.seq_len, config.rope_base, frequencies, factor)
