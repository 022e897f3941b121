"""`mpbridge train`: pretrains, in one process or as many as torchrun started."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mpbridge.cli.options import RUN_HERE, arg, resolved
from mpbridge.common.errors import BadValue, Conflict
from mpbridge.common.probe import this_machine
from mpbridge.common.report.console import warn
from mpbridge.planning.rules.table import require_here
from mpbridge.settings.container import Run
from mpbridge.settings.training import train_iters
from mpbridge.training.admission import Admission

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
    asked = {f"train.audit={args.audit}": args.audit, "checkpoint.reset_optimizer=true": args.reset_optimizer}
    asked["train.deterministic=true"] = args.deterministic
    args.overrides = [*args.overrides, *(setting for setting, given in asked.items() if given)]
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise BadValue(f"WORLD_SIZE={text!r} in the environment: expected the number of processes, as torchrun sets it")
    world = int(text)
    # with several processes, rank 0 checks once it can tell the others (train.loop)
    also = Admission() if world == 1 else None
    made = resolved(args, training=True, world_size=world, machine=this_machine(), also=also)
    with _stage(made):
        return _train(args, made)


def _stage(run: Run) -> AbstractContextManager[Any]:
    """With `--emulate te`: simulates that machine from now on."""
    if run.played is None:
        return nullcontext()
    from mpbridge.te_cpu.context import stage_of

    return stage_of(run)


def _train(args: argparse.Namespace, made: Run) -> int:
    overridden = dict.fromkeys(str(write) for one in made.by_stage() for write in one.plan.conflicts)
    if args.on_conflict == "error" and overridden:
        lines = [f"  - {write}" for write in overridden]
        raise Conflict("\n".join(["the recipe overrides what was set:", *lines]))
    if len(made.stages) == 1:  # with several stages, only the checkpoint determines which recipe is next
        require_here(made.policy, made.facts)
    from mpbridge.training.loop import pretrain

    done = pretrain(made)
    if done.stopped is not None and done.iterations < train_iters(made.train):
        return STOPPED
    if done.iterations and not done.applied:
        warn(f"0 of {done.iterations} steps were applied: nothing was trained")
        return 1
    return 0


class OnCpuVerb:
    """`mpbridge on-cpu --target GPU SCRIPT ARGS`: runs a CUDA-only training script on a CPU, with Transformer Engine's own Python."""

    SUMMARY = "run a CUDA-only script on the CPU, simulating a GPU"
    ARGUMENTS = (
        arg("--target GPU", "the machine to simulate (default: h100)", default="h100"),
        arg("--te X.Y", "the Transformer Engine release (default: the installed one)"),
        arg("-m MODULE", "a module in the place of the script, as python -m runs it", nargs="..."),
        arg("command SCRIPT ARGS", "the script and its own arguments", nargs="..."),
    )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Runs the script and returns its exit code. Under torchrun: torchrun ... -m mpbridge on-cpu SCRIPT ARGS."""
        by_module = args.m is not None
        command = list(args.m if by_module else args.command)
        if not command:
            raise BadValue("on-cpu: the script is missing (mpbridge on-cpu --target h100 pretrain_gpt.py ...)")
        script = command[0]
        if not by_module and not Path(script).is_file():
            raise BadValue(f"{script}: no such file (expected a Python script, or -m and a module name)")
        from mpbridge.te_cpu.context import transformer_engine_on_cpu
        from mpbridge.te_cpu.foreign import foreign_code

        before = list(sys.argv), list(sys.path)
        with transformer_engine_on_cpu(args.target, te=args.te), foreign_code():
            sys.argv = command
            try:
                if by_module:
                    sys.path.insert(0, str(Path.cwd()))  # as python -m puts it
                    runpy.run_module(script, run_name="__main__", alter_sys=True)
                else:
                    # the script's folder comes first, as python puts it
                    sys.path.insert(0, str(Path(script).resolve().parent))
                    runpy.run_path(script, run_name="__main__")
            finally:
                sys.argv, sys.path[:] = before
        return 0
