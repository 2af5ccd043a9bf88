"""Train a SentencePiece BPE tokenizer from a stream of texts, so that text -> ids -> text is the identity.

What we choose, and why: whole documents are the trainer's sentences, so pieces may hold line breaks and indents (8 to
11 % fewer tokens on code and prose than line by line); identity normalisation, no dummy prefix, no squeezed spaces,
and byte fallback make it lossless; digits stand alone, so that numbers are spelled one way; ids 0 to 3 are fixed. The
model file is a pure function of the texts, the options and SentencePiece's version.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from tokenizer.codec import (
    DESCRIPTION_FILE,
    FORMAT,
    MODEL_FILE,
    PROBE_TEXT,
    SPACE_MARK,
    VERSION,
    Codec,
    TokenizerError,
    publish,
    refuse_occupied,
)
from tokenizer.sample import MAX_CHARACTERS, Sample, Weighted

CONTROL_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": 3}
FIXED_PIECES = len(CONTROL_IDS) + 256  # and one piece per byte
MIN_VOCAB_SIZE = FIXED_PIECES + 12
MAX_VOCAB_SIZE = 1 << 24
MAX_THREADS = 127  # see _without_threads
DEFAULT_SAMPLE_BYTES = 100_000_000

# SentencePiece accepts 0.98 to 1. Above 0.9995 the alphabet fills with characters that hardly occur.
LOWEST_COVERAGE, HIGHEST_COVERAGE = 0.98, 0.9995


@dataclass(frozen=True)
class TrainReport:
    """What a training made and out of what. Bytes are UTF-8 bytes of text."""

    folder: Path
    fingerprint: str
    vocab_size: int
    documents: int
    text_bytes: int
    sampled_bytes: int
    sampled_pieces: int
    cuts: int
    cuts_inside_words: int
    reserved_characters: int
    alphabet: int
    character_coverage: float
    read_seconds: float
    train_seconds: float


def train(
    texts: Iterable[str | Weighted],
    out: Path,
    *,
    vocab_size: int,
    sample_bytes: int = DEFAULT_SAMPLE_BYTES,
    seed: int = 0,
    character_coverage: float | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    provenance: Mapping[str, object] | None = None,
) -> TrainReport:
    """Train on a seeded sample of at most `sample_bytes` of the texts and publish the tokenizer as the folder `out`.

    A bare str counts once, a `Weighted` its weight. `character_coverage` (0.98 to 1) is the share of characters in
    the text that get a piece of their own; absent, it is 0.9995 or what lets the alphabet take two fifths of the
    learnable pieces (so that a small vocabulary keeps room for Chinese words beside Chinese characters), but never
    below 0.98. `threads` changes the time, not the result. `provenance` goes into the description as it is when the
    texts have ended, so that the reader of the texts may fill it.

    Memory: about 16 times `sample_bytes`. Raises TokenizerError: no text, a lone surrogate, a vocabulary that the
    text can't fill or that can't hold its alphabet, an occupied `out`. Nothing is written before the model is whole
    and has passed its self-test.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise TokenizerError(f"vocabulary of {vocab_size} pieces: must be {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}")
    if character_coverage is not None and not LOWEST_COVERAGE <= character_coverage <= 1:
        raise TokenizerError(f"character coverage {character_coverage}: must be {LOWEST_COVERAGE} to 1")
    refuse_occupied(out, overwrite=overwrite)

    started_at = time.monotonic()
    sample = _draw(texts, max_bytes=sample_bytes, seed=seed)
    read_at = time.monotonic()
    occurrences = _character_occurrences(sample)
    if character_coverage is None:
        character_coverage = _fitting_coverage(occurrences, max_characters=(vocab_size - FIXED_PIECES) * 2 // 5)
    alphabet = _alphabet_size(occurrences, character_coverage)
    if alphabet + FIXED_PIECES > vocab_size:
        raise TokenizerError(
            f"vocabulary of {vocab_size} pieces is too small: {FIXED_PIECES} are fixed, {alphabet} characters make "
            f"{character_coverage:.2%} of the text; give at least {alphabet + FIXED_PIECES}, better twice that"
        )
    options: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": vocab_size,
        "character_coverage": character_coverage,
        "required_chars": SPACE_MARK,  # else a corpus without spaces makes a vocabulary that can't spell one
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "max_sentence_length": 4 * MAX_CHARACTERS,
        **{f"{name}_id": token_id for name, token_id in CONTROL_IDS.items()},
    }
    model = _train_model(sample, options, threads=min(threads or os.cpu_count() or 1, MAX_THREADS))
    description = {
        "format": FORMAT,
        "version": VERSION,
        "type": "sentencepiece-bpe",
        "vocab_size": vocab_size,
        "ids": CONTROL_IDS,
        "options": {**options, "sample_bytes": sample_bytes, "seed": seed},
        "corpus": {
            "documents": sample.documents,
            "text_bytes": sample.text_bytes,
            "sampled_bytes": sample.sampled_bytes,
            "sampled_sha256": _hash(sample),
            "cuts": sample.cuts,
            "cuts_inside_words": sample.cuts_inside_words,
            "reserved_characters": sample.reserved_characters,
            "alphabet": alphabet,
            "provenance": dict(provenance or {}),
        },
        "versions": {"sentencepiece": sentencepiece.__version__},
        "model_sha256": hashlib.sha256(model).hexdigest(),
    }
    codec = Codec(out, {MODEL_FILE: model})
    if (
        codec.control_ids != CONTROL_IDS
        or codec.vocab_size != vocab_size
        or codec.decode(codec.encode(PROBE_TEXT)) != PROBE_TEXT
    ):
        raise TokenizerError(
            f"sentencepiece {sentencepiece.__version__} made a tokenizer that is not lossless; use the pinned version"
        )
    description["fingerprint"] = codec.fingerprint
    files = {
        MODEL_FILE: model,
        DESCRIPTION_FILE: json.dumps(description, indent=2).encode("ascii") + b"\n",
    }
    publish(files, out, overwrite=overwrite)
    return TrainReport(
        folder=out,
        fingerprint=codec.fingerprint,
        vocab_size=vocab_size,
        documents=sample.documents,
        text_bytes=sample.text_bytes,
        sampled_bytes=sample.sampled_bytes,
        sampled_pieces=len(sample),
        cuts=sample.cuts,
        cuts_inside_words=sample.cuts_inside_words,
        reserved_characters=sample.reserved_characters,
        alphabet=alphabet,
        character_coverage=character_coverage,
        read_seconds=read_at - started_at,
        train_seconds=time.monotonic() - read_at,
    )


