"""A page of tables, plots and texts as one HTML file that fetches nothing and runs no script.

Every text is escaped by the template engine; the drawings alone, which matplotlib made, are taken as they are. The page
forbids itself by its own policy whatever would be fetched or run.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.plots import Plot


@dataclass(frozen=True)
class Tile:
    """A figure that is to be seen first."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; `numbers` are the columns of figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    title: str = ""

    def turned(self) -> Table:
        """Rows as columns: a few rows of many cells fit a terminal so."""
        rows = [[name, *(row[number] for row in self.rows)] for number, name in enumerate(self.head)]
        return Table(rows[0], rows[1:], range(1, len(self.rows) + 1), self.title)

    def to_text(self) -> str:
        """For a terminal, as wide as it needs to be."""
        from rich.console import Console
        from rich.table import Table as Lines
        from rich.text import Text

        lines = Lines(title=self.title or None, title_justify="left")
        for number, name in enumerate(self.head):
            lines.add_column(Text(name), justify="right" if number in self.numbers else "left", overflow="fold")
        for row in self.rows:
            lines.add_row(*map(Text, row))
        console = Console(file=io.StringIO(), width=200)
        with console.capture() as captured:
            console.print(lines)
        return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


@dataclass(frozen=True)
class Section:
    """What stands under one heading. `samples`: (prompt, what follows). `folded`: a title, and a text to unfold."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[tuple[str, str]] = ()
    folded: tuple[str, str] | None = None


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    notes: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]


def render(page: Page) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.render(page=page)
