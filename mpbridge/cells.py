"""HTML representations of mpbridge's objects in notebooks: small tables. Loads no framework."""

from __future__ import annotations

import dataclasses
import html
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STYLE = "text-align:left;padding:2px 10px;vertical-align:top"
MARKED = {"bad": "color:#b3261e;font-weight:600", "warn": "color:#8a5a00;font-weight:600", "": ""}


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, tones: Sequence[str] = (), note: str = ""
) -> str:
    """An HTML table. tones: '', 'warn' or 'bad' per row. Everything is escaped: values are never markup."""
    heads = "".join(f'<th style="{STYLE}">{html.escape(column)}</th>' for column in columns)
    lines = []
    for number, row in enumerate(rows):
        tone = MARKED[tones[number]] if number < len(tones) else ""
        cells = "".join(f'<td style="{STYLE};{tone}">{html.escape(shown(cell))}</td>' for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    end = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<div><b>{html.escape(title)}</b><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>{end}</div>"


def facts(title: str, values: Mapping[str, Any], *, note: str = "") -> str:
    """A table of names and values, without those that are None or empty."""
    rows = [(name, value) for name, value in values.items() if value not in (None, "", (), [], {})]
    return table(title, ("", ""), rows, note=note)


def fields(title: str, thing: Any, *, note: str = "") -> str:
    """A table of the fields of a dataclass that are set."""
    return facts(title, {one.name: getattr(thing, one.name) for one in dataclasses.fields(thing)}, note=note)


def shown(value: Any) -> str:
    """A value as displayed in a cell."""
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value))
    return str(getattr(value, "short", value))


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Bar:
    """A progress bar in a notebook's cell, updated in place."""

    def __init__(self, total: int) -> None:
        from IPython.display import HTML, display

        self._html, self.total = HTML, total
        self._handle: Any = display(HTML(self._text(0, "")), display_id=True)

    def draw(self, done: int, text: str) -> None:
        """Displays `done` of the total, and a line of text."""
        self._handle.update(self._html(self._text(done, text)))

    def _text(self, done: int, text: str) -> str:
        bar = f'<progress value="{done}" max="{max(self.total, 1)}" style="width:240px"></progress>'
        return f"{bar} {done} of {self.total}&emsp;<code>{html.escape(text)}</code>"
