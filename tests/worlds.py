"""Worlds of several processes on this machine, everything that their ranks said shown when one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked import ROOT, python


def start(
    size: int, script: str, *arguments: str, timeout: float = 840.0, expect: int = 0, imported: bool = True
) -> str:
    """What `size` processes running `script` printed; the test fails where the exit status is not the expected one. imported: False for a script that has to
    come before megatron-core's import: torchrun starts it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if imported:
        done = python([script, *arguments], size=size, env=environment, timeout=timeout)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", script]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment |= {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    assert done.returncode == expect, done.stdout[-6000:] + done.stderr[-8000:]
    return done.stdout


def reported(size: int, script: str, out: Path, *arguments: str, timeout: float = 840.0) -> Any:
    """What rank 0 of such a world left as JSON in `out`, the script's first argument."""
    start(size, script, str(out), *arguments, timeout=timeout)
    return json.loads(out.read_text())


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of one, and none of megatron-core's parallel state behind it: for loops that set that up themselves."""
    from megatron.core import parallel_state

    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    mine = start_process_group(False)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if mine:
            stop_process_group()


COUNTED = """
calls = []
def counted(name):
    real = getattr(dist, name)
    def call(*args, **kwargs):
        out = args[0] if isinstance(args[0], list) else [args[0]]
        calls.append((name, sum(one.numel() * one.element_size() for one in out if isinstance(one, torch.Tensor))))
        return real(*args, **kwargs)
    setattr(dist, name, call)
for name in ("all_gather", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "all_gather_into_tensor"):
    counted(name)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(sys.argv[1]))
"""
"""Of a script that has imported dist, sys, torch and FakeStore: a fake world of as many ranks as it is told; `calls`: (collective, bytes that rank 0 gets)."""
