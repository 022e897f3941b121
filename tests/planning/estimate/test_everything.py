"""Every shipped configuration, under every recipe, on every machine of the table: an answer, or a refusal in words."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.machines import machines
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.estimate.constants import constants
from mpbridge.planning.estimate.predict import estimate
from mpbridge.planning.memory.by_role import memory
from mpbridge.precision.registry import recipes
from mpbridge.precision.scalings import SCALINGS
from mpbridge.settings.container import ConfigContainer

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[3] / "configs").glob("*.yaml"))
SMALL = "moe_tiny"
"""It has dense layers and experts; the other configurations are slow."""


def answers(config, recipe, machine):
    """(seconds, bytes) or the words of a refusal."""
    base = ConfigContainer.load(f"configs/{config}.yaml", [], check=False)
    box = dataclasses.replace(base, mixed_precision=recipe, engine=recipes[recipe].engine)
    try:
        run = box.resolved(base.smallest_world(), machine=machine, versions=ASSUMED, training=False)
        facts = dataclasses.replace(run.facts, environment={})
        held = memory(run.policy, facts)
        return estimate(run.policy, facts), held
    except MpbridgeError as error:
        return str(error)


@pytest.mark.parametrize("config", [SMALL, *(pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS if n != SMALL)])
def test_every_recipe_on_every_machine_is_answered_or_refused_in_words(config):
    priced = set()
    for name, machine in machines.items():
        for recipe in recipes:
            found = answers(config, recipe, machine)
            if isinstance(found, str):
                assert len(found) > 20, (recipe, name, found)
                continue
            one, held = found
            assert 0 < one.seconds < math.inf, (recipe, name)
            assert math.isclose(sum(one.parts.values()), one.seconds)
            assert held.total > held.states > 0
            priced.add((recipe, name))
    assert {machine for _, machine in priced} == {name for name, machine in machines.items() if machine.peak}
    # 14 and 16 layers in BF16: nothing is left of the small models
    assert all(name.startswith("nemotron_3_") for name in set(recipes) - {recipe for recipe, _ in priced})


def test_products_of_every_scaling_have_a_constant():
    for name in SCALINGS:
        assert constants().of(f"gemm_{name}") > 1
