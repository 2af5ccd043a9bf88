"""Whether Linux ended processes for want of main memory meanwhile: what it counts, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """How many processes Linux has ended so far for want of memory: in this process's control group, on this machine.

    A count that the system does not tell is left out.
    """
    counts: dict[str, int] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        tree, name = root / "sys/fs/cgroup", "memory.events"  # version 2
        if "memory" in controllers.split(","):
            tree, name = tree / "memory", "memory.oom_control"
        elif controllers:
            continue
        # A container often sees its own group as the root of the tree.
        for place in (tree / path.lstrip("/") / name, tree / name):
            for word, _, count in (entry.partition(" ") for entry in _lines(place)):
                if word == "oom_kill":
                    counts.setdefault("group", int(count))
    for word, _, count in (entry.partition(" ") for entry in _lines(root / "proc/vmstat")):
        if word == "oom_kill":
            counts["machine"] = int(count)
    return counts


def oom_killer(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """A sentence where a count of `oom_kills` grew; None where none did."""
    for where, name in (("group", "this control group"), ("machine", "this machine")):
        more = after.get(where, 0) - before.get(where, after.get(where, 0))
        if more > 0:
            processes = "a process" if more == 1 else f"{more} processes"
            return (
                f"Meanwhile the kernel ended {processes} of {name} because main memory ran out (OOM killer), most "
                "likely a rank: `python -m pretrain plan RECIPE --device-memory auto --fit` says what would fit"
            )
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
