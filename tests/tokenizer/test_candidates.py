from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenizer.candidates import Candidate, open_candidate
from tokenizer.codec import Codec, TokenizerError
from tokenizer.export import export_hf
from tokenizer.model_file import PieceType

TRICKY = "line\r\n\ttab   three spaces </s> <s> 道可道\u2028😀\n"


def ids_of(candidate: Candidate, text: str) -> list[int]:
    (ids,) = candidate.encode([text])
    return ids.tolist()


def pieces_of(candidate: Candidate, text: str) -> list[bytes]:
    return [candidate.spelling[token_id] for token_id in ids_of(candidate, text)]


def types_of(candidate: Candidate, text: str) -> set[PieceType]:
    return {PieceType(candidate.types[token_id]) for token_id in ids_of(candidate, text)}


def byte_level(path: Path, **special: bool) -> Path:
    """A tokenizer in the manner of GPT-2: 256 bytes and two merges. `special`: added tokens, and whether special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "he", "Ġhe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("Ġ", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for content, is_special in special.items():
        tokenizer.add_tokens([AddedToken(content, special=is_special, normalized=False)])
    tokenizer.save(str(path))
    return path


def with_byte_pieces(path: Path) -> Path:
    """A tokenizer in the manner of Llama: U+2581 for spaces, a piece a byte, an unknown id."""
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "▁a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(path))
    return path


def word_piece(path: Path) -> Path:
    """A tokenizer in the manner of BERT: lower case, words in pieces, an unknown word is lost."""
    vocabulary = {piece: number for number, piece in enumerate(["[UNK]", "cat", "##s"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(path))
    return path


def sentencepiece_model(path: Path, texts: list[str], **options: object) -> Path:
    writer = io.BytesIO()
    settings: dict[str, object] = {"vocab_size": 400, "minloglevel": 2, **options}
    lines = [line for text in texts for line in text.splitlines()]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=writer, **settings)
    path.write_bytes(writer.getvalue())
    return path


# ---------------------------------------------------------------- ours


def test_a_folder_of_ours_gives_what_the_codec_gives(tokenizer_folder: Path, codec: Codec, texts: list[str]) -> None:
    ours = open_candidate(tokenizer_folder, "ours")
    rows = list(ours.encode([TRICKY, texts[0]]))
    assert [row.tolist() for row in rows] == [codec.encode(TRICKY), codec.encode(texts[0])]
    assert ours.decode(rows) == [TRICKY, texts[0]]
    assert (ours.name, ours.fingerprint, ours.vocab_size) == ("ours", codec.fingerprint, codec.vocab_size)
    assert ours.no_byte_fallback is None
    assert np.bincount(ours.types)[[PieceType.CONTROL, PieceType.UNKNOWN, PieceType.BYTE]].tolist() == [3, 1, 256]


def test_what_ids_spell_is_the_text(tokenizer_folder: Path) -> None:
    ours = open_candidate(tokenizer_folder, "ours")
    assert b"".join(pieces_of(ours, TRICKY)) == TRICKY.encode()


# ---------------------------------------------------------------- SentencePiece


def test_a_sentencepiece_file_gives_what_sentencepiece_gives(tmp_path: Path, texts: list[str]) -> None:
    path = sentencepiece_model(tmp_path / "any.name", texts, model_type="unigram", byte_fallback=True, vocab_size=700)
    foreign = open_candidate(path, "foreign")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    rows = list(foreign.encode([TRICKY, "", "two  spaces"]))
    assert [row.tolist() for row in rows] == processor.encode([TRICKY, "", "two  spaces"])
    assert foreign.decode(rows)[2] == "two spaces"  # its normaliser squeezes
    assert foreign.kind == "SentencePiece, unigram"
    assert foreign.no_byte_fallback is None
    assert types_of(foreign, "道") == {PieceType.NORMAL}
    assert pieces_of(foreign, "😀")[-4:] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_without_byte_pieces_there_is_a_reason_and_unknown_ids(tmp_path: Path, texts: list[str]) -> None:
    foreign = open_candidate(sentencepiece_model(tmp_path / "m.model", texts, model_type="bpe"), "foreign")
    assert foreign.no_byte_fallback == "it has no byte pieces"
    assert types_of(foreign, "😀") == {PieceType.NORMAL, PieceType.UNKNOWN}  # the dummy prefix, then what it can't


# ---------------------------------------------------------------- Hugging Face


def test_byte_level_pieces_spell_their_bytes(tmp_path: Path) -> None:
    gpt = open_candidate(byte_level(tmp_path / "tokenizer.json"), "gpt")
    assert pieces_of(gpt, "he he😀\n\xa0") == [b"he", b" he", *(bytes([byte]) for byte in "😀\n\xa0".encode())]
    every = "".join(map(chr, range(0x300)))
    assert b"".join(pieces_of(gpt, every)) == every.encode()
    assert gpt.decode(list(gpt.encode([TRICKY, ""]))) == [TRICKY, ""]
    assert gpt.no_byte_fallback == "every piece is made of bytes"
    assert gpt.kind == "Hugging Face, BPE, byte level"
    assert set(gpt.types.tolist()) == {PieceType.NORMAL}


def test_special_tokens_spelled_in_text_become_special_ids(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json", **{"<end>": True, "<plain>": False})
    gpt = open_candidate(path, "gpt")
    assert types_of(gpt, "<end>") == {PieceType.CONTROL}
    assert types_of(gpt, "<plain>") == {PieceType.USER_DEFINED}
    assert gpt.decode(list(gpt.encode(["a<end>b"]))) == ["a<end>b"]


def test_byte_pieces_of_hugging_face_files_are_found(tmp_path: Path) -> None:
    llama = open_candidate(with_byte_pieces(tmp_path / "tokenizer.json"), "llama")
    assert pieces_of(llama, "a ab") == [b"a", b" a", b"b"]
    assert types_of(llama, "b道") == {PieceType.BYTE}
    assert llama.no_byte_fallback is None
    assert llama.types[0] == PieceType.UNKNOWN


def test_words_that_are_lost_are_unknown(tmp_path: Path) -> None:
    bert = open_candidate(word_piece(tmp_path / "tokenizer.json"), "bert")
    assert types_of(bert, "Cats") == {PieceType.NORMAL}
    assert types_of(bert, "dogs") == {PieceType.UNKNOWN}


def test_truncation_padding_and_special_ids_are_left_out(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<end>"])
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", end)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    gpt = open_candidate(path, "gpt")
    assert [len(ids) for ids in gpt.encode(["abcdefgh", "ab"])] == [8, 2]


def test_a_piece_named_none_is_not_the_unknown_one(tmp_path: Path) -> None:
    vocabulary = {"N": 0, "o": 1, "n": 2, "e": 3, "No": 4, "ne": 5, "None": 6}
    merges = [("N", "o"), ("n", "e"), ("No", "ne")]
    Tokenizer(models.BPE(vocab=vocabulary, merges=merges)).save(str(tmp_path / "tokenizer.json"))
    assert types_of(open_candidate(tmp_path / "tokenizer.json", "plain"), "None") == {PieceType.NORMAL}


# ---------------------------------------------------------------- where it stands, what is refused


def test_folders_are_taken_for_what_they_hold(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((tokenizer_folder / "tokenizer.model").read_bytes())
    assert open_candidate(tmp_path, "one").kind == "SentencePiece, bpe"
    byte_level(tmp_path / "tokenizer.json")
    assert open_candidate(tmp_path, "two").kind == "Hugging Face, BPE, byte level"


def test_an_export_judged_as_a_folder_gives_our_ids(tokenizer_folder: Path, codec: Codec, tmp_path: Path) -> None:
    export_hf(tokenizer_folder, tmp_path / "out")
    exported = open_candidate(tmp_path / "out", "exported")
    assert exported.kind == "Hugging Face, BPE"
    assert ids_of(exported, TRICKY) == codec.encode(TRICKY)
    assert ids_of(open_candidate(tmp_path / "out" / "tokenizer.json", "file"), TRICKY) != codec.encode(TRICKY)
    assert set(np.flatnonzero(exported.types == PieceType.CONTROL)) == {1, 2, 3}


@pytest.mark.parametrize(
    "config, kind", [({}, 1), ({"split_special_tokens": False}, 1), ({"split_special_tokens": True}, 0)]
)
def test_the_configuration_of_a_folder_says_what_special_tokens_in_text_are(
    tmp_path: Path, config: dict[str, bool], kind: int
) -> None:
    byte_level(tmp_path / "tokenizer.json", **{"<end>": True})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert types_of(open_candidate(tmp_path, "gpt"), "<end>") == {(PieceType.NORMAL, PieceType.CONTROL)[kind]}


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_configuration_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not a JSON object"):
        open_candidate(tmp_path, "gpt")


def break_model(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "broken.model").write_bytes(content)
    return tmp_path / "broken.model"


def break_json(tmp_path: Path, content: str) -> Path:
    (tmp_path / "broken.json").write_text(content)
    return tmp_path / "broken.json"


def with_an_id(tmp_path: Path, token_id: int) -> Path:
    content = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": token_id}, "unk_token": "a"}}
    return break_json(tmp_path, json.dumps(content))


def folder_at(path: Path) -> Path:
    path.mkdir()
    return path.parent


def pipe_at(path: Path) -> Path:
    os.mkfifo(path)
    return path


REFUSED: dict[str, tuple[Callable[[Path, bytes], Path], str]] = {
    "absent": (lambda tmp, _: tmp / "absent", "No such file"),
    "absent json": (lambda tmp, _: tmp / "absent.json", "No such file"),
    "empty folder": (lambda tmp, _: tmp, "holds no description.json"),
    "empty model": (lambda tmp, _: break_model(tmp, b""), "not a whole SentencePiece model"),
    "text as a model": (lambda tmp, _: break_model(tmp, b"a few words\n" * 50), "not a whole SentencePiece model"),
    "a model cut short": (lambda tmp, model: break_model(tmp, model[:-5]), "not a whole SentencePiece model"),
    "no JSON": (lambda tmp, _: break_json(tmp, "{"), "not a tokenizer.json"),
    "other JSON": (lambda tmp, _: break_json(tmp, '{"a": 1}'), "not a tokenizer.json"),
    "a list": (lambda tmp, _: break_json(tmp, "[]"), "not a tokenizer.json"),
    "unknown model": (lambda tmp, _: break_json(tmp, '{"model": {"type": "New"}}'), "not a tokenizer.json"),
    "an id beyond all tables": (lambda tmp, _: with_an_id(tmp, 4_294_967_295), "has id 4294967295; only ids below"),
    "the first id too high": (lambda tmp, _: with_an_id(tmp, 1 << 24), "has id 16777216; only ids below 16777216"),
    "a folder in the place of a file": (lambda tmp, _: folder_at(tmp / "tokenizer.json"), "not a file"),
    "a pipe in the place of a file": (lambda tmp, _: pipe_at(tmp / "pipe.model"), "not a file"),
    "no vocabulary": (
        lambda tmp, _: break_json(tmp, json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}})),
        "vocabulary is empty",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tokenizer_is_refused_by_name(name: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    make, message = REFUSED[name]
    path = make(tmp_path, (tokenizer_folder / "tokenizer.model").read_bytes())
    with pytest.raises(TokenizerError, match=message) as caught:
        open_candidate(path, "x")
    assert str(caught.value).startswith(str(path))


def test_a_text_that_a_file_cannot_encode_is_one_line(tmp_path: Path) -> None:
    """The library finds out only with the text that needs the unknown token."""
    path = break_json(
        tmp_path, json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[not there]"}})
    )
    candidate = open_candidate(path, "x")
    assert ids_of(candidate, "a") == [0]
    with pytest.raises(TokenizerError, match=r"broken\.json: Hugging Face's tokenizers can't encode by it \([^\n]*\)$"):
        ids_of(candidate, "b")


def test_a_text_that_a_file_cannot_decode_is_one_line(tmp_path: Path) -> None:
    candidate = open_candidate(byte_level(tmp_path / "tokenizer.json"), "x")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: [^\n]* can't decode by it \([^\n]*$"):
        candidate.decode([np.array([-1])])


def test_a_byte_piece_of_another_name_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    model = (tokenizer_folder / "tokenizer.model").read_bytes()
    with pytest.raises(TokenizerError, match=r"broken\.model: a piece for a byte is called"):
        open_candidate(break_model(tmp_path, model.replace(b"<0x41>", b"<0xZ1>")), "x")
