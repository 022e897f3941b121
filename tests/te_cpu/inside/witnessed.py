"""Transformer Engine's modules in a loop around megatron-core's objects, under a witness."""

from collections.abc import Iterator
from typing import Any

import pytest

import mpbridge
from scripts.evidence.witness_megatron import megatron
from tests.worlds import one_process

from .training import BLACKWELL

RECIPE = "bf16_with_mxfp8_mixed" if BLACKWELL else "bf16_with_fp8_current_scaling_mixed"
FIELDS = {"fp8": "e4m3", "fp8_recipe": "mxfp8"} if BLACKWELL else {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
PLAIN = {"first_last_layers_bf16": False, "fp8_param": False}
PLAIN |= {"reuse_grad_buf_for_mxfp8_param_ag": False} if BLACKWELL else {}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_process():
        yield


def seen(policy: Any = None, **fields: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return megatron(
        policy=policy,
        spec=get_gpt_layer_with_transformer_engine_spec,
        # Megatron-LM's arguments give both configs the word
        optimizer={"fp8_recipe": fields["fp8_recipe"]} if "fp8_recipe" in fields else {},
        more={"hidden_size": 128, "ffn_hidden_size": 128, "gradient_accumulation_fusion": False, **fields},
    )


def promised(**more: Any) -> Any:
    return mpbridge.get_mixed_precision_config(RECIPE).derive(**PLAIN, **more)


def test_quantized_modules_are_described_and_judged_by_the_recipe_that_they_ran() -> None:
    found = seen(promised(), **FIELDS)
    assert found.ok, found.report.faults
    told = found.as_data()["described"]
    words = "e4m3 mxfp8" if BLACKWELL else "hybrid tensorwise"
    assert told["quantization"] == f"8 of 9 linears {words}, 1 in high precision"
    assert (told["storage"], told["main"], told["accumulator"]) == ("bf16", "fp32", "fp32")
    unseen = {one.subject for one in found.report.unseen}
    assert "quantized GEMMs" in unseen, "inside Transformer Engine's library"
    assert "gradients" not in unseen, "autograd delivers them"


@pytest.mark.played("hopper")  # once is enough, as below
def test_modules_that_ran_in_high_precision_are_named() -> None:
    found = seen(promised())
    assert "linears" in {fault.subject for fault in found.report.faults}


@pytest.mark.played("hopper")
def test_modules_in_bf16_are_bf16_mixed() -> None:
    found = seen("bf16_mixed")
    assert found.ok, found.report.faults
    assert str(found.nearest) == "bf16_mixed, exactly"
