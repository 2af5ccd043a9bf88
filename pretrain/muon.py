"""Muon: the momentum of a hidden matrix, orthogonalized, is its update (Jordan et al. 2024, "Muon: An optimizer for
hidden layers in neural networks"), in the size of Liu et al. 2025, "Muon is scalable for LLM training".

    M ← μM + (1−μ)G;   O = NewtonSchulz(G + μ(M − G));   W ← W − lr·(rms·√max(rows, columns)·O + weight_decay·W)

O has singular values near 1, so the root mean square of its elements is 1/√max(rows, columns), and that of the update
is `rms`·lr whatever the shape (eq. 4 there): 0.2 is what AdamW's updates have, so that one rate serves both. Vectors,
embeddings and the output head are updated by AdamW.

Under ZeRO the gradient, averaged over the ranks and clipped, and the momentum are parts of flat partitions, as with any
optimizer; the momentum is one number a weight, and there is no second moment. Only Newton-Schulz needs whole matrices.
ZeRO-1 and 2 cut the flat sequence of matrices into one stretch a rank: each rank has whole matrices, which it keeps to
itself, and at most one cut at either end. ZeRO-3 spreads every matrix over all ranks. A matrix on several ranks has one
owner among them, the one with the least work so far: in rounds, of one matrix an owner, the ranks send their pieces to
the owners, in bf16, as Newton-Schulz computes, and get those of the result back. So no matrix is orthogonalized twice,
and a rank holds one whole matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.adamw import Group, PiecewiseAdamW, State, pieces

# The quintic's coefficients and number of iterations (Jordan et al. 2024): singular values end between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """(rows, columns) → the same in bf16, singular vectors kept, singular values moved close to 1."""
    x = matrix.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


# ---------------------------------------------------------------- where matrices lie


@dataclass(frozen=True)
class Piece:
    """The elements of a matrix, row by row, that one rank has: `size` of them from `start` on."""

    rank: int
    start: int
    size: int
    offset: int  # where they begin in the rank's flat partition


@dataclass(frozen=True)
class Matrix:
    rows: int
    columns: int
    pieces: tuple[Piece, ...]  # of ranks one after the other, in the order of their elements

    def on(self, rank: int) -> Piece | None:
        """The piece that a rank has."""
        number = rank - self.pieces[0].rank
        return self.pieces[number] if 0 <= number < len(self.pieces) else None

    @property
    def work(self) -> int:
        return self.rows * self.columns * min(self.rows, self.columns)


def whole(weights: Tensor, rank: int) -> Matrix:
    """ZeRO-0: a matrix that `rank` has whole, as has every other."""
    return Matrix(weights.shape[0], weights.shape[1], (Piece(rank, 0, weights.numel(), 0),))


def cut(shapes: Sequence[tuple[int, int]], offsets: Sequence[int], partition: int) -> list[Matrix]:
    """ZeRO-1 and 2: matrices at `offsets` of a flat sequence that is cut into `partition` elements a rank."""
    matrices = []
    for (rows, columns), first in zip(shapes, offsets, strict=True):
        end = first + rows * columns
        pieces = []
        for rank in range(first // partition, (end - 1) // partition + 1):
            low, high = max(first, rank * partition), min(end, (rank + 1) * partition)
            pieces.append(Piece(rank, low - first, high - low, low - rank * partition))
        matrices.append(Matrix(rows, columns, tuple(pieces)))
    return matrices


def spread(shapes: Sequence[tuple[int, int]], world_size: int) -> list[Matrix]:
    """ZeRO-3: each matrix is cut into equal parts, one a rank, the last one filled up; a rank's parts lie in a row."""
    matrices, offset = [], 0
    for rows, columns in shapes:
        part = -(-rows * columns // world_size)
        sizes = [min(part, rows * columns - rank * part) for rank in range(world_size)]
        pieces = tuple(Piece(rank, rank * part, size, offset) for rank, size in enumerate(sizes) if size > 0)
        matrices.append(Matrix(rows, columns, pieces))
        offset += part
    return matrices


Round = dict[int, Matrix]  # owner → the matrix it orthogonalizes


def rounds(matrices: Sequence[Matrix]) -> list[Round]:
    """Those matrices that lie on several ranks, each with its owner; the same on every rank."""
    work: dict[int, int] = {}
    found: list[Round] = []
    for matrix in sorted(matrices, key=lambda matrix: len(matrix.pieces)):  # whole ones first: their owner is given
        owner = min((piece.rank for piece in matrix.pieces), key=lambda rank: (work.get(rank, 0), rank))
        work[owner] = work.get(owner, 0) + matrix.work
        if len(matrix.pieces) > 1:
            free = next((one for one in found if owner not in one), None)
            if free is None:
                found.append(free := {})
            free[owner] = matrix
    return found


# ---------------------------------------------------------------- the optimizer


class OrthogonalizingAdamW(PiecewiseAdamW):
    """Muon for the groups marked "hidden", AdamW for the others.

    The engine sets `layouts`: for each flat partition of a hidden group, where matrices lie in it; a weight without one
    is a matrix itself, whole on every rank. Momentum has the dtype of AdamW's moments.

    DeepSpeed has a Muon of its own, and starts it wherever an optimizer's class is called so. It orthogonalizes before
    it clips: what it clips, and reports the norm of, is no gradient.
    """

    def __init__(
        self, groups: Iterable[Group], *, momentum: float, update_rms: float, world_size: int, **adamw: Any
    ) -> None:
        super().__init__(groups, **adamw)
        self.momentum = momentum
        self.update_rms = update_rms
        self.world_size = world_size
        self.layouts: dict[Tensor, list[Matrix]] = {}
        self._rounds: dict[Tensor, list[Round]] = {}

    def new_moments(self, weights: Tensor, group: Group) -> State:
        if not group.get("hidden"):
            return super().new_moments(weights, group)
        return {"momentum": torch.zeros_like(weights, dtype=self.moments)}

    def update(self, weights: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        if not group.get("hidden"):
            super().update(weights, gradient, state, group)
            return
        lr, decay, momentum = group["lr"], group["weight_decay"], state["momentum"].view(-1)
        gradient, flat, lost = gradient.view(-1), weights.view(-1), state.get("lost", weights).view(-1)
        for m, g in pieces(momentum, gradient):
            m.lerp_(g.to(m.dtype), 1 - self.momentum)

        def ahead(piece: Piece) -> Tensor:
            """Nesterov's look ahead."""
            here = slice(piece.offset, piece.offset + piece.size)
            return gradient[here].float().lerp(momentum[here].float(), self.momentum).bfloat16()

        add = self.adder(weights.device, state)
        for matrix, piece, orthogonal in self._orthogonalized(weights, ahead):
            here = slice(piece.offset, piece.offset + piece.size)
            scale = self.update_rms * math.sqrt(max(matrix.rows, matrix.columns))
            for w, o, left in pieces(flat[here], orthogonal, lost[here]):
                add(w, o.float().mul_(scale).add_(w, alpha=decay).mul_(-lr), left)

    def _orthogonalized(
        self, weights: Tensor, ahead: Callable[[Piece], Tensor]
    ) -> Iterator[tuple[Matrix, Piece, Tensor]]:
        """This rank's piece of each matrix in a partition, orthogonalized, in bf16."""
        matrices = self.layouts[weights] if weights in self.layouts else [whole(weights, self.rank)]
        if weights not in self._rounds:
            self._rounds[weights] = rounds(matrices)
        for matrix in matrices:
            piece = matrix.on(self.rank)
            if piece is not None and len(matrix.pieces) == 1:
                yield matrix, piece, orthogonalize(ahead(piece).view(matrix.rows, matrix.columns)).reshape(-1)
        for together in self._rounds[weights]:
            yield from self._exchanged(together, ahead)

    def _exchanged(self, together: Round, ahead: Callable[[Piece], Tensor]) -> Iterator[tuple[Matrix, Piece, Tensor]]:
        """One round: pieces to the owners, results back. Every rank takes part, with or without a piece."""
        device = next(iter(self.layouts)).device
        held = {owner: (matrix, piece) for owner, matrix in together.items() if (piece := matrix.on(self.rank))}
        out = [held[owner][1].size if owner in held else 0 for owner in range(self.world_size)]
        own = together.get(self.rank)
        back = [0] * self.world_size
        for piece in own.pieces if own is not None else ():
            back[piece.rank] = piece.size
        sent = torch.empty(sum(out), dtype=torch.bfloat16, device=device)
        for owner, part in enumerate(torch.split(sent, out)):
            if owner in held:
                part.copy_(ahead(held[owner][1]))
        owned = sent.new_empty(sum(back))
        dist.all_to_all_single(owned, sent, back, out)
        if own is not None:
            owned = orthogonalize(owned.view(own.rows, own.columns)).reshape(-1)
        dist.all_to_all_single(sent, owned, out, back)
        for owner, part in enumerate(torch.split(sent, out)):
            if owner in held:
                yield *held[owner], part
