"""Translates the quantization fields of a config, or of a module rule, to a Quant, and finds contradictions among them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.formats import say
from mpbridge.precision.regions import Attention, Quant
from mpbridge.precision.scalings import DEFAULTS, SCALINGS, Scaling, formats

BITS: Mapping[str, int] = types.MappingProxyType({"fp8": 8, "fp4": 4})


def row_of(v: Mapping[str, Any], low: str) -> Scaling | None:
    """The scaling that fp8_recipe or fp4_recipe names, or the default; None for an unknown name, which is a separate fault."""
    return SCALINGS.get(v.get(f"{low}_recipe") or DEFAULTS[BITS[low]])


def quant_faults(v: Mapping[str, Any]) -> list[str]:
    """All contradictions among the quantization fields."""
    faults: list[str] = []
    if v["fp8"] and v["fp4"]:
        faults.append("fp8 and fp4 are both on: set one of them to null")
    for low in ("fp8", "fp4"):
        faults += _width_faults(v, low, row_of(v, low))
    if v["fp8_amax_history_len"] < 1:
        faults.append(f"fp8_amax_history_len={v['fp8_amax_history_len']}: expected at least 1")
    row = row_of(v, "fp8")
    shared = bool(v["fp8"] and v["fp8_param"]) and row is not None and row.stored.through_grads
    if v["reuse_grad_buf_for_mxfp8_param_ag"] and not shared:
        faults.append(
            "reuse_grad_buf_for_mxfp8_param_ag needs fp8 with fp8_recipe='mxfp8' and fp8_param_gather=true: set it to false"
        )
    return faults + _attention_faults(v) + _option_faults(v)


def _width_faults(v: Mapping[str, Any], low: str, row: Scaling | None) -> list[str]:
    """Contradictions among the fields of fp8, or of fp4."""
    custom, factory = row is not None and row.factory, v[f"{low}_quantizer_factory"]
    faults = []
    if v[f"{low}_param"] and not v[low]:
        faults.append(f"{low}_param=true without {low}: set {low} to a format, or {low}_param=false")
    if v[low] and custom and not factory:
        faults.append(f"{low}_recipe='custom' needs {low}_quantizer_factory (an import path)")
    if factory and not (v[low] and custom):
        faults.append(f"{low}_quantizer_factory needs {low} on and {low}_recipe='custom'")
    if row is not None and v[low] in formats(BITS[low]) and v[low] not in row.formats:
        faults.append(f"{low}={v[low]!r} with {low}_recipe={row.name!r}: that scaling accepts {', '.join(row.formats)}")
    return faults


def _attention_faults(v: Mapping[str, Any]) -> list[str]:
    faults = []
    attention = [name for name in ("fp8_dot_product_attention", "fp8_multi_head_attention") if v[name]]
    if attention and not v["fp8"]:
        faults.append(
            f"{' and '.join(attention)} without fp8: attention would stay in 16 bits; set fp8 to a format or drop the attention settings"
        )
    if v["fp8_multi_head_attention"] and not v["fp8_dot_product_attention"]:
        faults.append("fp8_multi_head_attention needs fp8_dot_product_attention=true")
    return faults


def _option_faults(v: Mapping[str, Any]) -> list[str]:
    faults = []
    for low in BITS:
        given, row = v[f"{low}_options"], row_of(v, low)
        if given and not v[low]:
            faults.append(f"{low}_options without {low}: set {low} to a format, or drop them")
        if not v[low] or row is None:
            continue
        for name, value in (given or {}).items():
            try:
                option = row.option(name)
            except MpbridgeError as error:
                faults.append(f"{low}_options: {error}")
                continue
            # true is not 1 here: an option's values are compared including their types
            if not any(value == choice and type(value) is type(choice) for choice in option.choices):
                legal = ", ".join(say(choice) for choice in option.choices)
                faults.append(f"{low}_options.{name}={say(value)}: expected one of {legal} ({option.meaning})")
    return faults


def quant_of(v: Mapping[str, Any]) -> Quant | None:
    """The Quant of a set of fields (a config's, or a module rule's); absent fields have their defaults."""

    def get(name: str, default: Any) -> Any:
        return default if v.get(name) is None else v[name]

    low = next((low for low in ("fp4", "fp8") if v.get(low)), None)
    if low is None:
        return None
    parts: tuple[Attention, ...] = ("multi_head", "dot_product")
    of_fp8: dict[str, Any] = {
        "margin": get("fp8_margin", 0),
        "amax_history": get("fp8_amax_history_len", 1),
        "amax_algo": get("fp8_amax_compute_algo", "most_recent"),
        "wgrad": get("fp8_wgrad", True),
        "attention": next((part for part in parts if v.get(f"fp8_{part}_attention")), "none"),
    }
    return Quant(
        format=v[low],
        scaling=get(f"{low}_recipe", DEFAULTS[BITS[low]]),
        stored=bool(get(f"{low}_param", False)),
        factory=v.get(f"{low}_quantizer_factory"),
        options=tuple(sorted(get(f"{low}_options", {}).items())),
        **(of_fp8 if low == "fp8" else {}),
    )
