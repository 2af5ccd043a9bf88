"""The order of data: permutations that are right and look random, mixtures that keep their shares, nothing twice."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from data_pipeline.order import (
    _ROUNDS,
    _SMALLEST_DOMAIN_BITS,
    MAX_PERIOD,
    ORDER_VERSION,
    Address,
    Permutation,
    SampleOrder,
    Stage,
    balanced_schedule,
    difference,
    epoch_key,
    integer_weights,
)

LARGE = [2**20 + 1, 2**32, 2**33, 2**40, 2**40 + 12345, 2**62]

# ---------------------------------------------------------------- permutation: exact


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_every_index_has_its_own_value_and_the_inverse_leads_back(key: int) -> None:
    for n in [*range(1, 40), 63, 64, 65, 127, 128, 129, 1000]:
        permutation = Permutation(n, key)
        values = [permutation(index) for index in range(n)]
        assert sorted(values) == list(range(n))
        assert [permutation.inverse(value) for value in values] == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 64, 1000, *LARGE])
def test_arrays_give_what_single_calls_give(n: int) -> None:
    permutation = Permutation(n, 77)
    indices = np.random.default_rng(n).integers(0, n, size=(3, 50))
    assert permutation.many(indices).tolist() == [[permutation(index) for index in row] for row in indices.tolist()]
    assert permutation.many([]).tolist() == []


@pytest.mark.parametrize("n", LARGE)
def test_large_domains_invert(n: int) -> None:
    permutation = Permutation(n, 5)
    for index in [0, 1, 2, n // 2, n - 2, n - 1, *np.random.default_rng(1).integers(0, n, 200).tolist()]:
        value = permutation(index)
        assert 0 <= value < n
        assert permutation.inverse(value) == index


@pytest.mark.parametrize("index", [-1, 7])
def test_indices_outside_are_refused(index: int) -> None:
    permutation = Permutation(7, 1)
    for call in (permutation, permutation.inverse, lambda value: permutation.many([0, value])):
        with pytest.raises(ValueError, match=r"0 to 6"):
            call(index)
    for n, key in ((0, 1), (2**62 + 1, 1), (5, -1), (5, 2**64)):
        with pytest.raises(ValueError, match=r"permutation|64-bit"):
            Permutation(n, key)


def test_the_order_of_version_1_never_changes() -> None:
    """If this fails, the order has changed: checkpoints written before would resume on other data. Never edit."""
    assert ORDER_VERSION == 1
    assert [Permutation(5, 2026)(index) for index in range(5)] == [2, 4, 0, 1, 3]
    assert [Permutation(20, 2026)(index) for index in range(20)] == [
        15, 4, 16, 1, 12, 0, 13, 19, 5, 2, 18, 7, 3, 9, 17, 14, 8, 10, 11, 6,
    ]  # fmt: skip
    places = (0, 1, 2, 2**32, 2**33 - 1)
    assert [Permutation(2**33, 2026)(index) for index in places] == [
        2361914525, 5972339053, 4949766634, 6042823081, 8144191321,
    ]  # fmt: skip
    assert [Permutation(2**33 + 5, 2026)(index) for index in places] == [
        2550900923, 1353132277, 3407529108, 1407140262, 3886904274,
    ]  # fmt: skip
    assert epoch_key(1, "en", 0) == 11672385544750182391
    assert epoch_key(2**64 - 1, "中文", 7) == 13753211424180908834
    assert balanced_schedule([5, 3, 2]) == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert balanced_schedule([1, 2, 5]) == [2, 1, 2, 2, 2, 0, 1, 2]
    assert balanced_schedule([7, 2, 1]) == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
    stages = [Stage(0, {"en": 0.5, "zh": 0.3, "code": 0.2}), Stage(25, {"en": 1, "zh": 3})]
    order = SampleOrder(seed=7, seq_len=16, tokens={"en": 1000, "zh": 500, "code": 165}, stages=stages)
    found = [order.locate(sample) for sample in range(40)]
    assert " ".join(f"{a.source[0]}{a.window}" for a in found) == (
        "e32 z0 e46 c6 e12 z22 e54 c9 e50 z6 e33 z15 e17 c3 e24 z9 e27 c1 e31 z13 e58 z4 e16 c4 e11 "
        "z30 z24 e34 z14 z29 z8 e9 z12 z10 z26 e36 z1 z27 z5 e44"
    )


# ---------------------------------------------------------------- permutation: statistics


def test_many_samples_at_once_stand_where_each_alone_stands() -> None:
    stages = [Stage(0, {"a": 0.3, "b": 0.7}), Stage(777, {"tiny": 1, "b": 2}), Stage(5000, {"a": 1, "b": 1, "tiny": 1})]
    order = SampleOrder(seed=3, seq_len=8, tokens={"a": 1000, "b": 50_000, "none": 0, "tiny": 25}, stages=stages)
    samples = np.random.default_rng(0).integers(0, 40_000, (50, 80))
    found = order.locate_many(samples)
    triples = zip(found.sources.tolist(), found.epochs.tolist(), found.windows.tolist(), strict=True)
    one_by_one = [order.locate(sample) for sample in samples.reshape(-1).tolist()]
    assert [Address(found.names[source], epoch, window) for source, epoch, window in triples] == one_by_one
    assert order.locate_many([]).windows.size == 0
    with pytest.raises(ValueError, match="sample -1 does not exist"):
        order.locate_many([3, -1])


def _splitmix64(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    z = seeds + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permutations_under(keys: np.ndarray, n: int) -> np.ndarray:
    """(keys, n): the permutation of 0..n-1 under each key, written a second time, for many keys at once."""
    bits = np.uint64(max((n - 1).bit_length(), _SMALLEST_DOMAIN_BITS))
    low_bits, one = bits // np.uint64(2), np.uint64(1)
    low_mask, high_mask = (one << low_bits) - one, (one << (bits - low_bits)) - one
    round_keys = [_splitmix64(keys, np.full(len(keys), number)) for number in range(1, _ROUNDS + 2)]
    values = np.tile(np.arange(n, dtype=np.uint64), len(keys))
    of_key = np.repeat(np.arange(len(keys)), n)
    walking = np.arange(len(values))
    while walking.size:
        low, high = values[walking] & low_mask, values[walking] >> low_bits
        for number in range(_ROUNDS):
            key = round_keys[number][of_key[walking]]
            if number % 2 == 0:
                high ^= _splitmix64(key, low) & high_mask
            else:
                low ^= _splitmix64(key, high) & low_mask
        values[walking] = (high << low_bits) | low
        walking = walking[values[walking] >= n]
    if n > 1:
        values = np.where(values < 2, values ^ (round_keys[-1][of_key] & one), values)
    return values.astype(np.int64).reshape(len(keys), n)


def chi_square_z(counts: np.ndarray, degrees: int) -> float:
    """How many standard deviations the chi-square of counts with equal expectation is from its mean."""
    expected = counts.sum() / counts.size
    return (float(((counts - expected) ** 2 / expected).sum()) - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 24, 64, 100])
def test_a_second_implementation_agrees(n: int) -> None:
    keys = np.random.default_rng(3).integers(0, 2**64, 50, dtype=np.uint64)
    expected = [Permutation(n, key).many(np.arange(n)).tolist() for key in keys.tolist()]
    assert permutations_under(keys, n).tolist() == expected


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_few_elements_are_equally_frequent(n: int) -> None:
    keys = np.random.default_rng(n).integers(0, 2**64, 60_000, dtype=np.uint64)
    codes = permutations_under(keys, n) @ n ** np.arange(n)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == math.factorial(n)
    assert abs(chi_square_z(counts, len(counts) - 1)) < 4


@pytest.mark.parametrize("n", [16, 33, 64])
def test_two_neighbours_go_to_every_pair_of_places_equally_often(n: int) -> None:
    keys = np.random.default_rng(n).integers(0, 2**64, 40_000, dtype=np.uint64)
    values = permutations_under(keys, n)
    for left, right in ((0, 1), (n // 2 - 1, n // 2)):
        counts = np.bincount(values[:, left] * n + values[:, right], minlength=n * n).reshape(n, n)
        assert not np.diag(counts).any()
        assert abs(chi_square_z(counts[~np.eye(n, dtype=bool)], n * (n - 1) - 1)) < 4


@pytest.mark.parametrize("n", [33, 64])
def test_odd_and_even_permutations_are_equally_frequent(n: int) -> None:
    """A Feistel network alone is always even: at n = 64 every permutation would be."""
    odd = 0
    for row in permutations_under(np.arange(2000, dtype=np.uint64), n).tolist():
        cycles, seen = 0, [False] * n
        for start in range(n):
            cycles += not seen[start]
            while not seen[start]:
                seen[start] = True
                start = row[start]
        odd += (n - cycles) % 2
    assert abs(odd - 1000) < 4 * math.sqrt(500)


def randomness(values: np.ndarray) -> dict[str, float]:
    """Deviations, in standard deviations, of one permutation from what a random one gives on average."""
    n = len(values)
    index = np.arange(n)
    blocks = 16
    table = np.bincount(index * blocks // n * blocks + values * blocks // n, minlength=blocks * blocks)
    gaps = (values[1:] - values[:-1]) % n
    centred = values - (n - 1) / 2
    result = {
        "blocks": chi_square_z(table, (blocks - 1) ** 2),
        "gaps": chi_square_z(np.bincount(gaps * 64 // n, minlength=64), 63),
        "parity": (np.count_nonzero((index ^ values) & 1) - n / 2) / math.sqrt(n / 4),
        "steps of parity": (np.count_nonzero(gaps & 1) - n / 2) / math.sqrt(n / 4) / 2,
        "fixed points": np.count_nonzero(values == index) - 1.0,
    }
    for lag in (1, 2, 7):
        products = (centred[:-lag] * centred[lag:]).mean() / (centred**2).mean()
        result[f"correlation {lag}"] = float(products) * math.sqrt(n)
    return result


@pytest.mark.parametrize("n", [1024, 5000, 65_537, 2**20])
def test_one_permutation_looks_like_one_of_numpy(n: int) -> None:
    rng = np.random.default_rng(n)
    ours = [randomness(Permutation(n, key).many(np.arange(n))) for key in range(6)]
    numpys = [randomness(rng.permutation(n)) for _ in range(6)]
    for name in ours[0]:
        for results in (ours, numpys):  # numpy's own pass the same limits: the limits are not what is wrong
            deviations = [result[name] for result in results]
            assert max(map(abs, deviations)) < 5, name
            assert abs(sum(deviations)) / math.sqrt(len(deviations)) < 4, name


def test_seeds_sources_and_epochs_give_unrelated_permutations() -> None:
    n = 20_000
    keys = [(1, "en", 2), (2, "en", 1), (3, "en", 0), (1, "en", 3), (1, "zh", 2), (1, "e", 2), (1, "n", 2)]
    orders = [Permutation(n, epoch_key(*key)).many(np.arange(n)) for key in keys]
    for left, right in itertools.combinations(orders, 2):
        assert np.count_nonzero(left == right) < 8
        assert abs(chi_square_z(np.bincount((left - right) % n * 64 // n, minlength=64), 63)) < 5
        assert abs(np.corrcoef(left, right)[0, 1]) * math.sqrt(n) < 5


def test_no_two_of_many_seeds_sources_and_epochs_share_a_key() -> None:
    names = ["", "a", "b", "ab", "a\0", "\0a", "中", "1", "12"]
    numbers = [*range(30), 255, 256, 2**32, 2**64 - 1]
    keys = {epoch_key(seed, name, epoch) for seed in numbers for name in names for epoch in numbers}
    assert len(keys) == len(names) * len(numbers) ** 2


# ---------------------------------------------------------------- mixture


@pytest.mark.parametrize(
    "weights, expected",
    [
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 1, "b": 1, "c": 1}),
        ({"a": 0.001, "b": 0.999}, {"a": 1, "b": 999}),
        ({"a": 1 / 6, "b": 1 / 3, "c": 1 / 2}, {"a": 1, "b": 2, "c": 3}),
        ({"b": 0.1, "a": 0.2, "z": 0}, {"a": 2, "b": 1}),
        ({"a": 5}, {"a": 1}),
        ({"a": 30_000, "b": 35_536}, {"a": 1875, "b": 2221}),
        ({"a": 1, "b": 65_535}, {"a": 1, "b": 65_535}),
        ({"a": np.float64(0.7), "b": 0.3}, {"a": 7, "b": 3}),
        ({"a": 1e-300, "b": 3e-300}, {"a": 1, "b": 3}),
        ({"a": 10**15, "b": 10**15}, {"a": 1, "b": 1}),
    ],
)
def test_weights_that_fit_a_period_are_exact(weights: dict[str, float], expected: dict[str, int]) -> None:
    slots = integer_weights(weights)
    assert slots == expected
    assert list(slots) == sorted(slots)


def test_other_weights_are_within_one_slot_of_65536() -> None:
    rng = np.random.default_rng(8)
    cases = [{"a": math.sqrt(2), "b": 1.0}, {"a": 123_457, "b": 7_654_321, "c": 99_991}]
    cases += [{f"s{number}": weight for number, weight in enumerate(rng.random(50))} for _ in range(5)]
    for weights in cases:
        slots = integer_weights(weights)
        assert sum(slots.values()) == MAX_PERIOD
        total = sum(weights.values())
        assert all(abs(slots[name] - weight / total * MAX_PERIOD) < 1 for name, weight in weights.items())
    assert integer_weights({"a": 1, "b": 2.000001, "c": 2.000001}) == {"a": 13107, "b": 26215, "c": 26214}


@pytest.mark.parametrize("weight", [1e-9, 0.0000001, 0.0000072])
def test_a_weight_below_one_slot_is_refused_and_the_weight_it_names_works(weight: float) -> None:
    others = {"b": 0.7, "c": 0.31}
    with pytest.raises(ValueError, match=r"'a'.*at least (\S+),") as error:
        integer_weights({"a": weight, **others})
    named = float(str(error.value).split("at least ")[1].split(",")[0])
    assert named < 3e-5
    assert integer_weights({"a": named, **others})["a"] >= 1


@pytest.mark.parametrize(
    "weights", [{"a": -0.1}, {"a": math.nan}, {"a": math.inf}, {"a": True}, {"a": 0, "b": 0.0}, {}, {"a": "1"}]
)
def test_impossible_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        integer_weights(weights)


_RANDOM_50 = integer_weights(dict(enumerate(np.random.default_rng(50).random(50).tolist())))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "slots",
    [
        [1, 999], [999, 1], [1, 1, 1], [1], list(_RANDOM_50.values()), [2**k for k in range(12)],
        [3**k for k in range(9)],
        [1, 65_535], [1] * 200, [1] * 99 + [901], [32_768, 32_767, 1], [5, 4, 3, 2, 1],
    ],
    ids=lambda slots: f"{len(slots)} sources, {sum(slots)} slots",
)  # fmt: skip
def test_every_prefix_is_less_than_one_sample_from_every_share(slots: list[int]) -> None:
    period = sum(slots)
    schedule = np.array(balanced_schedule(slots))
    assert np.bincount(schedule, minlength=len(slots)).tolist() == slots
    lengths = np.arange(1, period + 1)
    for number, count in enumerate(slots):
        given = np.cumsum(schedule == number)
        assert np.abs(given * period - lengths * count).max() < period


FIFTY = {f"s{number:02}": 1 + (number * 37) % 50 for number in range(50)}


@pytest.mark.parametrize(
    "weights",
    [{"a": 0.001, "b": 0.999}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, FIFTY, {"a": 0.7, "b": 0.2, "c": 0.1}],
    ids=["0.001 and 0.999", "three thirds", "50 sources", "7 2 1"],
)
@pytest.mark.parametrize("first_sample", [0, 1001])
def test_counts_of_every_prefix_of_a_stage_are_within_one_sample_of_the_share(
    weights: dict[str, float], first_sample: int
) -> None:
    """The share as a fraction, through `counts` and `locate`, for over two periods, also behind another stage."""
    tokens = dict.fromkeys([*weights, "other"], 9 * 50 + 1)
    before = [Stage(0, {"other": 2, next(iter(weights)): 1})] if first_sample else []
    order = SampleOrder(seed=5, seq_len=9, tokens=tokens, stages=[*before, Stage(first_sample, weights)])
    exact = {name: Fraction(str(weight)).limit_denominator(10**9) for name, weight in weights.items()}
    shares = {name: weight / sum(exact.values()) for name, weight in exact.items()}
    samples = 2 * sum(integer_weights(weights).values()) + 7
    given = order.counts(first_sample)
    seen = Counter(dict.fromkeys(tokens, 0))
    for length in range(1, samples + 1):
        seen[order.locate(first_sample + length - 1).source] += 1
        assert all(abs(seen[name] - share * length) < 1 for name, share in shares.items()), length
        if length % 101 == 0 or length < 60:
            after = order.counts(first_sample + length)
            assert {name: after[name] - given[name] for name in tokens} == seen


# ---------------------------------------------------------------- samples

STAGES = [
    Stage(0, {"en": 0.5, "zh": 0.3, "code": 0.2}),
    Stage(137, {"en": 1, "zh": 0, "code": 3}),
    Stage(138, {"zh": 1}),
    Stage(400, {"en": 0.001, "zh": 0.999}),
]
TOKENS = {"en": 1000, "zh": 500, "code": 165}


def staged(seed: int = 7, stages: list[Stage] = STAGES) -> SampleOrder:
    return SampleOrder(seed=seed, seq_len=16, tokens=TOKENS, stages=stages)


@pytest.mark.parametrize("order", [staged(), staged(stages=[])], ids=["stages", "no stages"])
def test_each_source_goes_through_each_window_once_per_epoch_whatever_the_stages_do(order: SampleOrder) -> None:
    assert order.windows == {"code": 10, "en": 62, "zh": 31}
    read: dict[str, list[Address]] = {name: [] for name in TOKENS}
    for sample in range(3000):
        address = order.locate(sample)
        assert order.find(address) == sample
        read[address.source].append(address)
        if sample % 97 == 0 or sample in (136, 137, 138, 399, 400):
            assert order.counts(sample + 1) == {name: len(addresses) for name, addresses in sorted(read.items())}
    for name, addresses in read.items():
        n = order.windows[name]
        for epoch in range(-(-len(addresses) // n)):
            part = addresses[epoch * n : (epoch + 1) * n]
            assert {address.epoch for address in part} == {epoch}
            assert len({address.window for address in part}) == len(part)
        assert order.epochs(3000)[name] == len(addresses) / n
        if len(addresses) >= 2 * n:
            first, second = addresses[:n], addresses[n : 2 * n]
            assert [address.window for address in first] != [address.window for address in second]


def test_what_is_never_read_is_not_found() -> None:
    order = staged()
    code_read = order.counts(400)["code"]
    epoch, place = divmod(code_read, order.windows["code"])
    read = {order.locate(sample).window for sample in range(400) if order.locate(sample).source == "code"}
    assert place
    assert read == set(range(10))
    never = [window for window in range(10) if order.find(Address("code", epoch, window)) is None]
    assert len(never) == order.windows["code"] - place
    assert order.find(Address("code", epoch + 1, 0)) is None
    assert order.find(Address("en", 100, 5)) is not None
    for address in (Address("xx", 0, 0), Address("en", 0, 62), Address("en", -1, 0), Address("en", 0, -1)):
        with pytest.raises(ValueError, match=r"xx|does not exist"):
            order.find(address)


def test_a_longer_plan_begins_with_the_same_samples() -> None:
    longer = staged(stages=[*STAGES, Stage(900, {"code": 1})])
    assert [staged().locate(sample) for sample in range(900)] == [longer.locate(sample) for sample in range(900)]
    assert {longer.locate(sample).source for sample in range(900, 1000)} == {"code"}


def test_the_order_of_names_in_a_mapping_means_nothing() -> None:
    stages = [Stage(stage.first_sample, dict(reversed(stage.weights.items()))) for stage in STAGES]
    other = SampleOrder(seed=7, seq_len=16, tokens=dict(reversed(TOKENS.items())), stages=stages)
    assert json.dumps(other.describe()) == json.dumps(staged().describe())
    assert [other.locate(sample) for sample in range(500)] == [staged().locate(sample) for sample in range(500)]


def test_without_stages_all_sources_end_an_epoch_together() -> None:
    order = SampleOrder(seed=1, seq_len=4, tokens={"a": 401, "b": 1201, "empty": 3})
    assert order.windows == {"a": 100, "b": 300, "empty": 0}
    assert order.epochs(400) == {"a": 1.0, "b": 1.0, "empty": 0.0}
    assert len({order.locate(sample) for sample in range(400)}) == 400


def test_seeds_order_the_same_windows_differently() -> None:
    def one(seed: int) -> list[int]:
        order = SampleOrder(seed=seed, seq_len=1, tokens={"a": 1001})
        return [order.locate(sample).window for sample in range(1000)]

    assert sorted(one(1)) == sorted(one(2)) == list(range(1000))
    assert sum(left == right for left, right in zip(one(1), one(2), strict=True)) < 8


def test_many_epochs_of_a_tiny_source() -> None:
    order = SampleOrder(seed=3, seq_len=8, tokens={"tiny": 25, "big": 10**9}, stages=[Stage(0, {"tiny": 9, "big": 1})])
    tiny = [a for a in map(order.locate, range(2000)) if a.source == "tiny"]
    assert len(tiny) == 1800
    assert Counter(a.window for a in tiny) == {0: 600, 1: 600, 2: 600}
    first_windows = Counter(a.window for a in tiny[::3])
    assert min(first_windows.values()) > 150


def test_eight_billion_windows_cost_what_twenty_cost() -> None:
    order = SampleOrder(seed=3, seq_len=2048, tokens={"web": 2**33 * 2048 + 1})
    assert order.windows == {"web": 2**33}
    for sample in (0, 1, 2**32, 2**33 - 1, 2**33, 2**40):
        address = order.locate(sample)
        assert address.epoch == sample >> 33
        assert order.find(address) == sample


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**64}, "seed"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 5000}, "no source has the 5,001 tokens of one window"),
        ({"tokens": {}}, "there is no source"),
        ({"stages": [Stage(5, {"en": 1})]}, "begins at sample 5"),
        ({"stages": [Stage(0, {"en": 1}), Stage(0, {"en": 1})]}, "must ascend"),
        ({"stages": [Stage(0, {"english": 1})]}, "'english'"),
        ({"stages": [Stage(0, {"en": 0})]}, "no source has a weight"),
        ({"seq_len": 165, "stages": [Stage(0, {"en": 1, "code": 0.5})]}, r"'code' has weight 0.5 but its 165 .* 166"),
    ],
)
def test_an_order_that_cannot_be_says_why(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SampleOrder(**{"seed": 1, "seq_len": 16, "tokens": TOKENS, "stages": STAGES, **change})
    assert "\n" not in str(error.value)


def test_samples_below_zero_are_refused() -> None:
    for call in (staged().locate, staged().counts):
        with pytest.raises(ValueError, match="-1"):
            call(-1)


# ---------------------------------------------------------------- description


def test_the_description_survives_json_and_counts_what_is_left_over() -> None:
    description = staged().describe()
    stored = json.loads(json.dumps(description))
    assert stored == description
    assert difference(stored, description) is None
    assert description["stages"][0] == {"first_sample": 0, "period": 10, "slots": {"code": 2, "en": 5, "zh": 3}}
    for name, facts in description["sources"].items():
        covered = facts["windows"] * 16 + 1
        assert facts["tokens"] - facts["tokens_left_over"] == covered
        assert facts["tokens_left_over"] < 16, name


@pytest.mark.parametrize(
    "other, words",
    [
        (staged(seed=8), ["seed was 7 and is now 8"]),
        (SampleOrder(seed=7, seq_len=8, tokens=TOKENS, stages=STAGES), ["seq_len was 16 and is now 8", "and"]),
        (staged(stages=STAGES[:2]), ["stages were 4 and are now 2"]),
        (staged(stages=[Stage(0, {"en": 5, "zh": 4, "code": 1}), *STAGES[1:]]), ["stages[0].slots.code was 2"]),
        (SampleOrder(seed=7, seq_len=16, tokens={**TOKENS, "x": 9}, stages=STAGES), ["sources.x is new"]),
        (SampleOrder(seed=7, seq_len=16, tokens={**TOKENS, "en": 1001}, stages=STAGES), ["sources.en.tokens was 1000"]),
    ],
)
def test_a_difference_is_named_in_one_line(other: SampleOrder, words: list[str]) -> None:
    line = difference(staged().describe(), other.describe())
    assert line is not None
    assert "\n" not in line
    assert all(word in line for word in words)


def test_stages_still_to_come_may_be_planned_anew() -> None:
    stored = staged(stages=STAGES[:2]).describe()
    new = staged(stages=[*STAGES[:2], Stage(300, {"en": 1})]).describe()
    assert difference(stored, new, consumed_samples=300) is None
    assert difference(stored, new, consumed_samples=301) is not None
    assert difference(stored, staged(stages=STAGES[:1]).describe(), consumed_samples=138) is not None
    assert difference({"seed": 7}, stored) is not None


def test_samples_too_far_apart_are_refused_not_mistaken() -> None:
    tokens = {f"s{number:02}": 3 for number in range(64)}
    order = SampleOrder(seed=1, seq_len=1, tokens=tokens, stages=[Stage(0, {"s00": 1.0})])
    for sample in (0, 1, 2**59, 2**59 + 1, 2**62):
        assert order.locate_many([sample]).windows.tolist() == [order.locate(sample).window]
    with pytest.raises(ValueError, match="too many epochs"):
        order.locate_many([0, 2**59])
