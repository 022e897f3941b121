"""Worlds of several processes on this machine: a script under torchrun, everything that its ranks said shown when one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def start(size: int, script: str, *arguments: str, timeout: float = 280.0, expect: int = 0) -> str:
    """What `size` processes running `script` printed; the test fails where the exit status is not the expected one."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        script,
        *arguments,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == expect, done.stdout[-6000:] + done.stderr[-8000:]
    return done.stdout


def reported(size: int, script: str, out: Path, *arguments: str, timeout: float = 280.0) -> Any:
    """What rank 0 of such a world left as JSON in `out`, the script's first argument."""
    start(size, script, str(out), *arguments, timeout=timeout)
    return json.loads(out.read_text())
