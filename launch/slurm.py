"""A recipe as an sbatch script, such as a person would write it: nothing in it needs this file again.

How SLURM ends a job decides what the script does (sbatch(1), slurm.conf(5), and tests/launch/test_slurm_cluster.py):

- before the time limit (`--signal`), and on preemption with a GraceTime, only the ranks are signalled. They save and
  end well, and so would the job, for good: the script puts it back into the queue itself.
- on preemption without GraceTime, `scontrol requeue` and `scancel`, ranks and script get SIGTERM, and SIGKILL a
  KillWait later. SLURM puts the job back by itself or means its end: the script must not.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.environment import asked_for, looks_secret
from launch.errors import LaunchError
from launch.planning import as_argument, described, plan_recipe

# What of the submitting shell reaches the ranks beside SLURM's own variables: who and where one is, nothing else.
PASSED_ON = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
# Directives with an option of their own, or that the script itself rests on.
OWN = (
    *("account", "constraint", "cpus-per-task", "error", "export", "export-file", "job-name", "mem", "nodes", "ntasks"),
    *("ntasks-per-node", "no-requeue", "open-mode", "output", "partition", "qos", "requeue", "signal", "time"),
)
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})", re.ASCII)
GPUS = re.compile(r"(?:[\w.-]+:)?([1-9]\d*)", re.ASCII)
# As pretrain assumes it of a slow disk before it has measured one.
WRITTEN_BYTES_PER_SECOND = 1e8
SHORTEST_SIGNAL_SECONDS = 120


@dataclass(frozen=True)
class Request:
    """What is asked of SLURM. LaunchError from `check` where that makes no job."""

    nodes: int = 1
    gpus_per_node: str | None = None  # as sbatch takes it, [TYPE:]N: one rank a GPU
    ranks_per_node: int | None = None  # on CPUs
    cpus_per_task: int | None = None
    time: str | None = None
    signal_seconds: int | None = None  # between the signal to save and the time limit
    requeue: bool = True
    max_requeues: int = 100
    job_name: str | None = None
    options: Mapping[str, str | None] = field(default_factory=dict)  # partition, account, qos, constraint, mem
    sbatch: tuple[str, ...] = ()  # more directives: KEY or KEY=VALUE
    setup: tuple[str, ...] = ()  # lines of bash
    environment: tuple[str, ...] = ()  # NAME, taken from the submitting shell, or NAME=VALUE

    @property
    def on_gpus(self) -> bool:
        return self.gpus_per_node is not None

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        match = GPUS.fullmatch(self.gpus_per_node or "")
        return int(match[1]) if match else self.ranks_per_node or 0

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def cpus(self) -> int:
        """Cores of a rank: on a GPU some for reading ahead and for libraries, however little SLURM gives by itself."""
        return self.cpus_per_task or (4 if self.on_gpus else 1)

    @property
    def named(self) -> dict[str, str]:
        """Directives that sbatch is told as they are given."""
        named = {"job-name": self.job_name, **self.options, "time": self.time}
        return {key: value for key, value in named.items() if value is not None}

    @property
    def passed_on(self) -> tuple[str, ...]:
        return (*PASSED_ON, *(one for one in self.environment if "=" not in one))

    @property
    def set_here(self) -> dict[str, str]:
        named = (one.partition("=") for one in self.environment)
        return {name: value for name, equals, value in named if equals}

    def check(self) -> None:
        """Refuse what sbatch would refuse later, and what would not mean what it says."""
        if (self.gpus_per_node is None) == (self.ranks_per_node is None):
            raise LaunchError("give either --gpus-per-node G, one rank a GPU, or --ranks-per-node R to train on CPUs")
        if self.gpus_per_node is not None and not GPUS.fullmatch(self.gpus_per_node):
            raise LaunchError(
                f"--gpus-per-node {self.gpus_per_node}: give [TYPE:]N with N of at least 1, as in 8, a100:4"
            )
        numbers = {
            "--nodes": self.nodes,
            "--ranks-per-node": self.ranks_per_node,
            "--cpus-per-task": self.cpus_per_task,
            "--signal-seconds": self.signal_seconds,
        }
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise LaunchError(f"{option} {number}: must be at least 1")
        if self.max_requeues < 0:
            raise LaunchError(f"--max-requeues {self.max_requeues}: must be at least 0")
        lines = {"--setup": self.setup, "--sbatch": self.sbatch, "--env": self.environment}
        lines |= {f"--{key}": (value,) for key, value in self.named.items()}
        for option, texts in lines.items():
            for text in texts:
                refuse_unprintable(option, text)
        for one in self.sbatch:
            key = one.partition("=")[0]
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
                raise LaunchError(
                    f"--sbatch {one}: give a long option of sbatch without its dashes, as in reservation=NAME"
                )
            if key in OWN:
                raise LaunchError(f"--sbatch {one}: the script sets {key} itself, see --help for the option")
        for name in asked_for(self.environment, dict.fromkeys(self.passed_on, "")):
            if name in self.set_here and looks_secret(name):
                raise LaunchError(
                    f"--env {name}=…: a secret would stand in the script: give --env {name}, and the value is taken "
                    "from the shell that submits it"
                )


def prepare_script(
    recipe: Path,
    run: Path,
    request: Request,
    *,
    overrides: Sequence[str],
    changes: Sequence[str] = (),
    device_memory: str | None,
    check_data: bool,
    force: bool,
) -> str:
    """Plan the recipe for the job's ranks, and give the script that runs it from the working directory.

    LaunchError: the recipe's own error line (it does not divide, does not fit `device_memory`, lacks its data, would
    not resume what is in `run`), or what is wrong with the request.
    """
    request.check()
    memory = ["--device", "cuda" if request.on_gpus else "cpu"]
    memory += ["--device-memory", device_memory] if device_memory is not None else []
    if device_memory == "auto":
        raise LaunchError("--device-memory auto would be this machine's: give the SIZE a rank will have, as in 80GB")
    plan = plan_recipe(
        recipe,
        request.ranks,
        overrides,
        check_data=check_data,
        force=force,
        memory=memory,
        ranks_here=request.per_node,
        run=run,
        changes=changes,
    )
    arguments = [word for override in overrides for word in ("--set", override)]
    arguments += [word for name in changes for word in ("--change", name)]
    arguments += ["--force"] if force else []
    return script(recipe, run, request, plan, directory=Path.cwd(), python=sys.executable, arguments=tuple(arguments))


def signal_seconds(request: Request, plan: Mapping[str, Any]) -> int:
    """How long before the time limit the ranks are signalled: what is asked, else enough to finish a step and save.

    LaunchError where it would be no shorter than the job. SLURM signals up to a minute earlier than it is told.
    """
    saving = plan["checkpoint"]["bytes"] / WRITTEN_BYTES_PER_SECOND
    needed = max(SHORTEST_SIGNAL_SECONDS, 60 * math.ceil((2 * saving + 60) / 60))
    seconds = request.signal_seconds or needed
    if request.time is not None and (limit := time_seconds(request.time)) and limit <= seconds + 60:
        raise LaunchError(
            f"--time {request.time} leaves nothing to train in: the ranks are told to save {seconds} s before its end, "
            "and SLURM may say so a minute earlier: give more time, or fewer --signal-seconds"
        )
    if seconds > 65_535:
        raise LaunchError(f"--signal-seconds {seconds}: SLURM takes at most 65535")
    return seconds


def time_seconds(text: str) -> int:
    """sbatch's --time in seconds: MINUTES, M:S, H:M:S, D-H, D-H:M, D-H:M:S; 0 for no limit. LaunchError for others."""
    if text.lower() in ("infinite", "unlimited"):
        return 0
    match = TIME.fullmatch(text)
    if match is None:
        raise LaunchError(f"--time {text}: give minutes, H:M:S or D-H:M:S, as in 90, 12:00:00 or 2-00:00:00")
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return 86_400 * int(match["days"]) + 3_600 * hours + 60 * minutes + seconds
    hours, minutes, seconds = (0, *parts, 0)[:3] if len(parts) < 3 else parts
    return 3_600 * hours + 60 * minutes + seconds


