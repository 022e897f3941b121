"""What is said and asked before anything is built: capability, rules, the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mpbridge.checks.capability import can_run, refuse_unless_native
from mpbridge.checks.machines import Machine
from mpbridge.checks.probe import installed, this_machine
from mpbridge.checks.rules import Violation, require
from mpbridge.errors import Refused
from mpbridge.report.tables import plan_table

if TYPE_CHECKING:
    from mpbridge.config.container import Run


def refuse_unfit(run: Run) -> tuple[Machine, tuple[Violation, ...]]:
    """This machine, and the warnings. Raises Refused first where machine or rules forbid the run; loads no framework."""
    facts = run.facts
    # not facts.machine: a run may have been resolved for another one
    machine, versions = this_machine(), installed()
    if facts.realization == "native":
        refuse_unless_native(run.policy, machine, versions)
    else:
        answer = can_run(run.policy, machine, versions, quantized_by="emulation")
        if not answer:
            raise Refused(f"{machine.label} cannot run this recipe, emulated or not: {answer.reason}.")
    # the rules that ask what is here get the answer of this process, not of the machine that the run may have been resolved for
    return machine, require(run.policy, dataclasses.replace(facts, machine=machine, versions=versions))


def preflight(run: Run, out: Console) -> tuple[Violation, ...]:
    """Prints what the recipe decides, and the warnings, which come back. Raises Refused, as `refuse_unfit` does."""
    facts = run.facts
    machine, warnings = refuse_unfit(run)
    how = "natively" if facts.realization == "native" else "emulated"
    out.print(f"recipe {run.recipe}, {how}, engine {facts.engine}, {facts.parallel.world_size} process(es) on {machine.name}")
    out.print(plan_table(run.plan))
    for setting in run.brought:
        out.print(f"the recipe brings along {setting}", markup=False)
    for warning in warnings:
        out.print(str(warning), style="yellow", markup=False)
    return warnings


def write_precision(run: Run, folder: Path | None) -> None:
    """Writes `folder`/precision.json: what was wanted, decided and overridden, for programs; nothing where folder is None."""
    if folder is None:
        return
    facts = run.facts
    data = {
        "recipe": run.recipe,
        "engine": facts.engine,
        **run.plan.as_data(),
        "parallel": dataclasses.asdict(facts.parallel),
        "versions": dataclasses.asdict(installed()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "precision.json").write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
