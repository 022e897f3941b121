"""Evaluates Python expressions from text: constants, names, arithmetic, calls that create objects. Nothing is imported or run."""

from __future__ import annotations

import ast
import builtins
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import DataError
from mpbridge.interop.stacks.python_module import Files, Module
from mpbridge.interop.stacks.python_values import (
    Dotted,
    SourceFunction,
    SourceObject,
    Unknown,
    bounded,
    is_known,
    short,
)

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


class Expressions(ABC):
    """The values of expressions, and what could not be followed."""

    def __init__(self, opaque: frozenset[str] = frozenset()) -> None:
        self.opaque = opaque
        """Names of functions that are not followed, since their arguments are sufficient."""
        self.notes: list[str] = []
        self.files = Files(self)
        self.doubt: list[str] = []
        """The unknown conditions around the current statement."""
        self._steps = 0

    @abstractmethod
    def call(self, function: SourceFunction, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The value of a call of a function whose source is read."""

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
