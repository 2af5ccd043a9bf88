"""python -m data_pipeline: corpora to token files, their check, their content, what a run read of them."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from data_pipeline.executors import Work
    from data_pipeline.shards import Collection

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")

app = typer.Typer(
    help="Corpora to token files, their check, their content, what a run read of them.",
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
  python -m data_pipeline prepare --input web=hf:HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer tokenizers/x --out data/web
  python -m data_pipeline prepare --input crawl=- --tokenizer tokenizers/x --out data/crawl < crawl.jsonl
  python -m data_pipeline prepare --input web=crawl/ --tokenizer tokenizers/x --out data/web --deduplicate
  python -m data_pipeline prepare --input web=crawl/ --tokenizer tokenizers/x --out data/web --units 3/8
  python -m data_pipeline prepare --input web=crawl/ --tokenizer tokenizers/x --out data/web --executor ray --tasks 64
  python -m data_pipeline prepare --input web=crawl/ --tokenizer tokenizers/x --out data/web --executor slurm --tasks 500 --slurm partition=cpu --slurm time=24:00:00
"""  # noqa: E501
_VERIFY_EXAMPLES = """\b
Examples:
  python -m data_pipeline verify data/x
  python -m data_pipeline verify data/x --full --sample 100
  python -m data_pipeline verify data/x --epoch --seq-len 2048
  python -m data_pipeline verify data/x --epoch --run runs/mini
"""
_INSPECT_EXAMPLES = """\b
Examples:
  python -m data_pipeline inspect data/x
  python -m data_pipeline inspect data/x --source en --document 0
  python -m data_pipeline inspect data/x --source en --split validation --window 3 --seq-len 256 --ids
  python -m data_pipeline inspect data/x --card card.md --plot lengths.png
"""
_TRACE_EXAMPLES = """\b
Examples:
  python -m data_pipeline trace runs/mini --step 1200
  python -m data_pipeline trace runs/mini --doc en:4711
  python -m data_pipeline trace runs/mini --step 1200 --no-files --json
"""
_PACK_EXAMPLES = """\b
Examples:
  python -m data_pipeline pack data/x --seq-len 2048
  python -m data_pipeline pack data/x --seq-len 1024 --json
"""
_CONVERT_EXAMPLES = """\b
Examples:
  python -m data_pipeline convert data/x --to megatron --out data/x-megatron
  python -m data_pipeline convert data/x --to llmc --out data/x-llmc
  python -m data_pipeline convert --from nanogpt --train owt=owt/train.bin --validation owt=owt/val.bin --tokenizer tokenizers/x --out data/owt
  python -m data_pipeline convert --from megatron --train en=en_text_document --validation-fraction 0.01 --tokenizer tokenizers/x --out data/en
"""  # noqa: E501


