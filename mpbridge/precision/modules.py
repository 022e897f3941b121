"""Translates `modules` to regions: globs, layers, one rule for a linear or one for each of its GEMMs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError
from mpbridge.common.formats import DType, dtype
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.field_values import choice_faults, type_faults
from mpbridge.precision.quants import quant_faults, quant_of, row_of
from mpbridge.precision.regions import GEMMS, Gemms, Quant, Region, Spans
from mpbridge.precision.scalings import SCALINGS, bits_of

_QUANT_KEYS = (
    "fp8", "fp8_recipe", "fp8_param", "fp8_param_gather", "fp8_quantizer_factory", "fp8_options",
    "fp4", "fp4_recipe", "fp4_param", "fp4_param_gather", "fp4_quantizer_factory", "fp4_options",
)  # fmt: skip
"""Fields of a quantization by which linears can differ: not delayed scaling's, which holds for a whole block, and attention is no linear."""
_RANGE = re.compile(r"(-?\d+)(?:\s*(?:-|to)\s*(-?\d+))?")
_END = re.compile(r"(first|last)\s+(\d+)")


def module_regions(v: Mapping[str, Any], base: DType, faults: list[str]) -> tuple[Region, ...]:
    """The regions of a config's `modules`, in order; errors are added to `faults`."""
    regions = []
    for pattern, said in (v["modules"] or {}).items():
        rules = said if isinstance(said, (list, tuple)) else [said]
        if not rules:
            faults.append(f"modules[{pattern!r}]=[]: expected a rule, or a list of them")
        for number, rule in enumerate(rules):
            where = f"modules[{pattern!r}]" + (f"[{number}]" if len(rules) > 1 else "")
            try:
                regions.append(_region(pattern, rule, base))
            except MpbridgeError as error:
                found = error.faults if isinstance(error, Contradiction) else (str(error),)
                faults += [f"{where}{'' if fault.startswith('=') else ': '}{fault}" for fault in found]
    return tuple(regions)


def layer_spans(said: Any) -> Spans:
    """(first, last) pairs for a value of `layers:`: 3, "2-29", "-1", "first 2", "last 2", "0-3, -2", or a list of them. Raises BadValue."""
    parts = [part for item in (said if isinstance(said, (list, tuple)) else [said]) for part in _parts(item)]
    if not parts:
        raise BadValue("layers is empty: name at least one layer, or drop it")
    return tuple(_span(part) for part in parts)


def layers_text(spans: Spans) -> str:
    """The value of `layers:` as text: '2-29, -1'."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" if b >= 0 else f"{a} to {b}" for a, b in spans)


def _parts(item: Any) -> Iterator[str]:
    if isinstance(item, bool) or not isinstance(item, (int, str)):
        raise BadValue(f"layers={item!r}: {_LEGAL}")
    yield from (part.strip() for part in str(item).split(",") if part.strip())


_LEGAL = "expected layer numbers from 0 (negative: from the end), ranges such as '2-29', 'first 2', 'last 2', or a list of them"


def _span(part: str) -> tuple[int, int]:
    end, found = _END.fullmatch(part), _RANGE.fullmatch(part)
    if end is not None and int(end.group(2)) > 0:
        count = int(end.group(2))
        return (0, count - 1) if end.group(1) == "first" else (-count, -1)
    if found is None:
        raise BadValue(f"layers={part!r}: {_LEGAL}")
    low, high = int(found.group(1)), int(found.group(2) or found.group(1))
    if low > high and (low < 0) == (high < 0):
        raise BadValue(f"layers={part!r}: {low} is after {high}")
    return low, high


def _region(pattern: str, rule: Any, base: DType) -> Region:
    if not isinstance(rule, Mapping):
        return Region(modules=pattern, quant=rule_of_word(rule, base))
    named = [name for name in GEMMS if name in rule]
    _refuse_other(rule, "per module", *GEMMS, "layers", "precision")
    fields = {name: value for name, value in rule.items() if name in _QUANT_KEYS}
    said = ("precision" if "precision" in rule else "", ", ".join(named), "fp8 or fp4 fields" if fields else "")
    ways = [word for word in said if word]
    if len(ways) > 1:
        raise BadValue(f"{' and '.join(ways)} conflict: keep one of them")
    layers = layer_spans(rule["layers"]) if "layers" in rule else None
    if "precision" in rule:
        return Region(modules=pattern, layers=layers, quant=rule_of_word(rule["precision"], base))
    if not named:
        return Region(modules=pattern, layers=layers, quant=_by_fields(fields))
    if len(named) < len(GEMMS):
        missing = ", ".join(name for name in GEMMS if name not in named)
        raise BadValue(f"names {', '.join(named)} but not {missing}: a rule by GEMM must name all three")
    gemms = Gemms(**{name: _of_gemm(name, rule[name], base) for name in GEMMS})
    first = next(iter(gemms.distinct), None)
    return Region(modules=pattern, layers=layers, quant=first, gemms=None if gemms.one else gemms)


def _refuse_other(rule: Mapping[Any, Any], where: str, *beside: str) -> None:
    possible = (*beside, *_QUANT_KEYS)
    unknown = [str(name) for name in rule if name not in possible]
    if unknown:
        raise BadValue(f"{', '.join(unknown)} cannot be set {where} (possible: {', '.join(possible)})")


def _of_gemm(name: str, rule: Any, base: DType) -> Quant | None:
    if isinstance(rule, Mapping):
        _refuse_other(rule, f"for {name} alone")
    quant = _by_fields(rule) if isinstance(rule, Mapping) else rule_of_word(rule, base)
    if quant is not None and quant.stored:
        raise BadValue(f"{name}: stored weights belong to the whole linear, not to one of its GEMMs")
    return quant


def rule_of_word(word: Any, base: DType) -> Quant | None:
    """The rule for a word in `modules`: None for the compute dtype's name, the default rule for a scaling's name. Raises BadValue."""
    row = SCALINGS.get(word) if isinstance(word, str) else None
    if row is not None and not row.factory:
        low = f"fp{bits_of(row.formats[0])}"
        return _by_fields({low: row.formats[0], f"{low}_recipe": row.name})
    try:
        given = dtype(word)
    except BadValue:
        scalings = ", ".join(row.name for row in SCALINGS.values() if not row.factory and not row.history)
        raise BadValue(
            f"={word!r}: expected {base.short!r}, a scaling ({scalings}), or a mapping such as {{fp8: hybrid, fp8_recipe: tensorwise}}"
        ) from None
    if given is not base:
        raise BadValue(f"={word!r}: a module that is not quantized stays in {base.short}")
    return None


def _by_fields(rule: Mapping[str, Any]) -> Quant | None:
    one = MixedPrecisionConfig(bf16=True, **rule)
    values = one.stored()
    faults = list(type_faults(values).values()) or choice_faults(values) + quant_faults(values)
    if not faults and not (one.fp8 or one.fp4):
        faults = ["names no format: set fp8 or fp4, or write 'bf16'"]
    row = row_of(values, "fp8" if one.fp8 else "fp4")
    if not faults and row is not None and row.history:
        # Transformer Engine updates delayed scales per autocast context and megatron-core opens one around the whole block
        faults = [f"{row.name} scaling cannot be chosen per module"]
    if faults:
        raise Contradiction(faults)
    return quant_of(values)
