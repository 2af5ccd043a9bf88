"""Readers: every line, row or file is one document or one drop; a file that is cut is never taken for whole."""

import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data_pipeline.corpus import CorpusError, Document, Dropped, find_files, plan_units, read_documents, read_piece
from data_pipeline.readers import items as items_module
from tests.data_pipeline.conftest import CHINESE, ODD_TEXTS, real_texts


def read(*paths: Path, text_field: str = "text") -> list[Document | Dropped]:
    return list(read_documents(list(paths), text_field=text_field))


def texts_of(items: list[Document | Dropped]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


def drops_of(items: list[Document | Dropped]) -> list[tuple[int, str]]:
    return [(item.position, item.reason) for item in items if isinstance(item, Dropped)]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def compress(kind: str, *parts: bytes) -> bytes:
    """The parts as gzip members or zstd frames, one behind the other."""
    if kind == "gz":
        return b"".join(gzip.compress(part, mtime=0) for part in parts)
    return b"".join(zstandard.ZstdCompressor(write_checksum=True).compress(part) for part in parts)


# ---------------------------------------------------------------- lines


def test_lines_end_at_newline_and_nowhere_else(tmp_path: Path) -> None:
    odd = "one\u2028two\u2029three\x85four"
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([odd]) + b'{"text": "crlf"}\r\n{"text":\r"lone cr"}\n{"text": "no newline at the end"}')
    assert texts_of(read(path)) == [odd, "crlf", "lone cr", "no newline at the end"]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"", "blank_line"),
        (b" \t\r", "blank_line"),
        (b'{"text": "\xff"}', "invalid_utf8"),
        (b'{"text": "\xed\xa0\x80"}', "invalid_utf8"),
        (b'{"text": "a\0b"}', "nul_byte"),
        (b"\0\0\0\0", "nul_byte"),
        (b'{"text": "cut', "bad_json"),
        (b'{"text": "raw\ttab"}', "bad_json"),
        (b"plain words", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"text": "a"} {"text": "b"}', "extra_data"),
        (b'{"text": "a"}]', "extra_data"),
        (b'["text"]', "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"{}", "missing_text"),
        (b'{"Text": "a", "\xe6\x96\x87": 1}', "missing_text"),
        (b'{"text": null}', "null_text"),
        (b'{"text": 5}', "non_string_text"),
        (b'{"text": ["a"]}', "non_string_text"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
        (b'{"text": "\\udc00\\ud800"}', "lone_surrogate"),
        (b'{"text": ""}', "empty_text"),
    ],
)
def test_a_bad_line_is_one_counted_drop(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    items = read(path)
    assert texts_of(items) == ["before", "after"]
    assert drops_of(items) == [(2, reason)]
    assert isinstance(items[1], Dropped)
    assert items[1].path == str(path)
    items[1].detail.encode("utf-8")


@pytest.mark.parametrize(
    "line, text",
    [
        (b'\xef\xbb\xbf{"text": "BOM"}', "BOM"),
        (b'{"text": "NUL \\u0000 escaped"}', "NUL \0 escaped"),
        (b'{"score": NaN, "text": "NaN beside"}', "NaN beside"),
        (b'{"other": "\\ud800", "text": "half a character beside"}', "half a character beside"),
        (b'{"text": "\\ud83d\\ude00"}', "😀"),
        (b'{"text": "  kept as it is \\r\\n"}', "  kept as it is \r\n"),
        (b'{"text": "</s>"}', "</s>"),
        (b'{"id": 123456789012345678901234567890, "text": "long number beside"}', "long number beside"),
    ],
)
def test_an_odd_but_good_line_is_a_document(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n")
    assert read(path) == [Document(text, str(path), 1)]


def test_a_long_line_is_read_and_one_past_the_limit_is_dropped_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "词" * 3_000_000
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["first", word, "last"]))
    assert texts_of(read(path)) == ["first", word, "last"]
    monkeypatch.setattr(items_module, "MAX_DOCUMENT_BYTES", 5_000_000)
    items = read(path)
    assert texts_of(items) == ["first", "last"]
    assert drops_of(items) == [(2, "too_long")]


def test_txt_is_one_document_a_file(tmp_path: Path) -> None:
    contents = {
        "a.txt": (b"line\r\n\r\nline\n", ["line\r\n\r\nline\n"], []),
        "b.txt": (b"\xef\xbb\xbfBOM", ["BOM"], []),
        "c.txt": (b"", [], [(0, "empty_file")]),
        "d.txt": (b"\xef\xbb\xbf", [], [(1, "empty_text")]),
        "e.txt": ("十六".encode("utf-16"), [], [(1, "invalid_utf8")]),
        "f.txt": (b"NUL \0", ["NUL \0"], []),
    }
    for name, (content, texts, drops) in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert (texts_of(read(path)), drops_of(read(path))) == (texts, drops)


