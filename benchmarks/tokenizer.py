"""How fast text becomes ids, as ratios to SentencePiece in the same process, and whether the ids are SentencePiece's.

A tokenizer is trained on the training part of a corpus; every encoder installed gets the same model. Each encodes other
text first, then text that neither it nor the trainer has seen: every round has text of its own, all encoders take turns
in it, one thread, and figures are medians over the rounds. Ids of every document are compared.

    python benchmarks/tokenizer.py                          # the sample corpus: a rough figure, texts are few
    python benchmarks/tokenizer.py --corpus data/corpus --work data/benchmark
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from tokenizer.codec import MODEL_FILE, Codec
from tokenizer.export import tokenizer_json, why_not
from tokenizer.model_file import ModelFile, TokenizerError
from tokenizer.train import train

SAMPLE = Path(__file__).resolve().parents[1] / "data_pipeline" / "sample_corpus"
LANGUAGES = {"english": ("english", "en"), "chinese": ("chinese", "zh"), "code": ("code",)}  # beginnings of file names
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
UNSEEN_FRACTION = 0.25  # of a corpus that has no held-out part
REFERENCE, OURS = "sentencepiece", "zerohalf"
SCALING_SECONDS, SCALING_BYTES = 0.6, 12e6  # what one thread has to do, at least, when two are measured

Texts = dict[str, list[str]]  # by language
Ids = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class Subject:
    """One encoder in one way of calling it."""

    name: str
    version: str
    way: str
    encode: Callable[[list[str]], Sequence[Ids]]


# ---------------------------------------------------------------- text


def read_corpus(folder: Path, training_bytes: float, unseen_bytes: float) -> tuple[Texts, Texts]:
    """(training, unseen) texts of each language, at most so many bytes of each.

    A folder with train/ and heldout/ (see benchmarks/corpus.py) says itself which is which; of any other, a quarter of
    the documents, by the hash of their text, is unseen.
    """
    if (folder / "train").is_dir() and (folder / "heldout").is_dir():
        sides = tuple(
            {name: _take(_in_turn(files), limit) for name, files in _files(folder / side).items()}
            for side, limit in (("train", training_bytes), ("heldout", unseen_bytes))
        )
        if sides[0].keys() != sides[1].keys():
            sys.exit(f"error: {folder}: train/ has {sorted(sides[0])}, heldout/ has {sorted(sides[1])}")
        return sides[0], sides[1]
    whole = {name: list(_in_turn(files)) for name, files in _files(folder).items()}
    training = {name: _take((t for t in texts if not _is_unseen(t)), training_bytes) for name, texts in whole.items()}
    unseen = {name: _take((t for t in texts if _is_unseen(t)), unseen_bytes) for name, texts in whole.items()}
    return training, unseen


def _files(folder: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for name, beginnings in LANGUAGES.items():
        of_name = [f for f in sorted(folder.iterdir()) if f.name.endswith(SUFFIXES) and f.name.startswith(beginnings)]
        if of_name:
            files[name] = of_name
    if not files:
        sys.exit(f"error: {folder} has no jsonl file whose name begins with english, chinese or code")
    return files


def _in_turn(files: Iterable[Path]) -> Iterator[str]:
    """The texts of several files, one of each at a time, so that a part has all of them."""
    with ExitStack() as stack:
        streams = [iter(stack.enter_context(_opened(file))) for file in files]
        while streams:
            for stream in list(streams):
                line = next(stream, None)
                if line is None:
                    streams.remove(stream)
                else:
                    yield json.loads(line)["text"]


def _opened(file: Path) -> Any:
    openers: dict[str, Callable[..., Any]] = {".zst": zstandard.open, ".gz": gzip.open}
    return openers.get(file.suffix, open)(file, "rt", encoding="utf-8", newline="\n")


def _take(texts: Iterable[str], limit_bytes: float) -> list[str]:
    taken = []
    for text in texts:
        limit_bytes -= size_of([text])
        if limit_bytes < 0:
            break
        taken.append(text)
    return taken


def _is_unseen(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] < 256 * UNSEEN_FRACTION


def size_of(texts: Iterable[str]) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)


def deal(texts: Texts, rounds: int) -> list[Texts]:
    """The texts in `rounds` parts of about the same size, each of every language."""
    parts: list[Texts] = [{name: [] for name in texts} for _ in range(rounds)]
    for name, of_name in texts.items():
        sizes = [0] * rounds
        for text in random.Random(0).sample(of_name, len(of_name)):
            smallest = sizes.index(min(sizes))
            parts[smallest][name].append(text)
            sizes[smallest] += len(text)
        if not all(sizes):
            sys.exit(f"error: {name} has {len(of_name)} unseen texts, too few for {rounds} rounds; give --rounds 1")
    return parts


# ---------------------------------------------------------------- encoders


def make_tokenizer(training: Texts, vocab_size: int, work: Path) -> Path:
    """A tokenizer of these texts; one that an earlier run left in `work` is taken again."""
    digest = hashlib.sha256(f"{vocab_size} {sentencepiece.__version__}\n".encode())
    for name, texts in training.items():
        digest.update(f"{name}\n".encode())
        for text in texts:
            digest.update(hashlib.sha256(text.encode()).digest())
    folder = work / f"tokenizer-{vocab_size}-{digest.hexdigest()[:12]}"
    if not folder.exists():
        train([text for texts in training.values() for text in texts], folder, vocab_size=vocab_size)
    return folder


def make_subjects(folder: Path) -> tuple[list[Subject], dict[str, str]]:
    """All encoders that can be had, the reference first, and why others can't.

    None may take the text `<s>` for a control id, so what others know of special tokens is switched off: by an option
    where there is one, else by leaving them out of the tokenizer.json they are given.
    """
    model_bytes = (folder / MODEL_FILE).read_bytes()
    model = ModelFile.parse(model_bytes)
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    codec = Codec.load(folder)
    version = sentencepiece.__version__
    subjects = [
        Subject(REFERENCE, version, "encode(text) of each", lambda texts: [processor.encode(text) for text in texts]),
        Subject(
            f"{REFERENCE}, batch", version, "encode(texts, num_threads=1)",
            lambda texts: processor.encode(texts, num_threads=1),
        ),
        Subject(OURS, codec.encoder, "Codec.encode_documents", lambda texts: list(codec.encode_documents(texts))),
    ]  # fmt: skip
    if reason := why_not(model):
        return subjects, dict.fromkeys(OTHERS, reason)
    content = tokenizer_json(model)
    absent: dict[str, str] = {}
    for name, make in OTHERS.items():
        if not importlib.util.find_spec(name):
            absent[name] = "not installed"
            continue
        way, encode = make(model_bytes, content)
        subjects.append(Subject(name, importlib.metadata.version(name), way, encode))
    return subjects, absent


Made = tuple[str, Callable[[list[str]], Sequence[Ids]]]


def _tokenizers(model: bytes, content: dict[str, Any]) -> Made:
    import tokenizers

    encoder = tokenizers.Tokenizer.from_str(json.dumps(content))
    encoder.encode_special_tokens = True
    return "encode(text).ids, encode_special_tokens", lambda texts: [
        encoder.encode(text, add_special_tokens=False).ids for text in texts
    ]


def _kitoken(model: bytes, content: dict[str, Any]) -> Made:
    import kitoken

    encoder = kitoken.Kitoken.from_sentencepiece(model)
    return "encode(text, encode_specials=False), from tokenizer.model", lambda texts: [
        encoder.encode(text, False) for text in texts
    ]


def _fastokens(model: bytes, content: dict[str, Any]) -> Made:
    import fastokens

    encoder = fastokens.Tokenizer.from_json_str(json.dumps(content | {"added_tokens": []}))
    return "encode(text).ids, special tokens left out", lambda texts: [
        encoder.encode(text, False).ids for text in texts
    ]


def _gigatoken(model: bytes, content: dict[str, Any]) -> Made:
    import gigatoken

    encoder = gigatoken.Tokenizer.from_json(json.dumps(content | {"added_tokens": []}))
    return "encode(text), special tokens left out", lambda texts: [encoder.encode(text) for text in texts]


OTHERS: dict[str, Callable[[bytes, dict[str, Any]], Made]] = {
    "tokenizers": _tokenizers,
    "kitoken": _kitoken,
    "fastokens": _fastokens,
    "gigatoken": _gigatoken,
}


# ---------------------------------------------------------------- measurements


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    say(f"reading {options.corpus}")
    training, unseen = read_corpus(options.corpus, options.train_megabytes * 1e6 / 3, options.megabytes * 1e6)
    say(f"training {options.vocab_size} pieces on {sum(map(size_of, training.values())) / 1e6:.1f} MB")
    folder = make_tokenizer(training, options.vocab_size, work)
    subjects, absent = make_subjects(folder)
    warm = [text for texts in training.values() for text in _take(texts, options.warm_megabytes * 1e6 / len(training))]
    for subject in subjects:
        say(f"warming {subject.name}")
        subject.encode(warm)
    rates = measure_rates(subjects, deal(unseen, options.rounds))
    everything = [text for texts in unseen.values() for text in texts]
    return {
        "corpus": options.corpus.name,
        "vocab_size": options.vocab_size,
        "training_bytes": {name: size_of(texts) for name, texts in training.items()},
        "warm_bytes": size_of(warm),
        "unseen_bytes": {name: size_of(texts) for name, texts in unseen.items()},
        "unseen_documents": {name: len(texts) for name, texts in unseen.items()},
        "rounds": options.rounds,
        "encoders": {subject.name: {"version": subject.version, "way": subject.way} for subject in subjects},
        "absent": absent,
        "megabytes_per_second": rates,
        "ratio": {
            language: {name: rate / of_language[REFERENCE] for name, rate in of_language.items()}
            for language, of_language in rates.items()
        },
        "documents_that_differ": count_differences(subjects, unseen),
        "times_one_thread": measure_scaling(folder, everything, options.rounds),
        "long_texts_megabytes_per_second": measure_long_texts(subjects, unseen, options.rounds),
        "cache": cache_of(folder, warm + everything),
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
    }


def measure_rates(subjects: list[Subject], rounds: list[Texts]) -> dict[str, dict[str, float]]:
    """MB/s by language and encoder: the median over rounds, each with text that no encoder has met."""
    rates: dict[str, dict[str, list[float]]] = {name: {s.name: [] for s in subjects} for name in rounds[0]}
    for number, texts_of in enumerate(rounds):
        say(f"round {number + 1} of {len(rounds)}")
        turn = subjects[number % len(subjects) :] + subjects[: number % len(subjects)]
        for language, texts in texts_of.items():
            megabytes = size_of(texts) / 1e6
            for subject in turn:
                rates[language][subject.name].append(megabytes / seconds_of(subject.encode, texts))
    return {
        language: {name: statistics.median(found) for name, found in of_language.items()}
        for language, of_language in rates.items()
    }


def count_differences(subjects: list[Subject], texts_of: Texts) -> dict[str, dict[str, int]]:
    """Documents whose ids are not SentencePiece's, by language and encoder."""
    differ: dict[str, dict[str, int]] = {}
    for language, texts in texts_of.items():
        right = [np.asarray(ids) for ids in subjects[0].encode(texts)]
        differ[language] = {
            subject.name: sum(
                not np.array_equal(ids, one) for ids, one in zip(subject.encode(texts), right, strict=True)
            )
            for subject in subjects[1:]
        }
    return differ


