"""What is held, on a CPU: live storages once each, and the allocator's peak with what lives inside operations."""

from __future__ import annotations

import gc

import pytest
import torch

from pretrain.held import PeakTracker, live_bytes, live_storages

CPU = torch.device("cpu")
MEGABYTE = 2**20


def numbers(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * MEGABYTE // 4)


def test_a_storage_counts_once_and_gradients_count() -> None:
    gc.collect()
    before = live_bytes(CPU)
    weight = numbers(4).requires_grad_()
    views = [weight.detach()[:100], weight.view(2, -1)]
    assert live_bytes(CPU) - before == 4 * MEGABYTE
    weight.sum().backward()
    views.clear()
    gc.collect()
    assert live_bytes(CPU) - before == 8 * MEGABYTE, "the gradient is one that Python has not met"
    assert live_storages(CPU)[weight.data_ptr()] == 4 * MEGABYTE
    weight.grad = None
    assert live_bytes(CPU) - before == 4 * MEGABYTE


def test_a_compilers_tensors_have_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = live_bytes(CPU)
    with FakeTensorMode():
        imagined = numbers(4)
    assert imagined.device.type == "cpu"
    assert live_bytes(CPU) == before


def test_a_plain_tensor_without_memory_counts_nothing() -> None:
    before = live_bytes(CPU)
    wrapped = torch.ones(4)
    functional = torch._to_functional_tensor(wrapped)
    with pytest.raises(RuntimeError, match="storage"):
        functional.untyped_storage().data_ptr()
    assert live_bytes(CPU) == before + wrapped.nbytes


def test_the_peak_has_temporaries_and_phases() -> None:
    with PeakTracker(CPU) as tracker:
        kept = numbers(4)
        with tracker.phase("sum"):
            (kept + 1).sum()  # 4 more for a moment
        with tracker.phase("rest"):
            kept[0] = 1
        with tracker.phase("twice"):
            (kept + 1, kept + 2)
    assert tracker.peak_bytes // MEGABYTE == 12
    assert {name: size // MEGABYTE for name, size in tracker.phases.items()} == {"sum": 8, "rest": 4, "twice": 12}


def test_settling_tells_what_of_the_context_still_lives() -> None:
    older = numbers(2)
    with PeakTracker(CPU) as tracker:
        kept = numbers(4)
        tracker.settle()
        del kept
        tracker.settle()
    assert [size // MEGABYTE for size in tracker.settled] == [4, 0]
    assert older.numel()
