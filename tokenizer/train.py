"""Train a SentencePiece tokenizer from a stream of texts, so that text -> ids -> text is the identity.

What we choose, and why: whole documents are the trainer's sentences, so pieces may hold line breaks and indents (8 to
11 % fewer tokens on code and prose than line by line); identity normalisation, no dummy prefix, no squeezed spaces,
and byte fallback make it lossless; digits stand alone, so that numbers are spelled one way; ids 0 to 3 are fixed. The
model file is a pure function of the texts, the options and SentencePiece's version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from tokenizer.characters import (
    LOWEST_COVERAGE,
    NORMALIZATIONS,
    CharacterCounts,
    count_characters,
    normalizer,
)
from tokenizer.codec import PROBE_TEXT, SPACE_MARK, Codec, TokenizerError
from tokenizer.folder import (
    DESCRIPTION_FILE,
    FORMAT,
    MODEL_FILE,
    TRAINING_FILE,
    VERSION,
    publish,
    refuse_occupied,
    refuse_unwritable,
)
from tokenizer.model_file import ModelFile, PieceType, protobuf_fields
from tokenizer.sample import HELD_OUT_BYTES, MAX_CHARACTERS, Sample, Weighted, every_so_many
from tokenizer.symbols import CONTROL_IDS, Symbols, arrange
from tokenizer.training_process import OnProgress, Trained, TrainerRefusal, train_apart
from tokenizer.training_report import Measurement, SourceFigures, TrainReport, estimate, measure, training_report

MODEL_TYPES = ("bpe", "unigram")
SPLITS = ("documents", "lines")

MIN_LEARNED_PIECES = 12
MAX_VOCAB_SIZE = 1 << 24
MAX_VOCAB_MULTIPLE = 1 << 16
DEFAULT_SAMPLE_BYTES = 100_000_000
MIN_MEASURED_BYTES = 20_000  # less says nothing
MIN_ESTIMATED_BYTES = 5_000_000  # less takes half a minute at most, and is counted too quickly to tell

REQUIRED_CHARACTERS = " \n\t"
"""They get pieces whatever the corpus holds, so that no layout of a text is ever spelled in bytes."""

# BPE gives the same model with any number of threads; unigram adds floating-point numbers in each of them.
MAX_BPE_THREADS = 127  # see _without_threads
UNIGRAM_THREADS = 8


def train(
    texts: Iterable[str | Weighted],
    out: Path,
    *,
    vocab_size: int,
    model_type: str = "bpe",
    normalization: str = "identity",
    split: str = "documents",
    split_by_script: bool = True,
    control_symbols: Sequence[str] = (),
    user_symbols: Sequence[str] = (),
    reserve: int = 0,
    vocab_multiple: int = 1,
    sample_bytes: int = DEFAULT_SAMPLE_BYTES,
    seed: int = 0,
    character_coverage: float | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    provenance: Mapping[str, object] | None = None,
    on_notice: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> TrainReport:
    """Train on a seeded sample of at most `sample_bytes` of the texts and publish the tokenizer as the folder `out`.

    A bare str counts once, a `Weighted` its weight; where they have several sources, the report has figures of each.
    `split`: whole documents are the trainer's sentences, or their
    lines, without line breaks. `split_by_script`: no piece holds characters of two scripts, punctuation counting as
    one; without, about a tenth fewer tokens on code, of pieces such as `_name(`. `reserve`: spare control symbols;
    more of them fill the vocabulary up to a multiple of `vocab_multiple`; which id is which: see `tokenizer.symbols`.
    `character_coverage` (0.98 to 1) is the share of characters in the text that get a piece of their own; absent, it
    is 0.9995 or what lets the alphabet take two fifths of the learnable pieces (so that a small vocabulary keeps room
    for Chinese words beside Chinese characters), but never below 0.98. `threads` changes the time, not the result;
    unigram always trains with the same number, because there it would. `provenance` goes into the description as it
    is when the texts have ended, so that the reader of the texts may fill it. `on_notice` hears lines for people: an
    estimate, what a normalisation loses.

    Memory: `sample_bytes`, and when that has been handed over, 13 to 27 times as much in a process that ends with the
    training. Raises TokenizerError: no text, a lone surrogate, a vocabulary that the text can't fill or that can't
    hold its alphabet, an `out` that is occupied or can't be written, a training that failed or was killed. Nothing is
    written before the model is whole and has passed its self-test.
    """
    say = on_notice or (lambda line: None)
    _check(model_type, normalization, split, vocab_size, reserve, vocab_multiple, character_coverage)
    missing = -vocab_size % vocab_multiple
    vocab_size += missing
    normalize = normalizer(normalization)
    symbols = arrange(control_symbols, user_symbols, spare=reserve + missing)
    _check_symbols(symbols, normalize, vocab_size)
    refuse_unwritable(out)
    refuse_occupied(out, overwrite=overwrite)

    started_at = time.monotonic()
    sample = _draw(texts, max_bytes=sample_bytes, seed=seed)
    to_measure, of_sources = _to_measure(sample)
    sampled_pieces = len(sample)
    read_seconds = time.monotonic() - started_at

    characters = count_characters(sample.pieces(), normalize)
    _refuse_unlearnable(characters, sample)
    if split == "lines":
        characters.counts[ord("\n")] = 0
    character_coverage, alphabet = _alphabet(characters, character_coverage, vocab_size, symbols)
    if normalization != "identity":
        say(characters.loss())
    if sample.sampled_bytes >= MIN_ESTIMATED_BYTES:
        say(estimate(model_type, sample.sampled_bytes, characters.counting_seconds))

    options = _options(model_type, normalization, split_by_script, vocab_size, character_coverage, symbols)
    digest = hashlib.sha256()
    trained = _train_model(
        _hashed(sample.drain(), digest),
        options,
        split=split,
        threads=UNIGRAM_THREADS if model_type == "unigram" else min(threads or os.cpu_count() or 1, MAX_BPE_THREADS),
        sampled_bytes=sample.sampled_bytes,
        on_progress=on_progress,
    )
    model = _without_threads(trained.model)
    codec = Codec(out, {MODEL_FILE: model})
    _verify(codec, ModelFile.parse(model), symbols, normalize)

    def measured(chosen: _ToMeasure) -> Measurement:
        return measure(codec, chosen.pieces, normalize, unseen=chosen.unseen)

    measurement = measured(to_measure)
    sources = {
        number: SourceFigures(size, measurement if chosen is to_measure else measured(chosen) if chosen else None)
        for number, (size, chosen) in of_sources.items()
    }
    report = TrainReport(
        folder=out,
        fingerprint=codec.fingerprint,
        vocab_size=vocab_size,
        model_type=model_type,
        normalization=normalization,
        split=split,
        symbols=symbols.ids,
        documents=sample.documents,
        text_bytes=sample.text_bytes,
        sampled_bytes=sample.sampled_bytes,
        weighted=sample.weighted,
        sampled_pieces=sampled_pieces,
        cuts=sample.cuts,
        cuts_inside_words=sample.cuts_inside_words,
        reserved_characters=sample.reserved_characters,
        alphabet=alphabet,
        character_coverage=character_coverage,
        changed_characters=characters.changed_characters,
        changed_pieces=characters.changed_texts,
        measurement=measurement,
        sources=sources,
        read_seconds=read_seconds,
        train_seconds=trained.seconds,
        peak_bytes=trained.peak_bytes,
    )
    description = _description(
        report,
        options={**options, "split": split, "sample_bytes": sample_bytes, "seed": seed},
        corpus={"sampled_sha256": digest.hexdigest(), "provenance": dict(provenance or {})},
        model=model,
    )
    files = {
        MODEL_FILE: model,
        DESCRIPTION_FILE: json.dumps(description, indent=2).encode("ascii") + b"\n",
        TRAINING_FILE: training_report(report, description, codec).encode("utf-8"),
    }
    publish(files, out, overwrite=overwrite)
    return report


# ---------------------------------------------------------------- before


def _check(
    model_type: str,
    normalization: str,
    split: str,
    vocab_size: int,
    reserve: int,
    vocab_multiple: int,
    character_coverage: float | None,
) -> None:
    for name, value, choices in (
        ("model type", model_type, MODEL_TYPES),
        ("normalization", normalization, NORMALIZATIONS),
        ("split", split, SPLITS),
    ):
        if value not in choices:
            raise TokenizerError(f"{name} {value!r}: must be {' or '.join(choices)}")
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise TokenizerError(f"vocabulary of {vocab_size} pieces: must be 1 to {MAX_VOCAB_SIZE}")
    if not 0 <= reserve <= MAX_VOCAB_SIZE:
        raise TokenizerError(f"{reserve} reserved ids: must be 0 to {MAX_VOCAB_SIZE}")
    if not 1 <= vocab_multiple <= MAX_VOCAB_MULTIPLE:
        raise TokenizerError(f"vocabulary as a multiple of {vocab_multiple}: must be 1 to {MAX_VOCAB_MULTIPLE}")
    if character_coverage is not None and not LOWEST_COVERAGE <= character_coverage <= 1:
        raise TokenizerError(f"character coverage {character_coverage}: must be {LOWEST_COVERAGE} to 1")


def _check_symbols(symbols: Symbols, normalize: Callable[[str], str] | None, vocab_size: int) -> None:
    if vocab_size < symbols.fixed_pieces + MIN_LEARNED_PIECES:
        raise TokenizerError(
            f"vocabulary of {vocab_size} pieces is too small: {symbols.fixed_pieces} are fixed (4 control ids, "
            f"{len(symbols.ids)} symbols, 256 bytes); give at least {symbols.fixed_pieces + MIN_LEARNED_PIECES}"
        )
    unstable = next((name for name in symbols.user if normalize and normalize(name) != name), None)
    if unstable is not None:
        raise TokenizerError(f"user symbol {unstable!r}: the normalisation would write it otherwise; choose another")


def _draw(texts: Iterable[str | Weighted], *, max_bytes: int, seed: int) -> Sample:
    sample = Sample(max_bytes=max_bytes, seed=seed)
    for number, item in enumerate(texts):
        text, weight, source = item if isinstance(item, Weighted) else Weighted(item, 1.0)
        try:
            sample.add(text, weight, source)
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text {number}: lone surrogate at character {error.start} has no UTF-8 form; drop or replace it"
            ) from error
    if not sample.sampled_bytes:
        low = "; a weight below 1 may leave nothing of a small text" if sample.weighted else ""
        raise TokenizerError(
            f"no text to train on: {sample.documents} documents with {sample.text_bytes} bytes{low}; check --input"
        )
    return sample


def _refuse_unlearnable(characters: CharacterCounts, sample: Sample) -> None:
    """SentencePiece takes no NUL into its alphabet, and none of a text that is nothing but line breaks."""
    if characters.counts.sum() == characters.counts[list(map(ord, "\0\r\n"))].sum():
        raise TokenizerError(
            f"no text to train on: {sample.sampled_bytes} bytes of nothing but NULs and line breaks; check --input"
        )


class _ToMeasure(NamedTuple):
    pieces: list[bytes]
    unseen: bool  # by the trainer


def _to_measure(sample: Sample) -> tuple[_ToMeasure, dict[int, tuple[int, _ToMeasure | None]]]:
    """What to measure the tokenizer on, of the whole and of each source: text that the sample doesn't hold, or where
    that is too little to say anything, some that it does. Of each source also how many bytes the sample holds.
    """
    held_out, sampled = sample.hold_out(), sample.by_source()
    whole = _choose([piece for _, piece in held_out], sample.some(HELD_OUT_BYTES))
    if len(sampled) == 1:
        return whole, dict.fromkeys(sampled, (sample.sampled_bytes, whole))
    room = max(HELD_OUT_BYTES // len(sampled), MIN_MEASURED_BYTES)
    of_sources: dict[int, tuple[int, _ToMeasure | None]] = {}
    for number, pieces in sampled.items():
        chosen = _choose([piece for source, piece in held_out if source == number], every_so_many(pieces, room))
        enough = sum(map(len, chosen.pieces)) >= MIN_MEASURED_BYTES
        of_sources[number] = sum(map(len, pieces)), chosen if enough else None
    return whole, of_sources


def _choose(unseen: list[bytes], seen: list[bytes]) -> _ToMeasure:
    enough = sum(map(len, unseen)) >= MIN_MEASURED_BYTES
    return _ToMeasure(unseen if enough else seen, enough)


def _alphabet(
    characters: CharacterCounts, coverage: float | None, vocab_size: int, symbols: Symbols
) -> tuple[float, int]:
    """The coverage, where none is given the one that fits, and how many characters that makes."""
    if coverage is None:
        room = (vocab_size - symbols.fixed_pieces) * 2 // 5
        coverage = characters.fitting_coverage(room, REQUIRED_CHARACTERS)
    alphabet = characters.alphabet_size(coverage, REQUIRED_CHARACTERS)
    least = alphabet + symbols.fixed_pieces
    if least > vocab_size:
        raise TokenizerError(
            f"vocabulary of {vocab_size} pieces is too small: {symbols.fixed_pieces} are fixed, {alphabet} characters "
            f"make {coverage:.2%} of the text; give at least {least}, better twice that"
        )
    return coverage, alphabet


def _options(
    model_type: str,
    normalization: str,
    split_by_script: bool,
    vocab_size: int,
    character_coverage: float,
    symbols: Symbols,
) -> dict[str, Any]:
    """What SentencePiece is told, all but the number of threads. It has other defaults for most of this."""
    options: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "character_coverage": character_coverage,
        "required_chars": REQUIRED_CHARACTERS.replace(" ", SPACE_MARK),
        "byte_fallback": True,
        "split_digits": True,
        "split_by_unicode_script": split_by_script,
        "normalization_rule_name": normalization,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "max_sentence_length": 4 * MAX_CHARACTERS,
        **{f"{name}_id": token_id for name, token_id in CONTROL_IDS.items()},
    }
    if symbols.control:
        options["control_symbols"] = list(symbols.control)
    if symbols.user:
        options["user_defined_symbols"] = list(symbols.user)
    return options


# ---------------------------------------------------------------- training


def _train_model(
    pieces: Iterable[bytes],
    options: Mapping[str, Any],
    *,
    split: str,
    threads: int,
    sampled_bytes: int,
    on_progress: OnProgress | None,
) -> Trained:
    """SentencePiece's training in memory: no path enters the model file."""
    try:
        return train_apart(
            pieces,
            {**options, "num_threads": threads, "minloglevel": 0},
            split_lines=split == "lines",
            on_progress=on_progress,
        )
    except TrainerRefusal as refusal:
        too_high = re.search(r"Vocabulary size too high \((\d+)\).*<= (\d+)", str(refusal))
        if too_high:
            raise TokenizerError(
                f"vocabulary of {too_high[1]} pieces is too large for {sampled_bytes} bytes of text: "
                f"the largest possible is {too_high[2]} (at --character-coverage {options['character_coverage']}); "
                "lower --vocab-size or give more text"
            ) from refusal
        raise TokenizerError("sentencepiece failed: " + " ".join(str(refusal).split())) from refusal


