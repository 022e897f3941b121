"""Tables for people: what a recipe decided and what a run amounted to. Values in, rich renderables out; nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from mpbridge.formats import say

if TYPE_CHECKING:
    from mpbridge.sync.plan import Plan


def plan_table(plan: Plan, *, title: str = "what the recipe decides") -> Table:
    """Field, before, after, who had set it, and the line that would keep it, for every write that changes something."""
    table = _table(title, ("field", "before", "after", "set by", "to decide otherwise"))
    for write in plan.writes:
        table.add_row(write.path, say(write.before), say(write.after), write.set_by or "", write.keep or "")
    return table


def summary_table(rows: Iterable[tuple[str, str]], *, title: str = "summary") -> Table:
    """Label and text, one pair a row."""
    table = _table(title, ("", ""))
    table.show_header = False
    for label, text in rows:
        table.add_row(label, text)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for number, column in enumerate(columns):
        # the first column is what one searches by: never cut
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    return table
