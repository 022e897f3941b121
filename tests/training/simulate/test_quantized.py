"""Weights at rest in a low format, built by Transformer Engine's own Python on meta tensors: every buffer equals the prediction to the byte."""

from __future__ import annotations

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.simulate.world import simulate, simulated_run
from tests.te_cpu.wheels import OLDEST, environment, release_or_skip

RUNS = {
    # a transposed copy, since a Hopper's products need one; one scale a weight
    "delayed on a Hopper": ("gpt_tiny", "bf16_with_fp8_delayed_scaling_mixed", "h100", []),
    # two copies with padded scales, apart from the parameter buffer
    "MXFP8 on a Blackwell, grouped experts": ("moe_tiny", "bf16_with_mxfp8_mixed", "b200", ["model.moe_grouped_gemm=true", "parallel.expert_model_parallel_size=2"]),
}  # fmt: skip


WORLD = 8


def run_of(case):
    config, recipe, target, extra = RUNS[case]
    settings = [f"mixed_precision.recipe={recipe}", "emulate=te", f"te='{OLDEST}'", f"target={target}", *extra]
    box = ConfigContainer.load(
        f"configs/{config}.yaml",
        [*settings, "ddp.use_distributed_optimizer=true", "train.global_batch_size=64"],
        check=False,
    )
    return simulated_run(box, WORLD)[0]


@pytest.fixture(autouse=True)
def where_the_wheels_are(monkeypatch):
    release_or_skip(OLDEST)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", RUNS)
def test_weights_at_rest_equal_the_prediction_to_the_byte(case):
    (one,) = simulate(run_of(case), [WORLD - 1])
    assert one.differences == ()
    assert one.ok, one
    assert one.rows > 50


def test_a_step_without_memory_is_refused_by_name():
    with pytest.raises(BadValue, match="--step with --emulate te"):
        simulate(run_of("delayed on a Hopper"), [0], step=True)
