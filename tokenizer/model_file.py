"""What stands in SentencePiece's model file, read without SentencePiece.

The file is a protocol buffer; numbers of fields and their defaults are those of sentencepiece_model.proto. The reader
that comes with the sentencepiece package is not used: it registers a name that transformers registers too, and of the
two whichever is imported second fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

ModelType = Literal["unigram", "bpe", "word", "char"]

_MODEL_TYPES: dict[int, ModelType] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_NO_SCORE = bytes(4)


class TokenizerError(ValueError):
    """A tokenizer that can't be read, made or used as asked. One line: what is wrong, the numbers, what to change."""


class PieceType(IntEnum):
    """What a piece of the vocabulary is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model as data: what decides the ids of a text, except the table of a normaliser (see `has_charsmap`)."""

    pieces: list[str]  # V of them; a space shows as U+2581
    scores: npt.NDArray[np.float32]  # (V,)
    types: npt.NDArray[np.uint8]  # (V,), each a PieceType
    model_type: ModelType
    byte_fallback: bool
    treat_whitespace_as_suffix: bool
    normalizer: str  # the name of its rule, which decides nothing
    has_charsmap: bool  # characters are replaced by a table before all else
    add_dummy_prefix: bool  # a space is put before every text
    remove_extra_whitespaces: bool
    escape_whitespaces: bool  # a space becomes U+2581
    ids: dict[str, int]  # unk, bos, eos and pad as they were asked of the trainer; -1: none

    @classmethod
    def parse(cls, model: bytes) -> ModelFile:
        """Read a whole model file. Raises TokenizerError when it is damaged or something else."""
        pieces: list[str] = []
        scores: list[bytes] = []
        types: list[int] = []
        trainer: dict[int, bytes] = {}
        normalizer: dict[int, bytes] = {}
        try:
            for field, start, end in protobuf_fields(model, 0, len(model)):
                if field == 1:
                    piece = _message(model, start, end)
                    pieces.append(_text(piece, 1))
                    scores.append(piece.get(2, _NO_SCORE))
                    types.append(_integer(piece, 3, default=1))
                elif field == 2:
                    trainer.update(_message(model, start, end))
                elif field == 3:
                    normalizer.update(_message(model, start, end))
            if not pieces:
                raise ValueError("no pieces")
            if set(map(len, scores)) != {4}:
                raise ValueError("scores that are no 32-bit numbers")
            if unknown := set(types).difference(PieceType):
                raise ValueError(f"pieces of type {min(unknown)}")
            return cls(
                pieces=pieces,
                scores=np.frombuffer(b"".join(scores), dtype="<f4"),
                types=np.array(types, dtype=np.uint8),
                model_type=_MODEL_TYPES[_integer(trainer, 3, default=1)],
                byte_fallback=bool(_integer(trainer, 35, default=0)),
                treat_whitespace_as_suffix=bool(_integer(trainer, 24, default=0)),
                normalizer=_text(normalizer, 1),
                has_charsmap=bool(normalizer.get(2)),
                add_dummy_prefix=bool(_integer(normalizer, 3, default=1)),
                remove_extra_whitespaces=bool(_integer(normalizer, 4, default=1)),
                escape_whitespaces=bool(_integer(normalizer, 5, default=1)),
                ids={
                    "unk": _integer(trainer, 40, default=0),
                    "bos": _integer(trainer, 41, default=1),
                    "eos": _integer(trainer, 42, default=2),
                    "pad": _integer(trainer, 43, default=-1),
                },
            )
        except (ValueError, KeyError, IndexError) as error:
            raise TokenizerError(f"not a whole SentencePiece model ({error}); restore or retrain it") from error


def _message(data: bytes, start: int, end: int) -> dict[int, bytes]:
    """The raw values of a message by field number; of a field given twice the last counts."""
    return {field: data[start:end] for field, start, end in protobuf_fields(data, start, end)}


def _text(message: dict[int, bytes], field: int) -> str:
    return message.get(field, b"").decode("utf-8")


def _integer(message: dict[int, bytes], field: int, *, default: int) -> int:
    if field not in message:
        return default
    value, _ = _varint(message[field], 0)
    return value - (1 << 64) if value >= 1 << 63 else value


def protobuf_fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, end) of each value in the message that lies at data[start:end].

    The format: protobuf.dev/programming-guides/encoding. Raises ValueError or IndexError where the data is none.
    """
    while start < end:
        tag, start = (data[start], start + 1) if data[start] < 0x80 else _varint(data, start)
        wire_type = tag & 7
        if wire_type == 0:
            stop = _varint(data, start)[1]
        elif wire_type == 2:
            length, start = (data[start], start + 1) if data[start] < 0x80 else _varint(data, start)
            stop = start + length
        elif wire_type in (1, 5):
            stop = start + (8 if wire_type == 1 else 4)
        else:
            raise ValueError(f"wire type {wire_type} at byte {start}")
        if stop > end:
            raise ValueError(f"a value ends at byte {stop}, its message at byte {end}")
        yield tag >> 3, start, stop
        start = stop


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at `place` and where it ends: seven bits a byte, lowest first. Most take one byte, so
    `protobuf_fields` looks for that first: twice as fast over a large vocabulary.
    """
    value = shift = 0
    while data[place] >= 0x80:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1
