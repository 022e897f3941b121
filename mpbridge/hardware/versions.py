"""Versions in order, and the window of versions in which a statement holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpbridge.errors import BadValue

if TYPE_CHECKING:
    from packaging.version import Version


@functools.cache
def _parsed(text: str) -> Version:
    """Without its pre-release and local part: a release candidate has the behaviour of its release."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        raise BadValue(f"{text!r} is not a version (expected numbers with dots, such as 2.11.0)") from None


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: '2.13.0+cpu' -> (2, 13, 0), '12.10' -> (12, 10). Raises BadValue."""
    return _parsed(text).release


def at_least(have: str | None, wanted: str) -> bool:
    """Whether `have` is `wanted` or later; False when it is not known. Trailing zeros do not count: 2.11 is 2.11.0."""
    return have is not None and _parsed(have) >= _parsed(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From `since` (included) to `until` (excluded) of one package; None: open."""

    package: str
    """A field of facts.Versions."""
    since: str | None = None
    until: str | None = None

    def holds(self, have: str | None) -> bool:
        """Whether a version lies within. An unknown version counts as within: a false warning is better than a NaN at step 2."""
        if have is None:
            return True
        return (self.since is None or at_least(have, self.since)) and (
            self.until is None or not at_least(have, self.until)
        )

    def __str__(self) -> str:
        ends = [f"from {self.since}"] if self.since else []
        ends += [f"before {self.until}"] if self.until else []
        return f"{self.package.replace('_', ' ')} {' and '.join(ends) or 'any version'}"
