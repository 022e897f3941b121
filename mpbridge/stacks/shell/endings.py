"""Exceptions that end a list of commands early."""

from __future__ import annotations


class Stop(Exception):
    """break, continue, return or exit."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class NotText(Exception):
    """The output of a substituted command is known only at run time."""
