"""Batches of one rank, read ahead by one thread, in the order that `order.py` states.

Worker processes would copy every batch between processes; one thread keeps up with any step. Some hundred windows ahead
it takes what is in memory and asks the system to fetch the rest, which is then there when it is wanted.
Nothing is remembered here: a loader begun at the sample where another stopped goes on as that one would have.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.order import Addresses, SampleOrder
from data_pipeline.packing import number_documents
from data_pipeline.packing_plan import PackingPlan
from data_pipeline.steps import Steps

READ_AHEAD_WINDOWS = 256
LOCATED_AT_ONCE = 4096  # at most; a loader begins with few, so that the first batch is there at once
IGNORED_TARGET = -100
_CLOSE_SECONDS = 10.0
_LAST_SAMPLE = 2**62

Int64Array = npt.NDArray[np.int64]
Pieces: TypeAlias = Sequence[tuple[int, int]]  # (first, end) of the tokens read: targets, and the one before them


class Stream(Protocol):
    """What is read here: a row of tokens, as `stream.TokenStream` is."""

    tokens: int
    dtype: np.dtype[Any]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]: ...

    def read_into(self, start: int, row: npt.NDArray[Any]) -> None: ...

    def try_read_into(self, start: int, row: npt.NDArray[Any]) -> bool: ...

    def will_need(self, start: int, stop: int) -> None: ...


@dataclass(frozen=True)
class Batch:
    """A micro-batch. inputs, targets: int64 (micro_batch_size, seq_len); samples: global numbers (micro_batch_size,).

    targets[:, t] is the token behind inputs[:, t], or -100 where a row has none. `documents` numbers the documents of
    each row, (micro_batch_size, seq_len), where attention is to stay within them. The arrays are the caller's own.
    """

    inputs: Int64Array
    targets: Int64Array
    samples: Int64Array
    documents: Int64Array | None = None


class Loader:
    """The micro-batches of one rank from `first_sample` on, without end. An iterator and a context manager.

    With B = micro_batch_size x gradient_accumulation_steps x world_size, step s reads samples first_sample + sB to
    first_sample + (s+1)B - 1; row j of its micro-step m on rank r is number (m x world_size + r) x micro_batch_size + j
    of them: all ranks read one global order, each its slice. Micro-steps do not know how many of them a step has: where
    that changes on the way, `steps` says it (first_sample is then the first of a step), for `consumed_samples` alone.

    Orders that isolate documents need `eos_id`, those over the rows of a plan also that `plan`.

    One thread keeps up to `prefetch` batches ready. An error in it is raised by `next` after the batches read before
    it, and again at every further call. ValueError: numbers that do not fit, streams that are not those of the order.
    """

    def __init__(
        self,
        order: SampleOrder,
        streams: Mapping[str, Stream],
        *,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        first_sample: int,
        prefetch: int = 8,
        eos_id: int | None = None,
        plan: PackingPlan | None = None,
        steps: Steps | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist among {world_size} ranks")
        if min(micro_batch_size, gradient_accumulation_steps, prefetch) < 1 or not 0 <= first_sample <= _LAST_SAMPLE:
            raise ValueError(
                f"micro_batch_size {micro_batch_size}, gradient_accumulation_steps {gradient_accumulation_steps} and "
                f"prefetch {prefetch} must be at least 1, first_sample {first_sample} 0 to 2^62"
            )
        for name, tokens in order.tokens.items():
            if name not in streams:
                raise ValueError(f"there is no stream for source {name!r}")
            if streams[name].tokens != tokens:
                raise ValueError(f"source {name!r} has {streams[name].tokens:,} tokens, the order counts {tokens:,}")
        kind = _row_kind(order, streams, eos_id, plan)
        self._first_sample = first_sample
        self._accumulation = gradient_accumulation_steps
        self._micro_step_size = micro_batch_size * world_size
        self._steps = steps
        self._given = 0
        rows = _Rows(order, kind, rank, world_size, micro_batch_size, first_sample)
        self._thread = _Prefetcher(rows, prefetch)
        # The thread knows nothing of this object, so a loader that is dropped, or still open when the interpreter
        # ends, stops its thread too.
        self._finalizer = weakref.finalize(self, self._thread.stop)
        self._thread.start()

    @property
    def consumed_samples(self) -> int:
        """The global sample at which to resume: whole steps given out count, what is only prefetched does not."""
        if self._steps is not None:
            reached = self._first_sample + self._given * self._micro_step_size
            return self._steps.samples_before(self._steps.step_of(reached))
        return self._first_sample + self._given // self._accumulation * self._accumulation * self._micro_step_size

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch. ValueError when closed; else whatever the reading thread met."""
        if not self._finalizer.alive:
            raise ValueError("this loader is closed")
        batch = self._thread.take()
        self._given += 1
        return batch

    def ready(self, seconds: float) -> bool:
        """Wait at most so long for the next micro-batch (or its error); whether `next` would have it at once."""
        return not self._finalizer.alive or self._thread.ready(seconds)

    def close(self) -> None:
        """Stop and join the thread (waiting at most 10 s for a read that hangs). May be called again."""
        self._finalizer()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def samples_of_micro_steps(
    micro_steps: Int64Array, first_sample: int, rank: int, world_size: int, micro_batch_size: int
) -> Int64Array:
    """The samples that one rank reads in its micro-steps of these numbers, from 0: (micro_steps, micro_batch_size)."""
    starts = first_sample + (micro_steps * world_size + rank) * micro_batch_size
    samples: Int64Array = starts[:, None] + np.arange(micro_batch_size)
    return samples


