"""Other projects' trainers under a witness, the real packages: what each word means there, from live tensors, beside the table of words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked import ROOT, python

PACKAGES = {
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
    "megatron-lm": (),
    "torchtitan": ("spmd_types", "tyro"),
    "automodel": ("transformers",),
}
CASES = {
    "transformers": 2, "accelerate": 4, "lightning": 5, "deepspeed": 4, "megatron-lm": 4, "torchtitan": 2, "automodel": 2
}  # fmt: skip
"""How many rows of the table each stack's loop shows at least."""
CHECKOUTS = {"torchtitan": "torchtitan", "automodel": "Automodel"}
"""Stack -> folder of its clone: no package of it is on PyPI that would do."""
SHARDED = ("deepspeed", "megatron-lm", "torchtitan", "automodel")
"""Shown in two processes only; megatron-core's objects in one process have tests of their own."""


@pytest.mark.parametrize(
    ("stack", "size"), [(stack, size) for stack in PACKAGES for size in (1, 2) if size == 2 or stack not in SHARDED]
)
@pytest.mark.timeout(600)
def test_what_a_stack_does_is_what_the_table_of_words_says(stack: str, size: int, tmp_path: Path) -> None:
    for package in PACKAGES[stack]:
        pytest.importorskip(package, reason=f"{package} is not installed: its own loop is what this runs")
    checkouts = os.environ.get("MPBRIDGE_CHECKOUTS", "")
    if stack in CHECKOUTS and not (checkouts and Path(checkouts, CHECKOUTS[stack]).is_dir()):
        pytest.skip(
            f"its own code is what this runs: MPBRIDGE_CHECKOUTS=FOLDER that holds a clone of {CHECKOUTS[stack]}"
        )
    done = python(
        [str(ROOT / "scripts" / "evidence" / "witness_stacks.py"), "--only", stack],
        size=size if size > 1 else 0,
        # a run of DeepSpeed's that was killed leaves the lock of an extension behind, and every later one would wait for it
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) >= CASES[stack], done.stdout
    assert not any(line.startswith("NO ") for line in lines)
