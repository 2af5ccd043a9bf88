"""One command line out of a recipe and the machines it shall run on, and what a person should see before it runs."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.addresses import LOOPBACK, free_port, meeting_address, quiet_ports, refuse_taken
from launch.devices import visible_gpus
from launch.environment import MASK, asked_for, looks_secret, passed_on, shown, to_text
from launch.errors import LaunchError
from launch.hosts import Host
from launch.planning import as_argument, described, plan_recipe
from launch.remote import is_here
from launch.where import RUNNERS, Where, chosen_launcher, host_here, hosts_of, ranks_here, refuse_unreachable

DEFAULT_PORT = 29_500  # DeepSpeed's and torch's, where each node's command must name the same
JOB_HOSTFILE = Path("/job/hostfile")  # DeepSpeed reads it, where there is one, unless another is named
PACKAGES = {"pdsh": "pdsh", "openmpi": "openmpi-bin", "mpich": "mpich"}  # Debian's
PROGRAMS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mpich": "mpirun"}
MPI_SAFE = re.compile(r"[^\w@%+=:,./-]", re.ASCII)  # else DeepSpeed puts quotes around it, which mpirun takes literally


@dataclass(frozen=True)
class Launch:
    """Everything that will run: one command line, what is added to the environment, and the plan behind it."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    run_directory: Path
    ranks: int
    plan: dict[str, Any]
    hosts: tuple[Host, ...] = ()  # in the order of their ranks; () for this machine alone
    node_rank: int | None = None  # of this machine, where each node's command starts its own ranks
    launcher: str = "deepspeed"
    passed: dict[str, str] = field(default_factory=dict)  # to other nodes
    command: str = ""  # the same as a person would type it

    @property
    def is_remote(self) -> bool:
        """Whether this one command starts ranks on other nodes."""
        return bool(self.hosts) and self.node_rank is None

    @property
    def own_ranks(self) -> range:
        """The ranks that this command starts."""
        if self.node_rank is None:
            return range(self.ranks)
        before = sum(host.slots for host in self.hosts[: self.node_rank])
        return range(before, before + self.hosts[self.node_rank].slots)

    def host_of(self, rank: int) -> str | None:
        """The name of a rank's host; None on this machine alone."""
        for host in self.hosts:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        return None

    def to_dict(self) -> dict[str, Any]:
        told = {
            "argv": list(self.argv),
            "environment": shown(self.environment),
            "passed_on": shown(self.passed),
            "launcher": self.launcher,
            "hosts": [{"name": host.name, "slots": host.slots} for host in self.hosts],
            "run_directory": str(self.run_directory),
            "world_size": self.ranks,
        }
        kept = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "tokens_per_step")
        told |= {name: self.plan[name] for name in kept}
        return told | {name: self.plan.get(name) for name in ("verdict", "data", "resume")}

    def to_text(self) -> str:
        lines = [("command", shlex.join(self.argv)), ("environment", to_text(self.environment) or "nothing added")]
        if any(map(looks_secret, self.environment)):
            lines.append(("", f"ranks get the values that are shown as {MASK}"))
        if self.is_remote:
            lines.append(("passed on", to_text(self.passed) or "nothing"))
        if self.hosts:
            here = "" if self.node_rank is None else f", this is node {self.node_rank}"
            lines.append(("hosts", ", ".join(f"{host.name} × {host.slots}" for host in self.hosts) + here))
        lines += [("run directory", str(self.run_directory)), ("world size", str(self.ranks))]
        lines += described(self.plan, self.ranks)
        return "\n".join(f"{label:<16} {text}" for label, text in lines)


