"""Which documents a step read, and which steps read a document: the order of data and the document ends, asked twice.

Nothing was logged for this while training ran: the order is arithmetic and inverts. "Read" means that a token of the
document stood in the window, as input or as target; neighbouring windows share one token, which counts for both.
In the functions steps are counted from 0: step s reads the samples s x global_batch_size up to the next step's first.
A run cannot change its batch size on the way (a resume refuses), so this holds for all of its steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from data_pipeline.order import Address, SampleOrder
from data_pipeline.origins import Lost, Origin, find_origins
from data_pipeline.shards import Collection, TokenStream
from tokenizer.codec import Codec


@dataclass(frozen=True)
class DocumentRead:
    """The part of one document that one sample read.

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


def samples_of_step(step: int, global_batch_size: int) -> range:
    """The global sample numbers of a step (from 0). ValueError for a step below 0 or a batch below 1."""
    if step < 0 or global_batch_size < 1:
        raise ValueError(f"step {step} with a global batch of {global_batch_size} does not exist")
    return range(step * global_batch_size, (step + 1) * global_batch_size)


def documents_read(
    order: SampleOrder, streams: Mapping[str, TokenStream], samples: Iterable[int]
) -> Iterator[DocumentRead]:
    """Every document of every sample given, in the order of the samples and of the tokens within them."""
    for sample in samples:
        address = order.locate(sample)
        stream = streams[address.source]
        start = address.window * order.seq_len
        number = stream.document_at(start)
        while number < stream.documents and stream.document(number)[0] <= start + order.seq_len:
            yield _part_read(order, stream, sample, address, number)
            number += 1


def reads_of_document(
    order: SampleOrder, streams: Mapping[str, TokenStream], source: str, document: int, *, samples: int
) -> list[DocumentRead]:
    """Every time one of the first `samples` samples read part of a document, in the order of the samples.

    Cost: one inversion per epoch begun and window the document touches. ValueError for an unknown source or document.
    A document wholly behind the last window is in no window, so in no sample: the list is empty.
    """
    if source not in order.tokens:
        raise ValueError(f"no source is called {source!r}; the sources are {', '.join(order.tokens)}")
    stream = streams[source]
    begin, end = stream.document(document)
    first = max(0, -(-begin // order.seq_len) - 1)
    last = min((end - 1) // order.seq_len, order.windows[source] - 1)
    epochs_begun = -(-order.counts(samples)[source] // max(1, order.windows[source]))
    found = []
    for epoch in range(epochs_begun):
        for window in range(first, last + 1):
            address = Address(source, epoch, window)
            sample = order.find(address)
            if sample is not None and sample < samples:
                found.append(_part_read(order, stream, sample, address, document))
    return sorted(found, key=lambda read: read.sample)


@dataclass(frozen=True)
class Told:
    """A part that was read, as text, and where the document stood in its input (None: not asked for)."""

    read: DocumentRead
    text: str
    origin: Origin | Lost | None


def tell(
    collection: Collection,
    streams: Mapping[str, TokenStream],
    reads: Iterable[DocumentRead],
    codec: Codec,
    *,
    with_files: bool,
) -> list[Told]:
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
    told = []
    for read in reads:
        begin, _ = streams[read.source].document(read.document)
        stop = min(read.stop, read.document_tokens - 1)
        ids = streams[read.source].read(begin + read.start, begin + max(read.start, stop))
        told.append(Told(read, codec.decode(ids), origins.get((read.source, read.document))))
    return told


def _part_read(order: SampleOrder, stream: TokenStream, sample: int, address: Address, document: int) -> DocumentRead:
    begin, end = stream.document(document)
    start = address.window * order.seq_len
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
        stop=min(start + order.seq_len + 1, end) - begin,
    )
