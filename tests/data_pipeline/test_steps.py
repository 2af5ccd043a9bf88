"""Steps of a growing global batch, against counting them out."""

from __future__ import annotations

import random

import pytest

from data_pipeline.order import SampleOrder
from data_pipeline.steps import Steps
from tests.data_pipeline.test_loader import CountingStream, loader_of, one_source

RAMP = Steps(16, ((16, 4), (48, 8)))


def counted(steps: Steps, samples: int) -> list[list[int]]:
    """The samples of every step, one after the other, until `samples` are given out."""
    found: list[list[int]] = []
    at = 0
    while at < samples:
        size = next((size for until, size in steps.ramp if at < until), steps.global_batch_size)
        found.append(list(range(at, at + size)))
        at += size
    return found


def random_ramp(draw: random.Random) -> Steps:
    until, parts = 0, []
    for _ in range(draw.randrange(5)):
        size = draw.randint(1, 9)
        until += size * draw.randint(1, 4)
        parts.append((until, size))
    return Steps(draw.randint(1, 9), tuple(parts))


def test_by_hand() -> None:
    assert [RAMP.size(step) for step in range(10)] == [4, 4, 4, 4, 8, 8, 8, 8, 16, 16]
    assert [RAMP.samples_before(step) for step in (0, 3, 4, 5, 8, 9)] == [0, 12, 16, 24, 48, 64]
    assert [RAMP.step_of(sample) for sample in (0, 3, 15, 16, 47, 48, 63, 64)] == [0, 0, 3, 4, 7, 8, 8, 9]
    assert Steps(6).samples(7) == range(42, 48)


def test_every_step_is_what_counting_gives() -> None:
    draw = random.Random(3)
    for _ in range(60):
        steps = random_ramp(draw)
        for step, samples in enumerate(counted(steps, 150)):
            assert list(steps.samples(step)) == samples, steps
            assert (steps.size(step), steps.samples_before(step)) == (len(samples), samples[0])
            assert {steps.step_of(sample) for sample in samples} == {step}


def test_parts_and_words_are_equal_where_the_steps_are() -> None:
    assert RAMP.told() == "4 until sample 16, then 8 until sample 48, then 16"
    assert RAMP.told(48) == "4 until sample 16, then 8"
    assert RAMP.parts(24) == [(16, 4), (24, 8)]
    assert Steps(8, ((16, 4), (24, 4))).parts(64) == [(24, 4), (64, 8)]
    assert RAMP.told(16) == Steps(99, ((4, 4), (16, 4), (40, 12))).told(16) == Steps(4).told() == "4"
    draw, equal = random.Random(4), 0
    for _ in range(400):
        a, b = random_ramp(draw), random_ramp(draw)
        for samples in range(1, 30):
            if samples == a.samples_before(a.step_of(samples)) == b.samples_before(b.step_of(samples)):
                same = counted(a, samples) == counted(b, samples)
                assert (a.parts(samples) == b.parts(samples)) == same, (a, b, samples)
                assert (a.told(samples) == b.told(samples)) == same
                equal += same
    assert equal > 100


@pytest.mark.parametrize(
    "ramp, says",
    [
        (((16, 4), (16, 8)), "until_samples must increase, 16 follows 16"),
        (((16, 4), (50, 8)), "the 34 samples from 16 until 50 are no whole steps of 8: set until_samples to 48 or 56"),
        (((3, 4),), "set until_samples to 4"),
    ],
)
def test_parts_are_whole_steps(ramp: tuple[tuple[int, int], ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Steps(8, ramp)


def test_numbers_below_0_do_not_exist() -> None:
    for ask in (RAMP.samples, RAMP.samples_before, RAMP.size, RAMP.step_of):
        with pytest.raises(ValueError, match="-1 does not exist"):
            ask(-1)


# ---------------------------------------------------------------- the loader along a ramp


def read(order: SampleOrder, streams: dict[str, CountingStream], ranks: int, first_step: int) -> list[list[int]]:
    """The samples of each step up to step 11 as the loaders of all ranks give them out, and where they say they are."""
    found: list[list[int]] = [[] for _ in range(first_step, 11)]
    for rank in range(ranks):
        first = RAMP.samples_before(first_step)
        with loader_of(order, streams, rank=rank, ranks=ranks, first=first, steps=RAMP) as loader:
            for number, step in enumerate(range(first_step, 11)):
                for _ in range(RAMP.size(step) // (2 * ranks)):
                    assert loader.consumed_samples == RAMP.samples_before(step)
                    found[number] += next(loader).samples.tolist()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_loaders_give_out_a_ramps_samples(ranks: int) -> None:
    """4, 8, 16 sequences a step in micro-batches of 2: the arithmetic ones, whoever reads them and from any step on."""
    order, streams = one_source(100)
    expected = counted(RAMP, RAMP.samples_before(11))
    for first_step in (0, 2, 4, 5, 8, 9):
        steps = read(order, streams, ranks, first_step)
        assert [sorted(samples) for samples in steps] == expected[first_step:]
