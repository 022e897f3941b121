"""`mpbridge list`: lists every known recipe."""

from __future__ import annotations

import argparse

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import print_json, print_table
from mpbridge.precision.recipe import Recipe
from mpbridge.precision.registry import recipes

SUMMARY = "list the recipes: requirements, validation status, and what each one does"
ARGUMENTS = (arg("--aliases", "also list the aliases"), JSON)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    entries = list(recipes.values())
    if args.json:
        print_json({"recipes": [as_data(entry) for entry in entries]})
        return 0
    rows = [
        (e.name, needs(e), e.status, e.engine or "", e.summary, ", ".join(e.aliases) if args.aliases else "")
        for e in entries
    ]
    columns = ("recipe", "needs", "status", "engine", "what it does", "also called")
    print_table(columns if args.aliases else columns[:-1], rows if args.aliases else [row[:-1] for row in rows])
    return 0


def needs(entry: Recipe) -> str:
    """The hardware need in words."""
    return "?" if entry.foreign else "any" if entry.needs is None else f"sm_{entry.needs[0]}{entry.needs[1]}+"


def as_data(entry: Recipe) -> dict[str, object]:
    """The entry's metadata as JSON types."""
    return {
        "name": entry.name,
        "summary": entry.summary,
        "aliases": list(entry.aliases),
        "needs": list(entry.needs) if entry.needs else None,
        "status": entry.status,
        "engine": entry.engine,
        "source": entry.source,
        "hints": list(entry.hints),
    }
