"""Broken input of every kind: documents in = documents out + drops, or one CorpusError; never anything else.

Each test breaks good files at random, but always the same, places and compares what our readers give with what the
bytes hold by another reading of them: Python's own decompressors, `split`, and `json`.
"""

import bz2
import gzip
import json
import lzma
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import ipc, parquet

from data_pipeline.corpus import CorpusError, Document, Dropped, find_files, plan_units, read_documents, read_piece
from tests.data_pipeline.conftest import CHINESE, ODD_TEXTS

GOOD = [*ODD_TEXTS, CHINESE, "a" * 300, "plain words"]
PARTS = [
    b"\n", b"\n\n", b"\r\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xc2\x85", b"\xed\xa0\x80",
    b'"', b"{", b"}", b"\\", b"\\ud800", b"\\udc00\\ud800", b"NaN", b"null", b"[" * 2000, b'{"text":' * 300, b"{} {}",
    b",", b'{"text": 5}', b'{"text": null}', b'{"text": ["x"]}', b'{"text": "x"}', b'\n{"text": "one more"}\n',
    b" " * 50, b'{"text": ""}', b'{"text": "a", "text": "b"}', b'"text"', b"1e999", b"\x1f\x8b\x08", b"PAR1",
]  # fmt: skip
COMPRESS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "gz": (lambda raw: gzip.compress(raw, 1, mtime=0), gzip.decompress),
    "zst": (zstandard.ZstdCompressor(level=1, write_checksum=True).compress, lambda raw: _unzstd(raw)),
    "xz": (lambda raw: lzma.compress(raw, preset=0), lzma.decompress),
    "bz2": (lambda raw: bz2.compress(raw, 1), bz2.decompress),
}


def _unzstd(raw: bytes) -> bytes:
    parts = []
    while raw:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(raw))
        raw = frame.unused_data
    return b"".join(parts)


def broken(rng: random.Random, content: bytes, *, parts: bool = True) -> bytes:
    """Content with a few faults: something inserted, deleted, replaced, flipped, doubled or cut off."""
    raw = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(raw) + 1)
        match rng.randrange(6):
            case 0:
                raw[place:place] = rng.choice(PARTS) if parts else rng.randbytes(rng.randrange(1, 9))
            case 1:
                del raw[place : place + rng.randrange(20)]
            case 2:
                raw[place : place + 1] = rng.randbytes(1)
            case 3 if place < len(raw):
                raw[place] ^= 1 << rng.randrange(8)
            case 4 if rng.random() < 0.3:
                raw[place:place] = raw[rng.randrange(len(raw) + 1) :][: rng.randrange(400)]
            case 5 if rng.random() < 0.3:
                del raw[place:]
    return bytes(raw)


def content_of(item: Document | Dropped) -> str:
    """A text, or the reason why there is none."""
    return item.text if isinstance(item, Document) else item.reason


