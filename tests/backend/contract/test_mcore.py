"""megatron-core under the engine contract: DDP, the distributed optimizer, and the precision-aware one."""

from typing import Any, ClassVar

import pytest

from tests.backend.contract.engine_contract import EngineContract
from tests.backend.engines import tiny


class TestDdp(EngineContract):
    name = "mcore"

    def test_fp16_skips_what_overflows_from_2_to_the_32_and_recovers(self, build: Any) -> None:
        engine, batches = build("fp16"), tiny.batches()
        results = [engine.train_step(batches, microbatches=1) for _ in range(40)]
        assert results[0].loss_scale == 2.0**32
        skipped = [i for i, result in enumerate(results) if not result.applied]
        assert skipped[:2] == [0, 1]
        assert 10 < len(skipped) < 30
        assert results[-1].loss_scale < 2.0**24
        assert all(result.applied and result.grad_norm for result in results[-5:])
        assert results[-1].loss < results[0].loss - 0.3

    def test_a_loss_scaler_is_part_of_the_state(self, build: Any, tmp_path: Any) -> None:
        from tests.backend.contract.engine_contract import load, save

        engine, batches = build("fp16"), tiny.batches()
        for _ in range(6):
            engine.train_step(batches, microbatches=1)
        save(engine, tmp_path / "checkpoint")
        scale = float(engine.optimizer.get_loss_scale())
        engine.close()
        again = build("fp16")
        load(again, tmp_path / "checkpoint")
        assert float(again.optimizer.get_loss_scale()) == scale < 2.0**32


class TestDistributedOptimizer(EngineContract):
    name = "mcore"
    settings: ClassVar[dict[str, Any]] = {"ddp": {"use_distributed_optimizer": True}}


class TestOverlap(EngineContract):
    name = "mcore"
    settings: ClassVar[dict[str, Any]] = {
        "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    }
    kinds = ("bf16",)


AWARE = {"use_precision_aware_optimizer": True}
STATES = {
    "fp32": AWARE | {"store_param_remainders": False},
    "remainders": AWARE,
    "bf16": AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp8": AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"},
}


KEEPS = {
    "fp32": "computes bf16; params bf16; updates bf16; exp_avg fp32, exp_avg_sq fp32, master_param fp32",
    "remainders": "computes bf16; params bf16; updates bf16; exp_avg fp32, exp_avg_sq fp32, master_param int16",
    "bf16": "computes bf16; params bf16; updates bf16; exp_avg bf16, exp_avg_sq bf16, master_param int16",
    "fp8": "computes bf16; params bf16; updates bf16; exp_avg uint8, exp_avg_sq fp16, master_param fp16",
}


@pytest.mark.parametrize("states", STATES, scope="class")
class TestPrecisionAware(EngineContract):
    name = "mcore"
    kinds = ("bf16",)

    @pytest.fixture
    def build(self, engines: Any, states: str) -> Any:
        self.settings = {"ddp": {"use_distributed_optimizer": True}, "optimizer": STATES[states]}  # type: ignore[misc]
        return EngineContract.build.__wrapped__(self, engines)  # type: ignore[attr-defined]

    @pytest.fixture
    def kept(self, states: str) -> str:
        return KEEPS[states]
