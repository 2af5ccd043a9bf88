"""python -m pretrain: train a recipe, plan it, evaluate and sample what came out."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from pretrain.inventory import Entry

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")

app = typer.Typer(
    help="The trainer: a recipe becomes a model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="\b\nExamples:\n  python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8 --device-memory 24GB",
)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's TOML file, see pretrain/recipes.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value: --set schedule.peak_lr=3e-4."),
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run directory (its newest checkpoint) or a checkpoint.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        metavar="NAME",
        help="Let a resume have another global_batch_size, seq_len, data or model from here on. May be repeated; may "
        "stay in the command.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback()
def launched(
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher adds this.")
    ] = None,
) -> None:
    """Accept what DeepSpeed's launcher puts before the verb; the rank itself is read from the environment."""


class _Kind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@app.command(
    epilog="\b\nExamples:\n  python -m pretrain plan pretrain/recipes/mini.toml\n"
    "  python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8 --device-memory 24GB\n"
    "  python -m pretrain plan pretrain/recipes/0.5b.toml --world-size 8 --device-memory 24GB --fit\n"
    "  python -m pretrain plan pretrain/recipes/mini.toml --device-memory auto\n"
    "  python -m pretrain plan pretrain/recipes/0.5b.toml --presets\n"
    "  python -m pretrain plan pretrain/recipes/0.5b.toml --set deepspeed.config=ds_configs/zero3.json --json\n"
    "  python -m pretrain plan recipe.toml --check-data\n"
    "  python -m pretrain plan pretrain/recipes/mini.toml --run runs/mini --world-size 4"
)
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
    from pretrain.fit import Fit, first_fit, too_big
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
            raise typer.Exit(_complain(fitted.failure()))
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
        raise typer.Exit(_complain(refused))
    if made.verdict is not None and memory is not None:
        message = too_big(config, world_size, memory, made.verdict.need, compute)
        if message is not None and not force:
            raise typer.Exit(_complain(f"{recipe} {message}, or go on with --force"))
        if message is not None:
            print(f"warning: {recipe} {message}", file=sys.stderr)


