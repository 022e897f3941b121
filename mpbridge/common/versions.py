"""Comparison of versions, and the window of versions in which a statement holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpbridge.common.errors import BadValue

if TYPE_CHECKING:
    from packaging.version import Version


@functools.cache
def _parsed(text: str) -> Version:
    """The version without its pre-release and local parts: a release candidate behaves like its release."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        raise BadValue(f"{text!r} is not a version (expected numbers with dots, such as 2.11.0)") from None


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: '2.13.0+cpu' -> (2, 13, 0), '12.10' -> (12, 10). Raises BadValue."""
    return _parsed(text).release


def at_least(have: str | None, wanted: str) -> bool:
    """Whether `have` is `wanted` or later; False if it is unknown. Trailing zeros are ignored: 2.11 equals 2.11.0."""
    return have is not None and _parsed(have) >= _parsed(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Versions of one package from `since` (inclusive) to `until` (exclusive); None: unbounded."""

    package: str
    """A field of facts.Versions."""
    since: str | None = None
    until: str | None = None

    def holds(self, have: str | None) -> bool:
        """Whether a version is in the window. An unknown version counts as inside: a false warning is better than a NaN at step 2."""
        if have is None:
            return True
        return (self.since is None or at_least(have, self.since)) and (
            self.until is None or not at_least(have, self.until)
        )

    def __str__(self) -> str:
        ends = [f"from {self.since}"] if self.since else []
        ends += [f"before {self.until}"] if self.until else []
        return f"{self.package.replace('_', ' ')} {' and '.join(ends) or 'any version'}"
