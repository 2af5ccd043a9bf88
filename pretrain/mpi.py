"""Ranks that Open MPI's mpirun has started: their numbers under the names that every other launcher uses."""

from __future__ import annotations

from collections.abc import MutableMapping

NAMES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def adopt_names(environ: MutableMapping[str, str]) -> None:
    """Set RANK and its like where mpirun has set its own and nobody has set those.

    Only together with MASTER_ADDR, which mpirun does not know: without it, this is a program that mpirun happens to
    have started, not a rank of a run.
    """
    if "MASTER_ADDR" in environ and "RANK" not in environ and all(name in environ for name in NAMES.values()):
        environ.update({name: environ[its] for name, its in NAMES.items()})
