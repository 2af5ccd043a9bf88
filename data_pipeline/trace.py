"""Which documents a step read, and which steps read a document: the order of data and the document ends, asked twice.

Nothing was logged for this while training ran: the order is arithmetic and inverts. "Read" means that a token of the
document stood in the window, as input or as target; neighbouring windows share one token, which counts for both. In a
row of a packing plan only targets count: a token before a piece is there as its context, and each is a target once.
Which samples a step reads is `steps.Steps`' affair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from data_pipeline.order import Address, SampleOrder
from data_pipeline.origins import Lost, Origin, find_origins
from data_pipeline.packing_plan import PackingPlan
from data_pipeline.shards import Collection
from data_pipeline.stream import TokenStream
from tokenizer.codec import Codec


@dataclass(frozen=True)
class DocumentRead:
    """The part of one document that one sample read. `window` counts windows, or rows of a packing plan.

    `document` counts from 0 over the source's split, `shard` is the name of the shard that holds it; tokens `start`
    to `stop` (exclusive) of the document were read, of `document_tokens`, its EOS included.
    """

    sample: int
    source: str
    epoch: int
    window: int
    shard: str
    document: int
    document_tokens: int
    start: int
    stop: int


def documents_read(
    order: SampleOrder, streams: Mapping[str, TokenStream], samples: Iterable[int], plan: PackingPlan | None = None
) -> Iterator[DocumentRead]:
    """Every document of every sample given, in the order of the samples and of the tokens within them."""
    for sample in samples:
        address = order.locate(sample)
        stream = streams[address.source]
        for start, stop in _ranges(order, plan, address):
            number = stream.document_at(start)
            while number < stream.documents and stream.document(number)[0] < stop:
                yield _part_read(stream, sample, address, number, start, stop)
                number += 1


def reads_of_document(
    order: SampleOrder,
    streams: Mapping[str, TokenStream],
    source: str,
    document: int,
    *,
    samples: int,
    plan: PackingPlan | None = None,
) -> list[DocumentRead]:
    """Every time one of the first `samples` samples read part of a document, in the order of the samples.

    Cost: one inversion per epoch begun and window the document touches; a plan is searched through.
    ValueError for an unknown source or document. A document wholly behind the last window is in no sample: the list is
    empty.
    """
    if source not in order.tokens:
        raise ValueError(f"no source is called {source!r}; the sources are {', '.join(order.tokens)}")
    stream = streams[source]
    begin, end = stream.document(document)
    if plan is not None:
        windows: Sequence[int] = plan.rows_with(source, begin, end)
    else:
        first = max(0, -(-begin // order.seq_len) - 1)
        windows = range(first, min((end - 1) // order.seq_len, order.windows[source] - 1) + 1)
    epochs_begun = -(-order.counts(samples)[source] // max(1, order.windows[source]))
    found = []
    for epoch in range(epochs_begun):
        for window in windows:
            address = Address(source, epoch, window)
            sample = order.find(address)
            if sample is None or sample >= samples:
                continue
            for start, stop in _ranges(order, plan, address):
                if start < end and stop > begin:
                    found.append(_part_read(stream, sample, address, document, start, stop))
    return sorted(found, key=lambda read: (read.sample, read.start))


def _ranges(order: SampleOrder, plan: PackingPlan | None, address: Address) -> list[tuple[int, int]]:
    """The stream's tokens that a row reads, first and end: a window's inputs and targets, the targets of each piece."""
    if plan is not None:
        return [(start + 1, stop) for start, stop in plan.row(address.source, address.window)]
    start = address.window * order.seq_len
    return [(start, start + order.seq_len + 1)]


@dataclass(frozen=True)
class TracedRead:
    """A part that was read, as text, and where the document stood in its input (None: not asked for)."""

    read: DocumentRead
    text: str
    origin: Origin | Lost | None


def with_texts(
    collection: Collection,
    streams: Mapping[str, TokenStream],
    reads: Iterable[DocumentRead],
    codec: Codec,
    *,
    with_files: bool,
) -> list[TracedRead]:
    """The text of the parts read, EOS left out, in the order given; `with_files` finds each document's file and line.

    Finding costs reading the unit of work of each document again. DataFormatError: see `origins.find_origins`.
    """
    reads = list(reads)
    origins: dict[tuple[str, int], Origin | Lost] = {}
    if with_files:
        for name in sorted({read.source for read in reads}):
            wanted = sorted({read.document for read in reads if read.source == name})
            for _, number, origin in find_origins(collection.sources[name], {"train": wanted}):
                origins[name, number] = origin
    traced = []
    for read in reads:
        begin, _ = streams[read.source].document(read.document)
        stop = min(read.stop, read.document_tokens - 1)
        ids = streams[read.source].read(begin + read.start, begin + max(read.start, stop))
        traced.append(TracedRead(read, codec.decode(ids), origins.get((read.source, read.document))))
    return traced


def _part_read(
    stream: TokenStream, sample: int, address: Address, document: int, start: int, stop: int
) -> DocumentRead:
    begin, end = stream.document(document)
    shards = stream.split.shards
    shard = bisect_right(list(accumulate(shard.documents for shard in shards)), document)
    return DocumentRead(
        sample=sample,
        source=address.source,
        epoch=address.epoch,
        window=address.window,
        shard=shards[shard].stem,
        document=document,
        document_tokens=end - begin,
        start=max(start, begin) - begin,
        stop=min(stop, end) - begin,
    )
