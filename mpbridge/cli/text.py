"""Tables and JSON for standard output: rich in a terminal, aligned columns elsewhere. rich is imported only if used."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mpbridge.report.records import prose, record, wrapped

ROOM = 28
"""Width in characters below which a text column is unreadable."""


def on_terminal() -> bool:
    """Whether stdout is a TTY."""
    return sys.stdout.isatty()


def print_json(data: Any) -> None:
    """`data` as indented JSON."""
    print(json.dumps(data, indent=2, default=str))


def columns_here() -> int | None:
    """Maximum width of a line; None if unknown (a pipe, a file)."""
    return shutil.get_terminal_size().columns if on_terminal() or "COLUMNS" in os.environ else None


def print_line(text: str = "", *, indent: str = "") -> None:
    """Prints prose, each line wrapped to the width if it is known; a command, settings or a path in it stay in one piece."""
    print(prose(text, columns_here(), indent=indent))


def print_whole(text: str) -> None:
    """Prints lines that are copied or read by a program, such as commands, settings, YAML or a plot: never wrapped."""
    print(text)


def complain(text: str) -> None:
    """Prints a line on stderr, never wrapped: one line per fault, as searches and programs expect."""
    if sys.stderr is not None:  # closed: print would write to stdout
        print(text, file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Prints rows under their headings. Cells are plain text. Lines keep to the width if it is known (a terminal, COLUMNS)."""
    rows = [[str(cell) for cell in row] for row in rows]
    width = columns_here()
    if width is not None and on_terminal() and _room(columns, rows, width) >= ROOM:
        _rich(columns, rows, title)
        return
    if title:
        print_line(title)
    for line in aligned(columns, rows) if width is None else narrow(columns, rows, width):
        print(line)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table's lines, with columns two blanks apart and no trailing blanks; empty columns are omitted."""
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = [[columns[i] for i in shown], *([row[i] for i in shown] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(shown))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table if row
    ]


def narrow(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The widest form whose lines fit `width`: a table; a table with the last column's text on lines of its own; each row as a record."""
    lines = aligned(columns, rows)
    if all(len(line) <= width for line in lines):
        return lines
    heads = aligned(columns[:-1], [row[:-1] for row in rows]) if len(columns) > 2 else lines
    if all(len(line) <= width for line in heads):
        below = [wrapped(row[-1], width, indent="    ") if row[-1] else [] for row in rows]
        return [heads[0], *(part for line, text in zip(heads[1:], below, strict=True) for part in (line, *text))]
    return [line for row in rows for line in record(columns, row, width)]


def _room(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """Characters left for the last column if the others are not wrapped; ROOM if it needs less."""
    longest = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    left = width - sum(longest[:-1]) - 4 * len(columns)
    return ROOM if left >= longest[-1] else left


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from mpbridge.report.tables import table

    made = table(title or None, columns, whole=columns[:-1])
    for row in rows:
        made.add_row(*map(Text, row))
    Console(highlight=False).print(made)
