"""`mpbridge on-cpu --target GPU SCRIPT ARGS`: runs a CUDA-only training script on a CPU, with Transformer Engine's own Python."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from mpbridge.cli.options import arg
from mpbridge.common.errors import BadValue

SUMMARY = "run a CUDA-only script on the CPU, simulating a GPU"
ARGUMENTS = (
    arg("--target GPU", "the machine to simulate (default: h100)", default="h100"),
    arg("--te X.Y", "the Transformer Engine release (default: the installed one)"),
    arg("-m MODULE", "a module in the place of the script, as python -m runs it", nargs="..."),
    arg("command SCRIPT ARGS", "the script and its own arguments", nargs="..."),
)


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
