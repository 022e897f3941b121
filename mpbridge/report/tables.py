"""Tables of what a recipe decided and of a run's results. Returns rich renderables; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from mpbridge.report.records import crowded, record
from mpbridge.sync.plan import show

if TYPE_CHECKING:
    from mpbridge.sync.plan import Plan

OVERRIDDEN = "bold yellow"
"""Style of rows in which the recipe overrides a set value."""


def plan_table(plan: Plan, *, title: str = "what the recipe decides") -> Table:
    """One row per write: field, before, after, why, who had set it, and the line that would keep it; overridden values are highlighted."""
    made = table(
        title, ("field", "before", "after", "why", "had been set by", "to keep it"), whole=("field", "to keep it")
    )
    for write in plan.writes:
        keep = (write.keep or "another recipe: mpbridge list") if write.conflict else ""
        who = write.set_by if write.set_by != "nobody" else ""
        cells = (write.name, show(write.before), show(write.after), write.why, who, keep)
        # Text, not str: brackets in a value are not markup
        made.add_row(*(Text(cell) for cell in cells), style=OVERRIDDEN if write.conflict else None)
    for kept in plan.kept:
        made.add_row(
            *(Text(cell) for cell in (f"{kept.target}.{kept.field}", show(kept.value), "left alone", kept.why, "", "")),
            style="dim",
        )
    return made


def summary_table(rows: Iterable[tuple[str, str]], *, title: str = "summary") -> Table:
    """Label and text, one pair per row."""
    made = table(title, ("", ""))
    made.show_header = False
    for label, text in rows:
        made.add_row(Text(label), Text(text))
    return made


class Fitting(Table):
    """A table that omits empty columns, and shows each row as lines of 'column: text' if its columns would be too narrow to read."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich to render."""
        cells = [[_plain(cell) for cell in column.cells] for column in self.columns]
        shown = [i for i, texts in enumerate(cells) if any(texts) or not texts]
        heads = [_plain(self.columns[i].header) for i in shown]
        rows = list(zip(*(cells[i] for i in shown), strict=True))
        whole = [self.columns[i].no_wrap for i in shown]
        if not rows or not crowded(heads, rows, options.max_width, whole=whole):
            everything = self.columns
            self.columns = [replace(self.columns[old], _index=new) for new, old in enumerate(shown)]
            try:
                yield from super().__rich_console__(console, options)
            finally:
                self.columns = everything
            return
        if self.title:
            yield Text(_plain(self.title), style=self.title_style or "")
        for row, known in zip(rows, self.rows, strict=True):
            for line in record(heads, row, options.max_width):
                yield Text(line, style=known.style or "")
        yield Text("")


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def table(title: str | None, columns: Sequence[str], *, whole: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    """An empty table in the common style. whole: columns that are never wrapped, since they are copied or searched; right: right-aligned columns."""
    made = Fitting(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for column in columns:
        made.add_column(
            column, no_wrap=column in whole, overflow="fold", justify="right" if column in right else "left"
        )
    return made
