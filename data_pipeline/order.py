"""The order of data, version 1: a global sample number alone says which source, epoch and window it is.

No index is built, nothing is drawn or kept, ranks and workers do not enter: sample 7,000,000 costs what sample 0
costs, a resumed run reads what an uninterrupted one would have read, a longer run begins with the same samples, and
`SampleOrder.find` answers the question backwards. All that stands here is fixed for good by ``ORDER_VERSION``:

Windows. A source is one stream of N tokens; window j of n = (N-1)//T reads tokens jT to jT+T inclusive (inputs the
first T, targets the last T). The N - nT - 1 tokens behind the last window are never read; `describe` counts them.
Where documents are packed (``best_fit``), the rows of a plan made beforehand take the windows' place: n of them.

Permutation of 0..n-1 under a 64-bit key. A Feistel network on the smallest binary domain of b >= 6 bits that holds n,
b//2 low bits and the rest high. Ten rounds in turn: high ^= F(low), low ^= F(high), ... where F of round r is output
number x of the generator splitmix64 (Steele, Lea, Flood 2014, with its own constants) seeded with round key r, cut to
the bits it meets; round key r is output r + 1 of splitmix64 seeded with the key. Results >= n are sent through again
(cycle-walking; at most two passes on average from n = 32 on). Last, the values 0 and 1 change places if bit 0 of
round key 10 is set: a Feistel network of many bits is always an even permutation, this makes the sign a fair coin.
Why ten and six: with four rounds, or on domains of 1 to 3 bits, the frequencies of permutations of a few elements are
visibly wrong; with eight and six they were right over millions of keys, and two more rounds are margin.

Key of a source's epoch. BLAKE2b, 8 bytes of digest read little-endian; key = seed (u64 little-endian), person =
``zerohalf order 1``, message = epoch (u64 little-endian), then the source's name in UTF-8. Only the name varies in
length and it stands last, so no two triples share a message, and neighbouring seeds or epochs have nothing in common.

Mixture. A weight is the decimal number it is written as (0.1 is one tenth). The shares weight / sum become whole slots
of a period: of the least common denominator of the shares when that is at most 65,536 (shares closer than one part in
10^12 to such a fraction count as that fraction: three times 0.3333333333333333 is three thirds), else of 65,536 by
largest remainder, ties to the name that sorts first. The slots of a period are handed out by earliest
pseudo-deadline first: slot j = 1, 2, ... of a source with w of P slots may stand at places floor((j-1)P/w) to
ceil(jP/w) - 1, the one whose last place comes first goes first, ties to the name that sorts first (Baruah, Cohen,
Plaxton, Varvel 1996; on one processor this meets every deadline). So in every prefix each source is less than one
sample from its share. Without stages every source has the weight of its number of windows.

Stages. Stage k begins with its first sample at the start of its own period; the per-source sample numbers run on from
stage to stage, so a change of weights neither repeats nor loses a window. Sample m of a source is place m mod n of
epoch m div n: each window once per epoch, whatever the weights do.

Begin. An order may follow others of the same run (history.py): it begins at a sample number, with some windows of each
source given before. Its first stage begins there; all else is as above.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
MAX_PERIOD = 65_536

PackingMode = Literal["concat", "concat_masked", "best_fit"]  # what they mean: packing.py
PACKING_MODES: tuple[PackingMode, ...] = get_args(PackingMode)

_ROUNDS = 10
_SMALLEST_DOMAIN_BITS = 6
_LARGEST_DOMAIN = 2**62
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15

Int64Array = npt.NDArray[np.int64]
# An int or an array of uint64: both go through the same lines, so the scalar and the array answer cannot differ.
_Word: TypeAlias = Any


# ---------------------------------------------------------------- permutation


def _splitmix64(seed: int, number: _Word) -> _Word:
    """Output `number` of splitmix64 started at `seed`."""
    z = number * _GAMMA + seed & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


class Permutation:
    """A pseudo-random permutation of 0..n-1, computed per index, with its exact inverse.

    n from 1 to 2^62, key from 0 to 2^64 - 1. A call costs some microseconds, `many` some ten nanoseconds an index
    plus the overhead of numpy; memory: eleven numbers. ValueError for n, keys and indices out of range.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= _LARGEST_DOMAIN:
            raise ValueError(f"a permutation of {n:,} elements is not possible: 1 to 2^62 are")
        if not 0 <= key <= _MASK:
            raise ValueError(f"key {key} is not an unsigned 64-bit number")
        self.n = n
        bits = max((n - 1).bit_length(), _SMALLEST_DOMAIN_BITS)
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._round_keys: list[int] = [_splitmix64(key, number) for number in range(1, _ROUNDS + 1)]
        self._exchange: int = _splitmix64(key, _ROUNDS + 1) & 1 if n > 1 else 0

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        self._check(index, index)
        value: int = self._forth(index)
        while value >= self.n:
            value = self._forth(value)
        return value ^ self._exchange if value < 2 else value

    def inverse(self, value: int) -> int:
        """The index that goes to `value`."""
        self._check(value, value)
        index = self._back(value ^ self._exchange if value < 2 else value)
        while index >= self.n:
            index = self._back(index)
        return index

    def many(self, indices: npt.ArrayLike) -> Int64Array:
        """Where each of an array of integer indices goes, any shape; equal to calling one by one."""
        array = np.asarray(indices)
        if array.size == 0:
            return np.empty(array.shape, np.int64)
        if array.dtype.kind not in "iu":
            raise ValueError(f"indices must be integers, not {array.dtype}")
        self._check(int(array.min()), int(array.max()))
        which = np.zeros(array.size, np.int64)
        return permute_many([self], which, array.reshape(-1).astype(np.int64)).reshape(array.shape)

    def _check(self, smallest: int, largest: int) -> None:
        if smallest < 0 or largest >= self.n:
            bad = smallest if smallest < 0 else largest
            raise ValueError(f"{bad} is not in a permutation of {self.n} elements (0 to {self.n - 1})")

    def _forth(self, value: int) -> int:
        word: int = _through_rounds(value, self._low_bits, self._low_mask, self._high_mask, self._round_keys)
        return word

    def _back(self, value: int) -> int:
        low, high = value & self._low_mask, value >> self._low_bits
        keys = reversed(self._round_keys)
        for key in keys:
            low = low ^ _splitmix64(key, high) & self._low_mask
            high = high ^ _splitmix64(next(keys), low) & self._high_mask
        return high << self._low_bits | low


