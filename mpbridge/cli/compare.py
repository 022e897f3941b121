"""`mpbridge compare A B`: compares two recipes, or files of any stack, in their meaning; two recipes in their fields too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpbridge.cli.import_ import HEADINGS, variables
from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.errors import BadValue, DataError
from mpbridge.common.formats import plain, say
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.exporters import request_of
from mpbridge.interop.stacks.importers import load, ours, read_file, text_of
from mpbridge.interop.stacks.meaning import LABELS, differences, label, of_policy, rows
from mpbridge.interop.stacks.reasons import Setup, cost, handover
from mpbridge.precision.registry import RECIPE_FILE, describe, get_mixed_precision_config, key, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import ConfigContainer

SUMMARY = "compare what two recipes or files of any stack mean"
ARGUMENTS = (
    *(arg(f"{name} {name.upper()}", "a recipe's name or file, or a configuration of another stack") for name in "ab"),
    arg("--from STACK", "the stack of a file of another stack (default: recognized)", dest="stack"),
    arg("--stack-version V", "of the stack, for files of other stacks (default: the latest supported)"),
    arg("--env NAME=VALUE", "a variable of a launch script; may be repeated", action="append", default=[]),
    arg("--execute", "A and B are recipes: run the function that one names (package.module:function, file.py:function)"),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the differences first. Returns 0 with or without differences."""
    env, given = variables(args.env), (args.a, args.b)
    read = tuple(None if args.execute else _foreign(name, args.stack, args.stack_version, env) for name in given)
    if (args.stack is not None or env or args.stack_version) and not any(read):
        raise BadValue("--from, --stack-version and --env are for files of other stacks: neither A nor B is one")
    a, b = (_side(name, found) for name, found in zip(given, read, strict=True))
    verdict = handover(a, b)
    fields = _fields(given) if read == (None, None) and not any(map(_is_run, given)) else None
    data = _data(given, (a, b), read, verdict) | ({} if fields is None else {"fields": fields})
    answer(args, data, lambda: _print(data, (a, b)))
    return 0


_Read = tuple[Imported | None, ...]
"""What the files of other stacks say; None for a recipe or a run of mpbridge."""


def _fields(given: tuple[str, str]) -> dict[str, list[Any]]:
    left, right = (get_mixed_precision_config(name).stored() for name in given)
    return {name: [plain(left[name]), plain(right[name])] for name in left if left[name] != right[name]}


def _data(names: tuple[str, str], sides: tuple[Setup, Setup], read: _Read, verdict: str) -> dict[str, Any]:
    first, second = (side.meaning for side in sides)
    apart = differences(first, second)
    return {
        "a": names[0],
        "b": names[1],
        "differences": apart,
        "costs": {row: text for row in apart if (text := cost(row, first, second))},
        "same": {row: text for row, text in rows(first).items() if row in LABELS and row not in apart},
        "verdict": verdict,
        "notes": {
            side: {} if found is None else record(found, *_NOTES) for side, found in zip("ab", read, strict=True)
        },
    }


def _print(data: dict[str, Any], sides: tuple[Setup, Setup]) -> None:
    """The table of differences, that of what is alike, the notes on each file, the fields, the verdict."""
    first, second = (side.meaning for side in sides)
    names = data["a"], data["b"]
    if data["differences"]:
        pairs, costs = data["differences"].items(), data["costs"]
        apart = [(label(row, first, second), *pair, costs.get(row, "")) for row, pair in pairs]
        print_table(("differs", *names, "what the second costs"), apart)
        print_line()
    print_table(("alike", "both"), [(label(row, first, second), text) for row, text in data["same"].items()])
    for name, notes in dict(zip(names, data["notes"].values(), strict=True)).items():
        for kind, lines in notes.items():
            if lines:
                print_line(f"\n{name}, {_NOTES[kind]}:")
                print_line(*lines, indent="  ")
    if "fields" in data:
        print_line()
        print_table(("field", *names), [(name, say(a), say(b)) for name, (a, b) in data["fields"].items()])
        if not data["fields"]:
            print_line(f"{' and '.join(names)} have the same fields")
    print_line("", data["verdict"])


_NOTES = {kind: heading for kind, heading in HEADINGS if kind != "in_force"}
"""Kind of note -> its heading: what is said of a stack's file below the tables."""


_FOREIGN = (".json", ".toml", ".sh", ".pt", ".ckpt", ".pth")
"""Endings of files of other stacks, which no recipe has."""


def _foreign(name: str, stack: str | None, version: str | None, env: Mapping[str, str]) -> Imported | None:
    """What another stack's file says; None for a recipe or a run of mpbridge. Foreign files are never executed: a Python file is read as text, as `import` does."""
    known = key(name) in recipes
    path = Path(name)
    python = name.endswith(".py") or ".py:" in name
    if not known and path.suffix in _FOREIGN and not path.exists():
        raise DataError(
            f"{path}: no such file, expected a recipe's name or a stack's configuration (mpbridge list has the names)"
        )
    if not known and not python and ":" in name and not path.exists():
        raise BadValue(
            f"{name}: a function of a Python module would have to be executed, which compare does not do: give a recipe's name,"
            " a YAML file, or a file of a stack; --execute runs it"
        )
    yaml = path.suffix in (".yaml", ".yml")
    if python or (not known and path.exists() and not (yaml and (_is_run(path) or _is_recipe(path)))):
        return read_file(path, stack=stack, version=version, env=env)
    return None


def _side(name: str, found: Imported | None) -> Setup:
    """The meaning of another stack's file that was read, of a recipe, by its name or file, or of a run of mpbridge."""
    if found is not None:
        unsaid = (*found.contradicts, *found.cannot_express)
        return Setup(meaning=found.meaning, stack=found.stack, engine=found.engine, unsaid=unsaid)
    if _is_run(name):
        return _of_run(Path(name))
    engine = describe(name).engine or DEFAULT
    return Setup(meaning=of_policy(resolve(get_mixed_precision_config(name)), engine=engine), engine=engine)


def _is_run(name: str | Path) -> bool:
    """Whether a YAML file that no recipe is called after is a run configuration of mpbridge."""
    path = Path(name)
    if key(str(name)) in recipes or path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    data = load(text_of(path), path.name)
    return isinstance(data, Mapping) and ours(data)


def _of_run(path: Path) -> Setup:
    """A run configuration of mpbridge: its recipe with its additions, its engine, and its model section."""
    container = ConfigContainer.load(path, [], check=False)
    run = container.resolved(container.smallest_world(), training=False)
    if len(run.stages) > 1:
        names = ", ".join(stage.recipe for stage in run.stages)
        raise BadValue(f"{path}: the run has stages ({names}): compare one of them by name")
    return Setup(meaning=request_of(run).ours, engine=run.facts.engine)


def _is_recipe(path: Path) -> bool:
    """Whether a YAML file is a recipe of mpbridge: it extends one, or is a flat mapping of recipe fields."""
    if not path.is_file():
        return True  # the registry reports what is missing
    data = load(text_of(path), path.name)
    return isinstance(data, Mapping) and ("extends" in data or all(str(name) in RECIPE_FILE for name in data))
