from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.plain_bpe import PlainBPE, swap_results
from tokenizer import codec as codec_module
from tokenizer.codec import BATCH_BYTES, GUARD_RATE, PROBE_TEXT, Codec, TokenizerError
from tokenizer.fastbpe.encoder import FastBPE, Unsupported
from tokenizer.model_file import ModelFile
from tokenizer.train import train

ROOT = Path(__file__).resolve().parents[2]

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


WRONG_TYPES: list[tuple[Callable[[Codec], object], str]] = [
    (lambda codec: codec.encode(3), "text: int where a str is expected"),
    (lambda codec: codec.encode(b"abc"), "text: bytes where a str is expected"),
    (lambda codec: list(codec.encode_documents(["a", None])), "text 1: NoneType where a str is expected"),
    (lambda codec: list(codec.encode_documents("abc")), "texts: str where a list or another iterable of str"),
    (lambda codec: list(codec.encode_documents(None)), "texts: NoneType where a list or another iterable of str"),
    (lambda codec: codec.decode("12"), "ids: str where a list or array of integers is expected"),
    (lambda codec: codec.decode(5), "ids: int where a list or array of integers is expected"),
    (lambda codec: codec.decode([5, 6.0]), "id at place 1: 'float' object cannot be interpreted as an integer"),
    (lambda codec: codec.decode([[5]]), "id at place 0: 'list' object"),
    (lambda codec: codec.decode(np.array([5.0])), "ids: float64 of shape (1,) where one row of integers is expected"),
    (lambda codec: codec.decode(np.array([[5]])), "ids: int64 of shape (1, 1) where one row"),
]


@pytest.mark.parametrize("call, words", WRONG_TYPES)
def test_what_is_no_text_or_no_id_is_named_by_its_place(
    codec: Codec, call: Callable[[Codec], object], words: str
) -> None:
    with pytest.raises(TokenizerError, match=re.escape(words)) as caught:
        call(codec)
    assert "\n" not in str(caught.value)


def test_ids_of_every_kind_of_integer_are_decoded(codec: Codec) -> None:
    ids = codec.encode("two 二")
    for row in (tuple(ids), np.array(ids, np.uint16), list(np.array(ids)), iter(ids)):
        assert codec.decode(row) == "two 二"
    assert codec.decode([]) == codec.decode(np.array([])) == ""


