"""For which models the compiled encoder gives SentencePiece's ids."""

from __future__ import annotations

import numpy as np

from tokenizer.model_file import ModelFile, PieceType

MAX_VOCAB_SIZE = 1 << 24
MAX_PIECE_BYTES = 1024


def why_not(model: ModelFile) -> str | None:
    """None when the compiled encoder may encode for this model, else one clause that says what stands against it."""
    if model.model_type != "bpe":
        return f"the model is {model.model_type}, not bpe"
    if model.has_charsmap:
        return f"its normaliser {model.normalizer!r} changes characters"
    if model.remove_extra_whitespaces:
        return "it removes extra spaces"
    if not model.escape_whitespaces:
        return "it keeps spaces as they are instead of U+2581"
    if model.treat_whitespace_as_suffix:
        return "it puts spaces at the ends of words"
    if len(model.pieces) > MAX_VOCAB_SIZE:
        return f"its vocabulary of {len(model.pieces)} pieces is larger than {MAX_VOCAB_SIZE}"
    for kind, name in ((PieceType.USER_DEFINED, "user-defined symbols"), (PieceType.UNUSED, "unused pieces")):
        if count := int(np.count_nonzero(model.types == kind)):
            return f"it has {name} ({count})"
    if not np.isfinite(model.scores[model.types == PieceType.NORMAL]).all():
        return "some scores are not finite"
    if (longest := max(len(piece.encode("utf-8")) for piece in model.pieces)) > MAX_PIECE_BYTES:
        return f"a piece has {longest} bytes, more than {MAX_PIECE_BYTES}"
    return None
