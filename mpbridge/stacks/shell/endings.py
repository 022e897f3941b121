"""What ends commands before their last one."""

from __future__ import annotations


class Stop(Exception):
    """break, continue, return or exit."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class NotText(Exception):
    """Only running would tell what a substituted command prints."""
