"""`mpbridge doctor`: shows what is installed here (or on a target), and how each recipe runs there."""

from __future__ import annotations

import argparse
import dataclasses

from mpbridge.cli._target import TARGET, TargetMachine, target
from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table, print_whole
from mpbridge.common.machines import Machine, machines
from mpbridge.common.probe import environment, gpus
from mpbridge.common.tables import size
from mpbridge.planning.capability import Capability, can_run
from mpbridge.precision.megatron_spec.versions import missing
from mpbridge.precision.registry import recipe, recipes
from mpbridge.precision.resolve import resolve

SUMMARY = "show which recipes run natively, emulated or not at all, here or on a --target"
ARGUMENTS = (
    *TARGET,
    arg("--recipe NAME", "only this one; exit 1 unless it runs natively"),
    arg("--machines", "list the machines that --target knows, and nothing else"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the table. Returns 1 if a single recipe was requested and does not run natively."""
    if args.machines:
        rows = [(name, row.label, size(row.memory_bytes), row.note) for name, row in machines.items() if row.gpu]
        data = {"machines": {name: _machine(row) for name, row in machines.items()}}
        answer(args, data, lambda: print_table(("--target", "machine", "memory", "note"), rows))
        return 0
    where = target(args)
    names = (recipe(args.recipe).name,) if args.recipe else tuple(recipes)
    answers = {name: can_run(resolve(recipes[name].make()), where.machine, where.versions) for name in names}
    answer(args, as_data(where, answers), lambda: _print(where, answers))
    return 1 if args.recipe and not all(one.native for one in answers.values()) else 0


def _machine(row: Machine) -> dict[str, object]:
    return dataclasses.asdict(row) | {"sm": row.sm, "peak": dict(row.peak)}


def as_data(where: TargetMachine, answers: dict[str, Capability]) -> dict[str, object]:
    """The answer as JSON types."""
    found: dict[str, object] = {}
    if where.here:
        needed = list(missing(where.versions.megatron_core))
        found = {"gpus": [gpu.name for gpu in gpus()], "environment": environment(), "missing": needed}
    return {
        "machine": _machine(where.machine),
        "versions": dataclasses.asdict(where.versions),
        "assumed": list(where.assumed),
        **found,
        "recipes": {name: dataclasses.asdict(answer) for name, answer in answers.items()},
    }


def _print(where: TargetMachine, answers: dict[str, Capability]) -> None:
    machine = where.machine
    print_line(f"machine   {machine.label}, {size(machine.memory_bytes)}{f', {machine.note}' if machine.note else ''}")
    if machine.peak:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in machine.peak)
        print_line(f"peak      {rates} dense TFLOP/s, {machine.bandwidth / 1e9:g} GB/s ({machine.source})")
    for name, value in dataclasses.asdict(where.versions).items():
        words, absent = name.replace("_", " "), "not installed" if where.here else "unknown"
        assumed = any(version.startswith(words) for version in where.assumed)
        print_line(f"{words:19}{value or absent}{' (assumed)' if assumed else ''}")
    if where.here:
        names = ", ".join(gpu.name for gpu in gpus())
        unused = " (torch is a build without CUDA)" if names and not machine.gpu else ""
        print_line(f"gpus               {names or 'none'}{unused}")
        for name, value in environment().items():
            print_whole(f"{name}={value}")
        core = where.versions.megatron_core
        for package in missing(core):
            print_line(f"missing             {package}, which megatron-core {core} imports: pip install {package}")
    print_line()
    rows = [(name, f"{one.how}{'' if one.proven else ', unproven'}", one.nearest or "", one.reason) for name, one in answers.items()]  # fmt: skip
    print_table(("recipe", "runs", "nearest that runs", "why"), rows)