def lines_of(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def check(items: list[Document | Dropped], path: Path) -> None:
    """What holds of items of any file: they can be written down, and name their file."""
    for item in items:
        (item.text if isinstance(item, Document) else item.detail).encode("utf-8")
        assert item.path == str(path)
        assert not isinstance(item, Document) or item.text
        assert isinstance(item, Document) or "\n" not in item.detail


def test_lines_and_blocks(tmp_path: Path) -> None:
    """1,000 broken texts, each as jsonl, as lines and as blocks; as a whole, and cut into units."""
    rng = random.Random(1)
    plain = b"".join(json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5).encode() + b"\n" for text in GOOD)
    seeds = [plain, plain.replace(b"\n", b"\r\n"), "\n\n".join(GOOD).encode(), CHINESE.encode("utf-16"), b""]
    outcomes: Counter[str] = Counter()
    path, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    for trial in range(1000):
        content = broken(rng, seeds[trial % len(seeds)])
        path.write_bytes(content)
        text.write_bytes(content)
        items = list(read_documents(path))
        check(items, path)
        wanted = lines_of(content)
        if content:
            assert [item.position for item in items] == list(range(1, len(wanted) + 1))
            for item, line in zip(items, wanted, strict=True):
                if isinstance(item, Document):
                    bare = line.removeprefix(b"\xef\xbb\xbf") if item.position == 1 else line
                    assert json.loads(bare)["text"] == item.text
        outcomes.update("document" if isinstance(item, Document) else item.reason for item in items)
        again = list(read_documents(text, txt_documents="line"))
        check(again, text)
        assert len(again) == len(items)
        assert sum(len(item.text.encode()) for item in again if isinstance(item, Document)) <= len(content)
        blocks = list(read_documents(text, txt_documents="block"))
        check(blocks, text)
        starts = [number for number, line in enumerate(wanted, 1) if line.strip(b" \t\r")]
        assert {item.position for item in blocks if item.position} <= set(starts)
        unit = rng.randrange(1, len(content) + 2)
        for whole, mode in ((items, None), (again, "line"), (blocks, "block")):
            files = find_files(text if mode else path, txt_documents=mode or "file").files  # type: ignore[arg-type]
            parts = [item for pieces in plan_units(files, unit) for piece in pieces for item in read_piece(piece)]
            if [item.position for item in whole] != [0]:  # of blank lines alone only the whole file can say so
                assert list(map(content_of, parts)) == list(map(content_of, whole))
    assert set(outcomes) == {
        "document", "blank_line", "invalid_utf8", "nul_byte", "bad_json", "extra_data", "not_an_object", "missing_text",
        "null_text", "non_string_text", "lone_surrogate", "empty_text", "empty_file",
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(COMPRESS))
def test_compressed(tmp_path: Path, kind: str) -> None:
    """200 broken texts in good members; 400 broken files of members, a third of them cut: all or CorpusError."""
    rng = random.Random(kind)
    compress, decompress = COMPRESS[kind]
    plain = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in GOOD)
    path, bare = tmp_path / f"a.jsonl.{kind}", tmp_path / "a.jsonl"

    def read_both(raw: bytes, content: bytes) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        path.write_bytes(raw)
        bare.write_bytes(content)
        both = [list(read_documents(one)) for one in (path, bare)]
        ours, theirs = ([(item.position, content_of(item)) for item in items] for items in both)
        return ours, theirs

    for _ in range(200):
        content = broken(rng, plain) or b"\n"
        cuts = sorted(rng.randrange(len(content) + 1) for _ in range(rng.randrange(3)))
        members = [content[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        ours, theirs = read_both(b"".join(map(compress, members)), content)
        assert ours == theirs
    complaints: list[str] = []
    good = compress(plain[:900]) + compress(plain[900:])
    for trial in range(400):
        raw = good[: rng.randrange(len(good))] if trial % 3 == 0 else broken(rng, good, parts=False)
        try:
            path.write_bytes(raw)
            items = list(read_documents(path))
        except CorpusError as error:
            complaints.append(str(error))
            continue
        if raw:
            ours, theirs = read_both(raw, decompress(raw) or b"")
            assert ours == [pair for pair in theirs if pair[0]]
        check(items, path)
    assert len(complaints) > 250
    assert all(str(path) in complaint and "\n" not in complaint for complaint in complaints)


def tables() -> Iterator[tuple[str, bytes]]:
    """Small good files of rows, by suffix."""
    table = pyarrow.table(
        {
            "n": list(range(len(GOOD))),
            "text": [*GOOD[:-1], None],
            "a": [{"b": text} for text in GOOD],
        }
    )
    for options in ({}, {"compression": "none", "use_dictionary": False}, {"row_group_size": 3, "compression": "zstd"}):
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink, write_page_checksum=True, **options)
        yield "parquet", sink.getvalue().to_pybytes()
    for new in (ipc.new_stream, ipc.new_file):
        for kind in (pyarrow.string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
            sink = pyarrow.BufferOutputStream()
            cast = table.set_column(1, "text", table["text"].cast(kind))
            with new(sink, cast.schema) as writer:
                writer.write_table(cast, max_chunksize=4)
            yield "arrow", sink.getvalue().to_pybytes()


def test_rows(tmp_path: Path) -> None:
    """1,000 broken Parquet and Arrow files: as many items as rows, or CorpusError.

    Arrow files carry no checksums: a flipped bit of a text is another text, and may be no UTF-8.
    """
    rng = random.Random(2)
    seeds = list(tables())
    complaints: list[str] = []
    given = 0
    for trial in range(1000):
        suffix, good = seeds[trial % len(seeds)]
        raw = good[: rng.randrange(len(good))] if trial % 5 == 0 else broken(rng, good, parts=trial % 2 == 0)
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(raw)
        try:
            items = list(read_documents(path, text_field=rng.choice(["text", "a.b", "n", "absent"])))
        except CorpusError as error:
            complaints.append(str(error))
            continue
        check(items, path)
        if raw:
            given += 1
            assert [item.position for item in items] == list(range(1, len(items) + 1)) or len(items) == 1
    assert len(complaints) > 500
    assert all(str(tmp_path) in complaint and "\n" not in complaint for complaint in complaints)
    assert given > 20
