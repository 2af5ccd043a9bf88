"""Corpora become a collection of token files: planned from the input alone, in parallel, resumable at any byte.

The plan (files, sizes, times, options, tokenizer) is written before the first unit. Each unit leaves its shards and a
receipt; when all have theirs, the manifests are written, the collection's last. Which process on which machine does a
unit, and how often the work was killed on the way, leaves no trace in the output.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from data_pipeline.corpus import STDIN, Place, is_local, standard_input
from data_pipeline.duplicates import duplicates_folder, find_repeats, hashes_receipt
from data_pipeline.durable import file_sha256, publish, sync_folder, telling_full_disk, temporary_name, write_file
from data_pipeline.locks import ALL, Span, doing, setting_up
from data_pipeline.plan import make_plan, refuse_foreign_folder, refuse_output_among_inputs, settle_plan
from data_pipeline.progress import Counters, reporting
from data_pipeline.shards import (
    COLLECTION_FORMAT,
    DATASET_FORMAT,
    FORMAT_VERSION,
    LEDGER_NAME,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_FOLDER,
    Collection,
    is_source_name,
    open_collection,
    render_manifest,
)
from data_pipeline.spool import keep_stdin, spool_folder
from data_pipeline.unit import Options, PrepareError, Unit, Workplace, receipt_shards, valid_receipt
from data_pipeline.workers import Job, Pass, run_units
from tokenizer.codec import Codec

__all__ = ["Options", "Part", "PartReport", "PrepareError", "PrepareReport", "parse_inputs", "prepare", "prepare_part"]


@dataclass(frozen=True)
class PrepareReport:
    """What a run of `prepare` did. Bytes are UTF-8 bytes of text, and tokens include EOS, of this run alone.

    found_whole: the collection had its manifest already, and was only checked.
    """

    collection: Collection
    found_whole: bool
    units: int
    units_done_before: int
    text_bytes: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PartReport:
    """What a run of `prepare_part` did.

    units_unhashed: units of other parts whose documents must be hashed before this part can drop duplicates; it has
    tokenized nothing then, and must be run again. units_left: units of the whole work that have no receipt yet.
    """

    units: int
    units_done_before: int
    units_unhashed: int
    units_left: int
    text_bytes: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Part:
    """The `number`-th (from 1) of `of` parts, equal in number of units; all units in order, cut in `of` places."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """`3/8`. PrepareError: anything else."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        part = cls(int(match[1]), int(match[2])) if match else None
        if part is None or not 1 <= part.number <= part.of:
            raise PrepareError(f"--units {text}: say K/N, such as 3/8 for the third of eight parts")
        return part

    def span(self, units: int) -> Span:
        """Which of so many units are this part's."""
        first, stop = (units * border // self.of for border in (self.number - 1, self.number))
        return Span(first, stop - first)


def parse_inputs(arguments: Sequence[str]) -> dict[str, list[Place]]:
    """`[NAME=]PATH` arguments as paths by source, in the order given. Without NAME the file or folder gives it.

    What is no path of this machine (an address, the name of a data set, `-`) stays a string.

    PrepareError: a name that cannot name a folder of the collection.
    """
    inputs: dict[str, list[Place]] = {}
    unnamed: set[str] = set()
    for argument in arguments:
        name, equals, rest = argument.partition("=")
        if equals and "/" not in name and not Path(argument).exists():
            place: Place = Path(rest) if is_local(rest) else rest
            if not rest:
                raise PrepareError(f"{argument!r}: the path is missing; say NAME=PATH")
        else:
            place = Path(argument) if is_local(argument) else argument
            name = _source_name(place)
            if name in inputs:
                raise PrepareError(f"{argument!r}: there is a source {name!r} already; say NAME=PATH")
            unnamed.add(name)
        if not is_source_name(name):
            raise PrepareError(
                f"{argument!r}: {name!r} cannot name a source (letters, digits, . _ -, not 'tokenizer'); say NAME=PATH"
            )
        if name in unnamed and name in inputs:
            raise PrepareError(f"{argument!r}: another input without a name is called {name!r} already; name both")
        inputs.setdefault(name, []).append(place)
    if not inputs:
        raise PrepareError("no input was given; say --input [NAME=]PATH")
    return inputs


def _source_name(place: Place) -> str:
    """What a source is called whose input has no name of its own."""
    if isinstance(place, Path):
        return Path(os.path.abspath(place)).name.split(".")[0]  # noqa: PTH100 - resolve() would follow links
    address = (
        place.partition("?")[0] if "://" in place else place.removeprefix("hf:").partition(":")[0].partition("@")[0]
    )
    return "stdin" if place == STDIN else address.rstrip("/").rpartition("/")[2].split(".")[0]


# ---------------------------------------------------------------- the work


def prepare(
    inputs: Mapping[str, Sequence[Place]],
    tokenizer: Path,
    out: Path,
    options: Options | None = None,
    *,
    workers: int = 1,
    strict: bool = False,
    stdin_kind: str = "jsonl",
) -> PrepareReport:
    """Make (or finish, or find already whole) the collection `out`: one data set a source, both splits.

    An input `-` is standard input, of kind `stdin_kind`.

    Progress goes to stderr. CorpusError, TokenizerError, PrepareError, DataFormatError, OSError: one line each;
    `out` holds no manifest then, and the same command continues where it stopped.
    """
    began_at = time.monotonic()
    begun = _begun(inputs, tokenizer, out, options or Options(), None, workers, strict, stdin_kind)
    with telling_full_disk(out), begun as work:
        if not work.is_whole:
            work.do()
            _finish(work)
        collection = open_collection(out)
        _remove_receipts(work.place)
    seconds = time.monotonic() - began_at
    return PrepareReport(
        collection, work.is_whole, len(work.units), work.done_before, work.text_bytes, work.tokens, seconds
    )


def prepare_part(
    inputs: Mapping[str, Sequence[Place]],
    tokenizer: Path,
    out: Path,
    options: Options | None = None,
    *,
    part: Part,
    workers: int = 1,
    strict: bool = False,
) -> PartReport:
    """Do one part of the units of `prepare`, and leave the rest to other calls, on this machine or on others that see
    the same input and `out` under the same names. In any order, at once or not; `prepare` itself ends the work.

    With `options.deduplicate` a part is run twice: tokenizing waits until all units' documents are hashed.

    Errors: as `prepare`.
    """
    began_at = time.monotonic()
    if any(STDIN in places for places in inputs.values()):
        raise PrepareError("standard input cannot be read by several calls; give a file, or leave --units out")
    with telling_full_disk(out), _begun(inputs, tokenizer, out, options or Options(), part, workers, strict) as work:
        if not work.is_whole:
            work.do()
    left = 0 if work.is_whole else sum(not work.place.receipt(unit).exists() for unit in work.units)
    return PartReport(
        len(work.own), work.done_before, work.unhashed, left, work.text_bytes, work.tokens, time.monotonic() - began_at
    )


@contextmanager
def _begun(
    inputs: Mapping[str, Sequence[Place]],
    tokenizer: Path,
    out: Path,
    options: Options,
    part: Part | None,
    workers: int,
    strict: bool,
    stdin_kind: str = "jsonl",
) -> Iterator[_Work]:
    """The work as planned, and this process alone at its part of it."""
    if workers < 1:
        raise PrepareError(f"{workers} workers cannot work; take 1 or more")
    stdin_inputs = sum(list(places).count(STDIN) for places in inputs.values())
    if stdin_inputs > 1:
        raise PrepareError("standard input can be read once; give --input NAME=- once")
    codec = Codec.load(tokenizer)
    refuse_output_among_inputs(inputs, out)
    units, plan = make_plan(inputs, options, codec, standard_input(stdin_kind))
    place = Workplace(out)
    refuse_foreign_folder(place)
    place.state.mkdir(parents=True, exist_ok=True)
    if stdin_inputs:
        with doing(place, ALL):
            stdin = keep_stdin(place, stdin_kind)
        units, plan = make_plan(inputs, options, codec, stdin)
    span = ALL if part is None else part.span(len(units))
    with ExitStack() as stack:
        with setting_up(place):
            stack.enter_context(doing(place, span))
            place.receipts.mkdir(exist_ok=True)
            plan = settle_plan(place, plan)
            work = _Work(place, units, plan, options, codec, span, workers, strict)
            if not work.is_whole:
                work.make_folders()
        yield work


class _Work:
    """All units and the part of them that is to be done now; what came of it."""

    def __init__(
        self,
        place: Workplace,
        units: Sequence[Unit],
        plan: dict[str, Any],
        options: Options,
        codec: Codec,
        span: Span,
        workers: int,
        strict: bool,
    ) -> None:
        self.place, self.units, self.plan, self.options, self.codec = place, units, plan, options, codec
        self.span, self.workers, self.strict = span, workers, strict
        self.own = units if span.count is None else units[span.first : span.first + span.count]
        self.is_whole = (place.out / MANIFEST_NAME).exists()
        self.done_before = len(self.own) if self.is_whole else 0
        self.unhashed = self.text_bytes = self.tokens = 0

    def make_folders(self) -> None:
        """Make what is missing of `out`; where this process does all units, remove what killed ones were writing."""
        sources, place = list(self.plan["sources"]), self.place
        for folder in (*map(place.source, sources), duplicates_folder(place)):
            folder.mkdir(exist_ok=True)
        sync_folder(place.out)
        if self.span == ALL:
            for partial in place.out.glob(f".{TOKENIZER_FOLDER}.*.partial"):
                shutil.rmtree(partial)
            state = (place.out, place.state, place.receipts, duplicates_folder(place))
            for folder in (*state, *map(place.source, sources)):
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink()
        self.codec.copy_to(place.out / TOKENIZER_FOLDER)

    def do(self) -> None:
        """Tokenize all own units that have no receipt; with duplicates to drop, only when all units are compared."""
        missing = [unit for unit in self.own if valid_receipt(self.place, unit, self.codec) is None]
        self.done_before = len(self.own) - len(missing)
        if self.options.deduplicate and missing:
            self._compare_documents()
        if not self.unhashed:
            counters = self._run("tokenize", missing)
            self.text_bytes, self.tokens = counters.text_bytes, counters.tokens

    def _compare_documents(self) -> None:
        """Find every document that repeats an earlier one of its source; or count the units that are not hashed."""
        self._run("hash", [unit for unit in self.own if hashes_receipt(self.place, unit) is None])
        others = [] if self.span == ALL else self.units
        self.unhashed = sum(hashes_receipt(self.place, unit) is None for unit in others)
        if not self.unhashed:
            with setting_up(self.place):
                for source in self.plan["sources"]:
                    find_repeats(self.place, source, [unit for unit in self.units if unit.source == source])

    def _run(self, what: Pass, units: Sequence[Unit]) -> Counters:
        counters = Counters()
        job = Job(what, self.place, self.options, self.place.out / TOKENIZER_FOLDER, self.strict, self.span)
        with reporting(counters, _WORDS[what], sum(unit.input_bytes for unit in units)):
            run_units(job, units, self.workers, counters)
        return counters


_WORDS: dict[Pass, str] = {"hash": "prepare, documents compared", "tokenize": "prepare"}


def _remove_receipts(place: Workplace) -> None:
    """What is needed only while a collection is not whole."""
    for folder in (place.receipts, spool_folder(place), duplicates_folder(place)):
        if folder.exists():
            shutil.rmtree(folder)


# ---------------------------------------------------------------- manifests


def _finish(work: _Work) -> None:
    """Write each source's ledger and manifest, then the collection's manifest, which makes it one."""
    place, plan = work.place, work.plan
    receipts = {unit: receipt for unit in work.units if (receipt := valid_receipt(place, unit, work.codec))}
    if lost := next((unit for unit in work.units if unit not in receipts), None):
        raise PrepareError(f"{place.receipt(lost)}: missing or damaged; start again to do that unit anew")
    hashes = {}
    for name, source in plan["sources"].items():
        own = [(unit, receipts[unit]) for unit in work.units if unit.source == name]
        manifest = _source_manifest(place, name, own, source, plan)
        content = render_manifest(manifest)
        write_file(place.source(name) / MANIFEST_NAME, content)
        hashes[name] = {"manifest_sha256": hashlib.sha256(content).hexdigest()}
    copied = sorted((place.out / TOKENIZER_FOLDER).iterdir())
    collection = {
        "format": COLLECTION_FORMAT,
        "version": FORMAT_VERSION,
        "tokenizer": {**plan["tokenizer"], "files": {path.name: file_sha256(path) for path in copied}},
        "sources": hashes,
    }
    if Codec.load(place.out / TOKENIZER_FOLDER).fingerprint != work.codec.fingerprint:
        raise PrepareError(f"{place.out / TOKENIZER_FOLDER}: not the tokenizer the work was done with")
    write_file(place.out / MANIFEST_NAME, render_manifest(collection))


def _source_manifest(
    place: Workplace,
    name: str,
    done: Sequence[tuple[Unit, dict[str, Any]]],
    source: dict[str, Any],
    plan: dict[str, Any],
) -> dict[str, Any]:
    shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    dropped: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for _, receipt in done:
        for split, shard in receipt_shards(place, receipt).items():
            shards[split].append(shard.to_json())
        dropped.update(receipt["dropped"])
        notes.update(receipt["notes"])
    sums = {
        split: {key: sum(shard[key] for shard in shards[split]) for key in ("tokens", "documents", "text_bytes")}
        for split in SPLITS
    }
    kept = sum(one["documents"] for one in sums.values())
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "its files are empty"
        raise PrepareError(f"source {name}: no document is left to train on ({reasons})")
    return {
        "format": DATASET_FORMAT,
        "version": FORMAT_VERSION,
        "name": name,
        "tokenizer": plan["tokenizer"],
        "options": plan["options"],
        "splits": {split: {**sums[split], "shards": shards[split]} for split in SPLITS},
        "documents_read": kept + dropped.total(),
        "dropped": dict(dropped),
        "notes": dict(notes),
        "ledger": _merge_ledgers(place, name, done),
        "provenance": {
            "files": [piece for _, receipt in done for piece in receipt["pieces"]],
            "ignored_files": source["ignored"],
        },
    }


def _merge_ledgers(place: Workplace, name: str, done: Sequence[tuple[Unit, dict[str, Any]]]) -> dict[str, Any]:
    """One ledger out of the units', lines counted from the start of each file; returns its size and SHA-256."""
    final = place.source(name) / LEDGER_NAME
    temporary = temporary_name(final)
    lines_before: Counter[str] = Counter()
    try:
        with temporary.open("wb") as out:
            for unit, receipt in done:
                with place.ledger(unit).open("rb") as ledger:
                    for line in ledger:
                        entry = orjson.loads(line)
                        if receipt["pieces"][entry.pop("piece")]["start"]:
                            entry["position"] += lines_before[entry["path"]]
                        out.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
                for piece in receipt["pieces"]:
                    lines_before[piece["path"]] += piece.get("lines", piece["items"])
            out.flush()
            os.fsync(out.fileno())
        record = {"bytes": temporary.stat().st_size, "sha256": file_sha256(temporary)}
        publish(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return record