def refuse_unprintable(name: str, text: str) -> None:
    """A line break would end a comment or a directive, and whatever follows would be run."""
    if not text or not text.isprintable():
        raise LaunchError(f"{name}: it must be one line of printable characters, to stand in a script")


def script(
    recipe: Path,
    run: Path,
    request: Request,
    plan: Mapping[str, Any],
    *,
    directory: Path,
    python: str,
    arguments: tuple[str, ...] = (),
) -> str:
    """The script's text. It depends on nothing but its arguments, and holds no value of any environment.

    `directory` is where the job works: `recipe` and `run` may be relative to it. `arguments` are more options of
    `pretrain run`. LaunchError where something can't stand in a script.
    """
    request.check()
    words = {"RECIPE": recipe, "--run": run, "the working directory": directory, "Python's path": python}
    for name, word in (*words.items(), *(("--set", word) for word in arguments)):
        refuse_unprintable(name, str(word))
    if "\\" in str(directory / run):
        raise LaunchError(
            f"--run {run}: SLURM gives a backslash in the name of a log a meaning of its own: choose another"
        )
    seconds = signal_seconds(request, plan)
    parts = [head(recipe, run, request, plan, seconds), directives(recipe, directory / run, request, seconds)]
    # What sites offer to be sourced is seldom written for `set -u`.
    strict = ["set -eo pipefail", *request.setup, "set -u"] if request.setup else ["set -euo pipefail"]
    parts += ["\n".join([*strict, ""])]
    parts += [
        PLACES.format(directory=shlex.quote(str(directory)), run=shlex.quote(str(run))),
        MEETING + exports(request),
        RANKS.format(
            cpus=request.cpus,
            per_node=request.per_node,
            python=shlex.quote(python),
            recipe=shlex.quote(as_argument(recipe)),
            arguments=shlex.join(["--resume", "auto", "--grace-seconds", str(seconds), *arguments]),
        ),
        VERDICT,
        AGAIN.format(max_requeues=request.max_requeues) if request.requeue else NOT_AGAIN,
    ]
    return "\n".join(parts)


