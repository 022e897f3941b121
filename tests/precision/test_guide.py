"""What users of Megatron Bridge have in their scripts runs here with the import path changed, and means what its guide says.

The calls follow the examples of its mixed-precision guide (Custom Mixed Precision Configuration, FP8 Recipe Examples, Custom FP8 Configuration,
Registering Custom Mixed Precision Recipes, Configuration Synchronization); read 2026-08."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbridge import ConfigContainer, MixedPrecisionConfig, resolve
from mpbridge.common.machines import machine
from mpbridge.settings.container import Run

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "max_sequence_length": 32}


def resolved(mixed_precision: Any, **sections: Any) -> Run:
    """The run of a container that says nothing about precision itself, but for `sections`."""
    given = {"model": SIZES, "optimizer": {"lr": 1e-3}, "ddp": {}, "train": {"train_iters": 1}} | sections
    return ConfigContainer(mixed_precision=mixed_precision, **given).resolved(machine=machine("h100"), training=False)


def test_a_custom_bf16_configuration() -> None:
    bf16_config = MixedPrecisionConfig(
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, autocast_enabled=False, grad_reduce_in_fp32=True,
    )  # fmt: skip
    assert bf16_config.params_dtype is torch.bfloat16
    assert resolved(bf16_config).policy == resolved("bf16_mixed").policy


def test_a_custom_fp8_configuration() -> None:
    fp8_config = MixedPrecisionConfig(
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, fp8="hybrid", fp8_recipe="tensorwise", fp8_margin=0,
        fp8_amax_history_len=1024, fp8_amax_compute_algo="max", fp8_param_gather=True,
    )  # fmt: skip
    run = resolved(fp8_config)
    assert run.plan.of("ddp")["fp8_param_gather"] is True
    assert run.plan.of("model")["fp8_param"] is True  # one fact there too
    assert run.plan.of("model")["fp8_amax_history_len"] == 1024


@pytest.mark.parametrize("live", [False, True], ids=["mappings", "megatron-core's objects"])
def test_the_recipe_takes_precedence_over_what_was_set_on_the_configs(live: bool) -> None:
    model: Any = SIZES | {"bf16": False}
    optimizer: Any = {"lr": 1e-3, "bf16": False}
    if live:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

        model = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
        optimizer = OptimizerConfig(lr=1e-3)
        model.bf16 = False
        optimizer.bf16 = False
    run = resolved("bf16_mixed", model=model, optimizer=optimizer, data={"seq_length": 32})
    assert run.plan.of("model")["bf16"] is True
    assert run.plan.of("optimizer")["bf16"] is True
    if not live:  # over there it happens silently; a live False cannot be told from the default
        assert {write.name for write in run.plan.conflicts} == {"model.bf16", "optimizer.bf16"}


def test_fp8_parameters_have_the_names_and_the_defaults_that_the_guide_lists() -> None:
    plain = {
        "fp8": None, "first_last_layers_bf16": False, "fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent",
    }  # fmt: skip
    assert {name: getattr(MixedPrecisionConfig(), name) for name in plain} == plain
    meant = resolve(MixedPrecisionConfig(bf16=True, fp8="hybrid")).fp8
    assert meant is not None
    assert (meant.scaling, meant.stored) == ("tensorwise", False)
