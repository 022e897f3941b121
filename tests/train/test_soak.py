"""Two processes, saves, audits and faults of every kind at random: scripts/soak.py with few steps here, two thousand in the slow suite."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.forked import forked

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


def soak(steps, faults, interval, room):
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print("figures", json.dumps(module.soak(steps, faults, interval=interval, seed=3, room=room)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the run's processes are forked")
@pytest.mark.timeout(7500)
@pytest.mark.parametrize(
    ("steps", "faults", "interval", "seconds"),
    [
        pytest.param(24, 2, 4, 600, id="twenty-four"),
        pytest.param(2000, 40, 10, 7200, id="two thousand", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_and_nothing_grows(tmp_path, steps, faults, interval, seconds):
    with forked(soak, steps, faults, interval, tmp_path) as process:
        assert process.wait(seconds) == 0, process.text
    figures = json.loads(process.text.rpartition("figures ")[2])
    print(json.dumps(figures))
    assert sum(figures["faults"].values()) == faults
    assert figures["lost"] == 0
    for rank in figures["flat"]:
        assert rank["threads"] <= 1.0
        assert rank["descriptors"] <= 1.0
        assert rank["memory"] < 1.1
    assert not list(tmp_path.iterdir())