def _through_rounds(value: _Word, low_bits: _Word, low_mask: _Word, high_mask: _Word, round_keys: _Word) -> _Word:
    """The Feistel network once. All int, or all uint64 arrays of one length (round_keys then has a row a round)."""
    low, high = value & low_mask, value >> low_bits
    keys = iter(round_keys)
    for key in keys:
        high = high ^ _splitmix64(key, low) & high_mask
        low = low ^ _splitmix64(next(keys), high) & low_mask
    return high << low_bits | low


def permute_many(permutations: Sequence[Permutation], which: Int64Array, indices: Int64Array) -> Int64Array:
    """Where each index goes by its own permutation, whose place in `permutations` is in `which`. All (n,).

    Equal to calling one by one, at some ten nanoseconds an index however many permutations there are. The indices
    must be in range.
    """

    def each(values: Iterable[int]) -> npt.NDArray[np.uint64]:
        return np.fromiter(values, np.uint64, len(permutations))[which]

    sizes = each(one.n for one in permutations)
    low_bits = each(one._low_bits for one in permutations)
    low_mask = each(one._low_mask for one in permutations)
    high_mask = each(one._high_mask for one in permutations)
    round_keys = np.array([one._round_keys for one in permutations], np.uint64).T[:, which]
    values = _through_rounds(indices.astype(np.uint64), low_bits, low_mask, high_mask, round_keys)
    walking = np.flatnonzero(values >= sizes)
    while walking.size:
        values[walking] = _through_rounds(
            values[walking], low_bits[walking], low_mask[walking], high_mask[walking], round_keys[:, walking]
        )
        walking = walking[values[walking] >= sizes[walking]]
    low = values < 2
    values[low] ^= each(one._exchange for one in permutations)[low]
    placed: Int64Array = values.astype(np.int64)
    return placed