@app.command(
    epilog="\b\nExamples:\n  python -m pretrain run pretrain/recipes/debug.toml\n"
    "  python -m pretrain run pretrain/recipes/mini.toml --run runs/first --set schedule.max_steps=2000\n"
    "  python -m pretrain run pretrain/recipes/mini.toml --max-minutes 55\n"
    "  python -m pretrain run pretrain/recipes/mini.toml --set batch.global_batch_size=128 --change global_batch_size\n"
    "  deepspeed --module pretrain run pretrain/recipes/mini.toml"
)
def run(
    recipe: Recipe,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--run-dir",
            metavar="DIR",
            help="The run directory; runs/RECIPE if not given. Under torchrun only as --run-dir.",
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(metavar="auto|never|PATH", help="auto: go on from this run's newest whole checkpoint, if any."),
    ] = "auto",
    change: Changes = None,
    force: Annotated[
        bool, typer.Option("--force", help="Begin although the memory plan says that it does not fit.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option("--max-minutes", metavar="M", help="Save and stop so as to be done before so many are over."),
    ] = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option("--grace-seconds", metavar="S", help="What a signal leaves before the kill; 30 under launchers."),
    ] = None,
    timeout_minutes: Annotated[
        float | None,
        typer.Option("--timeout-minutes", metavar="M", help="How long a rank waits for the others: 10 if not given."),
    ] = None,
    started_at: Annotated[float | None, typer.Option("--started-at", hidden=True)] = None,
    started_by: Annotated[str | None, typer.Option("--started-by", hidden=True)] = None,
) -> None:
    """Train. One process on its own; several under `deepspeed` or `python -m launch run`. Started again, it resumes.

    SIGTERM, SIGUSR1, Ctrl-C, --max-minutes or a file named stop in the run directory: it saves and stops, with code 0.
    """
    from pretrain.keeper import keep
    from pretrain.mpi import adopt_names
    from pretrain.stopping import LAUNCHERS_GRACE_SECONDS, Deadline, StopRequest

    adopt_names(os.environ)
    begun_at = time.time() if started_at is None else started_at
    path = directory or Path("runs") / recipe.stem
    launched = "LOCAL_RANK" in os.environ
    kept = keep(os.environ)
    stop = StopRequest(path / "stop")
    stop.install(speaks=os.environ.get("RANK", "0") == "0")
    if kept is not None:
        kept.heed(stop.ask)

    from pretrain.config import RecipeError, load_recipe
    from pretrain.run_directory import RunDirectoryError, refuse_unusable

    limits = {"--max-minutes": max_minutes, "--grace-seconds": grace_seconds, "--timeout-minutes": timeout_minutes}
    for option, given in limits.items():
        if given is not None and not 0 < given < math.inf:
            raise RecipeError(f"{option} {given:g}: must be more than 0")
    try:
        config = load_recipe(recipe, overrides or ())
        refuse_unusable(path)
    except (RecipeError, RunDirectoryError) as error:
        if os.environ.get("LOCAL_RANK") == "0":
            error.add_note("met by this machine, which reads a file of its own")
        raise
    from pretrain.changes import check_names

    changes = check_names(change or ())
    if max_minutes is not None:
        from model.accounting import parameter_count

        # Masters, two moments and, twice, weights: what an fp32 run writes first.
        stop.deadline = Deadline(begun_at + 60 * max_minutes, first_save_bytes=16 * parameter_count(config.model))
    if grace_seconds is None and launched:
        grace_seconds = LAUNCHERS_GRACE_SECONDS
    from pretrain.device_memory import of_rank, ranks_here
    from pretrain.engine import TIMEOUT_MINUTES
    from pretrain.fit import needed, too_big
    from pretrain.metrics import TrainingDivergedError
    from pretrain.out_of_memory import explain, is_out_of_memory
    from pretrain.receipts import MET_WHILE_IT_RAN, command_that_goes_on
    from pretrain.run_directory import RunDirectory
    from pretrain.runtime import Ranks, auto_compute, is_lost_peer, is_timeout, one_ranks_fault, pick_device
    from pretrain.saving import NotSavedError
    from pretrain.train import train

    with one_ranks_fault():
        ranks = Ranks.from_environment(os.environ)
    device = pick_device(ranks.local_rank, ranks.accelerator)
    compute = config.precision.compute_where(auto_compute(device))
    here = ranks_here(os.environ, ranks.world_size)
    memory = of_rank(device.type, ranks.local_rank, here, alone=ranks.world_size == 1)
    need = needed(config, ranks.world_size, memory.kind, compute)
    message = too_big(config, ranks.world_size, memory, need, compute)
    if message is not None and not force:
        refusal = RecipeError(f"{recipe} {message}, or go on with --force")
        if memory.occupied or ranks.local_rank == 0:  # other ranks of this machine have the same to say
            refusal.add_note("met by this rank alone")
        raise refusal
    if message is not None and ranks.is_first:
        print(f"warning: {recipe} {message}", file=sys.stderr)
    command = started_by or command_that_goes_on(
        recipe, path, here if launched and here == ranks.world_size else None, overrides or (), resume, changes, limits,
        force=force,
    )  # fmt: skip
    timeout_minutes = timeout_minutes or TIMEOUT_MINUTES
    try:
        outcome = train(
            config, path, ranks, resume=resume, stop=stop, grace_seconds=grace_seconds,
            timeout_minutes=timeout_minutes, command=command, kept=kept, changes=changes,
        )  # fmt: skip
        if kept is not None:
            kept.ended(outcome)
    except TrainingDivergedError as error:
        _complain(str(error))
        raise typer.Exit(1) from None
    except NotSavedError as error:  # all ranks know of it
        raise typer.Exit(_complain(str(error))) from None
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            saved = RunDirectory(path).checkpoints
            line = explain(error, config, ranks.world_size, need, compute, device, saved)
            raise typer.Exit(_complain(line, on_every_rank=True)) from None
        if isinstance(error, OSError) and MET_WHILE_IT_RAN in getattr(error, "__notes__", ()):
            _complain(str(error), on_every_rank=True)  # no input is to blame: the same command may well go on
            raise typer.Exit(1) from None
        if not isinstance(error, RuntimeError) or not is_lost_peer(error):
            raise
        lost = "another rank is gone, and this one cannot go on without it"
        if is_timeout(error):
            lost = f"another rank gave no answer for {timeout_minutes:g} minutes (--timeout-minutes): its machine, the "
            lost += "network between them, or a rank that hangs; this one cannot go on without it"
        _complain(lost, on_every_rank=True)
        raise typer.Exit(1) from None


