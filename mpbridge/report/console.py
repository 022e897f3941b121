"""Consoles; every rank but the first gets a silent one."""

from __future__ import annotations

import io
import os

from rich.console import Console

WIDTH = 150
"""Columns where there is no terminal: a log file is not 80 columns wide."""


def console(*, speaks: bool = True) -> Console:
    """A console on standard output; speaks=False: one that swallows everything (ranks other than 0)."""
    if not speaks:
        return Console(file=io.StringIO(), quiet=True)
    found = Console(highlight=False)
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=WIDTH)


def rank() -> int:
    """This process's number in the job, known before any process group exists."""
    return int(os.environ.get("RANK", "0"))
