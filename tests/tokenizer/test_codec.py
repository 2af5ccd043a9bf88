from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tokenizer.codec import PROBE_TEXT, Codec, TokenizerError
from tokenizer.train import train

SURROGATES = range(0xD800, 0xE000)
SPELLINGS = ["<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<|endoftext|>", "[CLS]"]


def assert_round_trip(codec: Codec, text: str) -> None:
    (ids,) = codec.encode_documents([text])
    assert codec.decode(ids) == text
    assert ids.tolist() == codec.encode(text)
    assert not set(ids.tolist()) & set(codec.control_ids.values())


def test_every_character_of_unicode_but_one_comes_back(codec: Codec) -> None:
    text = "".join(chr(code) for code in range(0x110000) if code not in SURROGATES and code != 0x2581)
    assert codec.decode(codec.encode(text)) == text


def test_random_unicode_comes_back(codec: Codec) -> None:
    chance = random.Random(0)
    any_plane = [chr(code) for code in range(0, 0x110000, 7) if code not in SURROGATES]
    alphabets = [
        "".join(chance.sample(any_plane, 500)),
        " \t\n\r\x0b\x0c\x00\u00a0\u2028\u2029\u3000\ufeff",
        "e\u0301\u0308\u200d\ufe0f👩👧🏽🇨🇳",
        "שלום مرحبا\u202e\u200f",
        "def f(x): return 0x1F09 <s></s>",
        "道可道非常名，。",
    ]
    for _ in range(400):
        alphabet = "".join(chance.sample(alphabets, chance.randint(1, 3)))
        pieces = (chance.choice(alphabet) * chance.choice((1, 1, 1, 2, 17)) for _ in range(chance.randrange(80)))
        assert_round_trip(codec, "".join(pieces).replace("\u2581", ""))


@pytest.mark.parametrize(
    "text",
    ["", " ", "      ", " x ", "\n\n\n", "\t\tx", "a\r\nb", "\x00", "x" * 3000, " " * 3000, "\n \n" * 999, PROBE_TEXT],
)
def test_white_space_and_runs_come_back(codec: Codec, text: str) -> None:
    assert_round_trip(codec, text)


def test_real_text_comes_back(codec: Codec, texts: list[str]) -> None:
    for text in texts:
        assert_round_trip(codec, text)


def test_the_one_known_loss_is_the_space_mark(codec: Codec) -> None:
    assert codec.decode(codec.encode("a\u2581b")) == "a b"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_control_tokens_in_text_stay_text(codec: Codec, spelling: str) -> None:
    for text in (spelling, f"a{spelling}b", f"{spelling} {spelling}\n"):
        assert_round_trip(codec, text)


def test_control_ids_are_fixed_and_come_only_when_asked_for(codec: Codec) -> None:
    assert (codec.unk_id, codec.bos_id, codec.eos_id, codec.pad_id) == (0, 1, 2, 3)
    plain = codec.encode("hello")
    assert codec.encode("hello", bos=True, eos=True) == [1, *plain, 2]
    assert codec.decode([1, *plain, 3, 2]) == "hello"


def test_documents_are_arrays_in_order(codec: Codec) -> None:
    texts = ["one", "", "two 二"]
    arrays = list(codec.encode_documents(texts))
    assert [array.dtype for array in arrays] == [np.uint32] * 3
    assert [codec.decode(array) for array in arrays] == texts
    assert all(array.max(initial=0) < codec.vocab_size for array in arrays)
    assert list(codec.encode_documents([])) == []


@pytest.mark.parametrize("letters", ["a", "etaoin", " ", "\x00", "道", "\U0001f600"])
def test_one_long_word_takes_linear_time(codec: Codec, letters: str) -> None:
    seconds = {}
    for length in (50_000, 500_000):
        text = "".join(random.Random(0).choices(letters, k=length))
        started_at = time.process_time()
        ids = codec.encode(text)
        seconds[length] = time.process_time() - started_at
        assert codec.decode(ids) == text
    assert seconds[500_000] < 40 * max(seconds[50_000], 0.002)  # ten times is linear, a hundred times quadratic
    assert seconds[500_000] < 3


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "\ud83d \ude00"])
def test_lone_surrogates_are_refused_in_one_line(codec: Codec, text: str) -> None:
    with pytest.raises(TokenizerError, match=r"^text: lone surrogate U\+D[0-9A-F]{3} at character \d+ [^\n]*$"):
        codec.encode(text)
    with pytest.raises(TokenizerError, match=r"^text 1: lone surrogate"):
        list(codec.encode_documents(["fine", text]))


