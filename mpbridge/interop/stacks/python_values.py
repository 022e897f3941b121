"""Values of Python text: constants, names, objects with attributes, and unknown values."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpbridge.common.errors import DataError
from mpbridge.common.files import LIMITS

MOST_VALUES = LIMITS["argument values"].steps


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value known only at run time."""

    text: str
    """The expression."""


@dataclass(frozen=True, slots=True)
class Dotted:
    """A name from a module that is not read: 'torch.bfloat16', a class, a function."""

    path: str

    @property
    def last(self) -> str:
        """The name after the last dot."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class SourceFunction:
    """A function in a file that was read as text."""

    node: ast.FunctionDef
    module: Any
    """python_text.Module: where its names are looked up."""


@dataclass(slots=True, eq=False, repr=False)
class SourceObject:
    """An object: the call that created it, and the attributes set since. Objects are shared, as in Python."""

    callee: str = ""
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.callee}(...)"  # objects may hold one another

    def child(self, name: str) -> SourceObject:
        """The object in an attribute, created if nothing is known about it."""
        found = self.attributes.get(name)
        if not isinstance(found, SourceObject):
            found = self.attributes[name] = SourceObject()
        return found


def is_known(value: Any) -> bool:
    """Whether a condition may depend on it: not a name of another module, and not the result of an unread function (a class creates an object)."""
    if isinstance(value, SourceObject):
        return value.callee.removesuffix(".Config").rpartition(".")[2][:1].isupper()
    return not isinstance(value, (Unknown, Dotted))


def bounded(value: Any) -> Any:
    """`value`, where comparing or printing it ends: lists that hold one another twice have no end. Raises DataError."""
    left, waiting = MOST_VALUES, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple, Mapping)):
            left -= 1 + len(one)
            waiting += one.values() if isinstance(one, Mapping) else one
        if left < 0:
            raise DataError(f"a value of more than {MOST_VALUES:,} parts, too many for a configuration")
    return value


def plain(value: Any, depth: int = 12) -> Any:
    """Data for an importer: objects as mappings, dtypes and other names as text. Unknown values are kept. Raises DataError for more than MOST_VALUES."""
    left = MOST_VALUES

    def of(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise DataError(f"a value of more than {MOST_VALUES:,} parts, too many for a configuration")
        if depth == 0:
            return Unknown("...")
        if isinstance(value, SourceObject):
            return {name: of(inner, depth - 1) for name, inner in value.attributes.items()}
        if isinstance(value, Dotted):
            return value.path
        if isinstance(value, (list, tuple)):
            return [of(inner, depth - 1) for inner in value]
        if isinstance(value, Mapping):
            return {name: of(inner, depth - 1) for name, inner in value.items()}
        return value

    return of(value, depth)


def without_unknown(data: Mapping[str, Any], found: list[str], path: str = "") -> dict[str, Any]:
    """`data` without unknown values; 'a.b: expression' of each is added to `found`."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Unknown):
            found.append(f"{here} = {value.text}")
        elif isinstance(value, Mapping):
            kept[name] = without_unknown(value, found, here)
        else:
            kept[name] = value
    return kept


def short(value: Any) -> str:
    """A value in a note, in at most 60 characters."""
    said = {Unknown: "text", Dotted: "path", SourceObject: "callee"}.get(type(value))
    text = repr(bounded(value)) if said is None else str(getattr(value, said))
    return text if len(text) <= 60 else text[:57] + "..."