def _draw(texts: Iterable[str | Weighted], *, max_bytes: int, seed: int) -> Sample:
    sample = Sample(max_bytes=max_bytes, seed=seed)
    for number, item in enumerate(texts):
        text, weight = item if isinstance(item, Weighted) else (item, 1.0)
        try:
            sample.add(text, weight)
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text {number}: lone surrogate at character {error.start} has no UTF-8 form; drop or replace it"
            ) from error
    if not sample.sampled_bytes:
        raise TokenizerError(
            f"no text to train on: {sample.documents} documents with {sample.text_bytes} bytes; check --input"
        )
    return sample


def _character_occurrences(sample: Sample) -> list[int]:
    """How often each character occurs, most frequent first."""
    counts = np.zeros(0x110000, dtype=np.int64)
    pieces = list(sample.pieces())
    for start in range(0, len(pieces), 256):
        text = b"".join(pieces[start : start + 256]).decode("utf-8")
        counts += np.bincount(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), minlength=len(counts))
    occurrences: list[int] = np.sort(counts[counts > 0])[::-1].tolist()
    return occurrences


def _alphabet_size(occurrences: list[int], coverage: float) -> int:
    """The fewest characters that make up `coverage` of the text."""
    covered = np.cumsum(occurrences) / sum(occurrences)
    return min(int(np.searchsorted(covered, coverage)) + 1, len(occurrences))


def _fitting_coverage(occurrences: list[int], *, max_characters: int) -> float:
    """The default coverage: the highest that needs at most `max_characters`, within the two limits."""
    if _alphabet_size(occurrences, HIGHEST_COVERAGE) <= max_characters:
        return HIGHEST_COVERAGE
    covered = sum(occurrences[:max_characters]) / sum(occurrences)
    return max(LOWEST_COVERAGE, int(covered * 10_000) / 10_000)  # rounded down: a readable number


def _train_model(sample: Sample, options: Mapping[str, Any], *, threads: int) -> bytes:
    """SentencePiece's training in memory: no path enters the model file."""
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample.pieces(), model_writer=writer, num_threads=threads, minloglevel=2, **options
        )
    except RuntimeError as error:
        too_high = re.search(r"Vocabulary size too high \((\d+)\).*<= (\d+)", str(error))
        if too_high:
            raise TokenizerError(
                f"vocabulary of {too_high[1]} pieces is too large for {sample.sampled_bytes} bytes of text: "
                f"the largest possible is {too_high[2]} (at --character-coverage {options['character_coverage']}); "
                "lower --vocab-size or give more text"
            ) from error
        raise TokenizerError("sentencepiece failed: " + " ".join(str(error).split())) from error
    return _without_threads(writer.getvalue())


def _without_threads(model: bytes) -> bytes:
    """Set the number of training threads that SentencePiece notes in the model file to 1, so that it doesn't change
    the file.

    The file is a protocol buffer (sentencepiece_model.proto): ModelProto.trainer_spec is field 2,
    TrainerSpec.num_threads field 16. `train` keeps the number below 128, one byte, so that it can be replaced in
    place.
    """
    edited = bytearray(model)
    for field, start, end in _protobuf_fields(model, 0, len(model)):
        if field == 2:
            for inner, value_start, value_end in _protobuf_fields(model, start, end):
                if inner == 16:
                    assert value_end - value_start == 1, "num_threads is not one byte"
                    edited[value_start] = 1
    return bytes(edited)


def _protobuf_fields(data: bytes, start: int, end: int) -> Iterable[tuple[int, int, int]]:
    """Yield (field number, start, end) of each value in a message that lies at data[start:end]."""

    def varint(place: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[place]
            value |= (byte & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if byte < 0x80:
                return value, place

    while start < end:
        tag, start = varint(start)
        wire_type = tag & 7
        if wire_type == 0:
            stop = varint(start)[1]
        elif wire_type == 2:
            length, start = varint(start)
            stop = start + length
        else:
            stop = start + {1: 8, 5: 4}[wire_type]
        yield tag >> 3, start, stop
        start = stop


def _hash(sample: Sample) -> str:
    """One hash for the sampled text and its cuts."""
    digest = hashlib.sha256()
    for piece in sample.pieces():
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()
