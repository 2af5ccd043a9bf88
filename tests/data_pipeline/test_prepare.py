"""prepare: the same bytes whatever happens on the way; nothing lost, nothing twice, nothing half taken for whole."""

import gzip
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from data_pipeline.corpus import CorpusError, Document, Dropped, TxtDocuments, read_documents
from data_pipeline.durable import write_file
from data_pipeline.filters import is_validation
from data_pipeline.inspection import document_segments, window_segments
from data_pipeline.prepare import Options, PrepareError, parse_inputs, prepare
from data_pipeline.readers import items, jsonl
from data_pipeline.shards import SPLITS, DataFormatError, open_collection
from data_pipeline.stream import TokenStream
from data_pipeline.verification import verify_collection
from tests.data_pipeline.conftest import CHINESE, ODD_TEXTS, real_texts, units_held_elsewhere
from tokenizer import codec as codec_module
from tokenizer.codec import Codec

BAD_LINES = [b"", b'{"text": "cut', b'{"text": null}', b'{"text": "\xff"}', b'{"text": ""}', b'{"text": 1} x', b"[1]"]
SMALL = Options(validation_fraction=0.2, unit_bytes=20_000)


def write_jsonl(path: Path, texts: list[str], *, bad_lines: bool = False) -> Path:
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    if bad_lines:
        lines = [line for pair in zip(lines, BAD_LINES * len(lines), strict=False) for line in pair]
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> dict[str, list[Path]]:
    """Two sources: a jsonl file of many units with faults, and a folder of small files of several kinds."""
    folder = tmp_path_factory.mktemp("input")
    mixed = folder / "mixed"
    mixed.mkdir()
    write_jsonl(mixed / "a.jsonl.gz", [*ODD_TEXTS, CHINESE, *texts[:5]])
    (mixed / "b.txt").write_text(CHINESE * 3, encoding="utf-8")
    (mixed / "c.txt").write_bytes(b"")
    (mixed / "d.txt").write_bytes(b"\xff\xfe")
    (mixed / "readme.md").write_text("of another kind")
    main = write_jsonl(folder / "main.jsonl", [*texts, *texts[:3]], bad_lines=True)
    return {"main": [main], "mixed": [mixed]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, list[Path]], tokenizer_folder: Path) -> Path:
    """A collection nobody may change: copy it first."""
    out = tmp_path_factory.mktemp("made") / "collection"
    report = prepare(inputs, tokenizer_folder, out, SMALL)
    assert report.units > 20
    return out


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------- content


def test_documents_in_are_documents_out_plus_the_ledger(
    made: Path, inputs: dict[str, list[Path]], codec: Codec
) -> None:
    """Every text that was read stands in its split, in order, and decodes to itself; every drop is in the ledger."""
    collection = verify_collection(made, full=True)
    assert list(collection.sources) == ["main", "mixed"]
    for name, source in collection.sources.items():
        items = list(read_documents(inputs[name]))
        kept = [item.text for item in items if isinstance(item, Document)]
        drops = [item for item in items if isinstance(item, Dropped)]
        assert source.manifest["documents_read"] == len(items)
        assert source.manifest["dropped"] == Counter(item.reason for item in drops)
        for split in SPLITS:
            wanted = [text for text in kept if is_validation(text.encode(), 0.2) == (split == "validation")]
            stream = TokenStream(source.splits[split])
            assert source.splits[split].text_bytes == sum(len(text.encode()) for text in wanted)
            assert stream.documents == len(wanted)
            for number, text in enumerate(wanted):
                ids = stream.read(*stream.document(number))
                assert ids.tolist() == codec.encode(text, eos=True)
                assert codec.decode(ids[:-1].tolist()) == text.replace("\u2581", " ")
        ledger = [json.loads(line) for line in (source.path / "ledger.jsonl").read_bytes().splitlines()]
        assert [
            (entry["path"], entry["position"], entry["reason"]) for entry in ledger if entry["kind"] == "dropped"
        ] == [(item.path, item.position, item.reason) for item in drops]
        notes = [entry for entry in ledger if entry["kind"] == "notes"]
        assert len(notes) == source.manifest["notes"]["literal_u2581"] == sum("\u2581" in text for text in kept)
    assert collection.sources["mixed"].manifest["provenance"]["ignored_files"] == [
        str(inputs["mixed"][0] / "readme.md")
    ]


