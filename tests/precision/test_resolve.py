"""resolve(): every contradiction, all of them at once, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, resolve
from mpbridge.common.errors import Contradiction
from mpbridge.common.formats import DType
from mpbridge.precision.policy import PrecisionPolicy

FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a word for a flag": ({"bf16": "yes"}, ("bf16='yes': expected true or false",)),
    "a flag for a number": ({"bf16": True, "hysteresis": True}, ("hysteresis=True (a truth value): expected a whole number",)),
    "a fraction for a whole number": ({"fp16": True, "hysteresis": 2.5}, ("hysteresis=2.5 (a number): expected a whole number",)),
    "a number for a word": ({"bf16": True, "fp8": 1}, ("fp8=1 (a whole number): expected one of e4m3, hybrid or null",)),
    "two halves": ({"bf16": True, "fp16": True}, ("fp16 and bf16 are on together",)),
    "flag against params": ({"bf16": True, "params_dtype": "fp16"}, ("params_dtype=fp16 but bf16=true means bf16",)),
    "flag against compute": ({"bf16": True, "compute_dtype": "fp16"}, ("compute_dtype=fp16 but bf16=true",)),
    "no flag": ({"params_dtype": "bf16"}, ("params_dtype=bf16 but no flag means fp32",)),
    "params in fp64": ({"params_dtype": "fp64"}, ("params_dtype=fp64 is not one of fp32, bf16, fp16",)),
    "no such format": ({"bf16": True, "fp8": "foo"}, ("fp8='foo' is not one of e4m3, hybrid or null",)),
    "no such scaling": ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "current"}, ("fp8_recipe='current' is not one of tensorwise, delayed",)),
    "no such algorithm": ({"bf16": True, "fp8_amax_compute_algo": "min"}, ("fp8_amax_compute_algo='min' is not one of most_recent, max",)),
    "fp4 with fp8": ({"bf16": True, "fp8": "hybrid", "fp4": "e2m1"}, ("fp8 and fp4 are both on",)),
    "fp8 on fp32": ({"fp8": "hybrid"}, ("fp8 needs 16-bit compute around it",)),
    "a rule's fp8 on fp32": ({"modules": {"mlp.*": "mxfp8"}}, ("modules['mlp.*'] needs 16-bit compute around it",)),
    "a gemm's fp4 on fp32": ({"fp32": True, "modules": {"mlp.*": {"fprop": "nvfp4", "dgrad": "fp32", "wgrad": "fp32"}}},
        ("modules['mlp.*'] needs 16-bit compute around it",)),
    "no rule": ({"bf16": True, "modules": {"mlp.*": []}}, ("modules['mlp.*']=[]: expected a rule, or a list of them",)),
    "a gemm's rule with fields of the whole config": (
        {"bf16": True, "modules": {"mlp.*": {"fprop": {"fp8": "hybrid", "loss_scale": 3.0, "bf16": True, 1: True}, "dgrad": "bf16", "wgrad": "bf16"}}},
        ("modules['mlp.*']: loss_scale, bf16, 1 cannot be set for fprop alone (possible: fp8, fp8_recipe",)),
    "delayed scaling's fields in a rule": (
        {"bf16": True, "modules": {"mlp.*": {"fp8": "hybrid", "fp8_margin": 1, "fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max", "fp8_wgrad": False}}},
        ("modules['mlp.*']: fp8_margin, fp8_amax_history_len, fp8_amax_compute_algo, fp8_wgrad cannot be set per module (possible: fprop",)),
    "attention by a linear's rule": ({"bf16": True, "modules": {"mlp.*": {"fp8": "hybrid", "fp8_dot_product_attention": True}}},
        ("modules['mlp.*']: fp8_dot_product_attention cannot be set per module",)),
    "storage without format": ({"bf16": True, "fp8_param": True}, ("fp8_param=true without fp8",)),
    "custom without factory": ({"bf16": True, "fp8": "e4m3", "fp8_recipe": "custom"}, ("fp8_recipe='custom' needs fp8_quantizer_factory",)),
    "factory without custom": ({"bf16": True, "fp8": "e4m3", "fp8_quantizer_factory": "a.b"}, ("fp8_quantizer_factory needs fp8 on and fp8_recipe='custom'",)),
    "half of attention": ({"bf16": True, "fp8": "e4m3", "fp8_multi_head_attention": True}, ("needs fp8_dot_product_attention=true",)),
    "attention alone in FP8": ({"bf16": True, "fp8_dot_product_attention": True}, ("fp8_dot_product_attention without fp8",)),
    "FP8 attention under FP4": ({"bf16": True, "fp4": "e2m1", "fp8_dot_product_attention": True}, ("fp8_dot_product_attention without fp8",)),
    "no history": ({"bf16": True, "fp8_amax_history_len": 0}, ("fp8_amax_history_len=0: expected at least 1",)),
    "a buffer that is not there": ({"bf16": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, ("reuse_grad_buf_for_mxfp8_param_ag needs fp8",)),
    "bf16 gradients in fp32 buffers": ({"bf16": True, "main_grads_dtype": "bf16"}, ("main_grads_dtype=bf16 but grad_reduce_in_fp32=true",)),
    "states without FusedAdam": (
        {"bf16": True, "use_precision_aware_optimizer": False, "exp_avg_dtype": "bf16"}, ("exp_avg_dtype=bf16 needs use_precision_aware_optimizer=true",),
    ),
    "a main copy too small": ({"main_params_dtype": "bf16"}, ("main_params_dtype=bf16 with params_dtype=fp32",)),
    "remainders of nothing": ({"fp16": True, "store_param_remainders": True}, ("store_param_remainders=true extends BF16 parameters",)),
    "router in bf16": ({"bf16": True, "moe_router_dtype": "bf16"}, ("moe_router_dtype='bf16' is not one of fp32, fp64",)),
    "a scale of zero": ({"fp16": True, "loss_scale": 0}, ("loss_scale=0: must be above 0",)),
    "a floor above the start": ({"fp16": True, "min_loss_scale": 8, "initial_loss_scale": 4}, ("min_loss_scale=8 is above initial_loss_scale=4",)),
    "a scale without end": ({"fp16": True, "loss_scale": float("inf")}, ("loss_scale=inf: must be above 0 and finite",)),
    "a start without end": ({"fp16": True, "initial_loss_scale": float("inf")}, ("initial_loss_scale=inf: must be above 0, and finite",)),
    "a router of no kind": ({"bf16": True, "moe_router_dtype": float("inf")}, ("moe_router_dtype='inf' is not one of fp32, fp64",)),
    "a module rule for a number": ({"bf16": True, "modules": {3: "bf16"}}, ("expected a mapping from glob (text) to rule",)),
    "no patience": ({"fp16": True, "hysteresis": 0}, ("hysteresis=0: must be above 0",)),
    "negative edges": ({"bf16": True, "fp8": "hybrid", "num_layers_at_end_in_bf16": -1}, ("num_layers_at_end_in_bf16=-1: must not be negative",)),
    "a module rule that says nothing": ({"bf16": True, "fp8": "hybrid", "modules": {"mlp.*": {}}}, ("names no format",)),
    "a module rule with delayed scaling": (
        {"bf16": True, "fp8": "hybrid", "modules": {"mlp.*": {"fp8": "hybrid", "fp8_recipe": "delayed"}}}, ("delayed scaling cannot be chosen per module",),
    ),
    "a module rule about something else": ({"bf16": True, "modules": {"mlp.*": {"loss_scale": 1}}}, ("loss_scale cannot be set per module",)),
    "a module in another half": ({"bf16": True, "fp8": "hybrid", "modules": {"mlp.*": "fp16"}}, ("a module that is not quantized stays in bf16",)),
    "a module rule of no kind": ({"bf16": True, "modules": {"mlp.*": "low"}}, ("expected 'bf16', a scaling",)),
    "all at once": (
        {"bf16": True, "fp16": True, "fp8": "foo", "fp4": "e2m1", "fp8_recipe": "x", "loss_scale": -1, "hysteresis": 0},
        ("fp16 and bf16", "fp8='foo'", "fp8_recipe='x'", "fp8 and fp4 are both on", "loss_scale=-1", "hysteresis=0"),
    ),
    "two flags, and a dtype of one of them": ({"bf16": True, "fp16": True, "params_dtype": "fp16"}, ("fp16 and bf16",)),
    "a wrong type hides no wrong choice": ({"bf16": "yes", "fp8": "foo"}, ("bf16='yes'", "fp8='foo'")),
    "all wrong types at once": ({"bf16": 1, "fp8": 2, "keep_fp32": "norm", "modules": []}, ("bf16=1", "fp8=2", "keep_fp32='norm'", "modules=[]")),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_contradictions_are_named(case: str) -> None:
    values, expected = FAULTS[case]
    with pytest.raises(Contradiction) as caught:
        resolve(MixedPrecisionConfig(**values))
    assert len(caught.value.faults) == len(expected), caught.value.faults
    for words in expected:
        assert any(words in fault for fault in caught.value.faults), (words, caught.value.faults)


def test_more_edge_layers_than_the_model_has_is_a_fault_where_the_depth_is_known() -> None:
    config = get_mixed_precision_config("nemotron_3_super_bf16_with_nvfp4_mixed")
    resolve(config, layers=14)
    with pytest.raises(Contradiction, match=r"0 . 14 edge layers stay in bf16 but the model has 12"):
        resolve(config, layers=12)


def test_fp32_storage_under_16_bit_compute_is_a_recipe_and_gathers_in_16_bits() -> None:
    policy = resolve(MixedPrecisionConfig(bf16=True, params_dtype="fp32"))
    assert (policy.compute, policy.params, policy.gather) == (DType.BF16, DType.FP32, DType.BF16)


def test_nothing_given_is_fp32_and_params_follow_the_flag() -> None:
    assert resolve(MixedPrecisionConfig()).params is DType.FP32
    # the neighbour's documented custom recipe leaves params_dtype out
    assert resolve(MixedPrecisionConfig(bf16=True)).params is DType.BF16
    assert resolve(MixedPrecisionConfig(bf16=True)).pipeline is DType.BF16
    assert resolve(MixedPrecisionConfig(bf16=True, output_dtype="fp32")).pipeline is DType.FP32


def test_a_loss_scale_is_dynamic_under_fp16_and_static_where_given() -> None:
    assert resolve(MixedPrecisionConfig(bf16=True)).loss_scale is None
    fp16 = resolve(MixedPrecisionConfig(fp16=True)).loss_scale
    assert fp16 is not None
    assert (fp16.dynamic, fp16.initial, fp16.window, fp16.hysteresis) == (True, 2.0**32, 1000.0, 2)
    static = resolve(MixedPrecisionConfig(bf16=True, loss_scale=8)).loss_scale
    assert static is not None
    assert (static.dynamic, static.static) == (False, 8.0)


def test_autocast_takes_its_own_dtype_or_the_computes() -> None:
    assert resolve(MixedPrecisionConfig(bf16=True, autocast_dtype="fp16")).autocast is None
    assert resolve(MixedPrecisionConfig(bf16=True, autocast_enabled=True)).autocast is DType.BF16
    assert resolve(MixedPrecisionConfig(bf16=True, autocast_enabled=True, autocast_dtype="fp16")).autocast is DType.FP16


def test_low_precision_states_ask_for_the_precision_aware_optimizer_by_themselves() -> None:
    assert resolve(MixedPrecisionConfig(bf16=True, exp_avg_dtype="bf16")).precision_aware is True
    assert resolve(MixedPrecisionConfig(bf16=True)).precision_aware is None
    assert resolve(get_mixed_precision_config("full_bf16")).precision_aware is False


NUMBERS = st.one_of(st.integers(-3, 2000), st.floats(allow_nan=False))
ANYTHING = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4), st.lists(st.integers(), max_size=1))
WORDS = st.sampled_from(["e4m3", "hybrid", "e2m1", "tensorwise", "delayed", "mxfp8", "nvfp4", "custom", "max", "fp32", "a.b"])  # fmt: skip
FIELDS = MixedPrecisionConfig.__dataclass_fields__
PLAIN = [name for name in FIELDS if not name.endswith("_dtype") or name == "moe_router_dtype"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(PLAIN), st.one_of(ANYTHING, WORDS, st.booleans()), max_size=8))
def test_whatever_the_values_the_answer_is_a_policy_or_a_contradiction(values: dict[str, Any]) -> None:
    try:
        policy = resolve(MixedPrecisionConfig(**values))
    except Contradiction:
        return
    assert PrecisionPolicy.from_data(policy.as_data()) == policy


def test_the_first_loss_scale_costs_as_many_steps_as_megatron_cores_scaler_takes_to_come_down() -> None:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from mpbridge.backend.devices import device_layer
    from mpbridge.precision.policy import LossScale

    with device_layer(False):
        for initial, minimum, hysteresis, end in ((2.0**32, 1.0, 2, 1.0), (2.0**32, 1.0, 2, 2.0**16), (2.0**16, 4.0, 1, 4.0), (3e9, 1.0, 3, 1.0)):  # fmt: skip
            scaler = DynamicGradScaler(initial, minimum, 2.0, 0.5, 1000, hysteresis)
            overflows = 0
            while float(scaler.scale) > end:
                scaler.update(True)
                overflows += 1
            assert LossScale(initial=initial, minimum=minimum, hysteresis=hysteresis).skips(end) == overflows
    assert LossScale(static=128.0).skips() == 0


def test_the_loss_scale_does_not_depend_on_how_long_a_run_is() -> None:
    from mpbridge.settings.container import ConfigContainer

    runs = [ConfigContainer.load("gpt_tiny", ["mixed_precision=fp16_mixed", f"train.train_iters={n}"]).resolved() for n in (1, 12, 10**6)]  # fmt: skip
    assert {run.policy.loss_scale for run in runs} == {runs[0].policy.loss_scale}
    assert {run.plan.of("optimizer").get("initial_loss_scale") for run in runs} == {runs[0].plan.of("optimizer").get("initial_loss_scale")}  # fmt: skip


def test_a_floor_at_the_start_is_legal():
    scale = resolve(MixedPrecisionConfig(fp16=True, min_loss_scale=4, initial_loss_scale=4)).loss_scale
    assert scale is not None
    assert (scale.minimum, scale.initial) == (4, 4)
