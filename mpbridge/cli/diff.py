"""`mpbridge diff A B`: the differences of two recipes, in their fields and in their meaning."""

from __future__ import annotations

import argparse

from mpbridge.cli.show import facts
from mpbridge.cli.text import print_json, print_line, print_table
from mpbridge.common.formats import plain, say
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

SUMMARY = "show the differences of two recipes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="a recipe's name, a YAML file, package.module:function or file.py:function"
        )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the differences. Returns 0 with or without differences."""
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
        print_line(f"{args.a} and {args.b} have the same fields")
        return 0
    print_table(("field", args.a, args.b), [(name, say(a), say(b)) for name, a, b in fields], title="fields")
    print_line()
    print_table(("fact", args.a, args.b), meaning, title="meaning") if meaning else print_line("they mean the same")
    return 0