@app.command(
    epilog="\b\nExamples:\n  python -m pretrain evaluate runs/mini\n"
    "  python -m pretrain evaluate runs/mini/checkpoints/step-00001000 --data data/mine --json"
)
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A collection written by prepare; the run's own if not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=65536, metavar="N", help="Sequences scored at a time.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Score at most so many tokens of each source.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out loss, perplexity and bits per byte of each source, beside the uniform and the unigram baseline."""
    from rich.console import Console
    from rich.table import Table

    from pretrain.evaluate import evaluate_checkpoint

    smaller = f"set --batch-size below {batch_size}" if batch_size > 1 else "use a machine or a GPU with more memory"
    with _memory_told(smaller), _progress("scored", "tokens") as show:
        scores = evaluate_checkpoint(
            checkpoint,
            data,
            batch_size=batch_size,
            max_tokens=max_tokens,
            accelerator=os.environ.get("DS_ACCELERATOR"),
            on_tokens=show,
        )
    if as_json:
        print(json.dumps({source: score.to_dict() for source, score in scores.items()}, indent=2))
        return
    table = Table("source", "tokens", "loss", "perplexity", "bits/byte", "unigram", "uniform", "below unigram")
    for column in table.columns[1:]:
        column.justify = "right"
    for source, score in scores.items():
        bits = f"{score.bits_per_byte:.4f}" if score.bytes_exact else f"about {score.bits_per_byte:.3f}"
        figures = (score.loss, score.perplexity, score.unigram, score.uniform, score.unigram - score.loss)
        loss, perplexity, unigram, uniform, gain = (f"{figure:.4f}" for figure in figures)
        table.add_row(source, f"{score.tokens:,}", loss, perplexity, bits, unigram, uniform, gain)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    print("loss, unigram and uniform in nats per token; bits per UTF-8 byte of the source text")


@app.command(
    epilog="\b\nExamples:\n  python -m pretrain generate runs/mini --prompt 'It is a truth'\n"
    "  python -m pretrain generate runs/mini --prompt 'def main(' --temperature 0 --max-new-tokens 100\n"
    "  python -m pretrain generate runs/mini --prompt 'Once' --prompt '从前' --top-p 0.9 --seed 7 --json"
)
def generate(
    checkpoint: Checkpoint,
    prompts: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="Several are continued as one batch, each as if alone."),
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, metavar="N")] = 50,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, metavar="P")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Same prompt, same seed: same text.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt instead of text.")] = False,
) -> None:
    """Continue prompts with the model of a run or checkpoint, by the tokenizer that the run carries."""
    from pretrain.generate import continue_prompts

    continued = continue_prompts(
        checkpoint,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        accelerator=os.environ.get("DS_ACCELERATOR"),
    )
    with _memory_told("give fewer or shorter prompts, or set --max-new-tokens lower"):
        for number, (prompt, continuation) in enumerate(continued, 1):
            if as_json:
                print(json.dumps({"prompt": prompt, "continuation": continuation}, ensure_ascii=False))
                continue
            if len(prompts) > 1:
                print(f"──── prompt {number} of {len(prompts)} ────")
            print(prompt + continuation)


class _Format(StrEnum):
    HF = "hf"
    GGUF = "gguf"


