"""A run's past: steps and orders behind one another, against counting them out sample by sample."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from data_pipeline.history import Change, History, Mixture, Read
from data_pipeline.order import Begin, Permutation, SampleOrder, Stage, balanced_schedule, epoch_key, integer_weights
from data_pipeline.steps import Steps

SEED = 5
TEXTS = {"en": 900, "zh": 410, "code": 257, "other en": 620}  # what sources may hold: a text's tokens


def plain_order(sources: dict[str, str], seq_len: int, mixture: Mixture) -> SampleOrder:
    """The order of a run without a past: sources by name, each with the text it holds."""
    tokens = {name: TEXTS[text] for name, text in sources.items()}
    return SampleOrder(seed=SEED, seq_len=seq_len, tokens=tokens, stages=History().stages(mixture, seq_len))


def changed_at(step: int, sample: int, *, parts: Any = None, read: Read | None = None) -> Change:
    return Change(step, sample, 0, [{"name": "it", "from": 1, "to": 2}], parts, read)


def read_from(order: SampleOrder, sources: dict[str, str]) -> Read:
    return Read({**order.describe(), "content_sha256": str(sources)}, "data/x", dict(sources))


# ---------------------------------------------------------------- steps


def test_batches_changed_at_any_step_read_every_sample_once() -> None:
    """Ramps and changes together, several of each: the steps are those that counting gives."""
    draw, changes_made = random.Random(1), 0
    for _ in range(200):
        history, step, sample, expected = History(), 0, 0, list[range]()
        steps = Steps(draw.randint(1, 9))
        for _ in range(draw.randint(1, 5)):
            for _ in range(draw.randint(1, 6)):
                expected.append(range(sample, sample + steps.size(step)))
                step, sample = step + 1, expected[-1].stop
            size, until, ramp = draw.randint(1, 9), sample, []
            for _ in range(draw.randrange(3)):
                part = draw.randint(1, 9)
                until += part * draw.randint(1, 3)
                ramp.append((until, part))
            past = [(sample // 2, sample // 2)] if draw.random() < 0.3 and sample > 1 else []  # is not looked at
            recipe = Steps(size, (*past, (sample, sample - sum(end for end, _ in past)), *ramp) if past or ramp else ())
            change = changed_at(step, sample, parts=tuple(steps.parts(sample)))
            history = History.of(json.loads(json.dumps(History((*history.changes, change)).to_json())))
            steps = history.steps(recipe)
            ends = iter([*ramp, (10**9, size)])
            end, part = next(ends)
            upcoming, at = [], sample
            while len(upcoming) < 8:
                while at >= end:
                    end, part = next(ends)
                upcoming.append(range(at, at + part))
                at += part
            assert [steps.samples(number) for number in range(step + 8)] == [*expected, *upcoming]
            changes_made += 1
    assert changes_made > 300


def test_a_ramp_that_is_not_whole_behind_a_change_is_told() -> None:
    history = History((changed_at(3, 12, parts=((12, 4),)),))
    assert history.steps(Steps(8)) == Steps(8, ((12, 4),))
    assert history.steps(Steps(8, ((28, 2),))) == Steps(8, ((12, 4), (28, 2)))
    with pytest.raises(ValueError, match="the 12 samples from 12 until 24 are no whole steps of 8: set until_samples"):
        history.steps(Steps(16, ((24, 8),)))
    assert History((*history.changes, changed_at(9, 60))).steps(Steps(8)) == Steps(8, ((12, 4),))


# ---------------------------------------------------------------- orders


def test_orders_behind_one_another_are_what_counting_gives() -> None:
    """Other sources, texts, lengths and mixtures, several times and back, a sample at a time.

    Each source's windows come in the order of its epochs, counted on wherever they are the very same ones; each sample
    is mixed by the stage in which its first token lies.
    """
    draw, went_on, began = random.Random(2), 0, 0
    for _ in range(60):
        history, sample, token = History(), 0, 0
        given: Counter[tuple[str, str, int]] = Counter()
        for _ in range(4):
            names = draw.sample(["a", "b", "c"], draw.randint(1, 3))
            sources = {name: draw.choice(["en", "zh", "code", "other en"][:3]) for name in sorted(names)}
            seq_len = draw.choice([8, 8, 12, 20])
            mixture: list[tuple[int, dict[str, float]]] = []
            for start in sorted(draw.sample(range(1, 60), draw.randint(0, 3))):
                weights = {name: float(draw.randint(0, 3)) for name in names}
                mixture.append((start * seq_len if mixture else 0, {**weights, names[0]: 1.0}))
            order = history.order(plain_order(sources, seq_len, mixture), mixture, sources)
            assert SampleOrder.of(json.loads(json.dumps(order.describe()))).describe() == order.describe()
            length, schedule, place, stage_now = draw.randint(1, 50), [], 0, -1
            first, located = sample, order.locate_many(range(sample, sample + length))
            for number in range(length):
                begun = max((n for n, (start, _) in enumerate(mixture) if start <= token), default=0)
                if begun != stage_now:
                    slots = integer_weights(mixture[begun][1] if mixture else order.windows)
                    schedule, place, stage_now = (
                        [list(slots)[n] for n in balanced_schedule([*slots.values()])],
                        0,
                        begun,
                    )
                name = schedule[place % len(schedule)]
                key = name, sources[name], seq_len
                epoch, position = divmod(given[key], order.windows[name])
                address = order.locate(sample)
                window = Permutation(order.windows[name], epoch_key(SEED, name, epoch))(position)
                assert (address.source, address.epoch, address.window) == (name, epoch, window)
                assert order.find(address) == sample
                at = located.names[located.sources[number]], located.epochs[number], located.windows[number]
                assert at == (name, epoch, window)
                went_on += order.begin is not None and order.begin.given[name] > 0
                began += order.begin is not None and order.begin.given[name] == 0
                given[key] += 1
                sample, token, place = sample + 1, token + seq_len, place + 1
            counted = {name: given[name, sources[name], seq_len] for name in sources}
            assert order.counts(sample) == counted
            assert history.position()[0] == first
            other = (changed_at(sample - 1, sample - 1, parts=((sample - 1, 1),)),) if length > 1 else ()  # of no order
            change = changed_at(sample, sample, read=read_from(order, sources))
            history = History.of(json.loads(json.dumps(History((*history.changes, *other, change)).to_json())))
            assert history.position() == (sample, token)
    assert min(went_on, began) > 500


def test_what_was_read_before_belongs_to_no_sample_of_the_next_order() -> None:
    order = plain_order({"a": "en"}, 8, [])
    later = order.behind(Begin(40, {"a": 40}), [])
    windows = {order.locate(sample).window for sample in range(40)}
    assert windows.isdisjoint(later.locate(sample).window for sample in range(40, order.windows["a"]))
    assert [later.find(order.locate(sample)) for sample in (0, 39, 40, 50)] == [None, None, 40, 50]
    for ask in (later.locate, later.counts):
        with pytest.raises(ValueError, match="39"):
            ask(39)
    with pytest.raises(ValueError, match="the first is 40"):
        later.locate_many([41, 39])
    with pytest.raises(ValueError, match="it must begin at 40"):
        order.behind(Begin(40, {"a": 40}), [Stage(0, {"a": 1.0})])


def test_rows_and_windows_are_not_the_same() -> None:
    """Windows masked or not are; rows of a plan are counted on among themselves."""
    read = read_from(plain_order({"a": "en", "b": "zh"}, 8, []), {"a": "en", "b": "zh"})
    history = History((changed_at(10, 10, read=read),))
    for packing, expected in (("concat", True), ("concat_masked", True), ("best_fit", False)):
        begin = history.begin({"a": "en", "b": "other", "c": "zh"}, 8, packing)
        assert begin is not None
        assert (begin.sample, begin.given["a"] > 0, begin.given["b"], begin.given["c"]) == (10, expected, 0, 0)
    longer = history.begin({"a": "en"}, 16, "concat")
    assert longer == Begin(10, {"a": 0})


@pytest.mark.parametrize(
    "tables",
    [3, [3], [{}], [{"global_step": 1, "consumed_samples": -1, "tokens_seen": 0, "changed": [], "before": {}}],
     [{"global_step": 1, "consumed_samples": 8, "tokens_seen": 0, "changed": [], "before": {"batch_ramp": [[8]]}}],
     [{"global_step": 1, "consumed_samples": 8, "tokens_seen": 0, "changed": [], "before": {"order": 3}}],
     [{"global_step": 1, "consumed_samples": 8, "tokens_seen": 0, "changed": [], "before": {}}] * 2],
)  # fmt: skip
def test_a_damaged_past_is_an_error(tables: Any) -> None:
    with pytest.raises(ValueError, match=r"damaged|changes are"):
        History.of(tables)
    damaged = plain_order({"a": "en"}, 8, []).describe()
    for changes in ({"order_version": 2}, {"packing": "tight"}, {"stages": [{"first_sample": 0, "slots": {"a": 0.5}}]}):
        with pytest.raises(ValueError, match=r"not known|no slots"):
            SampleOrder.of({**damaged, **changes})