def prepare(
    recipe: Path,
    *,
    run_directory: Path | None,
    where: Where,
    overrides: Sequence[str],
    resume: str,
    changes: Sequence[str] = (),
    environ: Mapping[str, str],
    dry_run: bool = False,
    force: bool = False,
    restarts: int = 0,
    elastic: str | None = None,
    max_minutes: float | None = None,
    grace_seconds: float | None = None,
    timeout_minutes: float | None = None,
) -> Launch:
    """Plan the recipe and build the command. LaunchError: the recipe's own error line, or what is missing here.

    What does not fit this machine's devices is refused, with `force` it is a warning. The port is free when this is
    called. `dry_run`: no other machine is asked. `restarts` and `elastic` only stand in the command that goes on.
    `max_minutes`, `grace_seconds` and `timeout_minutes` are the run's.
    """
    limits = {"--max-minutes": max_minutes, "--grace-seconds": grace_seconds, "--timeout-minutes": timeout_minutes}
    for option, given in limits.items():
        if given is not None and not 0 < given < math.inf:
            raise LaunchError(f"{option} {given:g}: must be more than 0")
    launcher = chosen_launcher(where)
    asked = asked_for(where.env, environ)
    gpus = visible_gpus({**environ, **asked})
    hosts = hosts_of(where, gpus)
    world_size = sum(host.slots for host in hosts) if hosts else ranks_here(where, gpus)
    here = host_here(hosts, where.node_rank)
    own = here.slots if here is not None else 0 if hosts else world_size
    if gpus and len(gpus) < own:
        option = f"--ranks {own}" if here is None or where.hostfile is None else f"{where.hostfile}: slots={own}"
        raise LaunchError(f"{option}: only {len(gpus)} GPUs are visible and each rank needs its own")
    directory = run_directory if run_directory is not None else Path("runs") / recipe.stem
    plan = plan_recipe(
        recipe, world_size, overrides, check_data=own > 0, force=force,
        memory=("--device-memory", "auto") if own else (), ranks_here=own or None,
        run=directory if own else None, resume=resume, changes=changes,
    )  # fmt: skip
    options = [word for override in overrides for word in ("--set", override)]
    options += [word for name in changes for word in ("--change", name)]
    options += ["--force"] if force else []
    options += [word for option, given in limits.items() if given is not None for word in (option, f"{given:g}")]
    trained = [as_argument(recipe), "--run", str(directory), "--resume", resume, *options]
    words = ["python", "-m", "launch", "run", as_argument(recipe), *_where_words(where, world_size)]
    words += ["--run", str(directory)]
    words += ["--resume", resume] if resume not in ("auto", "never") else []  # never would refuse what it has saved
    words += ["--restarts", str(restarts)] if restarts else []
    words += ["--elastic", elastic] if elastic is not None else []
    command = shlex.join([*words, *options])
    # What goes on with a run on this machine alone its ranks can say by themselves, but for these options.
    starter = ["--started-by", command] if restarts or where != Where(ranks=where.ranks) else []
    added = {**(added_environment(bool(gpus), own, {**environ, **asked}) if own else {}), **asked}
    passed: dict[str, str] = {}
    if hosts and where.node_rank is None:
        refuse_missing(launcher)
        if not dry_run and launcher == "pdsh":
            refuse_unreachable(hosts)
        passed = passed_on(environ, added, asked)
        warn_of_unread(Path.home(), Path.cwd())
        added = {}
        argv = through_runner(where, launcher, hosts, [*trained, *starter], passed)
    elif hosts or launcher == "torchrun":
        argv = by_hand(where, launcher, hosts or (Host("localhost", world_size),), gpus, [*trained, *starter])
    else:
        port = where.master_port if where.master_port is not None else free_port()
        if where.master_port is not None:
            refuse_taken(port)
        argv = [str(deepspeed_script()), *devices(gpus, world_size), "--master_port", str(port)]
        argv += ["--hostfile", os.devnull] if JOB_HOSTFILE.exists() else []  # that is for several machines
        argv += ["--log_level", "critical", "--module", "pretrain", "run"]  # launch says what happened
        argv += [*trained, *starter]
    return Launch(
        tuple(argv), added, directory, world_size, plan, hosts, where.node_rank, launcher, passed, command
    )  # fmt: skip


def through_runner(
    where: Where, launcher: str, hosts: Sequence[Host], trained: Sequence[str], passed: dict[str, str]
) -> list[str]:
    """DeepSpeed's runner, which starts ranks on all hosts. MPI's ranks are told where they meet by `passed`."""
    names = [host.name for host in hosts]
    address = where.master_addr or meeting_address(names)
    on_first = is_here(hosts[0].machine)
    if where.master_port is not None and on_first:
        refuse_taken(where.master_port)
    elsewhere = next(iter(quiet_ports()), DEFAULT_PORT)  # who could say what is free there
    port = where.master_port or (free_port() if on_first else elsewhere)
    argv = [str(deepspeed_script()), "--hostfile", str(where.hostfile), "--launcher", RUNNERS[launcher]]
    argv += ["--force_multi", "--no_ssh_check", "--master_addr", address, "--master_port", str(port)]
    # A prefix of pdsh's would stand before the ranks' own.
    own_args = f"-N {where.launcher_args}".strip() if launcher == "pdsh" else where.launcher_args
    argv += [f"--launcher_args={own_args}"] if own_args else []
    argv += ["--log_level", "critical", "--module", "pretrain", "run"]
    if launcher != "pdsh":
        passed |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        unsafe = next((name for name, value in passed.items() if MPI_SAFE.search(value)), None)
        if unsafe is not None:
            raise LaunchError(f"{unsafe} cannot be passed on by mpirun: its value has more than letters and @%+=:,./-")
        return [*argv, *trained]
    for path in (str(Path.cwd()), sys.executable):
        if shlex.quote(path) != path:
            raise LaunchError(f"{path}: DeepSpeed's pdsh runner takes no path with spaces or the like: move it")
    return [*argv, *map(through_shell, trained)]


@contextmanager
def own_hostfile(launch: Launch) -> Iterator[Launch]:
    """The launch with a host file of ours in memory, while this lasts, in place of the one that was given: DeepSpeed
    and mpirun would read that once more, and not as we do (a BOM, a pipe), and would take all of its hosts."""
    if not launch.is_remote:
        yield launch
        return
    with os.fdopen(os.memfd_create("hosts"), "w", encoding="utf-8") as file:
        file.writelines(f"{host.name} slots={host.slots}\n" for host in launch.hosts)
        file.flush()
        place = launch.argv.index("--hostfile") + 1
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield replace(launch, argv=(*launch.argv[:place], path, *launch.argv[place + 1 :]))


