"""`mpbridge resume-check CKPT --recipe NAME`: tells whether and how a run with that recipe resumes from a checkpoint. Loads no framework, reads no tensor."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from mpbridge.cli.text import print_json, print_line
from mpbridge.common.traits import DEFAULT, engine_names
from mpbridge.precision.papers import engine_for
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.training.checkpoint.store import check, locate, step_of
from mpbridge.training.checkpoint.verdict import Fingerprint, Verdict, read_fingerprint, verdict

SUMMARY = "check whether and how a run resumes from a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or a folder of them (uses the latest)"
    )
    parser.add_argument("--recipe", metavar="NAME", help="the recipe to resume with (default: the checkpoint's own)")
    parser.add_argument("--engine", choices=engine_names(), help="default: the recipe's, else the checkpoint's")
    parser.add_argument("--reset-optimizer", action="store_true", help="accept loading only the weights")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the verdict. Returns 0 if the run resumes, 1 if it does not, or only with the weights and that was not requested."""
    folder = locate(args.checkpoint)
    step_of(folder)
    check(folder, sums=False)
    saved = read_fingerprint(folder)
    wanted = wanted_fingerprint(saved, args.recipe, args.engine)
    found = verdict(saved, wanted)
    if args.reset_optimizer and found.goes_on:
        found = found.without_states("it was requested (--reset-optimizer)")
    if args.json:
        print_json({"checkpoint": str(folder), "from": saved.recipe, "to": wanted.recipe} | dataclasses.asdict(found))
    else:
        # the run must set it, since the default is mcore
        engine = "" if wanted.engine == DEFAULT else f" with engine={wanted.engine}"
        print_line(f"{folder}: {saved.recipe} -> {wanted.recipe}{engine}: " + "\n".join(found.lines()))
    return exit_code(found, reset=args.reset_optimizer)


def exit_code(found: Verdict, *, reset: bool) -> int:
    """0 if the run resumes, else 1."""
    return 0 if found.goes_on or (found.kind == "weights only" and reset) else 1


def wanted_fingerprint(saved: Fingerprint, recipe: str | None, engine: str | None) -> Fingerprint:
    """The run that `saved` came from, with another recipe or engine. Raises UnknownName, RecipeError or Contradiction."""
    if recipe is None:
        return saved.with_policy(saved.policy, saved.recipe, engine)
    policy = resolve(get_mixed_precision_config(recipe), layers=int(saved.shape["num_layers"]))
    meant_for = describe(recipe).prefers or engine_for(policy)
    return saved.with_policy(policy, describe(recipe).name, engine or meant_for)