def head(recipe: Path, run: Path, request: Request, plan: Mapping[str, Any], seconds: int) -> str:
    """The comment at the top: what will run, how to submit, watch and stop it."""
    logs, stop = run / "logs", shlex.quote(str(run / "stop"))
    size = plan["checkpoint"]["bytes"] / 1e9
    again = "saves and starts again" if request.requeue else "saves and ends"
    lines = [
        (
            "world size",
            f"{request.ranks} = {request.nodes} × {request.per_node} {'GPUs' if request.on_gpus else 'CPU ranks'}",
        ),
        *described({name: value for name, value in plan.items() if name != "resume"}, request.ranks),
        ("to save", f"{size:.2f} GB, for which the ranks have {seconds} s before the time limit"),
        ("submit", "sbatch THIS-FILE"),
        ("watch", f"squeue --me; tail -f {shlex.quote(str(logs))}/slurm-JOB.log; the ranks' own logs stand beside it"),
        ("stop", f"touch {stop}: saves and ends; to go on, submit it again"),
        ("", f"scancel --signal=USR1 JOB: {again}; scancel JOB: ends, saving if KillWait is enough"),
    ]
    for _, line in lines:
        refuse_unprintable("RECIPE", line)
    told = "\n".join(f"# {name:<16} {line}" for name, line in lines)
    return f"#!/bin/bash -l\n# {recipe}, trained by SLURM; written by `python -m launch slurm`\n#\n{told}\n#"


