"""Budgets: `time=1.1`, `memory=40GB`, `gradient-error=0.3`, or the cost of the last 15 % of the layers in high precision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.tables.units import size

What = Literal["time", "memory", "gradient-error", "tail"]
_LEGAL = "expected time=1.1 (GEMM and quantization time over the all-low recipe's), memory=40GB (bytes on the fullest rank) or gradient-error=0.3"
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limit on the cost of the choice."""

    what: What = "tail"
    value: float = 0.0
    """A ratio, bytes, or an error; 'tail' has none."""

    def __str__(self) -> str:
        if self.what == "tail":
            return "the cost of the last 15 % of the layers in high precision"
        return f"{self.what}={self.value:.4g}" if self.what != "memory" else f"memory={size(self.value)}"


def budget_of(text: str | None) -> Budget:
    """The budget given as --budget. Raises BadValue."""
    if text is not None and not isinstance(text, str):
        raise BadValue(f"budget={text!r}: a {type(text).__name__} does not say what it limits; {_LEGAL}, as a string")
    if not text:
        return Budget()
    name, found, said = text.partition("=")
    name = name.strip().lower().replace("_", "-")
    if not found or name not in ("time", "memory", "gradient-error"):
        raise BadValue(f"--budget {text!r}: {_LEGAL}")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?\d+)?)\s*([a-zA-Z]*)\s*", said)
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or (match.group(2) and name != "memory"):
        raise BadValue(f"--budget {text!r}: {said.strip() or 'nothing'} is not such a value; {_LEGAL}")
    value = float(match.group(1)) * factor
    if value <= 0:
        raise BadValue(f"--budget {text!r}: must be above 0; {_LEGAL}")
    return Budget(what=name, value=value)  # type: ignore[arg-type]
