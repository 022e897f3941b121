"""Other projects' trainers under a witness, the real packages: what each word means there, from live tensors, beside the table of words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.worlds import ROOT

PACKAGES = {
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
}
CASES = {"transformers": 2, "accelerate": 2, "lightning": 4, "deepspeed": 2}
"""How many rows of the table each stack's loop shows at least."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stack", PACKAGES)
@pytest.mark.timeout(600)
def test_what_a_stack_does_is_what_the_table_of_words_says(stack: str, size: int) -> None:
    for package in PACKAGES[stack]:
        pytest.importorskip(package, reason=f"{package} is not installed: its own loop is what this runs")
    if stack == "deepspeed" and size == 1:
        pytest.skip("DeepSpeed's ZeRO divides nothing in one process")
    import os

    alone = [sys.executable, str(ROOT / "scripts" / "witness_stacks.py"), "--only", stack]
    world = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *alone[1:]]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        world if size > 1 else alone,
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) >= CASES[stack], done.stdout
    assert not any(line.startswith("NO ") for line in lines)
