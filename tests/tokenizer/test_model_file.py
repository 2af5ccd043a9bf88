from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from tokenizer.model_file import ModelFile, PieceType, TokenizerError, protobuf_fields

ROOT = Path(__file__).resolve().parents[2]


def trained(texts: list[str], **options: Any) -> bytes:
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n")),
        model_writer=writer,
        minloglevel=2,
        **options,
    )
    return writer.getvalue()


@pytest.fixture(scope="module")
def model(tokenizer_folder: Path) -> bytes:
    return (tokenizer_folder / "tokenizer.model").read_bytes()


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*content, value])


def as_field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def as_number(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


OPTIONS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram": {
        "model_type": "unigram",
        "vocab_size": 700,
        "pad_id": 3,
        "remove_extra_whitespaces": False,
    },
    "word": {"model_type": "word", "vocab_size": 700, "add_dummy_prefix": False},
    "char": {"model_type": "char", "vocab_size": 100, "hard_vocab_limit": False},
    "symbols": {
        "model_type": "bpe",
        "vocab_size": 700,
        "control_symbols": "<|a|>,<|b|>",
        "user_defined_symbols": "def,道",
        "treat_whitespace_as_suffix": True,
        "bos_id": -1,
        "unk_id": 5,
        "eos_id": 2,
        "normalization_rule_name": "nfkc",
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_all_fields_are_those_that_sentencepiece_reads(name: str, texts: list[str]) -> None:
    """The pieces against SentencePiece's processor, the settings against what was asked of its trainer."""
    options = OPTIONS[name]
    model = trained(texts, **options)
    file = ModelFile.parse(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = list(range(processor.vocab_size()))
    assert file.pieces == processor.id_to_piece(ids)
    assert file.scores.dtype == np.float32
    assert file.scores.tolist() == processor.get_score(ids)
    for kind, answers in {
        PieceType.UNKNOWN: processor.is_unknown(ids),
        PieceType.CONTROL: processor.is_control(ids),
        PieceType.UNUSED: processor.is_unused(ids),
        PieceType.BYTE: processor.is_byte(ids),
    }.items():
        assert (file.types == kind).tolist() == answers, kind
    user_defined = options.get("user_defined_symbols", "").split(",")
    assert [file.pieces[i] for i in np.flatnonzero(file.types == PieceType.USER_DEFINED)] == list(
        filter(None, user_defined)
    )
    assert file.model_type == options["model_type"]
    assert file.byte_fallback == options.get("byte_fallback", False)
    assert file.treat_whitespace_as_suffix == options.get("treat_whitespace_as_suffix", False)
    assert file.normalizer == options.get("normalization_rule_name", "nmt_nfkc")
    assert file.has_charsmap == (file.normalizer != "identity")
    for setting in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
        assert getattr(file, setting) == options.get(setting, True), setting
    defaults = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}
    assert file.ids == {key: options.get(f"{key}_id", value) for key, value in defaults.items()}


def test_a_model_cut_anywhere_is_refused_or_lacks_whole_fields(model: bytes) -> None:
    """Between two fields a cut can't be seen: then it is a model with fewer of them."""
    whole = [end for _, _, end in protobuf_fields(model, 0, len(model))]
    for length in [*range(0, 400), *range(len(model) - 400, len(model))]:
        if length in whole:
            assert len(ModelFile.parse(model[:length]).pieces) <= 1024
        else:
            with pytest.raises(TokenizerError, match=r"^not a whole SentencePiece model [^\n]*$"):
                ModelFile.parse(model[:length])


def test_flipped_bits_give_a_model_or_one_line(model: bytes) -> None:
    chance = np.random.default_rng(0)
    messages = []
    for _ in range(300):
        damaged = bytearray(model)
        for place in chance.integers(0, len(model), size=3):
            damaged[place] ^= 1 << int(chance.integers(8))
        try:
            ModelFile.parse(bytes(damaged))
        except TokenizerError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


def test_junk_is_refused() -> None:
    pieces = (as_field(1, b"\xff"), as_number(2, 7), as_field(2, bytes(8)), as_number(3, 0))
    for junk in (b"", b"junk", b"\xff" * 40, b"{}", bytes(100), as_number(1, 7), *(as_field(1, p) for p in pieces)):
        with pytest.raises(TokenizerError):
            ModelFile.parse(junk)


def test_what_the_format_allows_is_read() -> None:
    """Fields in another order, twice, of an unknown number, of every wire type; defaults where nothing stands."""
    piece = as_field(1, as_number(3, 3) + b"\x15\x00\x00\x80\xbf" + as_field(1, "▁道".encode()))
    strange = as_number(200, 1 << 63) + varint(201 << 3 | 1) + bytes(8) + varint(202 << 3 | 5) + bytes(4)
    trainer = as_field(2, as_number(3, 1)) + as_field(2, as_number(3, 2) + as_number(43, -7))
    file = ModelFile.parse(strange + trainer + piece + as_field(1, b"") + as_field(9, b"x"))
    assert (file.pieces, file.scores.tolist(), file.types.tolist()) == (["▁道", ""], [-1.0, 0.0], [3, 1])
    assert (file.model_type, file.ids["pad"], file.ids["bos"]) == ("bpe", -7, 1)
    assert (file.add_dummy_prefix, file.escape_whitespaces, file.byte_fallback) == (True, True, False)
    without = [
        as_field(3, as_number(5, 0)),
        as_field(3, as_number(3, 0) + as_number(4, 0)),
        as_field(3, as_field(2, b"x")),
    ]
    file = ModelFile.parse(piece + b"".join(without))
    assert (file.escape_whitespaces, file.add_dummy_prefix, file.remove_extra_whitespaces) == (False, False, False)
    assert file.has_charsmap
    for wrong in (as_number(3, 9), as_number(3, 1 << 40)):
        with pytest.raises(TokenizerError):
            ModelFile.parse(piece + as_field(2, wrong))
        with pytest.raises(TokenizerError):
            ModelFile.parse(as_field(1, wrong))


def test_reading_a_model_leaves_transformers_its_own_reader(tokenizer_folder: Path) -> None:
    """sentencepiece.sentencepiece_model_pb2 and transformers' copy of it exclude each other in one process."""
    script = (
        "import sys; from tokenizer.codec import Codec; Codec.load(sys.argv[1]);"
        "sys.exit(any('pb2' in name for name in sys.modules))"
    )
    command = [sys.executable, "-c", script, str(tokenizer_folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
