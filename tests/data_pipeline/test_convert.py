"""Foreign token files: laid out to the byte, read by Megatron's own reader, ids equal both ways, faults named."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import convert, token_formats
from data_pipeline.convert import export_tokens, import_tokens
from data_pipeline.filters import is_validation
from data_pipeline.inspection import choose_codec
from data_pipeline.shards import SPLITS, Collection, DataFormatError, ShardWriter, Split
from data_pipeline.stream import TokenStream
from data_pipeline.token_formats import FORMATS, Format, megatron_documents, write_megatron_index
from data_pipeline.verification import verify_collection, verify_sample
from tests.data_pipeline.conftest import SmallCollection
from tokenizer.codec import Codec

ROOT = Path(__file__).resolve().parents[2]


def flat(collection: Collection, name: str, split: str) -> np.ndarray:
    stream = TokenStream(collection.sources[name].splits[split])  # type: ignore[index]
    return stream.read(0, stream.tokens).astype(np.int64)


def ends(collection: Collection, name: str, split: str) -> list[int]:
    stream = TokenStream(collection.sources[name].splits[split])  # type: ignore[index]
    return stream.document_ends(0, stream.tokens).tolist()


def inputs_of(form: Format, out: Path, split: str) -> dict[str, list[Path]]:
    """What `export_tokens` wrote of a split, as `import_tokens` takes it."""
    short = "val" if split == "validation" else split
    paths = {
        "megatron": lambda name: out / f"{name}_{split}",
        "nanogpt": lambda name: out / name / f"{short}.bin",
        "llmc": lambda name: out / f"{name}_{short}_*.bin",
    }
    return {name: [paths[form](name)] for name in ("lines", "files")}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, blocks and shards small enough that documents lie over their borders."""
    monkeypatch.setattr(convert, "_CHUNK_TOKENS", 1000)
    monkeypatch.setattr(token_formats, "_CHUNK_TOKENS", 700)
    monkeypatch.setattr(token_formats, "_INDEX_DOCUMENTS", 3)
    monkeypatch.setattr(convert, "LLMC_FILE_TOKENS", 9000)
    monkeypatch.setattr(convert, "SHARD_TOKENS", 20_000)


# ---------------------------------------------------------------- both ways


@pytest.mark.parametrize("form", FORMATS)
def test_ids_and_documents_are_equal_both_ways(
    small: SmallCollection, tokenizer_folder: Path, tmp_path: Path, form: Format
) -> None:
    export_tokens(small.collection, form, tmp_path / "there")
    train, validation = (inputs_of(form, tmp_path / "there", split) for split in SPLITS)
    back = import_tokens(form, train, validation, tokenizer_folder, tmp_path / "back")
    for name in ("lines", "files"):
        for split in SPLITS:
            np.testing.assert_array_equal(flat(back, name, split), flat(small.collection, name, split))
            assert ends(back, name, split) == ends(small.collection, name, split)
        stored, made = small.collection.sources[name], back.sources[name]
        assert [made.splits[split].text_bytes for split in SPLITS] == [
            # the conftest's U+2581, three bytes, has become a space of one byte
            stored.splits[split].text_bytes - 2 * ("▁" in "".join(one.text for one in small.documents[name][split]))
            for split in SPLITS
        ]
        assert made.manifest["documents_read"] == sum(split.documents for split in stored.splits.values())
        assert made.manifest["options"]["converted_from"] == form
    assert len(back.sources["lines"].splits["train"].shards) > 1
    verify_collection(tmp_path / "back", full=True)
    export_tokens(back, form, tmp_path / "again")
    for path in sorted((tmp_path / "there").rglob("*.*")):
        other = tmp_path / "again" / path.relative_to(tmp_path / "there")
        assert path.name == "conversion.json" or path.read_bytes() == other.read_bytes(), path
    assert not list(tmp_path.glob(".*"))


