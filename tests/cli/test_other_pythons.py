"""What needs no framework, under each other Python of this machine: the same words, and no warning."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.evidence.matrix import interpreter

ROOT = Path(__file__).resolve().parents[2]
OTHERS = tuple(version for version in ("3.11", "3.12", "3.13") if version != f"3.{sys.version_info.minor}")
H100 = ("--recipe", "fp8_cs", "--target", "h100")
ASKED = (
    ("list",), ("show", "nvfp4"), ("plan", "--recipe", "mxfp8"), ("check", "--config", "llama3_8b", *H100),
    ("memory", "--config", "llama3_70b", *H100), ("export", "fp8_cs", "--to", "megatron-lm"),
)  # fmt: skip


@functools.cache
def said(python: str, words: tuple[str, ...]) -> tuple[int, str, str]:
    # pure Python packages are for every version, and the parts of them that are compiled for one have a replacement in Python
    path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-W", "error", "-m", "mpbridge", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    return done.returncode, done.stdout, done.stderr


# the oldest and the newest; 3.12 lies between them
@pytest.mark.parametrize("version", [pytest.param(one, marks=[pytest.mark.slow] * (one == "3.12")) for one in OTHERS])
def test_another_python_says_the_same(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    for words in ASKED:
        assert said(python, words) == said(sys.executable, words)
