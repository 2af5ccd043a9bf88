"""A run's id on its way to ranks on other nodes, where command lines would show it to everybody.

What starts ranks there (pdsh, mpirun) writes their variables into command lines. So the variable names a file, and the
id goes before the ranks, over ssh and through the standard input of a shell (remote.py): a file a rank in /tmp, which
its user alone can read, and which the rank's keeper removes when it has read it (pretrain/keeper.py). Those of ranks
that never came are removed when the run has ended; where `launch run` is killed before its ranks have come, they stay:
some bytes each, which open nothing any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launch.command import Launch
from launch.errors import LaunchError
from launch.hosts import Host
from launch.lifelines import VARIABLE, Lifelines
from launch.remote import run_on

FOLDER = Path("/tmp")  # of each node alone, and there before a user has logged in
SECONDS = 20.0
# The words are the file's name up to its rank, and ranks. `set -C`: what is there already is not ours.
WRITE = 'umask 077; set -C; file=$1; shift; for rank; do printf %s "$RUN_ID" >"$file.$rank" || exit; done'
REMOVE = 'file=$1; shift; for rank; do rm -f "$file.$rank"; done'


@contextmanager
def handed_out(launch: Launch, lifelines: Lifelines) -> Iterator[dict[str, str]]:
    """The variable by which this command's ranks find it, while they run: with the id, or with the name of its files.

    LaunchError where a node takes none.
    """
    if not launch.is_remote:
        yield {VARIABLE: f"{lifelines.place}/{lifelines.run_id}"}
        return
    file = FOLDER / f"zerohalf-run-{secrets.token_hex(16)}"  # a name that nobody could take before
    ranks = _ranks_of(launch.hosts)
    try:
        _on_each(WRITE, file, ranks, {"RUN_ID": lifelines.run_id})
        yield {VARIABLE: f"{lifelines.place}/{file}"}
    finally:
        absent = {name: [rank for rank in own if rank not in lifelines.known] for name, own in ranks.items()}
        _on_each(REMOVE, file, {name: own for name, own in absent.items() if own}, {}, may_fail=True)


def _ranks_of(hosts: tuple[Host, ...]) -> dict[str, list[int]]:
    """The ranks of each host, by its name."""
    first, found = 0, {}
    for host in hosts:
        found[host.name] = list(range(first, first + host.slots))
        first += host.slots
    return found


def _on_each(
    script: str, file: Path, ranks: Mapping[str, list[int]], environment: Mapping[str, str], *, may_fail: bool = False
) -> None:
    commands = {name: ["sh", "-c", script, "sh", str(file), *map(str, own)] for name, own in ranks.items()}
    answers = run_on(commands, directory=FOLDER, environment=environment, timeout=SECONDS)
    reasons = [f"{name}: {answer.reason()}" for name, answer in answers.items() if not answer.ok]
    if reasons and not may_fail:
        raise LaunchError(f"{'; '.join(reasons)}: every host needs ssh with keys, and room for a file in {FOLDER}")
