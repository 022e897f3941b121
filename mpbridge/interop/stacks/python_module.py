"""Python files as text: functions, classes and constants by name, and the files of the checkout that their imports name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from mpbridge.common.errors import DataError
from mpbridge.common.files import text_of
from mpbridge.interop.stacks.python_values import Dotted, SourceFunction


class Evaluates(Protocol):
    """What a module needs of who reads it (python_expressions.Expressions)."""

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
