"""pretrain tasks."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pretrain.verbs.options import AsJson, Asked
from pretrain.verbs.telling import memory_told, progress

if TYPE_CHECKING:
    from pretrain.tasks import Paired, Result

EXAMPLES = """
python -m pretrain tasks runs/mini
python -m pretrain tasks runs/mini --task continuations-chinese --task mine.jsonl --json
python -m pretrain tasks runs/mini --against exported/other
python -m pretrain tasks runs/mini --harness hellaswag --harness lambada_openai --limit 200
"""


def tasks(
    asked: Asked,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="One of ours, or questions in a .jsonl; all of ours if not given."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN|CHECKPOINT|DIR", help="Ask this one too, and tell the difference."),
    ] = None,
    harness: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A task of lm-evaluation-harness. May be repeated.")
    ] = None,
    include: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --harness: the tasks of this folder instead, as YAML.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="With --harness: examples before each question.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --harness: the first N questions of a task alone.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=65536, metavar="N", help="Texts scored at a time.")] = 8,
    as_json: AsJson = False,
) -> None:
    """How many questions a model gets right: local files of choices and gaps, or tasks of lm-evaluation-harness."""
    from pretrain.config import RecipeError
    from pretrain.subject import open_subject
    from pretrain.tasks import Paired, answer, own_tasks, read_task

    if harness and (task or against is not None):
        raise RecipeError("--harness asks on its own: leave out --task and --against")
    if not harness and (include is not None or num_fewshot is not None or limit is not None):
        raise RecipeError("--include, --num-fewshot and --limit are for --harness: name a task with it")
    if harness and importlib.util.find_spec("lm_eval") is None:
        raise RecipeError("--harness needs lm-evaluation-harness: pip install -e '.[eval]'")
    found = [read_task(place) for place in task or own_tasks()] if not harness else []
    smaller = f"set --batch-size below {batch_size}" if batch_size > 1 else "use a machine or a GPU with more memory"
    with memory_told(smaller):
        subjects = [
            open_subject(path, accelerator=os.environ.get("DS_ACCELERATOR"))
            for path in (asked, *([against] if against is not None else []))
        ]
        if harness:
            from pretrain.harness import run_harness

            told = run_harness(
                subjects[0], harness, include=include, num_fewshot=num_fewshot, limit=limit, batch_size=batch_size
            )
            _print_harness(subjects[0].name, told, as_json=as_json)
            return
        answered: list[list[Result]] = []
        for one in found:
            with progress("read", "texts") as show:
                answered.append([answer(subject, one, batch_size=batch_size, on_texts=show) for subject in subjects])
    paired = [
        {measure: Paired.of(results[0].hits[measure], results[1].hits[measure]) for measure in results[0].hits}
        if len(results) > 1
        else {}
        for results in answered
    ]
    if as_json:
        report = [
            {"results": [result.to_dict() for result in results], "differences": {k: vars(v) for k, v in pairs.items()}}
            for results, pairs in zip(answered, paired, strict=True)
        ]
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    for results, pairs in zip(answered, paired, strict=True):
        _print(results, pairs)


def _print(results: list[Result], pairs: dict[str, Paired]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    first = results[0]
    baselines = ", ".join(f"{name} {value:.3f}" for name, value in first.baselines.items())
    print(f"{first.task}: {len(next(iter(first.hits.values())))} questions; {baselines}")
    table = Table("", *first.hits, "bits/byte")
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        shares = [_with_error(f"{share.value:.3f}", share.standard_error) for share in result.shares.values()]
        table.add_row(escape(result.subject), *shares, f"{result.bits_per_byte:.4f}")
    if pairs:
        table.add_row(
            "the first more by", *(_with_error(f"{one.difference:+.3f}", one.standard_error) for one in pairs.values())
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)


def _with_error(value: str, standard_error: float | None) -> str:
    return value if standard_error is None else f"{value} ± {standard_error:.3f}"


def _print_harness(name: str, results: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"subject": name, "results": results}, indent=2, ensure_ascii=False, default=str))
        return
    print(name)
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "stderr" not in metric:
                error = metrics.get(metric.replace(",", "_stderr,"))
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                print(f"  {task}: {metric.replace(',none', '')} {value:.4f}{spread}")
