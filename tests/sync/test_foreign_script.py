"""plan and apply inside somebody else's training script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("foreign_script.py")


def ran(recipe: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), recipe], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize(
    ("recipe", "dtype", "skips"),
    [("fp32", "float32", False), ("bf16_mixed", "bfloat16", False), ("fp16_mixed", "float16", True)],
)
def test_a_foreign_loop_trains_in_the_recipes_precision(recipe: str, dtype: str, skips: bool) -> None:
    done = ran(recipe)
    assert done.returncode == 0, done.stderr
    found, first, last, skipped = done.stdout.split()[-4:]
    assert found == dtype
    assert float(last) < 0.5 * float(first)
    # from 2**32 the first FP16 steps overflow: they are skipped, and the author's fatal NaN check is out of the way
    assert (int(skipped) > 0) is skips
    assert int(skipped) < 25


def test_a_quantized_recipe_never_trains_as_bf16_there() -> None:
    done = ran("bf16_with_fp8_current_scaling_mixed")
    assert done.returncode != 0
    assert "mpbridge.errors.Refused" in done.stderr
    assert "cannot run this recipe" in done.stderr
