"""Files from rank to rank through a process group, a bounded piece at a time.

All ranks walk through the same list in the same order, and each takes part in what it sends or receives: so no two wait
for each other. What fails on a disk does not end the walk (the other side would wait for ever): it is told at its end,
on all ranks.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.confined import strays
from pretrain.runtime import Ranks

CHUNK_BYTES = 64 * 2**20  # held by each side
# So much is carried between two meetings of all ranks: those that have no part in it wait there, and no longer.
MEET_BYTES = 2**30
# How long a rank waits for another where the run says nothing else; of a process that ended it hears at once.
PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Carried:
    """One file on its way. `name` is relative to a folder of the sender's and one of the receiver's."""

    name: str
    bytes: int
    sha256: str
    sender: int
    receiver: int


class Courier:
    """Carries files between ranks. Its methods are called on all ranks together."""

    def __init__(self, ranks: Ranks, patience: timedelta = PATIENCE) -> None:
        """A group of its own, of gloo: GPUs' groups carry no main memory, and others' messages stay out of it.

        A rank that waits longer than `patience` for a piece, or for one file and MEET_BYTES of others to pass, raises
        what a collective does that timed out: a RuntimeError.
        """
        self._ranks = ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=patience)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, by this group: whatever the ranks do in others meanwhile."""
        values: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def carry(self, files: Sequence[Carried], source: Path, target: Path) -> None:
        """Bring files from the senders' `source` to the receivers' `target`, durably, with their recorded hashes.

        `files` is equal on all ranks. OSError, on all ranks, where one could not be read or written.
        """
        buffer = bytearray(min(CHUNK_BYTES, max((one.bytes for one in files), default=0)))
        faults: list[str | None] = []
        carried = 0
        for one in files:
            if self._ranks.rank == one.sender:
                faults.append(self._send(one, source, buffer))
            if self._ranks.rank == one.receiver:
                faults.append(self._receive(one, target, buffer))
            carried += one.bytes
            if carried >= MEET_BYTES:
                self.gather(None)
                carried = 0
        for rank, fault in enumerate(self.gather(next(filter(None, faults), None))):
            if fault is not None:
                raise OSError(f"on rank {rank}: {fault}")

    def _send(self, one: Carried, folder: Path, buffer: bytearray) -> str | None:
        fault: str | None = None
        path = folder / one.name
        with ExitStack() as stack:
            try:
                _refuse_stray(one.name, folder)
                file = stack.enter_context(path.open("rb", buffering=0))
            except OSError as error:
                fault = _told(path, error)
            for piece, message in _pieces(one.bytes, buffer):
                try:
                    if fault is None:
                        _fill(piece, file)
                except OSError as error:
                    fault = _told(path, error)
                dist.send(message, one.receiver, group=self._group)
        return fault

    def _receive(self, one: Carried, folder: Path, buffer: bytearray) -> str | None:
        fault: str | None = None
        path, digest = folder / one.name, hashlib.sha256()
        with ExitStack() as stack:
            try:
                _refuse_stray(one.name, folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("wb", buffering=0))
            except OSError as error:
                fault = _told(path, error)
            for piece, message in _pieces(one.bytes, buffer):
                dist.recv(message, one.sender, group=self._group)
                digest.update(piece)
                try:
                    while fault is None and piece:
                        piece = piece[file.write(piece) :]
                except OSError as error:
                    fault = _told(path, error)
            try:
                if fault is None:
                    os.fsync(file.fileno())
            except OSError as error:
                fault = _told(path, error)
        if fault is None and digest.hexdigest() != one.sha256:
            fault = f"{path} arrived from rank {one.sender} with another sha256 than the recorded one"
        return fault


def _pieces(size: int, buffer: bytearray) -> Iterator[tuple[memoryview, torch.Tensor]]:
    """`size` bytes a buffer at a time: each piece's memory, and the same as a message."""
    for begin in range(0, size, max(1, len(buffer))):
        length = min(len(buffer), size - begin)
        yield memoryview(buffer)[:length], torch.frombuffer(buffer, dtype=torch.uint8, count=length)


def _fill(piece: memoryview, file: io.FileIO) -> None:
    while piece:
        count = file.readinto(piece)
        if not count:
            raise OSError("it is shorter than was recorded")
        piece = piece[count:]


def _refuse_stray(name: str, folder: Path) -> None:
    """OSError where a name leads out of a folder on this disk, whatever it does on the other side's."""
    if strays(name, folder):
        raise OSError(f"{name!r} is outside its folder or behind a link: it is not carried")


def _told(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"
