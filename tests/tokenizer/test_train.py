from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenizer.codec import PROBE_TEXT, Codec, TokenizerError
from tokenizer.fastbpe.encoder import FastBPE
from tokenizer.model_file import ModelFile, PieceType
from tokenizer.sample import Sample, Weighted
from tokenizer.train import train
from tokenizer.training_report import TrainReport

ROOT = Path(__file__).resolve().parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    """What must not vary: training.md holds times."""
    names = {path.name for path in folder.iterdir()}
    return {name: (folder / name).read_bytes() for name in names - {"training.md"}}


def pieces_of(folder: Path) -> list[str]:
    codec = Codec.load(folder)
    return [codec.piece(token_id) for token_id in range(codec.vocab_size)]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_files_depend_on_text_and_options_alone(model_type: str, texts: list[str], tmp_path: Path) -> None:
    few = texts[:2]
    made = []
    for number, threads in enumerate((1, 3, 2, 1)):
        folder = tmp_path / f"{number}"
        train(iter(few), folder, vocab_size=700, model_type=model_type, threads=threads)
        made.append(contents(folder))
    assert made[0].keys() == {"tokenizer.model", "description.json"}
    assert all(files == made[0] for files in made)


def test_no_path_of_the_machine_is_stored(tokenizer_folder: Path) -> None:
    for content in (path.read_bytes() for path in tokenizer_folder.iterdir()):
        assert str(tokenizer_folder.parent).encode() not in content
        assert str(ROOT).encode() not in content
        assert b"/tmp" not in content


def test_the_seed_chooses_the_sample_within_the_budget(texts: list[str], tmp_path: Path) -> None:
    reports: dict[str, TrainReport] = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        reports[name] = train(texts, tmp_path / name, vocab_size=600, sample_bytes=200_000, seed=seed)
    assert all(report.sampled_bytes <= 200_000 for report in reports.values())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["tokenizer.model"] != contents(tmp_path / "c")["tokenizer.model"]


def test_pieces_hold_line_breaks_and_indents_but_no_two_digits(tokenizer_folder: Path) -> None:
    learned = pieces_of(tokenizer_folder)[260:]
    assert "\u2581" * 8 in learned
    assert any("\n" in piece and len(piece) > 1 for piece in learned)
    assert not any(re.search(r"\d.", piece) or re.search(r".\d", piece) for piece in learned)


def test_no_text_is_dropped_for_its_length(tmp_path: Path) -> None:
    chance = random.Random(0)
    filler = ["".join(chance.choices("abcdefgh", k=5)) for _ in range(200)]
    text = " ".join([*chance.choices(filler, k=100_000), *["zymurgy"] * 3_000])
    report = train([text], tmp_path / "long", vocab_size=600)
    assert report.sampled_bytes == report.text_bytes == len(text)
    assert report.cuts > 30
    assert report.cuts_inside_words == 0
    assert "\u2581zymurgy" in pieces_of(tmp_path / "long")


@pytest.mark.parametrize("model_type, length", [("bpe", 500_000), ("unigram", 40_000)])
def test_a_word_of_any_length_trains(model_type: str, length: int, tmp_path: Path) -> None:
    word = "".join(random.Random(0).choices("ACGT", k=length))
    report = train([word], tmp_path / "dna", vocab_size=400, model_type=model_type)
    assert report.cuts == report.cuts_inside_words == length // 16_384


@pytest.mark.parametrize("split", ["documents", "lines"])
def test_a_corpus_without_a_layout_still_spells_one(split: str, tmp_path: Path) -> None:
    train(["道可道，非常道。名可名，非常名。"] * 20, tmp_path / "t", vocab_size=275, split=split)
    codec = Codec.load(tmp_path / "t")
    assert codec.decode(codec.encode("a  b 道 \n\t ")) == "a  b 道 \n\t "
    assert [codec.piece(token_id) for token_id in codec.encode("道 \n\t")][-3:] == ["\u2581", "\n", "\t"]