# ---------------------------------------------------------------- compressed


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_several_members_or_frames_are_one_file(tmp_path: Path, kind: str) -> None:
    texts = [*real_texts(5), *ODD_TEXTS, CHINESE]
    content = jsonl(texts)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compress(kind, content[:1000], b"", content[1000:1001], content[1001:]))
    assert texts_of(read(path)) == texts
    if kind == "gz":
        path.write_bytes(compress(kind, content) + bytes(512))
        assert texts_of(read(path)) == texts


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_cut_at_any_byte_is_noticed(tmp_path: Path, kind: str) -> None:
    content = jsonl([f"document {number} {CHINESE}" for number in range(40)])
    whole = compress(kind, content[:700], content[700:])
    boundary = len(compress(kind, content[:700]))
    path = tmp_path / f"a.jsonl.{kind}"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == boundary:
            read(path)
            continue
        with pytest.raises(CorpusError, match=r"cut short|damaged"):
            read(path)
    path.write_bytes(b"")
    assert drops_of(read(path)) == [(0, "empty_file")]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damage_and_strange_bytes_behind_the_end_are_noticed(tmp_path: Path, kind: str) -> None:
    """A byte in some thousands may be any: zstd gives the same text then, checksum and all."""
    texts = real_texts(3)
    whole = compress(kind, jsonl(texts))
    path = tmp_path / f"a.jsonl.{kind}"
    rng = random.Random(kind)
    strange = [whole + b"tail", b"no such thing", bytes(64)]
    damaged = [
        whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        for place in rng.sample(range(20, len(whole)), 20)
    ]
    complaints = []
    for content in strange + damaged:
        path.write_bytes(content)
        try:
            items = read(path)
        except CorpusError as error:
            complaints.append(str(error))
        else:
            assert content in damaged
            assert texts_of(items) == texts
            assert drops_of(items) == []
    assert len(complaints) >= 20
    assert all(str(path) in complaint and "\n" not in complaint for complaint in complaints)


# ---------------------------------------------------------------- parquet


def test_parquet_rows_of_every_kind_of_column(tmp_path: Path) -> None:
    rows = ["one", None, "", CHINESE, "\0"] * 200
    path = tmp_path / "a.parquet"
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        table = pyarrow.table({"n": list(range(1000)), "body": pyarrow.array(rows).cast(kind)})
        parquet.write_table(table, path, row_group_size=300)
        items = read(path, text_field="body")
        assert texts_of(items) == [row for row in rows if row]
        assert [item.position for item in items] == list(range(1, 1001))
        assert Counter(item.reason for item in items if isinstance(item, Dropped)) == {
            "null_text": 200,
            "empty_text": 200,
        }
    assert Counter(reason for _, reason in drops_of(read(path, text_field="n"))) == {"non_string_text": 1000}
    assert Counter(reason for _, reason in drops_of(read(path))) == {"missing_text": 1000}
    parquet.write_table(table.slice(0, 0), path)
    assert drops_of(read(path)) == [(0, "empty_file")]


def test_parquet_with_invalid_utf8_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pyarrow.array([b"good", b"\xff", b"also good"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad}), path)
    items = read(path)
    assert (texts_of(items), drops_of(items)) == (["good", "also good"], [(2, "invalid_utf8")])
    whole = path.read_bytes()
    for length in (1, 4, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorpusError) as caught:
            read(path)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- files and units


