"""What AutoTokenizer makes of an exported folder, held against the codec: ids and texts must be equal."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from tests.ranks import root
from tokenizer import export
from tokenizer.__main__ import main
from tokenizer.codec import DESCRIPTION_FILE, FORMAT, MODEL_FILE, PROBE_TEXT, VERSION, Codec, TokenizerError
from tokenizer.export import EXPORTED_FILES, TOKENIZER_JSON, export_hf
from tokenizer.folder import publish
from tokenizer.model_file import ModelFile, PieceType

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
SYMBOLS = ("<|spare|>", "<|u")  # control symbols
USER_SYMBOLS = ("<|im|>", "<|u|>", "th", "line\n", "\u2581x", "foo bar", "  ")


# ---------------------------------------------------------------- tokenizers


def field(number: int, value: int | float | bytes) -> bytes:
    """One field of a protocol buffer."""

    def varint(rest: int) -> bytes:
        return bytes([rest]) if rest < 128 else bytes([rest & 127 | 128]) + varint(rest >> 7)

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model_of(learned: Iterable[tuple[str, float]], special: Iterable[str] = SPECIAL) -> bytes:
    """A SentencePiece BPE model with byte fallback and these pieces and scores, by hand: sentencepiece_model.proto."""
    kinds = dict.fromkeys(special, PieceType.CONTROL) | {"<unk>": PieceType.UNKNOWN}
    entries = [(name, 0.0, kind) for name, kind in kinds.items()]
    entries += [(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
    entries += [(piece, score, PieceType.NORMAL) for piece, score in learned]
    pieces = b"".join(field(1, field(1, p.encode()) + field(2, s) + field(3, int(kind))) for p, s, kind in entries)
    trainer = field(3, 2) + field(4, len(entries)) + field(35, 1) + field(43, 3)  # bpe, size, byte fallback, pad
    return pieces + field(2, trainer) + field(3, field(1, b"identity") + field(3, 0) + field(4, 0))


def trained(texts: Iterable[str], **options: Any) -> bytes:
    writer = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=writer, minloglevel=2, num_threads=1, pad_id=3,
        **{
            "vocab_size": 600, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False, "add_dummy_prefix": False, "hard_vocab_limit": False,
            "allow_whitespace_only_pieces": True, "max_sentence_length": 10**6,
            **options,
        },
    )  # fmt: skip
    return writer.getvalue()


def folder_of(model: bytes, folder: Path) -> Path:
    """A tokenizer folder around a model file."""
    codec = Codec(folder, {MODEL_FILE: model})
    description = {
        "format": FORMAT, "version": VERSION, "vocab_size": codec.vocab_size, "ids": codec.control_ids,
        "versions": {}, "model_sha256": hashlib.sha256(model).hexdigest(), "fingerprint": codec.fingerprint,
    }  # fmt: skip
    publish({MODEL_FILE: model, DESCRIPTION_FILE: json.dumps(description).encode()}, folder, overwrite=False)
    return folder


@pytest.fixture(scope="module")
def exported(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "small"
    export_hf(tokenizer_folder, out)
    return out


@pytest.fixture(scope="module")
def symbols_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = trained(texts[:3], control_symbols=list(SYMBOLS), user_defined_symbols=list(USER_SYMBOLS))
    return folder_of(model, tmp_path_factory.mktemp("symbols") / "tokenizer")


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """AutoTokenizer, unable to reach a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers")
        yield lambda folder: transformers.AutoTokenizer.from_pretrained(str(folder))


# ---------------------------------------------------------------- texts


def fuzz(codec: Codec, seed: int, count: int) -> Iterator[str]:
    chance = random.Random(seed)
    names = [*SPECIAL, *SYMBOLS, *USER_SYMBOLS, "<0x0A>", "<0x41>", "</", "<|", "|>"]
    spaces = [" ", "  ", "    ", "\n", "\r\n", "\t", "\n\n", "\u2581", "\u3000", "\xa0", "\u2028", "\x00"]

    def part() -> str:
        kind = chance.randrange(6)
        if kind == 0:
            code = chance.randrange(chance.choice((0x80, 0x800, 0x10000, 0x110000)))
            return chr(code) if not 0xD800 <= code < 0xE000 else "e\u0301"
        if kind == 1:
            return chance.choice(names)
        if kind == 2:
            return chance.choice(spaces) * chance.choice((1, 1, 2, 3, 30))
        if kind == 3:
            return chance.choice("ab一道\U0001f600") * chance.randrange(1, 40)
        return codec.piece(chance.randrange(codec.vocab_size)).replace("\u2581", " ")

    yield from ("", " ", "\n", "\x00", PROBE_TEXT, " " * 5000, "a" * 5000, "\U0001f600" * 2000)
    for _ in range(count):
        yield "".join(part() for _ in range(chance.randrange(1, 15)))


