"""`mpbridge list`: lists every known recipe."""

from __future__ import annotations

import argparse

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_table, record
from mpbridge.precision.recipe import Recipe
from mpbridge.precision.registry import recipes

SUMMARY = "list the recipes: requirements, validation status, and what each one does"
ARGUMENTS = (arg("--aliases", "also list the aliases"), JSON)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    entries = list(recipes.values())
    rows = [
        (e.name, needs(e), e.status, e.engine or "", e.summary, ", ".join(e.aliases) if args.aliases else "")
        for e in entries
    ]
    columns = ("recipe", "needs", "status", "engine", "what it does", "also called")
    shown = len(columns) - (not args.aliases)
    data = {"recipes": [as_data(entry) for entry in entries]}
    answer(args, data, lambda: print_table(columns[:shown], [row[:shown] for row in rows]))
    return 0


def needs(entry: Recipe) -> str:
    """The hardware need in words."""
    return "?" if entry.foreign else "any" if entry.needs is None else f"sm_{entry.needs[0]}{entry.needs[1]}+"


def as_data(entry: Recipe) -> dict[str, object]:
    """The entry's metadata as JSON types."""
    return record(entry, "name", "summary", "aliases", "needs", "status", "engine", "source", "hints")
