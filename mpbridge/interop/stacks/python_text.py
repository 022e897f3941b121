"""Reads configurations written as Python functions from their text: assignments, calls with constants, branches with a known condition.

Nothing is imported or run. A name from another file of the same checkout is looked up in that file's text; everything else is a name or
unknown, and an assignment under an unknown condition, in a loop or in another compound statement makes its value unknown.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError, UnknownName
from mpbridge.common.files import text_of
from mpbridge.interop.stacks.python_values import (
    PLAIN,
    Dotted,
    Module,
    SourceFunction,
    SourceObject,
    Unknown,
    imported_names,
    is_known,
    short,
)  # fmt: skip
from mpbridge.precision.yaml_loader import MOST_BITS

DEEPEST = 12
"""Maximum depth of nested calls."""
MOST_STEPS = 100_000
"""Maximum number of expressions evaluated; real configurations have far fewer."""
_COMPARE: Mapping[type, Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_HARMLESS = frozenset({*dir(builtins), "copy", "logging", "logger", "math", "os", "sys", "warnings"})
"""Modules whose functions do not modify a configuration passed to them."""
_COPIES = frozenset({"copy.copy", "copy.deepcopy", "copy.replace", "dataclasses.replace"})
"""Functions that return a copy of their argument."""


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Reading:
    """One configuration being read: its files, the values of its expressions, and what could not be followed."""

    def __init__(self, opaque: frozenset[str] = frozenset()) -> None:
        self.opaque = opaque
        """Names of functions that are not followed, since their arguments are sufficient."""
        self.notes: list[str] = []
        self.doubt: list[str] = []
        """The unknown conditions around the current statement."""
        self._modules: dict[Path, Module | None] = {}
        self._steps = self._depth = 0

    def function(self, module: Module, name: str) -> Any:
        """What the function `name` of `module` returns when called without arguments. Raises UnknownName, DataError."""
        if name not in module.functions:
            raise UnknownName(f"function of {module.name}", name, module.functions)
        return self._call(SourceFunction(module.functions[name], module), (), {})

    def _call(self, function: SourceFunction, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if self._depth >= DEEPEST:
            return Unknown(f"{function.node.name}(...)")
        given, module = function.node.args, function.module
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        defaults = [*zip(reversed(names), reversed(given.defaults), strict=False)]
        defaults += [(one.arg, other) for one, other in zip(given.kwonlyargs, given.kw_defaults, strict=True) if other]
        scope: dict[str, Any] = {name: Unknown(name) for name in (*names, *(one.arg for one in given.kwonlyargs))}
        scope |= {name: self.value(default, {}, module) for name, default in defaults}
        scope |= dict(zip(names, arguments, strict=False)) | dict(named)
        self._depth += 1
        try:
            self._run(function.node.body, scope, module)
        except _Returned as end:
            return end.value
        finally:
            self._depth -= 1
        return None

    def _find(self, name: str, module: Module) -> Any:
        if name in module.functions:
            return SourceFunction(module.functions[name], module)
        if name in module.constants:
            return self.value(module.constants[name], {}, module)
        if name in module.imports:
            return self._elsewhere(module.imports[name], module)
        return Dotted(f"{module.name}.{name}" if name in module.classes else name)

    def _elsewhere(self, source: tuple[int, str, str], module: Module) -> Any:
        """What an import refers to, from another file of the checkout if there is one, which is parsed once."""
        level, path, name = source
        file = module.file(level, path)
        if file is not None and file not in self._modules:
            self._modules[file] = None  # for files that import each other
            try:
                text = text_of(file, errors="replace", kind="configuration")
                self._modules[file] = Module(text, file, path or file.parent.name)
            except (OSError, DataError):
                self.notes.append(f"{file.name}: cannot be read")
        other = None if file is None else self._modules[file]
        if other is not None and name and name in other:
            return self._find(name, other)
        return Dotted("." * level + ".".join(part for part in (path, name) if part))

    # statements

    def _run(self, body: Iterable[ast.stmt], scope: dict[str, Any], module: Module) -> None:
        for node in body:
            match node:
                case ast.Return() | ast.Raise():
                    self._leave(node, scope, module)
                case ast.Expr():
                    self.value(node.value, scope, module)
                case ast.Import() | ast.ImportFrom():
                    scope |= {name: self._elsewhere(source, module) for name, source in imported_names([node]).items()}
                case ast.Assign() | ast.AnnAssign() if node.value is not None:
                    value = self.value(node.value, scope, module)
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._store(target, value, scope, module)
                case ast.AugAssign() | ast.Delete():
                    for target in node.targets if isinstance(node, ast.Delete) else [node.target]:
                        self._store(target, Unknown(ast.unparse(node)), scope, module)
                case ast.With():
                    self._run(node.body, scope, module)
                case ast.If() if is_known(test := self.value(node.test, scope, module)):
                    self._run(node.body if test else node.orelse, scope, module)
                case ast.If() | ast.For() | ast.While() | ast.Try() | ast.Match():
                    self.doubt.append(ast.unparse(node).partition("\n")[0].rstrip(":"))
                    self._inside(node, scope, module)
                    self.doubt.pop()

    def _leave(self, node: ast.Return | ast.Raise, scope: dict[str, Any], module: Module) -> None:
        given = node.value if isinstance(node, ast.Return) else None
        value = None if given is None else self.value(given, scope, module)
        if not self.doubt:
            raise _Returned(value if isinstance(node, ast.Return) else Unknown(ast.unparse(node)))
        if isinstance(node, ast.Return):
            self.notes.append(f"what is returned under `{self.doubt[-1]}`")

    def _inside(self, node: ast.AST, scope: dict[str, Any], module: Module) -> None:
        """Every statement of a compound one, each as if it ran."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._run([child], scope, module)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                self._inside(child, scope, module)

    def _store(self, target: ast.expr, value: Any, scope: dict[str, Any], module: Module) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else map(Unknown, map(ast.unparse, target.elts))  # fmt: skip
            for inner, part in zip(target.elts, parts, strict=True):
                self._store(inner, part, scope, module)
            return
        if self.doubt and isinstance(target, ast.Name) and isinstance(value, SourceObject):
            self.notes.append(f"{target.id} = {value.callee}(...) under `{self.doubt[-1]}`: assumed to be executed")
        else:
            value = self._doubted(value)
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._owner(target.value, scope, module)
            if owner is not None:
                owner.attributes[target.attr] = value
        else:
            whole = self.value(target.value, scope, module) if isinstance(target, ast.Subscript) else None
            key = self.value(target.slice, scope, module) if isinstance(target, ast.Subscript) else None
            if isinstance(whole, dict) and isinstance(key, (str, int)):
                whole[key] = value
            else:
                self.notes.append(f"{ast.unparse(target)} = ...: what it sets is unknown")

    def _doubted(self, value: Any) -> Any:
        return Unknown(f"{short(value)} under `{self.doubt[-1]}`") if self.doubt else value

    def _owner(self, node: ast.expr, scope: dict[str, Any], module: Module) -> SourceObject | None:
        """The object whose attribute is set; creates missing objects on the path."""
        outer = self._owner(node.value, scope, module) if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Attribute):
            if outer is not None and not isinstance(outer.attributes.get(node.attr), SourceObject):
                outer.attributes[node.attr] = SourceObject()
            return outer and outer.attributes[node.attr]
        found = self.value(node, scope, module)
        if isinstance(node, ast.Name) and isinstance(found, Unknown):
            found = scope[node.id] = SourceObject()
        return found if isinstance(found, SourceObject) else None

    # expressions

    def value(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """The value of an expression; Unknown if it is known only at run time. Raises DataError past the bound on steps."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise DataError(f"{module.name}: more than {MOST_STEPS} expressions, too many for a configuration")
        match node:
            case ast.Constant(value=int(number)) if number.bit_length() > MOST_BITS:
                raise DataError(f"{module.name}: a whole number of more than {MOST_BITS:,} bits")
            case ast.Constant():
                return node.value
            case ast.Name():
                return scope[node.id] if node.id in scope else self._find(node.id, module)
            case ast.Tuple() | ast.List():
                return [self.value(item, scope, module) for item in node.elts]
            case ast.Call():
                return self._called(node, scope, module)
            case ast.Attribute():
                owner, unknown = self.value(node.value, scope, module), Unknown(ast.unparse(node))
                if isinstance(owner, Dotted):
                    return Dotted(f"{owner.path}.{node.attr}")
                return owner.attributes.get(node.attr, unknown) if isinstance(owner, SourceObject) else unknown
            case ast.Subscript():
                whole, at = self.value(node.value, scope, module), self.value(node.slice, scope, module)
                there = isinstance(whole, list) and isinstance(at, int) and -len(whole) <= at < len(whole)
                if there or (isinstance(whole, dict) and isinstance(at, (str, int)) and at in whole):
                    return whole[at]
            case ast.Dict():
                keys = [None if key is None else self.value(key, scope, module) for key in node.keys]
                values = [self.value(item, scope, module) for item in node.values]
                if all(isinstance(key, (str, int)) for key in keys):
                    return dict(zip(keys, values, strict=True))
        return self._decided(node, scope, module)

    def _decided(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """The value of what conditions are made of; Unknown for everything else."""
        match node:
            case ast.UnaryOp(op=ast.Not()):
                value = self.value(node.operand, scope, module)
                return not value if is_known(value) else Unknown(ast.unparse(node))
            case ast.Compare(ops=[only], comparators=[other]):
                left, right = self.value(node.left, scope, module), self.value(other, scope, module)
                return self._compared(type(only), left, right, node)
            case ast.BoolOp():
                values = [self.value(item, scope, module) for item in node.values]
                return self._settled(values, isinstance(node.op, ast.Or), node)
            case ast.IfExp() if is_known(test := self.value(node.test, scope, module)):
                return self.value(node.body if test else node.orelse, scope, module)
        return Unknown(ast.unparse(node))

    @staticmethod
    def _compared(kind: type, left: Any, right: Any, node: ast.expr) -> Any:
        """A comparison of plain data, of an element with a list of it, or of anything with None."""
        looks, whole = kind in (ast.In, ast.NotIn), isinstance(right, (list, dict))
        sides = (left, *right) if looks and whole else (left, right)
        if kind in _COMPARE and looks is whole and all(isinstance(one, PLAIN) for one in sides):
            return _COMPARE[kind](left, right)
        if not looks and kind in _COMPARE and None in (left, right) and is_known(left) and is_known(right):
            return kind in (ast.NotEq, ast.IsNot)
        return Unknown(ast.unparse(node))

    @staticmethod
    def _settled(values: list[Any], decides: bool, node: ast.expr) -> Any:
        """`and`, `or` (decides) of values of which some may be unknown."""
        if all(map(is_known, values)):
            return next((value for value in values if bool(value) is decides), values[-1])
        if is_known(values[0]) and bool(values[0]) is decides:
            return values[0]
        off = not decides and any(is_known(value) and not value for value in values)
        return False if off else Unknown(ast.unparse(node))

    def _called(self, node: ast.Call, scope: dict[str, Any], module: Module) -> Any:
        callee = self.value(node.func, scope, module)
        arguments = tuple(self.value(item, scope, module) for item in node.args if not isinstance(item, ast.Starred))
        named, path = self._named(node, scope, module), callee.path if isinstance(callee, Dotted) else ""
        if path == "setattr" and len(arguments) == 3:
            owner, name, value = arguments
            if isinstance(owner, SourceObject) and isinstance(name, str):
                owner.attributes[name] = self._doubted(value)
            else:
                self.notes.append(f"{ast.unparse(node)}: what it sets is unknown")
            return None
        if isinstance(callee, SourceFunction) and callee.node.name not in self.opaque:
            return self._call(callee, arguments, named)
        first = arguments[0] if arguments else None
        if path == "isinstance" and len(arguments) == 2:
            return _is_instance(first, arguments[1], ast.unparse(node))
        if path.rpartition(".")[2] == "cast" and len(arguments) == 2:
            return arguments[1]
        if path in _COPIES and isinstance(first, SourceObject):
            return SourceObject(first.callee, first.arguments, {**first.attributes, **named})
        written = callee.node.name if isinstance(callee, SourceFunction) else ast.unparse(node.func)
        made = SourceObject(path or written, arguments, named)
        # a function that is not read may set attributes of an object that it gets
        function = path and callee.last[:1].islower() and path.partition(".")[0] not in _HARMLESS
        if function and any(isinstance(one, SourceObject) for one in (*arguments, *named.values())):
            self.notes.append(f"{path}(...): is not in this checkout; what it changes is unknown")
        return made

    def _named(self, node: ast.Call, scope: dict[str, Any], module: Module) -> dict[str, Any]:
        """The keyword arguments, including those of a mapping (**more)."""
        found: dict[str, Any] = {}
        for item in node.keywords:
            value = self.value(item.value, scope, module)
            more = value.attributes if isinstance(value, SourceObject) and value.callee == "dict" else value
            if item.arg is not None:
                found[item.arg] = value
            elif isinstance(more, Mapping):
                found |= {str(name): inner for name, inner in more.items()}
            else:
                text = f"**{ast.unparse(item.value)} of {ast.unparse(node.func)}(...): what it sets is unknown"
                self.notes.append(text)
        return found


def _is_instance(value: Any, kind: Any, text: str) -> Any:
    """isinstance() of plain data or an object against builtin types or the class that created it."""
    asked = kind.last if isinstance(kind, Dotted) else ""
    plain = getattr(builtins, asked) if asked in ("str", "bool", "int", "float", "list", "dict") else None
    if plain is not None and is_known(value):
        return isinstance(value, plain)
    same = isinstance(value, SourceObject) and is_known(value) and asked == value.callee.rpartition(".")[2]
    return same or Unknown(text)
