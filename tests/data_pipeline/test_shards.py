"""Token files: the layout to the byte, what a writer refuses, what a stream reads, what a check finds."""

import errno
import hashlib
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import shards
from data_pipeline.shards import (
    CRC_BLOCK_BYTES,
    HEADER_BYTES,
    DataFormatError,
    ShardInfo,
    ShardWriter,
    Split,
    check_shard,
    read_header,
    read_index,
    token_width,
)
from data_pipeline.stream import TokenStream
from data_pipeline.verification import verify_shard

FINGERPRINT = "5a" * 32
EOS = 2


def write(folder: Path, documents: list[np.ndarray], *, vocab_size: int = 300, stem: str = "train-00000") -> ShardInfo:
    writer = ShardWriter(folder, stem, vocab_size=vocab_size, eos_id=EOS, fingerprint=FINGERPRINT)
    for ids in documents:
        writer.add(ids, text_bytes=3 * len(ids))
    return writer.publish()


def random_documents(rng: np.random.Generator, count: int, longest: int = 90) -> list[np.ndarray]:
    return [rng.integers(3, 300, rng.integers(0, longest)) for _ in range(count)]


def flat(documents: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[*ids, EOS] for ids in documents]).astype(np.int64)


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    info = write(tmp_path, [np.array([5, 299]), np.array([], np.int64), np.array([7])])
    raw, index = info.bin_path.read_bytes(), info.idx_path.read_bytes()
    fields = (1, 0x01020304, 4096, 2, 6, 3, 299, 300, EOS, bytes.fromhex(FINGERPRINT), 9, 1 << 24)
    for content, magic, crc in ((raw, b"ZHTOKENS", 0), (index, b"ZHTINDEX", zlib.crc32(index[4096:]))):
        assert content[:116] == magic + struct.pack("<IIIIQQQQQ32sQQI", *fields, crc)
        assert content[116:4092] == bytes(3976)
        assert content[4092:4096] == struct.pack("<I", zlib.crc32(content[:4092]))
    assert raw[4096:] == struct.pack("<6H", 5, 299, EOS, EOS, 7, EOS)
    assert index[4096:] == struct.pack("<3QI", 3, 4, 6, zlib.crc32(raw[4096:]))
    assert hashlib.sha256(raw).hexdigest() == info.bin_sha256
    assert hashlib.sha256(index).hexdigest() == info.idx_sha256
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_version_1_never_changes(tmp_path: Path) -> None:
    """These hashes were taken when version 1 was fixed; files in the world have this form."""
    info = write(tmp_path, [np.arange(3, 290), np.arange(50, 20, -1)])
    assert info.bin_sha256 == "feb6ab45ccb49fb6ae82e1b416a77be918f10e8d8d7b90430418f15969b99e06"
    assert info.idx_sha256 == "beec20b3cf6078c7281df624bdd68d1374d3432daab215a705abe7d45034f3ea"


@pytest.mark.parametrize("vocab_size, width", [(4, 2), (65_535, 2), (65_536, 2), (65_537, 4), (2**32, 4)])
def test_width_follows_the_largest_id_possible(tmp_path: Path, vocab_size: int, width: int) -> None:
    assert token_width(vocab_size) == width
    top = vocab_size - 1
    info = write(tmp_path, [np.array([3 if vocab_size > 4 else 1, top])], vocab_size=vocab_size)
    assert info.largest_id == top
    assert TokenStream(Split([info])).read(0, 3).tolist()[1:] == [top, EOS]


@pytest.mark.parametrize("ids", [[300], [-1], [2**16 + 5], [2**32 + 5], [5, EOS, 6], [[1, 3]], [1.5]])
def test_writer_refuses_ids_that_are_none(tmp_path: Path, ids: list) -> None:
    writer = ShardWriter(tmp_path, "train-00000", vocab_size=300, eos_id=EOS, fingerprint=FINGERPRINT)
    with pytest.raises(DataFormatError):
        writer.add(np.array(ids), 1)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_blocks_end_where_their_crcs_say(tmp_path: Path) -> None:
    """A shard of more than one CRC block, with a document over its edge; a flip is named by its block."""
    block = CRC_BLOCK_BYTES // 2
    documents = [np.full(block - 10, 7), np.full(50, 8), np.full(1000, 9)]
    info = write(tmp_path, documents)
    verify_shard(info, EOS)
    ends, crcs = read_index(info.idx_path)
    raw = info.bin_path.read_bytes()[HEADER_BYTES:]
    assert ends.tolist() == [block - 9, block + 42, block + 1043]
    assert crcs.tolist() == [zlib.crc32(raw[:CRC_BLOCK_BYTES]), zlib.crc32(raw[CRC_BLOCK_BYTES:])]
    stream = TokenStream(Split([info]))
    np.testing.assert_array_equal(stream.read(block - 20, block + 60), flat(documents)[block - 20 : block + 60])
    with info.bin_path.open("r+b") as file:
        file.seek(HEADER_BYTES + CRC_BLOCK_BYTES + 77)
        file.write(b"\xff")
    with pytest.raises(DataFormatError, match="token block 1 "):
        verify_shard(info, EOS)


