"""`prepare`, beside the usual script and beside the bare encoder.

In one process: `prepare` with one worker, jsonl in and shards out, start and end included; what people write first
(json, SentencePieceProcessor, numpy, one file), on the first of --files; and `Codec.encode_documents` over the same
texts in memory, nothing read or written. Then `prepare` with two workers. All in turn on the same texts, several times;
medians; the ids must be the same. Encoders begin each measurement with empty caches, as they meet text in life.

Worker processes take a second to start, which a long run does not notice: so their speed, and that of the one worker
beside them, is that of the text which a run over all files has more than a run over two.

Without --corpus the project's sample stands for one: 4 MB are too few to measure, so lines of its documents are mixed
into new documents until there are enough. The words stay the same, so the encoders' caches serve more often than in a
real corpus: the bare encoder, which does nothing else, gains most. --corpus takes a folder of .jsonl files (also .gz,
.zst), such as corpus.py makes, and measures --files times --megabytes of it, or all it has.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data_pipeline.corpus import Document, read_documents
from data_pipeline.prepare import Options, prepare
from data_pipeline.shards import open_collection
from data_pipeline.stream import TokenStream
from tokenizer import codec as codec_module
from tokenizer.codec import MODEL_FILE, Codec
from tokenizer.train import train

SAMPLE = Path(__file__).resolve().parents[1] / "data_pipeline" / "sample_corpus"
TRAINING_BYTES = 8_000_000
SHORT = 2  # files in a short run


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--corpus", type=Path, help="folder of .jsonl files; without it the sample, mixed")
    parser.add_argument("--megabytes", type=float, default=16, help="text of a file, which is a unit (default 16)")
    parser.add_argument("--files", type=int, default=12, help="files, more than two (default 12)")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--workers", type=int, default=2)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures: rates in bytes of UTF-8 text per second, ratios of medians."""
    if options.files <= SHORT:
        sys.exit(f"error: --files {options.files}: take more than {SHORT}")
    bench = PrepareBench.make(folder, options)
    bench.assert_same_ids()
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repetitions):
        for name, run in bench.runs().items():
            start_afresh(folder)
            seconds.setdefault(name, []).append(seconds_of(run))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first, short, whole = (sum(bench.sizes[:count]) for count in (1, SHORT, len(bench.sizes)))
    rates = {
        "prepare": whole / medians["1 worker, all"],
        "usual_script": first / medians["usual script"],
        "bare_encoder": whole / medians["bare encoder"],
        "prepare_1_worker_steady": (whole - short) / (medians["1 worker, all"] - medians["1 worker, two files"]),
        "prepare_workers_steady": (whole - short) / (medians["workers, all"] - medians["workers, two files"]),
    }
    return {
        "corpus": options.corpus.name if options.corpus else "sample, mixed",
        "text_bytes": whole,
        "files": len(bench.sizes),
        "documents": len(bench.texts),
        "vocab_size": options.vocab_size,
        "encoder": Codec.load(folder / "tokenizer").encoder,
        "repetitions": options.repetitions,
        "workers": options.workers,
        "bytes_per_second": rates,
        "ratio_to_usual_script": rates["prepare"] / rates["usual_script"],
        "ratio_to_bare_encoder": rates["prepare"] / rates["bare_encoder"],
        "ratio_of_workers": rates["prepare_workers_steady"] / rates["prepare_1_worker_steady"],
        "seconds": seconds,
    }


