"""Integer arithmetic, as in `$(( ... ))`, computed from its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping


def computed(text: str) -> int:
    """The value of an expression without variables. Raises ValueError or SyntaxError for anything that is not integer arithmetic."""
    return _value(ast.parse(_python(text).strip() or "0", mode="eval").body)


def _python(expression: str) -> str:
    """Shell arithmetic in Python's syntax."""
    text = expression.replace("&&", " and ").replace("||", " or ")
    return re.sub(r"!(?!=)", " not ", re.sub(r"(?<!/)/(?!/)", "//", text))


def _value(node: ast.expr) -> int:
    """The value of an integer expression. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand)
        return int(not inner) if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BoolOp):
        values = [bool(_value(one)) for one in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_COMPARE[type(node.ops[0])](_value(node.left), _value(node.comparators[0])))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(left) > 1 << 16 or not 0 <= right <= 64):
            raise ValueError("too large")
        return _BINARY[type(node.op)](left, right)
    raise ValueError("not arithmetic of whole numbers")


_BINARY: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: int(a / b) if abs(a) < 1 << 50 else a // b,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Pow: lambda a, b: a**b,
}
_COMPARE: Mapping[type, Callable[[int, int], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
