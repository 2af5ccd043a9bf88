"""Which ranks see the same run directory, and what is done once in each.

Machines need not share a file system: `runs/x` may be another folder on each. So ranks leave marks there, look which
marks they see, and those that see the same ones share a home. With one home everything is as on one machine. With
several, `checkpoint.placement` says where checkpoints lie: "per_node" leaves each home the files of its own ranks,
"gathered" brings all to the first one (see parts.py); "shared", the default, refuses to start.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from pretrain.runtime import Ranks

T = TypeVar("T")

# A client of a network file system may remember for some seconds that a name was not there.
LOOK_SECONDS = 3.0
LOOK_AGAIN_SECONDS = 0.2
STALE_SECONDS = 600.0  # a mark as old as this was left by a start that was killed


@dataclass(frozen=True)
class Sharing:
    """The homes of a run: for each run directory the ranks that see it. Its methods are called on all ranks."""

    ranks: Ranks
    homes: tuple[tuple[int, ...], ...]  # ranks in ascending order; the first home is that of rank 0
    hosts: tuple[str, ...]  # by rank

    @classmethod
    def whole(cls, ranks: Ranks) -> Sharing:
        """All ranks have one home, as where there is one rank."""
        return cls(ranks, (tuple(range(ranks.world_size)),), (platform.node(),) * ranks.world_size)

    @property
    def is_one(self) -> bool:
        return len(self.homes) == 1

    @property
    def home(self) -> int:
        """The number of this rank's home."""
        return next(number for number, ranks in enumerate(self.homes) if self.ranks.rank in ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's home."""
        return self.homes[self.home]

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once in its home."""
        return self.ranks.rank == self.members[0]

    def host(self, home: int) -> str:
        return self.hosts[self.homes[home][0]]

    def told(self, home: int) -> str:
        """ "rank 2 (node-b)", or "ranks 0 to 3 (node-a, node-b)"."""
        ranks = self.homes[home]
        # Consecutive ones have the same distance from their place in the sequence.
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda one: one[1] - one[0])]
        told = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        hosts = ", ".join(dict.fromkeys(self.hosts[rank] for rank in ranks))
        return f"rank{'s' if len(ranks) > 1 else ''} {told} ({hosts})"

    def on_leaders(self, function: Callable[[], T]) -> list[T]:
        """Call `function` once in each home; the results by home, on every rank.

        A ValueError or OSError of one reaches every rank, with the name of the host where it is not the first home.
        """
        if self.is_one:
            return [self.ranks.on_first(function)]
        outcome: tuple[list[T], ValueError | OSError | None] = ([], None)
        if self.leads:
            try:
                outcome = ([function()], None)
            except (ValueError, OSError) as error:
                outcome = ([], error)
        everyones = self.ranks.gather(outcome)
        results: list[T] = []
        for number, members in enumerate(self.homes):
            result, failure = everyones[members[0]]
            if failure is not None:
                raise failure if number == 0 else type(failure)(f"on {self.host(number)}: {failure}")
            results += result
        return results

    def refusal(self, path: Path) -> str | None:
        """Why a run whose checkpoints are to be "shared" cannot begin at `path`; None where it is one folder."""
        if self.is_one:
            return None
        seen = ", ".join(f"{self.told(home)} {'another' if home else 'one'}" for home in range(len(self.homes)))
        return (
            f"{path} is not one folder for all ranks: of {len(self.homes)} folders of this name {seen}: "
            "put it on a file system that all machines share, or say where checkpoints are to lie: "
            'checkpoint.placement = "per_node" or "gathered"'
        )


def discover(path: Path, ranks: Ranks) -> Sharing:
    """Find out which ranks see the same folder at `path`, which is made where it is not there yet.

    Each machine's first rank leaves a mark. OSError, on all ranks, where one cannot write there.
    """
    if ranks.world_size == 1:
        return Sharing.whole(ranks)
    host, token = platform.node(), ranks.broadcast(secrets.token_hex(8))
    own = path / f".seen-{token}-{ranks.rank:05d}"
    fault: OSError | None = None
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if ranks.local_rank == 0:
                own.touch()
        except OSError as error:
            fault = error
        hosts, marked, faults = zip(*ranks.gather((host, ranks.local_rank == 0, fault)), strict=True)
        for rank, met in enumerate(faults):
            if met is not None:
                raise met if rank == 0 else OSError(f"on {hosts[rank]}: {met}")
        marks = [f".seen-{token}-{rank:05d}" for rank, one in enumerate(marked) if one]
        return Sharing(ranks, _homes(_look(path, marks, ranks)), hosts)
    finally:
        if ranks.local_rank == 0:
            own.unlink(missing_ok=True)


def _look(path: Path, marks: list[str], ranks: Ranks) -> list[frozenset[str]]:
    """Which of the marks each rank sees, by rank. Nobody returns before all have looked."""
    started = time.monotonic()
    while True:
        # Names that nobody has asked for are in no cache: a network file system answers from its server.
        seen = frozenset(mark for mark in marks if (path / mark).exists())
        views, passed = zip(*ranks.gather((seen, time.monotonic() - started)), strict=True)
        if all(len(view) == len(marks) for view in views) or passed[0] > LOOK_SECONDS:
            return list(views)
        time.sleep(LOOK_AGAIN_SECONDS)


def _homes(views: list[frozenset[str]]) -> tuple[tuple[int, ...], ...]:
    """Ranks that see the same marks, together; one that sees none is alone."""
    homes: dict[frozenset[str], list[int]] = {}
    for rank, view in enumerate(views):
        homes.setdefault(view or frozenset([f"rank {rank}"]), []).append(rank)
    return tuple(tuple(home) for home in homes.values())


def clear_marks(path: Path) -> None:
    """Remove the marks of starts that were killed while they looked."""
    for mark in path.glob(".seen-*"):
        if time.time() - mark.stat().st_mtime > STALE_SECONDS:
            mark.unlink(missing_ok=True)


def drop_if_empty(path: Path) -> None:
    """Remove the folder that `discover` made for a run that cannot begin."""
    with suppress(OSError):  # it holds something
        path.rmdir()