def test_text_beside_the_trainers_reserved_character_is_learned(tmp_path: Path) -> None:
    report = train(["zymurgy \u2585 zymurgy"] * 200, tmp_path / "t", vocab_size=280)
    assert report.reserved_characters == 200
    assert any("zymurgy" in piece for piece in pieces_of(tmp_path / "t"))
    codec = Codec.load(tmp_path / "t")
    assert codec.decode(codec.encode("\u2585")) == "\u2585"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_too_large_names_the_largest_that_works(model_type: str, tmp_path: Path) -> None:
    texts = ["the quick brown fox jumps over the lazy dog"] * 3
    options: dict[str, Any] = {"model_type": model_type}
    with pytest.raises(
        TokenizerError, match=r"^vocabulary of 5000 .* too large for 129 bytes .* largest possible is"
    ) as e:
        train(texts, tmp_path / "t", vocab_size=5000, **options)
    assert "\n" not in str(e.value)
    found = re.search(r"possible is (\d+) \(at --character-coverage ([\d.]+)\)", str(e.value))
    assert found is not None
    largest = int(found[1])
    options["character_coverage"] = float(found[2])
    with pytest.raises(TokenizerError, match="too large"):
        train(texts, tmp_path / "t", vocab_size=largest + 1, **options)
    assert list(tmp_path.iterdir()) == []
    assert train(texts, tmp_path / "t", vocab_size=largest, **options).vocab_size == largest


def test_a_vocabulary_too_small_for_its_alphabet_is_refused(tmp_path: Path) -> None:
    texts = ["".join(chr(code) for code in range(0x4E00, 0x5E00))]
    with pytest.raises(TokenizerError, match=r"too small.*give at least 4\d\d\d"):
        train(texts, tmp_path / "t", vocab_size=1000)
    assert not (tmp_path / "t").exists()


def test_a_small_vocabulary_keeps_room_for_words_beside_characters(tmp_path: Path) -> None:
    """Frequencies as in Chinese (Zipf): the alphabet stops at two fifths of what can be learned, not at 99.95 %."""
    chance = random.Random(0)
    alphabet = [chr(0x4E00 + rank) for rank in range(3000)]
    weights = [1 / (rank + 1) ** 2 for rank in range(3000)]
    texts = ["".join(chance.choices(alphabet, weights, k=500)) for _ in range(600)]
    report = train(texts, tmp_path / "t", vocab_size=500)
    assert report.alphabet <= 96
    assert 0.98 < report.character_coverage < 0.9995


@pytest.mark.parametrize("texts", [[], [""], ["", "\u2585"]])
def test_no_text_is_refused(texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^no text to train on: [^\n]*$"):
        train(texts, tmp_path / "t", vocab_size=1000)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_leaves_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"^no text to train on: 1 documents with 9 bytes; a weight below 1 [^\n]*$"
    ):
        train([Weighted("some text", 1e-9)], tmp_path / "t", vocab_size=1000)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("texts", [["\0" * 500], ["\n" * 500], ["\r\n" * 9, "\0", "\n\0\r"]])
@pytest.mark.parametrize("split", ["documents", "lines"])
def test_nuls_and_line_breaks_are_no_text(model_type: str, texts: list[str], split: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^no text to train on: .* nothing but NULs and line breaks[^\n]*$"):
        train(texts, tmp_path / "t", vocab_size=1000, model_type=model_type, split=split)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 0},
        {"vocab_size": 260},
        {"vocab_size": 2**31},
        {"vocab_size": 500, "character_coverage": 0.5},
        {"vocab_size": 500, "sample_bytes": 9},
        {"vocab_size": 500, "model_type": "word"},
        {"vocab_size": 500, "normalization": "nmt_nfkc"},
        {"vocab_size": 500, "split": "words"},
        {"vocab_size": 500, "reserve": -1},
        {"vocab_size": 500, "reserve": 240},
        {"vocab_size": 500, "vocab_multiple": 0},
        {"vocab_size": 500, "control_symbols": ["<s>"]},
        {"vocab_size": 500, "user_symbols": ["ﬁ"], "normalization": "nfkc"},
    ],
)
def test_impossible_options_are_refused_before_a_text_is_read(options: dict[str, Any], tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        raise AssertionError("read a text")
        yield ""

    with pytest.raises(TokenizerError, match=r"^[^\n]+$"):
        train(texts(), tmp_path / "t", **options)


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="text 1: lone surrogate at character 3"):
        train(["fine", "abc\ud800"], tmp_path / "t", vocab_size=1000)


