"""The process in which SentencePiece trains, started by training_process.py: so that its log can be followed, Ctrl-C
ends it, its memory is given back, and a system short of memory ends it and not the caller.

In by stdin: a line of JSON, then texts, each a length (4 bytes, little-endian) and UTF-8, then a length of 0. Out by
stdout: a line of JSON, then the model. The log goes to stderr. stdin stays open until the end: when the parent dies,
however it dies, stdin ends, and so does this process.

Imports nothing of ours, so that it starts as a script from any folder.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import sentencepiece


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the parent too, which decides
    with open(0, "rb", buffering=1 << 20, closefd=False) as source:
        order = json.loads(source.readline())
        model = io.BytesIO()
        answer: dict[str, object] = {}
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_sentences(source, split_lines=order["split_lines"]),
                model_writer=model,
                **order["options"],
            )
        except MemoryError:
            answer["out_of_memory"] = True
        except RuntimeError as error:
            answer["error"] = str(error)
    answer |= {"peak_bytes": _peak_bytes(), "model_bytes": len(model.getvalue())}
    sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n" + model.getvalue())
    sys.stdout.buffer.flush()


def _sentences(source: BinaryIO, *, split_lines: bool) -> Iterator[bytes]:
    while True:
        length = int.from_bytes(_read(source, 4), "little")
        if not length:
            break
        text = _read(source, length)
        if split_lines:
            yield from filter(None, text.split(b"\n"))
        else:
            yield text
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _read(source: BinaryIO, length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:  # the parent is gone; an exception would have to pass through SentencePiece first
        os._exit(1)
    return data


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing comes any more: this returns when the other end is closed
    os._exit(1)


def _peak_bytes() -> int:
    """The most memory this process ever held. Not by getrusage where it can be avoided: Linux counts the parent's
    memory at the moment of starting too.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