def test_equal_texts_fall_on_one_side(made: Path, codec: Codec) -> None:
    sides: dict[str, set[str]] = {}
    for source in open_collection(made).sources.values():
        for split in SPLITS:
            stream = TokenStream(source.splits[split])
            for number in range(stream.documents):
                text = codec.decode(stream.read(*stream.document(number))[:-1].tolist())
                sides.setdefault(text, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())
    assert set.union(*sides.values()) == set(SPLITS)


def test_text_that_spells_control_tokens_stays_text(tmp_path: Path, tokenizer_folder: Path, codec: Codec) -> None:
    text = "</s><s><unk><pad><|endoftext|>"
    write_jsonl(tmp_path / "x.jsonl", [text])
    prepare({"x": [tmp_path / "x.jsonl"]}, tokenizer_folder, tmp_path / "out", Options(validation_fraction=0))
    ids = TokenStream(open_collection(tmp_path / "out").sources["x"].splits["train"]).read(0, 5)
    assert not np.isin(ids, [codec.unk_id, codec.bos_id, codec.eos_id, codec.pad_id]).any()


def test_windows_and_documents_show_their_boundaries(made: Path, codec: Codec) -> None:
    source = open_collection(made).sources["main"]
    stream = TokenStream(source.splits["train"])
    for number in (0, 3, 7):
        segments = window_segments(source, "train", number, 500, codec)
        start = number * 500
        assert sum(segment.tokens for segment in segments) == 501
        assert [segment.ended for segment in segments].count(True) == len(stream.document_ends(start, start + 501))
        assert segments[0].document == stream.document_at(start)
    (whole,) = document_segments(source, "train", 1, codec)
    assert (whole.document, whole.ended) == (1, True)
    for call in (
        lambda: window_segments(source, "train", 10**6, 500, codec),
        lambda: document_segments(source, "train", -1, codec),
    ):
        with pytest.raises(DataFormatError, match="does not exist"):
            call()


def test_length_bounds_are_drops_with_their_reason(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", ["a", "abc", "abcdef"])
    options = Options(validation_fraction=0, min_chars=2, max_chars=5)
    report = prepare({"x": [tmp_path / "x.jsonl"]}, tokenizer_folder, tmp_path / "out", options)
    source = report.collection.sources["x"]
    assert source.manifest["dropped"] == {"too_few_chars": 1, "too_many_chars": 1}
    assert source.splits["train"].documents == 1


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("workers", [2, 4])
def test_output_is_identical_for_any_number_of_workers(
    tmp_path: Path, made: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, workers: int
) -> None:
    prepare(inputs, tokenizer_folder, tmp_path / "out", SMALL, workers=workers)
    assert tree(tmp_path / "out") == tree(made)


@pytest.mark.parametrize("mode", ["file", "line", "block"])
def test_long_documents_give_the_same_bytes(
    tmp_path: Path, texts: list[str], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: TxtDocuments
) -> None:
    """Those that are held as UTF-8 and tokenized in parts, beside those that are not."""
    path = write_jsonl(tmp_path / "a.jsonl", texts, bad_lines=True)
    for name, lot in (("b", texts), ("c", texts[60:64])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lot), encoding="utf-8", newline="")
    inputs = {"a": [path], "b": [tmp_path / "b.txt", tmp_path / "c.txt"]}
    options = Options(validation_fraction=0.2, min_chars=7, max_chars=9000, deduplicate=True, txt_documents=mode)
    prepare(inputs, tokenizer_folder, tmp_path / "short", options)
    monkeypatch.setattr(items, "LONG_BYTES", 2000)
    monkeypatch.setattr(jsonl, "_PART_BYTES", 300)
    monkeypatch.setattr(codec_module, "BATCH_BYTES", 700)
    with mock.patch.object(Codec, "encode_long", autospec=True, side_effect=Codec.encode_long) as encode_long:
        prepare(inputs, tokenizer_folder, tmp_path / "long", options)
    assert encode_long.call_count > 30
    assert tree(tmp_path / "long") == tree(tmp_path / "short")


