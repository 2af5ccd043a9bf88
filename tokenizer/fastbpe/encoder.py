"""The compiled core behind Python: UTF-8 texts in, arrays of ids out, without the interpreter's lock.

A `FastBPE` may be used by any number of threads at once. Each call borrows an encoder (its caches and scratch) from
those that are idle, or makes one; so there are as many as calls that ever ran at the same time, each with its own
caches of at most `cache_bytes`. All are freed with the `FastBPE`. After a fork the child has copies of the idle ones.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenizer.fastbpe.build import build_id
from tokenizer.fastbpe.conditions import why_not
from tokenizer.model_file import ModelFile

DEFAULT_CACHE_BYTES = 16 << 20
MIN_CACHE_BYTES = 1 << 11
MAX_CACHE_BYTES = 1 << 36

_FOLDER = Path(__file__).parent


class Unsupported(Exception):  # noqa: N818 - it is an answer: another encoder takes over
    """This model, or this installation, can't use the compiled encoder. One clause: why."""


@dataclass(frozen=True)
class Stats:
    """What the encoders of a `FastBPE` did and hold. Every segment is a hit or a miss of a cache."""

    encoders: int
    segments: int
    hits: int
    misses: int
    evictions: int
    cache_bytes: int  # of all encoders together, at most
    scratch_bytes: int  # kept beside them until the next call
    model_bytes: int  # shared tables


