"""The target of a choice: the machine that prices it, the stack that must express it, and the levels between a recipe's format and high precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpbridge.common.facts import Versions
from mpbridge.common.machines import Machine, machine
from mpbridge.planning.estimate.constants import Constants
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.resolve import resolve
from mpbridge.training.tune.proposal import base_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The target of the choice."""

    machine: Machine | None = None
    """None: the first GPU of the table that runs the recipe."""
    versions: Versions | None = None
    constants: Constants | None = None
    """From a --machine-file."""
    stack: str | None = None
    """The stack that the recipe will be exported to: only what it can express is proposed."""


def default_levels(config: MixedPrecisionConfig) -> tuple[str, ...]:
    """For four-bit recipes the nearest substitute in the table of scalings; for eight-bit ones none."""
    quant = resolve(base_of(config)).quant
    return quant.row.substitutes[:1] if quant is not None and quant.bits < 8 else ()


def natural(quants: Sequence[Any]) -> Machine:
    """The machine that prices the choice if none was given."""
    lowest = max((quant.row.hardware.low for quant in quants), default=(0, 0))
    return machine("b200" if lowest >= (10, 0) else "h100")