def measure_scaling(folder: Path, texts: list[str], rounds: int) -> dict[str, float]:
    """How many times the work of one thread two threads do, and two processes, on the same texts.

    The texts are repeated until one thread is busy for a while. Processes are measured between two documents in the
    middle of one call: their start, and what is still on its way at the end, are left out.
    """
    codec = Codec.load(folder)
    _drain(codec, texts)
    once = seconds_of(_drain, codec, texts)
    texts = texts * round(max(SCALING_SECONDS / once, SCALING_BYTES / size_of(texts)) + 1)
    halves = texts[::2], texts[1::2]
    middle = texts[len(texts) // 4 : 3 * len(texts) // 4]
    found: dict[str, list[float]] = {"threads": [], "processes": [], "first_ids_of_processes_seconds": []}
    for _ in range(rounds):
        say("one thread, two threads, two processes")
        found["threads"].append(seconds_of(_drain, codec, texts) / seconds_of(_in_threads, codec, halves))
        one = seconds_of(_drain, codec, middle)
        first, middle_seconds = _in_processes(codec, texts)
        found["processes"].append(one / middle_seconds)
        found["first_ids_of_processes_seconds"].append(first)
    return {name: statistics.median(values) for name, values in found.items()} | {"megabytes": size_of(texts) / 1e6}


def _in_processes(codec: Codec, texts: list[str]) -> tuple[float, float]:
    """Seconds until the first ids, and for the middle half of the texts."""
    started = time.perf_counter()
    at = []
    for number, _ in enumerate(codec.encode_documents(texts, processes=2)):
        if number in (0, len(texts) // 4, 3 * len(texts) // 4):
            at.append(time.perf_counter())
    return at[0] - started, at[2] - at[1]


def _drain(codec: Codec, texts: list[str]) -> None:
    for _ in codec.encode_documents(texts):
        pass


def _in_threads(codec: Codec, parts: Sequence[list[str]]) -> None:
    threads = [threading.Thread(target=_drain, args=(codec, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_long_texts(subjects: list[Subject], unseen: Texts, rounds: int) -> dict[str, dict[str, float]]:
    """MB/s of long texts without a place to part them, beside ordinary documents (met before) of 1 MB together.

    A word is random letters without a space. Time per byte of 1 MB against that of 0.1 MB shows whether time grows with
    the length alone.
    """
    documents = _take(next(iter(unseen.values())), 1e6)
    letters = "".join(random.Random(1).choices("etaoinshrdlu", k=1_000_000))
    texts = {
        "documents": documents,
        "one document": ["".join(documents)],
        "0.1 MB word": [letters[:100_000]],
        "1 MB word": [letters],
        "0.1 MB spaces": [" " * 100_000],
        "1 MB spaces": [" " * 1_000_000],
    }
    found: dict[str, dict[str, list[float]]] = {s.name: {name: [] for name in texts} for s in subjects}
    for number in range(min(rounds, 3)):
        for subject in subjects if not number else [one for one in subjects if one.name in (REFERENCE, OURS)]:
            say(f"long texts, {subject.name}")
            for name, long in texts.items():
                found[subject.name][name].append(size_of(long) / 1e6 / seconds_of(subject.encode, long))
    return {
        subject: {name: statistics.median(values) for name, values in of_subject.items()}
        for subject, of_subject in found.items()
    }


def cache_of(folder: Path, texts: list[str]) -> dict[str, int] | None:
    """What our encoder's caches hold after these texts, and at most; None without a compiled encoder."""
    try:
        from tokenizer.fastbpe.encoder import DEFAULT_CACHE_BYTES, FastBPE, Unsupported

        encoder = FastBPE.build(ModelFile.parse((folder / MODEL_FILE).read_bytes()))
    except (ImportError, Unsupported):
        return None
    for text in texts:
        encoder.encode([text.encode()])
    stats = encoder.stats()
    return {
        "text_bytes": size_of(texts),
        "held_bytes": stats.cache_bytes,
        "limit_bytes_a_thread": DEFAULT_CACHE_BYTES,
        "hits": stats.hits,
        "misses": stats.misses,
        "evictions": stats.evictions,
    }


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


# ---------------------------------------------------------------- the report


def to_text(report: dict[str, Any]) -> str:
    languages = list(report["ratio"])
    width = max(map(len, report["encoders"])) + 2
    unseen = " + ".join(f"{report['unseen_bytes'][name] / 1e6:.2f}" for name in languages)
    lines = [
        f"{report['vocab_size']} pieces; {unseen} MB unseen ({', '.join(languages)}) in {report['rounds']} rounds; "
        "times the MB/s of sentencepiece's encode(text), and documents with other ids",
        "",
        " " * width + "".join(f"{name:>22}" for name in languages),
    ]
    for name, about in report["encoders"].items():
        cells = ""
        for language in languages:
            rate, ratio = report["megabytes_per_second"][language][name], report["ratio"][language][name]
            differ = report["documents_that_differ"][language].get(name)
            cell = f"{ratio:.1f} ({rate:.1f} MB/s)" + ("" if differ is None else f"{differ:4}")
            cells += f"{cell:>22}"
        lines.append(f"{name:<{width}}{cells}   {about['version']}, {about['way']}")
    lines += [f"{name:<{width}}{reason}" for name, reason in report["absent"].items()]
    scaling = report["times_one_thread"]
    lines += [
        "",
        f"{OURS}, against one thread: 2 threads {scaling['threads']:.2f} x, 2 processes {scaling['processes']:.2f} x "
        f"(their first ids after {scaling['first_ids_of_processes_seconds']:.1f} s)",
        "",
        "MB/s of long texts, and time per byte at 1 MB against 0.1 MB",
        " " * width + "".join(f"{name:>16}" for name in ("documents", "one document", "1 MB word", "1 MB spaces")),
    ]
    for name, rates in report["long_texts_megabytes_per_second"].items():
        cells = f"{rates['documents']:>16.1f}{rates['one document']:>16.1f}"
        for kind in ("word", "spaces"):
            growth = rates[f"0.1 MB {kind}"] / rates[f"1 MB {kind}"]
            cell = f"{rates[f'1 MB {kind}']:.1f} ({growth:.1f} x)"
            cells += f"{cell:>16}"
        lines.append(f"{name:<{width}}{cells}")
    if cache := report["cache"]:
        share = cache["hits"] / (cache["hits"] + cache["misses"])
        lines += [
            "",
            f"cache: {cache['held_bytes'] / 1e6:.1f} MB held after {cache['text_bytes'] / 1e6:.1f} MB of text, at most "
            f"{cache['limit_bytes_a_thread'] / 1e6:.1f} MB a thread; {share:.1%} "
            f"hits, {cache['evictions']} evictions",
        ]
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--corpus", type=Path, default=SAMPLE, help="a folder of benchmarks/corpus.py, or of jsonl files"
    )
    parser.add_argument("--work", type=Path, help="folder that keeps the tokenizer for the next run")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--megabytes", type=float, default=8, help="unseen text of each language, at most")
    parser.add_argument("--warm-megabytes", type=float, default=8, help="other text that each encoder gets before")
    parser.add_argument("--train-megabytes", type=float, default=27, help="text the tokenizer is trained on, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = "1"  # the others are written in Rust; one thread each
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = measure(options, options.work or Path(folder))
    except (TokenizerError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report, indent=2) if options.json else to_text(report))


if __name__ == "__main__":
    main()
