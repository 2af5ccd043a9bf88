"""Rows of Parquet and Arrow files: nested and nullable columns, every kind of string, cuts, memory."""

import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from data_pipeline.corpus import CorpusError, Document, Dropped, read_documents
from data_pipeline.readers import parquet as parquet_module
from tests.data_pipeline.conftest import CHINESE

FORMATS = ["parquet", "stream", "file"]
STRINGS = [
    pyarrow.string(),
    pyarrow.large_string(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    pyarrow.string_view(),
]


def write(path: Path, form: str, table: pyarrow.Table, rows: int = 300) -> Path:
    """A table as Parquet, IPC stream or IPC file, in batches of so many rows; returns the path with its suffix."""
    path = path.with_suffix(".parquet" if form == "parquet" else ".arrow")
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=rows)
        return path
    new = ipc.new_stream if form == "stream" else ipc.new_file
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def read(path: Path, text_field: str = "text") -> list[Document | Dropped]:
    return list(read_documents(path, text_field=text_field))


def summary(items: list[Document | Dropped]) -> list[str]:
    """Each item's text, or its reason in brackets."""
    return [item.text if isinstance(item, Document) else f"<{item.reason}>" for item in items]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_every_kind_of_string_column(tmp_path: Path, form: str, kind: Any) -> None:
    rows = ["one", None, "", CHINESE, "\0", "tab\t\n"] * 150
    table = pyarrow.table({"n": list(range(900)), "body": pyarrow.array(rows, pyarrow.string()).cast(kind)})
    items = read(write(tmp_path / "a", form, table), "body")
    assert [item.position for item in items] == list(range(1, 901))
    assert summary(items) == [{None: "<null_text>", "": "<empty_text>"}.get(row, row) for row in rows]


@pytest.mark.parametrize("form", FORMATS)
def test_nested_and_nullable_columns(tmp_path: Path, form: str) -> None:
    rows = [{"b": "deep", "c": 1}, None, {"b": None, "c": 2}, {"b": "", "c": None}]
    table = pyarrow.table(
        {
            "a": rows,
            "n": [1, 2, None, 4],
            "list": [["x"], [], None, ["y"]],
            "far": [{"x": {"y": {"z": "end"}}}, {"x": {"y": None}}, {"x": None}, None],
            "a.c": ["literal", "dots", "win", None],
            "none": pyarrow.nulls(4),
        }
    )
    path = write(tmp_path / "a", form, table, rows=3)
    assert summary(read(path, "a.b")) == ["deep", "<null_text>", "<null_text>", "<empty_text>"]
    assert summary(read(path, "far.x.y.z")) == ["end", "<null_text>", "<null_text>", "<null_text>"]
    assert summary(read(path, "a.c")) == ["literal", "dots", "win", "<null_text>"]
    assert summary(read(path, "none")) == ["<null_text>"] * 4
    other, null, missing = "<non_string_text>", "<null_text>", "<missing_text>"
    assert summary(read(path, "n")) == [other, other, null, other]
    assert summary(read(path, "list")) == summary(read(path, "list.x")) == [other, other, null, other]
    assert summary(read(path, "a")) == [other, null, other, other]
    for absent in ("b", "a.d", "a.b.c.d.", "", ".", "a.", "far.x.z"):
        wanted = [other, null, null, other] if absent == "a.b.c.d." else [missing] * 4
        assert summary(read(path, absent)) == wanted, absent


def test_jsonl_nests_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"a": {"b": "deep"}}\n{"a": null}\n{"a": {"b": null}}\n{"a": {"b": ""}}\n{"a": {}}\n{"b": "x"}\n{"a": ["b"]}\n'
        '{"a": "b"}\n{"a.b": "literal", "a": {"b": "deep"}}\n{"a": {"b": {"c": "x"}}}\n{"a": {"b": "\\ud800"}}\n'
    )
    assert summary(read(path, "a.b")) == [
        "deep", "<null_text>", "<null_text>", "<empty_text>", "<missing_text>", "<missing_text>", "<non_string_text>",
        "<non_string_text>", "literal", "<non_string_text>", "<lone_surrogate>",
    ]  # fmt: skip
    path.write_text('{"a": {"b.c": "x"}}\n{"a.b": {"c": "y"}}\n{"a": {"b": {"c": "z"}}}\n')
    assert summary(read(path, "a.b.c")) == ["x", "<missing_text>", "z"]


