"""Configs made once from inputs: names, spellings, refusals."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_kit import CLASSES, DDP, GPU, HERE, INPUTS, OPTIMIZER, POLICIES, built

from mpbridge import apply, build
from mpbridge.common.errors import BadValue, Contradiction, Refused, StalePlan, UnknownName, UpstreamRefused
from mpbridge.common.machines import machine
from mpbridge.precision.sync.plan import plan
from tests.light import loaded_by

BF16 = POLICIES["bf16_mixed"]
DENSE = INPUTS["dense"]


def with_model(**fields: Any) -> dict[str, Any]:
    return {**DENSE, "model": DENSE["model"] | fields}


def test_the_class_follows_multi_latent_attention() -> None:
    assert type(built(INPUTS["mla"], BF16).model).__name__ == "MLATransformerConfig"
    assert type(built(DENSE, BF16).model).__name__ == "TransformerConfig"


@pytest.mark.parametrize("spelling", ["fp32", "float32", "torch.float32", torch.float32])
def test_dtypes_of_inputs_may_be_spelled_anyhow(spelling: Any) -> None:
    inputs = {**DENSE, "optimizer": OPTIMIZER | {"exp_avg_dtype": spelling}}
    assert built(inputs, BF16).optimizer.exp_avg_dtype is torch.float32


def test_a_word_that_is_no_dtype_names_its_field() -> None:
    with pytest.raises(BadValue, match=r"optimizer\.exp_avg_dtype: 'f32' is not a dtype"):
        built({**DENSE, "optimizer": OPTIMIZER | {"exp_avg_dtype": "f32"}}, BF16)


def test_functions_and_enumerations_go_by_name() -> None:
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.enums import AttnBackend

    assert built(with_model(activation_func="silu"), BF16).model.activation_func is torch.nn.functional.silu
    made = built(with_model(activation_func="squared_relu", attention_backend="unfused"), BF16).model
    assert (made.activation_func, made.attention_backend) == (squared_relu, AttnBackend.unfused)
    with pytest.raises(UnknownName, match=r"no activation function named 'sillu' .nearest: silu"):
        built(with_model(activation_func="sillu"), BF16)
    with pytest.raises(UnknownName, match=r"no attention backend named 'flsh' .nearest: flash"):
        built(with_model(attention_backend="flsh"), BF16)


def test_the_models_own_arguments_are_separated_and_mlas_rotary_base_stays_in_both() -> None:
    made = built(with_model(vocab_size=100, rotary_base=500), BF16)
    assert dict(made.gpt) == {"vocab_size": 100, "rotary_base": 500}
    latent = built({**INPUTS["mla"], "model": INPUTS["mla"]["model"] | {"rotary_base": 500}}, BF16)
    assert (latent.gpt["rotary_base"], latent.model.rotary_base) == (500, 500)


def test_the_models_own_arguments_are_gpt_models() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.mamba import mamba_model

    from mpbridge.backend.megatron.targets import GPT_ARGUMENTS
    from mpbridge.settings.sections import LORA, YARN

    hybrids = {"hybrid_override_pattern"}
    assert set(inspect.signature(GPTModel).parameters) >= GPT_ARGUMENTS - set(YARN) - set(LORA) - hybrids
    model = getattr(
        mamba_model, "HybridModel", mamba_model.MambaModel
    )  # since 0.18 the latter only forwards its arguments
    assert set(inspect.signature(model).parameters) >= hybrids
    # those of YaRN are no fields and no arguments: GPTModel looks for them on the config
    reads = inspect.getsource(inspect.getmodule(GPTModel))
    assert YARN
    assert all(f"config.{name}" in reads or f'config, "{name}"' in reads for name in YARN)


def test_unknown_fields_are_named_all_at_once() -> None:
    with pytest.raises(UnknownName, match=r"no field of TransformerConfig named 'num_layer' .nearest: .*num_layers"):
        built(with_model(num_layer=2), BF16)
    with pytest.raises(Contradiction, match=r"num_layer(.|\n)*use_distributed_optimiser"):
        built({**with_model(num_layer=2), "ddp": {"use_distributed_optimiser": True}}, BF16)


def test_parallel_sizes_reach_the_model() -> None:
    assert built({**DENSE, "parallel": {"tensor_model_parallel_size": 2}}, BF16).model.tensor_model_parallel_size == 2


def test_upstreams_refusal_comes_in_our_words() -> None:
    with pytest.raises(UpstreamRefused, match="megatron-core refuses the model config: num_attention_heads") as caught:
        built({**DENSE, "parallel": {"tensor_model_parallel_size": 3}}, BF16)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.quantized])
def test_a_quantized_recipe_is_refused_where_it_would_train_in_16_bits(name: str) -> None:
    inputs = {**DENSE}
    with pytest.raises(Refused, match="cannot run this recipe"):
        build(inputs, plan(POLICIES[name], **inputs), machine=machine("cpu"))
    emulated = build(inputs, plan(POLICIES[name], **inputs, realization="emulated"), machine=machine("cpu"))
    assert (emulated.model.fp8, emulated.model.fp4, emulated.ddp.fp8_param_gather) == (None, None, False)
    # who keeps main weights is decided as it is without emulation; a scaling that megatron-core has no word for reaches no field
    fp8 = POLICIES[name].fp8
    assert emulated.optimizer.fp8_recipe == (fp8 and fp8.row.core)


def test_a_refusal_costs_no_import_of_megatron_core() -> None:
    code = (
        "import mpbridge\nfrom mpbridge.common.errors import Refused\nfrom mpbridge.common.machines import machine\n"
        "made = mpbridge.plan(mpbridge.resolve(mpbridge.get_mixed_precision_config('mxfp8')), model={})\n"
        "try:\n    mpbridge.build({'model': {}}, made, machine=machine('cpu'))\nexcept Refused:\n    pass\nelse:\n    raise SystemExit(1)\n"
    )
    assert loaded_by(code, ["megatron"]) == []


def test_live_configs_among_the_inputs_are_written_in_place() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(**DDP)
    inputs = {**DENSE, "ddp": ddp}
    made = built(inputs, POLICIES["fp16_mixed"])
    assert made.ddp is ddp
    assert (ddp.check_for_nan_in_grad, made.model.fp16) == (False, True)


def test_inputs_that_changed_after_the_plan_are_refused() -> None:
    made = plan(BF16, **DENSE)
    with pytest.raises(StalePlan, match=r"model\.bf16"):
        build(with_model(bf16=False), made, machine=GPU, versions=HERE)


@pytest.mark.skipif(
    "fp4_param_gather" in CLASSES["ddp"].__dataclass_fields__, reason="this megatron-core has the field"
)
def test_a_field_that_this_megatron_core_lacks_is_named() -> None:
    from mpbridge import MixedPrecisionConfig, resolve

    policy = resolve(MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_param=True))
    with pytest.raises(UpstreamRefused, match="fp4_param_gather"):
        built(DENSE, policy)


def test_fp4_is_refused_on_a_live_hybrid_that_this_megatron_core_would_train_in_bf16() -> None:
    import megatron.core

    stack = Path(megatron.core.__file__).with_name("ssm") / "mamba_block.py"
    assert "get_fp4_context" not in stack.read_text(encoding="utf-8")
    said = r"fp4-on-a-hybrid: nvfp4 on a model with Mamba layers"
    for hybrid, refused in ((True, pytest.raises(Refused, match=said)), (False, nullcontext())):
        live = {name: CLASSES[name](**DENSE[name]) for name in ("model", "optimizer", "ddp")}
        live["model"].is_hybrid_model = hybrid
        made, versions = plan(POLICIES["bf16_with_nvfp4_mixed"], **live), replace(HERE, megatron_core="0.16.1")
        with refused:
            apply(made, machine=machine("b200"), versions=versions)
