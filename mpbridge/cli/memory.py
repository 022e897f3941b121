"""`mpbridge memory`: bytes per GPU by role, compared with bf16_mixed, and whether they fit."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from mpbridge.cli._schedule import names_of, print_schedule, schedule_data, title
from mpbridge.cli._target import TARGET, TargetMachine, asked, left_batches, reference, sizes_of
from mpbridge.cli.layouts import says_optimizer
from mpbridge.cli.options import JSON, RUN, arg, whole
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.facts import RunFacts
from mpbridge.common.tables import ByteUnit, count, unit_for
from mpbridge.planning.estimate.candidates import line
from mpbridge.planning.estimate.layouts import nearest
from mpbridge.planning.memory.activations import basis
from mpbridge.planning.memory.by_role import (
    REFERENCE,
    STATES,
    Fit,
    Memory,
    duplicate_main,
    fullest,
    memory,
    reasons,
    total_parameters,
)
from mpbridge.planning.memory.overheads import left_out_of_memory
from mpbridge.planning.outlook import Outlook
from mpbridge.settings.container import Run

SUMMARY = "show bytes on each GPU by role, compared with bf16_mixed, and whether they fit"
ARGUMENTS = (
    *RUN,
    *TARGET,
    arg("--rank N", "show this rank (default: that of the fullest pipeline stage)", whole),
    arg("--stages", "show every pipeline stage"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the table. Returns 1 if the run is not valid, or if a GPU is known and it does not fit."""
    where, made = asked(args)
    outlook = where.outlook(made)
    mine = outlook.memory  # refuses what no rank could hold, whichever is asked for
    stage = outlook.stages.index(outlook.fullest) if outlook.stages else 0
    made = made.by_stage()[stage]  # the table is of the one that decides whether it fits
    facts = outlook.fullest.facts
    mine = mine if args.rank is None else memory(made.policy, facts, rank=args.rank)
    plain = reference(made, where, stage=stage)
    other = memory(plain.policy, where.facts(plain.facts), rank=mine.rank)
    pipeline = facts.parallel.pipeline
    firsts = range(0, facts.parallel.world_size, facts.parallel.world_size // pipeline) if args.stages else ()
    stages = tuple(memory(made.policy, facts, rank=rank) for rank in firsts)
    data = as_data(made, facts, mine, other, outlook.fit, stages) | record(outlook, "verdict", "objections")
    data["schedule"] = schedule_data(made, outlook)
    answer(args, data, lambda: _print(made, where, outlook, mine, other, stages))
    return 0 if outlook.ok else 1


def as_data(
    made: Run, facts: RunFacts, mine: Memory, other: Memory, fits: Fit | None, stages: tuple[Memory, ...] = ()
) -> dict[str, Any]:
    """The estimate as JSON types, in bytes. other: the same rank's with the reference."""
    return {
        "recipe": names_of(made),
        "world_size": made.world_size,
        "parameters": total_parameters(facts),
        **_data(mine),
        "reference": {"recipe": REFERENCE} | _data(other),
        "difference": mine.total - other.total,
        "reasons": list(reasons(made.policy, facts, mine, other)),
        "fullest_rank": fullest(made.policy, facts, mine),
        "duplicate_main_weights": duplicate_main(facts, rank=mine.rank),
        "fit": None if fits is None else dataclasses.asdict(fits) | {"ok": fits.ok},
        "left_out": list(left_out_of_memory(facts)),
        "stages": [_data(stage) for stage in stages],
    }


def _data(one: Memory) -> dict[str, Any]:
    return {
        **record(one, "rank", "stage", "exact", "roles", "states", "bytes_per_parameter"),
        "parameters_on_rank": one.elements,
        "estimates": record(one, "activations", "communication"),
        "beside": [dataclasses.asdict(part) for part in (*one.overheads, *one.outside)],
        "activations_uncertainty": one.uncertainty,
        **record(one, "total", "needed", "band"),
    }


def _print(
    made: Run, where: TargetMachine, outlook: Outlook, mine: Memory, other: Memory, stages: tuple[Memory, ...]
) -> None:
    facts = outlook.fullest.facts
    unit = unit_for(max(mine.needed, other.needed))
    gpus = f"{made.world_size} GPU{'s' * (made.world_size > 1)}"
    full, here = fullest(made.policy, facts, mine), f"rank {mine.rank} (stage {mine.stage})"
    which = f"{here} is the fullest" if mine.rank == full else f"{here}; rank {full} is the fullest"
    print_line(
        f"{title(made)}, engine {made.engine}: {count(total_parameters(facts))} parameters on {gpus}",
        f"{sizes_of(facts.parallel)}; {which}",
        "",
    )
    print_schedule(made, outlook)
    if outlook.stages:
        print_line(f"memory in {outlook.fullest.name}, which decides whether the run fits")
    columns = ("role", unit.name, f"{REFERENCE} {unit.name}", "bytes/parameter", "basis")
    print_table(columns, _rows(facts, mine, other, unit))
    if stages:
        print_line()
        rows = [(str(s.stage), unit.of(s.states), unit.of(s.activations), unit.of(s.total)) for s in stages]
        print_table(("stage", f"states {unit.name}", f"activations {unit.name} (estimate)", f"total {unit.name}"), rows)
    if why := reasons(made.policy, facts, mine, other):
        print_line(f"\nwhy it differs from {REFERENCE}")
        print_line(*why, indent="  ")
    for words in left_out_of_memory(facts):
        print_line(f"left out: {words}")
    if outlook.fit is not None:
        # the rank that the verdict is about, if the table shows another one
        whose = "" if full == mine.rank else f"rank {full}, the fullest, needs "
        fit, machine = outlook.fit, where.machine
        need, off, have = (unit.of(size) for size in (fit.needed, fit.band, fit.available))
        said = f"{whose}{need} +- {off} {unit.name} of {have} ({machine.memory_source})"
        print_line("", f"{fit.answer} on {machine.name}: {said}")
        for way in fit.ways:
            print_line(way, indent="  ")
        if outlook.answer == "does not fit":
            _say_nearest(made, outlook)
    if "valid" in outlook.objections:
        print_line(f"{outlook.objections['valid']}; mpbridge check says why")


def _rows(facts: RunFacts, mine: Memory, other: Memory, unit: ByteUnit) -> list[tuple[str, str, str, str, str]]:
    """Role, this recipe's amount, the reference's, bytes per parameter, basis of the figure."""
    inexact = "see what is omitted" if left_out_of_memory(facts) else "without its engine's alignment"
    known = "exact" if mine.exact else inexact
    known_by, _, why = basis(facts).partition(": ")
    measured = f"{known_by}, +-{mine.uncertainty:.0%}{f': {why}' if why else ''}"
    return [
        *(
            (name, unit.of(mine.roles.get(name, 0)), unit.of(other.roles.get(name, 0)), f"{mine.roles.get(name, 0) / max(1, mine.elements):.2f}", "")
            for name in STATES
            if name in mine.roles or name in other.roles
        ),
        ("states", unit.of(mine.states), unit.of(other.states), f"{mine.bytes_per_parameter:.2f}", known),
        *_beside(mine, other, unit),
        ("activations", unit.of(mine.activations), unit.of(other.activations), "", measured),
        ("peak as torch counts it", unit.of(mine.total), unit.of(other.total), "", ""),
        *_beside(mine, other, unit, counted=False),
        ("needed of the device", unit.of(mine.needed), unit.of(other.needed), "", f"+-{unit.of(mine.band)} {unit.name}"),
    ]  # fmt: skip


def _say_nearest(made: Run, outlook: Outlook) -> None:
    # no search: every layout would be rejected for the machine
    for violation in outlook.errors:
        if violation.rule == "machine-cannot-run-it":
            print_line(f"no layout was searched: {violation.found}")
            return
    full = outlook.fullest
    found = nearest(full.policy, full.facts, full.machine, stated=says_optimizer(made.container))
    if found is None:
        print_line(f"no layout fits on up to {64 * outlook.facts.parallel.world_size} GPUs")
        return
    # only the fullest stage was asked for it
    against = outlook.on(found).objections if outlook.stages else {}
    what = f"in which {full.name} alone" if against else "that"
    print_line(
        f"nearest layout {what} fits, on {found.parallel.world_size} GPUs: {line(found, full.facts, left=left_batches(made))}"
    )
    if against:
        print_line(f"the whole run there: {'; '.join(against.values())}")


def _beside(
    mine: Memory, other: Memory, unit: ByteUnit, *, counted: bool = True
) -> list[tuple[str, str, str, str, str]]:
    """Rows of memory that is neither a state nor an activation; counted: by torch."""
    parts = {part.name: part for part in (mine.overheads if counted else mine.outside)}
    theirs = {part.name: part for part in (other.overheads if counted else other.outside)}
    return [
        (
            name,
            unit.of(parts[name].bytes if name in parts else 0),
            unit.of(theirs[name].bytes if name in theirs else 0),
            "",
            f"{(part := parts.get(name) or theirs[name]).known}, +-{part.band:.0%}: {part.because}",
        )
        for name in dict.fromkeys([*parts, *theirs])
    ]