def through_shell(word: str) -> str:
    """A word so that it arrives as it is: pdsh writes numbers for %n, and each node's shell reads what it starts.

    DeepSpeed puts quotes around words with a space, and \\ before a quote in them; the others it leaves alone.
    """
    quoted = re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")


def by_hand(
    where: Where, launcher: str, hosts: Sequence[Host], gpus: Sequence[int], trained: Sequence[str]
) -> list[str]:
    """What starts this node's own ranks, where each node is given the same command, or where there is but one."""
    node_rank, alone = where.node_rank or 0, where.node_rank is None
    address = where.master_addr or LOOPBACK
    port = where.master_port or (free_port() if alone else DEFAULT_PORT)
    if node_rank == 0 and (where.master_port is not None or not alone):
        refuse_taken(port)
    if launcher == "torchrun":
        slots = {host.slots for host in hosts}
        if len(slots) > 1:
            raise LaunchError("torchrun starts equally many ranks on each node: leave out --launcher torchrun")
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank"]
        argv += [str(node_rank), "--nproc-per-node", str(slots.pop()), "--master-addr", address]
        # torchrun takes a --run, even one behind its program, for a beginning of its own --run-path, and refuses it.
        trained = ["--run-dir" if word == "--run" else word for word in trained]
        return [*argv, "--master-port", str(port), "-m", "pretrain", "run", *trained]
    world = {host.name: list(range(host.slots)) for host in hosts}
    if gpus:
        world[hosts[node_rank].name] = list(gpus[: hosts[node_rank].slots])
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    argv = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={info}"]
    argv += [f"--node_rank={node_rank}", f"--master_addr={address}", f"--master_port={port}"]
    return [*argv, "--log_level", "critical", "--module", "pretrain", "run", *trained]


def warn_of_unread(*folders: Path) -> None:
    """DeepSpeed's own list of variables for other nodes: ours takes its place."""
    for path in (folder / ".deepspeed_env" for folder in folders):
        if path.is_file():
            print(f"warning: {path} is not read: say with --env NAME=VALUE what of it ranks need", file=sys.stderr)


def refuse_missing(launcher: str) -> None:
    """LaunchError where a program is not installed that has to start the ranks."""
    program = PROGRAMS[launcher]
    found = shutil.which(program)
    if found is not None and launcher != "pdsh":
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
        if ("Open MPI" in said) != (launcher == "openmpi"):
            its = said.strip().partition("\n")[0]
            raise LaunchError(
                f"--launcher {launcher}: the mpirun is another here ({its}): put the right one first on PATH"
            )
    if found is None:
        raise LaunchError(
            f"{program} is not installed on this machine: apt-get install {PACKAGES[launcher]}, or give "
            "the same command on each node with --node-rank"
        )


def deepspeed_script() -> Path:
    """The `deepspeed` command of the Python that runs this, never another one on PATH."""
    script = Path(sys.executable).parent / "deepspeed"
    if not script.is_file():
        raise LaunchError(f"{script} is missing: install deepspeed into this virtualenv (make setup)")
    return script


def devices(gpus: Sequence[int], ranks: int) -> list[str]:
    """DeepSpeed's choice of devices. `--num_gpus N` takes the first N whatever CUDA_VISIBLE_DEVICES says, so a
    narrowed set is named one by one."""
    chosen = list(gpus[:ranks])
    if chosen == list(range(len(chosen))):
        return ["--num_gpus", str(ranks)]
    return ["--include", "localhost:" + ",".join(str(gpu) for gpu in chosen)]


def added_environment(on_gpu: bool, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a run needs on top of `environ`: on a CPU, DeepSpeed's CPU accelerator and a fair share of cores a rank."""
    if on_gpu:
        return {}
    added = {"DS_ACCELERATOR": "cpu"} if environ.get("DS_ACCELERATOR") != "cpu" else {}
    if "OMP_NUM_THREADS" not in environ:
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return added


def _where_words(where: Where, world_size: int) -> list[str]:
    """The options of `launch run` that say where, without the values of secrets."""
    words = ["--ranks", str(where.ranks or world_size)] if where.hostfile is None and where.node_rank is None else []
    given = {
        "--hostfile": where.hostfile, "--ranks": where.ranks if where.node_rank is not None else None,
        "--launcher": where.launcher, "--launcher-args": where.launcher_args or None, "--nodes": where.nodes,
        "--node-rank": where.node_rank, "--master-addr": where.master_addr, "--master-port": where.master_port,
    }  # fmt: skip
    words += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    names = [wish.partition("=")[0] for wish in where.env]
    wishes = [name if looks_secret(name) else wish for name, wish in zip(names, where.env, strict=True)]
    return words + [word for wish in wishes for word in ("--env", wish)]
