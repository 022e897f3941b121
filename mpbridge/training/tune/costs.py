"""Budgets (time=1.1, memory=40GB, gradient-error=0.3), and what each level of each unit costs: predicted seconds of its GEMMs and casts, or bytes on the fullest rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.common.tables.units import size
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.linears import Basis, layer_seconds, linear_seconds
from mpbridge.planning.memory.by_role import memory
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region
from mpbridge.training.tune.decision_units import DecisionUnit

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


Costs = list[dict[str, float]]
"""For each unit: level -> cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """How seconds are estimated."""

    machine: Machine
    constants: Constants | None = None
    """From a --machine-file, measured on that machine; None: the shipped ones."""
    basis: Basis = "predicted"

    def words(self) -> str:
        """The description in the table and the recipe."""
        if self.basis == "peaks":
            return f"GEMMs at the peak of {self.machine.name}, without casts: a bound that no kernel reaches"
        kind = "measured rates of" if self.constants is not None else "predicted for"
        return f"GEMMs and quantization, {kind} {self.machine.name}"


def seconds(
    units: Sequence[DecisionUnit],
    levels: Mapping[str, Quant | None],
    policy: PrecisionPolicy,
    pricing: Pricing,
    run: RunFacts | None,
    shapes: Mapping[str, tuple[int, int, int]],
) -> Costs:
    """Seconds per micro-batch on one rank. run: priced by its list of operations; None: by the observed shapes (tokens, out, in).

    Raises BadValue for a machine without a rate for one of the levels.
    """
    using = pricing.constants or constants()
    if run is None:
        return [
            {
                name: sum(
                    linear_seconds(*shapes[slot], quant, policy.compute, pricing.machine, using, pricing.basis)
                    for slot in unit.slots
                    if slot in shapes
                )
                for name, quant in levels.items()
            }
            for unit in units
        ]
    known: dict[tuple[int, str], Mapping[str, float]] = {}
    found: Costs = []
    for unit in units:
        cost = dict.fromkeys(levels, 0.0)
        for layer, glob in unit.places:
            for name, quant in levels.items():
                key = (layer, name)
                if key not in known:
                    known[key] = layer_seconds(policy, run, layer, quant, pricing.machine, using, pricing.basis)
                cost[name] += sum(value for where, value in known[key].items() if _is(where, glob))
        found.append(cost)
    return found


def _is(where: str, glob: str) -> bool:
    return where == glob or (glob.endswith(".*") and where.startswith(glob[:-1]))


def bytes_of(
    units: Sequence[DecisionUnit], levels: Mapping[str, Quant | None], policy: PrecisionPolicy, run: RunFacts
) -> tuple[Costs, float]:
    """(bytes that each level adds for each unit, bytes of the fullest rank with every unit at the first level).

    Computed for one unit of each kind and layer kind, changed alone, since bytes add up over linears. The sum is used for the fullest rank, so with several
    pipeline stages it is too large, never too small.
    """
    base = dataclasses.replace(policy, regions=(Region(quant=next(iter(levels.values()))),))
    whole = float(memory(base, run).needed)
    known: dict[tuple[str, tuple[str, ...], str], float] = {}
    found: Costs = []
    for unit in units:
        cost = {}
        for name, quant in levels.items():
            key = (unit.kind, run.shape.parts(unit.layer), name)
            if key not in known:
                regions = tuple(
                    Region(modules=glob, layers=((layer, layer),), quant=quant) for layer, glob in unit.places
                )
                changed = dataclasses.replace(base, regions=(*regions, *base.regions))
                known[key] = float(memory(changed, run).needed) - whole
            cost[name] = known[key]
        found.append(cost)
    return found, whole
