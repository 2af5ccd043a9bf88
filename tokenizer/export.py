"""A tokenizer as Hugging Face files, ids proven equal before anything is written.

SentencePiece's BPE puts together, again and again, the two neighbours whose concatenation is the piece with the best
score; the leftmost pair where scores tie. The BPE of the `tokenizers` library ranks pairs instead of pieces. So each
piece becomes all pairs of pieces that spell it, in the order of the pieces' scores.

What the library can't do like SentencePiece is refused, not approximated: unigram (it adds scores in 64-bit floats,
SentencePiece in 32-bit ones; of two nearly equal segmentations, as runs of spaces have them, it takes the other one in
some 3 of 100 documents), normalisation by a table (it loses combining marks after characters that the table changes),
a dummy prefix, unused pieces.

Text is text here too: transformers finds special tokens written in a text and gives their ids, unless the
configuration says `split_special_tokens`, which it does, and which `save_pretrained` keeps. The price: a prompt or chat
template that spells `</s>` gets the characters; give `split_special_tokens=False` in such a call. The file format of
the `tokenizers` library itself has no place for this: set `encode_special_tokens = True` on a `Tokenizer` read from
tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenizer.codec import MODEL_FILE, PROBE_TEXT, SPACE_MARK, Codec
from tokenizer.folder import DESCRIPTION_FILE, publish, read_folder, refuse_occupied, refuse_unwritable
from tokenizer.model_file import ModelFile, PieceType, TokenizerError
from tokenizer.selftest import difference, probe_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_JSON = "tokenizer.json"
CONFIG_JSON = "tokenizer_config.json"
SPECIAL_TOKENS_JSON = "special_tokens_map.json"
EXPORTED_FILES = frozenset({TOKENIZER_JSON, CONFIG_JSON, SPECIAL_TOKENS_JSON, MODEL_FILE})

NO_LIMIT = int(1e30)  # what transformers takes for "texts of any length"
_LONG_RUN = 20_000


@dataclass(frozen=True)
class ExportReport:
    """What was written, and on how much text it was proven. Bytes are UTF-8 bytes of text."""

    folder: Path
    vocab_size: int
    merges: int
    verified_texts: int
    verified_bytes: int


def export_hf(folder: Path, out: Path, *, overwrite: bool = False) -> ExportReport:
    """Write the tokenizer in `folder` as files for transformers' AutoTokenizer: the folder `out`, whole or not at all.

    Raises TokenizerError as `hf_files`, and for an `out` that is occupied or can't be written.
    """
    refuse_unwritable(out)
    _refuse_tokenizer(folder, out)
    refuse_occupied(out, overwrite=overwrite, replaceable=EXPORTED_FILES)
    files, report = hf_files(folder)
    publish(files, out, overwrite=overwrite, replaceable=EXPORTED_FILES)
    return replace(report, folder=out)


def hf_files(folder: Path) -> tuple[dict[str, bytes], ExportReport]:
    """The files by name that make transformers' AutoTokenizer of the tokenizer in `folder`.

    Their ids and texts have been compared with SentencePiece's: all pieces, overlapping pieces, random texts, long runs
    (see `probe_texts` and `_texts`). Raises TokenizerError: a model that the library can't encode alike, naming the
    reason or the text that differs.
    """
    codec = Codec.load(folder)
    model_bytes = read_folder(folder)[MODEL_FILE]
    model = ModelFile.parse(model_bytes)
    if reason := why_not(model):
        raise TokenizerError(f"{folder}: can't be exported with equal ids: {reason}")
    special = {f"{name}_token": codec.piece(token_id) for name, token_id in codec.control_ids.items()}
    tokenizer = tokenizer_json(model)
    added = {str(entry["id"]): {**entry} for entry in tokenizer["added_tokens"]}
    for entry in added.values():
        del entry["id"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # also in a model's folder, whose class would be another one
        **special,
        # transformers 4 knows this name alone; 5 calls it extra_special_tokens, and takes both. Without it,
        # all_special_ids and get_special_tokens_mask leave these ids out.
        "additional_special_tokens": [
            name for name, token_id in codec.symbols.items() if model.types[token_id] == PieceType.CONTROL
        ],
        "add_bos_token": False,
        "add_eos_token": False,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LIMIT,
        "model_input_names": ["input_ids", "attention_mask"],
        "added_tokens_decoder": added,
    }
    contents = {TOKENIZER_JSON: tokenizer, CONFIG_JSON: config, SPECIAL_TOKENS_JSON: special}
    files = {name: _json(content) for name, content in contents.items()}
    texts = list(_texts(model))
    try:
        _verify(files[TOKENIZER_JSON], codec, texts)
    except TokenizerError as error:
        raise TokenizerError(f"{folder}: can't be exported with equal ids: {error}") from error
    report = ExportReport(
        folder=folder,
        vocab_size=len(model.pieces),
        merges=len(tokenizer["model"]["merges"]),
        verified_texts=len(texts),
        verified_bytes=sum(len(text.encode("utf-8")) for text in texts),
    )
    return {**files, MODEL_FILE: model_bytes}, report


def _refuse_tokenizer(folder: Path, out: Path) -> None:
    """Raise TokenizerError if `out` is a tokenizer that `train` made: `folder` itself or another."""
    if (out / DESCRIPTION_FILE).exists():
        what = (
            "is the tokenizer's own folder"
            if out.resolve() == folder.resolve()
            else "holds a tokenizer, not an export of one"
        )
        raise TokenizerError(f"{out}: {what}; choose another --out")


def why_not(model: ModelFile) -> str | None:
    """Why the `tokenizers` library can't give this model's ids for every text, in one clause; None if it can."""
    if model.model_type == "unigram":
        return "unigram scores are added in 64-bit floats there, in 32-bit ones here, and near ties fall otherwise"
    if model.model_type != "bpe":
        return f"model type {model.model_type}; only bpe can"
    if model.has_charsmap:
        return f"normalisation {model.normalizer} is done otherwise there (combining marks); train with identity"
    if model.add_dummy_prefix or model.remove_extra_whitespaces or model.treat_whitespace_as_suffix:
        return "it adds, removes or moves spaces; train it with `tokenizer train`, which does not"
    if not model.escape_whitespaces or not model.byte_fallback:
        return "it keeps spaces as they are, or has no byte pieces; train it with `tokenizer train`"
    if PieceType.UNUSED in model.types:
        return "it has unused pieces, which text is merged into and out of again"
    scores = [float(score) for piece, score, _ in _learned(model) if len(piece) > 1]
    if len(set(scores)) < len(scores):
        return "two pieces have the same score, and the library has no ties"
    return None


def tokenizer_json(model: ModelFile) -> dict[str, Any]:
    """The content of tokenizer.json for a model that `why_not` has nothing against."""
    added = [
        {
            "id": token_id,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            # SentencePiece looks for its user-defined symbols after spaces have become U+2581.
            "normalized": kind == PieceType.USER_DEFINED,
            "special": kind != PieceType.USER_DEFINED,
        }
        for token_id, (piece, kind) in enumerate(zip(model.pieces, model.types.tolist(), strict=True))
        if kind in (PieceType.UNKNOWN, PieceType.CONTROL)
        or (kind == PieceType.USER_DEFINED and " " not in piece)  # so it finds none with a space
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.pieces[int(np.flatnonzero(model.types == PieceType.UNKNOWN)[0])],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: token_id for token_id, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }


def _learned(model: ModelFile) -> list[tuple[str, np.float32, int]]:
    """(piece, score, id) of all pieces that text is merged into, the best score first."""
    ids = np.flatnonzero(model.types == PieceType.NORMAL)
    ids = ids[np.argsort(-model.scores[ids], kind="stable")]
    return [(model.pieces[token_id], model.scores[token_id], int(token_id)) for token_id in ids]


def _merges(model: ModelFile) -> list[tuple[str, str]]:
    """Pairs of pieces, the first to be merged first; of one piece, the pair with the longer left part.

    The order of one piece's pairs would matter only where x y z stand side by side and xy and yz spell that same piece:
    SentencePiece merges the left two. No merging from the left seems to lead there: thousands of random models over one
    to three letters gave equal ids with either order.
    """
    learned = _learned(model)
    known = {piece for piece, _, _ in learned}
    return [
        (piece[:at], piece[at:])
        for piece, _, _ in learned
        for at in range(len(piece) - 1, 0, -1)
        if piece[:at] in known and piece[at:] in known
    ]


def _texts(model: ModelFile) -> Iterator[str]:
    """What the export is verified with: the texts of the codec's self-test, runs of what pieces repeat, between other
    characters, and one long text.
    """
    texts = list(probe_texts(model, PROBE_TEXT, seed=1))
    yield from texts
    yield "".join(texts)
    yield " " * _LONG_RUN
    units = {unit for piece, _, _ in _learned(model) if (unit := _repeated(piece.replace(SPACE_MARK, " ")))}
    for unit in sorted(units):
        yield "".join(
            f"{edge}{unit * count}" for count in range(1, 40) for edge in ("\n", unit[-1] + "x", "x" + unit[0])
        )


def _repeated(piece: str) -> str | None:
    """The shortest text of which a piece is three or more copies."""
    for length in range(1, len(piece) // 3 + 1):
        if piece[:length] * (len(piece) // length) == piece:
            return piece[:length]
    return None


def _verify(content: bytes, codec: Codec, texts: Sequence[str]) -> None:
    """Raise TokenizerError, naming the text, unless tokenizer.json gives the codec's ids and texts."""
    tokenizer = _open(content)
    if tokenizer.get_vocab_size() != codec.vocab_size:
        raise TokenizerError(f"it has {tokenizer.get_vocab_size()} ids where ours has {codec.vocab_size}")
    ours = list(codec.encode_documents(texts))
    theirs = [np.array(row.ids, np.uint32) for row in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    decoded = tokenizer.decode_batch([row.tolist() for row in ours], skip_special_tokens=True)
    for text, right, ids, back in zip(texts, ours, theirs, decoded, strict=True):
        if not np.array_equal(ids, right):
            raise TokenizerError(f"the tokenizers library differs: {difference(ids, right)} {text!a:.200}")
        if back != codec.decode(right):
            raise TokenizerError(f"the tokenizers library decodes otherwise: {back!a:.100} for {text!a:.200}")


def _open(content: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises Exception itself
        raise TokenizerError(f"the tokenizers library can't read what was made of it ({error})") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=2).encode("utf-8") + b"\n"
