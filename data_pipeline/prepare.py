"""Corpora become a collection of token files: planned from the input alone, in parallel, resumable at any byte.

The plan (files, sizes, times, options, tokenizer) is written before the first unit. Each unit leaves its shards and a
receipt; when all have theirs, the manifests are written, the collection's last. Which process does a unit, and how
often the work was killed on the way, leaves no trace in the output.
"""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from data_pipeline.corpus import STDIN, Found, Place, find_files, is_local, plan_units, standard_input
from data_pipeline.durable import file_sha256, publish, sync_folder, temporary_name, write_file
from data_pipeline.shards import (
    COLLECTION_FORMAT,
    DATASET_FORMAT,
    FORMAT_VERSION,
    LEDGER_NAME,
    MANIFEST_NAME,
    PLAN_FORMAT,
    PLAN_PATH,
    SPLITS,
    TOKENIZER_FOLDER,
    Collection,
    is_source_name,
    open_collection,
    read_manifest,
    render_manifest,
)
from data_pipeline.spool import keep_stdin, spool_folder
from data_pipeline.unit import (
    Options,
    PrepareError,
    StopWork,
    Unit,
    Workplace,
    receipt_shards,
    run_unit,
    valid_receipt,
)
from tokenizer.codec import Codec

__all__ = ["Options", "PrepareError", "PrepareReport", "parse_inputs", "prepare"]

_ORPHANS_SECONDS = 10.0
_PLAIN_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class PrepareReport:
    """What a run of `prepare` did. Bytes are UTF-8 bytes of text, and tokens include EOS, of this run alone."""

    collection: Collection
    units: int
    units_done_before: int
    text_bytes: int
    tokens: int
    seconds: float


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
    options = options or Options()
    if workers < 1:
        raise PrepareError(f"{workers} workers cannot work; take 1 or more")
    uses_stdin = sum(list(places).count(STDIN) for places in inputs.values())
    if uses_stdin > 1:
        raise PrepareError("standard input can be read once; give --input NAME=- once")
    codec = Codec.load(tokenizer)
    _refuse_output_among_inputs(inputs, out)
    units, plan = _make_plan(inputs, options, codec, standard_input(stdin_kind))
    place = Workplace(out)
    _refuse_foreign_folder(place)
    place.state.mkdir(parents=True, exist_ok=True)
    if uses_stdin:
        with _only_writer(place):
            stdin = keep_stdin(place, stdin_kind)
        units, plan = _make_plan(inputs, options, codec, stdin)
    with _only_writer(place):
        place.receipts.mkdir(exist_ok=True)
        plan = _settle_plan(place, plan)
        if (out / MANIFEST_NAME).exists():
            collection = open_collection(out)
            _remove_receipts(place)
            return PrepareReport(collection, len(units), len(units), 0, 0, time.monotonic() - began_at)
        _clear_leftovers(place, list(inputs))
        codec.copy_to(out / TOKENIZER_FOLDER)
        receipts = {unit: receipt for unit in units if (receipt := valid_receipt(place, unit, codec))}
        done_before = len(receipts)
        missing = [unit for unit in units if unit not in receipts]
        counters = _Counters()
        with _reporting(counters, sum(unit.input_bytes for unit in missing)):
            for unit, receipt in _run_units(place, missing, options, codec, workers, strict, counters):
                receipts[unit] = receipt
        _finish(place, units, receipts, plan, codec)
        collection = open_collection(out)
        _remove_receipts(place)
    return PrepareReport(
        collection, len(units), done_before, counters.text_bytes, counters.tokens, time.monotonic() - began_at
    )


def _remove_receipts(place: Workplace) -> None:
    """What is needed only while a collection is not whole."""
    shutil.rmtree(place.receipts)
    if spool_folder(place).exists():
        shutil.rmtree(spool_folder(place))


# ---------------------------------------------------------------- plan


def _make_plan(
    inputs: Mapping[str, Sequence[Place]], options: Options, codec: Codec, stdin: Found
) -> tuple[list[Unit], dict[str, Any]]:
    """All units in order, and the record of everything the output depends on."""
    units: list[Unit] = []
    sources: dict[str, Any] = {}
    for name in sorted(inputs):
        listing = find_files(inputs[name], txt_documents=options.txt_documents, stdin=stdin)
        facts = {piece.path: one for piece, one in listing.files}
        units += [
            Unit(name, number, pieces, tuple(facts[piece.path] for piece in pieces))
            for number, pieces in enumerate(plan_units(listing.files, options.unit_bytes))
        ]
        sources[name] = {"files": [one.record() for one in facts.values()], "ignored": listing.ignored}
    plan = {
        "format": PLAN_FORMAT,
        "version": FORMAT_VERSION,
        "tokenizer": {"fingerprint": codec.fingerprint, "vocab_size": codec.vocab_size, "eos_id": codec.eos_id},
        "options": options.record(),
        "sources": sources,
    }
    return units, plan


