"""A checkpoint that other ranks wrote, or another ZeRO stage: the same numbers, spread anew.

DeepSpeed's files hold flat partitions. ZeRO-0 has none: each rank has whole parameters, and the first one saves them.
ZeRO-1 and 2 lay the parameters of a group end to end and cut that sequence into one stretch a rank; ZeRO-3 cuts every
parameter into one part a rank, and a rank's parts lie end to end. Which parameters lie in a partition, and in which
order, stands in the files. So where an element of a parameter lies is arithmetic, on the side that was saved and on
this one, and each rank copies what it needs: masters and states as they are, in the dtype they are in. The files are
mapped into memory, not read whole; what is held beside the engine is a piece of one parameter.

Moments of 8 bits have scales of blocks, which begin elsewhere in another partition, and codes cannot be moved from
scale to scale without loss. They come as the fp32 numbers they stand for, in main memory, and the first update rounds
them anew in its blocks, as every update does (`eight_bit.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.eight_bit import decoded
from pretrain.muon import Piece, cut, spread
from pretrain.run_directory import CheckpointError

MASTER = ""  # where the name of a state stands otherwise
CODES, SCALES = "_codes", "_scales"
SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")  # what files and engine call the scale of the loss

Sizes = Mapping[str, int]  # parameter → elements, in the order in which they lie in a partition
Places = dict[str, tuple[Piece, ...]]  # parameter → where its elements lie


@dataclass(frozen=True)
class Layout:
    """How masters and states are spread over ranks. Two equal ones have every element in the same place."""

    stage: int
    world_size: int
    partitions: tuple[tuple[tuple[str, int], ...], ...]  # of a rank: names and elements of what lies in each, in order
    aligned: bool = False  # whether ZeRO-1 and 2 leave gaps between parameters

    def __str__(self) -> str:
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} under ZeRO-{self.stage}"

    def told_beside(self, other: Layout) -> str:
        """What it is that `other`, which is not equal, is not: one may be of another DeepSpeed JSON alone."""
        return str(self) if str(self) != str(other) else f"{self}, its parameters laid out otherwise"


def places(layout: Layout, lengths: Sequence[int], gaps: Sequence[Sequence[int]]) -> list[Places]:
    """For each flat partition where its parameters' elements lie, on all ranks.

    `lengths` of a rank's flat partitions, with what they are filled up with; `gaps` behind each parameter. Both are
    asked of ZeRO-1 and 2 alone. Under ZeRO-0 everything lies on every rank: it is said to lie on rank 0.
    """
    found: list[Places] = []
    for number, partition in enumerate(layout.partitions):
        shapes = [(size, 1) for _, size in partition]
        pieces: list[tuple[Piece, ...]]
        if layout.stage == 0:
            pieces = [(Piece(0, 0, size, 0),) for _, size in partition]
        elif layout.stage == 3:
            pieces = [matrix.pieces for matrix in spread(shapes, layout.world_size)]
        else:
            widths = [size + gap for (_, size), gap in zip(partition, gaps[number], strict=True)]
            offsets = [0, *accumulate(widths)][:-1]
            pieces = [matrix.pieces for matrix in cut(shapes, offsets, lengths[number])]
        found.append({name: own for (name, _), own in zip(partition, pieces, strict=True)})
    return found


class SavedState:
    """What DeepSpeed saved of an optimizer, its elements by parameter and name of the state."""

    def __init__(self, folder: Path, layout: Layout, load: Callable[[Path], Any]) -> None:
        """`load` reads a file of `folder`; CheckpointError where one is missing."""
        self._folder = folder
        self.scaler: dict[str, Any] = {}  # of the loss, where the files have one
        self._masters: list[Sequence[Tensor]] = []  # by rank, by partition
        self._states: list[dict[int, dict[str, Any]]] = []
        lengths: list[int] = []
        gaps = [[0] * len(partition) for partition in layout.partitions]
        if layout.stage == 0:
            file = load(model_file(folder))
            optimizer = file["optimizer"]
            if "fp32_groups" in optimizer:  # of a model in bf16
                masters = [master for group in optimizer["fp32_groups"] for master in group]
                optimizer = optimizer["optimizer_state_dict"]
            else:
                masters = [file["module"][name] for partition in layout.partitions for name, _ in partition]
            self._add(masters, optimizer)
        for rank in range(layout.world_size if layout.stage else 0):
            saved = load(_optimizer_file(folder, rank))["optimizer_state_dict"]
            if layout.stage == 3:
                self._add(saved["fp32_flat_groups"], saved["optimizer_state_dict"])
            else:
                self._add(saved["single_partition_of_fp32_groups"], saved["base_optimizer_state"])
            if rank == 0:
                self.scaler = {name: saved[name] for name in SCALER if name in saved}
                gaps = saved.get("param_alignment_paddings", gaps)
                # Its masters were saved without what fills up the last rank's partition; those of ZeRO-1 in bf16
                # with sums in fp32, whose files name no stage, with it.
                filled = saved["group_paddings"] if "zero_stage" in saved and layout.stage < 3 else [0] * len(gaps)
                lengths = [len(master) + more for master, more in zip(self._masters[0], filled, strict=True)]
        self._places = {
            name: (number, own)
            for number, partition in enumerate(places(layout, lengths, gaps))
            for name, own in partition.items()
        }

    def _add(self, masters: Sequence[Tensor], optimizer: Mapping[str, Any]) -> None:
        self._masters.append(masters)
        self._states.append(optimizer["state"])
        self.lr = float(optimizer["param_groups"][0]["lr"])  # of the last step

    def state(self, name: str) -> dict[str, Any]:
        """The names of a parameter's states, each with a tensor of its dtype or, where it has no elements, itself."""
        number, pieces = self._places[name]
        state = self._states[pieces[0].rank].get(number, {})
        of_eight_bits = {key.removesuffix(CODES): torch.empty(0) for key in state if key.endswith(CODES)}
        return {**{key: value for key, value in state.items() if not key.endswith((CODES, SCALES))}, **of_eight_bits}

    def copy(self, name: str, key: str, start: int, target: Tensor) -> None:
        """A parameter's elements of a state, or of its master, into `target` (n,): the n of them from `start` on."""
        number, pieces = self._places[name]
        copied = 0
        for piece in pieces:
            low, high = max(start, piece.start), min(start + len(target), piece.start + piece.size)
            if low < high:
                here = slice(piece.offset + low - piece.start, piece.offset + high - piece.start)
                target[low - start : high - start] = self._elements(piece.rank, number, key, here)
                copied += high - low
        if copied != len(target):
            raise CheckpointError(f"{self._folder} holds {copied} of {len(target)} elements of {name}")

    def _elements(self, rank: int, number: int, key: str, here: slice) -> Tensor:
        if key == MASTER:
            return self._masters[rank][number].detach().view(-1)[here]
        state = self._states[rank][number]
        if key + CODES in state:
            return decoded(state[key + CODES], state[key + SCALES], here, signed=key == "exp_avg")
        found: Tensor = state[key].view(-1)[here]
        return found