def test_a_document_that_cannot_be_cut_is_told_of_and_dropped(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what bounded memory holds: nothing of it is written, and what stands around it is."""
    joined = codec_module._joined_characters((tokenizer_folder / codec_module.MODEL_FILE).read_bytes())
    letter = min(pair[0] for pair in joined or () if pair[0] == pair[1])
    write_jsonl(tmp_path / "a.jsonl", ["some words", letter * 5000, "more words"])
    monkeypatch.setattr(items, "LONG_BYTES", 2000)
    monkeypatch.setattr(codec_module, "BATCH_BYTES", 700)
    monkeypatch.setattr(codec_module, "MOST_UNCUT_BYTES", 3000)
    monkeypatch.setattr(jsonl, "_PART_BYTES", 300)
    prepare({"a": [tmp_path / "a.jsonl"]}, tokenizer_folder, tmp_path / "out", Options(validation_fraction=0))
    manifest = json.loads((tmp_path / "out" / "a" / "manifest.json").read_text())
    assert manifest["dropped"] == {"no_place_to_cut": 1}
    assert (manifest["documents_read"], manifest["splits"]["train"]["documents"]) == (3, 2)
    (entry,) = map(json.loads, (tmp_path / "out" / "a" / "ledger.jsonl").read_text().splitlines())
    assert (entry["position"], entry["reason"]) == (2, "no_place_to_cut")


MEASURED = """
import re, sys
from pathlib import Path
from data_pipeline.prepare import Options, prepare
from tokenizer.codec import Codec

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

source, tokenizer, out = map(Path, sys.argv[1:])
before = (Codec.load(tokenizer), peak())[1]
prepare({"a": [source]}, tokenizer, out, Options(validation_fraction=0.5))
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_long_document_takes_less_than_three_times_its_bytes(
    tmp_path: Path, tokenizer_folder: Path, name: str
) -> None:
    """As `str` this one takes four bytes a character; at the limit of 256 MiB there must be less than a gigabyte."""
    text = ("Words of a long document, one like the other. " * 20 + "😀\n") * 18_000 * 2
    path, size = tmp_path / name, len(text.encode())
    path.write_text((json.dumps({"text": text}) + "\n") * 2 if name == "a.jsonl" else text, encoding="utf-8")
    del text
    command = [sys.executable, "-c", MEASURED, str(path), str(tokenizer_folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert int(done.stdout) < 3 * size + 40e6  # and the encoder's caches


def run_until(process: multiprocessing.context.ForkProcess, seconds: float) -> bool:
    """Let a process run for so long, then kill it with SIGKILL; True when it was killed before its end."""
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize("workers, kills", [(1, 14), (2, 3)])
def test_killed_anywhere_it_continues_to_the_same_bytes(
    tmp_path: Path, made: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, workers: int, kills: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("data_pipeline.locks._ORPHANS_SECONDS", 120.0)  # a busy machine takes long to end them
    rng = random.Random(workers)
    arguments = (inputs, tokenizer_folder, tmp_path / "out", SMALL)
    context = multiprocessing.get_context("fork")
    began_at = time.monotonic()
    prepare(inputs, tokenizer_folder, tmp_path / "timing", SMALL, workers=workers)
    seconds = time.monotonic() - began_at
    killed = 0
    while killed < kills:
        process = context.Process(target=prepare, args=arguments, kwargs={"workers": workers})
        killed += run_until(process, rng.uniform(0, 0.7 * seconds))
        if (tmp_path / "out" / "manifest.json").exists():
            assert tree_without_receipts(tmp_path / "out") == tree(made)
            shutil.rmtree(tmp_path / "out")
        else:
            with pytest.raises(DataFormatError):
                open_collection(tmp_path / "out")
    prepare(*arguments, workers=workers)
    assert tree(tmp_path / "out") == tree(made)


def tree_without_receipts(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(folder).items() if not name.startswith(".prepare/receipts/")}


def prepare_killed_at_receipt(number: int, *arguments: Any) -> None:
    """`prepare` until receipt `number` (from 0) is all that is not yet written of its unit; there SIGKILL."""
    receipts = itertools.count()

    def write_or_die(path: Path, content: bytes) -> None:
        if next(receipts) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        write_file(path, content)

    with mock.patch("data_pipeline.unit.write_file", write_or_die):
        prepare(*arguments)


def test_a_killed_run_is_continued_not_repeated(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    """Of seven units done, one loses the end of its receipt and one that of a shard: five are not done again."""
    arguments = (inputs, tokenizer_folder, tmp_path / "out", SMALL)
    process = multiprocessing.get_context("fork").Process(target=prepare_killed_at_receipt, args=(7, *arguments))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    receipts = sorted((tmp_path / "out" / ".prepare" / "receipts").glob("*.json"))
    assert len(receipts) == 7
    receipts[0].write_bytes(receipts[0].read_bytes()[:-9])
    whole = [json.loads(path.read_bytes()) for path in receipts[1:]]
    name = next(shard["name"] for receipt in reversed(whole) for shard in receipt["shards"].values())
    shard = tmp_path / "out" / "main" / f"{name}.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert prepare(*arguments).units_done_before == 5
    verify_collection(tmp_path / "out", full=True)


def test_a_whole_collection_is_found_whole_at_once(
    tmp_path: Path, made: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    shutil.copytree(made, tmp_path / "out")
    report = prepare(inputs, tokenizer_folder, tmp_path / "out", SMALL)
    assert (report.units_done_before, report.tokens) == (report.units, 0)
    assert tree(tmp_path / "out") == tree(made)
    lost = sorted((tmp_path / "out" / "main").glob("train-*.bin"))[1]
    lost.unlink()
    with pytest.raises(DataFormatError, match=lost.name):
        prepare(inputs, tokenizer_folder, tmp_path / "out", SMALL)


# ---------------------------------------------------------------- refusals


@pytest.fixture
def one_file(tmp_path: Path) -> dict[str, list[Path]]:
    return {"x": [write_jsonl(tmp_path / "x.jsonl", real_texts(3))]}


def test_a_source_that_changed_is_refused(
    tmp_path: Path, one_file: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    path, out = one_file["x"][0], tmp_path / "out"
    prepare(one_file, tokenizer_folder, out)
    before, content = tree(out), path.read_bytes()
    for changed in (content + content, b" " + content[1:]):
        path.write_bytes(changed)
        with pytest.raises(PrepareError, match=r"x\.jsonl changed"):
            prepare(one_file, tokenizer_folder, out)
    more = {"x": [*one_file["x"], write_jsonl(tmp_path / "y.jsonl", ["more"])]}
    with pytest.raises(PrepareError, match="did not belong"):
        prepare(more, tokenizer_folder, out)
    assert tree(out) == before


def test_another_tokenizer_or_option_is_refused(
    tmp_path: Path, one_file: dict[str, list[Path]], tokenizer_folder: Path, other_tokenizer_folder: Path
) -> None:
    out = tmp_path / "out"
    prepare(one_file, tokenizer_folder, out)
    with pytest.raises(PrepareError, match="tokenizer"):
        prepare(one_file, other_tokenizer_folder, out)
    with pytest.raises(PrepareError, match="min_chars"):
        prepare(one_file, tokenizer_folder, out, Options(min_chars=3))
    with pytest.raises(PrepareError, match="sources"):
        prepare({"z": one_file["x"]}, tokenizer_folder, out)


def test_a_second_writer_is_refused(tmp_path: Path, one_file: dict[str, list[Path]], tokenizer_folder: Path) -> None:
    out = tmp_path / "out"
    (out / ".prepare").mkdir(parents=True)
    with units_held_elsewhere(out / ".prepare" / "lock"):
        before = tree(out)
        with pytest.raises(PrepareError, match="another `prepare` is writing there"):
            prepare(one_file, tokenizer_folder, out)
        assert tree(out).keys() - before.keys() <= {".prepare/setup.lock"}
    prepare(one_file, tokenizer_folder, out)


def test_a_folder_of_other_things_is_refused(
    tmp_path: Path, one_file: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    with pytest.raises(PrepareError, match="did not make"):
        prepare(one_file, tokenizer_folder, tmp_path)
    with pytest.raises(PrepareError, match="not a folder"):
        prepare(one_file, tokenizer_folder, one_file["x"][0])


def test_output_inside_an_input_folder_is_refused(
    tmp_path: Path, one_file: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    folder = one_file["x"][0].parent
    for out in (folder / "out", folder / "deep" / "out"):
        with pytest.raises(PrepareError, match="lies inside the input"):
            prepare({"a": [folder]}, tokenizer_folder, out)
        assert not out.parent.joinpath("out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_of_a_cut_file_nothing_is_published(tmp_path: Path, tokenizer_folder: Path, workers: int) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["good"])
    cut = write_jsonl(tmp_path / "cut.jsonl.gz", real_texts(40))
    cut.write_bytes(cut.read_bytes()[:-5])
    with pytest.raises(CorpusError, match="cut short"):
        prepare({"good": [good], "cut": [cut]}, tokenizer_folder, tmp_path / "out", workers=workers)
    assert not list((tmp_path / "out").rglob("manifest.json"))
    assert list((tmp_path / "out" / "cut").iterdir()) == []
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_no_document_at_all_is_one_clear_line(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "x.jsonl"
    for content, words in ((b"", "1 empty_file"), (b'{"body": "x"}\n' * 3, "3 missing_text")):
        path.write_bytes(content)
        with pytest.raises(PrepareError, match=f"no document is left.*{words}"):
            prepare({"x": [path]}, tokenizer_folder, tmp_path / f"out-{len(content)}")
        assert not list(tmp_path.rglob("manifest.json"))


def test_strict_stops_at_the_first_bad_line_and_names_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a document of some length"}\n' * 40 + b'{"text": 1}\n')
    for options in (Options(), Options(unit_bytes=99)):
        with pytest.raises(PrepareError, match=r"x\.jsonl:41: non_string_text"):
            prepare({"x": [path]}, tokenizer_folder, tmp_path / f"out-{options.unit_bytes}", options, strict=True)


def test_an_error_in_a_worker_stops_the_others(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", real_texts(60), bad_lines=True)
    with pytest.raises(PrepareError, match=r"x\.jsonl:\d+: .*--strict"):
        prepare({"x": [tmp_path / "x.jsonl"]}, tokenizer_folder, tmp_path / "out", SMALL, workers=2, strict=True)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_options_that_cannot_be_meant_are_refused() -> None:
    for wrong in ({"validation_fraction": 1.0}, {"validation_fraction": -0.1}, {"unit_bytes": 0}, {"max_chars": 0}):
        with pytest.raises(PrepareError):
            Options(**wrong)  # type: ignore[arg-type]


def test_inputs_are_named_by_hand_or_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd=name").mkdir()
    assert parse_inputs(["en=a.jsonl", "en=b/c.txt", "dir/zh.jsonl.zst", "code/", "k=x=y"]) == {
        "en": [Path("a.jsonl"), Path("b/c.txt")], "zh": [Path("dir/zh.jsonl.zst")], "code": [Path("code")],
        "k": [Path("x=y")],
    }  # fmt: skip
    for wrong in (
        ["tokenizer=a"],
        ["manifest.json=a"],
        ["../x=a"],
        ["*.txt"],
        ["odd=name"],
        ["en="],
        ["a/x.txt", "b/x.txt"],
        [],
    ):
        with pytest.raises(PrepareError):
            parse_inputs(wrong)


# ---------------------------------------------------------------- verify


def test_verify_full_finds_every_flip_and_cut(tmp_path: Path, made: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made, out)
    rng = random.Random(0)
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.stat().st_size)
    for trial in range(140):
        path = rng.choice(files)
        good = path.read_bytes()
        place = rng.randrange(len(good))
        if trial % 4:
            path.write_bytes(good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :])
        else:
            path.write_bytes(good[:place])
        with pytest.raises(DataFormatError) as caught:
            verify_collection(out, full=True)
        assert "\n" not in str(caught.value)
        assert str(out) in str(caught.value)
        path.write_bytes(good)
    verify_collection(out, full=True)


def test_quick_verify_finds_every_fault_of_size_header_and_manifest(tmp_path: Path, made: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made, out)
    rng = random.Random(1)
    shards = sorted(out.glob("*/*.bin")) + sorted(out.glob("*/*.idx"))
    others = [*sorted(out.rglob("manifest.json")), *sorted(out.glob("tokenizer/*")), out / ".prepare" / "plan.json"]
    for _ in range(120):
        path = rng.choice(shards + others * 3)
        good = path.read_bytes()
        place = rng.randrange(4096 if path in shards else len(good))
        for bad in (
            good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :],
            good[: rng.randrange(len(good))],
            good + b"\0",
            None,
        ):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            elif path.name == "plan.json":
                continue  # a collection without the record of how it was made is whole
            with pytest.raises(DataFormatError):
                verify_collection(out, full=False)
        path.write_bytes(good)
    ledger = out / "main" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b"\n")
    with pytest.raises(DataFormatError, match=r"ledger\.jsonl"):
        open_collection(out)


def test_a_data_set_swapped_for_another_whole_one_is_found(
    tmp_path: Path, made: Path, one_file: dict[str, list[Path]], other_tokenizer_folder: Path
) -> None:
    shutil.copytree(made, tmp_path / "out")
    prepare({"main": one_file["x"]}, other_tokenizer_folder, tmp_path / "other")
    shutil.rmtree(tmp_path / "out" / "main")
    shutil.copytree(tmp_path / "other" / "main", tmp_path / "out" / "main")
    with pytest.raises(DataFormatError, match=os.path.join("main", "manifest.json")):  # noqa: PTH118
        open_collection(tmp_path / "out")
