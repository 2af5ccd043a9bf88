"""Command line of the tokenizer: train, encode, decode, report, export."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenizer.candidates import Candidate, open_candidate
from tokenizer.codec import Codec, TokenizerError
from tokenizer.export import export_hf
from tokenizer.progress import reading_progress, training_progress
from tokenizer.report import Placed, as_data, judge, remarks, table, total
from tokenizer.sample import Weighted, check_weight
from tokenizer.train import DEFAULT_SAMPLE_BYTES, train

if TYPE_CHECKING:
    from data_pipeline.corpus import Found, Listing

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")

app = typer.Typer(
    name="python -m tokenizer",
    help="Text to token ids and back: train, judge and use a SentencePiece tokenizer.",
    epilog="\b\nExamples:\n"
    "  python -m tokenizer train --input books/ --vocab-size 32000 --out tokenizers/books\n"
    "  python -m tokenizer report tokenizers/books --input held-out/",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

TextField = Annotated[
    str, typer.Option(help="JSON field or column of the text; a.b: field b of a; a,b: the first there.")
]
TxtDocuments = Annotated[str, typer.Option(metavar="file|block|line", help="What a document of a .txt file is.")]
StdinKind = Annotated[str, typer.Option(metavar="KIND", help="What comes on --input -: jsonl, txt, jsonl.gz, …")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A tokenizer folder.")]
InputFile = Annotated[Path | None, typer.Option("--file", help="Read from this file; - is standard input.")]


@app.command(
    "train",
    epilog="\b\nExamples:\n"
    "  python -m tokenizer train --input books/ --vocab-size 32000 --out tokenizers/books\n"
    "  python -m tokenizer train --input en.jsonl.zst --input zh.jsonl.zst=2 --vocab-size 4096 --out tokenizers/mixed\n"
    "  python -m tokenizer train --input code/ --vocab-size 32000 --no-split-by-script --out tokenizers/code\n"
    "  python -m tokenizer train --input chats/ --vocab-size 32000 --control-symbol '<|user|>' --reserve 16 "
    "--out tokenizers/chats",
)
def train_command(
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input", metavar="PATH[=WEIGHT]", help="File, folder, pattern, address, hf:NAME or -; =2: counts double."
        ),
    ],
    vocab_size: Annotated[int, typer.Option(help="Ids of the vocabulary, symbols and the 260 fixed ones included.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    model_type: Annotated[
        str, typer.Option(metavar="bpe|unigram", help="unigram trains slower and is encoded slower.")
    ] = "bpe",
    normalization: Annotated[
        str,
        typer.Option(metavar="identity|nfkc", help="nfkc makes characters alike for good; identity loses nothing."),
    ] = "identity",
    split: Annotated[
        str,
        typer.Option(metavar="documents|lines", help="Of documents, pieces may hold line breaks; of lines, none."),
    ] = "documents",
    split_by_script: Annotated[
        bool,
        typer.Option(
            "--split-by-script/--no-split-by-script",
            help="No piece mixes scripts, or punctuation with letters; without, code takes a tenth fewer tokens.",
        ),
    ] = True,
    control_symbols: Annotated[
        list[str] | None,
        typer.Option("--control-symbol", metavar="NAME", help="An id that no text ever becomes. Repeat for more."),
    ] = None,
    user_symbols: Annotated[
        list[str] | None,
        typer.Option(
            "--user-symbol",
            metavar="NAME",
            help="One id wherever a text spells it; SentencePiece itself encodes then, slower. Repeat for more.",
        ),
    ] = None,
    reserve: Annotated[int, typer.Option(min=0, help="Spare control symbols <|reserved_0|> and so on.")] = 0,
    vocab_multiple: Annotated[
        int, typer.Option(min=1, help="Round the vocabulary up to a multiple by further spare symbols.")
    ] = 1,
    sample_bytes: Annotated[
        int, typer.Option(help="Train on a random sample of at most this much text; memory is 13 to 27 times as much.")
    ] = DEFAULT_SAMPLE_BYTES,
    seed: Annotated[int, typer.Option(help="Chooses the sample.")] = 0,
    character_coverage: Annotated[
        float | None,
        typer.Option(help="Share of characters with a piece, 0.98 to 1. [default: fits the vocabulary]"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Changes the time only; unigram always takes 8. [default: all]")
    ] = None,
    text_field: TextField = "text",
    txt_documents: TxtDocuments = "file",
    stdin_kind: StdinKind = "jsonl",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer that stands at --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer from txt, jsonl, Parquet and Arrow files, addresses (s3://…), hf:NAME data sets, or -."""
    sources = _parse_weighted(inputs, txt_documents, stdin_kind)
    provenance: dict[str, object] = {}

    def texts() -> Iterator[Weighted]:
        with reading_progress("reading", _file_bytes(sources)) as on_bytes:
            for number, source in enumerate(sources):
                for text in source.texts(text_field, on_bytes):
                    yield Weighted(text, source.weight, number)
        dropped = sum((source.dropped for source in sources), Counter[str]())
        if dropped and not any(source.documents for source in sources):
            raise TokenizerError(f"no text to train on: everything was dropped ({_reasons(dropped)}); check --input")
        provenance["inputs"] = [source.provenance() for source in sources]

    with training_progress() as progress:
        result = train(
            texts(),
            out,
            vocab_size=vocab_size,
            model_type=model_type,
            normalization=normalization,
            split=split,
            split_by_script=split_by_script,
            control_symbols=control_symbols or (),
            user_symbols=user_symbols or (),
            reserve=reserve,
            vocab_multiple=vocab_multiple,
            sample_bytes=sample_bytes,
            seed=seed,
            character_coverage=character_coverage,
            threads=threads,
            overwrite=overwrite,
            provenance=provenance,
            on_notice=progress.say,
            on_progress=progress.show,
        )
    if as_json:
        print(json.dumps({**result.as_data(), **provenance}, ensure_ascii=False))
        return
    print(f"{out}: {result.summary()}")
    if len(sources) > 1:
        for number, source in enumerate(sources):
            print(f"  source    {source.name}: {result.source_summary(number)}")
    _print_left_out(sources)


