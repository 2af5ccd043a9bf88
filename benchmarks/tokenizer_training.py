"""What training a tokenizer costs, as ratios to SentencePiece called plainly on the same text.

Three ways, each in a fresh process, in turn:

    ours              `tokenizer.train` from documents: draws the sample, counts its characters, trains in a process of
                      its own, tests and measures the tokenizer, writes the folder
    plain             SentencePieceTrainer.train alone, in the process that holds the text: the same options and the
                      sample that ours drew, ready made. The model must be the same
    plain, lines      the same, but every line a sentence, as most people call it

Time: from the first text to the last byte, imports not counted; CPU time: of the whole process and its children, which
says more where others use the machine too. Medians. Memory: the most that the process and its
children held at once, seen fifty times a second.

    python benchmarks/tokenizer_training.py                                  # the sample corpus, small sizes
    python benchmarks/tokenizer_training.py --corpus data/corpus --megabytes 5 20 100 --vocab-size 32000
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from data_pipeline.corpus import Document, read_documents
from tokenizer.model_file import ModelFile
from tokenizer.sample import Sample
from tokenizer.train import UNIGRAM_THREADS, train

SAMPLE = Path(__file__).resolve().parents[1] / "data_pipeline" / "sample_corpus"
WAYS = ("ours", "plain", "plain, lines")
LOOK_EVERY_SECONDS = 0.02


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=SAMPLE, help="folder of texts; its train/ where it has one")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4], help="sizes of the text")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="for BPE; unigram always takes 8")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report = {
        "corpus": options.corpus.name,
        "vocab_size": options.vocab_size,
        "model_type": options.model_type,
        "threads": UNIGRAM_THREADS if options.model_type == "unigram" else options.threads,
        "repetitions": options.repetitions,
        "sizes": [measure(options, int(megabytes * 1e6)) for megabytes in options.megabytes],
        "cpus": os.cpu_count(),
        "sentencepiece": sentencepiece.__version__,
    }
    print(json.dumps(report, indent=2) if options.json else to_text(report))


def measure(options: argparse.Namespace, text_bytes: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, list[int]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repeated = write_texts(options.corpus, text_bytes, folder)
        order = {"vocab_size": options.vocab_size, "model_type": options.model_type, "threads": options.threads}
        for _ in range(options.repetitions):
            for way in WAYS:
                took, took_cpu, peak = run(way, folder, order)
                seconds[way].append(took)
                cpu_seconds[way].append(took_cpu)
                peaks[way].append(peak)
        ours, plain = (ModelFile.parse((folder / f"{way}.model").read_bytes()) for way in WAYS[:2])
        if ours.pieces != plain.pieces or not np.array_equal(ours.scores, plain.scores):
            sys.exit("ours and plain made different models: nothing to compare")
    return {
        "text_bytes": text_bytes,
        "passes_over_the_corpus": repeated,
        **{
            way: {
                "seconds": statistics.median(seconds[way]),
                "cpu_seconds": statistics.median(cpu_seconds[way]),
                "peak_bytes": statistics.median(peaks[way]),
                "time_ratio": statistics.median(seconds["ours"]) / statistics.median(seconds[way]),
                "cpu_time_ratio": statistics.median(cpu_seconds["ours"]) / statistics.median(cpu_seconds[way]),
                "memory_ratio": statistics.median(peaks["ours"]) / statistics.median(peaks[way]),
            }
            for way in WAYS
        },
    }


def write_texts(corpus: Path, text_bytes: int, folder: Path) -> int:
    """documents.jsonl: `text_bytes` of documents; sample.jsonl: the pieces that ours will train on. Gives how many
    passes over the corpus it took.
    """
    sample = Sample(max_bytes=2 * text_bytes, seed=0)
    written = passes = 0
    with (folder / "documents.jsonl").open("w", encoding="ascii") as file:
        for number, texts in enumerate(passes_over(corpus)):
            passes = number + 1
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                sample.add(text)
                written += len(text.encode("utf-8"))
                if written >= text_bytes:
                    break
            if not written:
                sys.exit(f"error: {corpus} holds no text")
            if written >= text_bytes:
                break
    sample.hold_out()
    with (folder / "sample.jsonl").open("w", encoding="ascii") as file:
        for piece in sample.pieces():
            file.write(json.dumps({"text": piece.decode("utf-8")}) + "\n")
    return passes


def passes_over(corpus: Path) -> Iterator[Iterator[str]]:
    """The documents in an order by chance, again and again. From the second pass on, two pairs of letters are swapped
    throughout each document, others in each: a corpus that is too small gives new words, though not as a language does.
    """
    folder = corpus / "train" if (corpus / "train").is_dir() else corpus
    chance = random.Random(0)
    texts = [item.text for item in read_documents(folder) if isinstance(item, Document)]
    for number in itertools.count():
        chance.shuffle(texts)
        yield iter(texts) if number == 0 else (text.translate(swapped_letters(chance)) for text in texts)


def swapped_letters(chance: random.Random) -> dict[int, str]:
    a, b, c, d = chance.sample(string.ascii_lowercase, 4)
    return str.maketrans(a + b + c + d, b + a + d + c)


def run(way: str, folder: Path, order: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds, seconds of CPU time and the most memory of one training in a fresh process."""
    used_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", way, str(folder), json.dumps(order)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, held_bytes(process.pid))
            time.sleep(LOOK_EVERY_SECONDS)
        assert process.stdout
        answer = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime
    return json.loads(answer)["seconds"], cpu_seconds, peak


