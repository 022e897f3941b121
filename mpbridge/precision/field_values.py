"""Valid values of each field of a MixedPrecisionConfig: types, choices, dtypes."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, dtype, say
from mpbridge.precision.config import ROWS, MixedPrecisionConfig
from mpbridge.precision.fields import USUAL


def _texts(value: Any) -> bool:
    return all(isinstance(item, str) for item in value)


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = types.MappingProxyType(
    {
        "bool": (lambda v: isinstance(v, bool), "true or false"),
        "int": (lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number"),
        "float": (
            lambda v: isinstance(v, float) or (type(v) is int and abs(v) <= sys.float_info.max),
            "a finite number",
        ),
        "str": (lambda v: isinstance(v, str), "text"),
        "tuple[str, ...]": (lambda v: isinstance(v, (tuple, list)) and _texts(v), "a list of globs"),
        "Mapping[str, Any]": (lambda v: isinstance(v, Mapping) and _texts(v), "a mapping from glob (text) to rule"),
    }
)
"""Annotation of a field -> (predicate of valid values, what is expected)."""


def type_faults(values: Mapping[str, Any]) -> dict[str, str]:
    """Field -> fault of its type."""
    hints = {name: str(field.type) for name, field in MixedPrecisionConfig.__dataclass_fields__.items()}
    return {name: fault for name, hint in hints.items() if (fault := _type_fault(name, values[name], hint))}


def _type_fault(name: str, value: Any, hint: str) -> str | None:
    if hint == "DTypeField":
        legal = ROWS[name].legal or USUAL
        if value is None or value in legal:
            return None
        return f"{name}={value.short} is not one of {', '.join(d.short for d in legal)}"
    if name == "moe_router_dtype":
        return _router_fault(value)
    if value is None and hint.endswith("None"):
        return None
    fits, expected = _TYPES[hint.removesuffix(" | None")]
    if expected == "text" and ROWS[name].legal:
        expected = f"one of {', '.join(map(str, ROWS[name].legal))}" + (" or null" if hint.endswith("None") else "")
    kind = f" (a {yaml_kind(value)})" if yaml_kind(value) else ""
    return None if fits(value) else f"{name}={value!r}{kind}: expected {expected}"


def yaml_kind(value: Any) -> str:
    """The YAML type of a plain value; '' if naming it does not help."""
    names = {bool: "truth value", int: "whole number", float: "number", dict: "mapping", list: "list"}
    return names.get(type(value), "")


def choice_faults(v: Mapping[str, Any]) -> list[str]:
    """Faults of the fields present in `v`."""
    faults = []
    for name, row in ROWS.items():
        legal = row.legal
        if name not in v or not legal or isinstance(legal[0], DType):
            continue
        optional = str(MixedPrecisionConfig.__dataclass_fields__[name].type).endswith("None")
        if v[name] not in legal and not (optional and v[name] is None):
            faults.append(f"{name}={v[name]!r} is not one of {', '.join(legal)}" + (" or null" if optional else ""))
    return faults


def _router_fault(value: Any) -> str | None:
    # megatron-core compares with the strings 'fp32' and 'fp64' (router.py): a torch dtype or 'bf16' would silently have no effect
    with contextlib.suppress(BadValue):
        if value is None or dtype(value) in (DType.FP32, DType.FP64):
            return None
    legal = "fp32, fp64 or null (the router then follows the compute dtype)"
    return f"moe_router_dtype={say(value)!r} is not one of {legal}"
