"""`mpbridge export NAME --to STACK`: writes a recipe as another stack's configuration, with a line for each fact that is not preserved."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, columns_here, print_line, print_whole, record
from mpbridge.common.errors import BadValue, cut
from mpbridge.common.prose import prose
from mpbridge.interop.stacks.base import Export
from mpbridge.interop.stacks.exporters import STACKS, export
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import key, recipes

SUMMARY = "write a recipe as another stack's configuration"
ARGUMENTS = (
    arg("recipe RECIPE", "a name (mpbridge list), a YAML file, package.module:function or file.py:function; none with --config: the run's own", nargs="?"),
    arg("--to STACK", f"one of {', '.join(STACKS)}", required=True),
    arg("--stack-version V", "of the stack (default: the latest supported; for an unsupported one the nearest is used, with a note)"),
    arg("--config FILE", "a run whose engine and precision additions are exported too"),
    arg("--engine NAME", "the engine it is meant for (default: the recipe's)"),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the pieces to paste. Returns 1 if something cannot be expressed there."""
    made = _made(args)
    pieces = [record(piece, "name", "text") for piece in made.pieces]
    lines = [record(line, "fidelity", "fact", "text") for line in made.lines]
    said = record(made, "stack", "version", "fidelity", "assumed", pieces=pieces, lines=lines)
    answer(args, {"recipe": args.recipe, **said}, lambda: _print(args.recipe, made))
    return 1 if made.fidelity == "impossible" else 0


def _print(recipe: str | None, made: Export) -> None:
    for piece in made.pieces:
        print_whole(f"# {made.stack} {made.version}: {piece.name}")
        print_whole(piece.text)
        print_line()
    words = {
        "exact": "exact",
        "layout": "same arithmetic, different layout",
        "different": "different arithmetic",
        "impossible": "not all of it can be expressed there",
    }
    on = f"{made.stack}{f' {made.version}' if made.assumed else ''}"
    given = ", given what is assumed below" if made.assumed else ""
    said = [f"{recipe or 'the run'} on {on}: {words[made.fidelity]}{given}", *(f"  {line}" for line in made.lines)]
    said += ["assumed:", *(f"  {line}" for line in made.assumed)] if made.assumed else []
    width = columns_here()
    lines = prose("\n".join(said), width and width - 2).split("\n")
    print_whole("\n".join(f"# {line}" for line in lines))  # comments, so that what is printed can be saved as it is


def _made(args: argparse.Namespace) -> Export:
    if args.config is None:
        if args.recipe is None:
            raise BadValue("give a RECIPE, or a run (--config FILE), whose own recipe is exported then")
        return export(args.recipe, args.to, version=args.stack_version, engine=args.engine)
    from mpbridge.cli.options import find_config
    from mpbridge.settings.container import ConfigContainer

    path, engine = find_config(args.config), [f"engine={args.engine}"] if args.engine else []
    container = ConfigContainer.load(path, engine, check=False)
    given = container.mixed_precision
    stages = given if isinstance(given, list | tuple) else ()
    if len(stages) > 1:
        names = [str(stage["recipe"]) for stage in stages if isinstance(stage, Mapping) and "recipe" in stage]
        if args.recipe is None or key(args.recipe) not in map(key, names):
            none = "" if args.recipe is None else f" and none is {args.recipe}"
            raise BadValue(f"{args.config} has stages ({', '.join(names)}){none}: name the one to export")
    elif args.recipe is not None:
        container = ConfigContainer.load(path, [f"mixed_precision.recipe='{args.recipe}'", *engine], check=False)
    run = container.resolved(container.smallest_world())
    made = export(args.recipe or _own(run), args.to, version=args.stack_version, engine=run.facts.engine, run=run)
    stated = _stated(given) if args.recipe is not None else ""
    if not stated:
        return made
    text = f"{args.recipe} replaces the mixed_precision of {args.config} ({stated}); without RECIPE the run's own is exported"
    return dataclasses.replace(made, assumed=(*made.assumed, text))


def _own(run: Any) -> Any:
    """A run's recipe by name; its config if it has none that is registered."""
    stage = run.stages[0]
    return stage.recipe if key(stage.recipe) in recipes else stage.config


def _stated(given: Any) -> str:
    """The fields of a precision that a run states without the name of a recipe."""
    said = given.given() if isinstance(given, MixedPrecisionConfig) else given
    fields = said if isinstance(said, Mapping) and "recipe" not in said else {}
    return ", ".join(f"{name}={cut(value)}" for name, value in fields.items())
