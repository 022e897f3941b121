"""SIGKILL at random moments, and two processes with saves, audits and faults of every kind: scripts/evidence/kill_loop.py and soak.py, short here, long in the slow suite."""

from __future__ import annotations

import json
import os

import pytest

from tests.forked import forked
from tests.scripts import loaded

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")


def figures(name, function, arguments, settings, seconds):
    """What a script's function returns, called in a process of its own: forking one that has trained would hand its threads' locks on."""
    with forked(_called, name, function, arguments, settings) as process:
        assert process.wait(seconds) == 0, process.text
    return json.loads(process.text.rpartition("figures ")[2])


def _called(name, function, arguments, settings):
    print("figures", json.dumps(getattr(loaded(f"evidence/{name}"), function)(*arguments, **settings)))


@pytest.mark.parametrize(
    ("kills", "steps"), [(3, 6), pytest.param(50, 40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_no_kill_loses_anything(tmp_path, kills, steps):
    found = figures("kill_loop", "survive", (kills,), {"steps": steps, "room": tmp_path}, 240 if kills < 20 else 1700)
    assert (found["kills"], found["lost"]) == (kills, 0)
    assert found["runs_completed"] >= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(7500)
@pytest.mark.parametrize(
    ("steps", "faults", "interval", "seconds"),
    [(24, 2, 4, 600), pytest.param(2000, 40, 10, 7200, marks=pytest.mark.slow)],
)
def test_nothing_is_lost_and_nothing_grows(tmp_path, steps, faults, interval, seconds):
    found = figures("soak", "soak", (steps, faults), {"interval": interval, "seed": 3, "room": tmp_path}, seconds)
    assert sum(found["faults"].values()) == faults
    assert found["lost"] == 0
    for rank in found["flat"]:
        # what happens to be open at the moment of counting is no leak; one descriptor of about 40 in every third step would be 1.1
        assert max(rank["threads"], rank["descriptors"]) < 1.1
        assert rank["memory"] < 1.1
    assert not list(tmp_path.iterdir())
