"""Tracing both ways over real shards, against the plain answer: look at every token."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.order import SampleOrder, Stage
from data_pipeline.shards import ShardWriter, Split
from data_pipeline.stream import TokenStream
from data_pipeline.trace import documents_read, reads_of_document

SEQ_LEN = 16
SAMPLES = 150
EOS = 2


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStream]:
    """Documents of 1 to 70 tokens, one beginning where a window does, in shards of several documents or of one."""
    rng = np.random.default_rng(2)
    lengths = {
        "en": [[15, 15, 16, 14, 1, 30, 0, 0, 69], [64], [3, 12, 40, 31]],
        "zh": [[5, 5, 5], [33, 14, 15, 16, 0]],
    }
    streams = {}
    for name, shards in lengths.items():
        folder: Path = tmp_path_factory.mktemp(name)
        infos = []
        for number, documents in enumerate(shards):
            writer = ShardWriter(folder, f"train-{number:05}", vocab_size=100, eos_id=EOS, fingerprint="ab" * 32)
            for length in documents:
                writer.add(rng.integers(3, 100, size=length), length)
            infos.append(writer.publish())
        streams[name] = TokenStream(Split(infos))
    return streams


@pytest.fixture(scope="module")
def order(streams: dict[str, TokenStream]) -> SampleOrder:
    tokens = {name: stream.tokens for name, stream in streams.items()}
    stages = [Stage(0, {"en": 2, "zh": 1}), Stage(61, {"en": 1})]
    return SampleOrder(seed=9, seq_len=SEQ_LEN, tokens=tokens, stages=stages)


def token_by_token(order: SampleOrder, streams: dict[str, TokenStream]) -> set[tuple[int, str, str, int, int, int]]:
    """(sample, source, shard, document, start, stop), found by labelling every token of every shard."""
    found = set()
    for name, stream in streams.items():
        labels, document = [], 0
        for shard in stream.split.shards:
            place = 0
            for token in np.fromfile(shard.bin_path, "<u2", offset=4096).tolist():
                labels.append((shard.stem, document, place))
                place += 1
                if token == EOS:
                    document, place = document + 1, 0
        assert document == stream.documents
        for sample in range(SAMPLES):
            address = order.locate(sample)
            if address.source == name:
                window = labels[address.window * SEQ_LEN : (address.window + 1) * SEQ_LEN + 1]
                for (shard_name, number), places in itertools.groupby(window, key=lambda label: label[:2]):
                    inside = [place for _, _, place in places]
                    found.add((sample, name, shard_name, number, inside[0], inside[-1] + 1))
    return found


def test_a_sample_names_every_document_it_read(order: SampleOrder, streams: dict[str, TokenStream]) -> None:
    reads = list(documents_read(order, streams, range(SAMPLES)))
    assert {(r.sample, r.source, r.shard, r.document, r.start, r.stop) for r in reads} == token_by_token(order, streams)
    assert [read.sample for read in reads] == sorted(read.sample for read in reads)
    for read in reads:
        start, stop = streams[read.source].document(read.document)
        assert read.document_tokens == stop - start
        address = order.locate(read.sample)
        assert (read.epoch, read.window) == (address.epoch, address.window)
    for sample, parts in itertools.groupby(reads, key=lambda read: read.sample):
        assert sum(part.stop - part.start for part in parts) == SEQ_LEN + 1, sample


def test_a_document_names_every_sample_that_read_it(order: SampleOrder, streams: dict[str, TokenStream]) -> None:
    forwards = list(documents_read(order, streams, range(SAMPLES)))
    backwards = []
    for source, stream in streams.items():
        for document in range(stream.documents):
            reads = reads_of_document(order, streams, source, document, samples=SAMPLES)
            assert [read.sample for read in reads] == sorted({read.sample for read in reads})
            assert {(read.source, read.document) for read in reads} <= {(source, document)}
            backwards += reads
    assert set(backwards) == set(forwards)
    assert len(backwards) == len(forwards)


def test_the_number_of_samples_is_a_bound(order: SampleOrder, streams: dict[str, TokenStream]) -> None:
    everything = reads_of_document(order, streams, "en", 8, samples=SAMPLES)
    for samples in (0, 1, everything[1].sample, everything[1].sample + 1):
        expected = [read for read in everything if read.sample < samples]
        assert reads_of_document(order, streams, "en", 8, samples=samples) == expected


def test_a_document_behind_the_last_window_is_never_read(order: SampleOrder, streams: dict[str, TokenStream]) -> None:
    covered = order.windows["zh"] * SEQ_LEN + 1
    behind = [n for n in range(streams["zh"].documents) if streams["zh"].document(n)[0] >= covered]
    assert behind
    read = {read.document for read in documents_read(order, streams, range(SAMPLES)) if read.source == "zh"}
    assert read == set(range(streams["zh"].documents)) - set(behind)


def test_unknown_names_are_refused(order: SampleOrder, streams: dict[str, TokenStream]) -> None:
    with pytest.raises(ValueError, match="'fr'"):
        reads_of_document(order, streams, "fr", 0, samples=10)
    with pytest.raises(ValueError, match="document 999"):
        reads_of_document(order, streams, "en", 999, samples=10)
