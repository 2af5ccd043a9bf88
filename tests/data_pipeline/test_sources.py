"""Every source through `prepare` and back: places, formats, cuts, and what the ledger and the origins say of them."""

import bz2
import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest

from data_pipeline import unit
from data_pipeline.corpus import CorpusError, Dropped, Place, TxtDocuments, read_documents, read_piece
from data_pipeline.inspection import choose_codec
from data_pipeline.prepare import Options, PrepareError, prepare
from data_pipeline.shards import SPLITS, open_collection
from data_pipeline.stream import TokenStream
from data_pipeline.verification import verify_collection, verify_sample
from tests.data_pipeline.conftest import CHINESE, real_texts
from tests.data_pipeline.test_prepare import tree
from tokenizer.codec import Codec

TEXTS = [text.strip() for text in real_texts(12)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Place]]]:
    """One source a kind of place and format, each with the same good lines and a bad one."""
    folder = tmp_path_factory.mktemp("corpora")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    content = "\n".join([*lines[:6], "no JSON", *lines[6:]]).encode() + b"\n"
    (folder / "a.jsonl").write_bytes(content)
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(content[:999]) + lzma.compress(content[999:]))
    (folder / "a.ndjson.bz2").write_bytes(bz2.compress(content))
    data = datasets.Dataset.from_dict({"text": [*TEXTS[:6], None, *TEXTS[6:]]})
    datasets.disable_progress_bars()
    data.save_to_disk(folder / "saved", num_shards=2)
    (folder / "named").mkdir()
    data.to_parquet(folder / "named" / "train-0.parquet")
    (folder / "other").mkdir()
    data.to_csv(folder / "other" / "train.csv", index=False)
    fsspec.filesystem("memory").pipe("/sources/a.jsonl", content)
    yield {
        "address": [f"file://{folder}/a.jsonl"],
        "bz2": [folder / "a.ndjson.bz2"],
        "memory": ["memory://sources/a.jsonl"],
        "named": [f"hf:{folder}/named"],
        "other": [f"hf:{folder}/other"],
        "saved": [folder / "saved"],
        "xz": [folder / "a.jsonl.xz"],
    }
    fsspec.filesystem("memory").rm("/sources", recursive=True)


def stored_texts(out: Path, name: str, codec: Codec) -> set[str]:
    source = open_collection(out).sources[name]
    return {
        codec.decode(stream.read(*stream.document(number))[:-1].tolist())
        for stream in (TokenStream(source.splits[split]) for split in SPLITS)
        for number in range(stream.documents)
    }


def test_every_place_and_format(
    tmp_path: Path, corpora: dict[str, list[Place]], tokenizer_folder: Path, codec: Codec
) -> None:
    options = Options(validation_fraction=0.2, unit_bytes=20_000)
    prepare(corpora, tokenizer_folder, tmp_path / "out", options)
    collection = verify_collection(tmp_path / "out", full=True)
    plan = json.loads((tmp_path / "out" / ".prepare" / "plan.json").read_bytes())
    for name, source in collection.sources.items():
        assert stored_texts(tmp_path / "out", name, codec) == {text.replace("\u2581", " ") for text in TEXTS}
        assert source.manifest["documents_read"] == len(TEXTS) + 1
        assert sum(source.manifest["dropped"].values()) == 1
        (entry,) = map(json.loads, (source.path / "ledger.jsonl").read_bytes().splitlines())
        assert entry["position"] == 7
        (file, *_) = plan["sources"][name]["files"]
        assert file.keys() == {"path", "size", "tag" if name in ("address", "memory") else "mtime_ns"}
    assert "txt_documents" not in plan["options"]  # what came later than version 1 stands there only where it is chosen
    elsewhere = {name: places for name, places in corpora.items() if name != "memory"}  # which other processes lack
    prepare(elsewhere, tokenizer_folder, tmp_path / "two", options, workers=2)
    for name in elsewhere:
        assert tree(tmp_path / "two" / name) == tree(tmp_path / "out" / name)


