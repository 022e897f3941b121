"""`mpbridge tune`: measures which linears can run in low precision under a budget, and writes a recipe file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.cli._target import TARGET, target
from mpbridge.cli.options import JSON, RUN_HERE, arg, container, whole
from mpbridge.cli.text import answer, print_line, print_table
from mpbridge.common.errors import BadValue

if TYPE_CHECKING:
    from mpbridge.training.tune.levels import Where
    from mpbridge.training.tune.tuning import Tuned

SUMMARY = "find which linears of this model can run in low precision under a budget, and write the recipe"
ARGUMENTS = (
    *RUN_HERE, *TARGET,
    arg("--levels A,B,...", "levels that linears may be raised to, as in `modules:` (default: mxfp8 for four bits; high precision is always included)"),
    arg("--budget WHAT=X", "time=1.1 (predicted GEMM and quantization time relative to the all-low recipe), memory=40GB (on the fullest rank) or gradient-error=0.3 (default: what the last 15 %% of the layers in high precision cost)"),
    arg("--batches N", "global batches for scoring (default: 8)", whole, default=8),
    arg("--unseen N", "global batches for validation (default: 4)", whole, default=4),
    arg("--stack NAME", "stack that the recipe will be exported to (`mpbridge export`): only levels that it can express are proposed"),
    arg("--checkpoint DIR", "checkpoint with the weights to measure (default: randomly initialized weights)"),
    arg("--out FILE", "the recipe file (default: tuned.yaml)", Path, default=Path("tuned.yaml")),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Tunes, prints the result and writes the recipe. Returns 1 if a simple rule is no worse, and names it."""
    from mpbridge.training.tune.levels import budget_of

    _check(args)
    budget = budget_of(args.budget)
    from mpbridge.common.report.console import rank
    from mpbridge.training.tune.choices import TUNED
    from mpbridge.training.tune.report import write
    from mpbridge.training.tune.run import tune

    levels = None if args.levels is None else tuple(word.strip() for word in args.levels.split(",") if word.strip())
    first = rank() == 0
    speak = print_line if first and not args.json else lambda text: None
    box = container(args)
    if args.checkpoint:
        box.checkpoint["load"] = args.checkpoint
    result, content = tune(
        box, levels=levels, budget=budget, batches=args.batches, unseen=args.unseen, where=_where(args), say=speak
    )
    if first:
        write(args.out, content)
        extends = str(content.get("extends", ""))
        answer(args, as_data(result, content, args.out), lambda: _print(result, extends, args.out))
    return 0 if result.verdict.take == TUNED else 1


def _check(args: argparse.Namespace) -> None:
    from mpbridge.cli.options import find_config

    faults = []
    if not args.out.parent.is_dir() or args.out.is_dir():
        faults.append(f"--out {args.out}: expected a file name in an existing folder")
    if args.out.suffix not in (".yaml", ".yml"):
        faults.append(f"--out {args.out}: a recipe file ends in .yaml")
    if faults:
        raise BadValue("; ".join(faults))
    find_config(args.config)


def _where(args: argparse.Namespace) -> Where:
    from mpbridge.training.tune.levels import Where

    if args.target is None and getattr(args, "machine_file", None) is None:
        return Where(stack=args.stack)
    found = target(args)
    return Where(machine=found.machine, versions=found.versions, constants=found.constants, stack=args.stack)


def _print(result: Tuned, recipe: str, out: Path) -> None:
    from mpbridge.training.tune.report import lines, sections

    for title, columns, rows in sections(result):
        print_line()
        print_table(columns, rows, title=title)
    print_line()
    for line in lines(result, recipe):
        print_line(line)
    print_line(f"recipe: {out} (mpbridge show {out}; mpbridge train --recipe {out} --emulate)")


def as_data(result: Tuned, content: dict[str, Any], out: Path) -> dict[str, Any]:
    """The recipe file and the tables as JSON types."""
    from mpbridge.training.tune.report import lines, sections

    tables = [
        {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        for title, columns, rows in sections(result)
    ]
    said = {"take": result.verdict.take, "tables": tables, "lines": lines(result, str(content.get("extends", "")))}
    return {"path": str(out), "content": content, **said}