class FastBPE:
    """SentencePiece's BPE for one model. `FastBPE.build(model)` is the way in."""

    def __init__(self, model: _Model, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes
        self._model = model
        self._dtype: npt.DTypeLike = np.uint16 if model.id_bytes == 2 else np.uint32
        self._encoders: list[_Encoder] = []  # all
        self._idle: list[_Encoder] = []  # those that no call is using; append and pop are atomic

    @classmethod
    def build(cls, model: ModelFile, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> FastBPE:
        """The encoder for a model; `cache_bytes` is what the caches of one thread may hold.

        Raises Unsupported when the model is outside the conditions or the core isn't built, MemoryError, ValueError.
        """
        if not MIN_CACHE_BYTES <= cache_bytes <= MAX_CACHE_BYTES:
            raise ValueError(f"cache_bytes {cache_bytes}: must be {MIN_CACHE_BYTES} to {MAX_CACHE_BYTES}")
        if reason := why_not(model):
            raise Unsupported(reason)
        return cls(_Model(_core(), model), cache_bytes)

    def encode(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]:
        """Ids of all texts end to end, uint16 or (vocabularies over 65,536) uint32, and where each text's ids end.

        Texts are UTF-8; a malformed byte counts as U+FFFD, as in SentencePiece. Time is linear in the bytes, n log n
        in the characters of one segment without a safe cut. Raises MemoryError; OverflowError for 2^32 - 1 characters
        without a safe cut; TypeError for texts that are no bytes.
        """
        lengths = np.fromiter(map(len, texts), dtype=np.uint64, count=len(texts))
        joined = b"".join(texts)
        ends = np.cumsum(lengths, dtype=np.uint64)
        if len(ends) and int(ends[-1]) != len(joined):
            raise TypeError("texts must be bytes")
        try:
            encoder = self._idle.pop()
        except IndexError:
            encoder = _Encoder(self._model, self.cache_bytes)
            self._encoders.append(encoder)
        try:
            return encoder.encode(joined, ends, self._dtype)
        finally:
            self._idle.append(encoder)

    def stats(self) -> Stats:
        """Sums over all encoders, of the calls that have ended."""
        stats = [encoder.stats() for encoder in list(self._encoders)]
        return Stats(
            encoders=len(stats),
            segments=sum(one.hits + one.misses for one in stats),
            hits=sum(one.hits for one in stats),
            misses=sum(one.misses for one in stats),
            evictions=sum(one.evictions for one in stats),
            cache_bytes=sum(one.cache_bytes for one in stats),
            scratch_bytes=sum(one.scratch_bytes for one in stats),
            model_bytes=self._model.bytes,
        )


class _Vocabulary(ctypes.Structure):
    """fastbpe_vocabulary of core.h."""

    _fields_ = (
        ("text", ctypes.c_char_p),
        ("text_bytes", ctypes.c_uint64),
        ("ends", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("size", ctypes.c_uint32),
        ("byte_fallback", ctypes.c_uint8),
        ("dummy_prefix", ctypes.c_uint8),
    )


class _Counts(ctypes.Structure):
    """fastbpe_stats of core.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("hits", "misses", "evictions", "cache_bytes", "scratch_bytes")
    )


class _Model:
    """The tables of a vocabulary, freed with the last encoder that uses them."""

    def __init__(self, core: ctypes.CDLL, model: ModelFile) -> None:
        self.core = core
        self.handle = ctypes.c_void_p()
        pieces = [piece.encode("utf-8") for piece in model.pieces]
        text = b"".join(pieces)
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.uint64)
        scores = np.ascontiguousarray(model.scores, dtype=np.float32)
        types = np.ascontiguousarray(model.types, dtype=np.uint8)
        if not len(pieces) == len(scores) == len(types):
            raise ValueError(f"{len(pieces)} pieces, {len(scores)} scores, {len(types)} types")
        vocabulary = _Vocabulary(
            text=text,
            text_bytes=len(text),
            ends=ends.ctypes.data,
            scores=scores.ctypes.data,
            types=types.ctypes.data,
            size=len(pieces),
            byte_fallback=model.byte_fallback,
            dummy_prefix=model.add_dummy_prefix,
        )
        reason = ctypes.create_string_buffer(200)
        status = core.fastbpe_model_new(ctypes.byref(vocabulary), ctypes.byref(self.handle), reason, len(reason))
        if status == _BAD_MODEL:
            raise Unsupported(reason.value.decode("ascii"))
        _require_ok(status)
        self.id_bytes: int = core.fastbpe_id_bytes(self.handle)
        self.bytes: int = core.fastbpe_model_bytes(self.handle)

    def __del__(self) -> None:
        self.core.fastbpe_model_free(self.handle)


class _Encoder:
    """Caches and scratch, for one call at a time."""

    def __init__(self, model: _Model, cache_bytes: int) -> None:
        self.model = model  # must outlive the handle
        self.handle = ctypes.c_void_p()
        _require_ok(model.core.fastbpe_encoder_new(model.handle, cache_bytes, ctypes.byref(self.handle)))

    def encode(
        self, text: bytes, ends: npt.NDArray[np.uint64], dtype: npt.DTypeLike
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]:
        core, count = self.model.core, len(ends)
        id_ends = np.empty(count, dtype=np.uint64)
        _require_ok(core.fastbpe_encode(self.handle, text, len(text), ends.ctypes.data, count, id_ends.ctypes.data))
        ids = np.empty(int(id_ends[-1]) if count else 0, dtype=dtype)
        _require_ok(core.fastbpe_take(self.handle, ids.ctypes.data, len(ids)))
        return ids, id_ends

    def stats(self) -> _Counts:
        counts = _Counts()
        self.model.core.fastbpe_encoder_stats(self.handle, ctypes.byref(counts))
        return counts

    def __del__(self) -> None:
        self.model.core.fastbpe_encoder_free(self.handle)


# enum fastbpe_status of core.h
_BAD_MODEL = 2
_ERRORS: dict[int, Exception] = {
    1: ValueError("the compiled encoder was called with impossible sizes"),
    3: MemoryError("the compiled encoder got no memory"),
    4: OverflowError("a text has 2^32 - 1 or more characters between which it can't be cut"),
}


def _require_ok(status: int) -> None:
    if status:
        raise type(_ERRORS[status])(*_ERRORS[status].args)


def _is_cut_short(path: Path) -> bool:
    """Whether an ELF library lacks its end, whose loading may kill the process with SIGBUS. Linkers put the table of
    sections last: e_shoff, e_shentsize and e_shnum of the 64-bit file header say where it ends (System V ABI, chapter
    4). False for other formats.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF":
        return False
    if len(header) < 64:
        return True
    if header[4] != 2:  # not of 64 bits
        return False
    offset, size, count = struct.unpack(("<" if header[5] == 1 else ">") + "40x Q 10x 2H 2x", header)
    return path.stat().st_size < int(offset + size * count)


@functools.cache
def _core() -> ctypes.CDLL:
    """The compiled library beside this file. Raises Unsupported when there is none, or one of other sources."""
    paths = [_FOLDER / f"_core{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise Unsupported("the compiled encoder isn't built (install a C++ compiler and run `pip install -e .` again)")
    try:
        if _is_cut_short(path):
            raise Unsupported("the compiled encoder's file is cut short; run `pip install -e .` again")
        core = ctypes.CDLL(str(path))
        core.fastbpe_build_id.restype = ctypes.c_char_p
        stale = core.fastbpe_build_id().decode("ascii") != build_id(_FOLDER)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"the compiled encoder can't be loaded ({error}); run `pip install -e .` again") from error
    if stale:
        raise Unsupported("the compiled encoder is older than its sources; run `pip install -e .` again")

    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    core.fastbpe_model_new.argtypes = [pointer, pointer, ctypes.c_char_p, number]
    core.fastbpe_model_free.argtypes = [pointer]
    core.fastbpe_model_free.restype = None
    core.fastbpe_model_bytes.argtypes = [pointer]
    core.fastbpe_model_bytes.restype = number
    core.fastbpe_id_bytes.argtypes = [pointer]
    core.fastbpe_id_bytes.restype = ctypes.c_uint32
    core.fastbpe_encoder_new.argtypes = [pointer, number, pointer]
    core.fastbpe_encoder_free.argtypes = [pointer]
    core.fastbpe_encoder_free.restype = None
    core.fastbpe_encoder_stats.argtypes = [pointer, pointer]
    core.fastbpe_encoder_stats.restype = None
    core.fastbpe_encode.argtypes = [pointer, ctypes.c_char_p, number, pointer, number, pointer]
    core.fastbpe_take.argtypes = [pointer, pointer, number]
    return core
