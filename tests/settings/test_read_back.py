"""Sections given as real megatron-core objects mean what mappings with the same content mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mpbridge.common.errors import Contradiction
from mpbridge.settings.container import ConfigContainer

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
INPUTS = [
    pytest.param(SIZES, id="dense"),
    pytest.param(SIZES | {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True, "add_bias_linear": False}, id="swiglu"),
    pytest.param(SIZES | {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 32}, id="moe"),
    pytest.param(SIZES | {"recompute_granularity": "selective", "window_size": (16, 0)}, id="recompute"),
    pytest.param(SIZES | {"params_dtype": torch.bfloat16, "bf16": True}, id="bf16"),
    pytest.param(SIZES | {"init_method_std": 0.006, "kv_channels": 32, "num_query_groups": 2}, id="kv"),
]  # fmt: skip


def rebuilt(c: ConfigContainer, cls=TransformerConfig):
    """megatron-core's config made from what the container understood."""
    values = dict(c.as_data()["model"])
    words = {"bf16": torch.bfloat16, "fp16": torch.float16}
    live = {name: words[value] for name, value in values.items() if name.endswith("_dtype")}
    if "activation_func" in values:
        live["activation_func"] = getattr(torch.nn.functional, values["activation_func"])
    return cls(**(values | live))


def comparable(config):
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if not callable(value) and name != "window_size"}


@pytest.mark.parametrize("inputs", INPUTS)
def test_an_object_is_read_back_as_inputs_that_build_its_like(inputs):
    live = TransformerConfig(**inputs)
    c = ConfigContainer(mixed_precision="bf16_mixed", model=live)
    assert c.faults() == []
    assert comparable(rebuilt(c)) == comparable(live)
    assert "init_method" not in c.as_data()["model"], "megatron-core makes it from init_method_std"


def test_multi_latent_attention_is_recognised():
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    live = MLATransformerConfig(**SIZES, **latent)
    c = ConfigContainer(mixed_precision="bf16_mixed", model=live, data={"seq_length": 32})
    assert comparable(rebuilt(c, MLATransformerConfig)) == comparable(live)
    assert c.resolved(training=False).facts.shape.latent_attention["kv_lora_rank"] == 8


def test_live_objects_train_like_mappings_and_are_left_alone():
    model = TransformerConfig(**SIZES, tensor_model_parallel_size=2)
    c = ConfigContainer(
        mixed_precision="bf16_mixed", model=model, optimizer=OptimizerConfig(lr=1e-3, adam_beta2=0.95),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True), train={"train_iters": 3}, data={"seq_length": 32},
    )  # fmt: skip
    run = c.resolved(2)
    assert run.facts.parallel.tensor == 2
    assert run.inputs["optimizer"] == {"lr": 1e-3, "adam_beta2": 0.95, "use_distributed_optimizer": True}
    assert run.plan.of("model")["bf16"] is True
    assert model.bf16 is False, "the caller's object is read, never written"


def test_a_value_that_is_not_the_default_shows_as_a_conflict_with_its_source():
    model = TransformerConfig(**SIZES, params_dtype=torch.float16, fp16=True)
    c = ConfigContainer(mixed_precision="bf16_mixed", model=model, data={"seq_length": 8})
    sources = {write.name: write.set_by for write in c.resolved(training=False).plan.conflicts}
    assert sources["model.fp16"] == "the TransformerConfig given as model"


@dataclasses.dataclass
class Provider(TransformerConfig):
    vocab: int = 100
    normalization: str = "RMSNorm"


def test_a_subclass_is_read_by_value_and_refused_for_settings_of_its_own():
    read = ConfigContainer(mixed_precision="fp32", model=Provider(**SIZES)).as_data()
    assert read["model"]["normalization"] == "RMSNorm"
    with pytest.raises(Contradiction, match=r"vocab\).*mpbridge.apply"):
        ConfigContainer(mixed_precision="fp32", model=Provider(**SIZES, vocab=7)).as_data()


def test_the_wrong_class_for_a_section_is_named():
    said = ConfigContainer(mixed_precision="fp32", model=OptimizerConfig()).faults()
    assert any("model is a OptimizerConfig: expected a mapping or a TransformerConfig" in fault for fault in said)
