"""`mpbridge compare A B`: compares the meaning of two recipes, or of files of any stack."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from mpbridge.cli.text import print_json, print_table
from mpbridge.errors import BadValue
from mpbridge.precision.registry import RECIPE_FILE, describe, get_mixed_precision_config, key, recipes
from mpbridge.precision.resolve import resolve
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
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the differences first. Returns 0 with or without differences."""
    a, b = _side(args.a), _side(args.b)
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
    print(f"\n{verdict}")
    return 0


def _side(name: str) -> Setup:
    """The meaning of a name or file, and its stack. Foreign files are never executed: a Python file is read as text, as `import` does."""
    known = key(name) in recipes
    path = Path(name)
    python = name.endswith(".py") or ".py:" in name
    if not known and not python and ":" in name and not path.exists():
        raise BadValue(
            f"{name}: a function of a Python module would have to be executed, which compare does not do: give a recipe's name,"
            " a YAML file, or a file of a stack"
        )
    if not known and path.suffix in (".yaml", ".yml") and path.is_file() and _is_run(path):
        return _of_run(path)
    if python or (not known and path.exists() and (path.suffix not in (".yaml", ".yml") or not _is_recipe(path))):
        found = read_file(path)
        return Setup(meaning=found.meaning, stack=found.stack, engine=found.engine)
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