def epoch_key(seed: int, source: str, epoch: int) -> int:
    """The 64-bit key of one source's permutation in one epoch; see the module's docstring for its encoding."""
    digest = hashlib.blake2b(
        epoch.to_bytes(8, "little") + source.encode(),
        key=seed.to_bytes(8, "little"),
        digest_size=8,
        person=b"zerohalf order 1",
    ).digest()
    return int.from_bytes(digest, "little")


@lru_cache(maxsize=4096)
def _epoch_permutation(seed: int, source: str, epoch: int, windows: int) -> Permutation:
    return Permutation(windows, epoch_key(seed, source, epoch))


# ---------------------------------------------------------------- mixture


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Weights as whole slots of a period of at most 65,536: ``sum(result.values())`` is the period.

    Sorted by name; sources of weight 0 are left out. The weights need not sum to one.
    ValueError: a weight that is negative or no number, none above 0, or one too small for a single slot.
    """
    exact = {}
    for name, weight in sorted(weights.items()):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"the weight of source {name!r} is {weight!r}; it must be a finite number >= 0")
        if weight:
            exact[name] = Fraction(weight) if isinstance(weight, int) else Fraction(repr(float(weight)))
    if not exact:
        raise ValueError(f"no source has a weight above 0 (sources: {', '.join(sorted(weights)) or 'none'})")
    total = sum(exact.values())
    fractions = {name: (weight / total).limit_denominator(MAX_PERIOD) for name, weight in exact.items()}
    period = math.lcm(*(share.denominator for share in fractions.values()))
    near = all(abs(fractions[name] * total / weight - 1) < Fraction(1, 10**12) for name, weight in exact.items())
    if near and period <= MAX_PERIOD and sum(fractions.values()) == 1:
        return {name: int(share * period) for name, share in fractions.items()}

    slots = {name: int(weight * MAX_PERIOD / total) for name, weight in exact.items()}
    by_remainder = sorted(exact, key=lambda name: slots[name] - exact[name] * MAX_PERIOD / total)
    for name in by_remainder[: MAX_PERIOD - sum(slots.values())]:
        slots[name] += 1
    for name, count in slots.items():
        if count == 0:
            smallest = _round_up((total - exact[name]) / (MAX_PERIOD - 1))
            raise ValueError(
                f"the weight of source {name!r} is {weights[name]!r}, less than one sample in {MAX_PERIOD:,}: "
                f"give it at least {smallest!r}, or 0 to leave the source out"
            )
    return slots


def _as_slots(weights: Mapping[str, float]) -> dict[str, int]:
    """Slots as they are, sorted by name. ValueError where they are none."""
    slots = {name: count for name, count in sorted(weights.items()) if type(count) is int and count > 0}
    if len(slots) < len(weights) or not 0 < sum(slots.values()) <= MAX_PERIOD:
        raise ValueError(f"{dict(weights)} are no slots of a period")
    return slots


def _round_up(value: Fraction) -> float:
    """The next number of three significant digits that is not below `value` (> 0)."""
    unit = Fraction(10) ** (math.floor(math.log10(value)) - 2)
    return float(math.ceil(value / unit) * unit)


def balanced_schedule(slots: Sequence[int]) -> list[int]:
    """One period of sum(slots) places: which source (its number in `slots`, each >= 1) stands at each place.

    Earliest pseudo-deadline first, in whole numbers: see the module's docstring. O(period x log sources).
    """
    period = sum(slots)
    released = [(0, number, 1) for number in range(len(slots))]
    ready: list[tuple[int, int, int]] = []
    schedule = []
    for place in range(period):
        while released and released[0][0] <= place:
            _, number, j = heapq.heappop(released)
            heapq.heappush(ready, (-(-j * period // slots[number]), number, j))
        _, number, j = heapq.heappop(ready)
        schedule.append(number)
        if j < slots[number]:
            heapq.heappush(released, (j * period // slots[number], number, j + 1))
    return schedule


@dataclass(frozen=True)
class Stage:
    """From this sample number on the sources are mixed by these weights; a source not named has weight 0.

    `are_slots`: the weights are the slots of a period already, as a description has them.
    """

    first_sample: int
    weights: Mapping[str, float]
    are_slots: bool = False


class _PlannedStage:
    """A stage with its schedule: places of a period to sources and back, and what each source gave before it."""

    def __init__(self, first_sample: int, slots: dict[str, int], given: dict[str, int]) -> None:
        self.first_sample = first_sample
        self.slots = slots
        self.period = sum(slots.values())
        self.given = given
        self.names = list(slots)
        self.numbers = np.array(balanced_schedule(list(slots.values())), np.int64)
        self.places = {name: np.flatnonzero(self.numbers == number) for number, name in enumerate(slots)}
        self.ranks = np.empty(self.period, np.int64)  # how many places before this one belong to the same source
        for places in self.places.values():
            self.ranks[places] = np.arange(len(places))

    def numbers_of(self, samples: Int64Array, names: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        """For samples of this stage: which source gives each (its place in `names`), and its how-many-eth it is."""
        past = samples - self.first_sample
        periods, places = past // self.period, past % self.period
        own = self.numbers[places]
        given = np.array([self.given[name] for name in self.names], np.int64)
        slots = np.array(list(self.slots.values()), np.int64)
        in_names = np.array([names.index(name) for name in self.names], np.int64)
        return in_names[own], given[own] + periods * slots[own] + self.ranks[places]

    def given_until(self, sample: int) -> dict[str, int]:
        """How many samples each source has given before `sample`, which lies in this stage or at its end."""
        periods, place = divmod(sample - self.first_sample, self.period)
        counts = dict(self.given)
        for name, places in self.places.items():
            counts[name] += periods * self.slots[name] + int(np.searchsorted(places, place))
        return counts


# ---------------------------------------------------------------- order


@dataclass(frozen=True)
class PlannedRows:
    """What the order must know of a packing plan: each source's number of rows, and a hash of what stands in them."""

    rows: Mapping[str, int]
    sha256: str


