"""python -m data_pipeline: corpora to token files (prepare), their check (verify), their content (inspect)."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from data_pipeline.inspection import Segment
    from data_pipeline.shards import Collection

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")

app = typer.Typer(
    help="Corpora to token files, their check, their content.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="\b\nExamples:\n"
    "  python -m data_pipeline prepare --input en=books/ --tokenizer tokenizers/x --out data/x\n"
    "  python -m data_pipeline inspect data/x --document 0",
)

_PREPARE_EXAMPLES = """\b
Examples:
  python -m data_pipeline prepare --input en=books.jsonl.zst --input zh=chinese/ --tokenizer tokenizers/x --out data/x
  python -m data_pipeline prepare --input 'code=src/**/*.txt' --tokenizer tokenizers/x --out data/code --workers 8
"""
_VERIFY_EXAMPLES = """\b
Examples:
  python -m data_pipeline verify data/x
  python -m data_pipeline verify data/x --full
"""
_INSPECT_EXAMPLES = """\b
Examples:
  python -m data_pipeline inspect data/x
  python -m data_pipeline inspect data/x --source en --document 0
  python -m data_pipeline inspect data/x --source en --split validation --window 3 --seq-len 256
"""


@app.command("prepare", epilog=_PREPARE_EXAMPLES)
def prepare_command(
    tokenizer: Annotated[Path, typer.Option(help="Folder of a tokenizer (`python -m tokenizer train`).")],
    out: Annotated[Path, typer.Option(help="Folder of the collection to make, or to finish.")],
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="[NAME=]PATH", help="File, folder or pattern; one NAME is one source. May be repeated."
        ),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[[NAME=]PATH]...", help="Further inputs.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all CPUs by default.")] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of documents held out, by hash of the text.")
    ] = 0.02,
    text_field: Annotated[str, typer.Option(help="JSON field or Parquet column of the text.")] = "text",
    min_chars: Annotated[int, typer.Option(help="Drop documents of fewer characters.")] = 0,
    max_chars: Annotated[int | None, typer.Option(help="Drop documents of more characters.")] = None,
    unit_bytes: Annotated[int, typer.Option(help="Input bytes of one unit of work, and so of one shard.")] = 64 << 20,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first document that cannot be read.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Make token files out of text: one data set a source, split in train and validation.

    Reads .txt (a document a file), .jsonl, .jsonl.gz, .jsonl.zst (a document a line) and .parquet (a row). The same
    command continues after any interruption, and the result is the same to the byte for any number of workers.
    """
    from data_pipeline.inspection import summarize
    from data_pipeline.prepare import Options, parse_inputs, prepare

    options = Options(text_field, validation_fraction, min_chars, max_chars, unit_bytes)
    report = prepare(
        parse_inputs([*(input or []), *(more or [])]),
        tokenizer,
        out,
        options,
        workers=workers or _available_cpus(),
        strict=strict,
    )
    result = {
        **summarize(report.collection),
        "units": report.units,
        "units_done_before": report.units_done_before,
        "seconds": report.seconds,
        "megabytes_per_second": report.text_bytes / report.seconds / 1e6,
        "tokens_per_second": report.tokens / report.seconds,
    }
    if json_output:
        _print_json(result)
        return
    _print_summary(report.collection)
    if report.units_done_before == report.units:
        print(f"{out} was complete already; checked (sizes, headers, manifests)")
    else:
        print(
            f"{report.units} units ({report.units_done_before} done before) in {report.seconds:.1f} s:"
            f" {result['megabytes_per_second']:.1f} MB/s of text, {result['tokens_per_second']:,.0f} tokens/s"
        )


