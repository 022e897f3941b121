"""What the fields of a MixedPrecisionConfig may hold, one by one: types, choices, legal dtypes."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from mpbridge.errors import BadValue
from mpbridge.formats import DType, dtype, say
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.scalings import choices, formats

_CHOICES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "fp8": formats(8),
        "fp8_recipe": choices(8),
        "fp8_amax_compute_algo": ("most_recent", "max"),
        "fp4": formats(4),
        "fp4_recipe": choices(4),
    }
)
_LEGAL_STATES: Mapping[str, tuple[DType, ...]] = types.MappingProxyType(
    {
        # Transformer Engine's FusedAdam, fused_adam.py: masters fp32 or fp16, moments fp32, fp16, bf16 or scaled fp8; bf16 main params: the parameters themselves
        "main_params_dtype": (DType.FP32, DType.FP16, DType.BF16),
        "main_grads_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "grad_accumulation_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "exp_avg_dtype": (DType.FP32, DType.FP16, DType.BF16, DType.UINT8),
        "exp_avg_sq_dtype": (DType.FP32, DType.FP16, DType.BF16, DType.UINT8),
        "params_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "compute_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "output_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "pipeline_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "autocast_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "logit_dtype": (DType.FP32, DType.BF16, DType.FP16),
    }
)


def type_faults(values: Mapping[str, Any]) -> dict[str, str]:
    """field -> what is wrong with its type."""
    fields = MixedPrecisionConfig.__dataclass_fields__
    return {
        name: fault for name, field in fields.items() if (fault := _type_fault(name, values[name], str(field.type)))
    }


def _type_fault(name: str, value: Any, hint: str) -> str | None:
    if hint == "DTypeField":
        legal = _LEGAL_STATES[name]
        if value is None or value in legal:
            return None
        return f"{name}={value.short} is not one of {', '.join(d.short for d in legal)}"
    if name == "moe_router_dtype":
        return _router_fault(value)
    if value is None and hint.endswith("None"):
        return None
    expected = hint.removesuffix(" | None")
    fits = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        "str": isinstance(value, str),
        "tuple[str, ...]": isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value),
        "Mapping[str, Any]": isinstance(value, Mapping) and all(isinstance(pattern, str) for pattern in value),
    }[expected]
    words = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a finite number",
        "str": "text",
        "tuple[str, ...]": "a list of globs",
        "Mapping[str, Any]": "a mapping from glob (text) to rule",
    }
    kind = f" (a {yaml_kind(value)})" if yaml_kind(value) else ""
    return None if fits else f"{name}={value!r}{kind}: expected {words[expected]}"


def yaml_kind(value: Any) -> str:
    """The YAML type of a plain value, '' where naming it says nothing."""
    names = {bool: "truth value", int: "whole number", float: "number", dict: "mapping", list: "list"}
    return names.get(type(value), "")


def choice_faults(v: Mapping[str, Any]) -> list[str]:
    """Of those fields that are in `v`."""
    faults = []
    for name, legal in _CHOICES.items():
        if name not in v:
            continue
        optional = str(MixedPrecisionConfig.__dataclass_fields__[name].type).endswith("None")
        if v[name] not in legal and not (optional and v[name] is None):
            faults.append(f"{name}={v[name]!r} is not one of {', '.join(legal)}" + (" or null" if optional else ""))
    return faults


def _router_fault(value: Any) -> str | None:
    # megatron-core compares with the strings 'fp32' and 'fp64' (router.py): a torch dtype or 'bf16' there would do nothing, silently
    try:
        if value is None or dtype(value) in (DType.FP32, DType.FP64):
            return None
    except BadValue:
        pass
    return (
        f"moe_router_dtype={say(value)!r} is not one of fp32, fp64 or null (the router then follows the compute dtype)"
    )
