"""Text to token ids and back, exactly as SentencePiece does it.

A tokenizer is a folder: `tokenizer.model` (SentencePiece's own), `description.json` (ours: what it is, how it was made,
its fingerprint), and a report for people. The fingerprint covers the model file *and* the ids that this code gives for
a fixed probe text, so token files refuse a tokenizer that has the same file but, after an upgrade of a library, another
behaviour.

Ids come from a compiled encoder where it can take the model, else from SentencePiece itself, which says it once on
stderr. SentencePiece stays the judge: a self-test at load holds the encoder against it, and so does a second encoding
of random documents while work goes on. Any difference stops the work.

Text is text: `</s>` or `<s>` written in a document are ordinary characters. Control ids come only from the `bos` and
`eos` arguments.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from tokenizer.fastbpe.encoder import FastBPE, Unsupported
from tokenizer.folder import (
    DESCRIPTION_FILE,
    FORMAT,
    MODEL_FILE,
    TRAINING_FILE,
    VERSION,
    parse_description,
    publish,
    read_folder,
    refuse_occupied,
)
from tokenizer.model_file import ModelFile, PieceType, TokenizerError
from tokenizer.reference import Encoder, Ends, Ids, Reference, split
from tokenizer.selftest import ADVICE, difference, self_test
from tokenizer.workers import in_processes, in_threads

__all__ = [
    "DESCRIPTION_FILE",
    "FORMAT",
    "MODEL_FILE",
    "PROBE_TEXT",
    "SPACE_MARK",
    "TRAINING_FILE",
    "VERSION",
    "Codec",
    "TokenizerError",
    "publish",
    "refuse_occupied",
]

SPACE_MARK = "\u2581"
"""SentencePiece's inner sign for a space: the one character that comes back as another (a space)."""

# Never change this text: every fingerprint ever stored depends on it.
PROBE_TEXT = (
    "The quick brown fox jumps over the lazy dog; it's 3.14159 o'clock, 2024-02-29.\n"
    "天地玄黃，宇宙洪荒。机器学习的模型，2048个词元。\n"
    "def f(x: int) -> int:\n\tif x >= 0x1F:\n\t\treturn x ** 2  # spaces:    \t  \n        return -x\r\n\n\n"
    "naïve e\u0301 Ελλάδα Привет שלום مرحبا नमस्ते 한국어 ｆｕｌｌ\u3000\u00a0\u2028\u0085"
    "😀👩\u200d👩\u200d👧🏽🇨🇳 \U0010ffff\ue000\ufeff\x00\x01\x7f\n"
    "<s>hello</s><unk><pad> <0x0A><|endoftext|> [MASK]      "
)


GUARD_RATE = 0.001
"""The share of documents that SentencePiece encodes a second time."""

BATCH_BYTES = 1_000_000
MOST_UNCUT_BYTES = 24 * 1024 * 1024
_WINDOW_BYTES = 1 << 12
_BYTES_A_TEXT = 64  # what a text costs beside its bytes, so that a batch of empty ones ends too


class UncutTextError(ValueError):
    """A text too long to be encoded within bounded memory, since it cannot be cut."""


