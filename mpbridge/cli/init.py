"""`mpbridge init [DIR]`: a folder with what a first run of one's own needs: configuration, recipe, script, and the commands."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mpbridge.cli import _starter
from mpbridge.cli.options import DEFAULT_CONFIG, find_config
from mpbridge.errors import BadValue
from mpbridge.precision.registry import describe, get_mixed_precision_config

SUMMARY = "a starter folder: a configuration, a recipe, a script of your own, and the commands"
DEFAULT_RECIPE = "bf16_mixed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("folder", nargs="?", default=".", metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--config", metavar="FILE", help=f"what to start from (default: {DEFAULT_CONFIG})")
    parser.add_argument(
        "--recipe", default=DEFAULT_RECIPE, metavar="NAME", help=f"what recipe.yaml extends (default: {DEFAULT_RECIPE})"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the files; refuses where one of them exists, and then writes none."""
    folder = Path(args.folder)
    get_mixed_precision_config(args.recipe)  # a misspelled name is an error before anything is written
    files = starter(find_config(args.config).read_text(encoding="utf-8"), describe(args.recipe).name)
    taken = [str(folder / name) for name in files if (folder / name).exists()]
    if taken:
        raise BadValue(
            f"{', '.join(taken)} exist already and are left alone: choose an empty folder (mpbridge init DIR)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}  {_starter.WHAT[name]}")
    go = "" if folder == Path(".") else f"cd {folder} && "
    print(f"\nnext: {go}mpbridge check --config config.yaml && mpbridge train --config config.yaml")
    return 0


def starter(config: str, recipe: str) -> dict[str, str]:
    """File name -> text. config: a configuration's text, whose recipe becomes the folder's own."""
    line = "mixed_precision: recipe.yaml"
    config, found = re.subn(r"^mixed_precision:.*$", line, config, count=1, flags=re.MULTILINE)
    config = config if found else f"{line}\n{config}"
    missing = [text for name, text in _starter.SECTIONS.items() if not re.search(rf"^{name}:", config, re.MULTILINE)]
    return {
        "config.yaml": "\n".join([config.rstrip(), *missing]) + "\n",
        "recipe.yaml": _starter.RECIPE.format(recipe=recipe),
        "train.py": _starter.SCRIPT,
        "README.md": _starter.README,
    }
