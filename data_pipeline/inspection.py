"""What a collection holds, for people: its sums, and its documents and training windows as text with boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.origins import Lost, find_origins
from data_pipeline.shards import SPLITS, Collection, DataFormatError, Source, Split, SplitName
from data_pipeline.stream import TokenStream
from tokenizer.codec import Codec


@dataclass(frozen=True)
class Segment:
    """The part of one document that stands in a row of tokens. `begins`: its first token does; `ended`: its EOS."""

    document: int
    text: str
    tokens: int
    begins: bool
    ended: bool
    ids: list[int]


def summarize(collection: Collection) -> dict[str, Any]:
    """Sums of every source and split, drops and notes by reason; ready for JSON."""
    return {
        "path": str(collection.path),
        "manifest_sha256": collection.manifest_sha256,
        "tokenizer": {
            "fingerprint": collection.fingerprint,
            "vocab_size": collection.vocab_size,
            "eos_id": collection.eos_id,
        },
        "sources": {
            name: {
                **{split: summarize_split(source.splits[split]) for split in SPLITS},
                "documents_read": source.manifest["documents_read"],
                "dropped": source.manifest["dropped"],
                "notes": source.manifest["notes"],
            }
            for name, source in collection.sources.items()
        },
    }


def summarize_split(split: Split) -> dict[str, Any]:
    """A split's counts, and the bytes of text that one token stands for (None when there are no tokens)."""
    return {
        "documents": split.documents,
        "tokens": split.tokens,
        "text_bytes": split.text_bytes,
        "bytes_per_token": split.text_bytes / split.tokens if split.tokens else None,
        "shards": len(split.shards),
    }


def choose_source(collection: Collection, name: str | None) -> Source:
    """The source of this name; the only one where no name is given. DataFormatError names those there are."""
    names = list(collection.sources)
    if name is None and len(names) == 1:
        name = names[0]
    if name is None or name not in collection.sources:
        asked = "which source?" if name is None else f"there is no source {name!r};"
        raise DataFormatError(f"{collection.path}: {asked} say --source with one of {', '.join(names)}")
    return collection.sources[name]


def choose_codec(collection: Collection) -> Codec:
    """The collection's own tokenizer, proven to be the one its tokens were made with."""
    codec = Codec.load(collection.path / "tokenizer")
    if codec.fingerprint != collection.fingerprint:
        raise DataFormatError(
            f"{codec.folder}: tokenizer {codec.fingerprint[:12]}, but the tokens are of {collection.fingerprint[:12]}"
        )
    return codec


def document_segments(source: Source, split: SplitName, number: int, codec: Codec) -> list[Segment]:
    """Document `number` (from 0) of a split, whole, as one segment. DataFormatError outside the split."""
    stream = TokenStream(source.splits[split])
    try:
        start, stop = stream.document(number)
    except ValueError as error:
        raise DataFormatError(f"{source.path}, {split}: {error}") from None
    return _segments(stream, start, stop, codec)


def window_segments(source: Source, split: SplitName, number: int, seq_len: int, codec: Codec) -> list[Segment]:
    """Window `number` (from 0): tokens [number * T, number * T + T], its inputs and its last target, by document.

    DataFormatError when the split has fewer windows.
    """
    stream = TokenStream(source.splits[split])
    windows = max(0, (stream.tokens - 1) // seq_len) if seq_len > 0 else 0
    if not 0 <= number < windows:
        raise DataFormatError(
            f"{source.path}, {split}: window {number} does not exist; {stream.tokens:,} tokens make {windows:,}"
            f" windows of {seq_len} (0 is the first)"
        )
    return _segments(stream, number * seq_len, number * seq_len + seq_len + 1, codec)


def find_places(source: Source, split: SplitName, documents: Sequence[int]) -> dict[int, str]:
    """For each document the words FILE:LINE of its input, or why they are not known any more.

    Cost: the documents' units of work are read again. DataFormatError: see `origins.find_origins`.
    """
    if "converted_from" in source.manifest["options"]:
        return dict.fromkeys(documents, f"converted from {source.manifest['options']['converted_from']} token files")
    found = find_origins(source, {split: documents})
    return {
        number: f"source unknown: {one.reason}" if isinstance(one, Lost) else f"{one.path}:{one.position}"
        for _, number, one in found
    }


def _segments(stream: TokenStream, start: int, stop: int, codec: Codec) -> list[Segment]:
    ids = stream.read(start, stop)
    ends = stream.document_ends(start, stop).tolist()
    bounds: Sequence[int] = ends if ends and ends[-1] == stop else [*ends, stop]
    segments, low, document = [], start, stream.document_at(start)
    for high in bounds:
        row = ids[low - start : high - start].tolist()
        ended = high in ends
        text = codec.decode(row[:-1] if ended else row)
        segments.append(Segment(document, text, len(row), stream.document(document)[0] == low, ended, row))
        low, document = high, document + 1
    return segments
