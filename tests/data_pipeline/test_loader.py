"""Batches: every window exactly once for any number of ranks, the thread that never hangs, evaluation to the token."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.loader import (
    READ_AHEAD_WINDOWS,
    Batch,
    Loader,
    _Prefetcher,
    evaluation_batches,
    evaluation_size,
)
from data_pipeline.order import SampleOrder, Stage
from data_pipeline.shards import DataFormatError, ShardWriter, Split
from data_pipeline.steps import Steps
from data_pipeline.stream import TokenStream

ROOT = Path(__file__).resolve().parents[2]
EOS = 2


class CountingStream:
    """A stream without a file: the token at position p is p, so a batch says where it was read."""

    dtype = np.dtype(np.int64)

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.reads: list[tuple[int, int]] = []
        self.announced: list[tuple[int, int]] = []
        self.before_read: Callable[[], None] = lambda: None

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.tokens
        self.before_read()
        self.reads.append((start, stop))
        return np.arange(start, stop, dtype=np.int64)

    def read_into(self, start: int, row: np.ndarray) -> None:
        row[:] = self.read(start, start + len(row))

    def try_read_into(self, start: int, row: np.ndarray) -> bool:
        """As a stream that lies on disk alone."""
        self.will_need(start, start + len(row))
        return False

    def will_need(self, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= self.tokens
        self.announced.append((start, stop))


def prefetchers() -> list[threading.Thread]:
    """The reading threads that live now."""
    return [thread for thread in threading.enumerate() if thread.name == "batch-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However busy the machine is: to close a loader is to wait for its thread, here longer than a thread takes."""
    monkeypatch.setattr("data_pipeline.loader._CLOSE_SECONDS", 120.0)
    yield
    assert prefetchers() == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_waiting(thread: threading.Thread) -> bool:
    """Whether a prefetching thread reads nothing and has no place for another batch."""
    assert isinstance(thread, _Prefetcher)
    assert thread.ident is not None
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code is _Prefetcher.run.__code__ and thread._places.empty()


def one_source(windows: int, seq_len: int = 3, seed: int = 1) -> tuple[SampleOrder, dict[str, CountingStream]]:
    tokens = {"a": windows * seq_len + 1}
    return SampleOrder(seed=seed, seq_len=seq_len, tokens=tokens), {"a": CountingStream(tokens["a"])}


def loader_of(
    order: SampleOrder,
    streams: dict,
    *,
    rank: int = 0,
    ranks: int = 1,
    micro: int = 2,
    accumulation: int = 1,
    first: int = 0,
    prefetch: int = 8,
    steps: Steps | None = None,
) -> Loader:
    return Loader(
        order, streams, rank=rank, world_size=ranks, micro_batch_size=micro,
        gradient_accumulation_steps=accumulation, first_sample=first, prefetch=prefetch, steps=steps,
    )  # fmt: skip


def read_steps(
    order: SampleOrder, streams: dict, *, ranks: int, micro: int, accumulation: int, first: int, steps: int
) -> dict[int, np.ndarray]:
    """Sample number -> its T+1 tokens, over the real loaders of all ranks; no sample may come twice."""
    seen: dict[int, np.ndarray] = {}
    for rank in range(ranks):
        shape = {"ranks": ranks, "micro": micro, "accumulation": accumulation, "first": first}
        with loader_of(order, streams, rank=rank, **shape) as loader:
            for _ in range(steps * accumulation):
                batch = next(loader)
                assert batch.inputs.shape == batch.targets.shape == (micro, order.seq_len)
                assert batch.inputs.dtype == batch.targets.dtype == batch.samples.dtype == np.int64
                for row, sample in enumerate(batch.samples.tolist()):
                    assert sample not in seen
                    assert (batch.inputs[row, 1:] == batch.targets[row, :-1]).all()
                    seen[sample] = np.append(batch.inputs[row], batch.targets[row, -1])
    global_batch = ranks * micro * accumulation
    assert sorted(seen) == list(range(first, first + steps * global_batch))
    return seen


