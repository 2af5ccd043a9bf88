"""Plain text by file, block and line: each is one item, at its line, however the file is cut into ranges."""

import hashlib
import random
from pathlib import Path

import pytest

from data_pipeline.corpus import (
    Document,
    Dropped,
    TxtDocuments,
    count_lines,
    find_files,
    lines_before,
    plan_units,
    read_documents,
    read_piece,
)
from data_pipeline.readers import items as items_module

Item = Document | Dropped


def read(path: Path, mode: TxtDocuments) -> list[Item]:
    return list(read_documents(path, txt_documents=mode))


def texts_at(items: list[Item]) -> list[tuple[int, str]]:
    return [(item.position, item.text) for item in items if isinstance(item, Document)]


def drops_at(items: list[Item]) -> list[tuple[int, str]]:
    return [(item.position, item.reason) for item in items if isinstance(item, Dropped)]


def test_a_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\n  two\xe2\x80\xa8half \n \t\n\xff\nfour\rhalf")
    items = read(path, "line")
    assert texts_at(items) == [(1, "one"), (3, "  two\u2028half "), (6, "four\rhalf")]
    assert drops_at(items) == [(2, "blank_line"), (4, "blank_line"), (5, "invalid_utf8")]


def test_a_block_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\r\none\r\n  more\r\n \t\r\n\r\ntwo\n\n\xff\n\n\nthree\nhalf")
    items = read(path, "block")
    assert texts_at(items) == [(3, "one\r\n  more"), (7, "two"), (12, "three\nhalf")]
    assert drops_at(items) == [(9, "invalid_utf8")]


@pytest.mark.parametrize("content, position", [(b"", 0), (b"\n \r\n\n", 0)])
def test_a_file_without_a_block_is_one_drop(tmp_path: Path, content: bytes, position: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert drops_at(read(path, "block")) == [(position, "empty_file")]


def test_what_is_too_long_is_dropped_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "MAX_DOCUMENT_BYTES", 300_000)
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\n\n" + b"long line\n" * 40_000 + b"\n" + b"x" * 400_000 + b"\n\nlast")
    items = read(path, "block")
    assert texts_at(items) == [(1, "first"), (40_006, "last")]
    assert drops_at(items) == [(3, "too_long"), (40_004, "too_long")]
    items = read(path, "line")
    assert [drop for drop in drops_at(items) if drop[1] == "too_long"] == [(40_004, "too_long")]
    assert drops_at(read(path, "file")) == [(1, "too_long")]
    path.write_bytes(b"x" * 300_000)
    assert len(read(path, "file")) == len(read(path, "block")) == len(read(path, "line")) == 1
    assert not drops_at(read(path, "file") + read(path, "block") + read(path, "line"))


def reference(content: bytes, mode: TxtDocuments) -> list[tuple[int, bytes]]:
    """Lines or blocks with their line numbers, the slow and obvious way."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if content.endswith(b"\n"):
        lines.pop()
    blank = [not line.strip(b" \t\r") for line in lines]
    if mode == "line":
        return [(number, line) for number, line in enumerate(lines, 1)]
    starts = [n for n in range(len(lines)) if not blank[n] and (n == 0 or blank[n - 1])]
    ends = [n + 1 for n in range(len(lines)) if not blank[n] and (n + 1 == len(lines) or blank[n + 1])]
    return [(start + 1, b"\n".join(lines[start:end])) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("mode", ["line", "block"])
def test_ranges_of_any_size_hold_every_item_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: TxtDocuments
) -> None:
    """Every cut of every file: the same items as the whole, each at its line, and each byte heard once, in order."""
    rng = random.Random(mode)
    monkeypatch.setattr("data_pipeline.corpus.READ_BYTES", 7)  # lines and cuts across what is read at a time
    monkeypatch.setattr("data_pipeline.readers.lines.READ_BYTES", 5)
    parts = [b"word", "词".encode(), b"\n", b"\n", b"\n\n", b" ", b"\r\n", b" \t\n", b"a longer line of text", b"\xff"]
    for trial in range(120):
        content = b"\xef\xbb\xbf" * (trial % 5 == 0) + b"".join(rng.choices(parts, k=rng.randrange(1, 25)))
        path = tmp_path / "a.txt"
        path.write_bytes(content)
        files = find_files(path, txt_documents=mode).files
        wanted = [(position, raw.removesuffix(b"\r")) for position, raw in reference(content, mode)]
        for unit_bytes in {1, 2, rng.randrange(1, len(content) + 1), len(content)}:
            got: list[tuple[int, bytes]] = []
            digest, heard, lines = hashlib.sha256(), 0, 0

            def hear(count: int) -> None:
                nonlocal heard
                heard += count

            for (piece,) in plan_units(files, unit_bytes):
                assert lines_before(piece) == lines
                for item in read_piece(piece, on_bytes=hear, on_raw=digest.update):
                    if isinstance(item, Document):
                        got.append((item.position + lines, item.text.encode()))
                    elif item.position:
                        got.append(
                            (item.position + lines, next(raw for at, raw in wanted if at == item.position + lines))
                        )
                lines += count_lines(piece)
            assert (got, heard) == (wanted, len(content)), (content, unit_bytes)
            assert digest.digest() == hashlib.sha256(content).digest()


def test_only_lines_and_blocks_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 100)
    (tmp_path / "b.txt.gz").write_bytes(b"x" * 500)
    for mode, units in (("file", 2), ("line", 6), ("block", 6)):
        assert len(plan_units(find_files(tmp_path, txt_documents=mode).files, 100)) == units  # type: ignore[arg-type]
