"""The planted runs of scripts/evidence/planted.py: real trainings whose cause is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT, python

SCRIPT = str(ROOT / "scripts" / "evidence" / "planted.py")


def planted(*arguments: str) -> str:
    done = python([SCRIPT, *arguments], timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_causes_are_named_first_and_healthy_runs_are_not_accused(tmp_path: Path) -> None:
    planted("make", str(tmp_path / "runs"))
    said = planted("judge", str(tmp_path / "runs"))
    found = re.search(r"healthy runs accused: 0 of (\d+)", said)
    assert found is not None
    assert int(found[1]) == 24, "those that spike of their own accord are healthy too"
    named = re.search(r"named first: (\d+) of (\d+)", said)
    assert named is not None
    # the third change of recipe leaves so much range that whether anything suffers depends on the machine's arithmetic
    assert int(named[1]) >= 38, said[-3000:]
    assert int(named[2]) == 39


def test_one_planted_cause_and_one_healthy_run(tmp_path: Path) -> None:
    chosen = ["make", str(tmp_path / "runs"), "--kinds", "outlier-channel", "--seeds", "1", "--healthy", "1"]
    planted(*chosen)
    said = planted("judge", str(tmp_path / "runs"))
    assert "named first: 1 of 1" in said
    assert "healthy runs accused: 0 of 1" in said
