"""`mpbridge import FILE`: translates another stack's configuration to a recipe and its differences. Nothing in the file is executed."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpbridge.cli.options import JSON, arg, find_config
from mpbridge.cli.text import answer, columns_here, print_line, print_table, print_whole, record
from mpbridge.common.errors import BadValue, cut
from mpbridge.common.files import write
from mpbridge.common.formats import plain
from mpbridge.common.prose import prose
from mpbridge.interop.stacks.base import Export, Imported
from mpbridge.interop.stacks.exporters import STACKS, export, stack_module
from mpbridge.interop.stacks.importers import read_args, read_file
from mpbridge.interop.stacks.meaning import label, rows
from mpbridge.interop.stacks.nearest import Answer, apart, refusals
from mpbridge.interop.stacks.nearest import answer as answer_for
from mpbridge.interop.stacks.reading import PRECISION
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import key, recipes
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.other_recipe import KEPT

SUMMARY = "translate another stack's configuration to a recipe"
QUOTED = frozenset({"--args"})
ARGUMENTS = (
    arg("file FILE", "a script, YAML, JSON, TOML, Python (FILE.py:FUNCTION, read as text, or what export wrote), or a Megatron checkpoint's folder, common.pt or .metadata", nargs="?"),
    arg("--args TEXT", "command-line arguments instead of a file"),
    arg("--from STACK", f"one of {', '.join(STACKS)} (default: recognized)", dest="stack"),
    arg("--stack-version V", "of the stack (default: the latest supported; for an unsupported one the nearest is used, with a note)"),
    arg("--env NAME=VALUE", "a variable of a launch script or of --args (1=..., 2=... are a script's own arguments); may be repeated", action="append", default=[]),
    arg("--write FILE", "write an equivalent recipe file", Path),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the recipe, its differences and what is inert or contradictory. Returns 1 if something is undecided, lost or doubtful.

    With something undecided no recipe is written.
    """
    found = _read(args)
    told = Answer(recipe=None, overrides={}, why="; ".join(found.cannot_express))
    if found.fields:
        told = answer_for(found.fields, engine=found.engine, meaning=found.meaning)
    if args.write is not None and not found.undecided:
        _write(args.write, found, told)
    answer(args, _data(found, told), lambda: _print(found, told))
    if args.write is not None and found.undecided:
        raise BadValue(f"--write {args.write}: not written, since it is undecided: {'; '.join(found.undecided)}")
    # the stack, or the recipe, does otherwise than the file says, or a setting about precision is unknown
    doubtful = found.contradicts or found.inert or found.cannot_express or any(map(PRECISION.search, found.unknown))
    return 1 if told.recipe is None or found.undecided or doubtful else 0


def _read(args: argparse.Namespace) -> Imported:
    if (args.file is None) == (args.args is None):
        raise BadValue("give a FILE, or --args TEXT")
    if args.stack is not None:
        stack_module(args.stack)
    env = variables(args.env)
    if args.args is not None:
        return read_args(args.args, stack=args.stack, version=args.stack_version, env=env)
    return read_file(Path(args.file), stack=args.stack, version=args.stack_version, env=env)


def variables(pairs: Iterable[str]) -> dict[str, str]:
    """The variables of `--env NAME=VALUE`. Raises BadValue."""
    env = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadValue(f"--env {pair}: expected NAME=VALUE")
        env[name] = value
    return env


HEADINGS = (
    ("contradicts", "contradicts itself"), ("inert", "has no effect there"),
    ("cannot_express", "mpbridge cannot express"), ("unknown", "unknown there"),
    ("undecided", "undecided: what decides stands elsewhere"), ("in_force", "not said, decided by its defaults"),
    ("assumed", "assumed"),
)  # fmt: skip
"""Kind of note -> its heading."""
MOST_LISTED = 100
"""Notes of one kind that the terminal shows: a real file has a few."""


def _hazards(found: Imported) -> tuple[str, ...]:
    """What is read as it is written and costs accuracy."""
    meaning = found.meaning
    if meaning.main is not None or meaning.storage.bytes > 2:
        return ()
    what = "weights and moments" if meaning.exp_avg.bytes < 4 else "weights"
    return (
        f"{what} in {meaning.storage.short.upper()} without main weights: updates below half the spacing of a weight are lost (mpbridge certify counts them)",
    )


