"""SIGKILL at random moments: scripts/kill_loop.py with few kills here, fifty in the slow suite."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.forked import forked

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_loop.py"


def loop(kills, room):
    spec = importlib.util.spec_from_file_location("kill_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print("figures", json.dumps(module.survive(kills, steps=12 if kills < 20 else 40, room=room)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the loop forks its runs")
@pytest.mark.parametrize(
    "kills",
    [pytest.param(6, id="six"), pytest.param(50, id="fifty", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_no_kill_loses_anything(tmp_path, kills):
    # not from this process: forking one that has trained would hand its threads' locks on
    with forked(loop, kills, tmp_path) as process:
        assert process.wait(240 if kills < 20 else 1700) == 0, process.text
    figures = json.loads(process.text.rpartition("figures ")[2])
    assert figures["kills"] == kills
    assert figures["runs_completed"] >= 1
    assert figures["lost"] == 0
    assert not list(tmp_path.iterdir())
