"""`mpbridge train`: pretrains, in one process or as many as torchrun started."""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mpbridge.cli.options import RUN_HERE, arg, resolved
from mpbridge.cli.text import complain
from mpbridge.common.errors import BadValue, Conflict

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

SUMMARY = "pretrain a GPT with a recipe"
STOPPED = 3
"""Exit code of a run that stopped early: `train && evaluate` does not continue, and a scheduler may restart it."""
ARGUMENTS = (
    *RUN_HERE,
    arg("--audit", "what to do if the live tensors are not as the recipe promises", ("stop", "warn")),
    arg("--reset-optimizer", "load only the weights; optimizer states start fresh"),
    arg("--target GPU", "with --emulate te: the machine to simulate (default: h100)"),
    arg("--deterministic", "bit-identical losses in every run, at some cost in speed"),
    arg("--on-conflict", "error: refuse if the recipe overrides a given value", ("warn", "error"), default="warn"),
)


def run(args: argparse.Namespace) -> int:
    """Trains. Returns 0 if the run is complete, 3 if it stopped early and can be resumed. Faults are reported before torch is imported."""
    from mpbridge.common.probe import this_machine
    from mpbridge.training.admission import Admission

    if args.audit:
        args.overrides = [*args.overrides, f"train.audit={args.audit}"]
    for given, setting in (
        (args.reset_optimizer, "checkpoint.reset_optimizer=true"),
        (args.deterministic, "train.deterministic=true"),
    ):
        args.overrides = [*args.overrides, *([setting] if given else [])]
    world = _world_size()
    # with several processes, rank 0 checks once it can tell the others (train.loop)
    made = resolved(
        args, training=True, world_size=world, machine=this_machine(), also=Admission() if world == 1 else None
    )
    with _stage(made):
        return _train(args, made)


def _stage(run: Run) -> AbstractContextManager[Any]:
    """With `--emulate te`: simulates that machine from now on."""
    if run.played is None:
        return nullcontext()
    from mpbridge.te_cpu.context import stage_of

    return stage_of(run)


def _train(args: argparse.Namespace, made: Run) -> int:
    if args.on_conflict == "error" and made.plan.conflicts:
        raise Conflict(
            "\n".join(["the recipe overrides what was set:", *(f"  - {write}" for write in made.plan.conflicts)])
        )
    from mpbridge.planning.rules.table import require_here

    if len(made.stages) == 1:  # with several stages, only the checkpoint determines which recipe is next
        require_here(made.policy, made.facts)
    from mpbridge.settings.training import train_iters
    from mpbridge.training.loop import pretrain

    done = pretrain(made)
    if done.stopped is not None and done.iterations < train_iters(made.train):
        return STOPPED
    if done.iterations and not done.applied:
        complain(f"0 of {done.iterations} steps were applied: nothing was trained")
        return 1
    return 0


def _world_size() -> int:
    """The world size from torchrun; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise BadValue(f"WORLD_SIZE={text!r} in the environment: expected the number of processes, as torchrun sets it")
    return int(text)
