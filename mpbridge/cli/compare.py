"""`mpbridge compare A B`: compares the meaning of two recipes, or of files of any stack."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from mpbridge.cli.import_ import HEADINGS, variables
from mpbridge.cli.text import print_json, print_line, print_table
from mpbridge.errors import BadValue
from mpbridge.precision.registry import RECIPE_FILE, describe, get_mixed_precision_config, key, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.stacks.base import Imported
from mpbridge.stacks.costs import cost
from mpbridge.stacks.handover import Setup, handover
from mpbridge.stacks.importers import read_file
from mpbridge.stacks.meaning import LABELS, differences, label, of_policy, rows
from mpbridge.traits import DEFAULT

SUMMARY = "compare what two recipes or files of any stack mean"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="a recipe's name or file, or a configuration of another stack"
        )
    parser.add_argument(
        "--from", dest="stack", metavar="STACK", help="the stack of a file of another stack (default: recognized)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of a launch script; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the differences first. Returns 0 with or without differences."""
    env = variables(args.env)
    read = {name: _foreign(name, args.stack, env) for name in (args.a, args.b)}
    if (args.stack is not None or env) and not any(read.values()):
        raise BadValue("--from and --env are for files of other stacks: neither A nor B is one")
    a, b = (_of_file(found) if (found := read[name]) is not None else _side(name) for name in (args.a, args.b))
    first, second = a.meaning, b.meaning
    apart = differences(first, second)
    left, right = rows(first), rows(second)
    costs = {name: cost(name, first, second) for name in apart}
    verdict = handover(a, b)
    if args.json:
        print_json(
            {
                "a": args.a,
                "b": args.b,
                "differences": {name: list(pair) for name, pair in apart.items()},
                "costs": {name: text for name, text in costs.items() if text},
                "same": [name for name in LABELS if name not in apart],
                "verdict": verdict,
                "notes": {
                    side: {}
                    if (found := read[name]) is None
                    else {kind: list(getattr(found, kind)) for kind, _ in _NOTES}
                    for side, name in (("a", args.a), ("b", args.b))
                },
            }
        )
        return 0
    if apart:
        rows_apart = [(label(name, first, second), *pair, costs[name]) for name, pair in apart.items()]
        print_table(("differs", args.a, args.b, "what the second costs"), rows_apart)
        print()
    print_table(
        ("alike", "both"),
        [
            (label(name, first, second), left[name])
            for name in LABELS
            if name not in apart and left[name] == right[name]
        ],
    )
    for name, found in read.items():
        for kind, heading in _NOTES:
            lines = () if found is None else getattr(found, kind)
            if lines:
                print(f"\n{name}, {heading}:")
            for line in lines:
                print_line(line, indent="  ")
    print()
    print_line(verdict)
    return 0


_NOTES = tuple((kind, heading) for kind, heading in HEADINGS if kind != "in_force")
"""What is said of a stack's file below the tables."""


def _foreign(name: str, stack: str | None, env: Mapping[str, str]) -> Imported | None:
    """What another stack's file says; None for a recipe or a run of mpbridge. Foreign files are never executed: a Python file is read as text, as `import` does."""
    known = key(name) in recipes
    path = Path(name)
    python = name.endswith(".py") or ".py:" in name
    if not known and not python and ":" in name and not path.exists():
        raise BadValue(
            f"{name}: a function of a Python module would have to be executed, which compare does not do: give a recipe's name,"
            " a YAML file, or a file of a stack"
        )
    yaml = path.suffix in (".yaml", ".yml")
    if python or (
        not known and path.exists() and not (yaml and ((path.is_file() and _is_run(path)) or _is_recipe(path)))
    ):
        return read_file(path, stack=stack, env=env)
    return None


def _of_file(found: Imported) -> Setup:
    unsaid = (*found.contradicts, *found.cannot_express)
    return Setup(meaning=found.meaning, stack=found.stack, engine=found.engine, unsaid=unsaid)


def _side(name: str) -> Setup:
    """The meaning of a recipe, by its name or file, or of a run of mpbridge."""
    path = Path(name)
    if key(name) not in recipes and path.suffix in (".yaml", ".yml") and path.is_file() and _is_run(path):
        return _of_run(path)
    engine = describe(name).engine or DEFAULT
    return Setup(meaning=of_policy(resolve(get_mixed_precision_config(name)), engine=engine), engine=engine)


def _is_run(path: Path) -> bool:
    from mpbridge.stacks.importers import load, ours, text_of

    data = load(text_of(path), path.name)
    return isinstance(data, Mapping) and ours(data)


def _of_run(path: Path) -> Setup:
    """A run configuration of mpbridge: its recipe with its additions, its engine, and its model section."""
    from mpbridge.config.container import ConfigContainer
    from mpbridge.stacks.exporters import request_of

    container = ConfigContainer.load(path, [], check=False)
    run = container.resolved(container.smallest_world(), training=False)
    if len(run.stages) > 1:
        names = ", ".join(stage.recipe for stage in run.stages)
        raise BadValue(f"{path}: the run has stages ({names}): compare one of them by name")
    return Setup(meaning=request_of(run).ours, engine=run.facts.engine)


def _is_recipe(path: Path) -> bool:
    """Whether a YAML file is a recipe of mpbridge: it extends one, or is a flat mapping of recipe fields."""
    from mpbridge.stacks.importers import load, text_of

    if not path.is_file():
        return True  # the registry reports what is missing
    data = load(text_of(path), path.name)
    return isinstance(data, Mapping) and ("extends" in data or all(str(name) in RECIPE_FILE for name in data))