class _Reads:
    """Tokens of some rows, wanted soon: what is in memory is taken at once, the rest when they are wanted."""

    def __init__(self) -> None:
        self._missing: list[tuple[Stream, int, npt.NDArray[Any]]] = []

    def begin(self, stream: Stream, start: int, row: npt.NDArray[Any]) -> None:
        """Fill `row` with the tokens from `start` on, now or in `finish`."""
        if not stream.try_read_into(start, row):
            self._missing.append((stream, start, row))

    def finish(self) -> None:
        """Wait for what is missing."""
        for stream, start, row in self._missing:
            stream.read_into(start, row)


class _Rows:
    """Reads the micro-batches of one rank in order, begun some hundred rows ahead."""

    def __init__(self, order: SampleOrder, kind: _RowKind, rank: int, world_size: int, micro: int, first: int) -> None:
        self._order, self._kind = order, kind
        self._rank, self._world_size, self._micro, self._first = rank, world_size, micro, first

    def batches(self) -> Iterator[Batch]:
        begun: deque[tuple[Int64Array, list[Any], _Reads, Any]] = deque()
        for samples, rows in self._plan():
            reads = _Reads()
            begun.append((samples, rows, reads, self._kind.begin(rows, reads)))
            if len(begun) * self._micro > READ_AHEAD_WINDOWS:
                samples, rows, reads, tokens = begun.popleft()
                reads.finish()
                yield self._kind.batch(samples, rows, tokens)

    def _plan(self) -> Iterator[tuple[Int64Array, list[Any]]]:
        """Each micro-batch's samples and where its rows stand. Located in blocks: arithmetic on arrays is cheap."""
        begin, at_once = 0, -(-READ_AHEAD_WINDOWS // self._micro)
        while True:
            numbers = np.arange(begin, begin + at_once, dtype=np.int64)
            samples = samples_of_micro_steps(numbers, self._first, self._rank, self._world_size, self._micro)
            rows = self._kind.places(self._order.locate_many(samples))
            for place, row in enumerate(samples):
                yield row.copy(), rows[place * self._micro : (place + 1) * self._micro]
            begin, at_once = begin + at_once, min(2 * at_once, -(-LOCATED_AT_ONCE // self._micro))


class _RowKind(Protocol):
    """Knows what rows are made of; where a row stands is its own affair."""

    def places(self, found: Addresses) -> list[Any]:
        """Where each row found stands."""

    def begin(self, rows: list[Any], reads: _Reads) -> Any:
        """Begin to read these rows; the arrays that will hold their tokens."""

    def batch(self, samples: Int64Array, rows: list[Any], tokens: Any) -> Batch:
        """The micro-batch of these rows, when all is read."""


class _Windows:
    """Windows of the streams: a row is its stream and its first token. With `eos_id` their documents are numbered."""

    def __init__(self, streams: Mapping[str, Stream], seq_len: int, eos_id: int | None) -> None:
        self._streams, self._seq_len, self._eos_id = streams, seq_len, eos_id

    def places(self, found: Addresses) -> list[tuple[Stream, int]]:
        streams = [self._streams[name] for name in found.names]
        starts = (found.windows * self._seq_len).tolist()
        return list(zip(map(streams.__getitem__, found.sources.tolist()), starts, strict=True))

    def begin(self, rows: list[tuple[Stream, int]], reads: _Reads) -> npt.NDArray[Any]:
        windows = np.empty((len(rows), self._seq_len + 1), rows[0][0].dtype)  # one tokenizer: all streams' dtype
        for window, (stream, start) in zip(windows, rows, strict=True):
            reads.begin(stream, start, window)
        return windows

    def batch(self, samples: Int64Array, rows: list[tuple[Stream, int]], tokens: npt.NDArray[Any]) -> Batch:
        inputs, targets = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        documents = None if self._eos_id is None else number_documents(inputs, self._eos_id)
        return Batch(inputs, targets, samples, documents)


class _PackedRows:
    """Rows of a plan: piece behind piece, each a document of its own; behind the last EOS without targets."""

    def __init__(self, streams: Mapping[str, Stream], seq_len: int, eos_id: int, plan: PackingPlan) -> None:
        self._streams, self._seq_len, self._eos_id, self._plan = streams, seq_len, eos_id, plan

    def places(self, found: Addresses) -> list[tuple[Stream, Pieces]]:
        names = [found.names[source] for source in found.sources.tolist()]
        rows = zip(names, found.windows.tolist(), strict=True)
        return [(self._streams[name], self._plan.row(name, row)) for name, row in rows]

    def begin(self, rows: list[tuple[Stream, Pieces]], reads: _Reads) -> list[list[npt.NDArray[Any]]]:
        tokens = []
        for stream, pieces in rows:
            tokens.append([np.empty(stop - max(0, start), stream.dtype) for start, stop in pieces])
            for (start, _), piece in zip(pieces, tokens[-1], strict=True):
                reads.begin(stream, max(0, start), piece)
        return tokens

    def batch(
        self, samples: Int64Array, rows: list[tuple[Stream, Pieces]], tokens: list[list[npt.NDArray[Any]]]
    ) -> Batch:
        shape = len(rows), self._seq_len
        inputs, targets = np.full(shape, self._eos_id, np.int64), np.full(shape, IGNORED_TARGET, np.int64)
        documents = np.empty(shape, np.int64)
        for row, (_, pieces) in enumerate(rows):
            begin = 0
            for number, ((start, stop), piece) in enumerate(zip(pieces, tokens[row], strict=True)):
                end = begin + stop - start - 1
                targets[row, begin:end] = piece[begin - end :]
                # The stream's first document has no token before it: its context is the EOS written there already.
                inputs[row, end - len(piece) + 1 : end] = piece[:-1]
                documents[row, begin:end] = number
                begin = end
            documents[row, begin:] = len(pieces)
        return Batch(inputs, targets, samples, documents)


def _row_kind(
    order: SampleOrder, streams: Mapping[str, Stream], eos_id: int | None, plan: PackingPlan | None
) -> _RowKind:
    """What the rows of an order are made of. ValueError: what its packing needs is not there."""
    if order.packing == "concat":
        return _Windows(streams, order.seq_len, None)
    if eos_id is None:
        raise ValueError(f"packing {order.packing!r} needs the EOS id")
    if order.packing == "concat_masked":
        return _Windows(streams, order.seq_len, eos_id)
    if plan is None or plan.planned.rows != order.windows:
        raise ValueError("the order goes over the rows of a packing plan, and this is not the one")
    return _PackedRows(streams, order.seq_len, eos_id, plan)


class _Prefetcher(threading.Thread):
    """Keeps up to `prefetch` batches of `_Rows` ready until it is stopped or an error ends it.

    They go over in two lists in turn: at a hand-over both threads want the interpreter, which costs as much as a batch.
    """

    def __init__(self, rows: _Rows, prefetch: int) -> None:
        super().__init__(name="batch-prefetch", daemon=True)
        self._rows = rows
        # Two queues without a Python lock: a hand-over costs a microsecond, where Semaphore and Queue cost ten.
        self._ready: queue.SimpleQueue[list[Batch | BaseException]] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[int] = queue.SimpleQueue()  # lengths of lists to be made
        for length in (prefetch - prefetch // 2, prefetch // 2):
            if length:
                self._places.put(length)
        self._stopped = False
        self._given: deque[Batch | BaseException] = deque()  # what is left of the list now given out
        self._length = 0  # of that list when it was whole

    def run(self) -> None:
        batches = self._rows.batches()
        while True:
            length = self._places.get()
            made: list[Batch | BaseException] = []
            while len(made) < length:
                if self._stopped:
                    return
                try:
                    made.append(next(batches))
                except BaseException as error:  # whatever it is, the thread that asked for the batch must hear of it
                    self._ready.put([*made, error])
                    return
            self._ready.put(made)

    def ready(self, seconds: float) -> bool:
        if not self._given:
            try:
                self._receive(seconds)
            except queue.Empty:
                return False
        return True

    def _receive(self, seconds: float | None = None) -> None:
        self._given.extend(self._ready.get(timeout=seconds))
        self._length = len(self._given)

    def take(self) -> Batch:
        if not self._given:
            self._receive()
        found = self._given[0]
        if isinstance(found, BaseException):
            raise found
        self._given.popleft()
        if not self._given:
            self._places.put(self._length)
        return found

    def stop(self) -> None:
        self._stopped = True
        self._places.put(1)
        self._ready.put([ValueError("this loader is closed")])  # for whoever waits for a batch just now
        if threading.current_thread() is not self:
            self.join(_CLOSE_SECONDS)


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Scored:
    """How much of a stream an evaluation scores, and the UTF-8 bytes of source text that stand for it."""

    windows: int
    tokens: int
    text_bytes: float
    is_exact: bool


def evaluation_size(tokens: int, text_bytes: int, seq_len: int, max_tokens: int | None = None) -> Scored:
    """What `evaluation_batches` scores of a stream of `tokens` tokens from `text_bytes` bytes of source text.

    Uncut, each token once (every EOS too), so nats / text_bytes is exact. Cut by `max_tokens`, max_tokens // seq_len
    whole windows evenly spread over the stream; the shards keep no bytes per window, so text_bytes is then in
    proportion to the tokens, an estimate, and `is_exact` is False. ValueError: a stream without tokens, or
    max_tokens below one window.
    """
    if tokens < 1 or seq_len < 1:
        raise ValueError(f"{tokens} tokens in windows of {seq_len}: there is nothing to evaluate")
    windows = -(-tokens // seq_len)
    if max_tokens is None or max_tokens >= tokens:
        return Scored(windows, tokens, float(text_bytes), True)
    if max_tokens < seq_len:
        raise ValueError(f"evaluation.max_tokens is {max_tokens:,}, less than one window of {seq_len:,} tokens")
    windows = max_tokens // seq_len
    return Scored(windows, windows * seq_len, text_bytes * windows * seq_len / tokens, False)


def evaluation_batches(
    stream: Stream,
    seq_len: int,
    batch_size: int,
    eos_id: int,
    rank: int,
    world_size: int,
    max_tokens: int | None = None,
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """(inputs, targets) of one rank, int64 (batch_size, seq_len) each; the targets of all ranks are the stream, once.

    One EOS before the stream is the context of its first token: window k has targets [kT, kT+T) and the tokens before
    them as inputs. Behind the stream's end, targets are -100 and inputs EOS. Every rank gets the same number of
    batches, the last ones all -100 where windows run out. With `max_tokens` see `evaluation_size`.
    """
    chosen = evaluation_size(stream.tokens, 0, seq_len, max_tokens).windows
    total = -(-stream.tokens // seq_len)
    if not 0 <= rank < world_size or batch_size < 1:
        raise ValueError(f"rank {rank} of {world_size} with a batch_size of {batch_size} is not possible")

    def span(number: int) -> tuple[int, int]:
        start = number * total // chosen * seq_len
        return max(0, start - 1), min(start + seq_len, stream.tokens)

    def rows(batch: int) -> list[int]:
        first = (batch * world_size + rank) * batch_size
        return list(range(first, min(first + batch_size, chosen)))

    def batches() -> Iterator[tuple[Int64Array, Int64Array]]:
        for batch in range(-(-chosen // (world_size * batch_size))):
            for number in rows(batch + 1):
                stream.will_need(*span(number))
            inputs = np.full((batch_size, seq_len), eos_id, np.int64)
            targets = np.full((batch_size, seq_len), IGNORED_TARGET, np.int64)
            for row, number in enumerate(rows(batch)):
                tokens = stream.read(*span(number))
                scored = tokens if number == 0 else tokens[1:]
                targets[row, : len(scored)] = scored
                context = tokens[:-1]
                begin = 1 if number == 0 else 0
                inputs[row, begin : begin + len(context)] = context
            yield inputs, targets

    return batches()