def _refuse_output_among_inputs(inputs: Mapping[str, Sequence[Place]], out: Path) -> None:
    """A folder is read to its bottom: the next run would read what this one wrote."""
    places = (str(place).removeprefix("file://") for places in inputs.values() for place in places)
    for folder in (Path(place) for place in places if Path(place).is_dir()):
        if out.resolve().is_relative_to(folder.resolve()):
            raise PrepareError(f"{out}: lies inside the input {folder}; choose an --out outside of it")


def _refuse_foreign_folder(place: Workplace) -> None:
    out = place.out
    if out.exists() and not out.is_dir():
        raise PrepareError(f"{out}: not a folder; choose another --out")
    # Looked for in this order: another `prepare` that begins meanwhile writes its plan before anything else.
    if out.exists() and {entry.name for entry in out.iterdir()} - {".prepare"} and not (out / PLAN_PATH).exists():
        raise PrepareError(f"{out}: holds files that `prepare` did not make; choose another --out")


def _settle_plan(place: Workplace, plan: dict[str, Any]) -> dict[str, Any]:
    """Write the plan down, or compare it with the one that this folder was begun with; returns the one on disk."""
    path = place.out / PLAN_PATH
    if not path.exists():
        write_file(path, render_manifest(plan))
        return plan
    old, _ = read_manifest(path, PLAN_FORMAT)
    if difference := _difference(old, plan):
        raise PrepareError(f"{place.out}: {difference}; delete that folder to start anew, or choose another --out")
    return old


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """What sets a new plan apart from the one on disk, in words."""
    if old["tokenizer"] != new["tokenizer"]:
        was, now = (plan["tokenizer"]["fingerprint"][:12] for plan in (old, new))
        return f"it was begun with tokenizer {was}, not {now}"
    for option, default in asdict(Options()).items():
        was, now = (plan["options"].get(option, default) for plan in (old, new))
        if was != now:
            return f"it was begun with {option} = {was}, not {now}"
    if old["sources"].keys() != new["sources"].keys():
        return f"it was begun with the sources {', '.join(old['sources'])}, not {', '.join(new['sources'])}"
    for name, source in new["sources"].items():
        before = {facts["path"]: facts for facts in old["sources"][name]["files"]}
        after = {facts["path"]: facts for facts in source["files"]}
        if gone := before.keys() - after.keys():
            return f"{min(gone)} belonged to source {name} when it was begun, and does not now"
        if fresh := after.keys() - before.keys():
            return f"{min(fresh)} did not belong to source {name} when it was begun"
        for path, facts in after.items():
            if facts["size"] != before[path]["size"]:
                return f"{path} changed since it was begun (then {before[path]['size']} bytes, now {facts['size']})"
            if facts != before[path]:
                return f"{path} changed since it was begun (it was written to)"
        if list(before) != list(after):
            return f"the files of source {name} were given in another order when it was begun"
    return None


def _clear_leftovers(place: Workplace, sources: Sequence[str]) -> None:
    """Remove what a killed run was writing; only the one writer may do so."""
    for leftover in place.out.glob(f".{TOKENIZER_FOLDER}.*.partial"):
        shutil.rmtree(leftover)
    for name in sources:
        place.source(name).mkdir(exist_ok=True)
    sync_folder(place.out)
    for folder in (place.out, place.state, place.receipts, *map(place.source, sources)):
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()


# ---------------------------------------------------------------- one writer


