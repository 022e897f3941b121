"""Mutated configurations: each ends in an answer or in one of our own exceptions, from loading to rules, sizes and memory."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import yaml

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import Versions
from mpbridge.common.machines import machine, machines
from mpbridge.planning.memory.by_role import fit, memory
from mpbridge.planning.rules.gemm_shapes import lint, token_multiple
from mpbridge.planning.rules.table import broken
from mpbridge.precision.registry import recipes
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.schema import SECTIONS, settings

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
NOW = Versions(torch="2.11.0", megatron_core="0.16.1", transformer_engine="2.11.0", cuda="12.9")
ODD = [
    0, 1, -1, 3, 7, 10**9, 2.5, -0.1, 1e30, float("nan"), float("inf"), "", "bf16", "fp8", "nonsense", "null", True, False, None, [], [1, 2], {}, {"a": 1},
    "1e-3", "ä", 0.0, 65, 2**40,
]  # fmt: skip
PRECISION = [
    "fp8", "fp4", "fp8_recipe", "fp8_param_gather", "first_last_layers_bf16", "num_layers_at_end_in_bf16", "keep_fp32", "modules", "loss_scale", "exp_avg_dtype",
    "params_dtype", "bf16", "fp16",
]  # fmt: skip


def places(tree, path=()):
    """Every (path) of a nested mapping."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def odd(rng):
    # a container that later changes would reach inside ODD itself: other mutations would depend on this one, and a tree could hold itself
    return copy.deepcopy(rng.choice(ODD))


def mutate(rng, tree):
    """One to four random changes: a value replaced or multiplied, a key removed or renamed, any known setting given any value, another recipe."""
    for _ in range(rng.randint(1, 4)):
        path = rng.choice(list(places(tree)))
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        if path[-1] not in parent:
            continue
        kind = rng.randrange(9)
        if kind <= 2:
            parent[path[-1]] = odd(rng)
        elif kind == 3:
            del parent[path[-1]]
        elif kind == 4:
            name = str(path[-1])
            at = rng.randrange(max(1, len(name)))
            parent[name[:at] + rng.choice("abxz_") + name[at + 1 :]] = parent.pop(path[-1])
        elif kind == 5 and isinstance(parent[path[-1]], int):
            parent[path[-1]] = parent[path[-1]] * rng.choice([-1, 2, 3, 7]) + rng.choice([0, 1])
        elif kind >= 7:
            section = rng.choice(SECTIONS)
            if isinstance(tree.setdefault(section, {}), dict):
                tree[section][rng.choice(sorted(settings(section, latent=True)))] = odd(rng)
        else:
            changed = {"recipe": rng.choice(list(recipes)), rng.choice(PRECISION): odd(rng)}
            tree["mixed_precision"] = rng.choice([rng.choice(list(recipes)), changed])
        if not tree:
            return tree
    return tree


def answer(text, path, rng):
    """Everything that check and memory do; the kind of the end."""
    path.write_text(text, encoding="utf-8")
    try:
        box = ConfigContainer.load(path, trusted=False)
        gpu = machine(rng.choice(list(machines)))
        world = rng.choice((box.smallest_world(), 2, 512))
        run = box.resolved(world, machine=gpu, versions=NOW, training=rng.random() < 0.5)
        broken(run.policy, run.facts)
        lint(run.policy, run.facts)
        token_multiple(run.policy, run.facts)
        memory(run.policy, run.facts)
        fit(run.policy, run.facts, gpu)
    except MpbridgeError as error:
        return type(error).__name__ if str(error).strip() else "an empty message"
    return "answered"


def fuzz(numbers, seed, folder):
    ends: dict[str, int] = {}
    trees = [yaml.safe_load(config.read_text()) for config in CONFIGS]
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")  # each mutation can be had again alone
        tree = mutate(rng, yaml.safe_load(yaml.safe_dump(rng.choice(trees))))
        text = yaml.safe_dump(tree, allow_unicode=True)
        if rng.random() < 0.1:  # damage below YAML's structure
            at, odd_text = rng.randrange(len(text)), ["\t", ":", "}", "- ", "\x00", "&a ", "*a", "!!python/none ", "%"]
            text = text[:at] + rng.choice(odd_text) + text[at + rng.randrange(3) :]
        try:
            end = answer(text, folder / "mutated.yaml", rng)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise AssertionError(f"mutation {number} of seed {seed}: {said}\n{text}") from error
        ends[end] = ends.get(end, 0) + 1
    return ends


def test_two_hundred_mutations(tmp_path):
    ends = fuzz(range(200), 1, tmp_path)
    assert "an empty message" not in ends
    assert ends["answered"] > 10
    assert sum(ends.values()) - ends["answered"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_mutations(tmp_path):
    ends = fuzz(range(10_000), 20260911, tmp_path)
    assert sum(ends.values()) == 10_000
    assert "an empty message" not in ends
    assert ends["answered"] > 500