def test_flat_files_hold_what_their_projects_read(small: SmallCollection, tmp_path: Path) -> None:
    """As nanoGPT's train.py and llm.c's dataloader take them: np.memmap of uint16; header, then tokens."""
    export_tokens(small.collection, "nanogpt", tmp_path / "n")
    export_tokens(small.collection, "llmc", tmp_path / "l")
    for name in ("lines", "files"):
        for split, short in (("train", "train"), ("validation", "val")):
            tokens = flat(small.collection, name, split)
            got = np.memmap(tmp_path / "n" / name / f"{short}.bin", np.uint16, "r")
            np.testing.assert_array_equal(got, tokens)
            parts = []
            for number, path in enumerate(sorted((tmp_path / "l").glob(f"{name}_{short}_*.bin"))):
                assert path.name == f"{name}_{short}_{number:06d}.bin"
                header = np.fromfile(path, np.int32, 256)
                assert header[:2].tolist() == [20240520, 1]
                assert not header[3:].any()
                parts.append(np.fromfile(path, np.uint16, offset=1024))
                assert len(parts[-1]) == header[2] <= 9000
            eos = small.collection.eos_id
            np.testing.assert_array_equal(np.concatenate(parts), [eos, *tokens[:-1]])
            assert len(parts) == -(-len(tokens) // 9000)
    record = json.loads((tmp_path / "l" / "conversion.json").read_text())
    assert record["content_sha256"] == small.collection.content_sha256
    assert set(record["files"]) == {path.name for path in (tmp_path / "l").glob("*.bin")}


def collection_of(folder: Path, documents: list[list[int]], vocab_size: int, eos_id: int) -> Collection:
    folder.mkdir()
    writer = ShardWriter(folder, "train-00000", vocab_size=vocab_size, eos_id=eos_id, fingerprint="5a" * 32)
    for ids in documents:
        writer.add(np.array(ids, np.int64), len(ids))
    splits = {"train": Split([writer.publish()]), "validation": Split([])}
    source = type("AnySource", (), {"splits": splits})()
    return Collection(folder, "5a" * 32, vocab_size, eos_id, "00" * 32, {"s": source})  # type: ignore[dict-item]


def test_the_bytes_written_by_hand(tmp_path: Path) -> None:
    narrow = collection_of(tmp_path / "narrow", [[5, 6], [], [7]], 65_499, 2)
    wide = collection_of(tmp_path / "wide", [[5, 70_000], [8]], 70_001, 2)
    export_tokens(narrow, "megatron", tmp_path / "m")
    assert (tmp_path / "m" / "s_train.bin").read_bytes() == struct.pack("<6H", 5, 6, 2, 2, 7, 2)
    assert (tmp_path / "m" / "s_train.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4) + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    )  # fmt: skip
    export_tokens(wide, "megatron", tmp_path / "w")
    assert (tmp_path / "w" / "s_train.bin").read_bytes() == struct.pack("<5i", 5, 70_000, 2, 8, 2)
    assert (tmp_path / "w" / "s_train.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3) + struct.pack("<2i", 3, 2)
        + struct.pack("<2q", 0, 12) + struct.pack("<3q", 0, 1, 2)
    )  # fmt: skip
    export_tokens(narrow, "nanogpt", tmp_path / "n")
    assert (tmp_path / "n" / "s" / "train.bin").read_bytes() == struct.pack("<6H", 5, 6, 2, 2, 7, 2)
    export_tokens(narrow, "llmc", tmp_path / "l")
    assert (tmp_path / "l" / "s_train_000000.bin").read_bytes() == (
        struct.pack("<256i", 20240520, 1, 6, *[0] * 253) + struct.pack("<6H", 2, 5, 6, 2, 2, 7)
    )
    export_tokens(wide, "llmc", tmp_path / "lw")
    assert (tmp_path / "lw" / "s_train_000000.bin").read_bytes() == (
        struct.pack("<256i", 20240801, 7, 5, *[0] * 253) + struct.pack("<5I", 2, 5, 70_000, 2, 8)
    )
    with pytest.raises(DataFormatError, match="70,001 ids; nanoGPT reads uint16"):
        export_tokens(wide, "nanogpt", tmp_path / "nw")
    assert not (tmp_path / "nw").exists()


# ---------------------------------------------------------------- Megatron itself

READ_BY_MEGATRON = """
import json, sys
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
found = {}
for prefix in json.loads(sys.argv[1]):
    data = IndexedDataset(prefix)
    indices = data.document_indices
    found[prefix] = [
        [row.tolist() for row in (data[place] for place in range(int(first), int(last)))]
        for first, last in zip(indices[:-1], indices[1:])
    ]
    assert len(data) == data.index.sequence_count
builder = IndexedDatasetBuilder(sys.argv[2] + ".bin", dtype=numpy.int32)
for sequences in json.loads(sys.argv[3]):
    builder.add_document([token for one in sequences for token in one], [len(one) for one in sequences])
builder.finalize(sys.argv[2] + ".idx")
print(json.dumps(found))
"""


def test_megatrons_own_code_reads_what_we_write_and_we_read_what_it_writes(
    small: SmallCollection, tokenizer_folder: Path, tmp_path: Path
) -> None:
    export_tokens(small.collection, "megatron", tmp_path / "m")
    eos = small.collection.eos_id
    theirs = [[[5, 6, eos]], [[7, 8], [9], [10, eos]], [[11, 12]], [[13, eos, 14]], [[eos]]]
    prefixes = [str(tmp_path / "m" / f"{name}_{split}") for name in ("lines", "files") for split in SPLITS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_BY_MEGATRON,
         json.dumps(prefixes), str(tmp_path / "theirs"), json.dumps(theirs)],
        capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for prefix in prefixes:
        name, _, split = Path(prefix).name.partition("_")
        tokens, borders = flat(small.collection, name, split).tolist(), [0, *ends(small.collection, name, split)]
        assert found[prefix] == [[tokens[low:high]] for low, high in itertools.pairwise(borders)]

    made = import_tokens("megatron", {"t": [tmp_path / "theirs"]}, {}, tokenizer_folder, tmp_path / "t")
    assert flat(made, "t", "train").tolist() == [
        5, 6, eos, 7, 8, 9, 10, eos, 11, 12, eos, 13, eos, 14, eos, eos,
    ]  # fmt: skip
    assert made.sources["t"].manifest["notes"] == {"eos_added": 2, "sequences_joined": 1, "split_at_eos": 1}
    assert made.sources["t"].splits["train"].documents == 6
    ledger = [json.loads(line) for line in (tmp_path / "t" / "t" / "ledger.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["reason"], one["detail"]) for one in ledger] == [
        ("notes", "eos_added", "2 documents"), ("notes", "sequences_joined", "1 documents"),
        ("notes", "split_at_eos", "1 documents"),
    ]  # fmt: skip


def test_offsets_beyond_2_to_the_31(tmp_path: Path) -> None:
    """A file of 20 GB with nothing in it: offsets would be negative in 32 bits."""
    lengths = np.full(5, 2_000_000_000)
    ends_of_documents = np.cumsum(lengths)
    idx_path, bin_path = tmp_path / "x.idx", tmp_path / "x.bin"
    with idx_path.open("wb") as file:
        write_megatron_index(file, 8, 5, lambda: iter([ends_of_documents[:2], ends_of_documents[2:]]), idx_path)
    raw = idx_path.read_bytes()
    assert np.frombuffer(raw, "<i8", 5, 34 + 20).tolist() == [0, 4 * 10**9, 8 * 10**9, 12 * 10**9, 16 * 10**9]
    with pytest.raises(DataFormatError, match="does not fit Megatron's int32"), (tmp_path / "y").open("wb") as file:
        write_megatron_index(file, 8, 1, lambda: iter([np.array([2**31])]), tmp_path / "y")
    # many sequences make one long document; the last one, behind 16 GB, is short and is read
    with bin_path.open("wb") as file:
        file.truncate(16 * 10**9)
        file.seek(16 * 10**9)
        file.write(struct.pack("<3H", 5, 6, 7))
    pointers = [0, 4 * 10**9, 8 * 10**9, 12 * 10**9, 16 * 10**9]
    idx_path.write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 3) + struct.pack("<5i", *[2 * 10**9] * 4, 3)
        + struct.pack("<5q", *pointers) + struct.pack("<3q", 0, 4, 5)
    )  # fmt: skip
    with pytest.raises(DataFormatError, match="a document of 8,000,000,000 tokens"):
        next(megatron_documents(bin_path, idx_path))


def test_a_document_behind_4_gb_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_formats, "MAX_DOCUMENT_TOKENS", 2**33)
    monkeypatch.setattr(token_formats, "_read_tokens", skip_zeros(token_formats._read_tokens))
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(3 * 2**31)
        file.seek(3 * 2**31)
        file.write(struct.pack("<3H", 5, 6, 7))
    (tmp_path / "x.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 3) + struct.pack("<4i", *[2**30] * 3, 3)
        + struct.pack("<4q", 0, 2**31, 2**32, 3 * 2**31) + struct.pack("<3q", 0, 3, 4)
    )  # fmt: skip
    (_, joined), (last, alone) = megatron_documents(tmp_path / "x.bin", tmp_path / "x.idx")
    assert (joined, last.tolist(), alone) == (3, [5, 6, 7], 1)


