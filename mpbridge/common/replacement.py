"""Replaced attributes of other packages' modules and classes, restored on the last exit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Patch = tuple[Any, str, Any]
"""(owner, attribute, replacement)."""
MISSING = object()
"""In the place of an attribute that its owner did not have."""


class Replacement:
    """A set of attribute replacements, installed on the first entry and restored on the last exit, in any thread."""

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        self._patches = patches
        self._saved: list[tuple[Any, str, Any]] = []
        self.depth = 0

    def enter(self) -> None:
        """Installs them, unless they are."""
        self.depth += 1
        if self.depth > 1:
            return
        try:
            # all replacements are made before the first is installed: they wrap what they replace
            for owner, name, new in list(self._patches()):
                self._saved.append((owner, name, vars(owner).get(name, MISSING)))
                setattr(owner, name, new)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Restores everything at the last exit."""
        self.depth -= 1
        while self.depth == 0 and self._saved:
            owner, name, old = self._saved.pop()
            if old is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
