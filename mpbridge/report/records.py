"""Tables for narrow output: detects columns too narrow to read, and formats rows as lines instead. Plain text, no library."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

READABLE = 16
"""Width in characters below which a text column breaks words."""


def crowded(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, whole: Sequence[bool] = ()) -> bool:
    """Whether the columns, two blanks apart, would be too narrow to read; whole: columns that are never wrapped."""
    longest = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    unbroken = whole or [False] * len(columns)
    least = sum(long if kept else min(long, READABLE) for long, kept in zip(longest, unbroken, strict=True))
    return least + 2 * len(columns) > width


def record(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row as lines of at most `width` characters: its first cell, then 'column: text; column: text' below it; empty cells are omitted."""
    named = zip(columns[1:], row[1:], strict=True)
    rest = "; ".join(f"{column}: {cell}" if column else cell for column, cell in named if cell)
    return wrapped(row[0], width) + (wrapped(rest, width, indent="    ") if rest else [])


def wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """`text` in lines of at most `width` characters; a longer word, such as a path, stays in one piece for copying."""
    return textwrap.wrap(
        text,
        max(width, len(indent) + READABLE),
        initial_indent=indent,
        subsequent_indent=indent and f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
