"""Which version of a stack is read or written, and what is assumed for an unsupported one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType

from mpbridge.common.errors import BadValue, cut

_NUMBER = re.compile(r"(?:core_)?v?(\d+(?:\.\d+)*)", re.IGNORECASE)


def version_for(module: ModuleType, asked: str | None, *, doing: str) -> tuple[str, tuple[str, ...]]:
    """(version to use, assumption) of a stack's module; nothing is assumed for a supported version.

    asked: None: the latest supported one. For an unsupported one: the last supported version before it, else the first; the latest if it is not a number.
    doing: the verb in the assumption ('read', 'written'). Raises BadValue for an empty version.
    """
    versions: Mapping[str, str] = module.VERSIONS
    if asked is None:
        return str(module.DEFAULT_VERSION), ()
    wanted = asked.strip()
    if not wanted:
        raise BadValue(f"the version of {module.NAME} is empty: give one, or omit it for {module.DEFAULT_VERSION}")
    exact = next((key for key, what in versions.items() if wanted in (key, *re.split(r"[,\s]+", what))), None)
    if exact is not None:
        return exact, ()
    found = _nearest(wanted, versions) or str(module.DEFAULT_VERSION)
    known = ", ".join(f"{key} ({what})" for key, what in versions.items())
    text = f"{module.NAME} {cut(wanted)} is not supported (known: {known}): {doing} as {found}, whose settings may mean something else there"
    return found, (text,)


def _nearest(wanted: str, versions: Mapping[str, str]) -> str | None:
    """The last version up to `wanted`, else the first; None if either has no number."""
    number, numbers = _number(wanted), {key: _number(key) for key in versions}
    known = {key: value for key, value in numbers.items() if value is not None}
    if number is None or not known:
        return None
    before = [key for key, value in known.items() if value <= number[: len(value)]]
    return max(before, key=known.__getitem__) if before else min(known, key=known.__getitem__)


def _number(version: str) -> tuple[int, ...] | None:
    found = _NUMBER.match(version)
    return None if found is None else tuple(int(part[:9]) for part in found[1].split("."))
