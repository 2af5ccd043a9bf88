"""Input at addresses: files, folders and patterns of fsspec's filesystems read as those of this machine are."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from data_pipeline.corpus import (
    CorpusError,
    Document,
    Dropped,
    FileFacts,
    file_kind,
    find_files,
    plan_units,
    read_documents,
    read_piece,
    recorded_piece,
    shown,
)

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(200))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files of several kinds."""
    (tmp_path / "b" / ".git").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b" / "10.txt").write_text("ten")
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "b" / "empty.txt").touch()
    (tmp_path / "b" / ".hidden.txt").write_text("x")
    (tmp_path / "b" / ".git" / "x.txt").write_text("x")
    (tmp_path / "notes.md").write_text("x")
    parquet.write_table(pyarrow.table({"text": ["row"]}), tmp_path / "c.parquet")
    return tmp_path


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    """The same folder in memory; gives its address."""
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{folder}/", "/corpus/", recursive=True)
    yield "memory://corpus"
    filesystem.rm("/corpus", recursive=True)


@pytest.fixture
def web(folder: Path) -> Iterator[str]:
    """The same folder behind a web server; gives its address. It refuses ranges, as many do."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def contents(items: Iterator[Document | Dropped], base: str) -> list[tuple[str, int, str]]:
    return [
        (
            item.path.removeprefix(base).lstrip("/"),
            item.position,
            getattr(item, "text", "") or getattr(item, "reason", ""),
        )
        for item in items
    ]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_an_address_reads_as_the_folder_does(folder: Path, memory: str, scheme: str) -> None:
    base, listed = (memory, "memory:///corpus") if scheme == "memory" else (f"file://{folder}", f"file://{folder}")
    for below, local in (("", folder), ("/a.jsonl", folder / "a.jsonl"), ("/b/*.txt", f"{folder}/b/*.txt")):
        wanted = contents(read_documents(local), str(folder))
        assert contents(read_documents(base + below), base if below == "/a.jsonl" else listed) == wanted
        assert wanted
    listing = find_files(base)
    assert [name.rpartition("/")[2] for name in listing.ignored] == ["notes.md"]
    assert len(find_files([base, f"{listed}/b/2.txt"]).files) == len(listing.files)  # named twice, read once


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_ranges_of_a_remote_file(folder: Path, memory: str, scheme: str) -> None:
    base = memory if scheme == "memory" else f"file://{folder}"
    digest, texts = hashlib.sha256(), []
    units = plan_units(find_files(f"{base}/a.jsonl").files, 1000)
    assert len(units) > 3
    for (piece,) in units:
        texts += [item.text for item in read_piece(piece, on_raw=digest.update) if isinstance(item, Document)]
    assert texts == [f"line {number}" for number in range(200)]
    assert digest.hexdigest() == hashlib.sha256(LINES).hexdigest()


def test_facts_change_with_the_file(memory: str, folder: Path) -> None:
    for address in (f"{memory}/a.jsonl", f"file://{folder}/a.jsonl"):
        piece, facts = find_files(address).files[0]
        assert FileFacts.of(piece) == facts
        assert facts.size == len(LINES)
        assert facts.tag
        with fsspec.open(address, "wb") as file:
            file.write(LINES)
        assert FileFacts.of(piece) != facts
    fsspec.filesystem("memory").rm("/corpus/a.jsonl")
    with pytest.raises(CorpusError, match="no such file"):
        FileFacts.of(find_files(f"{memory}/b/2.txt").files[0][0]) and list(read_documents(f"{memory}/a.jsonl"))


def test_the_web(web: str) -> None:
    assert len(list(read_documents([f"{web}/a.jsonl", f"{web}/c.parquet?token=secret"]))) == 201
    ((_, facts),) = find_files(f"{web}/a.jsonl").files
    assert (facts.size, facts.path) == (len(LINES), f"{web}/a.jsonl")
    assert facts.tag is not None
    for call in (f"{web}/none.jsonl?token=secret", f"{web}/notes.md", "http://127.0.0.1:1/a.jsonl"):
        with pytest.raises(CorpusError) as caught:
            list(read_documents(call))
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_is_not_there_is_one_clear_line(memory: str) -> None:
    fsspec.filesystem("memory").mkdir("/corpus/nothing")
    for address, words in (
        (f"{memory}/none.txt", "no such file"),
        (f"{memory}/none", "no such file"),
        (f"{memory}/*.jsonl.xz", "matches no file"),
        (f"{memory}/nothing", "no file of a known kind"),
        (f"{memory}/notes.md", "unknown kind"),
        ("nosuchscheme://a/b.txt", "Protocol not known"),
        ("s3://bucket/a.txt", "s3fs"),
        ("zip://a.txt::memory://a.zip", "within addresses"),
        ("-", "cannot be read here"),
    ):
        with pytest.raises(CorpusError, match=words) as caught:
            list(read_documents(address))
        assert "\n" not in str(caught.value)


def test_no_record_holds_a_password() -> None:
    assert shown("https://user:word@host/a.jsonl?key=1") == "https://host/a.jsonl"
    assert shown("s3://bucket/a@b.jsonl") == "s3://bucket/a@b.jsonl"
    assert shown("a?b@c.txt") == "a?b@c.txt"
    assert file_kind("https://host/a.JSONL.gz?x=.txt") == "jsonl.gz"
    assert recorded_piece("s3://bucket/a.txt", 0, None) is not None
    assert recorded_piece("<stdin>.jsonl", 0, None) is None


def test_facts_of_now_are_not_those_of_a_listing_before(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filesystems remember what a folder held; before a file is compared with what it was, they must forget."""
    (piece, _) = find_files(f"{memory}/a.jsonl").files[0]
    forgotten: list[bool] = []
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "invalidate_cache", lambda self: forgotten.append(True))
    FileFacts.of(piece, listed=True)
    assert not forgotten
    FileFacts.of(piece)
    assert forgotten
