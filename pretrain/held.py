"""What a process really holds: its live tensors now, and the most it ever held. Not RSS, which counts much else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function

_PHASE = "held phase: "
_SETTLED = "held settled: "
_COLLECTIVE = "held collective ended"
_PROCESS_GROUP = ("c10d::", "gloo:")


def live_storages(device: torch.device) -> dict[int, int]:
    """Address → bytes of the storages of all live tensors on devices of this kind.

    Seen are tensors that Python knows, and gradients of those. What only an unfinished autograd graph keeps is not.
    """
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        kind = type(found)
        if not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            continue  # no tensor, or a compiler's, which has no memory
        for tensor in (found, found.grad if found.is_leaf else None):
            if tensor is not None and tensor.device.type == device.type and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                try:
                    address = storage.data_ptr()
                except RuntimeError:  # of a plain tensor that a compiler left: torch has no memory to point to
                    continue
                storages[address] = storage.nbytes()
    return storages


def live_bytes(device: torch.device) -> int:
    """Bytes of those storages, each counted once."""
    return sum(live_storages(device).values())


class PeakTracker:
    """The most bytes that torch's allocator held at one time while the context lasted, and in each of its phases.

        with PeakTracker(device) as tracker:
            with tracker.phase("step"):
                ...
        tracker.peak_bytes, tracker.phases["step"]

    On a CPU torch's profiler tells of every allocation and release, also those within an operation. It knows only
    blocks that were allocated under it, so what is to be counted must be made inside the context. What a thread of the
    process group releases it does not tell: such a block counts until its address is given out again, or until
    `settle`; the process group's own blocks until `collective_ended`. On a GPU it is the caching allocator's own
    record, which counts whatever is allocated. Phases do not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.phases: dict[str, int] = {}
        self._profile: profile | None = None
        self.settled: list[int] = []  # bytes at each `settle`; on a CPU known behind the context
        self._addresses: list[set[int]] = []

    def __enter__(self) -> PeakTracker:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._profile = profile(use_device=None, profile_memory=True)
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is None:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
            return
        self._profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._read(self._profile)
        self._profile = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is held within, under a name; the most of all times where a name comes back."""
        if self.device.type != "cuda":
            with record_function(_PHASE + name):
                yield
            return
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        held = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(self.peak_bytes, held)
        self.phases[name] = max(self.phases.get(name, 0), held)

    def settle(self) -> None:
        """Say that no autograd graph lives, so that what is held is what Python knows; `settled` has its bytes, of
        blocks allocated in the context. Behind `gc.freeze()` quick: older tensors are not looked at.
        """
        gc.collect()
        storages = live_storages(self.device)
        if self.device.type == "cuda":
            self.settled.append(sum(storages.values()))
            return
        with record_function(f"{_SETTLED}{len(self._addresses)}"):
            self._addresses.append(set(storages))

    def collective_ended(self) -> None:
        """Say that the process group has let go of what it allocated for itself."""
        if self.device.type != "cuda":
            with record_function(_COLLECTIVE):
                pass

    def _read(self, profiled: profile) -> None:
        assert profiled.kineto_results is not None
        events = sorted(_all(profiled.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
        history = list(self._history(events))
        self.peak_bytes = max((held for _, held in history), default=0)
        for event in events:
            if event.name.startswith(_PHASE):
                name = event.name.removeprefix(_PHASE)
                before = [held for at, held in history if at < event.start_time_ns][-1:]
                within = [held for at, held in history if event.start_time_ns <= at <= event.end_time_ns]
                self.phases[name] = max([self.phases.get(name, 0), *before, *within])

    def _history(self, events: list[Any]) -> Iterator[tuple[int, int]]:
        """(time in ns, bytes held from then on)."""
        blocks: dict[int, int] = {}
        of_process_group: set[int] = set()
        held = 0
        for event in events:
            if event.name.startswith(_SETTLED):
                live = self._addresses[int(event.name.removeprefix(_SETTLED))]
                blocks = {address: size for address, size in blocks.items() if address in live}
                held = sum(blocks.values())
                self.settled.append(held)
            elif event.name == _COLLECTIVE:
                held -= sum(blocks.pop(address, 0) for address in of_process_group)
                of_process_group.clear()
            elif event.tag == _EventType.Allocation:
                address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
                held -= blocks.pop(address, 0)
                of_process_group.discard(address)
                if size > 0:
                    blocks[address] = size
                    held += size
                    if any(one.name.startswith(_PROCESS_GROUP) for one in _around(event)):
                        of_process_group.add(address)
            else:
                continue
            yield event.start_time_ns, held


def _around(event: Any) -> Iterator[Any]:
    """The operations that an event of a profiler's tree happened in."""
    while (event := event.parent) is not None:
        yield event


def _all(events: Any) -> Iterator[Any]:
    """The events of a profiler's tree, each and those within it."""
    for event in events:
        yield event
        yield from _all(event.children)