def test_only_a_tokenizer_is_ever_overwritten(texts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "t"
    out.mkdir()  # an empty folder is free
    first = train(texts, out, vocab_size=500)
    with pytest.raises(TokenizerError, match="--overwrite"):
        train(iter(()), out, vocab_size=600)  # refused before a text is read
    assert Codec.load(out).fingerprint == first.fingerprint
    assert train(texts, out, vocab_size=600, overwrite=True).fingerprint == Codec.load(out).fingerprint

    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(TokenizerError, match="no tokenizer's"):
        train(texts, out, vocab_size=700, overwrite=True)
    assert contents(out) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TokenizerError, match="not a folder"):
        train(texts, tmp_path / "file", vocab_size=700, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "t"]


def test_provenance_is_kept_as_it_is_when_the_texts_end(tmp_path: Path) -> None:
    provenance: dict[str, object] = {}

    def texts() -> Iterator[str]:
        yield from ["some words to learn from"] * 50
        provenance["inputs"] = [{"name": "words"}]

    train(texts(), tmp_path / "t", vocab_size=280, provenance=provenance)
    description = json.loads((tmp_path / "t" / "description.json").read_text())
    assert description["corpus"]["provenance"] == {"inputs": [{"name": "words"}]}
    assert description["corpus"]["documents"] == 50
    assert description["ids"] == {"unk": 0, "bos": 1, "eos": 2, "pad": 3}


# ---------------------------------------------------------------- choices


def test_unigram_is_lossless_too(texts: list[str], tmp_path: Path) -> None:
    report = train(texts[:3], tmp_path / "t", vocab_size=900, model_type="unigram")
    codec = Codec.load(tmp_path / "t")
    model = ModelFile.parse((tmp_path / "t" / "tokenizer.model").read_bytes())
    assert (model.model_type, model.byte_fallback, model.has_charsmap) == ("unigram", True, False)
    assert (report.vocab_size, codec.vocab_size) == (900, 900)
    assert json.loads((tmp_path / "t" / "description.json").read_text())["type"] == "sentencepiece-unigram"
    for text in [*texts, PROBE_TEXT, " \n\t  \r\n", "\x00"]:
        assert codec.decode(codec.encode(text)) == text
    assert any("\n" in piece and len(piece) > 1 for piece in pieces_of(tmp_path / "t"))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_nfkc_is_said_to_lose_what_it_loses_and_keeps_the_layout(
    model_type: str, texts: list[str], tmp_path: Path
) -> None:
    notices: list[str] = []
    lossy = [texts[0], "ｆｕｌｌ　ｗｉｄｔｈ，\tcafe\u0301\n\n  ①\n" * 40]
    report = train(
        lossy, tmp_path / "t", vocab_size=600, normalization="nfkc", model_type=model_type, on_notice=notices.append
    )
    assert report.changed_pieces == 1
    assert report.changed_characters["ｌ"] == 80
    assert sum(report.changed_characters.values()) == 40 * 12
    assert re.match(
        r"nfkc does not give .* changes 1 of \d+ texts .* replaces 480 characters \(80 × U\+FF4C ｌ,", notices[0]
    )
    codec = Codec.load(tmp_path / "t")
    for text in [*lossy, PROBE_TEXT, " \n\t  \r\n \x85\u2028"]:
        assert codec.decode(codec.encode(text)) == unicodedata.normalize("NFKC", text)
    description = json.loads((tmp_path / "t" / "description.json").read_text())
    assert (description["corpus"]["changed_characters"], description["corpus"]["changed_pieces"]) == (480, 1)
    assert "U+FF4C" in (tmp_path / "t" / "training.md").read_text()