def directives(recipe: Path, run: Path, request: Request, seconds: int) -> str:
    """The #SBATCH lines; `run` is absolute."""
    log = str(run / "logs").replace("%", "%%") + "/slurm-%j.log"
    more = dict.fromkeys(request.sbatch)
    gres = any(one.startswith(("gres=", "gpus-per-node=")) for one in more)
    chosen: dict[str, Any] = {
        "job-name": recipe.stem,
        **request.named,
        "nodes": request.nodes,
        "ntasks-per-node": request.per_node,
        **({"gpus-per-node": request.gpus_per_node} if request.on_gpus and not gres else {}),
        "cpus-per-task": request.cpus,
        "signal": f"USR1@{seconds}",
    }
    lines = [f"{key}={shlex.quote(str(value))}" for key, value in chosen.items()]
    lines += ["requeue" if request.requeue else "no-requeue", "open-mode=append", f"output={shlex.quote(log)}"]
    lines += [f"export={','.join(request.passed_on)}"]
    for one in more:
        key, equals, value = one.partition("=")
        lines.append(f"{key}{equals}{shlex.quote(value) if equals else ''}")
    return "".join(f"#SBATCH --{line}\n" for line in lines)


def exports(request: Request) -> str:
    """Lines that set the environment of all ranks."""
    own = {"OMP_NUM_THREADS": str(request.cpus), "PYTHONUNBUFFERED": "1"}
    own |= {} if request.on_gpus else {"DS_ACCELERATOR": "cpu"}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in {**own, **request.set_here}.items())


def write(text: str, path: Path) -> None:
    """The script as a new file. LaunchError where there is one already: somebody may have edited it."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise LaunchError(f"{path} is there already: remove it, or choose another --output") from None


PLACES = """\
cd -- {directory}
run={run}
starts=${{SLURM_RESTART_COUNT:-0}}
logs=$run/logs/job-$SLURM_JOB_ID-start-$starts
mkdir -p -- "$logs"

# Whoever creates $run/stop means the job, also while it waits to start again.
if (( starts == 0 )); then
  rm -f -- "$run/stop"
elif [[ -e $run/stop ]]; then
  echo "$run/stop is there: not started again"
  exit 0
fi
"""

MEETING = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
export MASTER_PORT=$(( 10000 + SLURM_JOB_ID % 20000 ))
"""

# SLURM's numbers under the names that torch gives them. `exec`: whom SLURM signals is then the rank itself. A signal
# would end Python before it takes it, in its first second, and the job would have failed: whoever sent it sends SIGTERM
# in the end.
RANKS = """\
# SLURM itself ends the job: it, not this script, then says whether the job starts again.
ended=
trap 'ended=yes' TERM

code=0
# shellcheck disable=SC2016  # each task's own values
srun --export=ALL --kill-on-bad-exit=1 --cpus-per-task={cpus} --output="${{logs//%/%%}}/rank-%5t.log" \\
  bash -c 'trap "" TERM USR1  # until Python takes them
           export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={per_node}
           exec "$@"' rank \\
  {python} -m pretrain run {recipe} --run "$run" {arguments} || code=$?
"""

VERDICT = """\
if [[ -n $ended ]]; then
  echo "ended by SLURM (srun: $code)"
  exit "$code"
fi
if (( code != 0 )); then
  echo "error: a rank failed (srun: $code); the ranks' logs: $logs" >&2
  # Whoever only lost another rank does not know why.
  grep -m 1 -E '^(error|[A-Za-z.]+Error): ' -- "$logs"/rank-*.log |
    grep -v -E 'another rank (is gone|gave no answer)' | head -n 5 >&2 || true
  exit "$code"
fi
if [[ -e $run/stop ]]; then
  echo "stopped by $run/stop; to go on, submit it again"
  exit 0
fi
if grep -qs '"state": "finished"' "$run/status.json"; then
  echo "finished"
  exit 0
fi
"""

AGAIN = """\
if (( starts >= {max_requeues} )); then
  echo "error: stopped after $starts starts again, which is as many as there may be; submit it again to go on" >&2
  exit 1
fi
echo "stopped by a signal: back into the queue"
scontrol requeue "$SLURM_JOB_ID"
"""

NOT_AGAIN = """\
echo "stopped by a signal; to go on, submit it again"
"""
