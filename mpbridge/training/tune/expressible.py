"""The target of a choice: its machine and stack, and the levels that they can run and express."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mpbridge.common.errors import MpbridgeError, Refused
from mpbridge.common.facts import RunFacts, Versions
from mpbridge.common.machines import Machine, machine
from mpbridge.interop.stacks.base import ORDER
from mpbridge.interop.stacks.exporters import export, stack_module
from mpbridge.planning.estimate.constants import Constants
from mpbridge.planning.hardware.capability import ASSUMED, quant_faults
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.regions import Quant
from mpbridge.precision.resolve import resolve
from mpbridge.training.tune.choices import base_of


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


PROBE = "self_attention.linear_proj"
"""A linear that every layer of megatron-core's GPT has: a level is checked with a rule for it in one layer."""

Levels = dict[str, Quant | None]


def runnable(
    levels: Mapping[str, Quant | None],
    config: MixedPrecisionConfig,
    *,
    machine: Machine | None,
    versions: Versions | None,
    asked: bool,
) -> tuple[Levels, list[str]]:
    """(the levels that run on `machine`, why others are not proposed); all levels if no machine was given.

    config: the recipe without edge layers. versions: None: the newest known ones. asked: the user named the levels, so one that does not run is
    refused. Raises Refused for that, and for a recipe that does not run there.
    """
    if machine is None:
        return dict(levels), []
    policy = resolve(config)
    own = [fault for quant in policy.quants for fault in quant_faults(quant, machine, versions or ASSUMED)]
    if own:
        raise Refused(
            f"the recipe does not run on {machine.label}: {'; '.join(own)} (tune for another machine, or use a recipe that mpbridge recommend names for this one)"
        )
    faults = {
        word: quant_faults(quant, machine, versions or ASSUMED) for word, quant in levels.items() if quant is not None
    }
    lost = {word: f"does not run on {machine.label}: {'; '.join(why)}" for word, why in faults.items() if why}
    return _kept(levels, lost, asked)


def expressible(
    levels: Mapping[str, Quant | None],
    config: MixedPrecisionConfig,
    *,
    run: RunFacts | None,
    stack: str | None,
    asked: bool,
) -> tuple[Levels, list[str]]:
    """(the levels that the target can express, why others are not proposed).

    config: the recipe without edge layers. run: the run on the target machine; None: no machine was given. stack: the stack to export to; None:
    none. asked: the user named the levels, so one that cannot be expressed is refused. Raises Refused for that, and if not even high precision can be set
    for a single linear, and UnknownName for a stack.
    """
    if stack is not None:
        stack_module(stack)
    reasons = {word: _why_not(word, config, run, stack) for word in levels}
    high = tuple(levels)[-1]
    if reasons[high]:
        raise Refused(
            f"linears cannot be set individually there, so there is nothing to choose: {reasons[high]} (tune for another target, or without one)"
        )
    return _kept(levels, {word: f"cannot be expressed: {why}" for word, why in reasons.items() if why}, asked)


def _kept(levels: Mapping[str, Quant | None], lost: Mapping[str, str], asked: bool) -> tuple[Levels, list[str]]:
    """(the levels that are not lost, a note on each that is). lost: level -> why. Raises Refused if they were asked for."""
    if asked and lost:
        raise Refused("; ".join(f"level {word} {why}" for word, why in lost.items()) + ": leave it out of --levels")
    notes = [f"level {word} is not proposed: it {why}" for word, why in lost.items()]
    return {word: quant for word, quant in levels.items() if word not in lost}, notes


def _why_not(word: str, config: MixedPrecisionConfig, run: RunFacts | None, stack: str | None) -> str | None:
    one = config.derive(modules={**(config.modules or {}), PROBE: [{"layers": "0", "precision": word}]})
    if run is not None:
        native = dataclasses.replace(run, realization="native")
        known = {fault.rule for fault in broken(resolve(config), native)}
        for fault in broken(resolve(one), native):
            if fault.severity == "error" and fault.rule not in known:
                return f"{fault.found} (rule {fault.rule}; cure: {fault.cure})"
    if stack is None:
        return None
    try:
        lines = export(one, stack).lines
    except MpbridgeError as error:
        return f"{stack}: {error}"
    lost = [line for line in lines if line.fact == "modules" and ORDER.index(line.fidelity) >= ORDER.index("different")]
    return f"{stack}: {lost[0].text}" if lost else None
