"""Where Transformer Engine's wheels lie for these tests: what MPBRIDGE_TE_PATH names, and the folders that scripts/test.sh makes in .te."""

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.transformer_engine import INSTALL, VARIABLE, Package, choose, packages

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "2.11", "2.20"
NEEDS = ("pydantic", "importlib_metadata", "onnx", "onnxscript")
"""What the wheel imports and does not bring (pyproject's extra te-needs)."""
FOLDERS = tuple(sorted(str(folder) for folder in ROOT.glob(".te/*") if folder.is_dir()))


def environment() -> dict[str, str]:
    """For a process in which Transformer Engine is to be played; this one stays without."""
    path = [part for part in (os.environ.get(VARIABLE, ""), *FOLDERS) if part]
    return {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: os.pathsep.join(path)}


def ran(*command: str, cwd: Path = ROOT, timeout: float = 840, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a Python with these arguments said, in a process that can play. variables: of its environment, beside PYTHONPATH, where the checkout is first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=cwd, env=environment() | {"PYTHONPATH": path} | variables,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def release_or_skip(te: str) -> str:
    """The release, or a skip that says how to install it."""
    try:
        choose(te, FOLDERS)
    except MpbridgeError as error:
        if te in [Path(folder).name for folder in FOLDERS]:  # it is there: not this machine's fault
            raise
        pytest.skip(
            f"{error} (scripts/test.sh puts {OLDEST} and {NEWEST} into .te; otherwise {INSTALL}, or pip install --target and {VARIABLE})"
        )
    places = [*sys.path, *environment()[VARIABLE].split(os.pathsep)]
    missing = [name for name in NEEDS if PathFinder.find_spec(name, places) is None]
    if missing:
        pytest.skip(f"Transformer Engine's Python imports {', '.join(missing)}: pip install -e '.[te-needs]'")
    return te


def between() -> list[Package]:
    """The other releases that are there."""
    known = [tuple(map(int, te.split("."))) for te in (OLDEST, NEWEST)]
    return [package for package in packages(FOLDERS) if package.release[:2] not in known]
