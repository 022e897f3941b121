"""`mpbridge resume-check CKPT`: tells whether and how a run resumes from a checkpoint, with the words that it needs. Loads no framework, reads no tensor."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from mpbridge.cli.options import JSON, RUN_HERE, arg, container
from mpbridge.cli.text import answer, print_line
from mpbridge.common.traits import DEFAULT
from mpbridge.precision.globs import ADAPTERS
from mpbridge.precision.recipe import engine_for
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import Run
from mpbridge.training.checkpoint import continuation
from mpbridge.training.checkpoint.format import STATE
from mpbridge.training.checkpoint.store import check, locate, step_of
from mpbridge.training.checkpoint.verdict import Fingerprint, Verdict, read_fingerprint, verdict

SUMMARY = "check whether and how a run resumes from a checkpoint, and which words it needs"
ARGUMENTS = (
    arg("checkpoint CKPT", "a checkpoint, or a folder of them (uses the latest)", Path),
    *RUN_HERE,
    arg("--reset-optimizer", "accept loading only the weights"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the verdict. Returns 0 if the run resumes, 1 if it does not, needs a word of consent, or loads only weights and that was not requested."""
    folder = locate(args.checkpoint)
    step = step_of(folder)
    manifest = check(folder, sums=False)
    saved = read_fingerprint(folder)
    if STATE in manifest["files"]:
        continuation.saved_schedule(folder)  # a damaged one is said here, not when the job starts
    made = _run(args, folder, saved)
    wanted = wanted_fingerprint(saved, args.recipe, args.engine) if made is None else continuation.of_run(made)
    found = verdict(saved, wanted)
    if args.reset_optimizer and found.goes_on:
        found = found.without_states("it was requested (--reset-optimizer)")
    needs: list[str] = []
    if found.goes_on and not args.reset_optimizer:
        text = continuation.differ(saved, wanted)
        needs = [f"checkpoint.accept={saved.recipe}: {text}"] if text else []
        needs = needs if made is None else continuation.faults(made, folder)
    # the run must set it, since the default is mcore
    engine = "" if wanted.engine == DEFAULT else f" with engine={wanted.engine}"
    line = f"{folder}: {saved.recipe} -> {wanted.recipe}{engine}: " + "\n".join(found.lines())
    data = {"checkpoint": str(folder), "step": step, "from": saved.recipe, "to": wanted.recipe}
    data |= dataclasses.asdict(found) | {"needs": needs}
    answer(args, data, lambda: print_line(line, *(f"  needs a word: {text}" for text in needs)))
    return exit_code(found, reset=args.reset_optimizer) or int(bool(needs))


def exit_code(found: Verdict, *, reset: bool) -> int:
    """0 if the run resumes, else 1."""
    return 0 if found.goes_on or (found.kind == "weights only" and reset) else 1


def _run(args: argparse.Namespace, folder: Path, saved: Fingerprint) -> Run | None:
    """The run that --config and the settings describe; settings alone change the checkpoint's own run; None: neither was given."""
    if args.config is None and not args.overrides:
        return None
    if args.config is None:
        args.config = str(folder / "config.yaml")
    box = container(args)
    world, least = int(saved.parallel.get("world_size") or 1), box.smallest_world()
    return box.resolved(world if world % least == 0 else least, training=False)


def wanted_fingerprint(saved: Fingerprint, recipe: str | None, engine: str | None) -> Fingerprint:
    """The run that `saved` came from, with another recipe or engine. Raises UnknownName, RecipeError or Contradiction."""
    if recipe is None:
        return saved.with_policy(saved.policy, saved.recipe, engine)
    config = get_mixed_precision_config(recipe)
    # as `with_recipe`: what trains stays, unless the recipe says otherwise
    keeps = {
        "frozen": saved.policy.frozen,
        "lora_dtype": "fp32" if {*ADAPTERS} <= {*saved.policy.keep_fp32} else None,
    }
    config = config.derive(**{name: value for name, value in keeps.items() if value and name not in config.given()})
    policy = resolve(config, layers=int(saved.shape["num_layers"]))
    meant_for = describe(recipe).prefers or engine_for(policy)
    return saved.with_policy(policy, describe(recipe).name, engine or meant_for)
