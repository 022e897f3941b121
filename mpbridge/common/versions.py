"""Versions of packages: those installed, their comparison, and the window of versions in which a statement holds.

`importlib.metadata`, whose import and search take longer than most verbs, is asked where folders do not say it."""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.common.errors import BadValue

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
        begun = self.since is None or at_least(have, self.since)
        return begun and (self.until is None or not at_least(have, self.until))

    def __str__(self) -> str:
        ends = [f"from {self.since}"] if self.since else []
        ends += [f"before {self.until}"] if self.until else []
        return f"{self.package.replace('_', ' ')} {' and '.join(ends) or 'any version'}"


def version(package: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    wanted = _normal(package)
    for folder in _folders() or ():
        if _normal(folder.name.rpartition(".")[0].partition("-")[0]) == wanted:
            found = re.search(r"^Version: *(\S+)", _text(folder / "METADATA"), re.MULTILINE)
            if found:
                return found[1]
            break
    else:
        if _folders() is not None:
            return None
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of that group that installed packages declare."""
    folders = _folders()
    if folders is not None and not any(group in _text(folder / "entry_points.txt") for folder in folders):
        return ()
    import importlib.metadata

    return tuple(importlib.metadata.entry_points(group=group))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _folders() -> list[Path] | None:
    """The folders with packages' metadata, in the order of the import path; None: packages may be elsewhere too, in an archive or where a finder says."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return None
    found = list[Path]()
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            if os.path.isfile(place):
                return None
            continue
        if place.lower().endswith(".egg"):
            return None
        found += [Path(place, name) for name in names if name.lower().endswith((".dist-info", ".egg-info"))]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
