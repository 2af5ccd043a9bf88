"""python -m launch: start a training run on one machine or several, check them before, watch and stop it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from launch.command import Launch, prepare
from launch.errors import LaunchError
from launch.restarts import run as run_again
from launch.restarts import start, wishes
from launch.saying import unfailing
from launch.where import Where

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")
REPORT_COLUMNS = 160  # of a report that is no terminal's

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's TOML file, see pretrain/recipes.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
RunDirectory = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="The run directory; runs/RECIPE if not given.")
]
HostFile = Annotated[
    Path | None,
    typer.Option("--hostfile", metavar="FILE", help="Machines, a line each: node-1 slots=8. This one if not given."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value: --set schedule.peak_lr=3e-4."),
]
Changes = Annotated[
    list[str] | None, typer.Option("--change", metavar="NAME", help="As in pretrain run; may be repeated.")
]

app = typer.Typer(
    help="Start a training run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="\b\nExamples:\n  python -m launch run pretrain/recipes/debug.toml --ranks 2 --dry-run",
)


@app.callback()
def launch() -> None:
    """Start a training run: check it, run it, tell the truth about how it ended."""


@app.command(
    epilog="\b\nExamples:\n  python -m launch run pretrain/recipes/debug.toml --ranks 2\n"
    "  python -m launch run pretrain/recipes/0.5b.toml --run runs/first --set schedule.peak_lr=2e-4\n"
    "  python -m launch run pretrain/recipes/mini.toml --max-minutes 55\n"
    "  python -m launch run pretrain/recipes/mini.toml --dry-run\n"
    "  python -m launch run pretrain/recipes/mini.toml --hostfile hosts.txt --env NCCL_DEBUG=INFO\n"
    "  python -m launch run pretrain/recipes/mini.toml --node-rank 0 --nodes 2 --master-addr node-1\n"
    "  python -m launch run pretrain/recipes/mini.toml --launcher torchrun"
)
def run(
    recipe: Recipe,
    run_directory: RunDirectory = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="Ranks on this machine; one a GPU, or one on a CPU, if not given."),
    ] = None,
    hostfile: HostFile = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="pdsh|openmpi|mpich|torchrun",
            help="What starts the ranks; with a host file pdsh if not given.",
        ),
    ] = None,
    launcher_args: Annotated[
        str, typer.Option("--launcher-args", metavar="WORDS", help="More for pdsh or mpirun, in one argument.")
    ] = "",
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="I", help="Without ssh: this node's number, 0 first; one command on each."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", metavar="N", help="With --node-rank: how many nodes.")] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Where all nodes reach node 0.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option("--master-port", metavar="P", help="Its port; a free one if not given, with --node-rank 29500."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="Give ranks this variable too, on every node."),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[str, typer.Option("--resume", metavar="auto|never|PATH", help="As in pretrain run.")] = "auto",
    change: Changes = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start it although the memory plan says that it does not fit.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option("--max-minutes", metavar="M", help="Save and stop so as to be done before so many are over."),
    ] = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option("--grace-seconds", metavar="S", help="What a scheduler leaves between a signal and the kill."),
    ] = None,
    timeout_minutes: Annotated[
        float | None,
        typer.Option("--timeout-minutes", metavar="M", help="How long a rank waits for the others: 10 if not given."),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, metavar="K", help="Start again so often where it fails behind a step.")
    ] = 0,
    elastic: Annotated[
        str | None,
        typer.Option("--elastic", metavar="MIN:MAX", help="On so many nodes of the host file: those that answer."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and start nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print one JSON object instead of text.")
    ] = False,
) -> None:
    """Check a recipe, then train it: on this machine's GPUs or CPU, or on the machines of a host file.

    Ctrl-C, SIGTERM and SIGUSR1 save and stop, the same command resumes. Exit 0 only if every rank says so itself, 2 for
    bad input.
    """
    started_at = time.time()
    if as_json and not dry_run:
        raise LaunchError("--json reports a --dry-run only: add --dry-run or leave it out")
    where = Where(
        ranks, hostfile, (), launcher, launcher_args, nodes, node_rank, master_addr, master_port, tuple(env or ())
    )
    hosts, limits = wishes(where, restarts, elastic)

    def prepare_on(only: Sequence[str], again: bool) -> Launch:
        return prepare(
            recipe,
            run_directory=run_directory,
            where=replace(where, only=tuple(only)),
            overrides=overrides or (),
            resume="auto" if again and resume == "never" else resume,
            changes=change or (),
            environ=os.environ,
            dry_run=dry_run,
            force=force,
            restarts=restarts,
            elastic=elastic,
            max_minutes=max_minutes,
            grace_seconds=grace_seconds,
            timeout_minutes=timeout_minutes,
        )

    launch = start(prepare_on, hosts, limits)
    if dry_run:
        print(json.dumps(launch.to_dict(), indent=2) if as_json else launch.to_text())
        return
    print(launch.to_text(), flush=True)
    code = run_again(prepare_on, launch, hosts, os.environ, started_at, restarts=restarts, elastic=limits)
    raise typer.Exit(code)


@app.command(
    epilog="\b\nExamples:\n"
    "  python -m launch slurm pretrain/recipes/0.5b.toml --nodes 2 --gpus-per-node 8 --time 12:00:00\n"
    "  python -m launch slurm pretrain/recipes/0.5b.toml --nodes 2 --gpus-per-node a100:8 --device-memory 80GB "
    "--partition gpu --account project --setup 'module load cuda' --output 0.5b.sbatch\n"
    "  python -m launch slurm pretrain/recipes/debug.toml --ranks-per-node 2 --sbatch reservation=test"
)
def slurm(
    recipe: Recipe,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Machines.")] = 1,
    gpus_per_node: Annotated[
        str | None, typer.Option("--gpus-per-node", metavar="[TYPE:]G", help="GPUs of each, one rank a GPU.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", metavar="R", help="Instead: so many ranks a machine, on CPUs.")
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option("--cpus-per-task", metavar="C", help="Cores a rank; if not given 4 with a GPU, else 1."),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time", metavar="LIMIT", help="Of one start: 90 (minutes), 12:00:00, 2-00:00:00.")
    ] = None,
    run_directory: RunDirectory = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="A new file for the script; stdout if not given.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="As sbatch's.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="As sbatch's.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME", help="As sbatch's.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", metavar="LIST", help="As sbatch's.")] = None,
    mem: Annotated[
        str | None, typer.Option("--mem", metavar="SIZE", help="Main memory of a node, as sbatch's.")
    ] = None,
    job_name: Annotated[
        str | None, typer.Option("--job-name", metavar="NAME", help="The recipe's name if not given.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="KEY[=VALUE]", help="Another option of sbatch: --sbatch gres=gpu:8."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option("--setup", metavar="LINE", help="A line of bash to run first: --setup 'module load cuda'."),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="A variable for the ranks; without a value, that of the shell that submits the script.",
        ),
    ] = None,
    signal_seconds: Annotated[
        int | None,
        typer.Option(
            "--signal-seconds",
            metavar="S",
            help="How long before the time limit it saves; if not given by a checkpoint's size, at least 120.",
        ),
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Whether it starts again behind a preemption or time limit.")
    ] = True,
    max_requeues: Annotated[
        int, typer.Option("--max-requeues", metavar="K", help="So many starts again at most; then submit it again.")
    ] = 100,
    device_memory: Annotated[
        str | None,
        typer.Option("--device-memory", metavar="SIZE", help="What a rank will have: 80GB. No verdict if not given."),
    ] = None,
    overrides: Overrides = None,
    change: Changes = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write it although the memory plan says that it does not fit.")
    ] = False,
    check_data: Annotated[
        bool, typer.Option("--check-data/--no-check-data", help="Whether the data can be seen from here.")
    ] = True,
) -> None:
    """Write an sbatch script: saved before the time limit and on preemption, put back into the queue, resumed.

    The recipe is planned, and its data opened, before anything is written; exit 2 if it cannot run. The script needs
    this folder, and a run directory that all nodes see.
    """
    from launch.slurm import Request, prepare_script, write

    request = Request(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        cpus_per_task=cpus_per_task,
        time=time_limit,
        signal_seconds=signal_seconds,
        requeue=requeue,
        max_requeues=max_requeues,
        job_name=job_name,
        options={"partition": partition, "account": account, "qos": qos, "constraint": constraint, "mem": mem},
        sbatch=tuple(sbatch or ()),
        setup=tuple(setup or ()),
        environment=tuple(environment or ()),
    )
    run_directory = run_directory or Path("runs") / recipe.stem
    text = prepare_script(
        recipe,
        run_directory,
        request,
        overrides=overrides or (),
        changes=change or (),
        device_memory=device_memory,
        check_data=check_data,
        force=force,
    )
    if output is None:
        print(text, end="")
    else:
        write(text, output)
        print(f"sbatch {shlex.quote(str(output))}")
    (run_directory / "logs").mkdir(parents=True, exist_ok=True)  # SLURM makes none, and a job without a log is silent


@app.command(
    epilog="\b\nExamples:\n  python -m launch check\n"
    "  python -m launch check pretrain/recipes/0.5b.toml --hostfile hosts\n"
    "  python -m launch check pretrain/recipes/0.5b.toml --hostfile hosts --run runs/first --grace-seconds 120\n"
    "  python -m launch check --hostfile hosts --skip disk --skip all-reduce --json"
)
def check(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="As in run; the machines alone if not given.")
    ] = None,
    hostfile: HostFile = None,
    run_directory: RunDirectory = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="Ranks on this machine; one a GPU, or one on a CPU, if not given."),
    ] = None,
    overrides: Overrides = None,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="NAME[=VALUE]", help="As in run.")] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Where all nodes reach the first one.")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option("--master-port", metavar="P", help="Its port; one that is free here if not given.")
    ] = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option(
            "--grace-seconds", metavar="S", help="A save must take no longer; if not given 30, and a warning."
        ),
    ] = None,
    wait_seconds: Annotated[
        float, typer.Option("--wait-seconds", metavar="S", help="How long ranks wait for each other.")
    ] = 60.0,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="NAME", help="A check not to make, by its name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Ask every node, at the same time, whether a run would start there; exit 2 with the reasons if not.

    Versions, code, devices, memory, paths, disks, clocks, ports, routes, and all-reduces over all ranks. Nothing stays
    behind on the nodes; ssh must let this machine in without a password.
    """
    from rich.console import Console

    from launch.check import check as check_nodes
    from launch.check import of_options

    asked = of_options(
        recipe,
        environ=os.environ,
        run_directory=run_directory,
        hostfile=hostfile,
        ranks=ranks,
        env=env or (),
        master_addr=master_addr,
        master_port=master_port,
        grace_seconds=grace_seconds,
    )
    progress = Console(stderr=True).status("") if sys.stderr.isatty() else nullcontext()
    with progress as status:
        say = status.update if status is not None else lambda round: None
        report = check_nodes(asked, overrides or (), skip or (), wait_seconds, say)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        report.print(Console(highlight=False, width=None if sys.stdout.isatty() else REPORT_COLUMNS))
    raise typer.Exit(2 if report.reasons else 0)


