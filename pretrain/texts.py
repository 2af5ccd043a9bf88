"""What is to be scored: documents as tokens, one source after the other, out of a collection or out of files.

Files are read and tokenized whole, so they take main memory: 8 bytes a token. A collection stays on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.card import kind_of_character
from data_pipeline.corpus import CorpusError, Dropped, TxtDocuments, read_documents
from data_pipeline.languages import language_of
from data_pipeline.prepare import PrepareError, parse_inputs
from data_pipeline.shards import MANIFEST_NAME, DataFormatError, Split, open_collection
from data_pipeline.stream import TokenStream
from tokenizer.codec import Codec

JUDGED_CHARACTERS = 10_000  # of a document, to tell its language

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Facts:
    """Of each document its UTF-8 bytes, its characters (Unicode code points) and its language.

    `exact`: they are those of the source text, not of tokens decoded by a tokenizer that changes some text.
    """

    text_bytes: Int64Array
    characters: Int64Array
    languages: tuple[str, ...]
    exact: bool


class Tokens(Protocol):
    """A row of tokens, any part of which can be read: `stream.TokenStream`, or tokens in memory."""

    @property
    def tokens(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[Any]: ...

    def will_need(self, start: int, stop: int) -> None: ...


@dataclass(frozen=True)
class Source:
    """One source's documents as a stream of tokens, an EOS behind each; ends[d] is one past document d's EOS.

    `facts_of` gives the facts of the documents numbered, in that order.
    """

    name: str
    stream: Tokens
    ends: Int64Array
    facts_of: Callable[[Sequence[int]], Facts]
    text_bytes: int  # of all documents' source texts


@dataclass
class Texts:
    """All that is scored, and what of the input was not: reason → how many documents.

    `alone`: they are texts by themselves, not a collection's, which training reads one behind the other.
    """

    sources: list[Source]
    alone: bool = False
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return sum(source.stream.tokens for source in self.sources)


class TokensInMemory:
    """The tokens that files gave, to be read like a collection's."""

    def __init__(self, ids: Int64Array) -> None:
        self.ids, self.tokens = ids, len(ids)

    def read(self, start: int, stop: int) -> Int64Array:
        return self.ids[start:stop]

    def will_need(self, start: int, stop: int) -> None:
        """Nothing to fetch."""


def is_collection(place: str) -> bool:
    """Whether a folder holds what `data_pipeline prepare` wrote."""
    return (Path(place) / MANIFEST_NAME).is_file()


def of_collection(path: Path, codec: Codec, name: str) -> Texts:
    """The validation splits of a collection; sources without held-out tokens are left out.

    Raises DataFormatError: nothing is held out, or the collection was made with another tokenizer than `codec`, that
    of the subject `name`.
    """
    collection = open_collection(path)
    if codec.fingerprint != collection.fingerprint:
        raise DataFormatError(
            f"{path} was written with the tokenizer {collection.fingerprint[:12]}, {name} was trained with "
            f"{codec.fingerprint[:12]}: prepare the text again with --tokenizer {codec.folder}, or give the text itself"
        )
    splits = {name: source.splits["validation"] for name, source in collection.sources.items()}
    found = [_held_out(name, split, codec) for name, split in splits.items() if split.tokens]
    if not found:
        raise DataFormatError("no source has held-out tokens: prepare the data with a larger --validation-fraction")
    return Texts(found)


def _held_out(name: str, split: Split, codec: Codec) -> Source:
    stream = TokenStream(split)
    ends = stream.document_ends(0, stream.tokens)

    def facts_of(documents: Sequence[int]) -> Facts:
        decoded = (
            codec.decode(stream.read(int(ends[number - 1]) if number else 0, int(ends[number]) - 1))
            for number in documents
        )
        facts = _facts(decoded)
        whole = len(documents) < len(ends) or int(facts.text_bytes.sum()) == split.text_bytes
        return Facts(facts.text_bytes, facts.characters, facts.languages, exact=whole)

    return Source(name, stream, ends, facts_of, split.text_bytes)


def of_files(
    inputs: Sequence[str],
    codec: Codec,
    *,
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
    max_tokens: int | None = None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Texts:
    """Documents of `[NAME=]PATH` inputs as `data_pipeline prepare` takes them, nothing filtered or held out.

    Of each source the first documents, until there are `max_tokens` tokens or more. Raises DataFormatError: an input
    that is missing, damaged or without a single document.
    """
    texts = Texts([], alone=True)
    try:
        for name, places in parse_inputs(inputs).items():
            documents, ids, ends, tokens = [], [], [], 0
            for item in read_documents(places, text_field=text_field, txt_documents=txt_documents):
                if isinstance(item, Dropped):
                    texts.dropped[item.reason] += 1
                    continue
                row = np.append(codec.encode(item.text), codec.eos_id).astype(np.int64)
                documents.append(_facts([item.text]))
                ids.append(row)
                tokens += len(row)
                ends.append(tokens)
                on_tokens(tokens)
                if max_tokens is not None and tokens >= max_tokens:
                    break
            if not documents:
                why = f": {sum(texts.dropped.values())} were not readable" if texts.dropped else ""
                raise DataFormatError(f"{' '.join(map(str, places))}: no document to score{why}")
            texts.sources.append(_in_memory(name, ids, ends, documents))
    except (CorpusError, PrepareError) as error:
        raise DataFormatError(str(error)) from None
    return texts


def _in_memory(name: str, ids: list[Int64Array], ends: list[int], documents: list[Facts]) -> Source:
    def facts_of(numbers: Sequence[int]) -> Facts:
        chosen = [documents[number] for number in numbers]
        return Facts(
            np.array([int(facts.text_bytes[0]) for facts in chosen], np.int64),
            np.array([int(facts.characters[0]) for facts in chosen], np.int64),
            tuple(facts.languages[0] for facts in chosen),
            exact=True,
        )

    text_bytes = sum(int(facts.text_bytes[0]) for facts in documents)
    return Source(name, TokensInMemory(np.concatenate(ids)), np.array(ends, np.int64), facts_of, text_bytes)


def _facts(texts: Iterable[str]) -> Facts:
    sizes, characters, languages = [], [], []
    for text in texts:
        sizes.append(len(text.encode("utf-8", "surrogatepass")))
        characters.append(len(text))
        judged = text[:JUDGED_CHARACTERS]
        languages.append(language_of(judged, Counter(map(kind_of_character, judged))))
    return Facts(np.array(sizes, np.int64), np.array(characters, np.int64), tuple(languages), exact=True)
