"""Megatron-FSDP under the engine contract."""

from typing import Any, ClassVar

from tests.backend.contract.engine_contract import EngineContract

KEEPS = {
    "fp32": "computes fp32; params fp32; updates fp32; exp_avg fp32, exp_avg_sq fp32",
    "bf16": "computes bf16; params fp32; updates fp32; exp_avg fp32, exp_avg_sq fp32",
    "bf16_megatron_fsdp": "computes bf16; params fp32; updates fp32; exp_avg fp32, exp_avg_sq fp32",
}
"""The wrapper's main weights are the parameters that the model shows between two steps."""


class TestMegatronFsdp(EngineContract):
    name = "megatron_fsdp"
    kinds = ("fp32", "bf16", "bf16_megatron_fsdp")
    keeps = KEEPS


class TestZero2(EngineContract):
    name = "megatron_fsdp"
    kinds = ("bf16_megatron_fsdp",)
    keeps = KEEPS
    settings: ClassVar[dict[str, Any]] = {"ddp": {"data_parallel_sharding_strategy": "optim_grads"}}


class TestZero1(TestZero2):
    settings: ClassVar[dict[str, Any]] = {"ddp": {"data_parallel_sharding_strategy": "optim"}}