@contextmanager
def _only_writer(place: Workplace) -> Iterator[None]:
    """Hold the folder against other runs, once the workers of a killed run are gone as well.

    The workers hold a lock of their own, shared: they end by themselves within a moment of their parent's death.
    """
    with (place.state / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrepareError(f"{place.out}: another `prepare` is writing there; wait for it to end") from None
        deadline = time.monotonic() + _ORPHANS_SECONDS
        with _workers_lock(place.state).open("ab") as workers:
            while not _try_lock(workers.fileno()):
                if time.monotonic() > deadline:
                    raise PrepareError(f"{place.out}: workers of a run that ended still write there; end them first")
                time.sleep(0.05)
        yield


def _workers_lock(state: Path) -> Path:
    return state / "workers.lock"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---------------------------------------------------------------- workers


class _Counters:
    """What all processes have done so far, and the sign to stop; shared memory, passed to workers as they start."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.get_context("spawn").Array("q", 4)

    def add(self, *, input_bytes: int = 0, text_bytes: int = 0, tokens: int = 0) -> None:
        with self._numbers.get_lock():
            for place, count in enumerate((input_bytes, text_bytes, tokens)):
                self._numbers[place] += count

    def stop(self) -> None:
        self._numbers.get_obj()[3] = 1

    def stopped(self) -> bool:
        return bool(self._numbers.get_obj()[3])

    @property
    def input_bytes(self) -> int:
        return int(self._numbers.get_obj()[0])

    @property
    def text_bytes(self) -> int:
        return int(self._numbers.get_obj()[1])

    @property
    def tokens(self) -> int:
        return int(self._numbers.get_obj()[2])


@dataclass(frozen=True)
class _WorkerState:
    place: Workplace
    options: Options
    codec: Codec
    strict: bool
    counters: _Counters


_worker: _WorkerState | None = None


def _start_worker(
    place: Workplace, options: Options, tokenizer: Path, strict: bool, counters: _Counters, parent: int
) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and tells us to stop
    lock = os.open(_workers_lock(place.state), os.O_RDONLY)  # kept open, and so locked, until this process ends
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _worker = _WorkerState(place, options, Codec.load(tokenizer), strict, counters)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def _work(unit: Unit) -> dict[str, Any]:
    assert _worker is not None, "the pool starts every worker with _start_worker"
    return run_unit(
        _worker.place, unit, _worker.options, _worker.codec, strict=_worker.strict, progress=_worker.counters
    )


def _run_units(
    place: Workplace,
    units: Sequence[Unit],
    options: Options,
    codec: Codec,
    workers: int,
    strict: bool,
    counters: _Counters,
) -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Each unit with its receipt, as they are done; the first error stops all."""
    workers = min(workers, len(units))
    if workers <= 1:
        for unit in units:
            yield unit, run_unit(place, unit, options, codec, strict=strict, progress=counters)
        return
    codec.say_note()  # the workers keep silent
    arguments = (place, options, place.out / TOKENIZER_FOLDER, strict, counters, os.getpid())
    context = multiprocessing.get_context("spawn")  # not fork: no lock and no thread of ours may leak into a worker
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=arguments)
    try:
        futures = {pool.submit(_work, unit): unit for unit in units}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise PrepareError(
            f"one of {workers} workers died, perhaps for want of memory; start again to continue, with fewer --workers"
        ) from None
    except StopWork:
        raise PrepareError("the work was stopped") from None
    finally:
        counters.stop()
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- manifests


def _finish(
    place: Workplace, units: Sequence[Unit], receipts: Mapping[Unit, dict[str, Any]], plan: dict[str, Any], codec: Codec
) -> None:
    """Write each source's ledger and manifest, then the collection's manifest, which makes it one."""
    hashes = {}
    for name, source in plan["sources"].items():
        own = [(unit, receipts[unit]) for unit in units if unit.source == name]
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
    if Codec.load(place.out / TOKENIZER_FOLDER).fingerprint != codec.fingerprint:
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


# ---------------------------------------------------------------- progress


@contextmanager
def _reporting(counters: _Counters, input_bytes: int) -> Iterator[None]:
    """Progress on stderr while the block runs: a bar on a terminal, else a line every ten seconds."""
    ended = threading.Event()
    report = _report_on_terminal if sys.stderr.isatty() else _report_in_lines
    thread = threading.Thread(target=report, args=(counters, input_bytes, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _rates(counters: _Counters, began_at: float) -> str:
    seconds = max(time.monotonic() - began_at, 1e-9)
    return f"{counters.text_bytes / seconds / 1e6:.1f} MB/s, {counters.tokens / seconds:,.0f} tokens/s"


def _report_on_terminal(counters: _Counters, input_bytes: int, ended: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    began_at = time.monotonic()
    columns = (TextColumn("prepare"), BarColumn(), TextColumn("{task.percentage:.0f} %  {task.fields[rates]}  ETA"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=input_bytes, rates="")
        while not ended.wait(0.25):
            bar.update(task, completed=counters.input_bytes, rates=_rates(counters, began_at))
        bar.update(task, completed=counters.input_bytes, rates=_rates(counters, began_at))


def _report_in_lines(counters: _Counters, input_bytes: int, ended: threading.Event) -> None:
    began_at = time.monotonic()
    while not ended.wait(_PLAIN_REPORT_SECONDS):
        done = min(counters.input_bytes / input_bytes, 1.0) if input_bytes else 1.0
        seconds = time.monotonic() - began_at
        eta = f"ETA {seconds / done - seconds:.0f} s" if done else "ETA unknown"
        print(f"prepare: {done:.1%} of the input, {_rates(counters, began_at)}, {eta}", file=sys.stderr, flush=True)
