"""torch FSDP2 under the engine contract."""

from __future__ import annotations

from typing import Any

from tests.contract.engine_contract import Build, EngineContract
from tests.engines import tiny


class TestFsdp2(EngineContract):
    name = "fsdp2"
    kinds = ("fp32", "bf16", "bf16_params_fp32_states", "fp32_params_bf16_compute", "bf16_mixed_bf16_moments")

    def test_every_tensor_has_the_dtype_that_the_policy_promises(self, build: Build, kind: Any) -> None:
        # a shard's gradient rests in the shard's own dtype here: the reduction's dtype is only on the wire, where the audit looks
        assert_audited(build(kind))


def assert_audited(engine: Any) -> None:
    from types import SimpleNamespace

    from mpbridge.audit import AuditHook

    hook, training = AuditHook(), SimpleNamespace(engine=engine)
    hook.built(training)
    hook.started(training)
    hook.stepped(training, engine.train_step(tiny.batches(), microbatches=2))
    assert hook.reports["live"].ok
