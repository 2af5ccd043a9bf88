"""Decompression that gives bounded parts and ends only at a verified end: gzip, zstd, xz, bzip2.

A file may hold several members, frames or streams, one behind the other. Data that is cut short, damaged or followed
by something else raises CorpusError, possibly after much of it was given.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from data_pipeline.readers.items import CorpusError

MAX_MEMORY_BYTES = 512 * 1024 * 1024  # what a window or dictionary may take
_PART_BYTES = 1 << 20


class _Method(NamedTuple):
    """How to unpack: `fed_bytes` at a time, so that what comes out at once is bounded; `padding` may follow."""

    start: Callable[[], Any]
    fault: type[Exception]
    fed_bytes: int
    padding: bytes


def _zstd_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=MAX_MEMORY_BYTES).decompressobj()


def _method(compression: str) -> _Method:
    match compression:
        case "gz":  # inflates 1032-fold at most
            return _Method(lambda: zlib.decompressobj(wbits=31), zlib.error, 1 << 14, b"\0")
        case "zst":  # four bytes can stand for 128 KiB
            import zstandard

            return _Method(_zstd_frame, zstandard.ZstdError, 1 << 11, b"")
        case "xz":
            return _Method(
                lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_MEMORY_BYTES), lzma.LZMAError, 1 << 16, b"\0"
            )
        case "bz2":
            return _Method(bz2.BZ2Decompressor, OSError, 1 << 16, b"")
    raise AssertionError(compression)


def inflate(chunks: Iterable[bytes], compression: str, shown: str) -> Iterator[bytes]:
    """What all members of a compressed file hold; CorpusError unless the last one reached its verified end."""
    method = _method(compression)
    members, member = 0, None
    for chunk in chunks:
        for start in range(0, len(chunk), method.fed_bytes):
            data = chunk[start : start + method.fed_bytes]
            while data:
                if member is None:
                    if members and not (data := data.lstrip(method.padding)):
                        break
                    members, member = members + 1, method.start()
                try:
                    yield from _parts(member, data)
                except method.fault as error:
                    raise CorpusError(f"{shown}: {_complaint(str(error))}") from None
                data = member.unused_data
                if member.eof:
                    member = None
    if member is not None:
        raise CorpusError(f"{shown}: the compressed data is cut short; fetch the file again")


def _parts(member: Any, data: bytes) -> Iterator[bytes]:
    """What a decompressor makes of some input, in parts where it can be asked for less than all."""
    if not hasattr(member, "needs_input"):  # gzip and zstd
        yield member.decompress(data)
        return
    yield member.decompress(data, _PART_BYTES)
    while not (member.eof or member.needs_input):
        yield member.decompress(b"", _PART_BYTES)


def _complaint(error: str) -> str:
    if "emory" in error:
        return (
            f"unpacking takes more than {MAX_MEMORY_BYTES >> 20} MiB ({error});"
            " compress it with a smaller window, or unpack it with its own program and pipe it in"
        )
    return f"the compressed data is damaged ({error}); fetch the file again"