def _hashed(pieces: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    """The same pieces; the text and its cuts go into the hash as they pass."""
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
        yield piece


def _without_threads(model: bytes) -> bytes:
    """Set the number of training threads that SentencePiece notes in the model file to 1, so that it doesn't change
    the file.

    The file is a protocol buffer (sentencepiece_model.proto): ModelProto.trainer_spec is field 2,
    TrainerSpec.num_threads field 16. `train` keeps the number below 128, one byte, so that it can be replaced in
    place.
    """
    edited = bytearray(model)
    for field, start, end in protobuf_fields(model, 0, len(model)):
        if field == 2:
            for inner, value_start, value_end in protobuf_fields(model, start, end):
                if inner == 16:
                    assert value_end - value_start == 1, "num_threads is not one byte"
                    edited[value_start] = 1
    return bytes(edited)


# ---------------------------------------------------------------- after


def _verify(codec: Codec, model: ModelFile, symbols: Symbols, normalize: Callable[[str], str] | None) -> None:
    """Raise TokenizerError unless every id stands where we say it does, and the probe text comes back."""
    expected = normalize(PROBE_TEXT) if normalize else PROBE_TEXT
    kinds = dict.fromkeys(symbols.control, PieceType.CONTROL) | dict.fromkeys(symbols.user, PieceType.USER_DEFINED)
    spelled = codec.encode_documents(f"\n{name}\n" for name in symbols.ids)
    as_said = (
        codec.control_ids == CONTROL_IDS
        and all(model.pieces[token_id] == name for name, token_id in symbols.ids.items())
        and all(model.types[token_id] == kinds[name] for name, token_id in symbols.ids.items())
        and all(
            np.count_nonzero(ids == token_id) == (kinds[name] == PieceType.USER_DEFINED)
            for (name, token_id), ids in zip(symbols.ids.items(), spelled, strict=True)
        )
        and codec.decode(codec.encode(PROBE_TEXT)) == expected
    )
    if not as_said:
        raise TokenizerError(
            f"sentencepiece {sentencepiece.__version__} made a tokenizer that is not lossless or has other ids than "
            "asked for; use the pinned version"
        )


def _description(
    report: TrainReport, *, options: Mapping[str, Any], corpus: Mapping[str, object], model: bytes
) -> dict[str, Any]:
    """description.json. Nothing in it depends on time or place."""
    counted = (
        "documents",
        "text_bytes",
        "sampled_bytes",
        "cuts",
        "cuts_inside_words",
        "reserved_characters",
        "alphabet",
    )
    return {
        "format": FORMAT,
        "version": VERSION,
        "type": f"sentencepiece-{report.model_type}",
        "vocab_size": report.vocab_size,
        "ids": CONTROL_IDS,
        "symbols": report.symbols,
        "options": dict(options),
        "corpus": {
            **{name: getattr(report, name) for name in counted},
            "changed_characters": sum(report.changed_characters.values()),
            "changed_pieces": report.changed_pieces,
            **corpus,
        },
        "versions": {"sentencepiece": sentencepiece.__version__},
        "model_sha256": hashlib.sha256(model).hexdigest(),
        "fingerprint": report.fingerprint,
    }
