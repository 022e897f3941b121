"""`mpbridge rehearse`: shows what recipes do to a model's tensors, on this machine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.cli._target import TARGET, target
from mpbridge.cli.options import JSON, RUN_HERE, arg, container, find_config, quoted, whole
from mpbridge.cli.text import answer, print_line, print_table, record
from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.files import write
from mpbridge.common.pages.document import writable
from mpbridge.common.report.console import console, rank, tell
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.settings.container import ConfigContainer

if TYPE_CHECKING:
    from mpbridge.training.rehearse.report import Rehearsal
    from mpbridge.training.tune.tuning import Tuned

SUMMARY = "train a few steps under several recipes, emulated, and see which tensors lose precision"
ARGUMENTS = (
    arg("--config FILE", "a YAML file, or the name of a shipped one (default: gpt_tiny)"),
    arg("--recipes A,B,...", "recipe names (mpbridge list); default: BF16 and every kind of scaling"),
    arg("--steps N", "training steps under each recipe (default: 50)", whole, least=1, default=50),
    arg("--every K", "sample the tensors of every K-th step (default: ten samples)", whole, least=1),
    arg("--out DIR", "folder for report.json and index.html, a page with every chart", Path, default=Path("rehearsal")),
    arg("--suggest", "also tune the last tunable recipe (mpbridge tune, with its defaults): writes DIR/tuned.yaml, figures on the page"),
    arg("overrides key=value", "settings that override the file's, such as train.micro_batch_size=4; checkpoint.load=DIR starts from its weights", nargs="*"),
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Rehearses, prints the tables and writes the report. Returns 1 if every recipe failed. Raises KeyboardInterrupt if a signal ended it."""
    writable(args.out, folder=True)  # before a framework is loaded
    from mpbridge.training.rehearse import rehearsal
    from mpbridge.training.rehearse.page import page
    from mpbridge.training.rehearse.report import caveats, tables

    out = console(speaks=rank() == 0)
    recipes = tuple(filter(None, map(str.strip, args.recipes.split(",")))) if args.recipes else rehearsal.RECIPES
    if not recipes:
        raise BadValue(f"--recipes {args.recipes!r} names no recipe")
    box = ConfigContainer.load(find_config(args.config), args.overrides, check=False)
    result = rehearsal.rehearse(box, recipes, steps=args.steps, every=args.every, say=print_line)
    stopped = any(recipe.interrupted for recipe in result.recipes)
    if args.suggest and not stopped:
        _suggest(args, result)
    path = args.out / "index.html"
    if rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        result.write(args.out / "report.json")
        write(path, page(result))
    for table in tables(result):
        out.print(table)
    tell(out, caveats(result))
    for line in result.suggestion:
        tell(out, line)
    if rank() == 0:
        tell(out, f"report: {path}")
    if stopped:
        raise KeyboardInterrupt  # after what was found: the entry says so, and exits as interrupted
    return 1 if all(recipe.verdict()[0] == "failed" for recipe in result.recipes) else 0


def _suggest(args: argparse.Namespace, result: Rehearsal) -> None:
    """Tunes the last tunable recipe, and records the result."""
    from mpbridge.training.tune.levels import prepared
    from mpbridge.training.tune.run import lines, moved, tune, write

    for recipe in reversed([one.recipe for one in result.recipes if one.failure is None]):
        try:
            prepared(get_mixed_precision_config(recipe))
        except MpbridgeError:
            continue
        settings = [*args.overrides, f"mixed_precision.recipe={quoted(recipe)}"]
        box = ConfigContainer.load(find_config(args.config), settings, check=False)
        tuned, content = tune(box, say=lambda text: None)
        place = args.out / "tuned.yaml"
        if rank() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            write(place, content)
        result.suggestion = [
            f"suggestion for {recipe}: {place}",
            *(f"{kind}, layers {layers}, to {level}: {why}" for kind, layers, level, why in moved(tuned)),
            *lines(tuned, recipe),
        ]
        return
    result.suggestion = ["suggestion: none, since no recipe without a failure is quantized without delayed scaling"]


def _print_tuned(data: dict[str, Any]) -> None:
    for table in data["tables"]:
        print_line()
        print_table(table["columns"], table["rows"], title=table["title"])
    print_line()
    for line in data["lines"]:
        print_line(line)
    out = data["path"]
    print_line(f"recipe: {out} (mpbridge show {out}; mpbridge train --recipe {out} --emulate)")


def as_data(result: Tuned, content: dict[str, Any], out: Path) -> dict[str, Any]:
    """The recipe file and the tables as JSON types."""
    from mpbridge.training.tune.run import lines, sections

    tables = [
        {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        for title, columns, rows in sections(result)
    ]
    said = {"take": result.verdict.take, "tables": tables, "lines": lines(result, str(content.get("extends", "")))}
    return {"path": str(out), "content": content, **said}


class TuneVerb:
    """`mpbridge tune`: measures which linears can run in low precision under a budget, and writes a recipe file."""

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

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Tunes, prints the result and writes the recipe. Returns 1 if a simple rule is no worse, and names it."""
        from mpbridge.training.tune.choices import TUNED
        from mpbridge.training.tune.levels import Where, budget_of

        faults = []
        if not args.out.parent.is_dir() or args.out.is_dir():
            faults.append(f"--out {args.out}: expected a file name in an existing folder")
        if args.out.suffix not in (".yaml", ".yml"):
            faults.append(f"--out {args.out}: a recipe file ends in .yaml")
        if faults:
            raise BadValue("; ".join(faults))
        find_config(args.config)
        budget = budget_of(args.budget)
        from mpbridge.training.tune.run import tune, write  # loads torch

        levels = None if args.levels is None else tuple(filter(None, map(str.strip, args.levels.split(","))))
        first = rank() == 0
        speak = print_line if first and not args.json else lambda text: None
        box, where = container(args), Where(stack=args.stack)
        if args.target is not None or args.machine_file is not None:
            where = dataclasses.replace(where, **record(target(args), "machine", "versions", "constants"))
        if args.checkpoint:
            box.checkpoint["load"] = args.checkpoint
        result, content = tune(
            box, levels=levels, budget=budget, batches=args.batches, unseen=args.unseen, where=where, say=speak
        )
        if first:
            write(args.out, content)
            data = as_data(result, content, args.out)
            answer(args, data, lambda: _print_tuned(data))
        return 0 if result.verdict.take == TUNED else 1
