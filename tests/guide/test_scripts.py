"""Scripts import names of mpbridge that exist, also where a function does it: nothing else looks at a script before a person runs it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def imported(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpbridge"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_every_name_that_a_script_imports_exists() -> None:
    files = sorted(SCRIPTS.rglob("*.py"))
    assert [f"{file.name}: {module}.{name}" for file in files for module, name in imported(file) if not exists(module, name)] == []  # fmt: skip