@pytest.mark.parametrize("count", [1, 3, 100])
def test_stream_is_one_row_over_all_shards(tmp_path: Path, count: int) -> None:
    """Any range, over shard ends, with more shards than files kept open; document ends and numbers agree."""
    rng = np.random.default_rng(count)
    parts = [random_documents(rng, rng.integers(1, 6)) for _ in range(count)]
    infos = [write(tmp_path, part, stem=f"train-{number:05d}") for number, part in enumerate(parts)]
    documents = [ids for part in parts for ids in part]
    stream, whole = TokenStream(Split(infos)), flat(documents)
    ends = np.flatnonzero(whole == EOS) + 1
    assert (stream.tokens, stream.documents) == (len(whole), len(documents))
    assert stream.split.text_bytes == 3 * sum(map(len, documents))
    for _ in range(300):
        start, stop = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
        got = stream.read(start, stop)
        assert got.dtype == np.uint16
        np.testing.assert_array_equal(got, whole[start:stop])
        np.testing.assert_array_equal(stream.document_ends(start, stop), ends[(ends > start) & (ends <= stop)])
        stream.will_need(start, stop)
    for number, end in enumerate(ends.tolist()):
        start = int(ends[number - 1]) if number else 0
        assert stream.document(number) == (start, end)
        assert stream.document_at(start) == stream.document_at(end - 1) == number
    stream.close()
    np.testing.assert_array_equal(stream.read(0, len(whole)), whole)


@pytest.mark.parametrize("count", [1, 3, 100])
def test_reading_only_what_is_in_memory_gives_all_of_it_or_says_no(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    parts = [random_documents(rng, 3) for _ in range(count)]
    stream = TokenStream(Split([write(tmp_path, part, stem=f"train-{n:05d}") for n, part in enumerate(parts)]))
    whole = stream.read(0, stream.tokens)
    taken = 0
    for _ in range(300):
        start, stop = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
        row = np.full(stop - start, 7, np.uint16)
        if stream.try_read_into(start, row):
            taken += 1
        else:
            stream.read_into(start, row)
        np.testing.assert_array_equal(row, whole[start:stop])
    assert taken or count > 1 or not hasattr(os, "RWF_NOWAIT")
    with pytest.raises(ValueError, match="outside"):
        stream.try_read_into(len(whole) - 1, np.empty(2, np.uint16))


def test_what_is_cold_or_cut_is_not_taken_for_read(tmp_path: Path) -> None:
    tokens = np.arange(200_000, dtype=np.int64) % 50_000
    tokens[tokens == EOS] = 7
    info = write(tmp_path, [tokens], vocab_size=50_000)
    stream, row = TokenStream(Split([info])), np.empty(1000, np.uint16)
    if hasattr(os, "posix_fadvise"):
        with info.bin_path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not stream.try_read_into(150_000, row):  # a filesystem in memory has it always
        stream.read_into(150_000, row)
    np.testing.assert_array_equal(row, tokens[150_000:151_000])
    os.truncate(info.bin_path, HEADER_BYTES + 2 * 100_000)
    assert not stream.try_read_into(99_500, row)
    with pytest.raises(DataFormatError, match="cut since it was opened"):
        stream.read_into(99_500, row)


def test_a_filesystem_that_cannot_tell_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TokenStream(Split([write(tmp_path, [np.arange(3, 4000)], vocab_size=4000)]))
    calls = []

    def preadv(descriptor: int, buffers: list, offset: int, flags: int = 0) -> int:
        calls.append(flags)
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(descriptor, buffers, offset)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    row = np.empty(100, np.uint16)
    assert not stream.try_read_into(50, row)
    assert not stream.try_read_into(60, row)
    stream.read_into(60, row)
    np.testing.assert_array_equal(row, np.arange(63, 163))
    assert [flag for flag in calls if flag] == ([os.RWF_NOWAIT] if hasattr(os, "RWF_NOWAIT") else [])


def test_stream_refuses_what_is_outside(tmp_path: Path) -> None:
    stream = TokenStream(Split([write(tmp_path, [np.arange(3, 13)])]))
    for start, stop in ((-1, 3), (0, 12), (5, 4)):
        with pytest.raises(ValueError, match="outside"):
            stream.read(start, stop)
    for number in (-1, 1):
        with pytest.raises(ValueError, match="does not exist"):
            stream.document(number)
    for position in (-1, 11):
        with pytest.raises(ValueError, match="does not exist"):
            stream.document_at(position)
    empty = TokenStream(Split([]))
    assert empty.tokens == 0
    assert empty.read(0, 0).tolist() == []


def test_a_shard_cut_under_an_open_stream_is_an_error(tmp_path: Path) -> None:
    info = write(tmp_path, [np.arange(3, 200)])
    stream = TokenStream(Split([info]))
    stream.read(0, 10)
    with info.bin_path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 50)
    with pytest.raises(DataFormatError, match="cut since it was opened"):
        stream.read(0, 100)