@pytest.mark.parametrize("ids", [[1024], [-1], [5, 2**40], np.array([7, 99_999])])
def test_ids_outside_the_vocabulary_are_refused(codec: Codec, ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match=r"outside the vocabulary \(0 to 1023\)"):
        codec.decode(ids)


def test_a_broken_character_decodes_to_replacement_characters(codec: Codec) -> None:
    ids = codec.encode("\U0010ffff")
    assert all(codec.is_byte(token_id) for token_id in ids)
    assert codec.decode(ids[:2]) == "\ufffd\ufffd"


def test_fingerprint_is_the_stated_hash_of_file_and_behaviour(codec: Codec, tokenizer_folder: Path) -> None:
    model_hash = hashlib.sha256((tokenizer_folder / "tokenizer.model").read_bytes()).digest()
    ids = np.array(codec.encode(PROBE_TEXT), dtype="<u4").tobytes()
    assert codec.fingerprint == hashlib.sha256(b"zerohalf-tokenizer-fingerprint-1\0" + model_hash + ids).hexdigest()


def edit_description(folder: Path, **changes: object) -> None:
    path = folder / "description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_model(folder: Path, model: bytes) -> None:
    (folder / "tokenizer.model").write_bytes(model)
    edit_description(folder, model_sha256=hashlib.sha256(model).hexdigest())


def other_model(folder: Path) -> None:
    """A model that reads well but knows one character in place of another, with its hash brought up to date."""
    model = bytearray((folder / "tokenizer.model").read_bytes())
    place = model.rindex("道".encode())
    model[place : place + 3] = "龘".encode()
    replace_model(folder, bytes(model))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model": (lambda f: (f / "tokenizer.model").unlink(), "No such file"),
    "no description": (lambda f: (f / "description.json").unlink(), "No such file"),
    "cut model": (lambda f: (f / "tokenizer.model").write_bytes((f / "tokenizer.model").read_bytes()[:-9]), "differs"),
    "other behaviour": (other_model, "fingerprint"),
    "other fingerprint": (lambda f: edit_description(f, fingerprint="0" * 64), "fingerprint"),
    "other size": (lambda f: edit_description(f, vocab_size=7), "vocab_size"),
    "other ids": (lambda f: edit_description(f, ids={"unk": 0}), "ids"),
    "later version": (lambda f: edit_description(f, version=2), "version 2"),
    "other format": (lambda f: edit_description(f, format="x"), "not the description"),
    "no JSON": (lambda f: (f / "description.json").write_text("{"), "not JSON"),
    "nested too deep": (lambda f: (f / "description.json").write_text("[" * 100_000), "not JSON"),
    "too many digits": (lambda f: (f / "description.json").write_text("9" * 5000), "not JSON"),
    "no object": (lambda f: (f / "description.json").write_text("[]"), "not the description"),
    "no UTF-8": (lambda f: (f / "description.json").write_bytes(b"\xff\xfe{"), "not JSON"),
    "junk model": (lambda f: replace_model(f, b"junk"), "sentencepiece can't read it"),
    "empty model": (lambda f: replace_model(f, b""), "sentencepiece can't read it"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tokenizer_is_refused_in_one_line(damage: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    do_damage, message = DAMAGES[damage]
    do_damage(folder)
    with pytest.raises(TokenizerError, match=message) as caught:
        Codec.load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such tokenizer folder"):
        Codec.load(tmp_path / "absent")


def test_a_copy_is_the_same_tokenizer(codec: Codec, tmp_path: Path) -> None:
    target = tmp_path / "new" / "tokenizer"
    codec.copy_to(target)
    codec.copy_to(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in codec.folder.iterdir()
    }
    assert Codec.load(target).fingerprint == codec.fingerprint
    assert [path.name for path in target.parent.iterdir()] == ["tokenizer"]


def test_a_copy_never_replaces_another_tokenizer(codec: Codec, texts: list[str], tmp_path: Path) -> None:
    other = train(texts, tmp_path / "other", vocab_size=600)
    with pytest.raises(TokenizerError, match="holds a tokenizer already"):
        codec.copy_to(other.folder)
    assert Codec.load(other.folder).fingerprint == other.fingerprint
