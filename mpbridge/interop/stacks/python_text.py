"""Reads configurations written as Python functions from their text: assignments, calls with constants, branches with a known condition.

Nothing is imported or run. A name from another file of the same checkout is looked up in that file's text; everything else is a name or
unknown, and an assignment under an unknown condition makes its value unknown.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import DataError, UnknownName
from mpbridge.interop.stacks.python_values import (
    Dotted,
    Files,
    Module,
    SourceFunction,
    SourceObject,
    Unknown,
    bounded,
    imported,
    is_known,
    short,
)  # fmt: skip

DEEPEST = 12
"""Maximum depth of nested calls."""


class _Returned(Exception):
    """Ends a function."""

    def __init__(self, value: Any) -> None:
        self.value = value


MOST_STEPS = 100_000
"""Maximum number of expressions evaluated; real configurations have far fewer."""
LARGEST_NUMBER = 1 << 62
"""Maximum size of a computed value, so that repeated products cannot exhaust memory."""

_COMPARE: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
        ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    }
)  # fmt: skip
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
)

_HARMLESS = frozenset({*dir(builtins), "copy", "logging", "logger", "math", "os", "sys", "warnings"})
"""Modules whose functions do not modify a configuration passed to them."""

_COPIES = frozenset({"copy.copy", "copy.deepcopy", "copy.replace", "dataclasses.replace"})
"""Functions that return a copy of their argument."""


class Reading:
    """One configuration being read: its files, the values of its expressions, and what could not be followed."""

    def __init__(self, opaque: frozenset[str] = frozenset()) -> None:
        self.opaque = opaque
        """Names of functions that are not followed, since their arguments are sufficient."""
        self.notes: list[str] = []
        self.files = Files(self)
        self.doubt: list[str] = []
        """The unknown conditions around the current statement."""
        self._steps = self._depth = 0

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

    def _Try(self, node: ast.Try | ast.While | ast.Match, scope: dict[str, Any], module: Module) -> None:
        with self._in_doubt(ast.unparse(node).partition("\n")[0].rstrip(":")):
            self._inside(node, scope, module)

    _While = _Match = _Try

    def _inside(self, node: ast.AST, scope: dict[str, Any], module: Module) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._run([child], scope, module)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                self._inside(child, scope, module)

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

    # expressions

    def value(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """The value of an expression; Unknown if it is known only at run time. Raises DataError past the bound on steps."""
        self.spend(module)
        if isinstance(node, ast.Constant):
            return node.value
        handler = getattr(self, f"_of_{type(node).__name__}", None)
        return Unknown(ast.unparse(node)) if handler is None else handler(node, scope, module)

    def spend(self, module: Module) -> None:
        """Counts an expression, or a round of a loop. Raises DataError past the bound."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise DataError(f"{module.name}: more than {MOST_STEPS} expressions, too many for a configuration")

    def _of_Name(self, node: ast.Name, scope: dict[str, Any], module: Module) -> Any:
        return scope[node.id] if node.id in scope else module.find(node.id)

    def _of_Attribute(self, node: ast.Attribute, scope: dict[str, Any], module: Module) -> Any:
        owner = self.value(node.value, scope, module)
        if isinstance(owner, Dotted):
            return Dotted(f"{owner.path}.{node.attr}")
        if isinstance(owner, SourceObject):
            return owner.attributes.get(node.attr, Unknown(ast.unparse(node)))
        return Unknown(ast.unparse(node))

    def _of_Tuple(self, node: ast.Tuple | ast.List, scope: dict[str, Any], module: Module) -> Any:
        return [self.value(item, scope, module) for item in node.elts]

    _of_List = _of_Tuple

    def _of_Dict(self, node: ast.Dict, scope: dict[str, Any], module: Module) -> Any:
        keys = [None if key is None else self.value(key, scope, module) for key in node.keys]
        if any(not isinstance(key, (str, int)) for key in keys):
            return Unknown(ast.unparse(node))
        return {
            key: self.value(item, scope, module)
            for key, item in zip(keys, node.values, strict=True)
            if isinstance(key, (str, int))
        }

    def _of_Subscript(self, node: ast.Subscript, scope: dict[str, Any], module: Module) -> Any:
        whole, key = self.value(node.value, scope, module), self.value(node.slice, scope, module)
        if isinstance(whole, (dict, list)) and isinstance(key, (str, int)):
            try:
                return whole[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                pass
        return Unknown(ast.unparse(node))

    def _of_UnaryOp(self, node: ast.UnaryOp, scope: dict[str, Any], module: Module) -> Any:
        value = self.value(node.operand, scope, module)
        if isinstance(node.op, ast.Not) and is_known(value):
            return not value
        if isinstance(node.op, ast.USub) and isinstance(value, (int, float)):
            return -value
        return Unknown(ast.unparse(node))

    def _of_BinOp(self, node: ast.BinOp, scope: dict[str, Any], module: Module) -> Any:
        left, right = self.value(node.left, scope, module), self.value(node.right, scope, module)
        numbers = all(isinstance(side, (int, float)) and abs(side) < LARGEST_NUMBER for side in (left, right))
        if numbers and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](left, right)
        return Unknown(ast.unparse(node))

    def _of_Compare(self, node: ast.Compare, scope: dict[str, Any], module: Module) -> Any:
        left, right = self.value(node.left, scope, module), self.value(node.comparators[0], scope, module)
        known = is_known(left) and is_known(right)
        compare = _COMPARE.get(type(node.ops[0]))
        if len(node.ops) > 1 or compare is None or not known:
            return Unknown(ast.unparse(node))
        try:
            return compare(bounded(left), bounded(right))
        except TypeError:
            return Unknown(ast.unparse(node))

    def _of_BoolOp(self, node: ast.BoolOp, scope: dict[str, Any], module: Module) -> Any:
        decides = isinstance(node.op, ast.Or)
        values = [self.value(item, scope, module) for item in node.values]
        known = [value for value in values if is_known(value)]
        settled = next((value for value in known if bool(value) is decides), None)
        if settled is not None and values[0] is settled:
            return settled
        if len(known) == len(values):
            return settled if settled is not None else values[-1]
        return False if not decides and settled is not None else Unknown(ast.unparse(node))

    def _of_IfExp(self, node: ast.IfExp, scope: dict[str, Any], module: Module) -> Any:
        test = self.value(node.test, scope, module)
        if not is_known(test):
            return Unknown(ast.unparse(node))
        return self.value(node.body if test else node.orelse, scope, module)

    def _of_Call(self, node: ast.Call, scope: dict[str, Any], module: Module) -> Any:
        callee = self.value(node.func, scope, module)
        arguments = tuple(self.value(item, scope, module) for item in node.args if not isinstance(item, ast.Starred))
        named = self._named(node, scope, module)
        if isinstance(callee, Dotted) and callee.path == "setattr" and len(arguments) == 3:
            return self._set(arguments, ast.unparse(node))
        if isinstance(callee, SourceFunction) and callee.node.name not in self.opaque:
            return self.call(callee, arguments, named)
        if isinstance(callee, Dotted) and len(arguments) == 2:
            if callee.path == "isinstance":
                return _is_instance(*arguments, ast.unparse(node))
            if callee.last == "cast":
                return arguments[1]
        if (
            isinstance(callee, Dotted)
            and callee.path in _COPIES
            and arguments
            and isinstance(arguments[0], SourceObject)
        ):
            first = arguments[0]
            return SourceObject(
                callee=first.callee, arguments=first.arguments, attributes={**first.attributes, **named}
            )
        made = SourceObject(callee=_name_of(callee, node.func), arguments=arguments, attributes=named)
        if isinstance(callee, Dotted):
            self._doubt_what_it_changes(callee, made)
        return made

    def _named(self, node: ast.Call, scope: dict[str, Any], module: Module) -> dict[str, Any]:
        """The keyword arguments, including those of a mapping (**more)."""
        found: dict[str, Any] = {}
        for item in node.keywords:
            value = self.value(item.value, scope, module)
            if item.arg is not None:
                found[item.arg] = value
            elif isinstance(value, Mapping):
                found |= {str(name): inner for name, inner in value.items()}
            elif isinstance(value, SourceObject) and _name_of(Dotted(value.callee), item.value) == "dict":
                found |= value.attributes
            else:
                self.notes.append(
                    f"**{ast.unparse(item.value)} of {ast.unparse(node.func)}(...): what it sets is unknown"
                )
        return found

    def _set(self, arguments: tuple[Any, ...], text: str) -> None:
        """setattr(object, name, value)."""
        owner, name, value = arguments
        if isinstance(owner, SourceObject) and isinstance(name, str):
            owner.attributes[name] = Unknown(f"{short(value)} under `{self.doubt[-1]}`") if self.doubt else value
        else:
            self.notes.append(f"{text}: what it sets is unknown")

    def _doubt_what_it_changes(self, callee: Dotted, made: SourceObject) -> None:
        """Adds a note if an object is passed to a function that is not read, which may set its attributes."""
        function = callee.last[:1].islower() and callee.path.partition(".")[0] not in _HARMLESS
        if function and any(isinstance(one, SourceObject) for one in (*made.arguments, *made.attributes.values())):
            self.notes.append(f"{callee.path}(...): is not in this checkout; what it changes is unknown")


def _name_of(callee: Any, written: ast.expr) -> str:
    """The called function, by the name nearest to its definition."""
    if isinstance(callee, Dotted):
        return callee.path
    return callee.node.name if isinstance(callee, SourceFunction) else ast.unparse(written)


def _is_instance(value: Any, kind: Any, text: str) -> Any:
    """isinstance() of plain data or an object against builtin types or the class that created it."""
    asked = kind.last if isinstance(kind, Dotted) else ""
    plain_kinds = {"str": str, "bool": bool, "int": int, "float": float, "list": list, "dict": dict}
    if asked in plain_kinds and is_known(value):
        return isinstance(value, plain_kinds[asked])
    if isinstance(value, SourceObject) and is_known(value) and asked == value.callee.rpartition(".")[2]:
        return True
    return Unknown(text)
