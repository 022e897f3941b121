"""`mpbridge rehearse`: shows what recipes do to a model's tensors, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.cli.options import arg, find_config, whole
from mpbridge.cli.text import print_line
from mpbridge.common.errors import BadValue

if TYPE_CHECKING:
    from mpbridge.training.rehearse.report import Rehearsal

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
    """Rehearses, prints the tables and writes the report. Returns 1 if no recipe could run. Raises KeyboardInterrupt if a signal ended it."""
    from mpbridge.common.pages.document import writable
    from mpbridge.common.report.console import console, rank, tell
    from mpbridge.training.rehearse.report import caveats, tables

    writable(args.out, folder=True)
    out = console(speaks=rank() == 0)
    result = _rehearsed(args)
    stopped = any(recipe.interrupted for recipe in result.recipes)
    if args.suggest and not stopped:
        _suggest(args, result)
    if rank() == 0:
        page = _write(result, args.out)
    for table in tables(result):
        out.print(table)
    tell(out, caveats(result))
    for line in result.suggestion:
        tell(out, line)
    if rank() == 0:
        tell(out, f"report: {page}")
    if stopped:
        raise KeyboardInterrupt  # after what was found: the entry says so, and exits as interrupted
    return 1 if all(recipe.failure is not None for recipe in result.recipes) else 0


def _rehearsed(args: argparse.Namespace) -> Rehearsal:
    from mpbridge.training.rehearse import rehearsal

    recipes = (
        tuple(name.strip() for name in args.recipes.split(",") if name.strip()) if args.recipes else rehearsal.RECIPES
    )
    if not recipes:
        raise BadValue(f"--recipes {args.recipes!r} names no recipe")
    from mpbridge.settings.container import ConfigContainer

    container = ConfigContainer.load(find_config(args.config), args.overrides, check=False)
    return rehearsal.rehearse(container, recipes, steps=args.steps, every=args.every, say=print_line)


def _suggest(args: argparse.Namespace, result: Rehearsal) -> None:
    """Tunes the last tunable recipe, and records the result."""
    from mpbridge.common.errors import MpbridgeError
    from mpbridge.common.report.console import rank
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.settings.container import ConfigContainer
    from mpbridge.training.tune.levels import prepared
    from mpbridge.training.tune.report import lines, moved, write
    from mpbridge.training.tune.run import tune

    for recipe in reversed([one.recipe for one in result.recipes if one.failure is None]):
        try:
            prepared(get_mixed_precision_config(recipe))
        except MpbridgeError:
            continue
        quoted = recipe.replace("'", "''")
        settings = [*args.overrides, f"mixed_precision.recipe='{quoted}'"]
        tuned, content = tune(
            ConfigContainer.load(find_config(args.config), settings, check=False), say=lambda text: None
        )
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
    result.suggestion = ["suggestion: none, since no recipe that ran can be tuned (quantized, without delayed scaling)"]


def _write(result: Rehearsal, folder: Path) -> Path:
    """Writes report.json, then index.html in `folder`. Returns the page's path."""
    from mpbridge.common.files import write
    from mpbridge.training.rehearse.page import page

    folder.mkdir(parents=True, exist_ok=True)
    result.write(folder / "report.json")
    path = folder / "index.html"
    write(path, page(result))
    return path