# ---------------------------------------------------------------- every window once


@pytest.mark.parametrize("surplus", [-1, 0, 1])
@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_window_once_per_epoch(ranks: int, surplus: int) -> None:
    """Two epochs of n windows, n one less, equal and one more than three global batches, on every rank."""
    micro, accumulation = (2, 1) if ranks % 2 else (1, 3)
    global_batch = ranks * micro * accumulation
    n = 3 * global_batch + surplus
    order, streams = one_source(n)
    seen = read_steps(order, streams, ranks=ranks, micro=micro, accumulation=accumulation, first=0, steps=7)
    windows = [int(seen[sample][0]) // 3 for sample in range(7 * global_batch)]
    assert all((seen[sample] == windows[sample] * 3 + np.arange(4)).all() for sample in seen)
    assert sorted(windows[:n]) == sorted(windows[n : 2 * n]) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_more_ranks_than_windows_and_many_epochs_of_a_tiny_set(n: int) -> None:
    order, streams = one_source(n)
    seen = read_steps(order, streams, ranks=8, micro=1, accumulation=2, first=0, steps=3 * n)
    windows = [int(seen[sample][0]) // 3 for sample in range(48 * n)]
    for epoch in range(48):
        assert sorted(windows[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_micro_batches_follow_the_formula() -> None:
    order, streams = one_source(100)
    for rank in range(3):
        with loader_of(order, streams, rank=rank, ranks=3, micro=2, accumulation=4, first=10) as loader:
            for step in range(3):
                for micro_step in range(4):
                    expected = [10 + step * 24 + (micro_step * 3 + rank) * 2 + row for row in range(2)]
                    assert next(loader).samples.tolist() == expected


def test_rows_are_what_the_order_says_for_a_mixture_with_stages() -> None:
    tokens = {"a": 500, "b": 90, "c": 31}
    stages = [Stage(0, {"a": 0.6, "b": 0.4}), Stage(21, {"c": 1, "b": 2})]
    order = SampleOrder(seed=4, seq_len=5, tokens=tokens, stages=stages)
    offsets = {"a": 0, "b": 10_000, "c": 20_000}

    class Offset(CountingStream):
        offset = 0

        def read(self, start: int, stop: int) -> np.ndarray:
            return super().read(start, stop) + self.offset

    streams = {name: Offset(count) for name, count in tokens.items()}
    for name, stream in streams.items():
        stream.offset = offsets[name]
    seen = read_steps(order, streams, ranks=2, micro=2, accumulation=2, first=0, steps=10)
    for sample, window in seen.items():
        address = order.locate(sample)
        assert (window == offsets[address.source] + address.window * 5 + np.arange(6)).all()


def test_eight_billion_windows() -> None:
    order, streams = one_source(2**33, seq_len=2048)
    first = 2**33 - 1
    seen = read_steps(order, streams, ranks=2, micro=1, accumulation=1, first=first, steps=2)
    for sample, window in seen.items():
        assert window[0] == order.locate(sample).window * 2048
    assert order.locate(first).epoch == 0
    assert order.locate(first + 1).epoch == 1


# ---------------------------------------------------------------- real shards, resume


@pytest.fixture(scope="module")
def real_streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStream]:
    """Two sources in several shards each, as `prepare` writes them."""
    rng = np.random.default_rng(11)
    streams = {}
    for name, shards in (("en", 4), ("zh", 3)):
        folder = tmp_path_factory.mktemp(name)
        infos = []
        for number in range(shards):
            writer = ShardWriter(folder, f"train-{number:05}", vocab_size=70_000, eos_id=EOS, fingerprint="ab" * 32)
            for length in rng.integers(1, 120, size=20).tolist():
                writer.add(rng.integers(3, 70_000, size=length), length)
            infos.append(writer.publish())
        streams[name] = TokenStream(Split(infos))
    return streams


def real_order(streams: dict[str, TokenStream]) -> SampleOrder:
    tokens = {name: stream.tokens for name, stream in streams.items()}
    return SampleOrder(seed=5, seq_len=32, tokens=tokens, stages=[Stage(0, {"en": 3, "zh": 1}), Stage(100, {"zh": 1})])


def test_two_ranks_then_one_then_two_read_the_same_samples(real_streams: dict[str, TokenStream]) -> None:
    order = real_order(real_streams)
    whole = read_steps(order, real_streams, ranks=1, micro=4, accumulation=4, first=0, steps=30)
    parts: dict[int, np.ndarray] = {}
    for ranks, micro, accumulation, steps in ((2, 2, 4, 7), (1, 8, 2, 9), (2, 4, 2, 5), (4, 1, 4, 9)):
        parts |= read_steps(
            order, real_streams, ranks=ranks, micro=micro, accumulation=accumulation, first=len(parts), steps=steps
        )
    assert sorted(parts) == sorted(whole)
    assert all((parts[sample] == whole[sample]).all() for sample in whole)


def test_real_windows_cross_shards_and_hold_the_tokens_of_the_stream(real_streams: dict[str, TokenStream]) -> None:
    order = real_order(real_streams)
    everything = {name: stream.read(0, stream.tokens) for name, stream in real_streams.items()}
    edges = np.cumsum([shard.tokens for shard in real_streams["en"].split.shards])[:-1]
    crossing = 0
    seen = read_steps(order, real_streams, ranks=1, micro=2, accumulation=1, first=0, steps=100)
    for sample, window in seen.items():
        address = order.locate(sample)
        start = address.window * 32
        assert (window == everything[address.source][start : start + 33]).all()
        crossing += address.source == "en" and bool(((edges > start) & (edges < start + 33)).any())
    assert crossing


@pytest.mark.parametrize("n", [23, 24, 25])
def test_resuming_anywhere_equals_never_stopping_also_at_an_epoch_end(n: int) -> None:
    order, streams = one_source(n)
    shape = {"ranks": 2, "micro": 2, "accumulation": 2}
    whole = read_steps(order, streams, first=0, steps=9, **shape)
    for step in range(1, 9):  # step 3 is the end of the first epoch at n = 24
        rest = read_steps(order, streams, first=step * 8, steps=9 - step, **shape)
        assert all((rest[sample] == whole[sample]).all() for sample in rest)


def test_what_was_consumed_counts_not_what_was_prefetched() -> None:
    order, streams = one_source(1000)
    stream, asked = streams["a"], 0
    read_too_early: list[int] = []

    def check() -> None:
        if len(stream.reads) >= 2 * (asked + 16):
            read_too_early.append(len(stream.reads))

    stream.before_read = check
    with loader_of(order, streams, ranks=2, micro=2, accumulation=2, first=5, prefetch=16) as loader:
        consumed = []
        for _ in range(5):
            asked += 1
            next(loader)
            consumed.append(loader.consumed_samples)
        (thread,) = prefetchers()
        wait_until(lambda: len(stream.reads) >= 2 * 16 and is_waiting(thread))
    assert len(stream.reads) == 2 * 16  # the first eight are not given out yet
    assert read_too_early == []
    assert consumed == [5, 13, 13, 21, 21]


# ---------------------------------------------------------------- the thread


def test_windows_are_announced_some_hundreds_ahead() -> None:
    order, streams = one_source(5000)
    ahead = []
    stream = streams["a"]
    stream.before_read = lambda: ahead.append(len(stream.announced) - len(stream.reads))
    with loader_of(order, streams, micro=3) as loader:
        for _ in range(400):
            next(loader)
    assert min(ahead) >= READ_AHEAD_WINDOWS
    assert max(ahead) <= 3 * READ_AHEAD_WINDOWS
    assert stream.announced[: len(stream.reads)] == stream.reads


def test_a_failing_read_surfaces_after_the_batches_before_it_and_stays() -> None:
    order, streams = one_source(1000)

    def fail_at_seven() -> None:
        if len(streams["a"].reads) == 7:
            raise DataFormatError("train-00003.bin: cut since it was opened")

    streams["a"].before_read = fail_at_seven
    with loader_of(order, streams, micro=2) as loader:
        assert [next(loader).samples.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        for _ in range(3):
            with pytest.raises(DataFormatError, match="train-00003"):
                next(loader)


def test_a_shard_cut_while_in_use_surfaces(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train-00000", vocab_size=1000, eos_id=EOS, fingerprint="ab" * 32)
    writer.add(np.arange(3, 900), 900)
    info = writer.publish()
    stream = TokenStream(Split([info]))
    order = SampleOrder(seed=1, seq_len=16, tokens={"a": stream.tokens})
    with loader_of(order, {"a": stream}) as loader:
        next(loader)
        with info.bin_path.open("r+b") as file:
            file.truncate(4200)
        with pytest.raises(DataFormatError, match="cut"):
            list(itertools.islice(loader, 2 * READ_AHEAD_WINDOWS))  # what was read before the cut comes first


@pytest.mark.parametrize("taken", [0, 1, 50])
def test_closing_early_ends_the_thread_where_it_waits(taken: int) -> None:
    """It has made two lists of four and waits until one is given out; told to stop, it reads no more."""
    order, streams = one_source(1000)
    stream = streams["a"]
    loader = loader_of(order, streams)
    for _ in range(taken):
        next(loader)
    (thread,) = prefetchers()
    made = taken // 4 * 4 + 8
    wait_until(lambda: len(stream.reads) >= 2 * made and is_waiting(thread))
    loader.close()
    loader.close()
    assert prefetchers() == []
    assert len(stream.reads) == 2 * made
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize("prefetch", [1, 2, 3, 8])
def test_no_more_batches_are_made_than_asked_for_and_none_is_lost(prefetch: int) -> None:
    order, streams = one_source(1000)
    with loader_of(order, streams, prefetch=prefetch) as loader:
        (thread,) = prefetchers()
        wait_until(lambda: len(streams["a"].reads) >= 2 * prefetch and is_waiting(thread))
        assert len(streams["a"].reads) == 2 * prefetch
        assert [next(loader).samples.tolist() for _ in range(20)] == [[2 * n, 2 * n + 1] for n in range(20)]


def test_who_waits_for_a_batch_hears_that_the_loader_is_closed() -> None:
    order, streams = one_source(1000)
    reading, go_on, heard = threading.Event(), threading.Event(), []

    def wait() -> None:
        reading.set()
        go_on.wait(120)

    streams["a"].before_read = wait
    loader = loader_of(order, streams)

    def consume() -> None:
        with pytest.raises(ValueError, match="closed"):
            next(loader)
        heard.append(True)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert reading.wait(120)
    closer = threading.Thread(target=loader.close)
    closer.start()
    consumer.join(120)
    go_on.set()
    closer.join(120)
    assert heard == [True]


def test_leaving_by_an_exception_ends_the_thread() -> None:
    order, streams = one_source(1000)

    def leave() -> None:
        with loader_of(order, streams) as loader:
            next(loader)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()


def test_a_dropped_loader_ends_its_thread() -> None:
    order, streams = one_source(1000)
    loader = loader_of(order, streams)
    next(loader)
    del loader
    gc.collect()  # the fixture then finds no thread


def test_a_read_that_hangs_does_not_hang_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread still stands in its read when `close` is back; only then is it let go."""
    monkeypatch.setattr("data_pipeline.loader._CLOSE_SECONDS", 0.2)
    order, streams = one_source(1000)
    reading, release = threading.Event(), threading.Event()

    def hang() -> None:
        reading.set()
        release.wait()

    streams["a"].before_read = hang
    loader = loader_of(order, streams)
    assert reading.wait(120)
    try:
        loader.close()
        (thread,) = prefetchers()
    finally:
        release.set()
    thread.join(120)


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "next(loader); loader = [loader]"])
def test_the_interpreter_ends_with_a_loader_left_open(ending: str) -> None:
    program = (
        "from tests.data_pipeline.test_loader import loader_of, one_source\n"
        "loader = loader_of(*one_source(1000))\nnext(loader)\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_arrays_are_the_callers_own() -> None:
    order, streams = one_source(1000)
    with loader_of(order, streams) as loader:
        batch: Batch = next(loader)
        kept = batch.inputs.copy()
        batch.targets[:] = -100
        assert (batch.inputs == kept).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 2, "ranks": 2}, "rank 2 does not exist among 2"),
        ({"micro": 0}, "micro_batch_size 0"),
        ({"accumulation": 0}, "gradient_accumulation_steps 0"),
        ({"first": -1}, "first_sample -1"),
        ({"prefetch": 0}, "prefetch 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    order, streams = one_source(10)
    with pytest.raises(ValueError, match=message):
        loader_of(order, streams, **change)


def test_streams_of_another_data_set_are_refused() -> None:
    order, _ = one_source(10)
    with pytest.raises(ValueError, match="'a' has 30 tokens, the order counts 31"):
        loader_of(order, {"a": CountingStream(30)})
    with pytest.raises(ValueError, match="no stream for source 'a'"):
        loader_of(order, {})


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129])
def test_every_token_is_scored_once_behind_the_one_before_it(tokens: int, ranks: int) -> None:
    stream = CountingStream(tokens)
    scored: Counter[int] = Counter()
    shares = [list(evaluation_batches(stream, 8, 2, EOS, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in shares}) == 1
    assert len(shares[0]) == -(-tokens // (8 * 2 * ranks))
    for inputs, targets in itertools.chain(*shares):
        assert inputs.shape == targets.shape == (2, 8)
        for given, wanted in zip(inputs.reshape(-1).tolist(), targets.reshape(-1).tolist(), strict=True):
            if wanted == -100:
                assert given == EOS
            else:
                assert given == (EOS if wanted == 0 else wanted - 1)
                scored[wanted] += 1
    assert scored == Counter(range(tokens))
    assert evaluation_size(tokens, 777, 8) == evaluation_size(tokens, 777, 8, tokens)
    size = evaluation_size(tokens, 777, 8)
    assert (size.tokens, size.text_bytes, size.is_exact) == (tokens, 777.0, True)


@pytest.mark.parametrize("max_tokens", [8, 9, 40, 500, 999])
def test_a_cut_takes_whole_windows_spread_over_the_stream(max_tokens: int) -> None:
    scored: Counter[int] = Counter()
    for rank in range(2):
        for _, targets in evaluation_batches(CountingStream(1003), 8, 3, EOS, rank, 2, max_tokens):
            scored.update(targets[targets != -100].tolist())
    size = evaluation_size(1003, 3009, 8, max_tokens)
    assert set(scored.values()) == {1}
    assert scored.total() == size.tokens == max_tokens // 8 * 8
    assert size.text_bytes == pytest.approx(3 * size.tokens)
    assert not size.is_exact
    if max_tokens >= 40:
        assert max(scored) > 750
        assert min(scored) < 250


def test_evaluations_that_cannot_be_are_refused() -> None:
    for tokens, limit in ((0, None), (100, 7), (100, 0)):
        with pytest.raises(ValueError, match=r"nothing to evaluate|max_tokens"):
            evaluation_batches(CountingStream(tokens), 8, 2, EOS, 0, 1, limit)
    with pytest.raises(ValueError, match="rank 1 of 1"):
        evaluation_batches(CountingStream(9), 8, 2, EOS, 1, 1)
