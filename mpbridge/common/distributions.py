"""Versions and entry points of installed packages. `importlib.metadata`, whose import and search take longer than most verbs, is asked where folders do not say it."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


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