def skip_zeros(read: Callable) -> Callable:
    """Reading, but for the gigabytes of nothing in a sparse file, which are passed over."""

    def instead(file, path, kind, count):  # type: ignore[no-untyped-def]
        if count > 10**9:
            file.seek(count * np.dtype(kind).itemsize, os.SEEK_CUR)
            return np.empty(0, kind)
        return read(file, path, kind, count)

    return instead


# ---------------------------------------------------------------- in


def test_files_of_one_split_are_one_row_and_eos_may_stand_first_or_last(
    codec: Codec, tokenizer_folder: Path, tmp_path: Path
) -> None:
    eos = codec.eos_id

    def llmc(name: str, tokens: list[int]) -> Path:
        path = tmp_path / name
        path.write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + np.array(tokens, "<u2").tobytes())
        return path

    llmc("s_000.bin", [eos, 5, 6, eos])
    llmc("s_001.bin", [7, 8])
    llmc("s_002.bin", [9, eos, eos, 10])
    made = import_tokens("llmc", {"s": [tmp_path / "s_*.bin"]}, {}, tokenizer_folder, tmp_path / "first")
    assert flat(made, "s", "train").tolist() == [5, 6, eos, 7, 8, 9, eos, eos, 10, eos]
    assert made.sources["s"].manifest["notes"] == {}
    assert [one["items"] for one in made.sources["s"].manifest["provenance"]["files"]] == [1, 0, 3]
    made = import_tokens("llmc", {"s": [tmp_path / "s_*.bin"]}, {}, tokenizer_folder, tmp_path / "last", eos="last")
    assert flat(made, "s", "train").tolist() == [eos, 5, 6, eos, 7, 8, 9, eos, eos, 10, eos]
    assert made.sources["s"].manifest["notes"] == {"eos_added": 1}
    with pytest.raises(DataFormatError, match=rf"s_001.bin: begins with id 7, not with EOS {eos}: say --eos last"):
        import_tokens("llmc", {"s": [tmp_path / "s_001.bin"]}, {}, tokenizer_folder, tmp_path / "no")


