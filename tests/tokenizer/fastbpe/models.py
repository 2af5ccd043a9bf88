"""SentencePiece models made by hand: any pieces, scores and types, written as the protocol buffer that it reads."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence

from tokenizer.model_file import PieceType

Piece = tuple[str, float, PieceType]
BYTES: list[Piece] = [(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
CONTROLS: list[Piece] = [
    ("<unk>", 0.0, PieceType.UNKNOWN),
    ("<s>", 0.0, PieceType.CONTROL),
    ("</s>", 0.0, PieceType.CONTROL),
]


def write_model(pieces: Iterable[Piece], *, byte_fallback: bool, dummy_prefix: bool) -> bytes:
    """A BPE model of exactly these pieces, identity normalisation. Field numbers: sentencepiece_model.proto."""
    parts = []
    for text, score, kind in pieces:
        piece = _bytes(1, text.encode()) + _tag(2, 5) + struct.pack("<f", score) + _number(3, kind)
        parts.append(_bytes(1, piece))
    parts.append(_bytes(2, _number(3, 2) + _number(35, byte_fallback)))
    parts.append(_bytes(3, _bytes(1, b"identity") + _number(3, dummy_prefix) + _number(4, False) + _number(5, True)))
    return b"".join(parts)


def ranked(texts: Sequence[str]) -> list[Piece]:
    """Normal pieces, the first of which are merged first."""
    return [(text, -float(place), PieceType.NORMAL) for place, text in enumerate(texts)]


def random_model(chance: random.Random) -> tuple[bytes, list[str]]:
    """A small model full of ties, overlaps, gaps and control pieces at odd places, and the characters it is about."""
    characters = ["a", "b", "c", "\u2581", "é", "ß", "中", "国", "😀", "\U0010ffff", "\ufffd", "\n", "0", "\x01", " "]
    alphabet = chance.sample(characters, chance.randint(1, 9))
    texts = {"".join(chance.choices(alphabet, k=chance.randint(1, 6))) for _ in range(chance.randint(0, 60))}
    scores = [float(chance.randrange(-9, 9)) / 3 for _ in range(chance.choice([1, 3, 1000]))]
    pieces: list[Piece] = [(text, chance.choice(scores), PieceType.NORMAL) for text in sorted(texts)]
    for name in {chance.choice(alphabet) + chance.choice(["", "x", "y"]) for _ in range(chance.randint(0, 2))} - texts:
        pieces.append((name, 0.0, PieceType.CONTROL))
    byte_fallback = chance.random() < 0.5
    pieces += CONTROLS + BYTES * byte_fallback
    chance.shuffle(pieces)
    return write_model(pieces, byte_fallback=byte_fallback, dummy_prefix=chance.random() < 0.5), alphabet


def random_texts(chance: random.Random, alphabet: Sequence[str], count: int) -> list[bytes]:
    """Texts about the alphabet: some with spaces, with characters outside it, with bytes that are not UTF-8."""
    # bytes at the borders of what may follow what in UTF-8
    odd_bytes = bytes.fromhex("00 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e4 ed ef f0 f4 f5 ff")
    texts = []
    for _ in range(count):
        letters = [*alphabet, *chance.choice([[], [" "], ["z", " "], ["\x00", "ࠀ", "퟿", "\ue000", "\U00010000"]])]
        text = bytearray("".join(chance.choices(letters, k=chance.choice([0, 1, 2, 5, 20, 70, 200]))).encode())
        if chance.random() < 0.3:
            for _ in range(chance.randint(1, 6)):
                place = chance.randint(0, len(text))
                text[place : place + chance.randint(0, 2)] = bytes(chance.choices(odd_bytes, k=chance.randint(1, 4)))
        texts.append(bytes(text))
    return texts


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _number(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(value)) + value