@app.command(epilog="\b\nExamples:\n  python -m launch status runs/mini\n  python -m launch status runs/mini --json")
def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """How far a run is, how fast, whether it lives, which rank is late, how its ranks ended.

    Exit 0 where it runs or has ended well, 1 where it failed or fell silent. It reads the run directory alone.
    """
    from launch.status import read

    found = read(run)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found.to_text())
    raise typer.Exit(1 if found.state in ("failed", "silent") else 0)


@app.command(
    epilog="\b\nExamples:\n  python -m launch stop runs/mini\n  python -m launch stop runs/mini --deadline 300"
)
def stop(
    run: Run,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", metavar="SECONDS", help="Behind so many, end it at once; wait for it if not given."),
    ] = None,
) -> None:
    """Have a run save its last whole step and stop, and wait for that; Ctrl-C ends the waiting alone.

    Exit 0 where it has stopped or finished, or was not running; 1 where it failed or had to be ended.
    """
    from launch.stop import stop as stop_run

    raise typer.Exit(stop_run(run, deadline))


@app.command(epilog="\b\nExamples:\n  python -m launch demo")
def demo() -> None:
    """Raw text to an evaluated, sampled model, killed and resumed on the way; exit 1 if a promise does not hold."""
    from launch.demo import Demo

    raise typer.Exit(0 if Demo().run() else 1)


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
    sys.stderr = unfailing(sys.stderr)
    _refuse_impostors()
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names and texts may hold what it can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)  # None, or the code of a typer.Exit
        print(end="", flush=True)  # does nothing where stdout is closed
    except BrokenPipeError:  # whoever read our output has left; without this, Python says so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (LaunchError, OSError) as error:
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
