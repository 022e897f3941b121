"""`mpbridge compare A B`: two recipes, or files of any stack, side by side in what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpbridge.cli.text import print_json, print_table
from mpbridge.precision.registry import describe, get_mixed_precision_config, key, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.stacks.importers import read_file
from mpbridge.stacks.meaning import LABELS, Meaning, arithmetic_differs, differences, of_policy, rows
from mpbridge.traits import DEFAULT

SUMMARY = "two recipes or files of any stack, side by side in what they mean"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="a recipe's name or file, or a configuration of another stack"
        )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the differences first; 0 whether there are any or not."""
    (first, one), (second, other) = _meaning(args.a), _meaning(args.b)
    apart = differences(first, second)
    left, right = rows(first), rows(second)
    verdict = _verdict(first, second, bool(apart))
    if one and other and one != other:
        verdict += f"; checkpoints of the engines {one} and {other} do not read each other here"
    if args.json:
        print_json(
            {
                "a": args.a,
                "b": args.b,
                "differences": {name: list(pair) for name, pair in apart.items()},
                "same": [name for name in LABELS if name not in apart],
                "verdict": verdict,
            }
        )
        return 0
    labels = {**LABELS, "stored": "quantized weights at rest"}
    if apart:
        print_table(("differs", args.a, args.b), [(labels[name], *pair) for name, pair in apart.items()])
        print()
    print_table(
        ("alike", "both"),
        [(LABELS[name], left[name]) for name in LABELS if name not in apart and left[name] == right[name]],
    )
    print(f"\n{verdict}")
    return 0


def _meaning(name: str) -> tuple[Meaning, str | None]:
    """What a name or file means, and for a recipe of ours its engine."""
    known = key(name) in recipes
    path = Path(name)
    if (
        not known
        and ":" not in name
        and (path.is_dir() or path.suffix not in (".yaml", ".yml") or not _is_recipe(path))
    ):
        return (read_file(path).meaning, None) if path.exists() else _recipe(name)
    return _recipe(name)


def _recipe(name: str) -> tuple[Meaning, str | None]:
    engine = describe(name).engine or DEFAULT
    return of_policy(resolve(get_mixed_precision_config(name)), engine=engine), engine


def _is_recipe(path: Path) -> bool:
    """Whether a YAML file is one of our recipes: a flat mapping of a config's fields."""
    from collections.abc import Mapping

    from mpbridge.precision.config import MixedPrecisionConfig
    from mpbridge.stacks.importers import load

    if not path.is_file():
        return True  # the registry says what is missing
    data = load(path.read_text(encoding="utf-8"), path.name)
    fields = {*MixedPrecisionConfig.__dataclass_fields__, "extends", "summary", "engine", "hints", "source", "name"}
    return isinstance(data, Mapping) and all(str(name) in fields for name in data)


def _verdict(first: Meaning, second: Meaning, apart: bool) -> str:
    """Whether a checkpoint can go from one to the other."""
    if not apart:
        return "they mean the same: a checkpoint of one goes on in the other unchanged"
    if not arithmetic_differs(first, second):
        return "the same arithmetic in another layout: a checkpoint goes on after its tensors are converted, and nothing is lost"
    if first.master.bytes > second.master.bytes:
        return f"B updates {second.master.short} weights, A {first.master.short} ones: going from A to B rounds them, and the way back does not restore them"
    return "different arithmetic: a checkpoint can be converted, and the run goes on as B says"
