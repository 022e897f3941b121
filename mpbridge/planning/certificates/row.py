"""One figure of a certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["operand", "gemm", "second pass", "optimizer", "attention"]
Derivation = Literal["exact", "closed form", "bound", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure, the bound that holds for it, and how it was obtained."""

    part: Part
    where: str
    """What it is about: 'wgrad dy column', 'dgrad', 'weights'."""
    quantity: str
    value: float
    tensor: str = ""
    """Kind of data: 'normal', 'trained:NAME'; empty if it depends on none."""
    ci95: float | None = None
    """Half the width of the 95 % interval over independent tensors (Student's t)."""
    bound: float | None = None
    derivation: Derivation = "measured"
    """exact: a sum over all outcomes of the rounding on the given tensors; closed form: a formula under a stated assumption."""
    condition: str = ""
    """When it applies, or the formula."""

    def as_data(self) -> dict[str, Any]:
        """The row as JSON types, without fields that are not set."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if value not in (None, "")}