class _Dtype(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class _Layout(StrEnum):
    ROTATE_HALF = "rotate_half"
    INTERLEAVED = "interleaved"


@app.command(
    epilog="\b\nExamples:\n  python -m pretrain export runs/mini --out exported/mini\n"
    "  python -m pretrain export runs/mini/checkpoints/step-00001000 --out exported/mini --dtype bf16 --overwrite\n"
    "  python -m pretrain export runs/mini --format gguf --out exported/mini.gguf"
)
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder to make; of gguf the file.")],
    form: Annotated[
        _Format,
        typer.Option("--format", help="hf: LlamaForCausalLM for transformers and servers. gguf: for llama.cpp."),
    ] = _Format.HF,
    dtype: Annotated[_Dtype | None, typer.Option(help="Of the weights; the checkpoint's if not given.")] = None,
    max_shard_bytes: Annotated[
        str | None,
        typer.Option("--max-shard-bytes", metavar="SIZE", help="Weights above it are several files; 5GB if not given."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that stands at --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model for other programs, its tokenizer included; see docs/export.md."""
    from pretrain.config import RecipeError
    from pretrain.plan import parse_memory

    if form is _Format.GGUF and max_shard_bytes is not None:
        raise RecipeError("--max-shard-bytes: a GGUF is one file: leave it out")
    shard_bytes = parse_memory(max_shard_bytes or "5GB", "--max-shard-bytes")
    wanted = None if dtype is None else dtype.value
    if form is _Format.GGUF:
        if importlib.util.find_spec("gguf") is None:
            raise RecipeError("--format gguf needs the package gguf: pip install -e '.[gguf]'")
        from pretrain.export_gguf import export_gguf

        done = export_gguf(checkpoint, out, dtype=wanted, overwrite=overwrite)
    else:
        from pretrain.export import export_hf

        done = export_hf(checkpoint, out, dtype=wanted, max_shard_bytes=shard_bytes, overwrite=overwrite)
    print(json.dumps(done.to_dict(), indent=2) if as_json else done.to_text())


@app.command(
    "import",
    epilog="\b\nExamples:\n  python -m pretrain import downloads/llama --tokenizer tokenizers/books --out imported/x\n"
    "  python -m pretrain import exported/mini --out imported/mini\n"
    "  python -m pretrain run recipe.toml --set initial_weights=imported/mini",
)
def import_weights(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What save_pretrained wrote: config.json and safetensors.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The checkpoint to make.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The tokenizer of the ids; where the folder has one of ours, that one."),
    ] = None,
    rope_layout: Annotated[
        _Layout, typer.Option("--rope-layout", help="Which dimensions RoPE is to pair in the checkpoint.")
    ] = _Layout.ROTATE_HALF,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an import that stands at --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a LlamaForCausalLM: training starts from it, evaluate, generate and export take it."""
    from pretrain.export import import_hf

    done, config = import_hf(folder, out, tokenizer=tokenizer, rope_layout=rope_layout.value, overwrite=overwrite)
    if as_json:
        print(json.dumps({**done.to_dict(), "model": config.to_dict()}, indent=2))
        return
    print(f"{done.to_text()}\n\nin a recipe that starts from it:\n\ninitial_weights = {json.dumps(done.out)}\n")
    print("\n".join(["[model]", *(f"{name} = {json.dumps(value)}" for name, value in config.to_dict().items())]))


@app.command(
    epilog="\b\nExamples:\n  python -m pretrain checkpoints runs/mini\n"
    "  python -m pretrain checkpoints runs/mini --verify --json\n"
    "  python -m pretrain checkpoints runs/mini --prune --keep-last 1 --keep-best 2\n"
    "  python -m pretrain checkpoints runs/mini --prune --yes\n"
    "  python -m pretrain checkpoints runs/mini --average 4 --out averaged/mini\n"
    "  python -m pretrain checkpoints runs/mini --average 3000,3500,4000 --out averaged/mini\n"
    "  python -m pretrain checkpoints runs/mini --gather copies/node-b/mini --gather copies/node-c/mini"
)
def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    check: Annotated[bool, typer.Option("--verify", help="Compare every file with its recorded hash.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Say which the recipe's rule, or --keep-..., would not keep.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove them.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, metavar="N", help="With --prune, instead of the recipe's.")
    ] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option("--keep-every-steps", min=0, metavar="N", help="The same; 0: none for this reason.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option("--keep-best", min=0, metavar="N", help="The same; by held-out loss.")
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(metavar="N|STEP,STEP,...", help="Make the mean of the newest N, or of these, a new checkpoint."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With --average: the checkpoint to make.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --average made there before.")] = False,
    gather: Annotated[
        list[Path] | None,
        typer.Option(metavar="COPY", help="A copy of another machine's run directory: its parts make RUN's whole."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run and why each stays; verify them, remove what nothing keeps, or average weights."""
    from pretrain.config import RecipeError

    given = {"keep_last": keep_last, "keep_every_steps": keep_every_steps, "keep_best": keep_best}
    keeps: dict[str, Any] = {
        name: value or None if name == "keep_every_steps" else value
        for name, value in given.items()
        if value is not None
    }
    if average is None and (out is not None or overwrite):
        raise RecipeError("--out and --overwrite are for --average: say what to average, for example --average 4")
    if average is not None and (check or prune):
        raise RecipeError("--average verifies what it reads and removes nothing: leave out --verify and --prune")
    if gather and (average is not None or check or prune):
        raise RecipeError("--gather verifies what it joins and removes nothing: leave out --average, --verify, --prune")
    if not prune and (yes or keeps):
        raise RecipeError("--yes and --keep-... are for --prune: add it, or leave them out")
    if average is not None:
        if out is None:
            raise RecipeError("--average needs a place for the checkpoint it makes: add --out DIR")
        _average(run, average, out, overwrite=overwrite, as_json=as_json)
        return
    if gather:
        _join(run, gather, as_json=as_json)
        return

    from dataclasses import replace

    from pretrain import inventory
    from pretrain.config import load_recipe
    from pretrain.retention import Retention

    directory = inventory.run_directory(run)
    retention = replace(Retention.of(load_recipe(directory.recipe).checkpoint), **keeps)
    with _progress("verified", "bytes") as show:
        if yes:
            found, going = inventory.remove_others(
                directory, retention, check="all" if check else "newest", on_bytes=show
            )
        else:
            depth: Literal["all", "newest", "none"] = "all" if check else "newest" if prune else "none"
            found = inventory.entries(directory, retention, check=depth, on_bytes=show)
            going = inventory.superfluous(found)
    if as_json:
        report = {"run": str(run), "retention": vars(retention), "checkpoints": [one.to_dict() for one in found]}
        report["set_aside"] = [path.name for path in inventory.set_aside(directory)]
        if prune:
            report["removed" if yes else "would_remove"] = [one.path.name for one in going]
        print(json.dumps(report, indent=2))
    else:
        _print_checkpoints(found)
        for path in inventory.set_aside(directory):
            print(f"set aside by a resume, used for nothing: {path}")
    if prune and not as_json and not going:
        print("nothing to remove")
    elif prune and not as_json:
        count = f"{len(going)} checkpoint{'' if len(going) == 1 else 's'}"
        size = f"{count}, {sum(one.bytes or 0 for one in going) / 1e6:,.1f} MB"
        names = "".join(f"\n  {one.path.name}" for one in going)
        print(f"removed {size}{names}" if yes else f"would remove {size} (add --yes to do it){names}")
    if check and any(one.state == "damaged" for one in found):
        raise typer.Exit(1)


def _print_checkpoints(found: Sequence[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "MB", "written (UTC)", "loss", "held-out", "healthy", "files", "kept as")
    for number in (0, 1, 3, 4):
        table.columns[number].justify = "right"
    for one in found:
        size = "" if one.bytes is None else f"{one.bytes / 1e6:,.1f}"
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (one.loss, one.heldout_loss)]
        healthy = {True: "yes", False: "NO", None: "not recorded"}[one.healthy]
        kept = [*one.kept, *(["latest"] if one.latest else [])]
        written = one.written_at.replace("T", " ").removesuffix("+00:00")
        files = one.state if one.part is None else f"{one.state}, part {one.part}"
        table.add_row(str(one.step), size, written, *losses, healthy, files, ", ".join(kept))
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    for one in found:
        if one.fault is not None:
            print(f"damaged: {one.fault}")


def _average(run: Path, wanted: str, out: Path, *, overwrite: bool, as_json: bool) -> None:
    from pretrain.averaging import average
    from pretrain.config import RecipeError
    from pretrain.inventory import run_directory

    numbers = wanted.split(",")
    if not all(number.strip().isascii() and number.strip().isdigit() and len(number) < 20 for number in numbers):
        raise RecipeError(f"--average {wanted}: say how many of the newest, as 4, or which steps, as 3000,3500,4000")
    steps = [int(number) for number in numbers]
    with _progress("verified", "bytes") as show:
        which = steps[0] if len(steps) == 1 else steps
        done, sources = average(run_directory(run), which, out, overwrite=overwrite, on_bytes=show)
    if as_json:
        print(json.dumps({**done.to_dict(), "averaged": [str(path) for path in sources]}, indent=2))
        return
    print(f"{done.to_text()}\nthe mean of {', '.join(path.name for path in sources)}")


def _join(run: Path, copies: Sequence[Path], *, as_json: bool) -> None:
    from pretrain.inventory import run_directory
    from pretrain.joining import join

    with _progress("copied", "bytes") as show:
        found = join(run_directory(run), copies, on_bytes=show)
    joined = [path.name for path in found.whole]
    if as_json:
        print(json.dumps({"run": str(run), "joined": joined, "left": found.left}, indent=2))
    else:
        print(f"whole now: {', '.join(joined)}")
        for why in found.left.values():
            print(f"warning: not joined: {why}", file=sys.stderr)
    if found.left:
        raise typer.Exit(1)


@contextmanager
def _progress(done: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Give what is to hear of long work, as (so far, of all): a bar on a terminal, else now and then a line."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    watched = sys.stderr.isatty()
    started = spoke_at = time.monotonic()
    columns = TextColumn("{task.fields[rate]}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not watched) as progress:
        task = progress.add_task(done, total=None, rate="")

        def show(so_far: int, total: int) -> None:
            nonlocal spoke_at
            rate = f"{so_far / (time.monotonic() - started):,.0f} {unit}/s"
            progress.update(task, completed=so_far, total=total, rate=rate)
            if not watched and time.monotonic() - spoke_at > 10:
                spoke_at = time.monotonic()
                print(f"{so_far:,} of {total:,} {unit} {done}, {rate}", file=sys.stderr, flush=True)

        yield show


@contextmanager
def _memory_told(remedy: str) -> Iterator[None]:
    """The end of memory in what only reads a checkpoint: one line with `remedy`, exit 2."""
    from pretrain.out_of_memory import explain_reading, is_out_of_memory
    from pretrain.runtime import pick_device

    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        device = pick_device(0, os.environ.get("DS_ACCELERATOR"))
        raise typer.Exit(_complain(explain_reading(error, remedy, device))) from None


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


def _complain(message: str, *, on_every_rank: bool = False) -> int:
    """All ranks find the same fault in a command or a recipe, and one line is enough; a full disk is one rank's."""
    ranked = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()  # else RANK is a stranger's
    rank = os.environ["RANK"] if ranked else "0"
    if rank == "0" or on_every_rank or (ranked and _first_of_a_command()):
        who = f"rank {rank}: " if on_every_rank and rank != "0" else ""
        print(f"error: {who}{' '.join(message.split())}", file=sys.stderr)
    return 2


def _first_of_a_command() -> bool:
    """Whether this is the first rank of a `launch run` on this machine, which may be one of several: rank 0 speaks on
    its own one alone."""
    from pretrain.keeper import VARIABLE

    return os.environ["LOCAL_RANK"] == "0" and os.environ.get(VARIABLE, "").startswith("127.")


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
        code = _complain(str(error), on_every_rank=alone)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # what usage errors have; typer gives them no public name
            raise
        code = _complain(f"{error.format_message().rstrip('.')}: see --help")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
