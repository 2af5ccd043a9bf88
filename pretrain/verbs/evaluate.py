"""pretrain evaluate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pretrain.verbs.options import AsJson, Asked
from pretrain.verbs.telling import memory_told, progress

if TYPE_CHECKING:
    from pretrain.evaluation import Difference, Evaluation, Score

EXAMPLES = """
python -m pretrain evaluate runs/mini
python -m pretrain evaluate runs/mini/checkpoints/step-00001000 --data data/mine --json
python -m pretrain evaluate exported/mini --data news=news.jsonl --data code=src.txt --stride 256
python -m pretrain evaluate runs/mini --against runs/other --data news.jsonl --plot context.png
python -m pretrain evaluate runs/mini --set model.seq_len=4096 --set model.rope_base=5e5 --plot context.png
deepspeed --module pretrain evaluate runs/mini
"""


FEW = 20  # documents, below which a standard error is itself uncertain by a sixth or more: 1 / √(2 (n − 1))


class _Documents(StrEnum):
    PACKED = "packed"
    ALONE = "alone"


class _TxtDocuments(StrEnum):
    FILE = "file"
    BLOCK = "block"
    LINE = "line"


def evaluate(
    asked: Asked,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR|[NAME=]FILE",
            help="A collection's held-out text, or text itself as prepare takes it; the run's own data if not given.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN|CHECKPOINT|DIR", help="Is it better than this one, and how surely."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="New tokens a window scores: fewer, more context; all if not given."),
    ] = None,
    documents: Annotated[
        _Documents | None,
        typer.Option(help="packed: one behind the other, as in training (a collection's default); alone (files')."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=65536, metavar="N", help="Sequences scored at a time.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Score at most so many tokens of each source.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Loss by tokens of context: .png, .svg or .pdf.")
    ] = None,
    text_field: Annotated[str, typer.Option(metavar="NAME", help="Of files with fields.")] = "text",
    txt_documents: Annotated[
        _TxtDocuments, typer.Option(help="What one document of a .txt file is.")
    ] = _TxtDocuments.FILE,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Read the weights with another model.seq_len, model.rope_base, model.rope_scaling…; not --against's.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How well a model predicts text: loss, perplexity, bits per byte and character, by source and by language."""
    from pretrain.context_plot import check_path, draw
    from pretrain.engine import process_group
    from pretrain.evaluation import differences, evaluate_subject, own_data, texts_for
    from pretrain.runtime import Ranks
    from pretrain.subject import describes_a_run_still_written, open_subject

    if plot is not None:
        check_path(plot)
    ranks = Ranks(0, 0, 1, os.environ.get("DS_ACCELERATOR"))
    if "LOCAL_RANK" in os.environ:
        ranks = Ranks.from_environment(os.environ)
    evaluations: list[Evaluation] = []
    smaller = f"set --batch-size below {batch_size}" if batch_size > 1 else "use a machine or a GPU with more memory"
    with memory_told(smaller), ExitStack() as group:
        for path in (asked, *([against] if against is not None else [])):
            said = describes_a_run_still_written(path)
            if said is not None and ranks.is_first:
                print(f"note: {said}", file=sys.stderr)
            subject = open_subject(
                path, accelerator=ranks.accelerator, local_rank=ranks.local_rank,
                overrides=(overrides or ()) if not evaluations else (),
            )  # fmt: skip
            if ranks.world_size > 1 and not evaluations:
                group.enter_context(process_group(subject.device))
            with progress("tokenized", "tokens", shown=ranks.is_first) as show:
                texts = texts_for(
                    subject, data or (), text_field=text_field, txt_documents=txt_documents.value,
                    max_tokens=max_tokens, on_tokens=lambda tokens: show(tokens, None),
                )  # fmt: skip
            data = data or [str(own_data(subject))]  # the other is asked about the same
            with progress("scored", "tokens", shown=ranks.is_first) as show:
                evaluations.append(
                    evaluate_subject(
                        subject, texts, documents=None if documents is None else documents.value, stride=stride,
                        batch_size=batch_size, max_tokens=max_tokens, ranks=ranks, on_tokens=show,
                    )
                )  # fmt: skip
    if not ranks.is_first:
        return
    found = differences(*evaluations) if against is not None else {}
    if plot is not None:
        draw(evaluations, plot)
        print(f"written: {plot}", file=sys.stderr)
    if as_json:
        report = evaluations[0].to_dict() | ({"dropped": dict(texts.dropped)} if texts.dropped else {})
        if found:
            report["against"] = evaluations[1].to_dict()
            report["difference"] = {name: one.to_dict() for name, one in found.items()}
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    for evaluation in evaluations:
        _print(evaluation)
    if texts.dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in texts.dropped.most_common())
        print(f"not scored: {reasons}")
    if found:
        _print_differences(evaluations, found)


def _print(evaluation: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    rule = evaluation.rule
    how = "one behind the other" if rule.documents == "packed" else "each alone"
    print(f"{evaluation.subject}: documents {how}, windows of {rule.seq_len} tokens, stride {rule.stride}")
    columns = ["documents", "tokens", "loss", "±", "perplexity", "bits/byte", "±", "bits/char", "unigram", "uniform"]
    table = Table("", *columns)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name, score in evaluation.scores.items():
        table.add_row(name, *_row(score))
    table.add_section()
    for name, score in evaluation.languages.items():
        table.add_row(name, *_row(score))
    console = Console()
    console.width = max(console.width, 130)
    console.print(table)
    print("loss, unigram and uniform in nats per token; ± one standard error, over documents; bits of the source text")


def _row(score: Score) -> list[str]:
    def shown(value: float | None, digits: int = 4) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    about = "" if score.bytes_exact else "~"
    return [
        f"{score.documents:,}", f"{score.tokens:,}", shown(score.loss), shown(score.standard_error),
        shown(score.perplexity, 3), about + shown(score.bits_per_byte), shown(score.bits_per_byte_standard_error),
        about + shown(score.bits_per_character), shown(score.unigram), shown(score.uniform),
    ]  # fmt: skip


def _print_differences(evaluations: Sequence[Evaluation], found: dict[str, Difference]) -> None:
    one, other = (evaluation.subject for evaluation in evaluations)
    print(f"\nbits per byte of {one} less those of {other}, on the same documents:")
    if evaluations[0].rule != evaluations[1].rule:
        print("(each by its own windows: with unequal context they are not compared as models alone)")
    for name, difference in found.items():
        error, errors = difference.standard_error, difference.errors
        spread = "" if error is None else f" ± {error:.5f}"
        verdict = "one document cannot tell how surely" if error is None else "no difference"
        if errors is not None:
            better = one if errors < 0 else other
            verdict = (
                f"{abs(errors):.1f} standard errors: {better} is better"
                if abs(errors) >= 2
                else (f"{abs(errors):.1f} standard errors: these documents do not tell which is better")
            )
        few = f" (only {difference.documents} documents: too few to be sure of ±)" if difference.documents < FEW else ""
        print(f"  {name}: {difference.bits_per_byte:+.5f}{spread}   {verdict}{few}")
