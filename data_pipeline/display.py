"""What the commands print for people, and how far long work is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from data_pipeline.inspection import Segment
from data_pipeline.origins import Lost, Origin
from data_pipeline.shards import Collection
from data_pipeline.steps import Steps
from data_pipeline.trace import TracedRead

if TYPE_CHECKING:
    from data_pipeline.prepare import PartReport, PrepareReport


def print_summary(collection: Collection) -> None:
    """Sums of each source and split, then what was dropped, noted and passed over."""
    print(f"{collection.path}: vocab size {collection.vocab_size}, tokenizer {collection.fingerprint[:12]}")
    print(f"{'source':<20} {'split':<10} {'documents':>12} {'tokens':>16} {'text bytes':>18} {'bytes/token':>11}")
    for name, source in collection.sources.items():
        for side, split in source.splits.items():
            ratio = f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "-"
            print(
                f"{name:<20} {side:<10} {split.documents:>12,} {split.tokens:>16,} {split.text_bytes:>18,} {ratio:>11}"
            )
    for name, source in collection.sources.items():
        dropped = sum(source.manifest["dropped"].values())
        read = source.manifest["documents_read"]
        print(f"{name}: {read:,} documents read = {read - dropped:,} kept + {dropped:,} dropped")
        for kind, word in (("dropped", "dropped"), ("notes", "noted")):
            for reason, count in source.manifest[kind].items():
                print(f"{name}: {count:,} {word}: {reason} (each in {source.path / 'ledger.jsonl'})")
        if ignored := source.manifest["provenance"]["ignored_files"]:
            print(f"{name}: {len(ignored):,} files of other kinds passed over, the first {ignored[0]}")
        if not source.splits["validation"].documents:
            print(f"{name}: no document was held out for validation (too few, or --validation-fraction too small)")


def done_text(report: PrepareReport | PartReport) -> str:
    """How much was done, and how fast, in one line."""
    megabytes, tokens = report.text_bytes / report.seconds / 1e6, report.tokens / report.seconds
    return (
        f"{report.units:,} units ({report.units_done_before:,} done before) in {report.seconds:.1f} s:"
        f" {megabytes:.1f} MB/s of text, {tokens:,.0f} tokens/s"
    )


def print_part(units: str, report: PartReport) -> None:
    """What one part came to, and what to do next."""
    if report.units_unhashed:
        print(
            f"part {units}: its documents are hashed; {report.units_unhashed:,} units of other parts are not yet. When "
            "all parts are, run them once more: then duplicates are known, and the rest is done"
        )
        return
    print(f"part {units}: {done_text(report)}")
    if report.units_left:
        print(
            f"{report.units_left:,} units of other parts are left; then end the work with this command without --units"
        )
    else:
        print("all units are done; end the work with this command without --units")


def print_segments(segments: list[Segment], places: dict[int, str], *, with_ids: bool) -> None:
    """Text with a rule wherever a document begins or ends."""
    for segment in segments:
        place = f", {places[segment.document]}" if segment.document in places else ""
        word = "document" if segment.begins else "within document"
        print(f"──── {word} {segment.document}{place}, {segment.tokens} tokens ────")
        print(segment.text)
        if with_ids:
            print(f"──── ids ────\n{' '.join(map(str, segment.ids))}")
        print("──── end of document (EOS) ────" if segment.ended else "──── goes on ────")


def print_traced(traced: TracedRead, steps: Steps, *, with_text: bool) -> None:
    """One read of `trace` for people: where, which tokens, and the text."""
    read, origin = traced.read, traced.origin
    place = (
        ""
        if origin is None
        else f", {origin.reason if isinstance(origin, Lost) else f'{origin.path}:{origin.position}'}"
    )
    print(
        f"──── step {steps.step_of(read.sample) + 1:,}, sample {read.sample:,}: {read.source} epoch {read.epoch}"
        f" window {read.window:,}, document {read.document:,}{place}, tokens {read.start:,} to {read.stop - 1:,} of"
        f" {read.document_tokens:,} ────"
    )
    if with_text:
        print(traced.text)
        if read.stop == read.document_tokens:
            print("──── end of document (EOS) ────")


def traced_as_json(traced: TracedRead, steps: Steps, with_text: bool) -> dict[str, Any]:
    """The same for programs."""
    origin = traced.origin
    return {
        "step": steps.step_of(traced.read.sample) + 1,
        **asdict(traced.read),
        "file": origin.path if isinstance(origin, Origin) else None,
        "position": origin.position if isinstance(origin, Origin) else None,
        "lost": origin.reason if isinstance(origin, Lost) else None,
        **({"text": traced.text} if with_text else {}),
    }


def rate_reporter(verb: str, total: int, unit: str, unit_size: float) -> Callable[[int], None]:
    """A hearer of what was done that says every ten seconds, on stderr, how far a long check is."""
    began_at = said_at = time.monotonic()
    done = 0

    def hear(count: int) -> None:
        nonlocal done, said_at
        done += count
        if (now := time.monotonic()) - said_at >= 10:
            said_at = now
            rate = done / (now - began_at)
            eta = f"{rate / unit_size:,.1f} {unit}/s, ETA {(total - done) / rate:.0f} s"
            print(
                f"{verb}: {done / unit_size:,.0f} of {total / unit_size:,.0f} {unit}, {eta}",
                file=sys.stderr,
                flush=True,
            )

    return hear
