"""Configurations written as Python functions, read as text: assignments, calls with constants, branches whose condition is known.

Nothing is imported or run. A name from another file of the same checkout is looked up in that file's text; everything else is a name or not
known, and an assignment that depends on a condition which is not known makes its value not known.
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

from mpbridge.errors import DataError, UnknownName
from mpbridge.stacks.python_module import Module, imported
from mpbridge.stacks.python_values import Dotted, Function, Made, Unknown, is_known

LARGEST, DEEPEST, MOST_STEPS = 1_000_000, 12, 100_000
"""Bytes of a file, calls within calls, and expressions that are looked at: no configuration comes near."""

LARGEST_NUMBER = 1 << 62
"""What is reckoned with: a product of products must not fill the memory."""

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
"""Whose functions change no configuration that they are given."""


_COPIES = frozenset({"copy.copy", "copy.deepcopy", "copy.replace", "dataclasses.replace"})
"""Functions that make another object of the same kind."""


class _Returned(Exception):
    """A function's end."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Reading:
    """One configuration being read: its files, and what could not be followed."""

    def __init__(self, opaque: frozenset[str] = frozenset()) -> None:
        self.opaque = opaque
        """Functions that are not followed, by name: their arguments say what is to be known."""
        self.notes: list[str] = []
        self._modules: dict[Path, Module | None] = {}
        self._steps = self._depth = 0
        self._doubt: list[str] = []

    def module(self, text: str, path: Path | None, name: str) -> Module:
        """A file's text, taken apart. Raises DataError where it is no Python."""
        return Module(text, path, name, self)

    def function(self, module: Module, name: str) -> Any:
        """What the function `name` of `module` hands back when called without arguments. Raises UnknownName, DataError."""
        if name not in module.functions:
            raise UnknownName(f"function of {module.name}", name, module.functions)
        return self.call(Function(module.functions[name], module), (), {})

    def call(self, function: Function, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
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
        if self._doubt:
            self.notes.append(f"what is handed back under `{self._doubt[-1]}`")
            return
        raise _Returned(value)

    def _Raise(self, node: ast.Raise, scope: dict[str, Any], module: Module) -> None:
        if not self._doubt:
            raise _Returned(Unknown(ast.unparse(node)))

    def _Expr(self, node: ast.Expr, scope: dict[str, Any], module: Module) -> None:
        self.value(node.value, scope, module)

    def _Import(self, node: ast.Import | ast.ImportFrom, scope: dict[str, Any], module: Module) -> None:
        for name, source in imported([node]).items():
            scope[name] = self.elsewhere(source, module)

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
        self._doubt.append(why)
        try:
            yield
        finally:
            self._doubt.pop()

    def _store(self, target: ast.expr, value: Any, scope: dict[str, Any], module: Module) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, (list, tuple)) else ()
            known = len(parts) == len(target.elts)
            for index, inner in enumerate(target.elts):
                self._store(inner, parts[index] if known else Unknown(ast.unparse(inner)), scope, module)
            return
        if self._doubt and isinstance(target, ast.Name) and isinstance(value, Made):
            self.notes.append(f"{target.id} = {value.callee}(...) under `{self._doubt[-1]}`: taken as made")
        elif self._doubt:
            value = Unknown(f"{_short(value)} under `{self._doubt[-1]}`")
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
                self.notes.append(f"{ast.unparse(target)} = ...: what it sets is not known")

    def _owner(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Made | None:
        """The object whose attribute is set; objects on the way come into being."""
        if isinstance(node, ast.Attribute):
            outer = self._owner(node.value, scope, module)
            return None if outer is None else outer.child(node.attr)
        found = self.value(node, scope, module)
        if isinstance(node, ast.Name) and isinstance(found, Unknown):
            found = scope[node.id] = Made()
        return found if isinstance(found, Made) else None

    # expressions

    def value(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """What an expression evaluates to; Unknown where only running it would tell. Raises DataError past the bound on steps."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise DataError(f"{module.name}: more than {MOST_STEPS} expressions, which no configuration has")
        if isinstance(node, ast.Constant):
            return node.value
        handler = getattr(self, f"_of_{type(node).__name__}", None)
        return Unknown(ast.unparse(node)) if handler is None else handler(node, scope, module)

    def _of_Name(self, node: ast.Name, scope: dict[str, Any], module: Module) -> Any:
        return scope[node.id] if node.id in scope else module.find(node.id)

    def _of_Attribute(self, node: ast.Attribute, scope: dict[str, Any], module: Module) -> Any:
        owner = self.value(node.value, scope, module)
        if isinstance(owner, Dotted):
            return Dotted(f"{owner.path}.{node.attr}")
        if isinstance(owner, Made):
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
            return compare(left, right)
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
        if isinstance(callee, Function) and callee.node.name not in self.opaque:
            return self.call(callee, arguments, named)
        if isinstance(callee, Dotted) and len(arguments) == 2:
            if callee.path == "isinstance":
                return _is_instance(*arguments, ast.unparse(node))
            if callee.last == "cast":
                return arguments[1]
        if isinstance(callee, Dotted) and callee.path in _COPIES and arguments and isinstance(arguments[0], Made):
            first = arguments[0]
            return Made(callee=first.callee, arguments=first.arguments, attributes={**first.attributes, **named})
        made = Made(callee=_name_of(callee, node.func), arguments=arguments, attributes=named)
        if isinstance(callee, Dotted):
            self._doubt_what_it_changes(callee, made)
        return made

    def _named(self, node: ast.Call, scope: dict[str, Any], module: Module) -> dict[str, Any]:
        """The arguments that are given by name, those of a mapping (**more) among them."""
        found: dict[str, Any] = {}
        for item in node.keywords:
            value = self.value(item.value, scope, module)
            if item.arg is not None:
                found[item.arg] = value
            elif isinstance(value, Mapping):
                found |= {str(name): inner for name, inner in value.items()}
            elif isinstance(value, Made) and _name_of(Dotted(value.callee), item.value) == "dict":
                found |= value.attributes
            else:
                self.notes.append(
                    f"**{ast.unparse(item.value)} of {ast.unparse(node.func)}(...): what it sets is not known"
                )
        return found

    def _set(self, arguments: tuple[Any, ...], text: str) -> None:
        """setattr(object, name, value)."""
        owner, name, value = arguments
        if isinstance(owner, Made) and isinstance(name, str):
            owner.attributes[name] = Unknown(f"{_short(value)} under `{self._doubt[-1]}`") if self._doubt else value
        else:
            self.notes.append(f"{text}: what it sets is not known")

    def _doubt_what_it_changes(self, callee: Dotted, made: Made) -> None:
        """A note where a function that is not read is given an object: it may set attributes of it."""
        function = callee.last[:1].islower() and callee.path.partition(".")[0] not in _HARMLESS
        if function and any(isinstance(one, Made) for one in (*made.arguments, *made.attributes.values())):
            self.notes.append(f"{callee.path}(...): is not in this checkout; what it changes is not known")

    # other files

    def elsewhere(self, source: tuple[int, str, str], module: Module) -> Any:
        """What an import names, in the text of another file of the checkout where there is one."""
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
            self._modules[path] = None  # two files that import each other
            if path.stat().st_size <= LARGEST:
                try:
                    text = path.read_text(encoding="utf-8", errors="replace")
                    self._modules[path] = Module(text, path, name, self)
                except (OSError, DataError):
                    self.notes.append(f"{path.name}: cannot be read")
        return self._modules[path]


def _name_of(callee: Any, written: ast.expr) -> str:
    """What is called, by the name that is nearest to its definition."""
    if isinstance(callee, Dotted):
        return callee.path
    return callee.node.name if isinstance(callee, Function) else ast.unparse(written)


def _is_instance(value: Any, kind: Any, text: str) -> Any:
    """isinstance() of a value of plain data, or of an object, against plain data's types or the class that made it."""
    asked = kind.last if isinstance(kind, Dotted) else ""
    plain_kinds = {"str": str, "bool": bool, "int": int, "float": float, "list": list, "dict": dict}
    if asked in plain_kinds and is_known(value):
        return isinstance(value, plain_kinds[asked])
    if isinstance(value, Made) and is_known(value) and asked == value.callee.rpartition(".")[2]:
        return True
    return Unknown(text)


def _short(value: Any) -> str:
    said = {Unknown: "text", Dotted: "path", Made: "callee"}.get(type(value))
    text = repr(value) if said is None else str(getattr(value, said))
    return text if len(text) <= 60 else text[:57] + "..."
