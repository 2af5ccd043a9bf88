"""Where a run runs: on which machines, how many ranks on each, and what starts them there.

| where | what starts the ranks | what it needs |
|---|---|---|
| this machine | `deepspeed`, or torchrun | nothing |
| several, from one of them | DeepSpeed's runner: pdsh, or mpirun (openmpi, mpich) | a host file, ssh with keys |
| several, the same on each | DeepSpeed's launch.py (what `deepspeed --no_ssh` starts), or torchrun | --node-rank |

DeepSpeed's own runner for MPICH cannot start a module (it gives `python -m` a path). The one for Intel MPI can,
and MPICH's mpirun understands its words as well: that is what `--launcher mpich` uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.addresses import refuse_no_address, refuse_no_port
from launch.errors import LaunchError
from launch.hosts import Host, read_hostfile
from launch.remote import is_here, on_each

RUNNERS = {"pdsh": "pdsh", "openmpi": "openmpi", "mpich": "impi"}  # ours → DeepSpeed's
REFUSED = {
    "slurm": "DeepSpeed's runner starts no module by it: `python -m launch slurm RECIPE` writes a script for sbatch",
    "impi": "nobody could try it with Intel MPI: take mpich, whose words are the same, or --node-rank on each node",
    "mvapich": "DeepSpeed 0.19 asks for MVAPICH2-GDR, which nobody could try: take pdsh, or --node-rank on each node",
}
ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Where:
    """The machines, and how ranks are started on them."""

    ranks: int | None = None  # on this machine, or on each where the same command is given on all
    hostfile: Path | None = None
    only: tuple[str, ...] = ()  # of the host file's, by name; () for all
    launcher: str | None = None
    launcher_args: str = ""
    nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    env: tuple[str, ...] = ()


def chosen_launcher(where: Where) -> str:
    """What starts the ranks. LaunchError where the options do not go together, or where it cannot do that."""
    if where.master_port is not None:
        refuse_no_port(where.master_port)
    if where.master_addr is not None:
        refuse_no_address(where.master_addr)
    named = where.launcher
    if named in REFUSED:
        raise LaunchError(f"--launcher {named}: {REFUSED[named]}")
    if named not in (None, "deepspeed", "torchrun", *RUNNERS):
        raise LaunchError(f"--launcher {named}: take {', '.join(RUNNERS)} (with --hostfile), torchrun or deepspeed")
    by_hand = where.node_rank is not None
    if where.nodes is not None and not by_hand:
        raise LaunchError("--nodes goes with --node-rank (the same command on each node), or name them by --hostfile")
    if by_hand and where.hostfile is None and where.nodes is None:
        raise LaunchError("--node-rank needs to know how many nodes there are: add --nodes N, or --hostfile FILE")
    if by_hand and where.master_addr is None:
        raise LaunchError("--node-rank needs the address of node 0: add --master-addr HOST, the same on each node")
    if where.hostfile is None and not by_hand and (named in RUNNERS or where.master_addr is not None):
        what = f"--launcher {named}" if named in RUNNERS else "--master-addr"
        raise LaunchError(f"{what} is for several machines: add --hostfile FILE, or --node-rank I on each")
    if where.hostfile is not None and where.ranks is not None:
        raise LaunchError("--ranks and --hostfile: the host file says how many ranks each host has (slots=N)")
    if where.hostfile is not None and not by_hand:
        if named in ("torchrun", "deepspeed"):
            raise LaunchError(f"--launcher {named} starts ranks on this machine only: give --node-rank I on each node")
        return named or "pdsh"
    if by_hand and named in RUNNERS:
        raise LaunchError(f"--launcher {named} starts all nodes from one: leave out --node-rank, or leave it out")
    if where.launcher_args and not (where.hostfile is not None and not by_hand):
        raise LaunchError("--launcher-args are for pdsh or mpirun: add --hostfile FILE, or leave them out")
    return named or "deepspeed"


def hosts_of(where: Where, gpus: Sequence[int]) -> tuple[Host, ...]:
    """The hosts in the order of their ranks; () for this machine alone. LaunchError where a number is impossible."""
    hosts: tuple[Host, ...] = ()
    if where.hostfile is not None:
        hosts = read_hostfile(where.hostfile)
        if where.only:
            hosts = tuple(host for host in hosts if host.name in where.only)
    elif where.node_rank is not None:
        nodes = where.nodes or 0
        if nodes < 1:
            raise LaunchError(f"--nodes {nodes}: must be at least 1")
        hosts = tuple(Host(f"node-{number}", ranks_here(where, gpus)) for number in range(nodes))
    if where.hostfile is not None and where.nodes not in (None, len(hosts)):
        raise LaunchError(f"--nodes {where.nodes}: {where.hostfile} names {len(hosts)}")
    if where.node_rank is not None and not 0 <= where.node_rank < len(hosts):
        raise LaunchError(f"--node-rank {where.node_rank}: with {len(hosts)} nodes it is 0 to {len(hosts) - 1}")
    return hosts


def ranks_here(where: Where, gpus: Sequence[int]) -> int:
    ranks = where.ranks if where.ranks is not None else max(len(gpus), 1)
    if ranks < 1:
        raise LaunchError(f"--ranks {ranks}: must be at least 1")
    return ranks


def host_here(hosts: Sequence[Host], node_rank: int | None) -> Host | None:
    """Which of the hosts this machine is; None if none of them."""
    if node_rank is not None:
        return hosts[node_rank]
    return next((host for host in hosts if is_here(host.machine)), None)


def refuse_unreachable(hosts: Sequence[Host]) -> None:
    """LaunchError where ssh does not get into a host, or this folder is not there."""
    answers = on_each(hosts, ["true"], directory=Path.cwd(), environment={}, timeout=ANSWER_SECONDS)
    reasons = [f"{name}: {answer.reason()}" for name, answer in answers.items() if not answer.ok]
    if reasons:
        raise LaunchError(f"{'; '.join(reasons)}: every host needs ssh with keys, and this folder at the same place")
