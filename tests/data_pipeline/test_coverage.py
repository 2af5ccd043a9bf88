"""Counting every window of an epoch: right plans pass with the right numbers, each wrong one is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline import coverage
from data_pipeline.coverage import Coverage, CoverageError, prove_coverage, samples_of_an_epoch
from data_pipeline.order import Addresses, SampleOrder, Stage

STAGES = [Stage(0, {"en": 3, "zh": 1}), Stage(50, {"zh": 5, "code": 1}), Stage(333, {"en": 1, "code": 0.01})]


def order_of(stages: list[Stage] = STAGES) -> SampleOrder:
    return SampleOrder(seed=3, seq_len=16, tokens={"en": 1600, "zh": 500, "code": 165}, stages=stages)


@pytest.fixture(params=[1, 7, 10_000], ids=lambda block: f"blocks of {block}")
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_SAMPLES_AT_ONCE", request.param)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.usefixtures("block")
def test_what_ranks_read_is_what_the_order_says(micro_batch_size: int) -> None:
    order, samples = order_of(), 700
    reads = Counter(order.locate(sample).source for sample in range(samples))
    assert min(reads.values()) > 0
    found = prove_coverage(order, samples, micro_batch_size=micro_batch_size, ranks=range(1, 17))
    assert [(one.ranks, one.source) for one in found] == [
        (ranks, name) for ranks in range(1, 17) for name in ("code", "en", "zh")
    ]
    for one in found:
        assert one.windows == order.windows[one.source]
        assert one.epochs * one.windows + one.windows_begun == reads[one.source]
        assert one.windows_begun < one.windows


def test_an_epoch_of_every_source() -> None:
    order = order_of([])
    assert samples_of_an_epoch(order) == sum(order.windows.values())
    uneven = order_of([Stage(0, {"en": 1, "zh": 1})])
    samples = samples_of_an_epoch(uneven)
    assert (uneven.counts(samples)["en"], uneven.counts(samples - 1)["en"]) == (99, 98)
    assert {(one.ranks, one.source): one.epochs for one in prove_coverage(uneven, samples, micro_batch_size=4)} == {
        (ranks, name): epochs for ranks in (1, 2, 3, 4) for name, epochs in (("en", 1), ("zh", 3), ("code", 0))
    }


def test_the_hearer_hears_of_every_sample() -> None:
    heard: list[int] = []
    prove_coverage(order_of(), 100, micro_batch_size=4, on_samples=heard.append)
    assert sum(heard) == 4 * 100


class Faulty:
    """An order with one sample that reads another window, epoch or source than it should."""

    def __init__(self, sample: int, **change: int) -> None:
        self._order, self._sample, self._change = order_of([]), sample, change
        self.windows = self._order.windows

    def locate_many(self, samples: np.ndarray) -> Addresses:
        found = self._order.locate_many(samples)
        for field, offset in self._change.items():
            row = getattr(found, field).copy()
            row[samples == self._sample] += offset
            found = replace(found, **{field: row})
        return found


@pytest.mark.parametrize(
    "change", [{"windows": 1}, {"epochs": 1}, {"windows": -1}, {"epochs": 2}], ids=lambda change: str(change)
)
def test_one_wrong_window_is_found_in_a_whole_epoch_and_in_one_begun(change: dict[str, int]) -> None:
    right = order_of([])
    total = sum(right.windows.values())
    inner = next(
        sample for sample in range(20, total)
        if right.locate(sample).source == "en" and 0 < right.locate(sample).window < 98
    )  # fmt: skip
    for samples in (total, 2 * total + 5):
        with pytest.raises(CoverageError, match="source en"):
            prove_coverage(Faulty(inner, **change), samples, micro_batch_size=2, ranks=(2,))  # type: ignore[arg-type]
    prove_coverage(Faulty(inner), total, micro_batch_size=2, ranks=(2,))  # type: ignore[arg-type]
    taken = {right.locate(sample).window for sample in range(inner) if right.locate(sample).source == "en"}
    window = right.locate(inner).window
    twice = min(taken, key=lambda one: abs(one - window)) - window
    with pytest.raises(CoverageError, match=r"epoch 0: .* windows were read and only"):
        prove_coverage(
            Faulty(inner, windows=twice),
            inner + 5,
            micro_batch_size=1,
            ranks=(1,),  # type: ignore[arg-type]
        )


def test_a_slice_that_two_ranks_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = coverage.samples_of_micro_steps
    monkeypatch.setattr(
        coverage, "samples_of_micro_steps", lambda steps, first, rank, *rest: real(steps, first, max(rank, 1), *rest)
    )
    with pytest.raises(CoverageError, match="3 ranks, source"):
        prove_coverage(order_of([]), 141, micro_batch_size=1, ranks=(3,))


def test_a_bit_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^26 windows of an epoch begun take 8 MB, not one place of 8 bytes each."""
    order = SampleOrder(seed=1, seq_len=1, tokens={"web": 2**26 + 1})
    sizes: list[int] = []
    zeros = np.zeros
    monkeypatch.setattr(coverage.np, "zeros", lambda *shape: sizes.append(zeros(*shape).nbytes) or zeros(*shape))
    assert prove_coverage(order, 1000, micro_batch_size=8, ranks=(4,)) == [Coverage(4, "web", 2**26, 0, 1000)]
    assert sizes == [2**23]
