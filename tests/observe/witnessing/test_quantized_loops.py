"""Quantized linears under a witness: which rule each has, and the operands of their GEMMs."""

from __future__ import annotations

from typing import Any

import mpbridge
from mpbridge.backend.devices import device_layer
from tests.observe.audit.conftest import build, world  # noqa: F401 (fixtures)

RECIPE = "bf16_with_fp8_delayed_scaling_mixed"


def stepped(engine: Any, policy: Any) -> Any:
    from tests.backend.engines import tiny

    seen = mpbridge.witness(engine.model, engine.optimizer, policy, name=RECIPE)
    with device_layer(False), seen:
        engine.train_step(tiny.batches(), microbatches=2)
    return seen.report


def test_emulated_linears_are_told_and_judged_by_their_operands(build: Any) -> None:  # noqa: F811
    engine = build(RECIPE, emulate=True)
    seen = stepped(engine, engine.run.policy)
    assert seen.ok, seen.report.faults
    assert seen.report.find("quantized GEMMs").count > 0
    assert seen.as_data()["described"]["quantization"] == "8 of 9 linears hybrid delayed, 1 in high precision"
    assert str(seen.nearest) == f"{RECIPE}, exactly"


def test_a_linear_that_runs_in_high_precision_is_named(build: Any) -> None:  # noqa: F811
    from tests.observe.audit.faults import linear

    engine = build(RECIPE, emulate=True)
    module = linear(engine)
    module.__class__ = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("megatron"))
    found = stepped(engine, engine.run.policy)
    assert "quantized GEMMs" in {fault.subject for fault in found.report.faults}
    assert "decoder.layers.1.mlp.linear_fc1" in str(found)