def _print(found: Imported, told: Answer) -> None:
    doubt = "undecided; with what is not said at its defaults, " if found.undecided else ""
    print_line(f"{found.stack} {found.version}: {doubt}{told}")
    print_line()
    shown = rows(found.meaning)
    print_table(("fact", "meaning"), [(label(name, found.meaning), text) for name, text in shown.items()])
    differs = apart(told, found.meaning, engine=found.engine)
    if differs:
        print_line("\nwhere the recipe differs here:")
        for name, (there, here) in differs.items():
            print_line(f"  {label(name, found.meaning)}: {there} there, {here} here")
    forbidden = refusals(told, found.run)
    if forbidden:
        print_line("\nmpbridge does not train this as it is:")
        print_line(*forbidden, indent="  ")
    listed = [(heading, getattr(found, attribute)) for attribute, heading in HEADINGS]
    for heading, lines in (("hazards", _hazards(found)), *listed):
        if lines:
            print_line(f"\n{heading}:")
            for line in lines[:MOST_LISTED]:
                print_line(f"  {line}")
            if len(lines) > MOST_LISTED:
                print_line(f"  and {len(lines) - MOST_LISTED:,} more: --json has all of them")
    if found.other:
        many = "settings are" if len(found.other) > 1 else "setting is"
        print_line(f"\n{len(found.other)} other {many} not about precision")


def _data(found: Imported, told: Answer) -> dict[str, object]:
    return {
        **record(found, "stack", "version"),
        "recipe": told.recipe,
        "answer": str(told),
        "overrides": {name: str(value) for name, value in told.overrides.items()},
        "engine": found.engine,
        "optimizer": found.meaning.optimizer.name,
        "run": {f"optimizer.{name}": plain(value) for name, value in found.run.items()},
        "meaning": rows(found.meaning),
        "differs_here": {name: list(pair) for name, pair in apart(told, found.meaning, engine=found.engine).items()},
        "refused_here": list(refusals(told, found.run)),
        "hazards": list(_hazards(found)),
        **record(found, *(attribute for attribute, _ in HEADINGS)),
        "other": list(found.other),
    }


def _write(path: Path, found: Imported, told: Answer) -> None:
    import yaml

    if told.recipe is None:
        raise BadValue(f"--write {path}: there is no recipe to write: {told.why}")
    # null is written too: it unsets what the recipe sets
    said = {name: plain(value) for name, value in told.overrides.items()}
    engine = {} if told.engine is None else {"engine": told.engine}
    text = yaml.safe_dump({"extends": told.recipe, **engine, **said}, sort_keys=False)
    write(path, f"# from {found.stack} {found.version}\n{text}")


def _print_export(recipe: str | None, made: Export) -> None:
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


def _exported(args: argparse.Namespace) -> Export:
    if args.config is None:
        if args.recipe is None:
            raise BadValue("give a RECIPE, or a run (--config FILE), whose own recipe is exported then")
        return export(args.recipe, args.to, version=args.stack_version, engine=args.engine)
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
    stage = run.stages[0]
    own: Any = stage.recipe if key(stage.recipe) in recipes else stage.config
    made = export(args.recipe or own, args.to, version=args.stack_version, engine=run.facts.engine, run=run)
    stated = _stated(given) if args.recipe is not None else ""
    if not stated:
        return made
    text = f"{args.recipe} replaces the mixed_precision of {args.config} ({stated}); without RECIPE the run's own is exported"
    return dataclasses.replace(made, assumed=(*made.assumed, text))


def _stated(given: Any) -> str:
    """The fields of a precision that a run states without the name of a recipe."""
    said = given.given() if isinstance(given, MixedPrecisionConfig) else given
    fields = said if isinstance(said, Mapping) and "recipe" not in said else {}
    return ", ".join(f"{name}={cut(value)}" for name, value in fields.items() if name not in KEPT)


class ExportVerb:
    """`mpbridge export NAME --to STACK`: writes a recipe as another stack's configuration, with a line for each fact that is not preserved."""

    SUMMARY = "write a recipe as another stack's configuration"
    ARGUMENTS = (
        arg("recipe RECIPE", "a name (mpbridge list), a YAML file, package.module:function or file.py:function; none with --config: the run's own", nargs="?"),
        arg("--to STACK", f"one of {', '.join(STACKS)}", required=True),
        arg("--stack-version V", "of the stack (default: the latest supported; for an unsupported one the nearest is used, with a note)"),
        arg("--config FILE", "a run whose engine and precision additions are exported too"),
        arg("--engine NAME", "the engine it is meant for (default: the recipe's)"),
        JSON,
    )  # fmt: skip

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Prints the pieces to paste. Returns 1 if something cannot be expressed there."""
        made = _exported(args)
        pieces = [record(piece, "name", "text") for piece in made.pieces]
        lines = [record(line, "fidelity", "fact", "text") for line in made.lines]
        said = record(made, "stack", "version", "fidelity", "assumed", pieces=pieces, lines=lines)
        answer(args, {"recipe": args.recipe, **said}, lambda: _print_export(args.recipe, made))
        return 1 if made.fidelity == "impossible" else 0
