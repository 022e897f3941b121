"""The versions of megatron-core that this package describes, and the windows in which a row or a rule holds."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from mpbridge.common.probe import installed
from mpbridge.common.versions import Window, at_least, release

FOLDER = Path(__file__).with_name("schema")
"""One file per version: <version>.json, written by scripts/generate/make_schema.py."""

BEFORE_017 = Window(package="megatron_core", until="0.17")
SINCE_017 = Window(package="megatron_core", since="0.17")
"""0.16.1 is the last release reviewed before this boundary, Megatron-LM d98e8a64 (0.20.0) the version reviewed after it; those in between were not reviewed."""

REVIEWED = (
    Window(package="megatron_core", since="0.16", until="0.17"),
    Window(package="megatron_core", since="0.20", until="0.21"),
)
"""The releases that the table, the rules and `backend/megatron` were read against; a rule warns of any other."""

_IMPORTED = ((SINCE_017, "triton"),)
"""Packages that `import megatron.core` needs but does not declare for a CPU."""


def missing(version: str | None) -> tuple[str, ...]:
    """The packages that that version needs to be imported at all and that are not installed."""
    wanted = [package for window, package in _IMPORTED if version is not None and window.holds(version)]
    return tuple(package for package in wanted if importlib.util.find_spec(package) is None)


@functools.cache
def described() -> tuple[str, ...]:
    """The versions with a schema, oldest first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=release))


def nearest(have: str | None) -> str:
    """The described version that represents `have`: the newest that is not newer, otherwise the oldest; also the oldest if none is installed."""
    return next((version for version in reversed(described()) if at_least(have, version)), described()[0])


def current() -> str | None:
    """The version of megatron-core that an import would find; None without one."""
    return installed().megatron_core
