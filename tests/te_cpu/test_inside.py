"""Transformer Engine's own Python over our kernels, release by release and machine by machine, each in a process of its own:

megatron-core decides at import whether there is a Transformer Engine, and keeps its classes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpbridge.errors import MpbridgeError
from mpbridge.hardware.transformer_engine import INSTALL, choose, packages

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "2.11", "2.20"


def release_or_skip(te: str) -> str:
    """The release, or a skip that says how to install it."""
    try:
        choose(te)
    except MpbridgeError as error:
        pytest.skip(f"{error} ({INSTALL}; other releases by pip install --target, MPBRIDGE_TE_PATH)")
    return te


def inside(te: str, machine: str, *files: str, options: tuple[str, ...] = ()) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-p",
        "mpbridge.te_cpu.pytest_plugin",
    ]
    command += [
        "--played",
        machine,
        "--te",
        te,
        *options,
        *(str(ROOT / "tests/te_cpu/inside" / file) for file in files),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("te", [OLDEST, NEWEST])
def test_kernels_and_layers_on_a_hopper(te: str) -> None:
    inside(release_or_skip(te), "h100", "kernels.py", "hopper.py")


@pytest.mark.parametrize("te", [OLDEST, NEWEST])
def test_kernels_and_layers_on_a_blackwell(te: str) -> None:
    inside(release_or_skip(te), "b200", "kernels.py", "blackwell.py")


@pytest.mark.parametrize("machine", ["h100", "b200"])
def test_runs_of_the_engine(machine: str) -> None:
    inside(release_or_skip(OLDEST), machine, "training.py")


def test_what_is_redirected_is_given_back() -> None:
    te = release_or_skip(OLDEST)
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/te_cpu/inside/given_back.py"), te]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("given back")


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", [p for p in packages() if p.release[:2] not in ((2, 11), (2, 20))], ids=lambda package: package.version
)
@pytest.mark.parametrize("machine", ["h100", "b200"])
def test_every_release_between(package, machine: str) -> None:
    inside(package.version, machine, "kernels.py", {"h100": "hopper.py", "b200": "blackwell.py"}[machine])
