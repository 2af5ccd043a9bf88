"""SentencePiece itself: what it says is right. Other encoders are held against it; it alone decodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece

from tokenizer.model_file import TokenizerError

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Ends = npt.NDArray[np.uint64]


class Encoder(Protocol):
    """Whatever turns texts into ids: SentencePiece, or something faster with the same answers."""

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Ends]:
        """The ids of all texts (UTF-8) end to end, and for each text where its ids end in them."""
        ...


class Reference:
    """A SentencePiece model of any type, in one thread. It lets other Python threads run while it encodes."""

    def __init__(self, model: bytes) -> None:
        """Raises TokenizerError when SentencePiece can't read the model."""
        self.processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise TokenizerError(f"sentencepiece can't read it ({error})") from error

    def encode(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], Ends]:
        """See `Encoder`. No id is added before or after a text."""
        rows = [self.processor.encode(text, return_type="numpy") for text in texts]
        ids = np.concatenate([np.empty(0, np.uint32), *rows], dtype=np.uint32, casting="unsafe")  # they are int32
        return ids, np.cumsum([len(row) for row in rows], dtype=np.uint64)


def split(ids: npt.NDArray[Any], ends: Ends) -> list[npt.NDArray[np.uint32]]:
    """The ids of each text, (tokens,). Those of one call may share memory."""
    ids = ids.astype(np.uint32, copy=False)
    return [ids[start:stop] for start, stop in pairwise([0, *ends.tolist()])]
