"""A copy of what a step left, in main memory, so that training can go on while it is written."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from pretrain.writing import Job

T = TypeVar("T")

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Snapshot:
    """Room for one copy, used again by the next: of memory that is touched for the first time each page costs a fault.

    with snapshot.taking():
        kept = snapshot.take(state)     # tensors that share a storage share it in the copy too
        more = snapshot.take(others)

    A copy holds until the next one is taken. torch.save writes it as it would have written the original: every storage
    is copied whole and once, all else is copied as `copy.deepcopy` does.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` holds most of what will be copied; from a GPU a copy is quick into pinned memory only."""
        self._device = device
        self._rooms: list[torch.Tensor] = []
        self._making_room = False
        self._free: dict[int, list[torch.Tensor]] = {}
        self._copied: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # by a storage's address in torch
        self._touching: Job[None] | None = None

    @property
    def held_bytes(self) -> int:
        return sum(room.numel() for room in self._rooms)

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """What is taken inside is not copied, but has its room from then on, which a thread touches: so the first copy
        holds nobody up longer than the others.
        """
        self._rooms, self._free, self._making_room = [], {}, True
        try:
            yield
        finally:
            self._copied.clear()
            self._making_room = False
        self._touching = Job(partial(self._touch, list(self._rooms)), in_thread=True)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """The copies made inside are whole at its end; the ones before are lost."""
        if self._touching is not None:
            self._touching.result()
            self._touching = None
        self._free = {}
        for room in self._rooms:
            self._free.setdefault(room.numel(), []).append(room)
        self._rooms = []
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._free.clear()  # rooms of a size that no copy had this time
            self._copied.clear()

    def take(self, value: T) -> T:
        """A copy of `value`, whose tensors stand in dicts, lists and tuples. RuntimeError where memory is short."""
        memo: dict[int, Any] = {}
        for tensor in _tensors(value):
            if id(tensor) not in memo:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._copied:
                    self._copied[storage._cdata] = storage, self._copy(storage)
                memo[id(tensor)] = _like(tensor, self._copied[storage._cdata][1])
                vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
        return copy.deepcopy(value, memo)

    def take_alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of one tensor that goes away before the next is taken, so that nothing can share its storage."""
        contiguous = tensor.detach().contiguous()
        room = self._room(contiguous.numel() * contiguous.element_size())
        kept = _like(contiguous, room, offset=0)
        return kept if self._making_room else kept.copy_(contiguous, non_blocking=True)

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        room = self._room(storage.nbytes())
        if self._making_room:
            return room
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return room.copy_(whole, non_blocking=True)

    def _room(self, size: int) -> torch.Tensor:
        """`size` bytes as uint8."""
        free = self._free.get(size)
        if free:
            room = free.pop()
        else:
            room = torch.empty(size, dtype=torch.uint8)
            if self._device.type == "cuda" and not self._making_room:
                self._touch([room])
        self._rooms.append(room)
        return room

    def _touch(self, rooms: Iterable[torch.Tensor]) -> None:
        for room in rooms:
            if self._device.type != "cuda":
                room.zero_()
            elif room.numel():
                _pin(room)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _like(tensor: torch.Tensor, room: torch.Tensor, offset: int | None = None) -> torch.Tensor:
    """A tensor as `tensor` is, on the storage of `room`."""
    start = tensor.storage_offset() if offset is None else offset
    made = torch.empty(0, dtype=tensor.dtype).set_(room.untyped_storage(), start, tensor.size(), tensor.stride())
    return made.requires_grad_(tensor.requires_grad)


def _pin(room: torch.Tensor) -> None:
    """Page-lock memory that is there, so exactly as much; torch's own pinned memory comes in powers of two."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostRegister(room.data_ptr(), room.numel(), PORTABLE)))
    weakref.finalize(room, cudart.cudaHostUnregister, room.data_ptr()).atexit = False