@dataclass(frozen=True)
class PrepareBench:
    """The texts in memory and as jsonl files of `sizes` bytes of text, each a unit; and what is measured on them."""

    folder: Path
    texts: list[str]
    files: list[Path]
    sizes: list[int]
    workers: int

    @classmethod
    def make(cls, folder: Path, options: argparse.Namespace) -> PrepareBench:
        """SystemExit: the corpus is too small for so many files."""
        rng = random.Random(options.seed)
        texts = list(corpus_texts(options.corpus, rng, options.files * options.megabytes * 1e6))
        train(texts, folder / "tokenizer", vocab_size=options.vocab_size, sample_bytes=TRAINING_BYTES)
        files, sizes = [folder / "00.jsonl"], [0]
        whole = sum(len(text.encode()) for text in texts)
        for text in texts:
            if sizes[-1] >= whole / options.files:
                files.append(folder / f"{len(files):02d}.jsonl")
                sizes.append(0)
            with files[-1].open("a", encoding="utf-8") as file:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            sizes[-1] += len(text.encode())
        if len(files) <= SHORT:
            sys.exit(f"error: {len(texts)} documents are too few for {options.files} files")
        return cls(folder, texts, files, sizes, options.workers)

    def runs(self) -> dict[str, Callable[[], object]]:
        """Everything to be timed, by name."""
        return {
            "bare encoder": lambda: sum(1 for _ in Codec.load(self.folder / "tokenizer").encode_documents(self.texts)),
            "1 worker, all": lambda: self.prepare(len(self.files), 1),
            "usual script": self.usual_script,
            "1 worker, two files": lambda: self.prepare(SHORT, 1),
            "workers, all": lambda: self.prepare(len(self.files), self.workers),
            "workers, two files": lambda: self.prepare(SHORT, self.workers),
        }

    def prepare(self, files: int, workers: int, *, validation_fraction: float = 0.02) -> Path:
        out = self.folder / "out"
        unit_bytes = max(file.stat().st_size for file in self.files)  # so none is cut, and no two are joined
        options = Options(validation_fraction=validation_fraction, unit_bytes=unit_bytes)
        prepare({"corpus": self.files[:files]}, self.folder / "tokenizer", out, options, workers=workers)
        return out

    def usual_script(self) -> Path:
        """What a person writes first: a line, its ids and EOS, a growing list, one array, one file."""
        processor = sentencepiece.SentencePieceProcessor(model_file=str(self.folder / "tokenizer" / MODEL_FILE))
        tokens: list[int] = []
        with self.files[0].open(encoding="utf-8", newline="\n") as lines:
            for line in lines:
                tokens.extend(processor.encode(json.loads(line)["text"]))
                tokens.append(processor.eos_id())
        path = self.folder / "usual.bin"
        np.array(tokens, dtype=np.uint16 if processor.vocab_size() <= 2**16 else np.uint32).tofile(path)
        return path

    def assert_same_ids(self) -> None:
        """All ways give the same ids. Once, untimed, and without held-out documents: they would stand apart."""
        start_afresh(self.folder)
        out = self.prepare(len(self.files), 1, validation_fraction=0)
        stream = TokenStream(open_collection(out).sources["corpus"].splits["train"])
        ours = stream.read(0, stream.tokens)
        usual = np.fromfile(self.usual_script(), ours.dtype)
        codec = Codec.load(self.folder / "tokenizer")
        bare = [one for ids in codec.encode_documents(self.texts) for one in (ids, [codec.eos_id])]
        if not np.array_equal(ours[: len(usual)], usual) or not np.array_equal(ours, np.concatenate(bare)):
            sys.exit("error: the ids differ")


def start_afresh(folder: Path) -> None:
    """No output stands there, and the next encoder of this process has met no text yet. Removing the one, and loading
    the other with its self-test, are no part of a figure.
    """
    shutil.rmtree(folder / "out", ignore_errors=True)
    codec_module._encoders.cache_clear()
    Codec.load(folder / "tokenizer")


def corpus_texts(corpus: Path | None, rng: random.Random, size: float) -> Iterator[str]:
    """Documents of about `size` bytes together, in random order."""
    paths = sorted(path for path in (corpus or SAMPLE).iterdir() if ".jsonl" in path.name)
    if not paths:
        sys.exit(f"error: {corpus} has no .jsonl, .jsonl.gz or .jsonl.zst file")
    texts = [item.text for item in read_documents(paths) if isinstance(item, Document)]
    if corpus is None:
        texts = list(recombined(texts, rng, size))
    rng.shuffle(texts)
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text


def recombined(texts: list[str], rng: random.Random, size: float) -> Iterator[str]:
    """The documents, and then new ones, each line of them from one or the other of two documents."""
    lines = [text.splitlines(keepends=True) for text in texts]
    yield from texts
    size -= sum(len(text.encode()) for text in texts)
    while size > 0:
        pair = rng.sample(lines, 2)
        made = "".join(rng.choice(both) for both in zip(*pair, strict=False))
        size -= len(made.encode())
        yield made


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def to_text(report: dict[str, Any]) -> str:
    rates = {name: f"{rate / 1e6:,.1f} MB/s" for name, rate in report["bytes_per_second"].items()}
    workers = report["workers"]
    return "\n".join(
        [
            f"text                    {report['text_bytes'] / 1e6:,.1f} MB in {report['files']} files,"
            f" {report['documents']:,} documents, {report['corpus']}; vocabulary {report['vocab_size']:,}",
            f"repetitions             {report['repetitions']}, in turn; medians; the ids of all are the same",
            f"prepare, 1 worker       {rates['prepare']}",
            f"usual script            {rates['usual_script']}, so prepare is"
            f" {report['ratio_to_usual_script']:.1f} × as fast",
            f"bare encoder            {rates['bare_encoder']} ({report['encoder']}), so prepare has"
            f" {report['ratio_to_bare_encoder']:.2f} of its speed",
            f"steady, 1 worker        {rates['prepare_1_worker_steady']}",
            f"steady, {workers} workers       {rates['prepare_workers_steady']},"
            f" {report['ratio_of_workers']:.2f} × one",
        ]
    )
