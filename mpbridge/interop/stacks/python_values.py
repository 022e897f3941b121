"""Python files as text: values (constants, names, objects with attributes, unknown ones), the names that a file defines, and the files that its imports name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mpbridge.common.errors import DataError
from mpbridge.common.files import LIMITS, text_of

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
    module: Module
    """Where its names are looked up."""


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


class Evaluates(Protocol):
    """What a module needs of who reads it (python_text.Reading)."""

    files: Files
    notes: list[str]

    def value(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """The value of an expression."""


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class Module:
    """One file's text: its functions, classes and constants by name, and the sources of its imports."""

    def __init__(self, text: str, path: Path | None, name: str, reading: Evaluates) -> None:
        try:
            tree = _parsed(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"{name}: is not Python: {error}") from None
        self.path, self.name, self.reading = path, name, reading
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        self.constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.imports = imported(tree.body)

    def find(self, name: str) -> Any:
        """The meaning of a name in this file."""
        if name in self.functions:
            return SourceFunction(self.functions[name], self)
        if name in self.constants:
            return self.reading.value(self.constants[name], {}, self)
        if name in self.imports:
            return self.reading.files.elsewhere(self.imports[name], self)
        return Dotted(f"{self.name}.{name}" if name in self.classes else name)


def imported(body: Iterable[ast.stmt]) -> dict[str, tuple[int, str, str]]:
    """Local name -> (leading dots, module, name in it or '') of the imports among some statements."""
    found: dict[str, tuple[int, str, str]] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (node.level, node.module or "", alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    0,
                    alias.name if alias.asname else alias.name.partition(".")[0],
                    "",
                )
    return found


class Files:
    """The other files of a checkout, each parsed once."""

    def __init__(self, reading: Evaluates) -> None:
        self._reading = reading
        self._modules: dict[Path, Module | None] = {}

    def elsewhere(self, source: tuple[int, str, str], module: Module) -> Any:
        """What an import refers to, from another file of the checkout if there is one."""
        level, path, name = source
        full = ".".join(part for part in (path, name) if part)
        found = self._file(level, path, module)
        other = None if found is None else self._load(found, path or found.parent.name)
        if other is not None and name and self._knows(other, name):
            return other.find(name)
        return Dotted("." * level + full)

    @staticmethod
    def _knows(module: Module, name: str) -> bool:
        return name in module.functions or name in module.constants or name in module.imports or name in module.classes

    @staticmethod
    def _file(level: int, path: str, module: Module) -> Path | None:
        if module.path is None:
            return None
        parts = [part for part in path.split(".") if part]
        parents = module.path.resolve().parents
        roots = [parents[level - 1]] if 0 < level <= len(parents) else [] if level else list(parents)
        for root in roots:
            for candidate in (
                root.joinpath(*parts).with_suffix(".py") if parts else None,
                root.joinpath(*parts, "__init__.py"),
            ):
                if candidate is not None and candidate.is_file() and not candidate.is_symlink():
                    return candidate
        return None

    def _load(self, path: Path, name: str) -> Module | None:
        if path not in self._modules:
            self._modules[path] = None  # for files that import each other
            try:
                text = text_of(path, errors="replace", kind="configuration")
                self._modules[path] = Module(text, path, name, self._reading)
            except (OSError, DataError):
                self._reading.notes.append(f"{path.name}: cannot be read")
        return self._modules[path]
