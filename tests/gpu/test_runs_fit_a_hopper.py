"""Every run of the GPU tests is legal on the machine that they are for, asked here: a wrong setting shall not cost a GPU's time."""

import dataclasses

import pytest

from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED, can_run
from mpbridge.planning.rules.table import require
from tests.gpu.test_training import HOPPER

AWARE = ("optimizer.use_precision_aware_optimizer=true", "ddp.use_distributed_optimizer=true")
RUNS = {name: (name, "model.num_layers=6") for name in HOPPER} | {
    # FusedAdam's kernel for FP8 weights takes whole main weights
    "aware delayed": ("fp8_ds", *AWARE, "mixed_precision.store_param_remainders=false"),
    "aware tensorwise": ("fp8_cs", *AWARE),
    "aware blockwise": ("fp8_sc", *AWARE),
    "gather": ("fp8_cs", "mixed_precision.fp8_param_gather=true"),
    "no gather": ("fp8_cs", "mixed_precision.fp8_param_gather=false"),
    "fsdp2 fused": ("bf16_params_fp32_states", "engine=fsdp2"),
    "fsdp2 torch": ("fp32_params_bf16_compute", "engine=fsdp2"),
    "megatron fsdp": ("bf16_megatron_fsdp", "engine=megatron_fsdp"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_run_breaks_no_rule_on_an_h200(name, gpu_run):
    recipe, *overrides = RUNS[name]
    run = gpu_run(recipe, *overrides)
    assert can_run(run.policy, machine("h200"), ASSUMED).native
    require(run.policy, dataclasses.replace(run.facts, machine=machine("h200"), versions=ASSUMED, environment={}))
