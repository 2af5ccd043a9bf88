"""Any tokenizer as the report sees it: a folder of ours, a SentencePiece model file, a Hugging Face tokenizer.json.

A foreign tokenizer is judged as its file stands, but for three things: no begin or end ids are added, and truncation
and padding that the file asks for are switched off, since a cut text would count as well compressed. Special tokens
spelled in a text become what the file makes of them (Hugging Face's library gives the special id, unless the
tokenizer_config.json in the same folder says `split_special_tokens`, as transformers obeys it); the report counts such
ids, which for a tokenizer of ours are none.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenizer.codec import SPACE_MARK, Codec
from tokenizer.folder import DESCRIPTION_FILE, MODEL_FILE, read_file
from tokenizer.model_file import ModelFile, PieceType, TokenizerError
from tokenizer.reference import Reference, split

HUGGING_FACE_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAX_IDS = 1 << 24  # as many as `train` can make; a table of all ids is kept

Ids = npt.NDArray[np.integer[Any]]


class Candidate(ABC):
    """One tokenizer to be judged."""

    name: str
    kind: str  # what it is, for people
    fingerprint: str | None = None  # only ours have one
    types: npt.NDArray[np.uint8]  # (V,): the PieceType of each id
    spelling: list[bytes]  # (V,): the UTF-8 that an id stands for; of a byte piece its byte
    no_byte_fallback: str | None  # why there is no rate of byte fallback; None: there is one

    @property
    def vocab_size(self) -> int:
        """How many ids there are, 0 to the largest."""
        return len(self.types)

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        """The ids of each text, without begin and end."""

    @abstractmethod
    def decode(self, documents: Sequence[Ids]) -> list[str]:
        """The text of each row of ids."""


def open_candidate(path: Path, name: str) -> Candidate:
    """Open whatever tokenizer stands at `path`; `name` is what the report calls it.

    A folder is one of ours, or holds a tokenizer.json, or a tokenizer.model, and is taken for the first of these that
    fits. A file named .json is Hugging Face's, any other SentencePiece's; named by itself it is judged without what
    stands beside it. Raises TokenizerError when it is none.
    """
    if not path.is_dir():
        return _HuggingFace(path, name) if path.suffix == ".json" else _SentencePiece(path, name)
    if (path / DESCRIPTION_FILE).exists():
        return _Ours(path, name)
    if (path / HUGGING_FACE_FILE).exists():
        return _HuggingFace(path / HUGGING_FACE_FILE, name, config=path / CONFIG_FILE)
    if (path / MODEL_FILE).exists():
        return _SentencePiece(path / MODEL_FILE, name)
    raise TokenizerError(
        f"{path}: no tokenizer: the folder holds no {DESCRIPTION_FILE}, {HUGGING_FACE_FILE} or {MODEL_FILE}"
    )


class _SentencePieceModel(Candidate):
    """What both kinds have that come as a SentencePiece model file."""

    def __init__(self, path: Path, name: str, maker: str) -> None:
        self._content = _read(path)
        try:
            model = ModelFile.parse(self._content)
            self.spelling = [_spelling(piece, kind) for piece, kind in zip(model.pieces, model.types, strict=True)]
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error
        self.name, self.kind, self.types = name, f"{maker}, {model.model_type}", model.types
        self.no_byte_fallback = None if model.byte_fallback else "it has no byte pieces"


class _Ours(_SentencePieceModel):
    def __init__(self, folder: Path, name: str) -> None:
        self._codec = Codec.load(folder)
        super().__init__(folder / MODEL_FILE, name, "ours")
        self.fingerprint = self._codec.fingerprint

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        yield from self._codec.encode_documents(texts)

    def decode(self, documents: Sequence[Ids]) -> list[str]:
        return [self._codec.decode(ids) for ids in documents]


class _SentencePiece(_SentencePieceModel):
    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name, "SentencePiece")
        try:
            self._reference = Reference(self._content)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}; give another model file") from error

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        yield from split(*self._reference.encode([text.encode() for text in texts]))

    def decode(self, documents: Sequence[Ids]) -> list[str]:
        texts: list[str] = self._reference.processor.decode([ids.tolist() for ids in documents])
        return texts


class _HuggingFace(Candidate):
    def __init__(self, path: Path, name: str, config: Path | None = None) -> None:
        from tokenizers import Tokenizer

        content = _read(path)
        try:
            description = json.loads(content)
            model = description["model"]
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # what the library raises has no narrower class
            raise TokenizerError(
                f"{path}: not a tokenizer.json that Hugging Face's tokenizers reads ({type(error).__name__}: {error})"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = config is not None and config.exists() and _splits_special(config)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise TokenizerError(f"{path}: the vocabulary is empty; give a trained tokenizer")
        if max(ids.values()) >= MAX_IDS:
            raise TokenizerError(f"{path}: has id {max(ids.values())}; only ids below {MAX_IDS} can be judged")
        byte_level = _mentions(description, "ByteLevel")
        byte_fallback = bool(model.get("byte_fallback"))
        self.name, self._path = name, path
        self.kind = f"Hugging Face, {type(self._tokenizer.model).__name__}" + (", byte level" if byte_level else "")
        self.no_byte_fallback = None
        if not byte_fallback:
            self.no_byte_fallback = "every piece is made of bytes" if byte_level else "it has no byte pieces"

        self.types = np.full(max(ids.values()) + 1, PieceType.UNUSED, dtype=np.uint8)
        self.spelling = [b""] * len(self.types)
        alphabet = _byte_level_alphabet()
        for piece, token_id in ids.items():
            self.types[token_id] = PieceType.NORMAL
            self.spelling[token_id] = piece.replace(SPACE_MARK, " ").encode()
            if byte_fallback and piece in _BYTE_PIECES:
                self.types[token_id] = PieceType.BYTE
                self.spelling[token_id] = bytes([_BYTE_PIECES[piece]])
            elif byte_level and all(character in alphabet for character in piece):
                self.spelling[token_id] = bytes(alphabet[character] for character in piece)
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            self.types[token_id] = PieceType.CONTROL if added.special else PieceType.USER_DEFINED
            self.spelling[token_id] = added.content.encode()
        unknown = model.get("unk_id", ids.get(model.get("unk_token")))  # by id in Unigram, else by piece
        if unknown is not None:
            self.types[unknown] = PieceType.UNKNOWN

    def encode(self, texts: Sequence[str]) -> Iterator[Ids]:
        with self._named_failures("encode"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        for encoding in encodings:
            yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, documents: Sequence[Ids]) -> list[str]:
        with self._named_failures("decode"):
            return self._tokenizer.decode_batch([ids.tolist() for ids in documents], skip_special_tokens=False)

    @contextmanager
    def _named_failures(self, verb: str) -> Iterator[None]:
        """What a file asks for may be impossible only for some texts: an unknown token that its vocabulary lacks."""
        try:
            yield
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(f"{self._path}: Hugging Face's tokenizers can't {verb} by it ({error})") from error


_BYTE_PIECES = {f"<0x{value:02X}>": value for value in range(256)}


def _spelling(piece: str, kind: int) -> bytes:
    """What a piece of a SentencePiece model stands for."""
    if kind != PieceType.BYTE:
        return piece.replace(SPACE_MARK, " ").encode()
    if piece not in _BYTE_PIECES:
        raise TokenizerError(f"a piece for a byte is called {piece!r}; restore or retrain the model")
    return bytes([_BYTE_PIECES[piece]])


def _read(path: Path) -> bytes:
    return read_file(path, "give a tokenizer folder, a SentencePiece model or a tokenizer.json")


def _splits_special(config: Path) -> bool:
    """Whether a tokenizer_config.json says that special tokens spelled in a text are text."""
    content = _read(config)
    try:
        return bool(json.loads(content).get("split_special_tokens", False))
    except (ValueError, RecursionError, AttributeError) as error:
        raise TokenizerError(f"{config}: not a JSON object ({error}); restore it or remove it") from error


def _mentions(part: object, kind: str) -> bool:
    """Whether a part of a tokenizer.json, or a part of that, is of this type."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(
            _mentions(inner, kind) for key, inner in part.items() if key not in ("vocab", "merges", "added_tokens")
        )
    return isinstance(part, list) and any(_mentions(inner, kind) for inner in part)


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2, 2019): itself where Latin-1 shows it, else
    one from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
