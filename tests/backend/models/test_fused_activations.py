"""Activations that megatron-core fuses with the bias: those that pass our rule train with its kernel, those that do not have none."""

from typing import Any

import pytest

from mpbridge.backend.engines.mcore import McoreEngine
from mpbridge.common.errors import MpbridgeError, Refused
from tests.backend.engines import tiny

EXPERTS = {
    "num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 64, "add_bias_linear": False,
}  # fmt: skip


def fused(engine: McoreEngine) -> None:
    """Asks the built model for the fused kernel, rules or not."""
    for chunk in engine.model:
        for module in chunk.modules():
            if hasattr(module, "activation_func") and hasattr(module, "config"):
                module.config.bias_activation_fusion = True


@pytest.mark.parametrize(
    ("kind", "gated", "experts"),
    [("gelu", False, {}), ("silu", False, {}), ("quick_gelu", True, {}), *((kind, True, EXPERTS) for kind in ("gelu", "silu", "quick_gelu"))],
    ids=lambda value: "experts" if value else "dense" if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_fused_activation_is_accepted_where_megatron_core_has_its_kernel(
    layer: None, kind: str, gated: bool, experts: dict[str, Any]
) -> None:
    model = {"add_bias_linear": True, "activation_func": kind, "gated_linear_unit": gated, "num_layers": 1, **experts}
    try:
        engine, accepted = McoreEngine.build(tiny.run("bf16", model={**model, "bias_activation_fusion": True})), True
    except Refused as refusal:
        if "fused-activation: bias_activation_fusion with" not in str(refusal):
            raise
        engine, accepted = McoreEngine.build(tiny.run("bf16", model=model)), False
    try:
        if accepted:
            assert engine.train_step(tiny.batches(), microbatches=2).loss > 0
        else:
            fused(engine)
            with pytest.raises((ValueError, AssertionError, MpbridgeError)):
                engine.train_step(tiny.batches(), microbatches=2)
    finally:
        engine.close()
    assert accepted is (
        kind in ("silu", "quick_gelu") and gated if experts else kind == "gelu" or (kind == "silu" and gated)
    )
