"""The progress of a training run: a line at intervals, and a bar in a terminal."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mpbridge.common.prose import printable
from mpbridge.common.report.console import tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REDRAW = 0.25
"""Minimum seconds between redraws: rich's own refresh thread would compete with training for CPU cores."""


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class _CellBar:
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


class ProgressLine:
    """Shows progress. total, done: steps of the whole run and those already done; interval: steps between lines without a terminal."""

    def __init__(self, console: Console, *, total: int, done: int = 0, interval: int = 10, bar: bool = True) -> None:
        self.console, self.total, self.interval = console, total, max(1, interval)
        self._bar: Progress | None = None
        self._task: Any = 0
        self._drawn = 0.0
        self._cell = _CellBar(total) if bar and in_notebook() and not console.quiet else None
        if bar and console.is_terminal and console.is_interactive:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.description}")
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), text)
            self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task("", total=total, completed=done)

    def step(self, iteration: int, text: str) -> None:
        """Reports that step `iteration` is finished; `text` describes it."""
        now = time.monotonic()
        redraw = now - self._drawn > REDRAW or iteration == self.total
        if self._cell is None and self._stays(iteration):
            tell(self.console, f"step {iteration:>{len(str(self.total))}}/{self.total}  {text}")
        if self._cell is not None:
            if redraw:
                self._cell.draw(iteration, text)
        elif self._bar is not None:
            self._bar.update(self._task, completed=iteration, description=text)
            if redraw:
                self._bar.refresh()
        self._drawn = now if redraw else self._drawn

    def due(self, iteration: int) -> bool:
        """Whether this step's text will be shown soon, since producing it has a cost."""
        return self._bar is not None or self._cell is not None or self._stays(iteration)

    def _stays(self, iteration: int) -> bool:
        """Whether this step's text gets a line of its own."""
        return iteration in (1, self.total) or iteration % self.interval == 0

    def say(self, text: str) -> None:
        """Prints a permanent line."""
        tell(self.console, text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal; call the returned function with (done, total)."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True)
    if quiet or not (console.is_terminal and console.is_interactive):
        # rich would end what it cannot redraw (TERM=dumb; a disabled bar of older releases) with an empty line
        yield lambda done, total: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(escape(printable(what)))
        yield lambda done, total: progress.update(task, completed=done, total=max(total, 1))
