"""python -m model: what a model costs, whether it is what it claims to be, and its components shown one by one."""

import importlib.util
import io
import json
import os
import sys
import tomllib
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from model import accounting
from model.config import PRESETS, ModelConfig, ModelConfigError, from_table, nearest
from model.demos.demo import NAMES as DEMOS

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")

app = typer.Typer(
    help="The architecture: what a model costs, and whether it is what it claims to be.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="\b\nExamples:\n  python -m model count 0.5b\n  python -m model verify mini\n  python -m model demo rope",
)

Target = Annotated[
    str, typer.Argument(metavar="PRESET|RECIPE", help=f"One of {', '.join(PRESETS)}, or a recipe's TOML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]


@app.command(
    epilog="\b\nExamples:\n  python -m model count 0.5b\n  python -m model count pretrain/recipes/mini.toml --json"
)
def count(target: Target, as_json: AsJson = False) -> None:
    """Parameters part by part, training FLOPs per token, KV cache, static memory: by arithmetic, nothing is built."""
    config = load(target)
    report = {
        "config": config.to_dict(),
        "parameters": accounting.parameter_count(config),
        "parts": [asdict(part) for part in accounting.parameter_parts(config)],
        "flops_per_token": _flops(config),
        "kv_cache_bytes_per_token": accounting.kv_cache_bytes_per_token(config),
        "kv_cache_bytes_per_token_multi_head": accounting.kv_cache_bytes_per_token(config, kv_heads=config.n_heads),
        "static_memory_bytes": accounting.static_memory_bytes(config),
        "static_memory_formula": accounting.STATIC_MEMORY_FORMULA,
    }
    print(json.dumps(report, indent=2) if as_json else _count_text(target, config))


@app.command(epilog="\b\nExamples:\n  python -m model verify mini\n  python -m model verify 0.5b --json")
def verify(
    target: Target,
    as_json: AsJson = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights and of the random ids.")] = 0,
) -> None:
    """Build the model in fp32 on this CPU and run the five acceptance checks; exit 1 if one fails.

    It needs 4 bytes a parameter and about 1 GB more: 3 GB for 0.5b.
    """
    config = load(target)
    _refuse_too_large(config)
    if config.seq_len == 1:
        raise ModelConfigError("seq_len = 1 leaves no later token whose influence could be checked: verify 2 or more")
    from model.verify import CHECK_NAMES
    from model.verify import verify as run_checks

    checks = []
    for number, check in enumerate(run_checks(config, seed=seed), start=1):
        checks.append(check)
        if not as_json:
            print(f"{number}. {check.name:<13} {'pass' if check.passed else 'FAIL'}  ({check.seconds:.1f} s)")
            print(f"   expected  {check.expected}\n   formula   {check.formula}\n   measured  {check.measured}")
            for cause in check.likely_causes:
                print(f"   likely    {cause}")
            print(end="", flush=True)
    passed = sum(check.passed for check in checks)
    complete = passed == len(CHECK_NAMES)
    if as_json:
        print(json.dumps({"passed": complete, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        seconds = sum(check.seconds for check in checks)
        print(f"{target}: {passed} of {len(CHECK_NAMES)} checks passed in {seconds:.1f} s")
    if not complete:
        raise typer.Exit(1)


@app.command(
    epilog="\b\nExamples:\n  python -m model demo rope\n  python -m model demo norm --plot norm.png\n"
    "  python -m model demo kv_cache --json\n  python -m model demo --all --out gallery"
)
def demo(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=f"One of {', '.join(DEMOS)}.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, 16 by 9: .png, .svg or .pdf.")
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="All of them, as a page with pictures.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="With --all: the folder to make.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one component at work: numbers that can be followed by hand, and a picture for a slide."""
    if whole != (out is not None) or whole == (name is not None) or (whole and (plot is not None or as_json)):
        missing = (name is None and not whole and out is None) or (whole and out is None and name is None)
        given = "Missing argument" if missing else "Too many options"
        raise ModelConfigError(f"{given}: demo takes a NAME, or --all with --out DIR: see --help")
    if out is not None:
        from model.demos.gallery import write

        page = write(out, on_demo=lambda which: print(f"{which} ...", flush=True))
        print(f"written: {page}")
        return
    assert name is not None
    from model.demos.demo import check_picture_path, run, save_picture

    if plot is not None:
        check_picture_path(plot)
    found = run(name)
    print(json.dumps({"title": found.title, **found.numbers}, indent=2) if as_json else "\n".join(found.lines))
    if plot is not None:
        save_picture(found, plot)


def load(target: str) -> ModelConfig:
    """The config of a preset's name or of a recipe's [model] table; nothing else in the recipe is read."""
    if target in PRESETS:
        return PRESETS[target]
    path = Path(target)
    if not path.is_file():
        known = [*PRESETS, *map(str, path.parent.glob("*.toml"))]
        raise ModelConfigError(
            f'"{target}" is no preset, and taken as a recipe\'s path it is no file{nearest(target, known)}; '
            f"presets: {', '.join(PRESETS)}"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("model")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path} is not valid TOML: {error}") from error
    except RecursionError:
        raise ModelConfigError(f"{path}: brackets nested too deep: a recipe has tables of values and lists") from None
    except ValueError as error:  # what int() says of thousands of digits
        raise ModelConfigError(f"{path}: a number there has too many digits ({str(error).partition(':')[0]})") from None
    if not isinstance(table, dict):
        raise ModelConfigError(f'{path} has no [model] table: add one, with preset = "mini" for instance')
    try:
        return from_table(table)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from error


def _refuse_too_large(config: ModelConfig) -> None:
    needed = accounting.FP32_BYTES * accounting.parameter_count(config)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ModelConfigError(
            f"the weights alone need {needed / 1e9:,.1f} GB in fp32 and this machine has {memory / 1e9:,.1f} GB: "
            "verify a smaller model (fewer n_layers shows the same faults)"
        )


def _flops(config: ModelConfig) -> dict[str, Any]:
    flops = accounting.flops_per_token(config)
    return {**asdict(flops), "causal": flops.causal, "full": flops.full, "formula": accounting.flops_formula(config)}


def _count_text(target: str, config: ModelConfig) -> str:
    flops = accounting.flops_per_token(config)
    cache = accounting.kv_cache_bytes_per_token(config)
    multi_head = accounting.kv_cache_bytes_per_token(config, kv_heads=config.n_heads)
    memory = accounting.static_memory_bytes(config)
    lines = [f"{target}: {accounting.parameter_count(config):,} parameters", ""]
    lines += [
        f"  {part.name:<34} {part.parameters:>15,}   {100 * part.share:5.1f} % of the {part.share_of}"
        for part in accounting.parameter_parts(config)
    ]
    lines += [
        "",
        f"Training FLOPs per token at seq_len {config.seq_len}, causal attention: {flops.causal:,}"
        f" (matrices {flops.matrices:,} + attention {flops.attention_causal:,});",
        f"  with full attention {flops.full:,} (attention {flops.attention_full:,})",
        f"  {accounting.flops_formula(config)}",
        f"KV cache, bf16: {cache:,} B per token, {cache * config.seq_len / 1e6:.1f} MB per {config.seq_len} tokens"
        f" (multi-head {multi_head:,} B, {multi_head * config.seq_len / 1e6:.1f} MB: {multi_head / cache:.1f} ×)",
        f"Static training memory: {sum(memory.values()) / 1e9:.2f} GB = "
        + " + ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items()),
        f"  {accounting.STATIC_MEMORY_FORMULA}",
    ]
    return "\n".join(lines)


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
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and texts may hold what it can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)  # None, or the code of a typer.Exit
        print(end="", flush=True)  # does nothing where stdout is closed
    except BrokenPipeError:  # whoever read our output has left; without this, Python says so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (ModelConfigError, OSError) as error:
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
