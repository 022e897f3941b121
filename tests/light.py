"""What a fresh interpreter has loaded: nothing heavy, where a command or a module only thinks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.forked import ROOT

HEAVY = ("torch", "megatron", "transformer_engine", "numpy", "matplotlib")


def loaded_by(code: str, heavy: Iterable[str] = HEAVY, cwd: Path = ROOT) -> list[str]:
    """Which of `heavy` a fresh interpreter has loaded after `code`, which finds the checkout and must not fail."""
    text = f"import sys\n{code}\nprint(*sorted({{*{tuple(heavy)!r}}} & set(sys.modules)), file=sys.stderr)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()