def test_documents_are_held_out_as_prepare_does(small: SmallCollection, tokenizer_folder: Path, tmp_path: Path) -> None:
    export_tokens(small.collection, "nanogpt", tmp_path / "n")
    both = tmp_path / "both.bin"
    both.write_bytes(b"".join((tmp_path / "n" / "lines" / name).read_bytes() for name in ("train.bin", "val.bin")))
    made = import_tokens(
        "nanogpt", {"x": [both]}, {}, tokenizer_folder, tmp_path / "out", validation_fraction=0.2
    )  # fmt: skip
    codec = choose_codec(made)
    for split in SPLITS:
        stream = TokenStream(made.sources["x"].splits[split])
        texts = [codec.decode(stream.read(*stream.document(n))[:-1]) for n in range(stream.documents)]
        expected = [one.text.replace("▁", " ") for one in small.documents["lines"][split]]
        assert sorted(texts) == sorted(expected)
        assert {is_validation(text.encode(), 0.2) for text in texts} == {split == "validation"}


def test_there_is_no_text_to_tokenize_again(small: SmallCollection, tokenizer_folder: Path, tmp_path: Path) -> None:
    export_tokens(small.collection, "nanogpt", tmp_path / "n")
    train, _ = (inputs_of("nanogpt", tmp_path / "n", split) for split in SPLITS)
    made = import_tokens("nanogpt", train, {}, tokenizer_folder, tmp_path / "out")
    with pytest.raises(DataFormatError, match=r"converted from token files \(nanogpt\)"):
        verify_sample(made, choose_codec(made), 3)


