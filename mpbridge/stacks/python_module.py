"""One Python file as text: its functions, classes and constants by name, and where its imports come from."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.errors import DataError
from mpbridge.stacks.python_values import Dotted, Function

if TYPE_CHECKING:
    from mpbridge.stacks.python_text import Reading


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class Module:
    """One file's text: its functions, classes and constants by name, and where its imports come from."""

    def __init__(self, text: str, path: Path | None, name: str, reading: Reading) -> None:
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
        """What a name of this file stands for."""
        if name in self.functions:
            return Function(self.functions[name], self)
        if name in self.constants:
            return self.reading.value(self.constants[name], {}, self)
        if name in self.imports:
            return self.reading.elsewhere(self.imports[name], self)
        return Dotted(f"{self.name}.{name}" if name in self.classes else name)


def imported(body: Iterable[ast.stmt]) -> dict[str, tuple[int, str, str]]:
    """Local name -> (dots before the module, module, name in it or '') of the imports among some statements."""
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