@app.command("verify", epilog=_VERIFY_EXAMPLES)
def verify_command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A collection made by `prepare`.")],
    full: Annotated[bool, typer.Option("--full", help="Read every byte: CRC32, SHA-256, document ends, EOS.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Check a collection. Quick: manifests, tokenizer, sizes, headers. Exit 2 and one line on the first fault."""
    from data_pipeline.inspection import choose_codec, summarize
    from data_pipeline.verification import verify_collection

    began_at = time.monotonic()
    collection = verify_collection(path, full=False)
    if full:
        collection = verify_collection(path, full=True, on_bytes=_print_rate(_token_bytes(collection)))
    choose_codec(collection)
    seconds = time.monotonic() - began_at
    if json_output:
        _print_json({**summarize(collection), "ok": True, "full": full, "seconds": seconds})
        return
    _print_summary(collection)
    checked = "every byte" if full else "sizes, headers, manifests, tokenizer (--full reads every byte)"
    print(f"ok: {checked}, {seconds:.1f} s")


@app.command("inspect", epilog=_INSPECT_EXAMPLES)
def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A collection made by `prepare`.")],
    source: Annotated[str | None, typer.Option(help="Which source; needed where there are several.")] = None,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    document: Annotated[int | None, typer.Option(help="Show this document (0 is the first).")] = None,
    window: Annotated[int | None, typer.Option(help="Show this training window (0 is the first).")] = None,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a window.")] = 1024,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Show a collection's sums, or a document or window as text with the ends of documents."""
    from data_pipeline.inspection import choose_codec, choose_source, document_segments, summarize, window_segments
    from data_pipeline.shards import SPLITS, DataFormatError, open_collection

    collection = open_collection(path)
    if document is not None and window is not None:
        raise DataFormatError("say --document or --window, not both")
    side = next((one for one in SPLITS if one == split), None)
    if side is None:
        raise DataFormatError(f"there is no split {split!r}; say --split train or --split validation")
    shows_text = document is not None or window is not None
    chosen = choose_source(collection, source) if shows_text or source is not None else None
    if chosen is None or not shows_text:
        if json_output:
            _print_json(summarize(collection))
        else:
            _print_summary(collection)
        return
    codec = choose_codec(collection)
    if document is not None:
        segments = document_segments(chosen, side, document, codec)
    else:
        segments = window_segments(chosen, side, window or 0, seq_len, codec)
    if json_output:
        _print_json({"source": chosen.name, "split": side, "segments": [asdict(segment) for segment in segments]})
    else:
        _print_segments(segments)


def _available_cpus() -> int:
    """CPUs this process may use, where the system tells; else all it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_segments(segments: list[Segment]) -> None:
    for segment in segments:
        print(f"──── document {segment.document}, {segment.tokens} tokens ────")
        print(segment.text)
        print("──── end of document (EOS) ────" if segment.ended else "──── goes on ────")


def _print_summary(collection: Collection) -> None:
    print(f"{collection.path}: vocab size {collection.vocab_size}, tokenizer {collection.fingerprint[:12]}")
    print(f"{'source':<20} {'split':<10} {'documents':>12} {'tokens':>16} {'text bytes':>18} {'bytes/token':>11}")
    for name, source in collection.sources.items():
        for side, split in source.splits.items():
            ratio = f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "-"
            print(
                f"{name:<20} {side:<10} {split.documents:>12,} {split.tokens:>16,} {split.text_bytes:>18,} {ratio:>11}"
            )
    for name, source in collection.sources.items():
        for kind, word in (("dropped", "dropped"), ("notes", "noted")):
            for reason, count in source.manifest[kind].items():
                print(f"{name}: {count:,} {word}: {reason} (each in {source.path / 'ledger.jsonl'})")
        if ignored := source.manifest["provenance"]["ignored_files"]:
            print(f"{name}: {len(ignored):,} files of other kinds passed over, the first {ignored[0]}")
        if not source.splits["validation"].documents:
            print(f"{name}: no document was held out for validation (too few, or --validation-fraction too small)")


def _token_bytes(collection: Collection) -> int:
    """Size of all tokens on disk."""
    splits = [split for source in collection.sources.values() for split in source.splits.values()]
    return sum(shard.tokens * shard.token_bytes for split in splits for shard in split.shards)


def _print_rate(total: int) -> Callable[[int], None]:
    """A hearer of bytes read that says every ten seconds, on stderr, how far a long check is."""
    began_at = said_at = time.monotonic()
    done = 0

    def hear(count: int) -> None:
        nonlocal done, said_at
        done += count
        if (now := time.monotonic()) - said_at >= 10:
            said_at = now
            rate = done / (now - began_at)
            eta = f"{rate / 1e6:,.0f} MB/s, ETA {(total - done) / rate:.0f} s"
            print(f"verify: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {eta}", file=sys.stderr, flush=True)

    return hear


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, ensure_ascii=False, indent=2))


def _refuse_impostors() -> None:
    """Names like `model` stand on PyPI too: each package of ours must be the one beside this file."""
    root = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        place = next(filter(None, places), "nowhere")  # a folder without __init__.py has no origin
        if not Path(place).resolve().is_relative_to(root / name):
            print(f"error: package {name} would come from {place}, not from {root}: run from there", file=sys.stderr)
            raise SystemExit(2)


def _complain(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    """Run a verb. What a user can cause is one line on stderr and exit code 2; Ctrl-C is 130, a closed pipe 1."""
    _refuse_impostors()
    from data_pipeline.corpus import CorpusError
    from data_pipeline.prepare import PrepareError
    from data_pipeline.shards import DataFormatError
    from tokenizer.codec import TokenizerError

    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and texts may hold what it can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)  # None, or the code of a typer.Exit
        print(end="", flush=True)  # does nothing where stdout is closed
    except BrokenPipeError:  # whoever read our output has left; without this, Python says so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (CorpusError, DataFormatError, PrepareError, TokenizerError, OSError) as error:
        code = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # what usage errors have; typer gives them no public name
            raise
        code = _complain(f"{error.format_message().rstrip('.')}: see --help")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
