"""python -m pretrain: train a recipe, plan it, evaluate and sample what came out."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs import (
    ablate,
    checkpoints,
    compare,
    estimate,
    evaluate,
    export,
    generate,
    import_weights,
    plan,
    report,
    run,
    tasks,
)
from pretrain.verbs.telling import complain

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")

app = typer.Typer(
    help="The trainer: a recipe becomes a model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="\b\nExamples:\n  python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8 --device-memory 24GB",
)
VERBS = (
    ("plan", plan.plan, plan.EXAMPLES),
    ("estimate", estimate.estimate, estimate.EXAMPLES),
    ("run", run.run, run.EXAMPLES),
    ("evaluate", evaluate.evaluate, evaluate.EXAMPLES),
    ("tasks", tasks.tasks, tasks.EXAMPLES),
    ("generate", generate.generate, generate.EXAMPLES),
    ("export", export.export, export.EXAMPLES),
    ("import", import_weights.import_weights, import_weights.EXAMPLES),
    ("report", report.report, report.EXAMPLES),
    ("compare", compare.compare, compare.EXAMPLES),
    ("ablate", ablate.ablate, ablate.EXAMPLES),
    ("checkpoints", checkpoints.checkpoints, checkpoints.EXAMPLES),
)
for name, verb, examples in VERBS:
    app.command(name, epilog="\b\nExamples:\n  " + examples.strip().replace("\n", "\n  "))(verb)


@app.callback()
def launched(
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher adds this.")
    ] = None,
) -> None:
    """Accept what DeepSpeed's launcher puts before the verb; the rank itself is read from the environment."""


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


def main() -> None:
    """Run a verb. What a user can cause is one line on stderr and exit code 2; Ctrl-C is 130, a closed pipe 1."""
    if sys.stderr is None:  # as `2>&-` leaves it; print would take stdout for it
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8", errors="replace")  # noqa: SIM115
    _refuse_impostors()
    from data_pipeline.shards import DataFormatError
    from pretrain.config import RecipeError
    from pretrain.run_directory import CheckpointError, RunDirectoryError
    from tokenizer.codec import TokenizerError

    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and texts may hold what it can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)  # None, or the code of a typer.Exit
        print(end="", flush=True)  # does nothing where stdout is closed
    except BrokenPipeError:  # whoever read our output has left; without this, Python says so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (RecipeError, DataFormatError, TokenizerError, RunDirectoryError, CheckpointError, OSError) as error:
        alone = isinstance(error, OSError) or hasattr(error, "__notes__")  # see runtime.one_ranks_fault
        code = complain(str(error), on_every_rank=alone)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # what usage errors have; typer gives them no public name
            raise
        code = complain(f"{error.format_message().rstrip('.')}: see --help")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
