"""`mpbridge diff A B`: what two recipes do differently, in their fields and in what these mean."""

from __future__ import annotations

import argparse

from mpbridge.cli.show import facts
from mpbridge.cli.text import print_json, print_table
from mpbridge.formats import plain, say
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

SUMMARY = "what two recipes do differently"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="a recipe's name, a YAML file, package.module:function or file.py:function"
        )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the differences; 0 whether there are any or not."""
    ours, theirs = get_mixed_precision_config(args.a), get_mixed_precision_config(args.b)
    left, right = ours.stored(), theirs.stored()
    fields = [(name, left[name], right[name]) for name in left if left[name] != right[name]]
    first, second = dict(facts(resolve(ours).settled())), dict(facts(resolve(theirs).settled()))
    meaning = [
        (name, first.get(name, ""), second.get(name, ""))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
    if args.json:
        said = {name: [plain(a), plain(b)] for name, a, b in fields}
        print_json({"a": args.a, "b": args.b, "fields": said, "meaning": {name: [a, b] for name, a, b in meaning}})
        return 0
    if not fields:
        print(f"{args.a} and {args.b} say the same")
        return 0
    print_table(("field", args.a, args.b), [(name, say(a), say(b)) for name, a, b in fields], title="fields")
    print()
    print_table(("fact", args.a, args.b), meaning, title="meaning") if meaning else print("they mean the same")
    return 0