@app.command("prepare", epilog=_PREPARE_EXAMPLES)
def prepare_command(
    tokenizer: Annotated[Path, typer.Option(help="Folder of a tokenizer (`python -m tokenizer train`).")],
    out: Annotated[Path, typer.Option(help="Folder of the collection to make, or to finish.")],
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=]PATH",
            help="File, folder, pattern, address, hf:NAME or -; one NAME is one source. May be repeated.",
        ),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[[NAME=]PATH]...", help="Further inputs.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all CPUs by default.")] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of documents held out, by hash of the text.")
    ] = 0.02,
    text_field: Annotated[
        str, typer.Option(help="JSON field or column of the text; a.b: field b of a; a,b: the first there.")
    ] = "text",
    txt_documents: Annotated[
        str, typer.Option(metavar="file|block|line", help="What a document of a .txt file is; blank lines part blocks.")
    ] = "file",
    stdin_kind: Annotated[
        str, typer.Option(metavar="KIND", help="What comes on --input -: jsonl, txt, jsonl.gz, parquet, …")
    ] = "jsonl",
    min_chars: Annotated[int, typer.Option(help="Drop documents of fewer characters.")] = 0,
    max_chars: Annotated[int | None, typer.Option(help="Drop documents of more characters.")] = None,
    unit_bytes: Annotated[int, typer.Option(help="Input bytes of one unit of work, and so of one shard.")] = 64 << 20,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Of equal texts of a source keep the first; reads the input twice.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first document that cannot be read.")] = False,
    units: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Do the K-th of N parts of the units alone; without it, all that are left."),
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="local|datatrove|slurm|ray", help="Who runs the parts; datatrove's need --tasks.")
    ] = "local",
    tasks: Annotated[
        int | None, typer.Option(min=1, help="With another executor: parts to cut the work in, --workers at a time.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="KEY=VALUE", help="Option of sbatch; partition and time are needed."),
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Of another executor; OUT/.prepare/logs by default.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Make token files out of text: one data set a source, split in train and validation.

    Reads .txt, .jsonl and .ndjson (also .gz, .zst, .xz, .bz2), .parquet and .arrow files, folders that `datasets`
    saved, addresses that fsspec opens (s3://, hf://, https://), data sets by name (hf:NAME[@REVISION][:CONFIG[:SPLIT]])
    and standard input (-). The same command continues after any interruption, and the result is the same to the byte
    for any number of workers.
    """
    from data_pipeline.corpus import as_txt_documents
    from data_pipeline.display import done_text, print_part, print_summary
    from data_pipeline.executors import Work
    from data_pipeline.inspection import summarize
    from data_pipeline.prepare import Options, Part, PrepareError, parse_inputs, prepare, prepare_part

    options = Options(
        text_field, validation_fraction, min_chars, max_chars, unit_bytes, as_txt_documents(txt_documents), deduplicate
    )
    others = (tasks, slurm, logs)
    if tasks is None if executor != "local" else any(one is not None for one in others):
        raise PrepareError("--tasks, --slurm and --logs are for --executor datatrove, slurm or ray, which need --tasks")
    inputs = parse_inputs([*(input or []), *(more or [])])
    if units is not None:
        if tasks is not None:
            raise PrepareError("--units is one part by hand, --executor runs all of them; say one of the two")
        part = Part.parse(units)
        done = prepare_part(
            inputs, tokenizer, out, options, part=part, workers=workers or _available_cpus(), strict=strict
        )
        _print_json(asdict(done)) if json_output else print_part(units, done)
        return
    if tasks is not None:
        work = Work(inputs, tokenizer, out, options, strict, Path.cwd())
        if not _done_by_executor(executor, work, tasks, workers, logs, slurm or []):
            print(f"submitted; the last job ends the work. Logs: {logs or out / '.prepare' / 'logs'}")
            return
    report = prepare(
        inputs, tokenizer, out, options, workers=workers or _available_cpus(), strict=strict, stdin_kind=stdin_kind
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
    print_summary(report.collection)
    if tasks is not None:
        print(f"{report.units:,} units, done by {executor} in {tasks:,} parts")
    elif report.found_whole:
        print(f"{out} was complete already; checked (sizes, headers, manifests)")
    elif report.units_done_before == report.units:
        print(f"all {report.units:,} units were done before; wrote the manifests that make {out} a collection")
    else:
        print(done_text(report))


@app.command("verify", epilog=_VERIFY_EXAMPLES)
def verify_command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A collection made by `prepare` or `convert`.")],
    full: Annotated[bool, typer.Option("--full", help="Read every byte: CRC32, SHA-256, document ends, EOS.")] = False,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Tokenize K documents again from their source files.")
    ] = None,
    epoch: Annotated[
        bool, typer.Option("--epoch", help="Count that 1 to 4 ranks read every window exactly once an epoch.")
    ] = False,
    run: Annotated[Path | None, typer.Option(help="For --epoch: count what this run reads, to its last step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="For --epoch without --run: tokens in a window.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the documents drawn, and of the order without --run.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Check a collection. Quick: manifests, tokenizer, sizes, headers. Exit 2 and one line on the first fault."""
    from data_pipeline.display import print_summary, rate_reporter
    from data_pipeline.inspection import choose_codec, summarize
    from data_pipeline.shards import DataFormatError
    from data_pipeline.verification import verify_collection, verify_sample

    if epoch and (run is None) == (seq_len is None):
        raise DataFormatError("--epoch needs to know the windows: say --seq-len, or --run with a run directory")
    began_at = time.monotonic()
    collection = verify_collection(path, full=False)
    if full:
        hear = rate_reporter("verify", _token_bytes(collection), "MB", 1e6)
        collection = verify_collection(path, full=True, on_bytes=hear)
    codec = choose_codec(collection)
    report: dict[str, Any] = {}
    if sample is not None:
        sampled = verify_sample(collection, codec, sample, seed=seed)
        if sampled.lost:
            raise DataFormatError(f"{collection.path}: {sampled.describe_lost()}")
        report["sample"] = {"documents_equal": sampled.equal}
    if epoch:
        report["epoch"] = _count_epochs(collection, run, seq_len or 0, seed)
    seconds = time.monotonic() - began_at
    if json_output:
        _print_json({**summarize(collection), "ok": True, "full": full, **report, "seconds": seconds})
        return
    print_summary(collection)
    if sample is not None:
        print(f"sample: {report['sample']['documents_equal']} documents give the stored ids from their source files")
    for one in report.get("epoch", []):
        whole = f"{one['epochs']:,} whole epochs of {one['windows']:,} windows, each window once"
        begun = f"{one['windows_begun']:,} windows of an epoch begun, none twice"
        said = "; ".join([*([whole] if one["epochs"] else []), *([begun] if one["windows_begun"] else [])])
        print(f"epoch: {one['ranks']} ranks, {one['source']}: {said or 'not read'}")
    checked = "every byte" if full else "sizes, headers, manifests, tokenizer (--full reads every byte)"
    print(f"ok: {checked}, {seconds:.1f} s")


@app.command("inspect", epilog=_INSPECT_EXAMPLES)
def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A collection made by `prepare` or `convert`.")],
    source: Annotated[str | None, typer.Option(help="Which source; needed where there are several.")] = None,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    document: Annotated[int | None, typer.Option(help="Show this document (0 is the first).")] = None,
    window: Annotated[int | None, typer.Option(help="Show this training window (0 is the first).")] = None,
    seq_len: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Tokens in a window.")] = 1024,
    ids: Annotated[bool, typer.Option("--ids", help="Show the token ids too.")] = False,
    no_files: Annotated[bool, typer.Option("--no-files", help="Do not look for the documents' source files.")] = False,
    card: Annotated[Path | None, typer.Option(help="Write a data card (Markdown) to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw document lengths into this .png, .svg or .pdf.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Show a collection's sums, or a document or window as text: where each document begins, ends and came from."""
    from data_pipeline.display import print_segments, print_summary
    from data_pipeline.inspection import (
        choose_codec,
        choose_source,
        document_segments,
        find_places,
        summarize,
        window_segments,
    )
    from data_pipeline.shards import SPLITS, DataFormatError, open_collection

    collection = open_collection(path)
    if document is not None and window is not None:
        raise DataFormatError("say --document or --window, not both")
    side = next((one for one in SPLITS if one == split), None)
    if side is None:
        raise DataFormatError(f"there is no split {split!r}; say --split train or --split validation")
    shows_text = document is not None or window is not None
    chosen = choose_source(collection, source) if shows_text or source is not None else None
    if card is not None or plot is not None:
        _write_card(collection, card, plot, seq_len)
    if chosen is None or not shows_text:
        if json_output:
            _print_json(summarize(collection))
        else:
            print_summary(collection)
        return
    codec = choose_codec(collection)
    if document is not None:
        segments = document_segments(chosen, side, document, codec)
    else:
        segments = window_segments(chosen, side, window or 0, seq_len, codec)
    places = {} if no_files else find_places(chosen, side, [segment.document for segment in segments])
    if json_output:
        shown = [
            {
                **{key: value for key, value in asdict(segment).items() if ids or key != "ids"},
                "place": places.get(segment.document),
            }
            for segment in segments
        ]
        _print_json({"source": chosen.name, "split": side, "segments": shown})
    else:
        print_segments(segments, places, with_ids=ids)


@app.command("pack", epilog=_PACK_EXAMPLES)
def pack_command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A collection made by `prepare` or `convert`.")],
    seq_len: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Slots of a row: the recipe's model.seq_len.")],
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Plan the rows for a recipe with data.packing = "best_fit": documents whole wherever they fit.

    Written beside the data, from the document ends alone, the same bytes whenever it is made. Also says what this
    packing and windows over the stream cut, pad and drop.
    """
    from data_pipeline.packing_plan import make_plan, packing_figures
    from data_pipeline.shards import open_collection

    began_at = time.monotonic()
    collection = open_collection(path)
    plan, is_new = make_plan(collection, seq_len)
    packed = packing_figures(collection, "best_fit", seq_len, plan)
    windows = packing_figures(collection, "concat", seq_len, None)
    seconds = time.monotonic() - began_at
    if json_output:
        figures = {
            name: {"best_fit": packed[name].to_dict(), "concat": windows[name].to_dict()} for name in plan.sources
        }
        facts = {"plan": str(plan.folder), "made_now": is_new, "plan_sha256": plan.planned.sha256}
        _print_json({**facts, "sources": figures, "seconds": seconds})
        return
    for name in plan.sources:
        print(f"{name}, best_fit: {packed[name].to_text()}")
        print(f"{name}, concat:   {windows[name].to_text()}")
    print(f"{plan.folder}: {'written whole' if is_new else 'was complete already; checked'}, {seconds:.1f} s")


@app.command("trace", epilog=_TRACE_EXAMPLES)
def trace_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `pretrain run`.")],
    step: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="List the documents that this step read (1 is the first).")
    ] = None,
    doc: Annotated[
        str | None, typer.Option(metavar="[SOURCE:]D", help="List the steps that read this document of training text.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="For --doc: look at so many steps; else at all so far.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The collection, where it is no longer where the recipe says.")
    ] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="List places only.")] = False,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Do not look for source files (it reads the documents' units again).")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Say which documents a step of a run read, or which steps read a document. Steps count as in metrics.jsonl.

    Nothing was logged for this: the order of data is arithmetic. The run's newest checkpoint must agree with the
    collection, in order, batch sizes and in a hash of the tokens.
    """
    from data_pipeline.display import print_traced, traced_as_json
    from data_pipeline.inspection import choose_codec
    from data_pipeline.recorded_run import read_run
    from data_pipeline.shards import DataFormatError
    from data_pipeline.trace import with_texts

    if (step is None) == (doc is None):
        raise DataFormatError("say --step N or --doc SOURCE:D, one of the two")
    recorded = read_run(run, data)
    run_steps = recorded.steps
    if step is not None:
        part, reads = recorded.documents_of(step)
        asked: dict[str, Any] = {"step": step, "reached": step <= recorded.step, "left_out": step in recorded.left_out}
    else:
        part = recorded.asked_of()
        name, colon, number = (doc or "").rpartition(":")
        if not colon and len(part.order.tokens) == 1:
            (name,) = part.order.tokens
        if not name or not (number.isascii() and number.isdecimal()):
            raise DataFormatError(f"--doc {doc}: say SOURCE:D, such as en:4711 (0 is the first)")
        looked_at = recorded.step if steps is None else steps
        try:
            part, reads, others = recorded.reads_of(name, int(number), looked_at)
        except DataFormatError:
            raise
        except ValueError as error:
            raise DataFormatError(f"{part.collection.path}: {error}") from None
        asked = {"source": name, "document": int(number), "steps": looked_at, "left_out": sorted(recorded.left_out)}
        for other in others:
            first, last = (run_steps.step_of(sample) + 1 for sample in (other.start, other.stop - 1))
            print(
                f"{run}: steps {first:,} to {last:,} read other text as {name}, or none: name that data with --data",
                file=sys.stderr,
            )
    traced = with_texts(part.collection, part.streams, reads, choose_codec(part.collection), with_files=not no_files)
    if recorded.checked_against is None:
        print(f"{run}: no checkpoint yet, so only the recipe says what it reads", file=sys.stderr)
    if json_output:
        facts = {
            "run": str(run), "collection": str(part.collection.path),
            "global_batch_size": run_steps.global_batch_size, "run_step": recorded.step,
            "checked_against": recorded.checked_against and str(recorded.checked_against),
        }  # fmt: skip
        if run_steps.ramp:
            facts["batch_ramp"] = run_steps.ramp
        if recorded.history.changes:
            facts["changes"] = [
                {"step": change.global_step, "changed": list(change.changed)} for change in recorded.history.changes
            ]
        _print_json({**facts, **asked, "reads": [traced_as_json(one, run_steps, not no_text) for one in traced]})
        return
    if step is not None:
        reached = "" if step <= recorded.step else f" (not reached yet: the run is at step {recorded.step:,})"
        numbers = run_steps.samples(step - 1)
        print(f"{run}, step {step:,}: samples {numbers[0]:,} to {numbers[-1]:,}{reached}")
        if step in recorded.left_out:
            print("left out: the run went back for an alarm in this step, and learns nothing from it")
    else:
        print(f"{run}, steps 1 to {asked['steps']:,}: document {name}:{number} was read {len(traced):,} times")
        for passed in sorted({run_steps.step_of(one.read.sample) + 1 for one in traced} & recorded.left_out):
            print(f"step {passed:,} is left out: the run went back for an alarm in it, and learns nothing from it")
    for one in traced:
        print_traced(one, run_steps, with_text=not no_text)


@app.command("convert", epilog=_CONVERT_EXAMPLES)
def convert_command(
    out: Annotated[Path, typer.Option(help="Folder to make; it must not exist.")],
    path: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="With --to: a collection.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="megatron, nanogpt or llmc: write their files.")] = None,
    origin: Annotated[str | None, typer.Option("--from", help="megatron, nanogpt or llmc: read their files.")] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="With --from: a file, pattern, or Megatron prefix. May be repeated."),
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]PATH", help="The same, of the text held out.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --from: the tokenizer that the ids were made with.")
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="With --from, without --validation: share of documents held out, by hash.")
    ] = 0.0,
    eos: Annotated[
        str | None,
        typer.Option(help="Where EOS stands in their documents: first (default for llmc) or last (for nanogpt)."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Token files of Megatron, nanoGPT and llm.c out of a collection (--to), or a collection out of them (--from).

    Ids stay as they are, in the same order. Of their files only Megatron's say where documents end; in the others EOS
    does. Written whole or not at all.
    """
    from data_pipeline.convert import export_tokens, import_tokens
    from data_pipeline.display import print_summary, rate_reporter
    from data_pipeline.inspection import summarize
    from data_pipeline.prepare import parse_inputs
    from data_pipeline.shards import DataFormatError, open_collection
    from data_pipeline.token_formats import EOS_PLACES, FORMATS

    form = next((one for one in FORMATS if one == (to or origin)), None)
    place = next((one for one in EOS_PLACES if one == eos), None)
    if (to is None) == (origin is None) or form is None or (eos is not None and place is None):
        raise DataFormatError("say --to or --from, with megatron, nanogpt or llmc; --eos is first or last")
    began_at = time.monotonic()
    if to is not None:
        if path is None or train or validation or tokenizer or eos or validation_fraction:
            raise DataFormatError("--to takes a collection and --out, nothing else")
        collection = open_collection(path)
        hear = rate_reporter("convert", _token_bytes(collection), "MB", 1e6)
        files = export_tokens(collection, form, out, on_bytes=hear)
        if json_output:
            _print_json({"out": str(out), "files": [str(file) for file in files]})
            return
        for file in files:
            print(f"{file}  {file.stat().st_size:,} bytes")
    else:
        if path is not None or not train or tokenizer is None:
            raise DataFormatError("--from needs --train [NAME=]PATH and --tokenizer, and takes no DIR")
        collection = import_tokens(
            form, _as_paths(parse_inputs(train)), _as_paths(parse_inputs(validation) if validation else {}),
            tokenizer, out, eos=place, validation_fraction=validation_fraction,
        )  # fmt: skip
        if json_output:
            _print_json(summarize(collection))
            return
        print_summary(collection)
    print(f"{out}: written whole, {time.monotonic() - began_at:.1f} s")


def _as_paths(inputs: dict[str, list[Path | str]]) -> dict[str, list[Path]]:
    return {name: [Path(place) for place in places] for name, places in inputs.items()}


def _count_epochs(collection: Collection, run: Path | None, seq_len: int, seed: int) -> list[dict[str, Any]]:
    """Coverage by 1 to 4 ranks, ready for JSON: of a run to its last step, or until every source has had an epoch."""
    from data_pipeline.coverage import RANKS, prove_coverage, samples_of_an_epoch
    from data_pipeline.display import rate_reporter
    from data_pipeline.order import SampleOrder
    from data_pipeline.recorded_run import read_run
    from data_pipeline.shards import DataFormatError

    if run is not None:
        recorded = read_run(run, collection.path)
        if recorded.earlier:
            first = recorded.steps.step_of(recorded.order.first_sample) + 1
            raise DataFormatError(
                f"{run} changed its data or windows before step {first:,}: --epoch counts runs of one order of data, "
                "leave out --run to count an epoch of these"
            )
        order, micro_batch_size = recorded.order, recorded.micro_batch_size
        samples = recorded.steps.samples_before(recorded.max_steps)
        if samples > 2**62:
            raise DataFormatError(f"{run}: {samples:,} samples to max_steps are too many to count: 2^62 at most")
    else:
        tokens = {name: source.splits["train"].tokens for name, source in collection.sources.items()}
        try:
            order = SampleOrder(seed=seed, seq_len=seq_len, tokens=tokens)
        except ValueError as error:
            raise DataFormatError(f"{collection.path}: {error}") from None
        samples, micro_batch_size = samples_of_an_epoch(order), 8
    hear = rate_reporter("epoch", samples * len(RANKS), "million samples", 1e6)
    return [asdict(one) for one in prove_coverage(order, samples, micro_batch_size=micro_batch_size, on_samples=hear)]


def _write_card(collection: Collection, card: Path | None, plot: Path | None, seq_len: int) -> None:
    from data_pipeline.card import check_picture, check_target, make_card, plot_lengths, render_card
    from data_pipeline.durable import telling_full_disk, write_file
    from data_pipeline.inspection import choose_codec

    if plot is not None:
        check_picture(plot)
    for target in (card, plot):
        if target is not None:
            check_target(target)
    made = make_card(collection, choose_codec(collection), seq_len=seq_len)
    if plot is not None:
        with telling_full_disk(plot):
            plot_lengths(made, plot)
    if card is not None:
        picture = os.path.relpath(plot, card.parent) if plot is not None else None
        with telling_full_disk(card):
            write_file(card, render_card(made, picture).encode())


def _available_cpus() -> int:
    """CPUs this process may use, where the system tells; else all it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _done_by_executor(
    executor: str, work: Work, tasks: int, workers: int | None, logs: Path | None, slurm: list[str]
) -> bool:
    from data_pipeline.executors import EXECUTORS, run_parts
    from data_pipeline.prepare import PrepareError

    name = next((one for one in EXECUTORS if one == executor), None)
    if name is None:
        raise PrepareError(f"there is no executor {executor!r}; say local, {', '.join(EXECUTORS)}")
    pairs = [text.partition("=") for text in slurm]
    if wrong := next((key for key, equals, _ in pairs if not (key and equals)), None):
        raise PrepareError(f"--slurm {wrong}: say KEY=VALUE, such as partition=cpu")
    if slurm and name != "slurm":
        raise PrepareError(f"--slurm is for --executor slurm, not {name}")
    at_once = workers or (_available_cpus() if name == "datatrove" else tasks)
    return run_parts(
        work, name, tasks=tasks, workers=at_once, logs=(logs or work.out / ".prepare" / "logs").absolute(),
        slurm={key: value for key, _, value in pairs},
    )  # fmt: skip


def _token_bytes(collection: Collection) -> int:
    """Size of all tokens on disk."""
    splits = [split for source in collection.sources.values() for split in source.splits.values()]
    return sum(shard.tokens * shard.token_bytes for split in splits for shard in split.shards)


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
    if sys.stderr is None:  # as `2>&-` leaves it; print would take stdout for it
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8", errors="replace")  # noqa: SIM115
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
