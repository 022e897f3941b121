"""A table as a value: the terminal, files, notebooks, pages and the docs show the same one, each in its own form. Bytes and counts as text: the only formatter."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mpbridge.common.prose import crowded, printable, record, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, slots=True)
class ByteUnit:
    """A binary multiple of bytes."""

    name: str
    size: int
    digits: int
    """Number of decimals shown."""

    def of(self, amount: float) -> str:
        """An amount of bytes in this unit, without the unit's name."""
        return f"{amount / self.size:,.{self.digits}f}"


GIB = ByteUnit("GiB", 2**30, 2)
_UNITS = (GIB, ByteUnit("MiB", 2**20, 1), ByteUnit("KiB", 2**10, 1), ByteUnit("B", 1, 0))


def unit_for(largest: float) -> ByteUnit:
    """The unit for figures of which `largest` bytes is the largest."""
    return next((unit for unit in _UNITS if abs(largest) >= unit.size), _UNITS[-1])


def size(amount: float) -> str:
    """An amount of bytes in its own unit, as in '79.65 GiB'."""
    unit = unit_for(amount)
    return f"{unit.of(amount)} {unit.name}"


def count(number: int) -> str:
    """A number of parameters in short form: '8.03e9', '4.36e6', '82,112'."""
    for power in (9, 6):
        if number >= 10**power:
            return f"{number / 10**power:.2f}e{power}"
    return f"{number:,}"


def processes(number: int) -> str:
    """'1 process', '2 processes'."""
    return f"{number} process{'es' if number > 1 else ''}"


