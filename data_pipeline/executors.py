"""`prepare` by datatrove's executors: processes of this machine, a SLURM cluster, a Ray cluster.

A task of theirs is a part of the units (`prepare_part`): any executor, any number of tasks, the same bytes. What they
record of finished tasks is not asked: our receipts say what is done. datatrove and Ray are optional (the extra
`cluster`); all that is used of them is that they call a function with a rank and the number of ranks somewhere.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_pipeline.corpus import Place
from data_pipeline.prepare import Part, prepare, prepare_part
from data_pipeline.unit import Options, PrepareError

Executor = Literal["datatrove", "slurm", "ray"]
EXECUTORS: tuple[Executor, ...] = ("datatrove", "slurm", "ray")

_ROOT = Path(__file__).resolve().parents[1]
_TASK_GIGABYTES = 1


@dataclass(frozen=True)
class Work:
    """What `prepare` is asked for, as its arguments, and the folder that relative paths count from."""

    inputs: Mapping[str, Sequence[Place]]
    tokenizer: Path
    out: Path
    options: Options
    strict: bool
    folder: Path


@dataclass(frozen=True)
class PartTask:
    """A step of a datatrove pipeline: the part of the work that this rank has."""

    work: Work

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        work = self.work
        os.chdir(work.folder)
        part = Part(rank + 1, world_size)
        prepare_part(work.inputs, work.tokenizer, work.out, work.options, part=part, strict=work.strict)


@dataclass(frozen=True)
class LastTask:
    """A step of a datatrove pipeline, for one rank: what is left, and the manifests."""

    work: Work

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        work = self.work
        os.chdir(work.folder)
        prepare(work.inputs, work.tokenizer, work.out, work.options, strict=work.strict)


def run_parts(
    work: Work, executor: Executor, *, tasks: int, workers: int, logs: Path, slurm: Mapping[str, str]
) -> bool:
    """Do the work in `tasks` parts, `workers` of them at a time; whether they are done now. On SLURM they are only
    submitted, and after them the job that ends the work: False.

    `slurm`: options of sbatch by name, `partition` and `time` among them. PrepareError: datatrove or Ray is missing, or
    parts that failed; see `logs`.
    """
    if tasks < 1:
        raise PrepareError(f"{tasks} tasks cannot work; take 1 or more")
    rounds = ["hash", "tokenize"] if work.options.deduplicate else ["tokenize"]
    if executor == "slurm":
        _submit(work, rounds, tasks, workers, logs, dict(slurm))
        return False
    for name in rounds:
        _run(work, executor, tasks, workers, logs / name)
    # A part without units, which does nothing and knows what is left.
    left = prepare_part(work.inputs, work.tokenizer, work.out, work.options, part=Part(1, 2**62)).units_left
    if left:
        raise PrepareError(
            f"{left:,} units were not done; see {logs / rounds[-1] / 'logs'}, and start again to continue"
        )
    return True


def _run(work: Work, executor: Executor, tasks: int, workers: int, logs: Path) -> None:
    arguments: dict[str, Any] = {
        "pipeline": [PartTask(work)],
        "tasks": tasks,
        "workers": min(workers, tasks),
        "logging_dir": str(logs),
        "skip_completed": False,
    }
    try:
        if executor == "datatrove":
            from datatrove.executor.local import LocalPipelineExecutor

            LocalPipelineExecutor(**arguments).run()
            return
        import ray
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError as error:
        raise _missing(error) from None
    if not ray.is_initialized():  # RAY_ADDRESS, a cluster of this machine, else a new one
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": _python_path()}}, include_dashboard=False)
    RayPipelineExecutor(**arguments, mem_per_cpu_gb=_TASK_GIGABYTES).run()


def _submit(work: Work, rounds: Sequence[str], tasks: int, workers: int, logs: Path, slurm: dict[str, str]) -> None:
    """Submit an array of jobs a round, each waiting for the one before, and one job that ends the work."""
    try:
        from datatrove.executor.slurm import SlurmPipelineExecutor
    except ImportError as error:
        raise _missing(error) from None
    absent = [name for name in ("partition", "time") if name not in slurm]
    if absent:
        raise PrepareError(f"--slurm {absent[0]}=VALUE is missing; SLURM needs partition and time (such as 24:00:00)")
    binaries = Path(sys.executable).parent
    environment = (
        f"cd {shlex.quote(str(work.folder))}"
        f" && export PATH={shlex.quote(str(binaries))}:$PATH PYTHONPATH={shlex.quote(_python_path())}"
    )
    settings: dict[str, Any] = {
        "partition": slurm.pop("partition"),
        "time": slurm.pop("time"),
        "qos": slurm.pop("qos", None),
        "env_command": environment,
        "mem_per_cpu_gb": _TASK_GIGABYTES,
        "sbatch_args": slurm,
        "skip_completed": False,
    }
    last = None
    for name in rounds:
        last = SlurmPipelineExecutor(
            [PartTask(work)], tasks=tasks, workers=min(workers, tasks), job_name=f"prepare-{name}",
            logging_dir=str(logs / name), depends=last, **settings,
        )  # fmt: skip
    SlurmPipelineExecutor(
        [LastTask(work)], tasks=1, job_name="prepare-end", logging_dir=str(logs / "end"), depends=last, **settings
    ).run()


def _python_path() -> str:
    """Where this project's packages lie, before whatever PYTHONPATH says."""
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def _missing(error: ImportError) -> PrepareError:
    return PrepareError(f"{error}: install the optional packages, `pip install -e '.[cluster]'`")
