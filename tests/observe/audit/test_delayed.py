"""Delayed scales against short amax histories, whose oldest entry leaves in the very update that still counts it."""

from __future__ import annotations

from typing import Any

import pytest

from mpbridge.observe.audit import AuditHook

DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHORT = {"recipe": DELAYED, "fp8_amax_history_len": 4}
STEPS = 5


def faults(hook: AuditHook) -> list[str]:
    return [text for one in hook.history for text in one.get("faults", ())]


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        pytest.param({"recipe": DELAYED, "fp8_amax_history_len": 2}, {}, id="shorter than a step's micro-batches"),
        pytest.param(SHORT, {}, id="four"),
        pytest.param(SHORT, RECOMPUTE, id="four, activations recomputed"),
        pytest.param(SHORT | {"fp8_amax_compute_algo": "most_recent"}, {}, id="most recent"),
    ],
)
def test_scales_made_of_an_entry_that_left_are_healthy(build: Any, drive: Any, recipe: Any, model: Any) -> None:
    hook = AuditHook(mode="warn", every=1)
    drive(build(recipe, emulate=True, model=model), hook, steps=STEPS)
    audited = [one["facts"]["delayed scales"] for one in hook.history if "delayed scales" in one["facts"]]
    assert len(audited) == STEPS
    assert faults(hook) == []


@pytest.mark.parametrize("factor", [0.5, 0.97, 2.0])
def test_a_wrong_scale_is_named_beside_a_short_history(build: Any, drive: Any, factor: float) -> None:
    engine, hook = build(SHORT, emulate=True), AuditHook(mode="warn", every=1)
    (quantizer,) = engine.emulation.quantizers.values()
    table = quantizer.backward_table
    real = table.update

    def update(*args: Any) -> None:
        real(*args)
        table.scale = table.scale * factor

    def plant(step: int) -> None:
        if step == STEPS - 1:
            table.update = update

    drive(engine, hook, steps=STEPS, before=plant)
    named = faults(hook)
    assert named
    assert all("delayed scales" in text and " dy: scale" in text for text in named), named