def held_bytes(process_id: int) -> int:
    """Resident memory of a process and its children; a library mapped by both counts twice."""
    total = 0
    try:
        for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
        for children in Path(f"/proc/{process_id}/task").glob("*/children"):
            total += sum(held_bytes(int(child)) for child in children.read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        pass
    return total


# ---------------------------------------------------------------- in the fresh process


def work(way: str, folder: Path, order: dict[str, Any]) -> None:
    started = time.perf_counter()
    if way == "ours":
        out = folder / "tokenizer"
        documents = read_texts(folder / "documents.jsonl")
        train(documents, out, sample_bytes=10**12, overwrite=True, **order)
        model = (out / "tokenizer.model").read_bytes()
    else:
        model = plain(folder, split_lines=way == "plain, lines", threads=order["threads"])
    seconds = time.perf_counter() - started
    (folder / f"{way}.model").write_bytes(model)
    print(json.dumps({"seconds": seconds}))


def plain(folder: Path, *, split_lines: bool, threads: int) -> bytes:
    """SentencePiece with the options that ours gave it."""
    options = json.loads((folder / "tokenizer" / "description.json").read_text())["options"]
    for own in ("split", "sample_bytes", "seed"):
        del options[own]
    pieces = list(read_texts(folder / "sample.jsonl"))  # in memory, as a list of texts mostly is
    sentences = [line for piece in pieces for line in piece.split("\n") if line] if split_lines else pieces
    del pieces
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        num_threads=UNIGRAM_THREADS if options["model_type"] == "unigram" else threads,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def read_texts(path: Path) -> Iterator[str]:
    with path.open(encoding="ascii") as file:
        for line in file:
            yield json.loads(line)["text"]


def to_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model_type']}, {report['vocab_size']} pieces, {report['threads']} threads, {report['cpus']} CPUs, "
        f"sentencepiece {report['sentencepiece']}, medians of {report['repetitions']}; ratios: ours to each",
        "",
        f"{'text':>9}  {'way':14}{'seconds':>9}{'ratio':>7}{'CPU s':>9}{'ratio':>7}{'memory':>10}{'ratio':>7}",
    ]
    for size in report["sizes"]:
        for way in WAYS:
            one = size[way]
            lines.append(
                f"{size['text_bytes'] / 1e6:6.0f} MB  {way:14}{one['seconds']:9.1f}{one['time_ratio']:7.2f}"
                f"{one['cpu_seconds']:9.1f}{one['cpu_time_ratio']:7.2f}"
                f"{one['peak_bytes'] / 1e6:7.0f} MB{one['memory_ratio']:7.2f}"
            )
    mutated = [size for size in report["sizes"] if size["passes_over_the_corpus"] > 1]
    for size in mutated:
        lines.append(
            f"{size['text_bytes'] / 1e6:.0f} MB are {size['passes_over_the_corpus']} passes over {report['corpus']}, "
            "all but the first with letters swapped"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
