"""Ranks of large worlds, built by the real megatron-core on fake groups: bytes, audit and the operations of a step equal the predictions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
from collections import Counter
from unittest import mock

import pytest

from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.planning.estimate.build import work
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.simulate import world as worlds
from mpbridge.training.simulate.rank import compare_products, compare_wires
from mpbridge.training.simulate.world import default_ranks, simulate, simulated_run
from scripts.evidence.check_scale import ROWS


@pytest.fixture(scope="module", autouse=True)
def one_nursery():
    """The process that has imported megatron-core and forks a child for each rank: one for all simulations here."""
    with (
        worlds._Nursery() as nursery,
        mock.patch.object(worlds, "_Nursery", return_value=contextlib.nullcontext(nursery)),
    ):
        yield


def run_of(config, world, *overrides):
    return simulated_run(ConfigContainer.load(f"configs/{config}.yaml", list(overrides), check=False), world)[0]


NARROW = [
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "data.seq_length=128",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
]
# a few layers keep megatron-core's construction short; the layouts are the interesting ones
STEPS = {
    "one process": ("gpt_tiny", 1, [0], []),
    "tensor and data parallel": ("llama3_8b", 16, [0, 15], ["model.num_layers=2", "train.global_batch_size=16"]),
    "pipeline": (
        "llama3_8b",
        16,
        [0, 15],
        ["model.num_layers=4", "train.global_batch_size=16", "parallel.pipeline_model_parallel_size=4"],
    ),
    "experts, balanced": ("moe_tiny", 4, [0, 3], ["parallel.expert_model_parallel_size=2"]),
    "experts, a shared one in two ranks": (
        "moe_tiny",
        4,
        [0],
        [
            *NARROW,
            "model.moe_shared_expert_intermediate_size=64",
            "parallel.expert_tensor_parallel_size=1",
            "parallel.expert_model_parallel_size=2",
        ],
    ),
    "experts split over tensor ranks": (
        "moe_tiny",
        4,
        [0],
        [
            *NARROW,
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "parallel.expert_tensor_parallel_size=2",
            "parallel.expert_model_parallel_size=2",
        ],
    ),
    "prediction ahead in two ranks": ("gpt_tiny", 2, [0], [*NARROW, "model.mtp_num_layers=2"]),
    "Mamba layers": (
        "nemotron_h_tiny",
        2,
        [1],
        # so wide that the reduced gradients of norms are not taken for bookkeeping
        [
            "model.hybrid_override_pattern=M*-",
            "model.hidden_size=2048",
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "data.seq_length=128",
        ],
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_issues_what_the_list_says(case):
    config, world, ranks, overrides = STEPS[case]
    for one in simulate(run_of(config, world, *overrides), ranks, step=True):
        assert one.products > 10
        assert one.step == ()
        assert one.ok


def test_a_step_with_the_dispatcher_that_counts_tokens_by_value_is_refused_by_name():
    run = run_of("moe_tiny", 2, *NARROW, "model.moe_token_dispatcher_type=allgather")
    with pytest.raises(
        BadValue, match=r"--step with dispatcher allgather: .* model\.moe_token_dispatcher_type=alltoall"
    ):
        simulate(run, [0], step=True)


def test_a_rank_of_a_large_world_equals_the_prediction_to_the_byte():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # other tests of this process had their own
    (one,) = simulate(run_of("llama3_70b", 16384, "model.num_layers=40", "train.global_batch_size=4096"), [16383])
    assert one.ok, one
    assert one.live == one.predicted > 2**30
    assert one.peak - before < 500 * 2**20
    assert one.seconds < 4 * 8  # on a machine four times slower


def test_a_stage_of_multi_token_prediction_alone_is_built():
    layout = ["parallel.pipeline_model_parallel_size=4", "model.pipeline_model_parallel_layout='Et|tt|t|mL'"]
    run = run_of("moe_tiny", 4, *layout, "model.mtp_num_layers=1", "parallel.expert_model_parallel_size=1")
    (one,) = simulate(run, [3])
    assert one.ok, one
    assert one.parameters > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS)
def test_every_layout_equals_the_prediction_to_the_byte(case):
    config, world, ranks, overrides = ROWS[case]
    for one in simulate(run_of(config, world, *overrides), ranks):
        assert one.differences == ()
        assert one.ok, one
        assert one.peak < 500 * 2**20


def test_a_missing_product_or_collective_is_seen():
    run = run_of("llama3_8b", 16, "model.num_layers=2", "train.global_batch_size=16")
    listed = work(run.policy, run.facts, 0)
    products = Counter({(*gemm.key, gemm.format): 0 for gemm in listed.gemms})
    for gemm in listed.gemms:
        products[(*gemm.key, gemm.format)] += 2 * gemm.times
    assert compare_products(run, 0, 2, products) == []
    key = next(iter(products))
    assert compare_products(run, 0, 2, {**products, key: products[key] - 1}) != []
    assert compare_products(run, 0, 2, {**products, (8, 8, 2**30, "bf16"): 3}) != []
    assert compare_wires(run, 0, 2, {}) != []


def test_ranks_outside_of_the_world_are_named():
    run = run_of("gpt_tiny", 2)
    with pytest.raises(BadValue, match="rank 2: the world has ranks 0 to 1"):
        simulate(run, [2])
    assert default_ranks(run) == (0, 1)


def test_a_failing_rank_says_where():
    run = run_of("gpt_tiny", 1)
    broken = dataclasses.replace(run, inputs=run.inputs | {"model": run.inputs["model"] | {"num_layers": -1}})
    with pytest.raises(MpbridgeError, match="simulated rank 0 failed"):
        simulate(broken, [0])


def test_the_verb_prints_a_line_for_each_rank(cli):
    data = json.loads(cli("simulate --config gpt_tiny --world-size 4 --ranks 0,3 --json"))
    assert [one["rank"] for one in data["ranks"]] == [0, 3]
    assert all(one["ok"] and one["live"] == one["predicted"] for one in data["ranks"])
    cli("simulate --config gpt_tiny --ranks a", code=2)
