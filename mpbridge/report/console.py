"""Consoles; every rank but the first gets a silent one."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import IO, cast

from rich.console import Console

WIDTH = 150
"""Columns where there is no terminal: a log file is not 80 columns wide."""


class _Steady(io.TextIOBase):
    """Standard output that nobody may be reading any more: what goes wrong there is said once on stderr, and the caller goes on."""

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
        self._try(lambda: sys.stdout.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: sys.stdout.flush())

    def _try(self, act: Callable[[], object]) -> None:
        if self.gone or sys.stdout is None:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self.gone = True
            silence()
            warn(f"standard output is gone ({getattr(error, 'strerror', None) or error}): the run continues without it")


def silence() -> None:
    """Points standard output to nowhere: what Python still holds for it is flushed at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def warn(text: str) -> None:
    """A line on stderr, where there is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def console(*, speaks: bool = True) -> Console:
    """A console on standard output; speaks=False: one that swallows everything (ranks other than 0)."""
    if not speaks:
        return Console(file=io.StringIO(), quiet=True)
    file = cast("IO[str]", _Steady())
    found = Console(file=file, highlight=False)
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(file=file, highlight=False, width=WIDTH)


def rank() -> int:
    """This process's number in the job, known before any process group exists."""
    return int(os.environ.get("RANK", "0"))
