"""Megatron-FSDP under the engine contract."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.contract.engine_contract import Build, EngineContract
from tests.contract.test_fsdp2 import assert_audited


class TestMegatronFsdp(EngineContract):
    name = "megatron_fsdp"
    kinds = ("fp32", "bf16", "bf16_megatron_fsdp")

    def test_every_tensor_has_the_dtype_that_the_policy_promises(self, build: Build, kind: Any) -> None:
        assert_audited(build(kind))


class TestZero2(EngineContract):
    name = "megatron_fsdp"
    kinds = ("bf16_megatron_fsdp",)
    settings: ClassVar[dict[str, Any]] = {"ddp": {"data_parallel_sharding_strategy": "optim_grads"}}

    def test_every_tensor_has_the_dtype_that_the_policy_promises(self, build: Build, kind: Any) -> None:
        assert_audited(build(kind))


class TestZero1(TestZero2):
    settings: ClassVar[dict[str, Any]] = {"ddp": {"data_parallel_sharding_strategy": "optim"}}
