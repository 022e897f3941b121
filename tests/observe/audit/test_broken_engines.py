"""Every engine broken on purpose, four ways each: the audit names what was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpbridge.observe.audit import AuditHook
from mpbridge.observe.audit.flags import inner_optimizers

ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": ("bf16", {}),
    "distributed optimizer": ("bf16", {"ddp": {"use_distributed_optimizer": True}}),
    "fsdp2 A": ("bf16_params_fp32_states", {"engine": "fsdp2"}),
    "fsdp2 B": ("fp32_params_bf16_compute", {"engine": "fsdp2"}),
    "megatron_fsdp": ("bf16_megatron_fsdp", {"engine": "megatron_fsdp"}),
}


def _states(engine: Any) -> list[tuple[torch.Tensor, Any]]:
    return [pair for optimizer in inner_optimizers(engine.optimizer) for pair in optimizer.state.items()]


def after_step(engine: Any, then: Callable[[], None]) -> None:
    real = engine.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        then()
        return result

    engine.train_step = step


def freeze(engine: Any) -> None:
    """The optimizer says that it stepped, and does nothing."""
    if hasattr(engine.optimizer, "step_with_ready_grads"):
        engine.optimizer.step_with_ready_grads = lambda: True
    for optimizer in inner_optimizers(engine.optimizer):
        optimizer.step = lambda *args, **kwargs: None


@pytest.mark.parametrize("case", ENGINES)
def test_a_moment_cast_to_bf16_is_named(build: Any, drive: Any, case: str) -> None:
    kind, sections = ENGINES[case]
    engine, hook = build(kind, **sections), AuditHook(mode="warn")

    def narrow() -> None:
        state = _states(engine)[0][1]
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()

    after_step(engine, narrow)
    drive(engine, hook)
    assert [fault.subject for fault in hook.reports["live"].faults] == ["exp_avg_sq"]
    assert len(hook.reports["live"].find("exp_avg_sq").offenders) == 1


@pytest.mark.parametrize("case", ENGINES)
def test_a_second_master_copy_is_named(build: Any, drive: Any, case: str) -> None:
    kind, sections = ENGINES[case]
    engine, hook = build(kind, **sections), AuditHook(mode="warn")

    def add() -> None:
        for parameter, state in _states(engine):
            # FusedAdam's own name for it; pattern A has one there already, so a second one hides beside it
            state["master_param"] = parameter.detach().float().clone()

    after_step(engine, add)
    drive(engine, hook)
    fault = hook.reports["live"].find("main_params")
    assert not fault.ok
    assert len(fault.offenders) == len(list(engine.named_parameters()))
    if case != "fsdp2 A":  # there it replaces the 16-bit remainders
        assert "unused copy" in fault.cure


@pytest.mark.parametrize("case", ENGINES)
def test_a_frozen_optimizer_is_named(build: Any, drive: Any, case: str) -> None:
    kind, sections = ENGINES[case]
    engine, hook = build(kind, **sections), AuditHook(mode="warn")
    freeze(engine)
    drive(engine, hook)
    fault = hook.reports["live"].find("weights moved")
    assert not fault.ok
    assert fault.found.startswith("0 of")


@pytest.mark.parametrize("engine_name", ["mcore", "fsdp2", "megatron_fsdp"])
def test_a_linear_left_out_of_quantization_is_named(build: Any, drive: Any, engine_name: str) -> None:
    recipe = {"recipe": "bf16_with_fp8_current_scaling_mixed", "fp8_param": False, "first_last_layers_bf16": False}
    engine, hook = build(recipe, engine=engine_name, emulate=True), AuditHook(mode="warn")
    linears = {
        path: module
        for path, module in engine.model[0].named_modules()
        if path.endswith("layers.1.self_attention.linear_proj")
    }
    (module,) = linears.values()
    module.plug = None
    drive(engine, hook)
    for report in hook.reports.values():
        assert {fault.subject for fault in report.faults} <= {"linears", "quantized GEMMs"}
        assert report.find("linears").offenders == ("decoder.layers.1.self_attention.linear_proj",)
