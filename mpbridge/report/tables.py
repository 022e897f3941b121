"""Tables for people: what a recipe decided and what a run amounted to. Values in, rich renderables out; nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from mpbridge.sync.plan import show

if TYPE_CHECKING:
    from mpbridge.sync.plan import Plan

OVERRIDDEN = "bold yellow"
"""Style of rows in which the recipe overrides what somebody had set."""


def plan_table(plan: Plan, *, title: str = "what the recipe decides") -> Table:
    """Field, before, after, why, who had set it, and the line that would keep it: one row for every write, overridden values marked."""
    table = _table(
        title, ("field", "before", "after", "why", "had been set by", "to keep it"), whole=("field", "to keep it")
    )
    for write in plan.writes:
        keep = (write.keep or "another recipe: mpbridge list") if write.conflict else ""
        who = write.set_by if write.set_by != "nobody" else ""
        cells = (write.name, show(write.before), show(write.after), write.why, who, keep)
        # Text, not str: a value with brackets in it is no markup
        table.add_row(*(Text(cell) for cell in cells), style=OVERRIDDEN if write.conflict else None)
    for kept in plan.kept:
        table.add_row(
            *(Text(cell) for cell in (f"{kept.target}.{kept.field}", show(kept.value), "left alone", kept.why, "", "")),
            style="dim",
        )
    return table


def summary_table(rows: Iterable[tuple[str, str]], *, title: str = "summary") -> Table:
    """Label and text, one pair a row."""
    table = _table(title, ("", ""), whole=())
    table.show_header = False
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def _table(title: str, columns: Sequence[str], whole: Sequence[str] = ()) -> Table:
    """whole: columns that are never broken over two lines, as people copy or search them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in whole, overflow="fold")
    return table
