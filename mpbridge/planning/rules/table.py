"""The table of all rules. broken() returns every rule that a policy and a run break, errors first; checking is read-only.

require_here() is the last check before anything is built, called by the training script and by each engine: does this run fit this machine and satisfy every rule?
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from mpbridge.common import probe
from mpbridge.common.errors import Refused
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.common.probe import installed, this_machine
from mpbridge.common.traits import attribute, engine_names, traits
from mpbridge.planning.capability import can_run, refuse_unless_native
from mpbridge.planning.rules import (
    configs,
    construction,
    engine,
    environment,
    hybrid,
    model,
    optimizer,
    quant,
    storage,
    trained,
)
from mpbridge.planning.rules.base import Case, Rule, Violation
from mpbridge.precision.megatron_spec.versions import missing
from mpbridge.precision.policy import PrecisionPolicy


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rows, in table order; ids are unique."""
    subjects = (quant, storage, optimizer, trained, model, configs, hybrid, construction, engine, environment)
    engines = ((name, path) for name in engine_names() if (path := traits(name).rules))
    return (
        *environment.REALIZATION,
        *(rule for subject in subjects for rule in subject.RULES),
        *(
            replace(rule, engine=name, about=f"{name} {rule.about}".strip())
            for name, path in engines
            for rule in attribute(path)
        ),
    )


def broken(policy: PrecisionPolicy, run: RunFacts, among: Collection[str] | None = None) -> tuple[Violation, ...]:
    """Every broken rule, errors before warnings, each group in table order. among: only of the rules with these ids."""
    case = Case(policy=policy.settled(dict(run.optimizer.settings)), run=run)
    asked = rules() if among is None else _among(frozenset(among))
    seen = [violation for rule in asked if (violation := _judge(rule, case)) is not None]
    return tuple(sorted(seen, key=lambda violation: violation.severity != "error"))


@functools.lru_cache(maxsize=64)  # a search asks for the same few of thousands of runs
def _among(ids: frozenset[str]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules() if rule.id in ids)


def require(policy: PrecisionPolicy, run: RunFacts) -> tuple[Violation, ...]:
    """The warnings. Raises Refused with every error, if there are any. For callers that are about to build."""
    found = broken(policy, run)
    errors = [str(violation).removeprefix("error ") for violation in found if violation.severity == "error"]
    if errors:
        head = f"{len(errors)} rules forbid this run:" if len(errors) > 1 else "1 rule forbids this run:"
        raise Refused("\n".join([head, *(f"  - {one}" for one in errors)]))
    return found


def _judge(rule: Rule, case: Case) -> Violation | None:
    emulated = rule.emulated if not case.native else "same"
    if emulated == "silent" or not rule.applies(case.run):
        return None
    found = rule.fault(case)
    if not found:
        return None
    made = rule.broken(found, rule.cure_here(case) if rule.cure_here is not None else "")
    return made if emulated == "same" else replace(made, severity="warning")


def require_here(policy: PrecisionPolicy, facts: RunFacts) -> tuple[Machine, tuple[Violation, ...]]:
    """This machine, and the warnings. Raises Refused if the machine cannot run the recipe, otherwise with every rule broken as an error. Loads no framework.

    `facts` may have been resolved for another machine; they are judged with this machine, its versions and its environment variables."""
    machine, versions = this_machine(), installed()
    lacking = missing(versions.megatron_core)
    if lacking:
        raise Refused(
            f"megatron-core {versions.megatron_core} cannot be imported without {', '.join(lacking)}: pip install {' '.join(lacking)}"
        )
    if facts.realization == "native":
        refuse_unless_native(policy, machine, versions)
    else:
        answer = can_run(policy, machine, versions, quantized_by="emulation")
        if not answer:
            raise Refused(f"{machine.label} cannot run this recipe, emulated or not: {answer.reason}.")
    return machine, require(policy, replace(facts, machine=machine, versions=versions, environment=probe.environment()))
