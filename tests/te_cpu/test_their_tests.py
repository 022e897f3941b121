"""`scripts/te_tests.py`, which runs Transformer Engine's own tests from a clone, on a clone made up here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.te_cpu.wheels import OLDEST, ROOT, environment, release_or_skip

MADE_UP = """
import os, signal
import pytest

@pytest.mark.parametrize("number", range(5))
def test_numbers(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert number != 4

@pytest.mark.parametrize("number", range(3))
def test_what_another_left_behind(number):
    from transformer_engine.pytorch import distributed
    assert distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE
    distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = False
"""


def test_a_killed_process_fails_one_test_and_no_test_sees_what_another_left_behind(tmp_path: Path) -> None:
    te = release_or_skip(OLDEST)
    tests = tmp_path / "clone/tests/pytorch"
    tests.mkdir(parents=True)
    (tests / "test_recipe.py").write_text(MADE_UP, encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts/te_tests.py"), str(tmp_path / "clone"), "test_recipe.py", "--te", te]
    command += ["--store", str(tmp_path / "store"), "--minutes", "1", "--least", "8", "--each", "60"]
    command += ["--again", "failed", "--show", "5"]  # does not try the killed one for ever
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| test_recipe | B200 | 8 | 8 | 6 | 2 | 0 |" in done.stdout
    assert "signal 9 killed the process" in done.stderr
    assert "assert 4 != 4" in done.stderr
