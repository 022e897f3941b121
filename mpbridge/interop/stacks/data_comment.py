"""The comment with its meaning above the Python that `export` writes, from which `import` reads it back. The Python itself is neither run nor interpreted."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from typing import Any

from mpbridge.common.errors import BadValue, DataError, MpbridgeError, cut
from mpbridge.common.formats import dtype
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported, engine_with, updated_by
from mpbridge.interop.stacks.meaning import Meaning, rows, with_quant
from mpbridge.interop.stacks.reading import Reader
from mpbridge.interop.stacks.sharded_torch import fields_of
from mpbridge.precision.policy import LossScale
from mpbridge.precision.regions import Quant

_COMMENT = re.compile(r"[ \t]*# mpbridge export --to (\S+): (\{.*\})[ \t]*")
_DTYPES = tuple(one.name for one in dataclasses.fields(Meaning) if str(one.type).startswith("DType"))
_AS_THEY_ARE = ("remainders", "sharded", "note")
_DEFAULTS = {one.name: one.default for one in dataclasses.fields(Meaning)}
_OPTIMIZER = re.compile(r"\b(AdamW|FusedAdam|adamw_torch|SGD|sgd)\b(?:.*\bmomentum=([\d.]+))?")
"""The optimizers that exports write, and the momentum of those that have it."""


def commented(stack: str, meaning: Meaning, code: str) -> str:
    """`code` below the comment that holds what it means, and by which a later change of it is noticed."""
    said = {name: getattr(meaning, name) for name in (*_DTYPES, *_AS_THEY_ARE)}
    data = {name: value.short if name in _DTYPES else value for name, value in said.items() if value != _DEFAULTS[name]}
    if meaning.loss_scale is not None:
        data["loss_scale"] = _set(meaning.loss_scale)
    *edges, last = meaning.regions
    if last.quant is not None:
        data["quant"] = _set(last.quant)
    if edges:
        data["ends"] = [edges[0].first, edges[0].last]
    data["code"] = [len(code.splitlines()), _sum(code.splitlines())]
    return f"# mpbridge export --to {stack}: {json.dumps(data)}\n{code}"


def _set(value: LossScale | Quant) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    return {
        one.name: getattr(value, one.name)
        for one in dataclasses.fields(value)
        if getattr(value, one.name) != one.default
    }


def _sum(lines: list[str]) -> int:
    return zlib.crc32("\n".join(line.strip() for line in lines).encode())


def has_comment(text: str) -> bool:
    """Whether some Python was written by `export`."""
    return any(map(_COMMENT.fullmatch, text.splitlines()))


def read(text: str, *, name: str, stack: str | None) -> Imported:
    """What the comment in a Python file says; undecided where the code below it is not what `export` wrote. Raises DataError.

    stack: None: the comment's own.
    """
    lines = text.splitlines()
    found = [(at, one) for at, line in enumerate(lines, 1) if (one := _COMMENT.fullmatch(line))]
    at, comment = next(((at, one) for at, one in found if stack in (None, one[1])), (0, None))
    if comment is None:
        raise DataError(f"{name}: what `mpbridge export` wrote in it is for {found[0][1][1]}, not for {stack}")
    try:
        data = json.loads(comment[2])
        many, expected = data.pop("code")
        code = lines[at : at + many]
        meaning, known = _meaning(data), Reader({})
        known.cannot(f"{meaning.note}: no setting of a recipe", meaning.note)
        fields = fields_of(meaning, known)
        rows(meaning)  # raises for values that are of no use
    except (MpbridgeError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DataError(
            f"{name}: the comment `mpbridge export --to {comment[1]}` in line {at} cannot be read: {cut(error)}"
        ) from None
    undecided = (
        []
        if _sum(code) == expected
        else [
            f"the {many} lines below line {at} were changed since `mpbridge export` wrote them, and are not read: export again"
        ]
    )
    undecided += [f"line {one}: another export, which is not shown" for one, _ in found if one != at]
    made = Imported(
        stack=comment[1], version="", fields=fields, meaning=meaning, cannot_express=tuple(known.notes["cannot_express"]), undecided=tuple(undecided),
        engine=engine_with("optimizer") if meaning.sharded == "everything" else DEFAULT,
    )  # fmt: skip
    optimizer = _OPTIMIZER.search("\n".join(code))
    return updated_by(made, optimizer and optimizer[1], "optimizer", momentum=optimizer and float(optimizer[2] or 0))


def _meaning(data: dict[str, Any]) -> Meaning:
    quant, scale, ends = (data.pop(name, None) for name in ("quant", "loss_scale", "ends"))
    if strange := data.keys() - {*_DTYPES, *_AS_THEY_ARE}:
        raise BadValue(f"unknown: {', '.join(sorted(strange))}")
    said: dict[str, Any] = {name: dtype(value) if name in _DTYPES else value for name, value in data.items()}
    made = None if quant is None else Quant(**{name: _tuples(value) for name, value in quant.items()})
    numbers: dict[str, Any] = {
        name: (int if name == "hysteresis" else float)(value) for name, value in (scale or {}).items()
    }
    meaning = Meaning(**said, loss_scale=LossScale(**numbers) if scale else None)
    return with_quant(meaning, made, (int(ends[0]), int(ends[1])) if ends else None)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