def test_header_faults_have_one_line_each(tmp_path: Path) -> None:
    info = write(tmp_path, [np.arange(3, 200)])
    good = info.bin_path.read_bytes()

    def resealed(offset: int, content: bytes) -> bytes:
        head = bytearray(good[: HEADER_BYTES - 4])
        head[offset : offset + len(content)] = content
        return bytes(head) + struct.pack("<I", zlib.crc32(head)) + good[HEADER_BYTES:]

    faults = {
        "too few": good[:4095],
        "not a .bin": b"PK" + good[2:],
        "CRC32": good[:30] + b"\x01" + good[31:],
        "version 2": resealed(8, struct.pack("<I", 2)),
        "bytes a token": resealed(20, struct.pack("<I", 4)),
        "cut or appended": good[:-1],
        "appended": good + b"\0",
    }
    for fault, content in faults.items():
        info.bin_path.write_bytes(content)
        with pytest.raises(DataFormatError, match=fault) as caught:
            read_header(info.bin_path, "bin")
        assert "\n" not in str(caught.value)
    info.bin_path.unlink()
    with pytest.raises(DataFormatError, match="missing"):
        read_header(info.bin_path, "bin")


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    info = write(tmp_path, [np.arange(3, 20)])
    check_shard(info, FINGERPRINT, 300, EOS)
    for other in (("00" * 32, 300, EOS), (FINGERPRINT, 301, EOS), (FINGERPRINT, 300, 1)):
        with pytest.raises(DataFormatError):
            check_shard(info, *other)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    info = write(tmp_path, random_documents(np.random.default_rng(0), 30))
    rng = random.Random(0)
    for path in (info.bin_path, info.idx_path):
        good = path.read_bytes()
        for _ in range(60):
            place = rng.randrange(len(good))
            path.write_bytes(good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :])
            with pytest.raises(DataFormatError, match=path.name):
                verify_shard(info, EOS)
        path.write_bytes(good)
    verify_shard(info, EOS)


def test_lies_with_right_checksums_are_found(tmp_path: Path) -> None:
    """A writer with a fault, not a disk: EOS inside a document, ends that do not ascend, a wrong largest id."""
    info = write(tmp_path, [np.array([5, 6, 7]), np.array([8])])
    good = {path: path.read_bytes() for path in (info.bin_path, info.idx_path)}

    def forge(tokens: list[int], ends: list[int]) -> ShardInfo:
        data = np.array(tokens, "<u2").tobytes()
        payload = np.array(ends, "<u8").tobytes() + struct.pack("<I", zlib.crc32(data))
        head = read_header(info.idx_path, "idx")
        sealed = shards.Header(**{**vars(head), "payload_crc": zlib.crc32(payload)})
        info.bin_path.write_bytes(good[info.bin_path][:HEADER_BYTES] + data)
        info.idx_path.write_bytes(sealed.to_bytes() + payload)
        hashes = {
            f"{kind}_sha256": hashlib.sha256((tmp_path / f"train-00000.{kind}").read_bytes()).hexdigest()
            for kind in ("bin", "idx")
        }
        return ShardInfo(**{**vars(info), **hashes})

    verify_shard(forge([5, 6, 7, EOS, 8, EOS], [4, 6]), EOS)
    for tokens, ends, fault in (
        ([5, EOS, 7, EOS, 8, EOS], [4, 6], "EOS"),
        ([5, 6, EOS, 7, 8, EOS], [4, 6], "EOS"),
        ([5, 6, 7, EOS, 8, EOS], [6, 6], "ascend"),
        ([5, 6, 7, EOS, 8, EOS], [4, 5], "ascend"),
        ([5, 6, 7, EOS, 4, EOS], [4, 6], "largest"),
    ):
        with pytest.raises(DataFormatError, match=fault):
            verify_shard(forge(tokens, ends), EOS)
