"""Reads configurations written as Python functions from their text: assignments, calls with constants, branches with a known condition.

Nothing is imported or run. A name from another file of the same checkout is looked up in that file's text; everything else is a name or
unknown, and an assignment under an unknown condition makes its value unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpbridge.common.errors import UnknownName
from mpbridge.interop.stacks.python_expressions import Expressions
from mpbridge.interop.stacks.python_module import Module, imported
from mpbridge.interop.stacks.python_values import SourceFunction, SourceObject, Unknown, is_known, short

DEEPEST = 12
"""Maximum depth of nested calls."""


class _Returned(Exception):
    """Ends a function."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Reading(Expressions):
    """One configuration being read: its files, and what could not be followed."""

    def __init__(self, opaque: frozenset[str] = frozenset()) -> None:
        super().__init__(opaque)
        self._depth = 0

    def module(self, text: str, path: Path | None, name: str) -> Module:
        """The parsed file. Raises DataError if it is not Python."""
        return Module(text, path, name, self)

    def function(self, module: Module, name: str) -> Any:
        """What the function `name` of `module` returns when called without arguments. Raises UnknownName, DataError."""
        if name not in module.functions:
            raise UnknownName(f"function of {module.name}", name, module.functions)
        return self.call(SourceFunction(module.functions[name], module), (), {})

    def call(self, function: SourceFunction, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The value of a call."""
        if self._depth >= DEEPEST:
            return Unknown(f"{function.node.name}(...)")
        given = function.node.args
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        scope: dict[str, Any] = {name: Unknown(name) for name in (*names, *(one.arg for one in given.kwonlyargs))}
        for one, default in zip(reversed(names), reversed(given.defaults), strict=False):
            scope[one] = self.value(default, {}, function.module)
        for keyword, other in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            if other is not None:
                scope[keyword.arg] = self.value(other, {}, function.module)
        scope |= dict(zip(names, arguments, strict=False)) | dict(named)
        self._depth += 1
        try:
            self._run(function.node.body, scope, function.module)
        except _Returned as end:
            return end.value
        finally:
            self._depth -= 1
        return None

    # statements

    def _run(self, body: Iterable[ast.stmt], scope: dict[str, Any], module: Module) -> None:
        for node in body:
            handler = getattr(self, f"_{type(node).__name__}", None)
            if handler is not None:
                handler(node, scope, module)

    def _Return(self, node: ast.Return, scope: dict[str, Any], module: Module) -> None:
        value = None if node.value is None else self.value(node.value, scope, module)
        if self.doubt:
            self.notes.append(f"what is returned under `{self.doubt[-1]}`")
            return
        raise _Returned(value)

    def _Raise(self, node: ast.Raise, scope: dict[str, Any], module: Module) -> None:
        if not self.doubt:
            raise _Returned(Unknown(ast.unparse(node)))

    def _Expr(self, node: ast.Expr, scope: dict[str, Any], module: Module) -> None:
        self.value(node.value, scope, module)

    def _Import(self, node: ast.Import | ast.ImportFrom, scope: dict[str, Any], module: Module) -> None:
        for name, source in imported([node]).items():
            scope[name] = self.files.elsewhere(source, module)

    _ImportFrom = _Import

    def _Assign(self, node: ast.Assign, scope: dict[str, Any], module: Module) -> None:
        value = self.value(node.value, scope, module)
        for target in node.targets:
            self._store(target, value, scope, module)

    def _AnnAssign(self, node: ast.AnnAssign, scope: dict[str, Any], module: Module) -> None:
        if node.value is not None:
            self._store(node.target, self.value(node.value, scope, module), scope, module)

    def _AugAssign(self, node: ast.AugAssign, scope: dict[str, Any], module: Module) -> None:
        self._store(node.target, Unknown(ast.unparse(node)), scope, module)

    def _With(self, node: ast.With, scope: dict[str, Any], module: Module) -> None:
        self._run(node.body, scope, module)

    def _Try(self, node: ast.Try, scope: dict[str, Any], module: Module) -> None:
        with self._in_doubt("try"):
            for body in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                self._run(body, scope, module)

    def _While(self, node: ast.While, scope: dict[str, Any], module: Module) -> None:
        with self._in_doubt(f"while {ast.unparse(node.test)}"):
            self._run((*node.body, *node.orelse), scope, module)

    def _Match(self, node: ast.Match, scope: dict[str, Any], module: Module) -> None:
        with self._in_doubt(f"match {ast.unparse(node.subject)}"):
            for case in node.cases:
                self._run(case.body, scope, module)

    def _Delete(self, node: ast.Delete, scope: dict[str, Any], module: Module) -> None:
        for target in node.targets:
            self._store(target, Unknown(ast.unparse(node)), scope, module)

    def _For(self, node: ast.For, scope: dict[str, Any], module: Module) -> None:
        items = self.value(node.iter, scope, module)
        if not isinstance(items, (list, tuple)):
            with self._in_doubt(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"):
                self._run(node.body, scope, module)
            return
        for item in items:
            self.spend(module)
            self._store(node.target, item, scope, module)
            self._run(node.body, scope, module)

    def _If(self, node: ast.If, scope: dict[str, Any], module: Module) -> None:
        test = self.value(node.test, scope, module)
        if is_known(test):
            self._run(node.body if test else node.orelse, scope, module)
            return
        with self._in_doubt(f"if {ast.unparse(node.test)}"):
            self._run(node.body, scope, module)
            self._run(node.orelse, scope, module)

    @contextmanager
    def _in_doubt(self, why: str) -> Any:
        self.doubt.append(why)
        try:
            yield
        finally:
            self.doubt.pop()

    def _store(self, target: ast.expr, value: Any, scope: dict[str, Any], module: Module) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, (list, tuple)) else ()
            known = len(parts) == len(target.elts)
            for index, inner in enumerate(target.elts):
                self._store(inner, parts[index] if known else Unknown(ast.unparse(inner)), scope, module)
            return
        if self.doubt and isinstance(target, ast.Name) and isinstance(value, SourceObject):
            self.notes.append(f"{target.id} = {value.callee}(...) under `{self.doubt[-1]}`: assumed to be executed")
        elif self.doubt:
            value = Unknown(f"{short(value)} under `{self.doubt[-1]}`")
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._owner(target.value, scope, module)
            if owner is not None:
                owner.attributes[target.attr] = value
        elif isinstance(target, ast.Subscript):
            whole, key = self.value(target.value, scope, module), self.value(target.slice, scope, module)
            if isinstance(whole, dict) and isinstance(key, (str, int)):
                whole[key] = value
            else:
                self.notes.append(f"{ast.unparse(target)} = ...: what it sets is unknown")

    def _owner(self, node: ast.expr, scope: dict[str, Any], module: Module) -> SourceObject | None:
        """The object whose attribute is set; creates missing objects on the path."""
        if isinstance(node, ast.Attribute):
            outer = self._owner(node.value, scope, module)
            return None if outer is None else outer.child(node.attr)
        found = self.value(node, scope, module)
        if isinstance(node, ast.Name) and isinstance(found, Unknown):
            found = scope[node.id] = SourceObject()
        return found if isinstance(found, SourceObject) else None