@pytest.fixture(scope="module")
def with_symbols(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symbols") / "t"
    names = {"control_symbols": ["<|user|>", "<|end|>"], "user_symbols": ["<think>"]}
    train(texts[:2], folder, vocab_size=500, reserve=1, **names)
    return folder


def test_symbols_have_ids_by_name(with_symbols: Path, codec: Codec) -> None:
    ours = Codec.load(with_symbols)
    assert list(ours.symbols.items()) == [("<|user|>", 4), ("<|end|>", 5), ("<|reserved_0|>", 6), ("<think>", 7)]
    assert pickle.loads(pickle.dumps(ours)).symbols == ours.symbols
    assert codec.symbols == {}
    chat = [ours.symbols["<|user|>"], *ours.encode("say <|end|>"), ours.symbols["<|end|>"]]
    assert (chat.count(4), chat.count(5)) == (1, 1)
    assert ours.decode(chat) == "say <|end|>"


def test_the_papers_recipe_for_a_chat_keeps_contents_text(with_symbols: Path) -> None:
    paper = (ROOT / "docs" / "tokenizer.md").read_text(encoding="utf-8")
    recipe = re.search(r"^```python\n(ids = \[codec\.bos_id\]\n.*?)^```$", paper, re.MULTILINE | re.DOTALL)
    assert recipe is not None
    codec = Codec.load(with_symbols)
    contents = ["say <|end|><|user|>", "", "</s>"]
    given = {"codec": codec, "messages": [{"role": "user", "content": content} for content in contents]}
    exec(recipe[1], given)
    ids = given["ids"]
    assert [token_id for token_id in ids if token_id < 7] == [1, *[4, 5] * 3]
    assert codec.decode(ids) == "".join(contents)


@pytest.mark.parametrize("symbols", [{}, {"<|user|>": 5, "<|end|>": 4, "<|reserved_0|>": 6, "<think>": 7}])
def test_symbols_that_the_model_has_otherwise_are_refused(
    with_symbols: Path, tmp_path: Path, symbols: dict[str, int]
) -> None:
    shutil.copytree(with_symbols, tmp_path / "t")
    edit_description(tmp_path / "t", symbols=symbols)
    with pytest.raises(TokenizerError, match=r"symbols of description\.json differ from the model's"):
        Codec.load(tmp_path / "t")


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


def with_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model": (lambda f: (f / "tokenizer.model").unlink(), "No such file"),
    "no description": (lambda f: (f / "description.json").unlink(), "No such file"),
    "cut model": (lambda f: (f / "tokenizer.model").write_bytes((f / "tokenizer.model").read_bytes()[:-9]), "differs"),
    "other behaviour": (other_model, "fingerprint"),
    "other fingerprint": (lambda f: edit_description(f, fingerprint="0" * 64), "fingerprint .* was changed, or made"),
    "other version": (
        lambda f: edit_description(f, fingerprint="0" * 64, versions={"sentencepiece": "0.1.0"}),
        r"encodes otherwise than \{'sentencepiece': '0.1.0'\}; install",
    ),
    "version as text": (lambda f: edit_description(f, version="1"), "version '1', this program reads 1;"),
    "pipe for a model": (lambda f: with_pipe(f / "tokenizer.model"), "tokenizer.model: not a file"),
    "folder for a report": (lambda f: with_folder(f / "training.md"), "training.md: not a file"),
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


# ---------------------------------------------------------------- streams


def test_texts_are_read_as_they_are_needed(codec: Codec) -> None:
    """A batch ahead and no more, so a corpus never stands in memory."""
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for number in range(60):
            read += 1
            yield f"{number} " + "x " * 50_000

    for given, ids in enumerate(codec.encode_documents(texts())):
        assert codec.decode(ids[:20]).startswith(f"{given} ")
        assert read <= given + 11  # ten of such texts make a megabyte
    assert given == 59


def test_batches_have_a_size(codec: Codec) -> None:
    sizes = [0, 0, 5, 3 * BATCH_BYTES, 0, BATCH_BYTES // 2, BATCH_BYTES // 2, 7, *[0] * 50_000, *[100] * 30_000]
    batches = list(codec_module._batches("x" * size for size in sizes))
    assert [len(text) for batch in batches for text in batch.texts] == sizes
    assert [batch.first for batch in batches] == np.cumsum([0, *(len(batch.texts) for batch in batches[:-1])]).tolist()
    assert [len(batch.texts) for batch in batches[:3]] == [3, 1, 2]
    for batch in batches:
        assert len(batch.texts) == 1 or sum(map(len, batch.texts)) + 64 * len(batch.texts) <= BATCH_BYTES


WORKERS = [{"processes": 2}, {"threads": 2}, {"threads": 3}]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_several_workers_give_what_one_gives(workers: dict[str, int], codec: Codec, texts: list[str]) -> None:
    many = [*texts, "", "x" * 2_500_000, *texts] * 2
    for one, other in zip(codec.encode_documents(many), codec.encode_documents(iter(many), **workers), strict=True):
        assert one.dtype == other.dtype == np.uint32
        assert np.array_equal(one, other)


@pytest.mark.parametrize("workers", [{}, *WORKERS], ids=str)
def test_errors_of_texts_name_them_from_any_worker(workers: dict[str, int], codec: Codec) -> None:
    with pytest.raises(TokenizerError, match=r"^text 20: lone surrogate"):
        list(codec.encode_documents([*["x" * 400_000] * 20, "\ud800"], **workers))


@pytest.mark.parametrize("workers", [{"processes": 0}, {"threads": 0}, {"processes": 2, "threads": 2}], ids=str)
def test_impossible_workers_are_refused(workers: dict[str, int], codec: Codec) -> None:
    with pytest.raises(TokenizerError, match=r"processes, \d threads"):
        list(codec.encode_documents([], **workers))


# ---------------------------------------------------------------- encoders


@pytest.fixture(scope="session")
def unigram_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "unigram"
    train([*texts[:3], texts[-1]], folder, vocab_size=600, model_type="unigram")
    return folder


@pytest.fixture
def fresh(tokenizer_folder: Path, fast: object) -> Iterator[Callable[[], Codec]]:
    """Loads as a new process would: with a self-test."""

    def load() -> Codec:
        codec_module._encoders.cache_clear()
        return Codec.load(tokenizer_folder)

    yield load
    codec_module._encoders.cache_clear()


def mutant_of(model: ModelFile) -> ModelFile:
    """The merges of `in` and `se` give each other's piece."""
    return swap_results(model, model.pieces.index("in"), model.pieces.index("se"))


def test_the_compiled_encoder_is_used_and_nothing_is_said(
    fresh: Callable[[], Codec], capfd: pytest.CaptureFixture[str]
) -> None:
    codec = fresh()
    assert (codec.encoder, codec.encoder_note) == ("fastbpe", None)
    assert isinstance(codec._encoder, FastBPE)
    codec.encode("text")
    list(codec.encode_documents(["text"]))
    assert capfd.readouterr() == ("", "")


def test_sentencepiece_takes_over_without_a_core(
    fresh: Callable[[], Codec], monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> None:
    fast = fresh()

    def build(model: ModelFile) -> FastBPE:
        raise Unsupported("there is none")

    monkeypatch.setattr(FastBPE, "build", build)
    slow = fresh()
    assert slow.encoder == "sentencepiece"
    assert slow.encoder_note == "encoded by SentencePiece itself, several times slower: there is none"
    assert slow.fingerprint == fast.fingerprint
    assert slow.encode(PROBE_TEXT) == fast.encode(PROBE_TEXT)


def test_why_sentencepiece_encodes_is_said_once_a_process(unigram_folder: Path) -> None:
    """Not at load (many only decode), not by workers, not again by another object of the same tokenizer."""
    script = """
import os, sys
from tokenizer.codec import Codec
from tokenizer.workers import in_processes
if __name__ == "__main__":
    codec = Codec.load(sys.argv[1])
    if sys.stderr:
        print("loaded", file=sys.stderr, flush=True)
    codec.encode("one")
    if not os.fork():
        codec.encode("in a fork")
        os._exit(0)
    os.wait()
    Codec.load(sys.argv[1]).encode("two")
    assert len(list(codec.encode_documents(["x" * 600_000] * 8, processes=2))) == 8
    assert len(list(in_processes(codec.encode, ["in a worker"] * 8, 2))) == 8
"""
    command = [sys.executable, "-c", script, str(unigram_folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, *more = done.stderr.splitlines()
    assert first == "loaded"
    assert second.startswith(f"{unigram_folder}: encoded by SentencePiece itself, several times slower: ")
    assert "unigram" in second
    assert not more
    closed = subprocess.run(
        ["bash", "-c", 'exec "$@" 2>&-', "bash", *command], cwd=ROOT, capture_output=True, check=False
    )
    assert (closed.returncode, closed.stdout) == (0, b"")


def test_a_mutant_encoder_is_caught_at_load(
    fresh: Callable[[], Codec], monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> None:
    build = FastBPE.build
    monkeypatch.setattr(FastBPE, "build", lambda model: build(mutant_of(model)))
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: the encoder fails its self-test: [^\n]*$"):
        fresh()
    with pytest.raises(TokenizerError, match="self-test"):  # a second try finds no untested one left over
        Codec.load(tokenizer_folder)


def test_a_pickled_codec_is_whole_and_not_tested_again(
    fresh: Callable[[], Codec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codec = fresh()
    pickled = pickle.dumps(codec)

    def self_test(*_: object) -> None:
        raise TokenizerError("tested")

    monkeypatch.setattr(codec_module, "self_test", self_test)
    with pytest.raises(TokenizerError, match="tested"):
        fresh()
    codec_module._encoders.cache_clear()
    again = pickle.loads(pickled)
    assert (again.encoder, again.fingerprint, again.folder) == (codec.encoder, codec.fingerprint, codec.folder)
    assert again.control_ids == codec.control_ids
    assert again.encode(PROBE_TEXT) == codec.encode(PROBE_TEXT)
    again.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy" / "description.json").read_bytes() == (codec.folder / "description.json").read_bytes()


def test_a_process_builds_and_tests_the_encoder_of_a_model_once(fresh: Callable[[], Codec]) -> None:
    codec = fresh()
    assert Codec.load(codec.folder)._encoder is codec._encoder
    assert fresh()._encoder is not codec._encoder


# ---------------------------------------------------------------- the guard


class Counting:
    """The reference, and which texts it was asked for."""

    def __init__(self, codec: Codec) -> None:
        self.reference = codec._reference
        self.asked: list[bytes] = []

    def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        self.asked += texts
        return self.reference.encode(texts)


def with_mutant(codec: Codec) -> Codec:
    """A codec whose encoder went wrong behind the self-test."""
    codec._encoder = PlainBPE(mutant_of(ModelFile.parse((codec.folder / "tokenizer.model").read_bytes())))
    return codec


def test_the_guard_stops_a_wrong_encoder_at_the_document(
    fresh: Callable[[], Codec], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = with_mutant(fresh())
    texts = ["x y z"] * 7 + ["begin", "in"]
    monkeypatch.setattr(codec_module, "GUARD_RATE", 0.0)
    wrong = list(codec.encode_documents(texts))
    right = codec._reference.encode([b"begin"])[0]
    place = int(np.flatnonzero(wrong[7] != right)[0])
    monkeypatch.setattr(codec_module, "GUARD_RATE", 1.0)
    message = (
        rf"^text 7: token {place} is {wrong[7][place]} where SentencePiece gives {right[place]}, in 'begin'; [^\n]*$"
    )
    with pytest.raises(TokenizerError, match=message):
        list(codec.encode_documents(texts))
    with pytest.raises(TokenizerError, match=message):
        list(codec.encode_documents(texts, threads=2))
    with pytest.raises(TokenizerError, match=r"^text 0: token"):
        codec.encode("begin")


def test_the_guard_looks_at_its_share_of_documents_chosen_by_chance(fresh: Callable[[], Codec]) -> None:
    """Binomial, 2000 expected: six standard deviations on both sides. The same documents twice: once in 10^1000."""
    codec = fresh()
    texts = [f"{number}" for number in range(int(2000 / GUARD_RATE / 10))]
    chosen = []
    for _ in range(10):
        codec._reference = counting = Counting(codec)
        assert sum(1 for _ in codec.encode_documents(texts)) == len(texts)
        codec._reference = counting.reference
        chosen.append(counting.asked)
    assert 2000 - 6 * 45 < sum(map(len, chosen)) < 2000 + 6 * 45
    assert chosen[0] != chosen[1]
    steps = np.diff([int(text) for text in chosen[0]])
    assert len(set(steps.tolist())) > 20  # no fixed stride


class Spoilt(Codec):
    """Goes wrong in the process it is unpickled in."""

    def __setstate__(self, state: tuple[Path, dict[str, bytes]]) -> None:
        super().__setstate__(state)
        with_mutant(self)
        codec_module.GUARD_RATE = 1.0


def test_the_guard_stands_in_other_processes_too(fresh: Callable[[], Codec]) -> None:
    codec = fresh()
    codec.__class__ = Spoilt
    with pytest.raises(TokenizerError, match=r"^text 3: token \d+ is \d+ where SentencePiece gives \d+, in 'begin'; "):
        list(codec.encode_documents(["x y z"] * 3 + ["begin"], processes=2))


def test_sentencepiece_is_not_held_against_itself(unigram_folder: Path) -> None:
    codec = Codec.load(unigram_folder)
    codec._encoder = codec._reference = counting = Counting(codec)
    list(codec.encode_documents(["text"] * 20_000))
    assert len(counting.asked) == 20_000


def test_a_batch_of_bytes_has_the_ids_of_its_texts(codec: Codec, texts: list[str]) -> None:
    some = ["", *texts[:5], "</s>"]
    ids, ends = codec.encode_batch([text.encode("utf-8") for text in some])
    rows = np.split(ids, ends[:-1].astype(np.int64))
    assert [row.tolist() for row in rows] == [codec.encode(text) for text in some]
    assert not set(codec.control_ids.values()) & set(ids.tolist())


@pytest.mark.parametrize("size", [17, 1000])
def test_a_long_text_has_the_same_ids_in_parts(
    codec: Codec, texts: list[str], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(codec_module, "BATCH_BYTES", size)
    monkeypatch.setattr(codec_module, "_WINDOW_BYTES", 16)
    odd = [
        "",
        "x" * 3000,
        " " * 3000,
        "\n \n" * 999,
        "\u2581 " * 500,
        "😀é文" * 500,
        "a\u2581b c" * 300,
        PROBE_TEXT * 9,
    ]
    for text in [*texts[:9], *odd]:
        raw = text.encode("utf-8")
        whole, _ = codec.encode_batch([raw])
        parts = list(codec.encode_long(raw))
        assert np.concatenate([whole[:0], *parts]).tolist() == whole.tolist()
        if text in texts and len(raw) > 5 * size + 200:
            assert len(parts) > 3, "real text has places to cut it"


def test_a_text_is_cut_in_no_piece(codec: Codec) -> None:
    model = ModelFile.parse((codec.folder / codec_module.MODEL_FILE).read_bytes())
    joined = codec_module._joined_characters((codec.folder / codec_module.MODEL_FILE).read_bytes())
    assert joined is not None
    piece = max((piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == 1), key=len)
    assert len(piece) > 3
    assert all(piece.replace("\u2581", " ")[place : place + 2] in joined for place in range(len(piece) - 1))
    stop = codec_module._cut((piece + "\n" + piece).encode(), 1, joined)
    assert stop in (len(piece.encode()), len(piece.encode()) + 1, len((piece + "\n" + piece).encode()))


def test_a_text_that_cannot_be_cut_is_refused_before_its_first_id(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "BATCH_BYTES", 10)
    monkeypatch.setattr(codec_module, "MOST_UNCUT_BYTES", 1000)
    joined = codec_module._joined_characters((codec.folder / codec_module.MODEL_FILE).read_bytes())
    letters = min(pair[0] for pair in joined or () if pair[0] == pair[1]).encode() * 900
    assert sum(map(len, codec.encode_long(b"some words\n" + letters))) > 0
    with pytest.raises(codec_module.UncutTextError, match="bytes without a place to cut them, more than 1000"):
        codec.encode_long(b"some words\n" + letters * 2)


def test_what_depends_on_more_than_its_pieces_is_not_cut(
    codec: Codec, unigram_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "BATCH_BYTES", 10)
    text = b"some words of text " * 20
    unigram = Codec.load(unigram_folder)
    (ids,) = unigram.encode_long(text)
    assert ids.tolist() == unigram.encode_batch([text])[0].tolist()
    model = ModelFile.parse((codec.folder / codec_module.MODEL_FILE).read_bytes())
    for change in ({"add_dummy_prefix": True}, {"byte_fallback": False}):
        other = dataclasses.replace(model, **change)
        monkeypatch.setattr(codec_module.ModelFile, "parse", lambda _, other=other: other)
        assert codec_module._joined_characters.__wrapped__(b"") is None
