"""Exact duplicates: the first in the order of input stays, whatever the workers; each drop names the first."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import duplicates
from data_pipeline.corpus import CorpusError
from data_pipeline.prepare import Options, Part, PrepareError, prepare, prepare_part
from data_pipeline.shards import SPLITS, open_collection
from data_pipeline.stream import TokenStream
from data_pipeline.verification import verify_collection, verify_sample
from tests.data_pipeline.test_prepare import tree, write_jsonl
from tokenizer.codec import Codec

OPTIONS = Options(validation_fraction=0.3, unit_bytes=400, min_chars=2, deduplicate=True)


def stored(out: Path, source: str, codec: Codec) -> list[str]:
    texts = []
    for split in SPLITS:
        stream = TokenStream(open_collection(out).sources[source].splits[split])
        texts += [codec.decode(stream.read(*stream.document(n))[:-1].tolist()) for n in range(stream.documents)]
    return texts


def ledger(out: Path, source: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / source / "ledger.jsonl").read_bytes().splitlines()]


def kept_and_dropped(files: list[tuple[Path, list[str]]]) -> tuple[list[str], list[tuple[str, int, str]]]:
    """By a plain dictionary: the texts that stay, and (file, line, detail) of the others."""
    first: dict[str, str] = {}
    dropped = []
    for path, texts in files:
        for line, text in enumerate(texts, 1):
            if len(text) < OPTIONS.min_chars:
                continue
            if text in first:
                dropped.append((str(path), line, f"of {first[text]}"))
            first.setdefault(text, f"{path}:{line}")
    return list(first), dropped


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[Path, list[str]]]:
    """A file of many units, a compressed one and a small one; texts come again near and far, three times, too short."""
    many = [f"text {n * n % 53} of some length, so that units are many" for n in range(120)]
    few = [many[7], "x", "x", "of its own", many[0], "of its own"]
    last = ["of its own", "another", *many[5:8]]
    folder = tmp_path / "in"
    folder.mkdir()
    named = [("a.jsonl", many), ("b.jsonl.gz", few), ("c.jsonl", last)]
    return [(write_jsonl(folder / name, texts), texts) for name, texts in named]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("round_documents, run_documents", [(1 << 22, 1 << 20), (7, 2)])
def test_the_first_of_equal_texts_stays(
    tmp_path: Path, files: list[tuple[Path, list[str]]], tokenizer_folder: Path, codec: Codec,
    monkeypatch: pytest.MonkeyPatch, workers: int, round_documents: int, run_documents: int,
) -> None:  # fmt: skip
    """Over all files of a source, however many rounds and runs it takes; other sources keep their own."""
    monkeypatch.setattr(duplicates, "_ROUND_DOCUMENTS", round_documents)
    if workers == 1:  # worker processes have their own
        monkeypatch.setattr(duplicates, "_RUN_DOCUMENTS", run_documents)
    inputs = {"one": [path for path, _ in files], "two": [files[2][0]]}
    report = prepare(inputs, tokenizer_folder, tmp_path / "out", OPTIONS, workers=workers)
    assert report.units > 10
    kept, dropped = kept_and_dropped(files)
    assert sorted(stored(tmp_path / "out", "one", codec)) == sorted(kept)
    entries = [entry for entry in ledger(tmp_path / "out", "one") if entry["reason"] == "duplicate"]
    assert [(entry["path"], entry["position"], entry["detail"]) for entry in entries] == dropped
    manifest = report.collection.sources["one"].manifest
    assert manifest["dropped"] == {"duplicate": len(dropped), "too_few_chars": 2}
    assert manifest["options"]["deduplicate"] is True
    assert sorted(stored(tmp_path / "out", "two", codec)) == sorted(set(files[2][1]))
    collection = verify_collection(tmp_path / "out", full=True)
    assert verify_sample(collection, codec, 40).lost == {}
    assert {path.name for path in (tmp_path / "out" / ".prepare").iterdir() if path.is_dir()} == set()


def test_without_it_nothing_is_dropped_and_no_option_is_recorded(
    tmp_path: Path, files: list[tuple[Path, list[str]]], tokenizer_folder: Path
) -> None:
    report = prepare({"one": [path for path, _ in files]}, tokenizer_folder, tmp_path / "out", Options())
    manifest = report.collection.sources["one"].manifest
    assert (manifest["dropped"], "deduplicate" in manifest["options"]) == ({}, False)


def hashed(inputs: dict[str, list[Path]], tokenizer: Path, out: Path) -> Path:
    """A folder in which only the first pass is done; returns where its results lie."""
    assert prepare_part(inputs, tokenizer, out, OPTIONS, part=Part(1, 2)).units_unhashed
    return out / ".prepare" / "duplicates"


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda path: flip(path, 40), "damaged; start again"),
        (lambda path: path.write_bytes(path.read_bytes()[:-32]), None),
        (lambda path: path.unlink(), None),
        (lambda path: flip(path.with_suffix(".json"), 200), None),
    ],
    ids=["a bit", "cut", "lost", "receipt"],
)
def test_damaged_hashes_are_made_anew(
    tmp_path: Path, files: list[tuple[Path, list[str]]], tokenizer_folder: Path,
    damage: Callable[[Path], None], error: str | None,
) -> None:  # fmt: skip
    inputs = {"one": [path for path, _ in files]}
    prepare(inputs, tokenizer_folder, tmp_path / "whole", OPTIONS)
    folder = hashed(inputs, tokenizer_folder, tmp_path / "out")
    damage(sorted(folder.glob("*.hashes"))[1])
    if error is not None:
        with pytest.raises(PrepareError, match=error):
            prepare(inputs, tokenizer_folder, tmp_path / "out", OPTIONS)
    prepare(inputs, tokenizer_folder, tmp_path / "out", OPTIONS)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_input_that_changed_between_the_passes_is_refused(
    tmp_path: Path, files: list[tuple[Path, list[str]]], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though size and time stay the same."""
    path, _ = files[2]
    comparing = duplicates.find_repeats

    def compare_and_change(*arguments: Any) -> None:
        comparing(*arguments)
        stat = path.stat()
        path.write_bytes(path.read_bytes().replace(b"another", b"anothex"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    monkeypatch.setattr("data_pipeline.prepare.find_repeats", compare_and_change)
    with pytest.raises(CorpusError, match=r"c\.jsonl: changed since its documents were compared"):
        prepare({"one": [path]}, tokenizer_folder, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_source_of_nothing_but_drops(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": ""}\n')
    with pytest.raises(PrepareError, match="no document is left"):
        prepare({"x": [path]}, tokenizer_folder, tmp_path / "out", OPTIONS)


def test_strict_stops_the_first_pass(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": 1}\n')
    with pytest.raises(PrepareError, match=r"x\.jsonl:2: non_string_text"):
        prepare({"x": [path]}, tokenizer_folder, tmp_path / "out", OPTIONS, strict=True)
    assert not list((tmp_path / "out").rglob("*.tmp"))
