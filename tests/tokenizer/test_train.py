from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenizer.codec import Codec, TokenizerError
from tokenizer.train import TrainReport, train

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


def test_a_word_of_half_a_million_characters_trains(tmp_path: Path) -> None:
    word = "".join(random.Random(0).choices("ACGT", k=500_000))
    report = train([word], tmp_path / "dna", vocab_size=400)
    assert report.cuts == report.cuts_inside_words == 500_000 // 16_384


def test_a_corpus_without_spaces_still_spells_them(tmp_path: Path) -> None:
    train(["道可道，非常道。名可名，非常名。"] * 20, tmp_path / "t", vocab_size=275)
    codec = Codec.load(tmp_path / "t")
    assert codec.decode(codec.encode("a  b 道 \n ")) == "a  b 道 \n "


def test_text_beside_the_trainers_reserved_character_is_learned(tmp_path: Path) -> None:
    report = train(["zymurgy \u2585 zymurgy"] * 200, tmp_path / "t", vocab_size=280)
    assert report.reserved_characters == 200
    assert any("zymurgy" in piece for piece in pieces_of(tmp_path / "t"))
    codec = Codec.load(tmp_path / "t")
    assert codec.decode(codec.encode("\u2585")) == "\u2585"


def test_a_vocabulary_too_large_names_the_largest_that_works(tmp_path: Path) -> None:
    texts = ["the quick brown fox jumps over the lazy dog"] * 3
    with pytest.raises(TokenizerError, match=r"too large for .* largest possible is") as caught:
        train(texts, tmp_path / "t", vocab_size=5000)
    assert "\n" not in str(caught.value)
    found = re.search(r"possible is (\d+) \(at --character-coverage ([\d.]+)\)", str(caught.value))
    assert found is not None
    largest, coverage = int(found[1]), float(found[2])
    with pytest.raises(TokenizerError, match="too large"):
        train(texts, tmp_path / "t", vocab_size=largest + 1, character_coverage=coverage)
    assert train(texts, tmp_path / "t", vocab_size=largest, character_coverage=coverage).vocab_size == largest


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


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 260},
        {"vocab_size": 2**31},
        {"vocab_size": 500, "character_coverage": 0.5},
        {"vocab_size": 500, "sample_bytes": 9},
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^[^\n]+$"):
        train(["text"], tmp_path / "t", **options)


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


def test_a_training_killed_at_any_moment_leaves_nothing_or_all(texts: list[str], tmp_path: Path) -> None:
    """Kill it as soon as anything appears beside its output, and at some random moments."""
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
            while process.poll() is None and not any(place.iterdir()):
                pass
        else:
            time.sleep(chance.uniform(0.1, 1.5))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if out.exists():
            Codec.load(out)
        left = {path.name for path in place.iterdir()} - {"tokenizer"}
        assert all(name.startswith(".") and name.endswith(".partial") for name in left)