def write_megatron(prefix: Path, **changes: object) -> None:
    facts = {
        "magic": b"MMIDIDX\x00\x00", "version": 1, "code": 8, "lengths": [2, 3], "pointers": [0, 4],
        "documents": [0, 1, 2], "tokens": [5, 2, 6, 7, 2], "tail": b"", **changes,
    }  # fmt: skip
    lengths, documents = facts["lengths"], facts["documents"]
    prefix.with_suffix(".idx").write_bytes(
        facts["magic"] + struct.pack("<QBQQ", facts["version"], facts["code"], len(lengths), len(documents))
        + np.array(lengths, "<i4").tobytes() + np.array(facts["pointers"], "<i8").tobytes()
        + np.array(documents, "<i8").tobytes() + facts["tail"]
    )  # fmt: skip
    prefix.with_suffix(".bin").write_bytes(np.array(facts["tokens"], "<u2").tobytes())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "not the index of a Megatron data set"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, "token type 7"),
        ({"tail": b"123"}, "bytes, but its header says"),
        ({"documents": [0, 2, 1]}, "do not follow each other"),
        ({"documents": [1, 2]}, "do not follow each other"),
        ({"documents": [0, 1]}, "the documents of its index end at 4"),
        ({"documents": [0, 1, 3]}, "do not follow each other"),
        ({"pointers": [0, 6]}, "do not stand in a row"),
        ({"lengths": [2, -3]}, "do not stand in a row"),
        ({"tokens": [5, 2, 6, 7]}, "end before a sequence"),
        ({"tokens": [5, 2, 6, 7, 2, 2]}, "the documents of its index end at 10"),
        ({"tokens": [5, 2, 6, 800, 2]}, "id 800"),
    ],
)
def test_a_damaged_megatron_set_is_one_line(tokenizer_folder: Path, tmp_path: Path, changes: dict, words: str) -> None:
    write_megatron(tmp_path / "good")
    good = import_tokens("megatron", {"x": [tmp_path / "good.bin"]}, {}, tokenizer_folder, tmp_path / "ok")
    assert good.sources["x"].splits["train"].documents == 2
    modes = tmp_path / "modes"
    write_megatron(modes, tail=b"\0\0")  # a multimodal set: one mode a sequence
    import_tokens("megatron", {"x": [modes.with_suffix(".idx")]}, {}, tokenizer_folder, tmp_path / "ok2")
    write_megatron(tmp_path / "bad", **changes)
    assert_refused({"x": [tmp_path / "bad"]}, "megatron", tokenizer_folder, tmp_path, words)


