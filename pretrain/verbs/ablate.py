"""pretrain ablate."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pretrain.verbs.options import AsJson, Overrides, Recipe

EXAMPLES = """
python -m pretrain ablate pretrain/recipes/demo.toml --axis norm_place=pre,post --axis ffn=relu,swiglu --dry-run
python -m pretrain ablate pretrain/recipes/demo.toml --axis attention=gqa,mla --seeds 3 --out runs/mla
python -m pretrain ablate pretrain/recipes/demo.toml --axis ffn=swiglu,gelu --budget flops --fit n_layers
python -m pretrain ablate pretrain/recipes/demo.toml --ladder --out runs/ladder
"""


class BudgetName(StrEnum):
    parameters = "parameters"
    flops = "flops"


class FittedName(StrEnum):
    d_ff = "d_ff"
    n_layers = "n_layers"


def ablate(
    recipe: Recipe,
    axis: Annotated[
        list[str] | None,
        typer.Option("--axis", metavar="NAME=A,B", help="A field of [model] and its values. May be repeated."),
    ] = None,
    is_ladder: Annotated[
        bool, typer.Option("--ladder", help="Instead: from the block of 2017 to today's, one change a row.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Runs of each variant.")] = 2,
    budget: Annotated[
        BudgetName, typer.Option("--budget", help="What all variants have as much of as the first.")
    ] = BudgetName.parameters,
    fitted: Annotated[FittedName, typer.Option("--fit", help="The size that brings them there.")] = FittedName.d_ff,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="For runs and results; runs/RECIPE-ablation if not given."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show variants, sizes and FLOPs; train nothing.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train variants of a recipe under one budget, on the same tokens, some seeds each; tell what differs beyond noise.

    Started again, it goes on; what is finished is not trained again.
    """
    from pretrain import ablate as ablation_of
    from pretrain import ablation_report as report_of
    from pretrain import variants as variants_of
    from pretrain.batching import BatchPlan
    from pretrain.config import RecipeError, load_recipe
    from pretrain.figures import count, counted

    if is_ladder == bool(axis):
        raise RecipeError("say what to vary: --axis NAME=A,B, once or more, or --ladder, one of the two")
    config = load_recipe(recipe, overrides or ())
    BatchPlan.from_config(config, 1)  # its error is better told before anything is trained
    axes = [variants_of.read_axis(text) for text in axis or ()]
    made = variants_of.ladder(config.model) if is_ladder else variants_of.product(config.model, axes)
    made = variants_of.fit(made, budget.value, fitted.value)
    out = out or Path("runs") / f"{recipe.stem}-ablation"
    ablation = ablation_of.Ablation(config, made, seeds, budget.value, out, is_ladder)
    if not as_json:
        print(report_of.plan_table(ablation).to_text())
        trained = f"{len(made)} variants × {counted(seeds, 'seed')} × {ablation.tokens:,} tokens"
        print(f"{trained}, {count(ablation.flops)} FLOPs in all")
    if dry_run:
        if as_json:
            target = variants_of.cost(made[0].model, budget.value)
            rows = [ablation_of.planned(one, budget.value, target) for one in made]
            told = {"budget": budget.value, "seeds": seeds, "tokens": ablation.tokens, "flops": ablation.flops}
            print(json.dumps({**told, "variants": rows}, indent=2))
        return

    from data_pipeline.durable import write_file
    from pretrain.inputs import Inputs
    from pretrain.inspection import inspect
    from pretrain.pace import paces
    from pretrain.runtime import pick_device

    warnings.simplefilter("ignore")  # what a model warns of, the recipe has just said
    for variant in made:
        Inputs.check(ablation.config(variant, 0), 1)
    ablation_of.write_recipes(ablation)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run under way is stopped too
    ablation_of.train(ablation, lambda line: print(line, file=sys.stderr, flush=True))
    speeds = paces(config, [one.model for one in made], pick_device(0))
    found = ablation_of.results(ablation, inspect, speeds)
    tables = report_of.result_tables(found)
    write_file(out / "results.json", json.dumps(found, indent=2, allow_nan=False).encode())
    write_file(out / "results.md", report_of.markdown(tables).encode())
    report_of.draw_learnt(ablation, out / "results.png")
    report_of.draw_inside(found, out / "inside.png")
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    print("\n".join(table.to_text() for table in tables))
    print(f"written: {out}/results.json, results.md, results.png, inside.png")