def documents() -> list[str]:
    files = [root() / "data_pipeline" / "sample_corpus" / f"{name}.jsonl" for name in ("english", "chinese", "code")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n")[:-1:8]]
    return [json.loads(line)["text"] for line in lines]


def assert_equal(automatic: Any, codec: Codec, texts: list[str]) -> None:
    ids = automatic(texts).input_ids
    for text, theirs in zip(texts, ids, strict=True):
        ours = codec.encode(text)
        assert theirs == ours, f"{text!a:.200}"
        assert automatic.decode(theirs) == codec.decode(ours)


# ---------------------------------------------------------------- equality


def test_ids_and_texts_are_ours(exported: Path, codec: Codec, load: Any) -> None:
    texts = [*fuzz(codec, seed=1, count=2500), *documents()]
    assert len(texts) > 2590
    assert_equal(load(exported), codec, texts)


def test_one_text_alone_gets_nothing_added(exported: Path, codec: Codec, load: Any) -> None:
    encoded = load(exported)("It was a dark night")
    assert encoded.input_ids == codec.encode("It was a dark night")
    assert set(encoded) == {"input_ids", "attention_mask"}  # what a decoder-only model takes


def test_control_ids_and_limits(exported: Path, codec: Codec, load: Any) -> None:
    automatic = load(exported)
    assert automatic.is_fast
    # transformers 4 has no such attributes; what it adds, the test above sees
    assert (getattr(automatic, "add_bos_token", False), getattr(automatic, "add_eos_token", False)) == (False, False)
    assert len(automatic) == automatic.vocab_size == codec.vocab_size
    for name, token_id in codec.control_ids.items():
        assert getattr(automatic, f"{name}_token_id") == token_id
    assert automatic.model_max_length > 10**9
    whole = [codec.bos_id, *codec.encode("a text"), codec.eos_id]
    assert automatic.decode(whole, skip_special_tokens=True) == codec.decode(whole) == "a text"
    assert automatic.decode(whole) == "<s>a text</s>"


def test_special_tokens_in_a_text_are_text_unless_asked_for(exported: Path, codec: Codec, load: Any) -> None:
    automatic = load(exported)
    for name, token_id in zip(SPECIAL, range(4), strict=True):
        assert automatic(name, split_special_tokens=False).input_ids == [token_id]
        assert automatic(name).input_ids == codec.encode(name)
        assert token_id not in automatic(f"a {name}{name} b").input_ids


def test_saved_again_it_is_the_same(exported: Path, codec: Codec, load: Any, tmp_path: Path) -> None:
    load(exported).save_pretrained(str(tmp_path / "again"))
    assert_equal(load(tmp_path / "again"), codec, list(fuzz(codec, seed=2, count=300)))


def test_in_a_models_folder_it_is_the_same(exported: Path, codec: Codec, load: Any, tmp_path: Path) -> None:
    for name in EXPORTED_FILES:
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert_equal(load(tmp_path), codec, list(fuzz(codec, seed=3, count=300)))


def test_symbols(symbols_folder: Path, load: Any, tmp_path: Path) -> None:
    export_hf(symbols_folder, tmp_path / "out")
    codec, automatic = Codec.load(symbols_folder), load(tmp_path / "out")
    ids = {name: automatic.convert_tokens_to_ids(name) for name in SYMBOLS + USER_SYMBOLS}
    assert all(codec.piece(token_id) == name for name, token_id in ids.items())
    assert ids["<|im|>"] in automatic("a<|im|>b").input_ids
    assert ids["<|spare|>"] not in automatic("a<|spare|>b").input_ids
    assert automatic.decode([ids["<|spare|>"], ids["<|im|>"]], skip_special_tokens=True) == "<|im|>"
    assert_equal(automatic, codec, list(fuzz(codec, seed=4, count=1500)))


def test_control_symbols_are_special_to_transformers(symbols_folder: Path, load: Any, tmp_path: Path) -> None:
    export_hf(symbols_folder, tmp_path / "out")
    symbols = Codec.load(symbols_folder).symbols
    special = {0, 1, 2, 3, *(symbols[name] for name in SYMBOLS)}
    automatic = load(tmp_path / "out")
    automatic.save_pretrained(str(tmp_path / "again"))
    for one in (automatic, load(tmp_path / "again")):
        assert set(one.all_special_ids) == special
        row = [1, symbols["<|spare|>"], 100, symbols["<|im|>"], symbols["<|u"], 2]
        assert one.get_special_tokens_mask(row, already_has_special_tokens=True) == [1, 1, 0, 0, 1, 1]


def test_a_chat_template_gives_symbols_only_when_asked_to(symbols_folder: Path, load: Any, tmp_path: Path) -> None:
    """What docs/tokenizer.md says of `apply_chat_template`, its price included."""
    export_hf(symbols_folder, tmp_path / "out")
    codec, automatic = Codec.load(symbols_folder), load(tmp_path / "out")
    spare = codec.symbols["<|spare|>"]
    template = "{% for message in messages %}<|spare|>{{ message['content'] }}{% endfor %}"

    def ids(content: str, **options: Any) -> list[int]:
        messages = [{"role": "user", "content": content}]
        return automatic.apply_chat_template(messages, chat_template=template, return_dict=True, **options)["input_ids"]

    assert spare not in ids("hello")
    asked = {"tokenizer_kwargs": {"split_special_tokens": False}}
    assert ids("hello", **asked) == [spare, *codec.encode("hello")]
    assert ids("<|spare|>", **asked) == [spare, spare]  # the price: whoever writes the content can write the symbol


def test_models_of_few_letters() -> None:
    """Random pieces, most of them spelled by several pairs, with scores in any order: SentencePiece's ids."""
    chance, several = random.Random(5), 0
    for _ in range(60):
        letters = chance.choice(("a", "ab", "abc"))
        pieces = list(letters)
        for _ in range(12):
            joined = chance.choice(pieces) + chance.choice(pieces)
            if joined not in pieces and len(joined) < 10:
                pieces.append(joined)
        learned = pieces[len(letters) :]
        if chance.random() < 0.5:
            chance.shuffle(learned)
        bytes_ = model_of([(piece, -float(rank)) for rank, piece in enumerate([*learned, *letters])])
        content = export.tokenizer_json(ModelFile.parse(bytes_))
        several += len(content["model"]["merges"]) > len(learned)
        tokenizer = export._open(json.dumps(content).encode())
        reference: Any = sentencepiece.SentencePieceProcessor(model_proto=bytes_)
        texts = ["".join(chance.choices(letters, k=chance.randrange(30))) for _ in range(60)]
        texts += [chance.choice(pieces) * count for count in range(30)]
        for text in texts:
            assert tokenizer.encode(text).ids == reference.encode(text), (learned, text)
    assert several > 30


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"model_type": "unigram"}, "unigram scores"),
        ({"model_type": "char"}, "model type char"),
        ({"normalization_rule_name": "nfkc"}, "normalisation nfkc"),
        ({"add_dummy_prefix": True}, "spaces"),
        ({"remove_extra_whitespaces": True}, "spaces"),
        ({"byte_fallback": False}, "no byte pieces"),
    ],
)
def test_what_would_differ_is_refused(options: dict[str, Any], reason: str, texts: list[str], tmp_path: Path) -> None:
    folder = folder_of(trained(texts[:2], **options), tmp_path / "tokenizer")
    with pytest.raises(TokenizerError, match=f"can't be exported with equal ids: .*{reason}") as caught:
        export_hf(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_equal_scores_are_refused(tmp_path: Path) -> None:
    folder = folder_of(model_of([("ab", -1.0), ("bc", -1.0), ("a", -2.0), ("b", -3.0), ("c", -4.0)]), tmp_path / "one")
    with pytest.raises(TokenizerError, match="same score"):
        export_hf(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "model",
    [
        model_of([("é", -1.0)], special=(*SPECIAL, "Q")),  # a character whose id the library would give
        model_of([("ax", -1.0), ("x", -2.0)]),  # "a" is no piece: the library makes it bytes before it joins
    ],
)
def test_what_only_verification_finds_is_refused(model: bytes, tmp_path: Path) -> None:
    assert export.why_not(ModelFile.parse(model)) is None
    folder = folder_of(model, tmp_path / "tokenizer")
    with pytest.raises(TokenizerError, match=r"can't be exported with equal ids: .* where SentencePiece gives "):
        export_hf(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def swapped(merges: list[Any]) -> list[Any]:
    """Two neighbours of the list exchanged that compete for a letter: xy and yz, in the text xyz."""
    of_letters = [place for place, (left, right) in enumerate(merges) if len(left + right) == 2]
    place = next(
        place
        for place in of_letters
        if place + 1 in of_letters and merges[place][1] == merges[place + 1][0] != merges[place][0]
    )
    merges[place : place + 2] = merges[place + 1], merges[place]
    return merges


@pytest.mark.parametrize("spoil", [swapped, lambda merges: merges[:-1], lambda merges: merges[::-1]])
def test_a_wrong_merge_is_found(
    spoil: Any, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = export._merges
    monkeypatch.setattr(export, "_merges", lambda model: spoil(right(model)))
    with pytest.raises(TokenizerError, match="the tokenizers library differs: ") as caught:
        export_hf(tokenizer_folder, tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_a_wrong_decoder_is_found(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = export.tokenizer_json
    monkeypatch.setattr(export, "tokenizer_json", lambda model: right(model) | {"decoder": {"type": "Fuse"}})
    with pytest.raises(TokenizerError, match="decodes otherwise"):
        export_hf(tokenizer_folder, tmp_path / "out")


# ---------------------------------------------------------------- files


def test_the_folder_holds_these_files_and_the_plain_model(exported: Path, tokenizer_folder: Path) -> None:
    assert {path.name for path in exported.iterdir()} == EXPORTED_FILES
    assert (exported / MODEL_FILE).read_bytes() == (tokenizer_folder / MODEL_FILE).read_bytes()


def test_an_export_is_replaced_only_when_asked(exported: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    export_hf(tokenizer_folder, tmp_path / "out")
    assert all((tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes() for name in EXPORTED_FILES)
    (tmp_path / "out" / TOKENIZER_JSON).write_text("damaged")
    with pytest.raises(TokenizerError, match="--overwrite"):
        export_hf(tokenizer_folder, tmp_path / "out")
    export_hf(tokenizer_folder, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / TOKENIZER_JSON).read_bytes() == (exported / TOKENIZER_JSON).read_bytes()


def test_other_files_are_never_replaced(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="choose another --out"):
        export_hf(tokenizer_folder, tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_a_tokenizer_is_never_replaced_by_an_export(
    tokenizer_folder: Path, symbols_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tokenizer_folder)
    for own in (tokenizer_folder, Path()):
        with pytest.raises(TokenizerError, match=r"^\S+: is the tokenizer's own folder; choose another --out$"):
            export_hf(tokenizer_folder, own, overwrite=True)
    with pytest.raises(TokenizerError, match="holds a tokenizer, not an export of one; choose another --out"):
        export_hf(tokenizer_folder, symbols_folder, overwrite=True)
    Codec.load(tokenizer_folder)
    Codec.load(symbols_folder)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["tokenizer", "export", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_the_command(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = (tokenizer_folder, "--format", "hf", "--out", tmp_path / "out")
    assert run(monkeypatch, *arguments, "--json") in (None, 0)
    printed = json.loads(capfd.readouterr().out)
    assert printed["vocab_size"] == 1024
    assert printed["verified_texts"] > 1000

    assert run(monkeypatch, *arguments) == 2
    out, error = capfd.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("error: ")
    assert run(monkeypatch, *arguments, "--overwrite") in (None, 0)
    assert "1024 ids" in capfd.readouterr().out

    assert run(monkeypatch, tmp_path / "absent", "--out", tmp_path / "other") == 2
    assert "no such tokenizer folder" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()
