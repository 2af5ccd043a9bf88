"""Compressed files: what several members hold, and nothing of one that is cut, damaged or followed by something."""

import bz2
import gzip
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from data_pipeline.corpus import CorpusError, Document, Dropped, read_documents
from data_pipeline.readers import compression
from tests.data_pipeline.conftest import CHINESE

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}
KINDS = list(COMPRESS)


def read(path: Path) -> list[Document | Dropped]:
    return list(read_documents(path, txt_documents="line"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "ndjson"])
def test_each_format_is_read_compressed(tmp_path: Path, kind: str, suffix: str) -> None:
    texts = [f"{number} {CHINESE}" for number in range(50)]
    lines = texts if suffix == "txt" else [f'{{"text": "{text}"}}' for text in texts]
    content = "".join(line + "\n" for line in lines).encode()
    path = tmp_path / f"a.{suffix}.{kind}"
    path.write_bytes(COMPRESS[kind](content))
    assert read(path) == [Document(text, str(path), position) for position, text in enumerate(texts, 1)]
    path.write_bytes(b"".join(map(COMPRESS[kind], (content[:1000], b"", content[1000:1001], content[1001:]))))
    assert read(path) == [Document(text, str(path), position) for position, text in enumerate(texts, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_of_text_is_read_compressed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(COMPRESS[kind](CHINESE.encode()) * 3)
    assert list(read_documents(path)) == [Document(CHINESE * 3, str(path), 1)]
    path.write_bytes(b"")
    assert list(read_documents(path)) == [Dropped(str(path), 0, "empty_file")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_at_any_byte_is_noticed(tmp_path: Path, kind: str) -> None:
    first, second = COMPRESS[kind]((CHINESE + "\n").encode() * 9), COMPRESS[kind](b"second member\n")
    whole = first + second
    path = tmp_path / f"a.txt.{kind}"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == len(first):
            assert len(read(path)) == 9
            continue
        with pytest.raises(CorpusError, match=r"cut short|damaged"):
            read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_strange_bytes_behind_the_end_are_noticed(tmp_path: Path, kind: str) -> None:
    whole = COMPRESS[kind](b"line\n")
    path = tmp_path / f"a.txt.{kind}"
    for content in (whole + b"tail", b"no such thing", bytes(64), whole + whole[:1]):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"cut short|damaged") as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Some bits of a header or a table say nothing; all others are under a checksum."""
    path = tmp_path / f"a.txt.{kind}"
    whole = COMPRESS[kind]("".join(f"{number} {CHINESE}\n" for number in range(99)).encode())
    path.write_bytes(whole)
    good = read(path)
    rng = random.Random(kind)
    noticed = 0
    for place in rng.sample(range(len(whole)), 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :])
        try:
            assert read(path) == good
        except CorpusError:
            noticed += 1
    assert noticed > 120


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_zeros_behind_the_end_are_padding(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(COMPRESS[kind](b"one\n") + bytes(512) + COMPRESS[kind](b"two\n") + bytes(4))
    assert [item.text for item in read(path) if isinstance(item, Document)] == ["one", "two"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_file_of_many_bytes_comes_in_small_parts(kind: str) -> None:
    """50 MB of one letter, in less than 60 kB: no part that is held at once is large."""
    small = COMPRESS[kind](b"a" * 10_000_000) * 5
    largest = total = 0
    for part in compression.inflate([small], kind, "x"):
        largest, total = max(largest, len(part)), total + len(part)
    assert total == 50_000_000
    assert largest <= 20_000_000
    if kind in ("xz", "bz2"):
        assert largest <= 1 << 20


def test_a_dictionary_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MAX_MEMORY_BYTES", 1 << 20)
    data = bytes(1 << 22)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 22}]
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=22)
    for kind, raw in (
        ("xz", lzma.compress(data, filters=filters)),
        ("zst", zstandard.ZstdCompressor(compression_params=window).compressobj().compress(data)),
    ):
        path = tmp_path / f"a.txt.{kind}"
        path.write_bytes(raw)
        with pytest.raises(CorpusError, match=r"takes more than 1 MiB .* pipe it in"):
            read(path)
