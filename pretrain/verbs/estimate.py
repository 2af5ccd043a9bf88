"""pretrain estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import AsJson, Overrides, Recipe

EXAMPLES = """
python -m pretrain estimate pretrain/recipes/mini.toml
python -m pretrain estimate pretrain/recipes/0.5b.toml --devices 8 --device h100 --mfu 0.4
python -m pretrain estimate pretrain/recipes/0.5b.toml --device rtx4090 --set schedule.max_steps=20000 --json
python -m pretrain estimate pretrain/recipes/mini.toml --devices 2 --peak-tflops 90
python -m pretrain estimate pretrain/recipes/demo.toml --check-data --fit docs/scaling.json
"""


def estimate(
    recipe: Recipe,
    devices: Annotated[int, typer.Option("--devices", metavar="N", help="How many, one rank each.")] = 1,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="h100, h200, a100, rtx4090, …: its dense peak in bf16, by its datasheet."
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", metavar="X", help="Instead: what one device computes, 10^12 FLOPs a second."),
    ] = None,
    mfu: Annotated[
        float, typer.Option("--mfu", metavar="SHARE", help="The share of the peak that training is to reach.")
    ] = 0.4,
    fit: Annotated[
        Path | None,
        typer.Option("--fit", metavar="FILE.json", help="Constants of one's own sweep too, see docs/scaling.md."),
    ] = None,
    check_data: Annotated[
        bool, typer.Option("--check-data", help="Also open data and tokenizer: how often each source is read.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """What a recipe comes to: parameters, tokens, FLOPs, days on devices, compute-optimal tokens, expected loss."""
    from pretrain.config import load_recipe
    from pretrain.estimate import Devices
    from pretrain.estimate import estimate as make_estimate

    config = load_recipe(recipe, overrides or ())
    on = Devices.asked(devices, device, peak_tflops, mfu, config.precision.compute)
    made = make_estimate(config, on, fit)
    report, lines = made.to_dict(), [made.to_text()]
    if check_data:
        from pretrain.prospects import of_data

        data = of_data(config, 1)
        report |= data.report
        lines += data.lines
    print(json.dumps(report, indent=2) if as_json else "\n".join(lines))
