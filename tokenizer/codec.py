"""Text to token ids and back, exactly as SentencePiece does it.

A tokenizer is a folder of two files: `tokenizer.model` (SentencePiece's own) and `description.json` (ours: what it
is, how it was made, its fingerprint). The fingerprint covers the model file *and* the ids that this code gives for a
fixed probe text, so token files refuse a tokenizer that has the same file but, after an upgrade of a library, another
behaviour.

Text is text: `</s>` or `<s>` written in a document are ordinary characters. Control ids come only from the `bos` and
`eos` arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from tokenizer.model_file import TokenizerError

__all__ = ["Codec", "TokenizerError"]

MODEL_FILE = "tokenizer.model"
DESCRIPTION_FILE = "description.json"
FORMAT = "zerohalf-tokenizer"
VERSION = 1

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


class Codec:
    """One tokenizer, ready to use. `Codec.load(folder)` is the way in."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        self.folder = folder
        self._files = dict(files)
        self._model = _parse_model(folder, files[MODEL_FILE])
        self.vocab_size: int = self._model.vocab_size()
        self.unk_id: int = self._model.unk_id()
        self.bos_id: int = self._model.bos_id()
        self.eos_id: int = self._model.eos_id()
        self.pad_id: int = self._model.pad_id()
        for name, token_id in self.control_ids.items():
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(f"{folder}: the model has no {name} id; train it with `tokenizer train`")
        self.fingerprint = self._compute_fingerprint()

    @classmethod
    def load(cls, folder: Path | str) -> Codec:
        """Read a tokenizer and prove that it still behaves as when it was made.

        Raises TokenizerError when the folder is missing, incomplete or damaged, or gives other ids than its
        description promises.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise TokenizerError(f"{folder}: no such tokenizer folder; make one with `tokenizer train --out {folder}`")
        description_bytes = _read(folder / DESCRIPTION_FILE)
        description = _parse_description(folder / DESCRIPTION_FILE, description_bytes)
        model = _read(folder / MODEL_FILE)
        if hashlib.sha256(model).hexdigest() != description.get("model_sha256"):
            raise TokenizerError(
                f"{folder / MODEL_FILE}: the file differs from the one described; restore or retrain it"
            )
        codec = cls(folder, {MODEL_FILE: model, DESCRIPTION_FILE: description_bytes})
        if codec.fingerprint != description.get("fingerprint"):
            raise TokenizerError(
                f"{folder}: fingerprint is {codec.fingerprint[:12]}, the description says "
                f"{str(description.get('fingerprint'))[:12]}: sentencepiece {sentencepiece.__version__} encodes "
                f"otherwise than {description.get('versions')}; install that version or retrain"
            )
        if codec.vocab_size != description.get("vocab_size") or codec.control_ids != description.get("ids"):
            raise TokenizerError(f"{folder}: vocab_size or ids of {DESCRIPTION_FILE} differ from the model's; retrain")
        return codec

    @property
    def control_ids(self) -> dict[str, int]:
        """The four ids that stand for no text, by name."""
        return {"unk": self.unk_id, "bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id}

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of one text, each in [0, vocab_size). Linear in the length of the text, also for one very long word.

        Raises TokenizerError for a lone surrogate: such a str has no UTF-8 form.
        """
        _require_unicode(text, "text")
        ids: list[int] = self._model.encode(text)
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """One array of ids per text, control ids in none of them.

        Raises TokenizerError for a lone surrogate, naming the text by its place in the sequence.
        """
        for number, text in enumerate(texts):
            _require_unicode(text, f"text {number}")
        return [np.array(self._model.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of the ids. Control ids give no text, except unk (` ⁇ `); broken byte sequences give U+FFFD.

        Raises TokenizerError for an id outside [0, vocab_size).
        """
        plain: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else [int(token_id) for token_id in ids]
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
        (ids,) = self.encode_documents([PROBE_TEXT])
        digest = hashlib.sha256(b"zerohalf-tokenizer-fingerprint-1\0")
        digest.update(hashlib.sha256(self._files[MODEL_FILE]).digest())
        digest.update(ids.astype("<u4").tobytes())
        return digest.hexdigest()


def publish(files: Mapping[str, bytes], folder: Path, *, overwrite: bool) -> None:
    """Make `folder` hold exactly these files: whole or not at all, whenever the process is killed.

    A folder that exists is replaced only with `overwrite`, and only if it is a tokenizer (see `refuse_occupied`).
    """
    refuse_occupied(folder, overwrite=overwrite)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One hidden working folder beside the target holds the new files, and for a moment the old ones.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent) as work:
        fresh, retired = Path(work, "fresh"), Path(work, "retired")
        fresh.mkdir()
        for name, content in files.items():
            with (fresh / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync_folder(fresh)
        if folder.exists():
            folder.rename(retired)
        try:
            fresh.rename(folder)
        except OSError:
            if retired.exists():
                retired.rename(folder)
            raise
        _sync_folder(folder.parent)


def refuse_occupied(folder: Path, *, overwrite: bool) -> None:
    """Raise TokenizerError unless `folder` is free: absent, empty, or a tokenizer that may be overwritten."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise TokenizerError(f"{folder}: exists and is not a folder; choose another --out")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if {entry.name for entry in folder.iterdir()} - {MODEL_FILE, DESCRIPTION_FILE}:
        raise TokenizerError(f"{folder}: holds files that are no tokenizer's; choose another --out")
    if not overwrite:
        raise TokenizerError(f"{folder}: holds a tokenizer already; choose another --out or pass --overwrite")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"{path}: {error.strerror}; a tokenizer folder holds {MODEL_FILE} and {DESCRIPTION_FILE}"
        ) from error


def _parse_description(path: Path, content: bytes) -> dict[str, Any]:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON ({error}); restore or retrain the tokenizer") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise TokenizerError(f"{path}: not the description of a tokenizer (no format {FORMAT!r})")
    if description.get("version") != VERSION:
        raise TokenizerError(
            f"{path}: format version {description.get('version')}, this program reads {VERSION}; retrain"
        )
    return description


def _parse_model(folder: Path, model: bytes) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise TokenizerError(f"{folder / MODEL_FILE}: sentencepiece can't read it ({error})") from error
    return processor


def _require_unicode(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{name}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start} has no UTF-8 form; "
            "drop or replace it"
        ) from error