def assert_refused(train: dict, form: Format, tokenizer: Path, tmp_path: Path, words: str) -> None:
    with pytest.raises(DataFormatError) as caught:
        import_tokens(form, train, {}, tokenizer, tmp_path / "out")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "form, content, words",
    [
        ("nanogpt", b"", "0 bytes are no row"),
        ("nanogpt", b"\5\0\6", "3 bytes are no row"),
        ("nanogpt", struct.pack("<3H", 5, 6, 800), "document 0: id 800"),
        ("llmc", b"\0" * 1023, "too few for llm.c's header"),
        ("llmc", struct.pack("<256i", 20240522, 1, 1, *[0] * 253) + b"\2\0", "magic 20240522, version 1"),
        ("llmc", struct.pack("<256i", 20240520, 2, 1, *[0] * 253) + b"\2\0", "magic 20240520, version 2"),
        ("llmc", struct.pack("<256i", 20240520, 1, 2, *[0] * 253) + b"\2\0", "its header says 2 tokens"),
        ("llmc", struct.pack("<256i", 20240520, 1, 0, *[0] * 253), "its header says 0 tokens"),
        ("llmc", struct.pack("<256i", 20240801, 7, 1, *[0] * 253) + b"\2\0", "its header says 1 tokens, 1,028 bytes"),
    ],
)
def test_a_damaged_flat_file_is_one_line(
    tokenizer_folder: Path, tmp_path: Path, form: Format, content: bytes, words: str
) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    assert_refused({"x": [tmp_path / "x.bin"]}, form, tokenizer_folder, tmp_path, words)


@pytest.mark.parametrize("form", ["nanogpt", "llmc"])
def test_what_is_no_file_is_one_line(tokenizer_folder: Path, tmp_path: Path, form: Format) -> None:
    (tmp_path / "in" / "folder").mkdir(parents=True)
    for place in (tmp_path / "in", tmp_path / "in" / "*", Path(), Path("/dev/null")):
        assert_refused({"x": [place]}, form, tokenizer_folder, tmp_path, f"{place}: is no file")


def test_a_megatron_set_without_documents_is_one_line(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_megatron(tmp_path / "bad", lengths=[], pointers=[], documents=[0], tokens=[])
    assert_refused({"x": [tmp_path / "bad"]}, "megatron", tokenizer_folder, tmp_path, "'x' holds no document")
    for place in (Path(), Path("/")):
        assert_refused({"x": [place]}, "megatron", tokenizer_folder, tmp_path, f"{place}: is no file")


def test_a_row_without_eos_is_not_taken_into_memory(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_formats, "MAX_DOCUMENT_TOKENS", 5000)
    (tmp_path / "x.bin").write_bytes(np.full(6000, 5, "<u2").tobytes())
    assert_refused({"x": [tmp_path / "x.bin"]}, "nanogpt", tokenizer_folder, tmp_path, "no EOS (2) in more than 5,000")


# ---------------------------------------------------------------- whole or not at all


def test_what_exists_is_left_alone(small: SmallCollection, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="exists already"):
        export_tokens(small.collection, "nanogpt", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


SLOW_EXPORT = """
import sys, time
from pathlib import Path
from data_pipeline.convert import export_tokens
from data_pipeline.shards import open_collection

def hear(count):
    print("writing", flush=True)
    time.sleep(3600)

export_tokens(open_collection(sys.argv[1]), "nanogpt", Path(sys.argv[2]), on_bytes=hear)
"""


def test_a_killed_run_leaves_nothing_and_the_next_one_succeeds(small: SmallCollection, tmp_path: Path) -> None:
    """Killed while it writes; then a second one beside a living first one is refused, and later it is whole."""
    command = [sys.executable, "-c", SLOW_EXPORT, str(small.collection.path), str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    with pytest.raises(DataFormatError, match="another `convert` is writing there"):
        export_tokens(small.collection, "nanogpt", tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    export_tokens(small.collection, "nanogpt", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lines", "files", "conversion.json"}


def test_shards_of_one_split_may_be_of_one_file_or_many(small: SmallCollection) -> None:
    """The test above needs documents over the borders of files and chunks: are there?"""
    train = small.collection.sources["lines"].splits["train"]
    assert train.tokens > 3 * 9000
    assert max(np.diff(ends(small.collection, "lines", "train"))) > 1000
