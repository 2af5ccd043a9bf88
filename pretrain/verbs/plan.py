"""pretrain plan."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from pretrain.verbs.options import AsJson, Changes, Overrides, Recipe
from pretrain.verbs.telling import complain


class _Kind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


EXAMPLES = """
python -m pretrain plan pretrain/recipes/mini.toml
python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8 --device-memory 24GB
python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8 --device-memory 24GB --fit
python -m pretrain plan pretrain/recipes/mini.toml --device-memory auto
python -m pretrain plan pretrain/recipes/0.5b.toml --presets
python -m pretrain plan pretrain/recipes/0.5b.toml --set deepspeed.config=ds_configs/zero3.json --json
python -m pretrain plan recipe.toml --check-data
python -m pretrain plan pretrain/recipes/mini.toml --run runs/mini --world-size 4
"""


def plan(
    recipe: Recipe,
    world_size: Annotated[int, typer.Option("--world-size", metavar="N", help="Ranks, one a GPU.")] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="SIZE|auto",
            help="What one rank's device has: 24GB, 22GiB; auto: this machine's. No verdict if not given.",
        ),
    ] = None,
    device: Annotated[
        _Kind | None, typer.Option("--device", help="What ranks run on: cuda if not given; with auto as found.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Look for the cheapest configuration that fits --device-memory.")
    ] = False,
    presets: Annotated[
        bool, typer.Option("--presets", help="Only that: what fits GPUs of 8 to 141 GB, 1 to 8 of them, as a table.")
    ] = False,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Each part of the memory with its formula, and what the symbols mean.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="What does not fit is a warning, not an error.")] = False,
    check_data: Annotated[
        bool,
        typer.Option(
            "--check-data",
            help="Also open data, tokenizer and initial_weights, as a run would: mixture, epochs, what packing cuts.",
        ),
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Also what a run there would resume from, or why not.")
    ] = None,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="With --run: as in run.")] = "auto",
    change: Changes = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Tokens, steps and memory of a recipe, before anything is started; exit 2 if it cannot run or fit."""
    from pretrain.config import RecipeError, load_recipe, refuse_split_windows
    from pretrain.device_memory import DeviceMemory, described, ranks_here, this_device
    from pretrain.fit import first_fit, too_big
    from pretrain.fit_found import Fit
    from pretrain.plan import AUTO_IS, parse_memory
    from pretrain.plan import plan as make_plan

    if presets and (device_memory, device, fit, force, check_data, world_size) != (None, None, False, False, False, 1):
        raise RecipeError("--presets goes over devices and ranks by itself: leave out all but RECIPE, --set and --json")
    if directory is None and (resume != "auto" or change):
        raise RecipeError("--resume and --change are of a run: add --run DIR, or leave them out")
    if fit and device_memory is None:
        raise RecipeError("--fit needs a device to fit: add --device-memory SIZE, or --device-memory auto")
    kind: Literal["cpu", "cuda"] = "cpu" if device is _Kind.CPU else "cuda"
    memory: DeviceMemory | None = None
    if device_memory == "auto":
        here = ranks_here(os.environ, max(world_size, 1))
        memory = this_device(here, "cpu" if device is _Kind.CPU else os.environ.get("DS_ACCELERATOR"))
        if device is not None and memory.kind != kind:
            raise RecipeError("--device cuda --device-memory auto: torch sees no GPU here: give its SIZE")
    elif device_memory is not None:
        memory = described(parse_memory(device_memory), kind)
    config = load_recipe(recipe, overrides or ())
    if directory is None:  # a run that goes on may have had other windows
        refuse_split_windows([stage.from_tokens for stage in config.data.stages], config.model.seq_len)
    compute = config.precision.compute_where(AUTO_IS)
    if presets:
        from pretrain.device_presets import presets as all_presets
        from pretrain.device_presets import to_dicts, to_markdown

        table = all_presets(config, compute)
        print(json.dumps(to_dicts(table), indent=2) if as_json else to_markdown(table))
        return
    fitted: Fit | None = None
    if fit and memory is not None:
        fitted = first_fit(config, world_size, memory, compute)
        if fitted.chosen is None:
            print(json.dumps({"fit": fitted.to_dict()}, indent=2) if as_json else fitted.to_text())
            raise typer.Exit(complain(fitted.failure()))
        config = fitted.chosen.config
    made = make_plan(config, world_size, memory, kind)
    report = made.to_dict()
    lines = [made.to_text(formulas)]
    if fitted is not None and made.verdict is not None:
        lines = [fitted.to_text(), "", *made.verdict.lines()]
    if fitted is not None:
        report["fit"] = fitted.to_dict()
    if check_data:
        from pretrain.prospects import of_data

        data = of_data(config, world_size)
        report |= data.report
        lines += data.lines
    refused: str | None = None
    if directory is not None:
        from pretrain.prospects import of_run

        going_on = of_run(config, world_size, made.stage, directory, resume, change or ())
        report |= going_on.report
        refused = going_on.refused
        lines = [] if refused is not None else [*going_on.lines, *lines]  # the error says it all
    if as_json or lines:
        print(json.dumps(report, indent=2) if as_json else "\n".join(lines))
    if refused is not None:
        raise typer.Exit(complain(refused))
    if made.verdict is not None and memory is not None:
        message = too_big(config, world_size, memory, made.verdict.need, compute)
        if message is not None and not force:
            raise typer.Exit(complain(f"{recipe} {message}, or go on with --force"))
        if message is not None:
            print(f"warning: {recipe} {message}", file=sys.stderr)