@app.command(
    epilog="\b\nExamples:\n"
    "  python -m tokenizer encode tokenizers/books 'It was a dark night'\n"
    "  python -m tokenizer encode tokenizers/books --file chapter.txt --eos --json",
)
def encode(
    folder: Folder,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The text itself.")] = None,
    file: InputFile = None,
    bos: Annotated[bool, typer.Option("--bos", help="Put the begin id first.")] = False,
    eos: Annotated[bool, typer.Option("--eos", help="Put the end id last.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the ids of a text, in one line."""
    if text is not None and file is not None:
        raise TokenizerError("give either TEXT or --file, not both")
    if text is None and file is None:
        raise TokenizerError("no text to encode: give TEXT, or --file FILE (--file - reads standard input)")
    codec = Codec.load(folder)
    ids = codec.encode(_read_text(file) if file is not None else text or "", bos=bos, eos=eos)
    if as_json:
        print(json.dumps({"ids": ids, "pieces": [codec.piece(token_id) for token_id in ids]}, ensure_ascii=False))
    else:
        print(*ids)


@app.command(
    epilog="\b\nExamples:\n"
    "  python -m tokenizer decode tokenizers/books 412 97 2003\n"
    "  python -m tokenizer encode tokenizers/books --file a.txt > a.ids\n"
    "  python -m tokenizer decode tokenizers/books --file a.ids | cmp - a.txt",
)
def decode(
    folder: Folder,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[IDS]...", help="Ids, separated by spaces.")] = None,
    file: InputFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the text of ids, byte for byte: no line break is added, except on a terminal. Control ids give no text."""
    if ids and file is not None:
        raise TokenizerError("give either IDS or --file, not both")
    if not ids and file is None:
        raise TokenizerError("no ids to decode: give IDS, or --file FILE (--file - reads standard input)")
    codec = Codec.load(folder)
    words = (" ".join(ids) if ids else _read_text(file) if file is not None else "").split()
    wrong = next((word for word in words if not word.isdecimal() or len(word) > 20), None)
    if wrong is not None:
        raise TokenizerError(
            f"{wrong[:40]!r} is not an id; give numbers from 0 to {codec.vocab_size - 1}, separated by spaces"
        )
    text = codec.decode([int(word) for word in words])
    if as_json:
        print(json.dumps({"text": text}, ensure_ascii=False))
        return
    if sys.stdout is not None:  # as `>&-` leaves it
        sys.stdout.buffer.write(text.encode("utf-8") + (b"\n" if sys.stdout.isatty() else b""))


@app.command(
    "report",
    epilog="\b\nExamples:\n"
    "  python -m tokenizer report tokenizers/mixed --input english=en.jsonl.zst --input chinese=zh.jsonl.zst\n"
    "  python -m tokenizer report tokenizers/mixed --against gpt2/tokenizer.json --input held-out/ --plot out.png\n"
    "  python -m tokenizer report tokenizers/mixed --input held-out/ --json",
)
def report_command(
    folder: Annotated[
        str, typer.Argument(metavar="[NAME=]DIR", help="A tokenizer folder, or anything that --against takes.")
    ],
    inputs: Annotated[
        list[str], typer.Option("--input", metavar="[NAME=]PATH", help="A source; the same NAME joins paths.")
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]OTHER",
            help="Another tokenizer on the same text: a folder, a SentencePiece model or Hugging Face tokenizer.json.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a picture: .png, .svg or .pdf.")] = None,
    text_field: TextField = "text",
    txt_documents: TxtDocuments = "file",
    stdin_kind: StdinKind = "jsonl",
    as_json: AsJson = False,
) -> None:
    """Print how well tokenizers fit texts: bytes per token, byte fallback, vocabulary used, texts changed."""
    from tokenizer.plot import check_plot_path, draw

    if plot is not None:
        check_plot_path(plot)
    sources = _parse_named(inputs, txt_documents, stdin_kind)
    candidates = _open_candidates([folder, *(against or [])])
    with reading_progress("encoding", _file_bytes(sources)) as on_bytes:
        judged = [judge(candidates, source.name, source.placed(text_field, on_bytes)) for source in sources]
    if not any(one.documents for one in judged):
        raise TokenizerError("no text to report on; check --input")
    if plot is not None:
        draw(judged, plot)
    if as_json:
        dropped = {source.name: dict(source.dropped) for source in sources}
        ignored = {source.name: len(source.ignored) for source in sources}
        print(json.dumps({**as_data(judged), "dropped": dropped, "ignored_files": ignored}, ensure_ascii=False))
        return
    whole = total(judged)
    print(table([*judged, whole] if len(judged) > 1 else judged))
    print(remarks(whole))
    _print_left_out(sources)


class _Format(StrEnum):
    HF = "hf"


@app.command(
    epilog="\b\nExamples:\n"
    "  python -m tokenizer export tokenizers/books --format hf --out exported/books\n"
    "  python -m tokenizer export tokenizers/books --format hf --out exported/books --overwrite --json",
)
def export(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    form: Annotated[_Format, typer.Option("--format", help="hf: files for transformers' AutoTokenizer.")] = _Format.HF,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace exported files that stand at --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a tokenizer for other programs, its ids compared with SentencePiece's before."""
    assert form is _Format.HF
    done = export_hf(folder, out, overwrite=overwrite)
    if as_json:
        print(json.dumps({**vars(done), "folder": str(out)}))
        return
    print(
        f"{out}: {done.vocab_size} ids, {done.merges} merges; ids and texts equal to SentencePiece's on "
        f"{done.verified_texts} texts, {done.verified_bytes / 1e6:.2f} MB\n"
        "  a text that spells <s> or </s> is text; docs/tokenizer-export.md says what that means for prompts"
    )


@dataclass
class _Source:
    """One input and what came out of it."""

    name: str
    files: list[Found]
    ignored: list[str]  # files of other kinds in its folders
    weight: float = 1.0
    documents: int = 0
    text_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)

    def texts(self, text_field: str, on_bytes: Callable[[int], None]) -> Iterator[str]:
        """The texts of `placed`."""
        return (text for text, _ in self.placed(text_field, on_bytes))

    def placed(self, text_field: str, on_bytes: Callable[[int], None]) -> Iterator[Placed]:
        """All texts and where they stood; drops are counted by reason, and the first place of each reason is kept."""
        from data_pipeline.corpus import Dropped, read_piece

        for item in (item for piece, _ in self.files for item in read_piece(piece, text_field, on_bytes)):
            if isinstance(item, Dropped):
                self.dropped[item.reason] += 1
                self.first_dropped.setdefault(item.reason, f"{item.path}:{item.position} {item.detail}".rstrip())
                continue
            self.documents += 1
            self.text_bytes += len(item.text.encode("utf-8"))
            yield Placed(item.text, f"{item.path}:{item.position}")

    def provenance(self) -> dict[str, object]:
        """What the tokenizer's description keeps of this input: its name without the place on this machine, and
        counts.
        """
        from data_pipeline.corpus import shown

        return {
            "name": Path(shown(self.name)).name,
            "weight": self.weight,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "dropped": dict(sorted(self.dropped.items())),
            "ignored_files": len(self.ignored),
        }


def _parse_weighted(values: list[str], txt_documents: str, stdin_kind: str) -> list[_Source]:
    """PATH[=WEIGHT]; a path that exists as written is a path."""
    sources = []
    for value in values:
        path, mark, weight = value.rpartition("=")
        if not mark or Path(value).exists():
            path, weight = value, "1"
        try:
            number = float(weight)
        except ValueError:
            if "://" not in value:
                raise TokenizerError(
                    f"--input {value}: {weight!r} is not a weight; train takes PATH or PATH=WEIGHT, and no names"
                ) from None
            path, number = value, 1.0  # the = of a query
        check_weight(number)
        name, mark, named = path.partition("=")
        if mark and not Path(path).exists() and Path(named).exists():
            raise TokenizerError(f"--input {value}: train takes PATH or PATH=WEIGHT, and no names: leave out {name}=")
        listing = _find([path], txt_documents, stdin_kind)
        sources.append(_Source(path, listing.files, listing.ignored, number))
    return _only_one_stdin(sources)


def _parse_named(values: list[str], txt_documents: str, stdin_kind: str) -> list[_Source]:
    """[NAME=]PATH; without a name the path is the name."""
    paths: dict[str, list[str]] = {}
    for value in values:
        name, path = _split_name(value)
        before, mark, last = value.rpartition("=")
        if mark and _is_number(last) and "://" not in value and not Path(path).exists():
            raise TokenizerError(f"--input {value}: weights belong to train; report takes PATH or NAME=PATH: {before}")
        paths.setdefault(name or path, []).append(path)
    listings = {name: _find(of_name, txt_documents, stdin_kind) for name, of_name in paths.items()}
    return _only_one_stdin([_Source(name, found.files, found.ignored) for name, found in listings.items()])


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _find(paths: list[str], txt_documents: str, stdin_kind: str) -> Listing:
    from data_pipeline.corpus import as_txt_documents, find_files, standard_input

    mode = as_txt_documents(txt_documents)
    return find_files(paths, txt_documents=mode, stdin=standard_input(stdin_kind))


def _only_one_stdin(sources: list[_Source]) -> list[_Source]:
    from data_pipeline.corpus import STDIN

    if sum(piece.path == STDIN for source in sources for piece, _ in source.files) > 1:
        raise TokenizerError("standard input can be read once; give --input - once")
    return sources


def _open_candidates(values: list[str]) -> list[Candidate]:
    """[NAME=]PATH; without a name the last part of the path is the name, or the whole path where two would be equal."""
    pairs = [_split_name(value) for value in values]
    short = [name or Path(path).name or Path(path).resolve().name for name, path in pairs]
    names = [one if name or short.count(one) == 1 else path for one, (name, path) in zip(short, pairs, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TokenizerError(f"two tokenizers are called {twice}; write NAME=PATH with another name")
    return [open_candidate(Path(path), name) for name, (_, path) in zip(names, pairs, strict=True)]


def _split_name(value: str) -> tuple[str, str]:
    """NAME=PATH as a pair, the name empty where there is none; a path that exists as written is a path."""
    name, mark, path = value.partition("=")
    return (name, path) if mark and "://" not in name and not Path(value).exists() else ("", value)


def _file_bytes(sources: list[_Source]) -> int:
    return sum(facts.size for source in sources for _, facts in source.files)


def _print_left_out(sources: list[_Source]) -> None:
    """What of the inputs no tokenizer saw: documents dropped, files of other kinds."""
    for source in sources:
        if source.dropped:
            print(f"{source.name}: dropped {source.dropped.total()} documents: {_reasons(source.dropped)}")
            for reason, place in source.first_dropped.items():
                print(f"  first {reason}: {place}")
        if source.ignored:
            count, first = len(source.ignored), source.ignored[0]
            print(f"{source.name}: {count:,} files of other kinds passed over, the first {first}")


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())


def _read_text(file: Path) -> str:
    if str(file) == "-" and sys.stdin is None:  # as `<&-` leaves it
        raise TokenizerError("--file -: standard input is closed; name a file")
    raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not UTF-8 at byte {error.start}; convert it first") from error


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

    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and texts may hold what it can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)  # None, or the code of a typer.Exit
        print(end="", flush=True)  # does nothing where stdout is closed
    except BrokenPipeError:  # whoever read our output has left; without this, Python says so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (TokenizerError, CorpusError, OSError) as error:
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
