"""`mpbridge recommend`: the recipes that are legal for a model on a machine, in order, with reasons."""

from __future__ import annotations

import argparse
import dataclasses

from mpbridge.cli._target import add_target_arguments, target
from mpbridge.cli.options import add_run_arguments, container
from mpbridge.cli.text import print_json, print_table
from mpbridge.errors import BadValue, MpbridgeError
from mpbridge.memory.budget import memory
from mpbridge.memory.compare import REFERENCE
from mpbridge.precision.registry import recipe, recipes
from mpbridge.rules.advice import Advice, advise

SUMMARY = "legal recipes for a model on a machine, in order, with the reason"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_arguments(parser)
    add_target_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the order; 1 when no recipe is legal and fits."""
    where = target(args)
    if args.recipe:
        raise BadValue(
            f"--recipe {recipe(args.recipe).name}: recommend compares all recipes, leave it out (mpbridge check looks at one)"
        )
    base = container(args)
    world = args.world_size or base.smallest_world()
    reference = None
    made = []
    for name in (REFERENCE, *(other for other in recipes if other != REFERENCE)):
        entry = recipes[name]
        try:
            # the file is read once; its own precision section gives way to each recipe in turn
            box = dataclasses.replace(base, mixed_precision=name, engine=args.engine or entry.engine)
            run = box.resolved(world, machine=where.machine, versions=where.versions, training=False)
            facts = where.facts(run.facts)
            reference = memory(run.policy, facts).needed if name == REFERENCE else reference
            made.append(advise(entry, run.policy, facts, reference=reference))
        except MpbridgeError as error:
            made.append(Advice(recipe=name, status=entry.status, legal=False, reason=str(error).replace("\n", " ")))
    order = sorted(made, key=lambda advice: advice.rank)
    if args.json:
        print_json(
            {
                "target": {"machine": where.machine.name, "versions": dataclasses.asdict(where.versions)},
                "recipes": [dataclasses.asdict(a) for a in order],
            }
        )
    else:
        print(f"target {where.line()}\n")
        _print(order)
    return 0 if any(advice.legal and advice.fits for advice in order) else 1


def _print(order: list[Advice]) -> None:
    legal = [advice for advice in order if advice.legal]
    rows = [
        (str(place), a.recipe, a.status, _memory(a), a.speed or "not measured", a.reason)
        for place, a in enumerate(legal, start=1)
    ]
    print_table(("", "recipe", "status", "memory", "speed", "why"), rows, title="legal, in order")
    print(
        "\nmemory: states and estimated activations of the fullest GPU, beside bf16_mixed on megatron-core's own engine"
    )
    others = [(advice.recipe, advice.reason) for advice in order if not advice.legal]
    if others:
        print()
        print_table(("recipe", "why not"), others, title="not legal here")


def _memory(advice: Advice) -> str:
    if advice.bytes is None:
        return ""
    share = f"{advice.relative - 1:+.0%}" if advice.relative else ""
    return f"{advice.bytes / 2**30:.1f} GiB ({share}){'' if advice.fit == 'fits' else f', {advice.fit}'}"
