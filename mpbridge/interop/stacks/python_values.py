"""Python files as text: values (constants, names, objects with attributes, unknown ones), and the names that a file defines or imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError

PLAIN = (str, int, float, bool, type(None))


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
    module: Module
    """Where its names are looked up."""


@dataclass(slots=True, eq=False, repr=False)
class SourceObject:
    """An object: the call that created it, and the attributes set since. Objects are shared, as in Python."""

    callee: str = ""
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


def known_fields(value: Any, wanted: Iterable[str], not_known: list[str], where: str) -> dict[str, Any]:
    """An object's attributes among those `wanted`, dtypes and other names as text; 'where.name = expression' of each that is unknown is added to `not_known`."""
    kept: dict[str, Any] = {}
    for name, inner in value.attributes.items() if isinstance(value, SourceObject) else ():
        if name in wanted and isinstance(inner, (*PLAIN, Dotted)):
            kept[name] = inner.path if isinstance(inner, Dotted) else inner
        elif name in wanted:
            not_known.append(f"{where}.{name} = {short(inner)}")
    return kept


def is_known(value: Any) -> bool:
    """Whether a condition may depend on it: plain data, or an object that a class created, which is true."""
    if isinstance(value, SourceObject):
        return value.callee.removesuffix(".Config").rpartition(".")[2][:1].isupper()
    return isinstance(value, (*PLAIN, list, dict))


def short(value: Any) -> str:
    """A value in a note, in at most 60 characters."""
    said = {Unknown: "text", Dotted: "path", SourceObject: "callee"}.get(type(value))
    plain = repr(value) if isinstance(value, PLAIN) else f"a {type(value).__name__}"
    text = str(getattr(value, said)) if said else plain
    return text if len(text) <= 60 else text[:57] + "..."


_parsed = functools.lru_cache(maxsize=32)(ast.parse)


class Module:
    """One file's text: its functions, classes and constants by name, and the sources of its imports."""

    def __init__(self, text: str, path: Path | None, name: str) -> None:
        try:
            body = _parsed(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"{name}: is not Python: {error}") from None
        self.path, self.name = path, name
        self.functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        self.classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
        made = [(one, node.value) for node in body if isinstance(node, ast.Assign) for one in node.targets]
        self.constants = {target.id: value for target, value in made if isinstance(target, ast.Name)}
        self.imports = imported_names(body)

    def __contains__(self, name: str) -> bool:
        return any(name in names for names in (self.functions, self.classes, self.constants, self.imports))

    def file(self, level: int, path: str) -> Path | None:
        """The file that an import in this one names, in the same checkout. level: its leading dots."""
        parts = [part for part in path.split(".") if part]
        parents = [] if self.path is None else [*self.path.resolve().parents]
        for root in parents[level - 1 : level] if level else parents:
            plain = [root.joinpath(*parts).with_suffix(".py")] if parts else []
            for candidate in (*plain, root.joinpath(*parts, "__init__.py")):
                if candidate.is_file() and not candidate.is_symlink():
                    return candidate
        return None


def imported_names(body: Iterable[ast.stmt]) -> dict[str, tuple[int, str, str]]:
    """Local name -> (leading dots, module, name in it or '') of the imports among some statements."""
    found: dict[str, tuple[int, str, str]] = {}
    for node in body:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            first = alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                found[alias.asname or alias.name] = (node.level, node.module or "", alias.name)
            else:
                found[alias.asname or first] = (0, alias.name if alias.asname else first, "")
    return found