_STYLES = {
    "": ("", ""),
    "dim": ("dim", "color:#777"),
    "warn": ("bold yellow", "color:#8a5a00;font-weight:600"),
    "bad": ("bold red", "color:#b3261e;font-weight:600"),
}
"""Tone of a row (ordinary, of less interest, a warning, a fault) -> style of rich, of HTML."""
_CELL = "text-align:{};padding:2px 10px;vertical-align:top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column.

    number: aligned at the right. whole: never wrapped, since it is copied or searched. unit: 'bytes' and 'percent' (of a share) format its numbers.
    help, layer: on a page, its tooltip, and whether a click on a cell shows only that layer."""

    name: str
    number: bool = True
    whole: bool = False
    unit: str = ""
    help: str = ""
    layer: bool = False

    def text(self, value: Any) -> str:
        """A cell's value as displayed."""
        if isinstance(value, (int, float)) and self.unit == "bytes":
            return size(value) if value else ""
        if isinstance(value, (int, float)) and self.unit == "percent":
            return f"{value:.2%}"
        return shown(value)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, rows of values and a tone for each row. `table` makes one."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...] = ()
    tones: tuple[str, ...] = ()
    note: str = ""
    """A paragraph below it."""

    def filled(self) -> Table:
        """Without the columns in which no row has a value."""
        if not self.rows:
            return self
        kept = [i for i in range(len(self.columns)) if any(row[i] not in (None, "") for row in self.rows)]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[i] for i in kept), rows=rows)

    def texts(self) -> list[list[str]]:
        """The rows as displayed."""
        columns = self.columns
        return [[printable(column.text(cell)) for column, cell in zip(columns, row, strict=True)] for row in self.rows]

    def lines(self, width: int | None = None) -> list[str]:
        """As plain text: the title, then the widest form whose lines fit `width` (None: any): a table; a table with the last column's text on lines of its
        own; each row as 'column: text'."""
        heading = self._beside(self.title, width)
        return [*heading, *self._body(width), *self._beside(self.note, width)]

    def _beside(self, text: str, width: int | None) -> list[str]:
        whole = printable(text)
        return [] if not whole else [whole] if width is None else wrapped(whole, width)

    def _body(self, width: int | None) -> list[str]:
        names, rows = [printable(column.name) for column in self.columns], self.texts()
        lines = self._aligned(names, rows)
        if width is None or all(len(line) <= width for line in lines):
            return lines
        heads = self._aligned(names[:-1], [row[:-1] for row in rows]) if len(names) > 2 else lines
        if all(len(line) <= width for line in heads):
            below = [wrapped(row[-1], width, indent="    ") if row[-1] else [] for row in rows]
            return [*heads[: -len(rows)], *(part for line, text in zip(heads[-len(rows) :], below, strict=True) for part in (line, *text))]  # fmt: skip
        return [line for row in rows for line in record(names, row, width)]

    def _aligned(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        """Columns two blanks apart, without trailing blanks, empty columns and headings that say nothing."""
        kept = [i for i in range(len(names)) if any(row[i] for row in rows)]
        if not kept:
            return []
        drawn = [[row[i] for i in kept] for row in ([names] if any(names) else []) + [*rows]]
        widths = [max(map(len, cells)) for cells in zip(*drawn, strict=True)]
        right = [self.columns[i].number for i in kept]
        return [
            "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in zip(row, widths, right, strict=True)).rstrip()
            for row in drawn
        ]  # fmt: skip

    def html(self) -> str:
        """For notebooks. Everything is escaped: values are never markup."""
        styles = [_CELL.format("right" if column.number else "left") for column in self.columns]
        named = zip(self.columns, styles, strict=True)
        heads = "".join(f'<th style="{style}">{html.escape(column.name)}</th>' for column, style in named)
        body = []
        for row, tone in zip(self.texts(), self._tones(), strict=True):
            cells = zip(row, styles, strict=True)
            drawn = "".join(f'<td style="{style};{_STYLES[tone][1]}">{html.escape(cell)}</td>' for cell, style in cells)
            body.append(f"<tr>{drawn}</tr>")
        end = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<div><b>{html.escape(self.title)}</b><table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>{end}</div>"

    def _repr_html_(self) -> str:
        return self.html()

    def markdown(self) -> str:
        """For README and docs, without the title."""
        lines = [[column.name for column in self.columns], ["---"] * len(self.columns), *self.texts()]
        return "\n".join("| " + " | ".join(map(_markdown, line)) + " |" for line in lines)

    def fits(self, width: int) -> bool:
        """Whether its columns can be read side by side."""
        names, rows = [column.name for column in self.columns], self.texts()
        return bool(rows) and not crowded(names, rows, width, whole=[column.whole for column in self.columns])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For a terminal: rich's table, or plain lines where its columns do not fit. Called by rich."""
        from rich.text import Text

        full = self.filled()
        if full.fits(options.max_width):
            yield full._rich()
            yield Text(printable(full.note)) if full.note else Text("", end="")
        else:
            yield Text("\n".join(full.lines(options.max_width)))

    def _rich(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(title=Text(printable(self.title)) if self.title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")  # fmt: skip
        made.show_header = any(column.name for column in self.columns)
        for column in self.columns:
            side: Literal["right", "left"] = "right" if column.number else "left"
            made.add_column(Text(printable(column.name)), no_wrap=column.whole, overflow="fold", justify=side)
        for row, tone in zip(self.texts(), self._tones(), strict=True):
            # Text, not str: brackets in a value are not markup
            made.add_row(*map(Text, row), style=_STYLES[tone][0] or None)
        return made

    def _tones(self) -> list[str]:
        return [*self.tones, *[""] * (len(self.rows) - len(self.tones))]


def table(
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    tones: Iterable[str] = (),
    note: str = "",
) -> Table:
    """A table; columns given by name hold text. right: names of those that hold numbers; whole: of those that are never wrapped."""
    made = [
        column if isinstance(column, Column) else Column(name=column, number=column in right, whole=column in whole)
        for column in columns
    ]
    return Table(title, tuple(made), tuple(tuple(row) for row in rows), tuple(tones), note)


def facts(title: str, values: Mapping[str, Any]) -> Table:
    """Names and values, without those that are None or empty."""
    return table(title, ("", ""), [item for item in values.items() if item[1] not in (None, "", (), [], {})])


def fields(title: str, thing: Any) -> Table:
    """The fields of a dataclass that are set."""
    return facts(title, {one.name: getattr(thing, one.name) for one in dataclasses.fields(thing)})


def shown(value: Any) -> str:
    """A value as displayed in a cell."""
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value))
    return "" if value is None else str(getattr(value, "short", value))


def _markdown(text: str) -> str:
    # a bar inside backticks ends a cell in some Markdown renderers, and an escaped one shows its backslash in others
    def code(found: re.Match[str]) -> str:
        return f"<code>{html.escape(found[1], quote=False).replace('|', '&#124;')}</code>"

    return re.sub(r"`([^`]*\|[^`]*)`", code, text).replace("|", "\\|").replace("\n", " ")
