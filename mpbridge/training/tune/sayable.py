"""Levels that the target can run and express: per module in a machine's Transformer Engine, and in another stack's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpbridge.common.errors import MpbridgeError, Refused
from mpbridge.common.facts import RunFacts, Versions
from mpbridge.common.machines import Machine
from mpbridge.interop.stacks.base import ORDER
from mpbridge.interop.stacks.exporters import export, stack_module
from mpbridge.planning.hardware.capability import ASSUMED, quant_faults
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.regions import Quant
from mpbridge.precision.resolve import resolve

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
    lost = {
        word: "; ".join(faults)
        for word, quant in levels.items()
        if quant is not None and (faults := quant_faults(quant, machine, versions or ASSUMED))
    }
    if asked and lost:
        raise Refused(
            "; ".join(f"level {word} does not run on {machine.label}: {why}" for word, why in lost.items())
            + ": leave it out of --levels"
        )
    return {word: quant for word, quant in levels.items() if word not in lost}, [
        f"level {word} is not proposed: it does not run on {machine.label}: {why}" for word, why in lost.items()
    ]


def sayable(
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
    lost = {word: why for word, why in reasons.items() if why}
    if asked and lost:
        raise Refused("; ".join(f"level {word}: {why}" for word, why in lost.items()) + ": leave it out of --levels")
    return {word: quant for word, quant in levels.items() if word not in lost}, [
        f"level {word} is not proposed: {why}" for word, why in lost.items()
    ]


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
