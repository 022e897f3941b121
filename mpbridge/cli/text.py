"""Tables and JSON for standard output: rich on a terminal, aligned columns elsewhere. rich is imported only when it is used."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def on_terminal() -> bool:
    """Whether people watch."""
    return sys.stdout.isatty()


def print_json(data: Any) -> None:
    """`data` as indented JSON."""
    print(json.dumps(data, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Rows under their headings. Cells are plain text."""
    rows = [[str(cell) for cell in row] for row in rows]
    if on_terminal():
        _rich(columns, rows, title)
        return
    if title:
        print(title)
    for line in aligned(columns, rows):
        print(line)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table's lines, columns two blanks apart, nothing behind the last cell; columns that are empty throughout are left out."""
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = [[columns[i] for i in shown], *([row[i] for i in shown] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(shown))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table if row]


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)  # the first one is what people copy
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
