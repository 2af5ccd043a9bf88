"""What `launch check` reports: a check is a row, with a cell a node, and for what is wrong a line with the remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.markup import escape

from launch.hosts import Host

if TYPE_CHECKING:
    from rich.console import Console

Level = Literal["ok", "warn", "FAIL", "-"]  # "-": not looked at
Facts = Mapping[str, Mapping[str, Any]]


# In the order of the report.
CHECKS = (
    "reachable", "machine", "code", "python", "torch", "deepspeed", "other libraries", "driver", "devices",
    "free memory", "limits", "run directory", "shared", "data", "tokenizer", "disk", "own name", "interface", "port",
    "clock", "all-reduce",
)  # fmt: skip
COLUMNS = 4  # more nodes than these are counted, and named only where something is wrong
STYLES = {"FAIL": "bold red", "warn": "yellow", "-": "dim", "ok": ""}


@dataclass(frozen=True)
class Asked:
    """What the check is about."""

    hosts: tuple[Host, ...]
    run: Path
    address: str
    port: int
    environment: Mapping[str, str]  # that the nodes are given
    plan: Mapping[str, Any] | None = None  # of `pretrain plan --json`
    recipe: Path | None = None
    grace_seconds: float | None = None
    device: Literal["cpu", "cuda"] = "cpu"  # what the ranks run on

    @property
    def first(self) -> str:
        return self.hosts[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def answers(self, facts: Facts) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        """(name, slots, facts) of each host that answered."""
        yield from ((host.name, host.slots, facts[host.name]) for host in self.hosts if host.name in facts)


@dataclass
class Row:
    """One check."""

    name: str
    cells: dict[str, tuple[Level, str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # what was measured, for programs

    def ok(self, node: str, text: str) -> None:
        self.cells[node] = ("ok", text)

    def skip(self, node: str, text: str = "") -> None:
        self.cells[node] = ("-", text)

    def warn(self, node: str, text: str, reason: str) -> None:
        self.cells[node] = ("warn", text)
        self.warnings.append(reason)

    def fail(self, node: str, text: str, reason: str) -> None:
        self.cells[node] = ("FAIL", text)
        self.reasons.append(reason)

    @property
    def failed(self) -> bool:
        return bool(self.reasons)

    def to_dict(self) -> dict[str, Any]:
        cells = {
            node: {"level": level, "text": text, **self.numbers.get(node, {})}
            for node, (level, text) in self.cells.items()
        }
        return {"check": self.name, "nodes": cells, "reasons": self.reasons, "warnings": self.warnings}


@dataclass(frozen=True)
class Report:
    """All rows, in the order of CHECKS."""

    asked: Asked
    rows: tuple[Row, ...]

    @property
    def reasons(self) -> list[str]:
        return [f"{row.name}: {reason}" for row in self.rows for reason in row.reasons]

    @property
    def warnings(self) -> list[str]:
        return [f"{row.name}: {warning}" for row in self.rows for warning in row.warnings]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.reasons,
            "world_size": self.asked.ranks,
            "device": self.asked.device,
            "master": f"{self.asked.address}:{self.asked.port}",
            "hosts": [{"name": host.name, "slots": host.slots} for host in self.asked.hosts],
            "checks": [row.to_dict() for row in self.rows],
            "reasons": self.reasons,
            "warnings": self.warnings,
        }

    def print(self, console: Console) -> None:
        """A table, then what is wrong and what to do about it, then one line."""
        from rich.table import Table

        names = self.asked.names
        many = len(names) > COLUMNS
        table = Table("check", *(("ok", "not ok") if many else names), box=None, pad_edge=False)
        for row in self.rows:
            cells = [row.cells.get(name, ("-", "")) for name in names]
            table.add_row(row.name, *(self._counted(row) if many else (_shown(*cell) for cell in cells)))
        console.print(table)
        for level, lines in (("warn", self.warnings), ("FAIL", self.reasons)):
            for line in lines:
                console.print(f"[{STYLES[level]}]{level}[/]  {escape(line)}", soft_wrap=True)
        count = f"{len(names)} node{'s' * (len(names) > 1)}, {self.asked.ranks} rank{'s' * (self.asked.ranks > 1)}"
        failed = len(self.reasons)
        verdict = f"{failed} reason{'s' * (failed > 1)} not to start" if failed else "ready"
        console.print(f"{verdict}: {count} on {'GPUs' if self.asked.device == 'cuda' else 'CPUs'}", soft_wrap=True)

    def _counted(self, row: Row) -> tuple[str, str]:
        good = [name for name, (level, _) in row.cells.items() if level == "ok"]
        bad = [f"{name} {_shown(*cell)}" for name, cell in row.cells.items() if cell[0] in ("warn", "FAIL")]
        return f"{len(good)} of {len(self.asked.names)}", ", ".join(bad)


def _shown(level: Level, text: str) -> str:
    word = f"{level} " if level in ("warn", "FAIL") else ""
    style = STYLES[level]
    return f"[{style}]{word}{escape(text)}[/]" if style else escape(text)


def size(size_bytes: float) -> str:
    """For people, in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if size_bytes >= 0.995 * factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes / 1e6:.0f} MB"


def expected(values: Sequence[Any]) -> Any:
    """What most say; of equally many, what was said first."""
    return Counter(values).most_common(1)[0][0]


def agreement(
    name: str, values: Mapping[str, Any], reason: Callable[[str, Any, str, Any], str], show: Callable[[Any], str] = str
) -> Row:
    """A row in which whoever says something else than most fails: `reason(node, its, other, the other's)`."""
    row = Row(name)
    if not values:
        return row
    right = expected(list(values.values()))
    other = next(node for node, value in values.items() if value == right)
    for node, value in values.items():
        if value == right:
            row.ok(node, show(value))
        else:
            row.fail(node, show(value), reason(node, value, other, right))
    return row