@dataclass(frozen=True)
class Begin:
    """Where an order begins that follows others: at this sample, with so many windows of each source given before."""

    sample: int
    given: Mapping[str, int]


@dataclass(frozen=True)
class Address:
    """A window, or row of a packing plan, of a source, as read in one epoch (both from 0)."""

    source: str
    epoch: int
    window: int


@dataclass(frozen=True)
class Addresses:
    """Many windows at once, in the order of their samples. `sources` are numbers into `names`; int64 arrays (n,)."""

    names: tuple[str, ...]
    sources: Int64Array
    epochs: Int64Array
    windows: Int64Array


class SampleOrder:
    """Which window every global sample number reads: arithmetic on whole numbers, nothing else.

    `tokens` gives each source's number of tokens (its training split), `seq_len` the window's T. Without stages each
    source comes in proportion to its number of windows. Cost: one schedule of up to 65,536 places a stage.

    `packing` says how a row is made of documents. "best_fit" needs `planned`: rows of a plan are then what is called
    windows here. "concat_masked" reads the windows of "concat" in the same order; it is told apart by `describe`.

    `begin`: the order follows others of the same run, and knows no sample before that one.

    ValueError, one line: a seed outside 0..2^64-1, seq_len < 1, stages that do not start at 0 (or at `begin`) and
    ascend, a stage that names an unknown source, weights that do not work, a source with weight but without a single
    window, a plan without "best_fit" or of other sources.
    """

    def __init__(
        self,
        *,
        seed: int,
        seq_len: int,
        tokens: Mapping[str, int],
        stages: Sequence[Stage] = (),
        packing: PackingMode = "concat",
        planned: PlannedRows | None = None,
        begin: Begin | None = None,
    ) -> None:
        if not 0 <= seed <= _MASK:
            raise ValueError(f"seed {seed} is not an unsigned 64-bit number")
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; it must be at least 1")
        self.seed = seed
        self.seq_len = seq_len
        self.tokens = {name: tokens[name] for name in sorted(tokens)}
        self.packing = packing
        self._plan_sha256 = planned.sha256 if planned is not None else None
        if (packing == "best_fit") != (planned is not None):
            raise ValueError(f"packing {packing!r} and {'no' if planned is None else 'a'} plan do not go together")
        if planned is not None and sorted(planned.rows) != sorted(self.tokens):
            raise ValueError(f"the plan is of sources {sorted(planned.rows)}, the data of {sorted(self.tokens)}")
        self.windows = {
            name: max(0, (count - 1) // seq_len) if planned is None else planned.rows[name]
            for name, count in self.tokens.items()
        }
        if not any(self.windows.values()):
            counts = ", ".join(f"{name} has {count:,}" for name, count in self.tokens.items()) or "there is no source"
            raise ValueError(f"no source has the {seq_len + 1:,} tokens of one window (seq_len {seq_len:,}): {counts}")
        self.begin = begin
        self.first_sample = 0 if begin is None else begin.sample
        self._stages: list[_PlannedStage] = []
        for stage in stages or [Stage(self.first_sample, self.windows)]:
            self._append(stage)
        self._first_samples = [stage.first_sample for stage in self._stages]

    def _append(self, stage: Stage) -> None:
        if not self._stages and stage.first_sample != self.first_sample:
            raise ValueError(
                f"the first stage begins at sample {stage.first_sample:,}; it must begin at {self.first_sample:,}"
            )
        if self._stages and stage.first_sample <= self._stages[-1].first_sample:
            raise ValueError(
                f"a stage at sample {stage.first_sample:,} follows one at {self._stages[-1].first_sample:,}: "
                "stages must ascend"
            )
        if unknown := sorted(set(stage.weights) - set(self.tokens)):
            raise ValueError(f"no source is called {unknown[0]!r}; the sources are {', '.join(self.tokens)}")
        slots = _as_slots(stage.weights) if stage.are_slots else integer_weights(stage.weights)
        for name in slots:
            if self.windows[name] == 0:
                raise ValueError(
                    f"source {name!r} has weight {stage.weights[name]} but its {self.tokens[name]:,} tokens are fewer "
                    f"than the {self.seq_len + 1:,} of one window: give it weight 0, more text or a shorter seq_len"
                )
        before = {} if self.begin is None else self.begin.given
        given = {name: before.get(name, 0) for name in self.tokens}
        if self._stages:
            given = self._stages[-1].given_until(stage.first_sample)
        self._stages.append(_PlannedStage(stage.first_sample, slots, given))

    def behind(self, begin: Begin, stages: Sequence[Stage]) -> SampleOrder:
        """The order of the same windows that begins there, mixed by these stages (none: by numbers of windows)."""
        planned = None if self._plan_sha256 is None else PlannedRows(self.windows, self._plan_sha256)
        return SampleOrder(
            seed=self.seed, seq_len=self.seq_len, tokens=self.tokens, stages=stages, packing=self.packing,
            planned=planned, begin=begin,
        )  # fmt: skip

    def locate(self, sample: int) -> Address:
        """The window that global sample `sample` (>= 0) reads. Some ten microseconds."""
        if sample < self.first_sample:
            raise ValueError(f"sample {sample} does not exist: the first is {self.first_sample}")
        stage = self._stages[bisect_right(self._first_samples, sample) - 1]
        periods, place = divmod(sample - stage.first_sample, stage.period)
        name = stage.names[int(stage.numbers[place])]
        number = stage.given[name] + periods * stage.slots[name] + int(stage.ranks[place])
        epoch, position = divmod(number, self.windows[name])
        return Address(name, epoch, _epoch_permutation(self.seed, name, epoch, self.windows[name])(position))

    def locate_many(self, samples: npt.ArrayLike) -> Addresses:
        """What `locate` says of each of many samples, (n,) in any order: some tenths of a microsecond each.

        ValueError when a sample is below the first, or when they span more epochs than 64 bits can number.
        """
        wanted = np.asarray(samples, np.int64).reshape(-1)
        if wanted.size and wanted.min() < self.first_sample:
            raise ValueError(f"sample {wanted.min()} does not exist: the first is {self.first_sample}")
        names = tuple(self.tokens)
        sources, numbers = np.empty_like(wanted), np.empty_like(wanted)
        stages = np.searchsorted(self._first_samples, wanted, side="right") - 1
        for number in np.unique(stages).tolist():
            mine = np.flatnonzero(stages == number)
            sources[mine], numbers[mine] = self._stages[number].numbers_of(wanted[mine], names)
        epochs, positions = np.divmod(numbers, np.array([max(1, self.windows[name]) for name in names])[sources])
        # A pass is a source's epoch, here as one number: numpy sorts those far faster than pairs.
        first = int(epochs.min()) if epochs.size else 0
        if epochs.size and int(epochs.max()) - first > _LARGEST_DOMAIN // len(names):
            raise ValueError("these samples are of too many epochs to be located at once: ask for fewer")
        passes, which = np.unique((epochs - first) * len(names) + sources, return_inverse=True)
        permutations = []
        for one in passes.tolist():
            epoch, source = divmod(one, len(names))
            name = names[source]
            permutations.append(_epoch_permutation(self.seed, name, first + epoch, self.windows[name]))
        windows = permute_many(permutations, which, positions) if permutations else np.empty_like(wanted)
        return Addresses(names, sources, epochs, windows)

    def find(self, address: Address) -> int | None:
        """The one global sample number that reads this window in this epoch; None if no sample ever does.

        In the last stage, which has no end, every epoch of a source with weight comes at some time.
        ValueError when there is no such source, epoch or window.
        """
        if address.source not in self.tokens:
            raise ValueError(f"no source is called {address.source!r}; the sources are {', '.join(self.tokens)}")
        windows = self.windows[address.source]
        if not 0 <= address.window < windows or address.epoch < 0:
            raise ValueError(f"{address} does not exist: the source has windows 0 to {windows - 1}, epochs from 0 on")
        permutation = _epoch_permutation(self.seed, address.source, address.epoch, windows)
        number = address.epoch * windows + permutation.inverse(address.window)
        if number < self._stages[0].given[address.source]:  # an order before this one may have read it
            return None
        for stage in reversed(self._stages):
            if number >= stage.given[address.source]:
                break
        slots = stage.slots.get(address.source, 0)
        if slots == 0:
            return None
        periods, rank = divmod(number - stage.given[address.source], slots)
        return stage.first_sample + periods * stage.period + int(stage.places[address.source][rank])

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` samples come from each source; with `begin`, what it gave before counts."""
        if samples < self.first_sample:
            raise ValueError(f"{samples} samples are not possible: this order begins with {self.first_sample}")
        return self._stages[bisect_right(self._first_samples, samples) - 1].given_until(samples)

    def epochs(self, samples: int) -> dict[str, float]:
        """How many epochs each source has gone through after the first `samples` samples (0.0 without windows)."""
        return {
            name: count / self.windows[name] if self.windows[name] else 0.0
            for name, count in self.counts(samples).items()
        }

    def describe(self) -> dict[str, Any]:
        """All that fixes the order, and what it leaves unread, as JSON: to be stored in a checkpoint."""
        packing = {} if self.packing == "concat" else {"packing": self.packing, "plan_sha256": self._plan_sha256}
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "stages": [
                {"first_sample": stage.first_sample, "period": stage.period, "slots": dict(stage.slots)}
                for stage in self._stages
            ],
            "sources": {
                name: {
                    "tokens": count,
                    "windows": self.windows[name],
                    "tokens_left_over": self._left_over(name),
                }
                for name, count in self.tokens.items()
            },
            **packing,
            **({} if self.begin is None else {"begin": {"sample": self.begin.sample, "given": dict(self.begin.given)}}),
        }

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> SampleOrder:
        """The order that `describe` described: no file of the data is needed for it.

        KeyError, TypeError, AttributeError, ValueError: it describes none, or one of another version.
        """
        if description["order_version"] != ORDER_VERSION:
            raise ValueError(f"order version {description['order_version']} is not known")
        packing = next((mode for mode in PACKING_MODES if mode == description.get("packing", "concat")), None)
        if packing is None:
            raise ValueError(f"packing {description['packing']!r} is not known")
        windows = {name: one["windows"] for name, one in description["sources"].items()}
        return cls(
            seed=description["seed"],
            seq_len=description["seq_len"],
            tokens={name: one["tokens"] for name, one in description["sources"].items()},
            stages=[Stage(one["first_sample"], one["slots"], are_slots=True) for one in description["stages"]],
            packing=packing,
            planned=PlannedRows(windows, description["plan_sha256"]) if packing == "best_fit" else None,
            begin=Begin(**description["begin"]) if "begin" in description else None,
        )

    def _left_over(self, name: str) -> int:
        """Tokens that no window reads; a plan's rows read all."""
        if self.packing == "best_fit":
            return 0
        return self.tokens[name] - (self.windows[name] * self.seq_len + 1 if self.windows[name] else 0)


def difference(stored: Mapping[str, Any], current: Mapping[str, Any], *, consumed_samples: int = 0) -> str | None:
    """What differs between two results of `SampleOrder.describe`, in one line; None if they give the same order.

    With `consumed_samples` from a checkpoint, stages that begin at or after that sample are not compared, the first
    stage excepted: what is still to come may be planned anew without changing what has been read.
    """

    def relevant(description: Mapping[str, Any]) -> dict[str, Any]:
        description = {"packing": "concat", "plan_sha256": None, "begin": None, **description}
        stages = description.get("stages")
        if not isinstance(stages, list) or not consumed_samples:
            return description
        return {**description, "stages": [stage for stage in stages if stage["first_sample"] < consumed_samples]}

    found = _differences("", relevant(stored), relevant(current))
    if not found:
        return None
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "the order of data differs: " + "; ".join(found[:3]) + more


def _differences(path: str, stored: Any, current: Any) -> list[str]:
    if isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        pairs = zip(stored, current, strict=True)
        return [line for number, pair in enumerate(pairs) for line in _differences(f"{path}[{number}]", *pair)]
    if isinstance(stored, list) and isinstance(current, list):
        return [f"{path} were {len(stored)} and are now {len(current)}"]
    if isinstance(stored, Mapping) and isinstance(current, Mapping):
        lines = []
        for key in [*stored, *(key for key in current if key not in stored)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in current:
                lines.append(f"{inner} is gone")
            elif key not in stored:
                lines.append(f"{inner} is new")
            else:
                lines += _differences(inner, stored[key], current[key])
        return lines
    return [] if stored == current else [f"{path} was {stored!r} and is now {current!r}"]
