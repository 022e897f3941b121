"""The last check before anything is built: does this run fit this machine and satisfy every rule? Called by the training script and by each engine."""

from __future__ import annotations

import dataclasses

from mpbridge.common.errors import Refused
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.common.probe import environment, installed, this_machine
from mpbridge.planning.capability import can_run, refuse_unless_native
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import require
from mpbridge.precision.megatron_spec.versions import missing
from mpbridge.precision.policy import PrecisionPolicy


def require_here(policy: PrecisionPolicy, facts: RunFacts) -> tuple[Machine, tuple[Violation, ...]]:
    """This machine, and the warnings. Raises Refused if the machine cannot run the recipe, otherwise with every rule broken as an error. Loads no framework.

    `facts` may have been resolved for another machine; they are judged with this machine, its versions and its environment variables.
    """
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
    return machine, require(
        policy, dataclasses.replace(facts, machine=machine, versions=versions, environment=environment())
    )