class Codec:
    """One tokenizer, ready to use. `Codec.load(folder)` is the way in. Pickled, it isn't tested a second time.

    encoder: "fastbpe" or "sentencepiece"; encoder_note: why SentencePiece, in one line, or None.
    symbols: the ids of control symbols, reserved ones and user symbols by name, in their order; not those of
    `control_ids`.
    """

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        self._open(folder, files, tested=False)

    def _open(self, folder: Path, files: Mapping[str, bytes], *, tested: bool) -> None:
        self.folder = folder
        self._files = dict(files)
        model = files[MODEL_FILE]
        try:
            self._reference, self._encoder, self.encoder_note, symbols = _encoders(model, tested)
        except TokenizerError as error:
            raise TokenizerError(f"{folder / MODEL_FILE}: {error}") from error
        self.encoder = "sentencepiece" if self._encoder is self._reference else "fastbpe"
        self._model = self._reference.processor
        self.vocab_size: int = self._model.vocab_size()
        self.unk_id: int = self._model.unk_id()
        self.bos_id: int = self._model.bos_id()
        self.eos_id: int = self._model.eos_id()
        self.pad_id: int = self._model.pad_id()
        for name, token_id in self.control_ids.items():
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(f"{folder}: the model has no {name} id; train it with `tokenizer train`")
        fixed = self.control_ids.values()
        self.symbols: dict[str, int] = {name: token_id for name, token_id in symbols if token_id not in fixed}
        self.fingerprint = self._compute_fingerprint()

    def __getstate__(self) -> tuple[Path, dict[str, bytes]]:
        return self.folder, self._files

    def __setstate__(self, state: tuple[Path, dict[str, bytes]]) -> None:
        self._open(*state, tested=True)

    @classmethod
    def load(cls, folder: Path | str) -> Codec:
        """Read a tokenizer and prove that it still behaves as when it was made.

        Raises TokenizerError when the folder is missing, incomplete or damaged, or gives other ids than its
        description promises, or when the compiled encoder gives other ids than SentencePiece.
        """
        folder = Path(folder)
        files = read_folder(folder)
        description = parse_description(folder / DESCRIPTION_FILE, files[DESCRIPTION_FILE])
        if hashlib.sha256(files[MODEL_FILE]).hexdigest() != description.get("model_sha256"):
            raise TokenizerError(
                f"{folder / MODEL_FILE}: the file differs from the one described; restore or retrain it"
            )
        codec = cls(folder, files)
        if codec.fingerprint != description.get("fingerprint"):
            ours, theirs = {"sentencepiece": sentencepiece.__version__}, description.get("versions")
            raise TokenizerError(
                f"{folder}: fingerprint is {codec.fingerprint[:12]}, the description says "
                f"{str(description.get('fingerprint'))[:12]}: "
                + (
                    f"{DESCRIPTION_FILE} was changed, or made with another build of {ours}; restore or retrain"
                    if ours == theirs
                    else f"{ours} encodes otherwise than {theirs}; install that version or retrain"
                )
            )
        if codec.vocab_size != description.get("vocab_size") or codec.control_ids != description.get("ids"):
            raise TokenizerError(f"{folder}: vocab_size or ids of {DESCRIPTION_FILE} differ from the model's; retrain")
        if codec.symbols != description.get("symbols", codec.symbols):
            raise TokenizerError(f"{folder}: symbols of {DESCRIPTION_FILE} differ from the model's; restore or retrain")
        return codec

    @property
    def control_ids(self) -> dict[str, int]:
        """The four ids that stand for no text, by name."""
        return {"unk": self.unk_id, "bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id}

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of one text, each in [0, vocab_size). Linear in the length of the text, also for one very long word.

        Raises TokenizerError for what is no str, and for a lone surrogate: such a str has no UTF-8 form.
        """
        self.say_note()
        ids, _ = self._encode_batch(_Batch(0, [_utf8(text, "text")]))
        plain: list[int] = ids.tolist()
        return [self.bos_id] * bos + plain + [self.eos_id] * eos

    def encode_documents(
        self, texts: Iterable[str], *, processes: int = 1, threads: int = 1
    ) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of each text, (tokens,), in order, control ids in none of them; the texts are read as they are
        needed.

        Memory: batches of at most a megabyte of text, or of one longer text, and their ids: one batch, or two a worker.
        Arrays of one batch may share memory: copy those of which few are kept for long.

        With `threads` above 1 other threads encode, all cores at work without a start-up. With `processes` above 1
        other processes do, which takes them most of a second to start (see `tokenizer.workers`): for consumers that
        keep the interpreter busy themselves.

        Raises TokenizerError, for what is no str, for a lone surrogate and when an encoding differs from
        SentencePiece's naming the text by its place; and when a process dies. Some ids of texts before are not given
        then.
        """
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise TokenizerError(f"texts: {type(texts).__name__} where a list or another iterable of str is expected")
        if min(processes, threads) < 1 or processes > 1 < threads:
            raise TokenizerError(f"{processes} processes, {threads} threads: give 1 or more of one of them")
        self.say_note()
        batches, work = _batches(texts), self._encode_batch
        if processes > 1:
            results = in_processes(work, batches, processes)
        elif threads > 1:
            results = in_threads(work, batches, threads)
        else:
            results = map(work, batches)
        for ids, ends in results:
            yield from split(ids, ends)

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[Ids, Ends]:
        """The ids of some texts (UTF-8) end to end, and for each text where its ids end in them; no control ids.

        As `encode_documents`, for callers that have the bytes and can use the ids of many texts as one array; quickest
        in batches of about BATCH_BYTES. Memory: the ids.
        """
        self.say_note()
        return self._encode_batch(_Batch(0, list(texts)))

    def encode_long(self, text: bytes) -> Iterator[Ids]:
        """The ids of one text (UTF-8) as `encode_batch` gives them, those of about BATCH_BYTES of it at a time.

        It is cut between two characters that stand side by side in no piece: no merge reaches across. Memory: a few
        megabytes, and thirty times a part without such a place (one word of megabytes), which UncutTextError therefore
        refuses beyond MOST_UNCUT_BYTES, before any ids are given. A tokenizer with a dummy prefix or without byte
        fallback, and SentencePiece's own encoder, take the memory of the whole.
        """
        self.say_note()
        joined = None if self._encoder is self._reference else _joined_characters(self._files[MODEL_FILE])
        stops = [0]
        while stops[-1] < len(text):
            stops.append(len(text) if joined is None else _cut(text, stops[-1] + BATCH_BYTES, joined))
        longest = max(stop - start for start, stop in pairwise(stops)) if text else 0
        if joined is not None and longest > MOST_UNCUT_BYTES:
            raise UncutTextError(f"{longest} bytes without a place to cut them, more than {MOST_UNCUT_BYTES}")
        return (self._encode_batch(_Batch(0, [text[start:stop]]))[0] for start, stop in pairwise(stops))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of the ids. Control ids, symbols of `--control-symbol` and `--reserve` among them, give no text,
        except unk (` ⁇ `); broken byte sequences give U+FFFD.

        Raises TokenizerError for what is no row of integers, and for an id outside [0, vocab_size).
        """
        plain = _plain_ids(ids)
        if plain and not 0 <= min(plain) <= max(plain) < self.vocab_size:
            place, token_id = next((i, t) for i, t in enumerate(plain) if not 0 <= t < self.vocab_size)
            raise TokenizerError(
                f"id {token_id} at place {place} is outside the vocabulary (0 to {self.vocab_size - 1})"
            )
        text: str = self._model.decode(plain)
        return text

    def piece(self, token_id: int) -> str:
        """The vocabulary's entry for one id: a space shows as U+2581, a byte as <0xNN>."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        piece: str = self._model.id_to_piece(token_id)
        return piece

    def is_byte(self, token_id: int) -> bool:
        """True for the 256 pieces that stand for one raw byte of a character outside the vocabulary."""
        return bool(self._model.is_byte(token_id))

    def copy_to(self, folder: Path) -> None:
        """Write the tokenizer's files as `folder`, durably and all at once. A folder that already holds this
        tokenizer is left alone.

        Raises TokenizerError when `folder` holds something else.
        """
        if (folder / DESCRIPTION_FILE).exists() and Codec.load(folder).fingerprint == self.fingerprint:
            return
        publish(self._files, folder, overwrite=False)

    def _compute_fingerprint(self) -> str:
        ids, _ = self._encode_batch(_Batch(0, [PROBE_TEXT.encode("utf-8")]))
        digest = hashlib.sha256(b"zerohalf-tokenizer-fingerprint-1\0")
        digest.update(hashlib.sha256(self._files[MODEL_FILE]).digest())
        digest.update(ids.astype("<u4").tobytes())
        return digest.hexdigest()

    def _encode_batch(self, batch: _Batch) -> tuple[Ids, Ends]:
        """Runs in whatever process encodes. Raises TokenizerError where a document that chance chose differs."""
        try:
            ids, ends = self._encoder.encode(batch.texts)
        except OverflowError as error:  # a text of gigabytes, and so the only one
            raise TokenizerError(f"text {batch.first}: {error}; split it") from error
        if self._encoder is self._reference:
            return ids, ends
        # A fresh generator each time: no two processes, and no two runs, may choose alike.
        chosen = np.flatnonzero(np.random.default_rng().random(len(batch.texts)) < GUARD_RATE)
        for place in chosen.tolist():
            own = ids[int(ends[place - 1]) if place else 0 : int(ends[place])]
            right, _ = self._reference.encode([batch.texts[place]])
            if not np.array_equal(own, right):
                text = batch.texts[place].decode("utf-8")
                raise TokenizerError(f"text {batch.first + place}: {difference(own, right)} {text!a:.200}; {ADVICE}")
        return ids, ends

    def say_note(self) -> None:
        """Say on stderr why SentencePiece itself encodes, if it does. Once in a process; its workers keep silent. The
        first encoding says it too.
        """
        note = f"{self.folder}: {self.encoder_note}"
        if self.encoder_note is None or note in _said or multiprocessing.parent_process() is not None:
            return
        _said.add(note)
        if sys.stderr is not None:  # as `2>&-` leaves it
            print(note, file=sys.stderr, flush=True)


_said: set[str] = set()


@dataclass(frozen=True)
class _Batch:
    first: int  # number of the first text
    texts: list[bytes]


@functools.lru_cache(maxsize=2)
def _encoders(model: bytes, tested: bool) -> tuple[Reference, Encoder, str | None, tuple[tuple[str, int], ...]]:
    """SentencePiece and the encoder for a model, if they are the same, why, and the name and id of each control and
    user symbol. A process that loads a model again, or is forked from one that has it, gets them at once.

    Raises TokenizerError for a damaged model, or when a compiled encoder fails its self-test; `tested`: leave it out.
    """
    reference, file = Reference(model), ModelFile.parse(model)
    ids = np.flatnonzero(np.isin(file.types, (PieceType.CONTROL, PieceType.USER_DEFINED))).tolist()
    symbols = tuple((file.pieces[token_id], token_id) for token_id in ids)
    try:
        fast = FastBPE.build(file)
    except Unsupported as reason:
        return reference, reference, f"encoded by SentencePiece itself, several times slower: {reason}", symbols
    if not tested:
        self_test(fast, reference, file, PROBE_TEXT)
    return reference, fast, None, symbols


@functools.lru_cache(maxsize=2)
def _joined_characters(model: bytes) -> frozenset[str] | None:
    """All pairs of characters that stand side by side in a piece, U+2581 as a space; None: a text's ids depend on more
    than its pieces do."""
    file = ModelFile.parse(model)
    if file.add_dummy_prefix or not file.byte_fallback:
        return None
    pieces = (piece.replace(SPACE_MARK, " ") for piece in file.pieces)  # of all kinds: a symbol is not cut either
    return frozenset(pair for piece in pieces for pair in map(operator.add, piece, piece[1:]))


def _cut(text: bytes, place: int, joined: frozenset[str]) -> int:
    """The first place from `place` on where a text may be cut, or its end."""
    while place < len(text):
        while place < len(text) and text[place] & 0xC0 == 0x80:  # within a character
            place += 1
        window = str(text[place : place + _WINDOW_BYTES], "utf-8", "ignore")  # a character cut off at its end is
        for count, pair in enumerate(map(operator.add, window, window[1:]), 1):
            if pair.replace(SPACE_MARK, " ") not in joined:
                return place + len(window[:count].encode("utf-8"))
        if len(window) < 2:
            break
        place += len(window[:-1].encode("utf-8"))
    return len(text)


def _batches(texts: Iterable[str]) -> Iterator[_Batch]:
    """Batches of BATCH_BYTES, or of one longer text. Raises TokenizerError as `_utf8`."""
    batch: list[bytes] = []
    first = size = 0
    for number, text in enumerate(texts):
        raw = _utf8(text, f"text {number}")
        if batch and size + len(raw) + _BYTES_A_TEXT > BATCH_BYTES:
            yield _Batch(first, batch)
            first, batch, size = number, [], 0
        batch.append(raw)
        size += len(raw) + _BYTES_A_TEXT
    if batch:
        yield _Batch(first, batch)


def _utf8(text: str, name: str) -> bytes:
    """Raises TokenizerError for what is no str, and for a lone surrogate."""
    if not isinstance(text, str):
        raise TokenizerError(f"{name}: {type(text).__name__} where a str is expected")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{name}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start} has no UTF-8 form; "
            "drop or replace it"
        ) from error


def _plain_ids(ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
    """Raises TokenizerError for what is no row of integers, naming the place of the first that is none."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TokenizerError(f"ids: {ids.dtype} of shape {ids.shape} where one row of integers is expected")
        row: list[int] = ids.tolist()
        return row
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TokenizerError(f"ids: {type(ids).__name__} where a list or array of integers is expected")
    plain: list[int] = []
    try:
        plain.extend(map(operator.index, ids))
    except TypeError as error:
        raise TokenizerError(f"id at place {len(plain)}: {error}") from error
    return plain
