"""Consoles; every rank except the first gets a silent one."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from mpbridge.common.prose import printable, prose

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 150
"""Width in columns without a terminal: log files are not limited to 80 columns."""


class _Steady(io.TextIOBase):
    """Standard output whose reader may have gone: a write error is reported once on stderr, and the caller continues.

    While a bar is shown, rich passes what is printed on sys.stdout to this console: written there again, it would come back without end."""

    def __init__(self) -> None:
        self.gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self.gone and sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()

    def fileno(self) -> int:
        return sys.stdout.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._try(lambda: getattr(sys.stdout, "rich_proxied_file", sys.stdout).write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: getattr(sys.stdout, "rich_proxied_file", sys.stdout).flush())

    def _try(self, act: Callable[[], object]) -> None:
        if self.gone or sys.stdout is None:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self.gone = True
            silence()
            why = getattr(error, "strerror", None) or error
            warn(f"standard output was closed ({why}); the run continues without it")


def silence() -> None:
    """Redirects standard output to the null device, since Python flushes its buffer at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def warn(text: str) -> None:
    """Prints a line on stderr, if there is one; never wrapped: one line per fault, as searches and programs expect."""
    if sys.stderr is not None:  # closed: print would write to stdout
        with contextlib.suppress(OSError, ValueError):
            print(printable(text), file=sys.stderr, flush=True)


def console(*, speaks: bool = True) -> Console:
    """A console on standard output; speaks=False: a silent one (ranks other than 0)."""
    from rich.console import Console

    if not speaks:
        return Console(file=io.StringIO(), quiet=True)
    file = cast("IO[str]", _Steady())
    found = Console(file=file, highlight=False)
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(file=file, highlight=False, width=WIDTH)


def tell(out: Console, message: Any, *, style: str | None = None) -> None:
    """Prints prose on `out`, wrapped to a width that is known (a terminal, COLUMNS), its commands, settings and paths in one piece; or a table."""
    if out.quiet:  # rich would lay it out all the same
        return
    if not isinstance(message, str):
        out.print(message, style=style)
        return
    known = out.is_terminal or "COLUMNS" in os.environ
    out.print(prose(message, out.width if known else None), style=style, markup=False, soft_wrap=True)


def rank() -> int:
    """This process's global rank, known before any process group exists."""
    return int(os.environ.get("RANK", "0"))
