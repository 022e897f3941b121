"""What a search knows of a layout before it prices it: never more than the truth, and close to it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.estimate.bounds import Bounds, FamilyBounds
from mpbridge.planning.estimate.candidates import families, groups, largest, members
from mpbridge.planning.estimate.constants import constants
from mpbridge.planning.estimate.layouts import search
from mpbridge.planning.estimate.predict import estimate
from mpbridge.planning.memory.by_role import memory, verdict
from mpbridge.settings.container import ConfigContainer

CASES = {
    "dense": ("llama3_8b", 16, "h100", "fp8_cs", None), "experts": ("qwen3_30b_a3b", 32, "h100", "bf16", None),
    "further tokens": ("deepseek_v3_671b", 512, "b200", "mxfp8", None),
    "experts alone in FP8": ("moe_tiny", 8, "b200", "fp8_mlp_only", None), "windows": ("gpt_oss_120b", 64, "b200", "bf16", None),
    "a hybrid": ("nemotron_3_nano", 32, "h100", "fp8_cs", None), "frozen": ("lora_tiny", 4, "h100", "bf16", None),
    "layer-wise": ("gpt_tiny", 8, "h100", "bf16", ["optimizer.optimizer=dist_muon"]),
    "sharded": ("llama3_8b", 16, "h100", "bf16_megatron_fsdp", None),
    "rows": ("gpt_125m", 8, "h100", "bf16_params_fp32_states", ["engine=fsdp2"]),
}  # fmt: skip
"""Config, processes, machine, recipe, settings."""


def facts_of(config, world, target, recipe, overrides=None):
    made = ConfigContainer.load(f"configs/{config}.yaml", overrides or [], check=False)
    made.mixed_precision = recipe
    run = made.resolved(world, machine=machine(target), versions=ASSUMED, training=False)
    return run.policy, dataclasses.replace(run.facts, environment={}), machine(target)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_step_is_shorter_and_no_stage_holds_less(case):
    policy, run, target = facts_of(*case)
    bounds, order = Bounds(policy, target, constants()), ["fits", "tight", "does not fit"]
    every = list(families(policy, run, dataclasses.replace(target, memory_bytes=0)))
    assert every
    for family in every[:: max(1, len(every) // 5)]:
        known = FamilyBounds(bounds, family)
        for one in (family[0], family[-1]):
            exact, full = estimate(policy, one, target).seconds, memory(policy, one)
            assert 0.995 * exact < known.seconds(one) <= exact
            assert known.least_seconds(one) <= exact
            # a byte less than it needs for certain, than it needs at all
            for room in (full.needed + full.band, full.needed + full.band - 1, full.needed - full.band - 1):
                assert order.index(known.verdict(one, room)) <= order.index(verdict(full, room))
            if "params" not in run.traits.shards:  # there what is gathered is left out
                assert known.verdict(one, int(0.9 * (full.needed - full.band))) == "does not fit"
            assert not known.exceeds(one, full.needed)


@pytest.mark.parametrize("case", ["dense", "experts", "further tokens", "a hybrid", "sharded"])
def test_no_layout_of_a_group_is_faster_than_the_group(case):
    policy, run, target = facts_of(*CASES[case])
    bounds, seen = Bounds(policy, target, constants()), 0
    every = [group for group in groups(run, target, stated=False) if group and largest(run, group[0])]
    for group in every[:: max(1, len(every) // 3)]:
        least = bounds.group(largest(run, group[0]), max(one.sizes.virtual_pipeline or 1 for one in group))
        found = [members(policy, run, dataclasses.replace(target, memory_bytes=0), outline) for outline in group]
        for one in itertools.chain(*found):
            seen += 1
            assert least <= estimate(policy, one, target).seconds
    assert seen


def test_what_is_frozen_needs_no_room_for_gradients():
    frozen = ["model.hidden_size=1024", "model.ffn_hidden_size=4096", "model.num_attention_heads=16"]
    policy, run, target = facts_of("lora_tiny", 1, "h100", "bf16", frozen)
    full = memory(policy, run)
    small = dataclasses.replace(target, memory_bytes=full.needed + full.band)
    assert search(policy, dataclasses.replace(run, machine=small), small)