def test_identity_warns_of_nothing_and_only_long_work_is_estimated(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    larger = [text * 3 for text in texts]
    train(larger, tmp_path / "a", vocab_size=700, on_notice=notices.append)
    assert notices == []
    monkeypatch.setattr("tokenizer.train.MIN_ESTIMATED_BYTES", 1_000_000)
    train(larger, tmp_path / "b", vocab_size=700, on_notice=notices.append)
    assert len(notices) == 1
    assert re.match(r"training on [12]\.\d MB: about \d+ s to \d+ s, \d+ MB to \d+ MB of memory$", notices[0])


def test_pieces_mix_punctuation_and_letters_only_on_request(texts: list[str], tmp_path: Path) -> None:
    measured = {}
    for name, split_by_script in (("apart", True), ("mixed", False)):
        report = train(texts, tmp_path / name, vocab_size=1500, split_by_script=split_by_script)
        measured[name] = report.measurement.bytes_per_token
    mixed = {
        name: [piece for piece in pieces_of(tmp_path / name)[260:] if re.search(r"[A-Za-z][_(.]|[_(.][A-Za-z]", piece)]
        for name in measured
    }
    assert not mixed["apart"]
    assert len(mixed["mixed"]) > 20
    assert measured["mixed"] > 1.02 * measured["apart"]
    codec = Codec.load(tmp_path / "mixed")
    assert codec.encoder == Codec.load(tmp_path / "apart").encoder
    assert codec.decode(codec.encode(texts[0])) == texts[0]


def test_lines_give_pieces_without_line_breaks(texts: list[str], tmp_path: Path) -> None:
    reports = {split: train(texts, tmp_path / split, vocab_size=1000, split=split) for split in ("documents", "lines")}
    assert [piece for piece in pieces_of(tmp_path / "lines") if "\n" in piece] == ["\n"]
    assert "\t" in pieces_of(tmp_path / "lines")
    codec = Codec.load(tmp_path / "lines")
    assert all(codec.decode(codec.encode(text)) == text for text in texts)
    better = reports["documents"].measurement.bytes_per_token / reports["lines"].measurement.bytes_per_token
    assert 1.02 < better < 1.2
    for split in reports:
        assert json.loads((tmp_path / split / "description.json").read_text())["options"]["split"] == split
        assert (
            f"- split: {'whole documents' if split == 'documents' else 'lines'}"
            in (tmp_path / split / "training.md").read_text()
        )


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_symbols_have_the_ids_that_are_said(model_type: str, texts: list[str], tmp_path: Path) -> None:
    spelled = [text.replace("self", "<|user|><think>") for text in texts[:2]]
    report = train(
        spelled,
        tmp_path / "t",
        vocab_size=701,
        model_type=model_type,
        control_symbols=["<|user|>", "<|tool|>"],
        user_symbols=["<think>", "a,b"],
        reserve=2,
        vocab_multiple=64,
    )
    spare = [f"<|reserved_{number}|>" for number in range(2 + 3)]
    names = ["<|user|>", "<|tool|>", *spare, "<think>", "a,b"]
    expected = {name: token_id for token_id, name in enumerate(names, 4)}
    assert (report.vocab_size, report.symbols) == (704, expected)
    description = json.loads((tmp_path / "t" / "description.json").read_text())
    assert (description["vocab_size"], description["symbols"]) == (704, expected)

    model = ModelFile.parse((tmp_path / "t" / "tokenizer.model").read_bytes())
    assert model.pieces[4:14] == [*names, "<0x00>"]
    assert model.types[4:14].tolist() == [PieceType.CONTROL] * 7 + [PieceType.USER_DEFINED] * 2 + [PieceType.BYTE]
    codec = Codec.load(tmp_path / "t")
    control = set(range(4, 11))
    for text in [*spelled, *names, PROBE_TEXT]:
        ids = codec.encode(text)
        assert not control & set(ids)
        assert codec.decode(ids) == text
    assert codec.encode("x<think>y a,b").count(11) == codec.encode("x<think>y a,b").count(12) == 1


def test_thousands_of_symbols_are_verified_in_batches(
    fast: object, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = FastBPE.encode

    def counted(self: FastBPE, batch: Sequence[bytes]) -> Any:
        sizes.append(len(batch))
        return encode(self, batch)

    monkeypatch.setattr(FastBPE, "encode", counted)
    train(texts[:1], tmp_path / "t", vocab_size=3600, reserve=3000)
    assert 3000 in sizes
    assert len(sizes) < 20


def test_a_vocabulary_that_is_a_multiple_stays_as_it_is(texts: list[str], tmp_path: Path) -> None:
    report = train(texts[:1], tmp_path / "t", vocab_size=640, vocab_multiple=64)
    assert (report.vocab_size, report.symbols) == (640, {})


# ---------------------------------------------------------------- what is reported


def test_the_alphabet_is_the_number_of_single_characters_learned(texts: list[str], tmp_path: Path) -> None:
    marked = [*texts, "literal \u2581 mark"]
    for split in ("documents", "lines"):
        report = train(marked, tmp_path / split, vocab_size=1000, split=split)
        assert report.alphabet == sum(len(piece) == 1 for piece in pieces_of(tmp_path / split)[260:])


def test_line_breaks_are_no_part_of_the_alphabets_share_where_lines_are_the_sentences(tmp_path: Path) -> None:
    text = "a\n" * 980 + "b" * 25 + "c" * 15 + "d" * 10  # 98 % are a, b and c; with the line breaks a, b and they
    report = train([text], tmp_path / "t", vocab_size=272, character_coverage=0.98, split="lines")
    single = [piece for piece in pieces_of(tmp_path / "t")[260:] if len(piece) == 1]
    assert sorted(single) == ["\t", "\n", "a", "b", "c", "\u2581"]
    assert report.alphabet == 6


def test_a_text_that_fits_is_measured_as_it_is(texts: list[str], tmp_path: Path) -> None:
    report = train(texts[:1], tmp_path / "t", vocab_size=500)
    pieces = Sample(max_bytes=10**9, seed=0)
    pieces.add(texts[0])
    codec = Codec.load(tmp_path / "t")
    tokens = sum(len(codec.encode(piece.decode())) for piece in pieces.pieces())
    measured = report.measurement
    assert (measured.unseen, measured.text_bytes, measured.tokens) == (False, report.sampled_bytes, tokens)
    assert measured.bytes_per_token == report.sampled_bytes / tokens
    assert "out of the text trained on" in (tmp_path / "t" / "training.md").read_text()


def test_a_text_that_does_not_fit_is_measured_on_what_was_left_out(texts: list[str], tmp_path: Path) -> None:
    report = train(texts, tmp_path / "t", vocab_size=500, sample_bytes=200_000)
    assert report.measurement.unseen
    assert 0 < report.measurement.text_bytes <= report.text_bytes - report.sampled_bytes
    assert "that the trainer has not seen" in (tmp_path / "t" / "training.md").read_text()


def test_a_training_that_is_killed_writes_nothing(texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^the training process was killed .* lower --sample-bytes$"):
        train(texts, tmp_path / "t", vocab_size=1000, on_progress=lambda progress: kill_children())
    assert list(tmp_path.iterdir()) == []


def kill_children() -> None:
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)


def test_a_training_killed_at_any_moment_leaves_nothing_or_all(texts: list[str], tmp_path: Path) -> None:
    """Kill it as soon as it makes its output, after the look whether it can, and at some random moments."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate(texts):
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    chance = random.Random(0)
    for attempt in range(5):
        place = tmp_path / f"attempt-{attempt}"
        place.mkdir()
        out = place / "tokenizer"
        command = [sys.executable, "-m", "tokenizer", "train", "--input", str(corpus), "--vocab-size", "400", "--out"]
        process = subprocess.Popen([*command, str(out)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if attempt < 3:
            seen: set[Path] = set()
            while process.poll() is None and len(seen) < 2:
                seen.update(place.iterdir())
        else:
            time.sleep(chance.uniform(0.1, 1.5))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if out.exists():
            Codec.load(out)
        left = {path.name for path in place.iterdir()} - {"tokenizer"}
        assert all(name.startswith(".") and name.endswith(".partial") for name in left)