def test_documents_are_found_again_in_their_sources(
    tmp_path: Path, corpora: dict[str, list[Place]], tokenizer_folder: Path
) -> None:
    report = prepare(corpora, tokenizer_folder, tmp_path / "out", Options(validation_fraction=0.2))
    sample = verify_sample(report.collection, choose_codec(report.collection), 10_000)
    assert sample.equal == (len(corpora) - 1) * len(TEXTS)
    assert sum(sample.lost.values()) == len(TEXTS)  # of the data set that only the library reads
    (reason,) = sample.lost
    assert "train.csv" in reason


@pytest.mark.parametrize("mode", ["line", "block"])
def test_text_cut_into_units_keeps_its_line_numbers(
    tmp_path: Path, tokenizer_folder: Path, codec: Codec, mode: TxtDocuments
) -> None:
    blocks = [f"{CHINESE}\n{number}" if number % 7 else "x" for number in range(400)]
    path = tmp_path / "a.txt"
    path.write_bytes("\n\n".join(blocks).encode() + b"\n\n\xff\n")
    last_line = path.read_bytes().count(b"\n")
    results = []
    for unit_bytes in (3_000, 10**9):
        out = tmp_path / f"{unit_bytes}"
        options = Options(validation_fraction=0.2, min_chars=2, unit_bytes=unit_bytes, txt_documents=mode)
        report = prepare({"a": [path]}, tokenizer_folder, out, options)
        assert (report.units > 10) == (unit_bytes == 3_000)
        source = report.collection.sources["a"]
        assert source.manifest["options"]["txt_documents"] == mode
        ledger = (source.path / "ledger.jsonl").read_bytes()
        results.append((ledger, source.manifest["documents_read"], stored_texts(out, "a", codec)))
        sample = verify_sample(report.collection, choose_codec(report.collection), 10_000)
        assert (sample.equal, sample.lost) == (sum(split.documents for split in source.splits.values()), {})
        with pytest.raises(PrepareError, match=f"txt_documents = {mode}, not file"):
            prepare({"a": [path]}, tokenizer_folder, out, replace(options, txt_documents="file"))
        with pytest.raises(PrepareError, match=rf"a\.txt:{2 if mode == 'line' else last_line}: .*--strict"):
            prepare({"a": [path]}, tokenizer_folder, out.with_suffix(".strict"), options, strict=True)
    assert results[0] == results[1]
    items = list(read_documents(path, txt_documents=mode))
    drops = [item.position for item in items if isinstance(item, Dropped) or len(item.text) < 2]
    assert [json.loads(line)["position"] for line in results[0][0].splitlines()] == drops


def test_a_remote_file_that_changed_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/changed/a.jsonl", b'{"text": "one"}\n')
    prepare({"a": ["memory://changed"]}, tokenizer_folder, tmp_path / "out")
    assert prepare({"a": ["memory://changed"]}, tokenizer_folder, tmp_path / "out").units_done_before == 1
    memory.pipe("/changed/a.jsonl", b'{"text": "two"}\n')
    with pytest.raises(PrepareError, match=r"a\.jsonl changed since it was begun"):
        prepare({"a": ["memory://changed"]}, tokenizer_folder, tmp_path / "out")
    memory.rm("/changed", recursive=True)


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n')
    memory.pipe("/changing/a.jsonl", b'{"text": "one"}\n')

    def read_and_change(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield from read_piece(*arguments, **options)
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "one more"}\n')
        memory.pipe("/changing/a.jsonl", b'{"text": "one more"}\n')

    monkeypatch.setattr(unit, "read_piece", read_and_change)
    for number, place in enumerate([tmp_path / "a.jsonl", "memory://changing"]):
        with pytest.raises(CorpusError, match=r"a\.jsonl: the file changed while it was read"):
            prepare({"a": [place]}, tokenizer_folder, tmp_path / f"{number}")
        assert not list((tmp_path / f"{number}").rglob("*.bin"))
    memory.rm("/changing", recursive=True)
