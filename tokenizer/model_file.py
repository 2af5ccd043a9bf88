"""What stands in SentencePiece's model file, read without SentencePiece.

The file is a protocol buffer; numbers of fields and their defaults are those of sentencepiece_model.proto. The reader
that comes with the sentencepiece package is not used: it registers a name that transformers registers too, and of the
two whichever is imported second fails.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

ModelType = Literal["unigram", "bpe", "word", "char"]

_MODEL_TYPES: dict[int, ModelType] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


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
        scores: list[float] = []
        types: list[int] = []
        trainer, normalizer = _Message(), _Message()
        try:
            for field, start, end in protobuf_fields(model, 0, len(model)):
                if field == 1:
                    piece = _Message()
                    piece.read(model, start, end)
                    pieces.append(piece.text(1))
                    scores.append(piece.float32(2))
                    types.append(PieceType(piece.integer(3, default=PieceType.NORMAL)))
                elif field == 2:
                    trainer.read(model, start, end)
                elif field == 3:
                    normalizer.read(model, start, end)
            if not pieces:
                raise ValueError("no pieces")
            return cls(
                pieces=pieces,
                scores=np.array(scores, dtype=np.float32),
                types=np.array(types, dtype=np.uint8),
                model_type=_MODEL_TYPES[trainer.integer(3, default=1)],
                byte_fallback=bool(trainer.integer(35, default=0)),
                treat_whitespace_as_suffix=bool(trainer.integer(24, default=0)),
                normalizer=normalizer.text(1),
                has_charsmap=bool(normalizer.get(2)),
                add_dummy_prefix=bool(normalizer.integer(3, default=1)),
                remove_extra_whitespaces=bool(normalizer.integer(4, default=1)),
                escape_whitespaces=bool(normalizer.integer(5, default=1)),
                ids={
                    "unk": trainer.integer(40, default=0),
                    "bos": trainer.integer(41, default=1),
                    "eos": trainer.integer(42, default=2),
                    "pad": trainer.integer(43, default=-1),
                },
            )
        except (ValueError, KeyError, IndexError, struct.error) as error:
            raise TokenizerError(f"not a whole SentencePiece model ({error}); restore or retrain it") from error


class _Message(dict[int, bytes]):
    """The fields of one message, by number, as raw values; of a field given twice the last counts."""

    def read(self, data: bytes, start: int, end: int) -> None:
        for field, value_start, value_end in protobuf_fields(data, start, end):
            self[field] = data[value_start:value_end]

    def text(self, field: int) -> str:
        return self.get(field, b"").decode("utf-8")

    def float32(self, field: int) -> float:
        value: float = struct.unpack("<f", self[field])[0] if field in self else 0.0
        return value

    def integer(self, field: int, *, default: int) -> int:
        if field not in self:
            return default
        value, _ = _varint(self[field], 0)
        return value - (1 << 64) if value >= 1 << 63 else value


def protobuf_fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, end) of each value in the message that lies at data[start:end].

    The format: protobuf.dev/programming-guides/encoding. Raises ValueError or IndexError where the data is none.
    """
    while start < end:
        tag, start = _varint(data, start)
        wire_type = tag & 7
        if wire_type == 0:
            stop = _varint(data, start)[1]
        elif wire_type == 2:
            length, start = _varint(data, start)
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
    """The number at `place` and where it ends: seven bits a byte, lowest first."""
    byte = data[place]
    if byte < 0x80:
        return byte, place + 1
    value = shift = 0
    while byte >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        place += 1
        byte = data[place]
    return value | byte << shift, place + 1
