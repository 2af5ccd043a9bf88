"""The documents of a step with an alarm, as text: RUN/alarms/step-00000123.jsonl, a row for each part that was read.

What `data_pipeline trace RUN --step N --json` tells, at the time of the alarm. Where a document stood in its input is
looked for only in sources so small that reading them again takes a moment; that command finds it in any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from data_pipeline.display import traced_as_json
from data_pipeline.shards import DataFormatError, Source
from data_pipeline.stream import TokenStream
from data_pipeline.trace import DocumentRead, TracedRead, documents_read, with_texts
from pretrain.inputs import Inputs
from pretrain.run_directory import write_text

SMALL_BYTES = 64_000_000  # of a source's text


def save_batch(path: Path, inputs: Inputs, step: int) -> None:
    """Write the documents that a step, from 1, reads. OSError or DataFormatError where that fails."""
    path.parent.mkdir(exist_ok=True)
    rows = [traced_as_json(one, inputs.steps, with_text=True) for one in _traced(inputs, step)]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _traced(inputs: Inputs, step: int) -> list[TracedRead]:
    """In the order of the samples and of the tokens within them."""
    sources = inputs.collection.sources
    streams = {name: TokenStream(source.splits["train"]) for name, source in sources.items()}
    reads = list(documents_read(inputs.order, streams, inputs.steps.samples(step - 1), inputs.packed))
    traced: dict[tuple[int, int, int], TracedRead] = {}
    for name in {read.source for read in reads}:
        own = [read for read in reads if read.source == name]
        found = _of_source(inputs, streams, own, with_files=_is_small(sources[name]))
        traced |= {(one.read.sample, one.read.document, one.read.start): one for one in found}
    return [traced[read.sample, read.document, read.start] for read in reads]


def _of_source(
    inputs: Inputs, streams: Mapping[str, TokenStream], reads: list[DocumentRead], *, with_files: bool
) -> list[TracedRead]:
    try:
        return with_texts(inputs.collection, streams, reads, inputs.codec, with_files=with_files)
    except DataFormatError:  # of its text: it was converted from token files, or is not what it was
        return with_texts(inputs.collection, streams, reads, inputs.codec, with_files=False)


def _is_small(source: Source) -> bool:
    return sum(split.text_bytes for split in source.splits.values()) <= SMALL_BYTES