@pytest.mark.parametrize("form", FORMATS)
def test_invalid_utf8_is_the_drop_of_its_row(tmp_path: Path, form: str) -> None:
    column = pyarrow.array([b"good", b"\xff", b"also good"]).view(pyarrow.string())
    assert summary(read(write(tmp_path / "a", form, pyarrow.table({"text": column})))) == [
        "good", "<invalid_utf8>", "also good",
    ]  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_slices_and_no_rows(tmp_path: Path, form: str) -> None:
    table = pyarrow.table({"text": [str(number) for number in range(100)]})
    assert summary(read(write(tmp_path / "a", form, table.slice(37, 20)))) == [str(n) for n in range(37, 57)]
    path = write(tmp_path / "a", form, table.slice(0, 0))
    assert read(path) == [Dropped(str(path), 0, "empty_file", "no rows")]
    path.write_bytes(b"")
    assert read(path) == [Dropped(str(path), 0, "empty_file")]


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_anywhere_is_noticed(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "a", form, pyarrow.table({"text": [CHINESE, "two", "three"]}), rows=1)
    whole = path.read_bytes()
    assert len(read(path)) == 3
    for length in [*range(1, len(whole) - 30, 9), *range(len(whole) - 30, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorpusError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole + b"something else")
    with pytest.raises(CorpusError):
        read(path)


def test_long_rows_are_decoded_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row group of 64 MB, read with less than 16 MB: 256 rows at once would be 32 MB."""
    monkeypatch.setattr(parquet_module, "_BATCH_BYTES", 1 << 20)
    rows = [f"{number:07d}" * 18_000 for number in range(512)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": rows}), path, write_batch_size=8, use_dictionary=False)
    expected = Counter(len(row) for row in rows)
    del rows
    before = pyarrow.total_allocated_bytes()
    lengths: Counter[int] = Counter()
    most = 0
    for item in read_documents(path):
        assert isinstance(item, Document)
        lengths[len(item.text)] += 1
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert lengths == expected
    assert most < 16_000_000


@pytest.mark.parametrize("offsets", [(0, 4, 100, 12), (0, 8, 4, 12), (0, -4, 8, 12), (0, 4, 8, 2**31 - 1)])
@pytest.mark.parametrize("form", ["stream", "file"])
def test_texts_that_lie_outside_of_their_data_are_damage(tmp_path: Path, form: str, offsets: tuple[int, ...]) -> None:
    path = write(tmp_path / "a", form, pyarrow.table({"text": ["aaaa", "bbbb", "cccc"]}))
    whole = path.read_bytes()
    good = struct.pack("<4i", 0, 4, 8, 12)
    assert whole.count(good) == 1
    path.write_bytes(whole.replace(good, struct.pack("<4i", *offsets)))
    with pytest.raises(CorpusError, match="damaged"):
        read(path)


@pytest.mark.parametrize("index", [2, -1, 127])
def test_an_index_outside_of_its_dictionary_is_damage(tmp_path: Path, index: int) -> None:
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 1, 0, 1, 1, 1, 0], pyarrow.int8()), ["a", "b"])
    path = write(tmp_path / "a", "stream", pyarrow.table({"text": column}))
    whole = path.read_bytes()
    good = bytes([0, 1, 1, 0, 1, 1, 1, 0])
    assert whole.count(good) == 1
    path.write_bytes(whole.replace(good, bytes([0, 1, 1, index % 256, 1, 1, 1, 0])))
    with pytest.raises(CorpusError, match="outside of a dictionary of 2"):
        read(path)


GROWTH = """
import re, sys
from pathlib import Path
from data_pipeline.corpus import read_documents
most = lambda: 1024 * int(re.search("VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
items = read_documents([Path(sys.argv[1]), Path(sys.argv[2])])
next(items)
before = most()
print(sum(1 for _ in items) + 1, most() - before)
"""


@pytest.mark.parametrize("form", FORMATS)
def test_one_large_group_of_rows_is_not_held_at_once(tmp_path: Path, form: str) -> None:
    """96 MB of text in one row group or batch, read by a process that grows by less than half of that; a first
    file of one row lets it load what it needs. Mapped pages count, so those of Arrow files must be given back."""
    text = bytes(range(97, 123)).decode() * 1000
    small = write(tmp_path / "a", form, pyarrow.table({"text": ["first"]}))
    table = pyarrow.table({"text": [f"{number} {text}" for number in range(3700)]})
    if form == "parquet":
        large = tmp_path / "b.parquet"
        parquet.write_table(table, large, compression="none", use_dictionary=False, write_batch_size=16)
    else:
        large = write(tmp_path / "b", form, table, rows=10**9)
    assert large.stat().st_size > 96_000_000
    command = [sys.executable, "-c", GROWTH, str(small), str(large)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    rows, growth = map(int, done.stdout.split())
    assert rows == 3701
    assert growth < 48_000_000


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_of_several_columns_that_is_there(tmp_path: Path, form: str) -> None:
    table = pyarrow.table({"content": ["c"], "b": [{"x": "deep"}], "p,q": ["comma"], "p": ["p"]})
    path = write(tmp_path / "a", form, table)
    for text_field, text in (("text,content", "c"), ("b.x,content", "deep"), ("p,q", "comma"), ("q,p", "p")):
        assert summary(read(path, text_field)) == [text]
    (missing,) = read(path, "text,body")
    assert isinstance(missing, Dropped)
    assert missing.reason == "missing_text"


def test_the_first_of_several_keys_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "c"}\n{"content": "c", "text": "t"}\n{"text": null, "content": "c"}\n{"body": "b"}\n')
    assert summary(read(path, "text,content")) == ["c", "t", "<null_text>", "<missing_text>"]
    path.write_text('{"text,content": "comma", "text": "t"}\n{"a": {"b": "deep"}, "content": 7}\n')
    assert summary(read(path, "text,content")) == ["comma", "<non_string_text>"]
    assert summary(read(path, "text,a.b")) == ["t", "deep"]