def fill(saved: SavedState, held: Places, rank: int, weights: Tensor, number: int, *, fused: bool) -> dict[str, Any]:
    """Fill this rank's flat partition (or, under ZeRO-0, parameter) with masters; its optimizer's state for it.

    `held`: where the partition's parameters lie; `number`: which of the rank's partitions it is; `fused`: whether its
    optimizer counts steps on the device.
    """

    def copy(key: str, target: Tensor) -> None:
        flat = target.detach().view(-1)
        for name, pieces in held.items():
            for piece in pieces:
                if piece.rank == rank:
                    saved.copy(name, key, piece.start, flat[piece.offset : piece.offset + piece.size])

    copy(MASTER, weights)
    state: dict[str, Any] = {}
    for key, value in saved.state(next(iter(held))).items():
        if not isinstance(value, Tensor):  # `number` of the PiecewiseAdamW
            state[key] = number
        elif value.dim() == 0:
            state[key] = value.to(weights.device if fused else "cpu", copy=True)
        else:
            # `empty(0)` stands for moments of 8 bits.
            device = weights.device if len(value) else torch.device("cpu")
            state[key] = torch.zeros_like(weights, dtype=value.dtype, device=device, requires_grad=False)
            copy(key, state[key])
    return state


def saved_layout(folder: Path, load: Callable[[Path], Any], whole: Sizes) -> Layout:
    """In which layout DeepSpeed wrote the files of `folder`.

    `whole`: parameters with their elements in the order of the optimizer's groups, as ZeRO-0 has them.
    """
    header = load(model_file(folder))
    zero = header["ds_config"]["zero_optimization"]
    shapes = header["param_shapes"]
    if shapes is None:
        partitions: tuple[tuple[tuple[str, int], ...], ...] = tuple(((name, size),) for name, size in whole.items())
    else:
        partitions = partitions_of(shapes)
    return Layout(int(zero["stage"]), int(header["dp_world_size"]), partitions, bool(zero.get("parameter_alignment")))


def partitions_of(shapes: Sequence[Mapping[str, torch.Size]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """What Layout says of partitions, from what DeepSpeed says: the shapes of the parameters in each."""
    return tuple(tuple((name, torch.Size(shape).numel()) for name, shape in one.items()) for one in shapes)


def model_file(folder: Path) -> Path:
    """The file that tells how the others are to be read. CheckpointError where it is missing."""
    return _first(folder, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def is_read_by(ranks: Collection[int], name: str) -> bool:
    """Whether any of these ranks reads a file of DeepSpeed's of this name where each holds what it wrote itself.

    All of them read the one that `model_file` gives.
    """
    found = re.fullmatch(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt", name)
    if found is None:
        return name == "mp_rank_00_model_states.pt"
    return int(found[1]) in ranks or (found[1], found[2]) == ("0", "model")


def _optimizer_file(folder: Path, rank: int) -> Path:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    return _first(folder, name, f"bf16_{name}")


def _first(folder: Path, *names: str) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{folder / names[0]} is missing")
    return found