def test_files_come_in_one_order_once(tmp_path: Path) -> None:
    names = ["b/2.txt", "b/10.txt", "a.jsonl", "b/Z.txt", "b/.hidden.txt", ".git/x.txt", "notes.md", "b/c/UPPER.TXT"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    listing = find_files(tmp_path)
    assert [str(piece.path.relative_to(tmp_path)) for piece, _ in listing.files] == [
        "a.jsonl", "b/10.txt", "b/2.txt", "b/Z.txt", "b/c/UPPER.TXT",
    ]  # fmt: skip
    assert [Path(name).name for name in listing.ignored] == ["notes.md"]
    assert [piece.path.name for piece, _ in find_files([tmp_path / "b/2.txt", tmp_path, tmp_path / "b"]).files] == [
        "2.txt", "a.jsonl", "10.txt", "Z.txt", "UPPER.TXT",
    ]  # fmt: skip
    assert [piece.path.name for piece, _ in find_files(str(tmp_path / "**/*.txt")).files] == [
        "10.txt",
        "2.txt",
        "Z.txt",
    ]


def test_input_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.pdf").write_text("x")
    for path, words in (
        ("nothing.jsonl", "no such file"),
        ("*.jsonl", "matches no file"),
        ("empty", "no file of a known kind"),
        ("page.pdf", "unknown kind"),
    ):
        with pytest.raises(CorpusError, match=words) as caught:
            read_documents(tmp_path / path)
        assert "\n" not in str(caught.value)
    with pytest.raises(CorpusError, match="no input"):
        read_documents([])


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt"))
    path.write_text("text")
    (item,) = read(tmp_path)
    assert isinstance(item, Document)
    item.path.encode("utf-8")


def test_units_hold_every_line_once(tmp_path: Path) -> None:
    """Byte ranges of any size, over long lines, blank lines and a missing last newline, partition the lines."""
    rng = random.Random(0)
    for trial in range(60):
        texts = [rng.choice(["x", CHINESE, "long " * 300])[: rng.randrange(1, 1500)] for _ in range(rng.randrange(30))]
        content = b"".join(jsonl([text]) + b"\n" * rng.randrange(3) for text in texts)
        path = tmp_path / f"{trial}.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" * rng.randrange(2) + (content.rstrip(b"\n") if trial % 2 else content))
        whole = read(path)
        for unit_bytes in (1 if len(content) < 500 else 37, 1000, 10**9):
            units = plan_units(find_files(path).files, unit_bytes)
            heard = 0

            def hear(count: int) -> None:
                nonlocal heard
                heard += count

            parts = [list(read_piece(piece, on_bytes=hear)) for unit in units for piece in unit]
            assert [item.text if isinstance(item, Document) else item.reason for part in parts for item in part] == [
                item.text if isinstance(item, Document) else item.reason for item in whole
            ]
            for part in parts:
                first = 0 if heard == 0 else 1  # an empty file is its own drop, at no line
                assert [item.position for item in part] == list(range(first, first + len(part)))
            assert heard == path.stat().st_size


def test_units_follow_names_and_sizes_alone(tmp_path: Path) -> None:
    sizes = {"a.txt": 40, "b.txt": 40, "c.jsonl": 250, "d.jsonl.gz": 900, "e.txt": 10, "f.txt": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    units = plan_units(find_files(tmp_path).files, 100)
    shown = [[(piece.path.name, piece.start, piece.stop) for piece in unit] for unit in units]
    assert shown == [
        [("a.txt", 0, None), ("b.txt", 0, None)],
        [("c.jsonl", 0, 100)],
        [("c.jsonl", 100, 200)],
        [("c.jsonl", 200, 250)],
        [("d.jsonl.gz", 0, None)],
        [("e.txt", 0, None), ("f.txt", 0, None)],
    ]
    with pytest.raises(CorpusError):
        plan_units([], 0)


# ---------------------------------------------------------------- fuzz


def test_broken_input_of_any_kind_is_documents_drops_or_one_error(tmp_path: Path) -> None:
    """500 files broken at random places: lines in = items out, or CorpusError; never another exception."""
    rng = random.Random(1)
    plain = jsonl([*ODD_TEXTS, CHINESE, "a" * 300]) + b'{"score": NaN, "text": "\\ud83d\\ude00"}\n'
    table = pyarrow.table({"text": [*ODD_TEXTS, CHINESE]})
    parquet.write_table(table, tmp_path / "seed.parquet")
    seeds = {
        "jsonl": plain,
        "txt": (CHINESE + "".join(ODD_TEXTS)).encode(),
        "jsonl.gz": compress("gz", plain[:200], plain[200:]),
        "jsonl.zst": compress("zst", plain[:200], plain[200:]),
        "parquet": (tmp_path / "seed.parquet").read_bytes(),
    }
    pieces = [b"\n", b"\0", b"\xff", b'"', b"{", b"}", b"\\", b"\\ud800", b"\r", b"\xef\xbb\xbf", b"NaN", b"[" * 2000]
    outcomes: Counter[str] = Counter()
    complaints: list[tuple[str, str]] = []
    for trial in range(500):
        kind = list(seeds)[trial % len(seeds)]
        content = bytearray(seeds[kind])
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(content) + 1)
            match rng.randrange(4):
                case 0:
                    content[place:place] = rng.choice(pieces)
                case 1:
                    del content[place : place + rng.randrange(20)]
                case 2:
                    content[place : place + 1] = rng.randbytes(1)
                case 3 if trial % 3 == 0:
                    del content[place:]
        path = tmp_path / f"{trial}.{kind}"
        path.write_bytes(content)
        try:
            items = read(path)
        except CorpusError as error:
            complaints.append((str(path), str(error)))
            continue
        if kind == "jsonl" and content:
            assert len(items) == content.count(b"\n") + (not content.endswith(b"\n"))
            assert [item.position for item in items] == list(range(1, len(items) + 1))
        for item in items:
            (item.text if isinstance(item, Document) else item.detail).encode("utf-8")
            outcomes[type(item).__name__] += 1
    assert all(path in complaint and "\n" not in complaint for path, complaint in complaints)
    assert min(len(complaints), *outcomes.values()) > 50
