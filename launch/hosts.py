"""The machines of a run, from a host file as DeepSpeed and MPI read it: a name and its number of ranks a line.

# two servers with eight GPUs each
node-1 slots=8
node-2 slots=8
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launch.errors import LaunchError

# What is none would mean something else to pdsh (`[1-9]`, `,`, `^file`) or to ssh (a leading `-`).
NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,4})", re.ASCII)
SHOWN = 100  # letters of a line that is none


@dataclass(frozen=True)
class Host:
    """One machine and how many ranks it takes."""

    name: str
    slots: int

    @property
    def machine(self) -> str:
        """The name without the user, where ssh is told one."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts in the file's order; the first is where rank 0 runs. What follows a `#` is no host.

    LaunchError: no such file, no host in it, a line that is not `NAME slots=N`, or a host named twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise LaunchError(f"{path} is not a text file: a host file has lines like `node-1 slots=8`") from None
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}: give a host file with lines like `node-1 slots=8`") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = LINE.fullmatch(entry)
        if match is None or not NAME.fullmatch(match[1]) or int(match[2]) == 0:
            told = entry if len(entry) <= SHOWN else f"{entry[:SHOWN]}…"
            raise LaunchError(f"{path}, line {number}: {told!r} must be `NAME slots=N` with N of 1 to 9999")
        if match[1] in hosts:
            raise LaunchError(f"{path}, line {number}: {match[1]} stands there twice: name each host once")
        hosts[match[1]] = Host(match[1], int(match[2]))
    if not hosts:
        raise LaunchError(f"{path} names no host: give lines like `node-1 slots=8`")
    return tuple(hosts.values())
