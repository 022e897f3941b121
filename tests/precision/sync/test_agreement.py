"""Built from inputs, applied to live objects and freshly constructed: one result, whatever was there before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sync_kit import CLASSES, INPUTS, MODELS, POLICIES, applied, built, facts_of, fresh, live, planned

from mpbridge.precision.sync.plan import Receipt, plan

pytestmark = pytest.mark.usefixtures("te_version")
NAMES = list(POLICIES)


@pytest.mark.parametrize("shape", MODELS)
def test_three_ways_end_in_the_same_configs(shape: str) -> None:
    inputs = INPUTS[shape]
    for name, policy in POLICIES.items():
        objects = live(inputs)
        applied(objects, policy)
        expected = facts_of(fresh(inputs, policy))
        assert facts_of(objects) == expected, name
        assert facts_of(built(inputs, policy)) == expected, name


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("realization", ["native", "emulated"])
def test_a_second_plan_is_empty(shape: str, realization: Any) -> None:
    for name, policy in POLICIES.items():
        inputs = INPUTS[shape]
        objects = built(inputs, policy, realization=realization)
        assert planned(objects, policy, realization=realization).writes == (), name
        first = plan(policy, **inputs, realization=realization)
        again = {target: section | first.of(target) for target, section in inputs.items()}
        assert plan(policy, **again, realization=realization).writes == (), name


def test_a_switch_ends_where_going_straight_there_ends() -> None:
    """Every pair of recipes, on one of the models; each recipe is first and second on each of them."""
    policies, shapes = (*POLICIES.values(), None), list(MODELS)
    straight = {shape: [facts_of(fresh(INPUTS[shape], policy)) for policy in policies] for shape in shapes}
    for i, first in enumerate(policies):
        started = {shape: live(INPUTS[shape]) for shape in shapes}
        receipts = {shape: applied(objects, first) for shape, objects in started.items()}
        for j, second in enumerate(policies):
            shape = shapes[(i + j) % len(shapes)]
            objects = copy.deepcopy(started[shape])
            applied(objects, second, receipts[shape])
            assert facts_of(objects) == straight[shape][j], (first, second, shape)


AUTHORS: dict[str, tuple[Any, ...]] = {
    "model.bf16": (False, True), "model.params_dtype": (torch.float32, torch.bfloat16), "model.enable_autocast": (False, True),
    "model.first_last_layers_bf16": (False, True), "model.num_layers_at_start_in_bf16": (1, 2),
    "model.moe_router_dtype": (None, "fp32", "fp64"), "model.fp32_residual_connection": (False, True),
    "model.attention_softmax_in_fp32": (True, False), "model.activation_func_fp8_input_store": (False,),
    "optimizer.initial_loss_scale": (2.0**32, 2.0**16), "optimizer.loss_scale": (None, 128.0),
    "optimizer.store_param_remainders": (True, False), "optimizer.use_precision_aware_optimizer": (False, True),
    "optimizer.fp8_recipe": (None, "tensorwise"), "ddp.grad_reduce_in_fp32": (False, True),
    "ddp.check_for_nan_in_grad": (False, True), "ddp.keep_fp8_transpose_cache": (False, True),
    "ddp.use_megatron_fsdp": (False, True), "ddp.preserve_fp32_weights": (True, False),
}  # fmt: skip
"""What authors may have set before they chose a recipe."""


@st.composite
def authored(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    inputs = copy.deepcopy(INPUTS[draw(st.sampled_from(list(MODELS)))])
    for key, values in AUTHORS.items():
        target, field = key.split(".")
        if field not in CLASSES[target].__dataclass_fields__:
            continue  # another version's
        value = draw(st.sampled_from((None, *values)))
        if value is not None:
            inputs[target][field] = value
    if draw(st.booleans()):
        experts = bool(inputs["model"].get("num_moe_experts"))
        inputs["model"] |= {"fp8": "hybrid", "fp8_recipe": "tensorwise", "moe_router_padding_for_quantization": experts}
        inputs["model"] |= {"moe_token_dispatcher_type": "alltoall"} if experts else {}
    if inputs["optimizer"].get("use_precision_aware_optimizer"):
        inputs["optimizer"] |= {"exp_avg_dtype": draw(st.sampled_from((torch.float32, torch.bfloat16)))}
    return inputs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inputs=authored(), steps=st.lists(st.sampled_from([*NAMES, None]), min_size=1, max_size=6))
def test_any_sequence_of_recipes_ends_where_going_straight_to_its_last_ends(
    inputs: dict[str, dict[str, Any]], steps: list[str | None]
) -> None:
    objects, receipt = live(inputs), Receipt()
    for name in steps:
        receipt = applied(objects, None if name is None else POLICIES[name], receipt)
    last = None if steps[-1] is None else POLICIES[steps[-1]]
    assert facts_of(objects) == facts_of(fresh(inputs, last))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inputs=authored(), name=st.sampled_from(NAMES))
def test_what_an_author_wrote_changes_nothing_that_a_policy_decides(
    inputs: dict[str, dict[str, Any]], name: str
) -> None:
    assert facts_of(built(inputs, POLICIES[name])) == facts_of(fresh(inputs, POLICIES[name]))


def test_a_field_changed_between_two_recipes_is_given_back_as_changed() -> None:
    objects = live(INPUTS["dense"])
    receipt = applied(objects, POLICIES["fp16_mixed"])
    assert objects.ddp.check_for_nan_in_grad is False
    objects.model.pipeline_dtype = torch.float32
    receipt = applied(objects, None, receipt)
    assert objects.ddp.check_for_nan_in_grad is True
    assert (objects.model.fp16, objects.model.pipeline_dtype) == (False, torch.float32)
