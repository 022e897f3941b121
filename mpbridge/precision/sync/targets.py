"""How a target is read: a mapping of inputs, a live config, or an object that carries one as `.transformer` or `.config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, dtype
from mpbridge.precision.megatron_spec.precision_field import UNSET, ModuleRules, PrecisionField

CARRIED_AS = ("transformer", "config")
"""Attributes under which an outer object (a model provider, a training script's namespace) carries the config that megatron-core reads."""


def is_inputs(target: Any) -> bool:
    """Whether the target is a mapping of inputs, which has exactly what its author wrote."""
    return isinstance(target, Mapping)


def holder(target: Any, field: str) -> Any:
    """The object that declares `field`: the target itself, or what it carries; None when neither does."""
    for owner in (target, *(getattr(target, name, None) for name in CARRIED_AS)):
        if owner is not None and (
            field in getattr(type(owner), "__dataclass_fields__", {}) or field in getattr(owner, "__dict__", {})
        ):
            return owner
    return None


def has(target: Any, field: str) -> bool:
    """Whether the field can be written; inputs accept every field."""
    return is_inputs(target) or holder(target, field) is not None


def read(target: Any, field: str) -> Any:
    """The field's current value; UNSET if inputs do not name it, or it is not declared."""
    if is_inputs(target):
        return target.get(field, UNSET)
    owner = holder(target, field)
    return UNSET if owner is None else getattr(owner, field)


def class_default(target: Any, field: str) -> Any:
    """The field's default in a live object's class; None for an undeclared attribute."""
    declared = getattr(type(holder(target, field)), "__dataclass_fields__", {}).get(field)
    if declared is None:
        return None  # in a namespace without declarations None must mean "not set"
    if declared.default_factory is not dataclasses.MISSING:
        return declared.default_factory()
    return None if declared.default is dataclasses.MISSING else declared.default


def same(now: Any, new: Any) -> bool:
    """Whether a found and a planned value mean the same: any spelling of a dtype matches; True is not 1."""
    if isinstance(new, ModuleRules) or isinstance(now, ModuleRules):
        return bool(_rules(now) == _rules(new))
    left, right = _comparable(now), _comparable(new)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _rules(value: Any) -> Any:
    # megatron.quant_recipe leaves the rules that it compiled on megatron-core's object
    return getattr(value, "rules", value)


def _comparable(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)  # JSON, and therefore the schema, has only lists
    # a torch.dtype prints as 'torch.bfloat16', so it is recognized without torch
    if isinstance(value, DType) or str(type(value)) == "<class 'torch.dtype'>":
        try:
            return dtype(value)
        except BadValue:
            return value
    return value


def normal(row: PrecisionField, value: Any) -> Any:
    """An input's value as the plan compares it: strings in dtype fields become DType. Raises BadValue."""
    if not isinstance(value, str) or not row.holds_dtype:
        return value
    try:
        return dtype(value)
    except BadValue as fault:
        raise BadValue(f"{row.target}.{row.field}: {fault}") from None
