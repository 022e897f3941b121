"""No fact of a policy is dropped in silence: every recipe, every stack, every field of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpbridge import MixedPrecisionConfig, recipes
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Export, Imported
from mpbridge.interop.stacks.exporters import STACKS, export
from mpbridge.interop.stacks.importers import read_args, read_text
from mpbridge.interop.stacks.meaning import differences, of_policy
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

Change = tuple[Mapping[str, Any], Mapping[str, Any]]
AWARE = {"use_precision_aware_optimizer": True}
FP16 = {"bf16": False, "fp16": True, "params_dtype": "fp16", "pipeline_dtype": "fp16"}

# field of PrecisionPolicy -> changes of a config that change it: (what is set beforehand, the change). A change that a recipe does not take is left out
CHANGES: dict[str, tuple[Change, ...]] = {
    "compute": (({}, FP16),),
    "params": (({}, {"params_dtype": "fp32", "main_params_dtype": "fp32"}),),
    "gather": (({}, {"params_dtype": "fp32", "main_params_dtype": "fp32"}),),
    "reduce": (({}, {"grad_reduce_in_fp32": False}), ({}, {"grad_reduce_in_fp32": True})),
    "accumulate": (({"grad_reduce_in_fp32": False}, {"grad_accumulation_dtype": "fp32"}),),
    "main_grads": (({"grad_reduce_in_fp32": False, **AWARE}, {"main_grads_dtype": "bf16"}),),
    "main_params": (({"grad_reduce_in_fp32": False}, {"main_params_dtype": "bf16"}), ({**AWARE, "store_param_remainders": False}, {"main_params_dtype": "fp16"})),
    "precision_aware": (({}, AWARE),),
    "remainders": ((AWARE, {"store_param_remainders": False}),),
    "exp_avg": ((AWARE, {"exp_avg_dtype": "bf16"}), (AWARE, {"exp_avg_dtype": "fp8"})),
    "exp_avg_sq": ((AWARE, {"exp_avg_sq_dtype": "bf16"}), (AWARE, {"exp_avg_sq_dtype": "fp16"})),
    "pipeline": (({}, {"pipeline_dtype": "fp32"}),),
    "output": (({}, {"output_dtype": "fp32"}),),
    "autocast": (({}, {"autocast_enabled": True}),),
    "loss_scale": tuple(({}, {name: value}) for name, value in (
        ("loss_scale", 1024.0), ("initial_loss_scale", 65536.0), ("min_loss_scale", 2.0), ("loss_scale_window", 500.0), ("hysteresis", 3))),
    "regions": (
        ({}, {"modules": {"mlp.linear_fc2": "bf16"}}),
        ({}, {"modules": {"mlp.*": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}}),
        ({}, {"modules": {"mlp.*": {"layers": "2-5", "precision": "bf16"}}}),
        ({}, {"modules": {"mlp.*": {"layers": "last 2", "precision": "bf16"}}}),
        ({}, {"modules": {"mlp.linear_fc1": {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "bf16"}}}),
        ({}, {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 3, "num_layers_at_end_in_bf16": 4}),
        ({"first_last_layers_bf16": True}, {"num_layers_at_end_in_bf16": 2}),
        *(({}, said) for said in (
            {"fp8": "e4m3"}, {"fp8": "hybrid"}, {"fp8": "e4m3", "fp8_recipe": "tensorwise"}, {"fp8_param": True}, {"fp4_param": True}, {"fp8_margin": 1},
            {"fp8_param": False, "reuse_grad_buf_for_mxfp8_param_ag": False}, {"fp8_amax_history_len": 16}, {"fp8_amax_compute_algo": "most_recent"},
            {"fp8_amax_compute_algo": "max"}, {"fp8_wgrad": False}, {"fp8_dot_product_attention": True})),
        ({"fp8_dot_product_attention": True}, {"fp8_multi_head_attention": True}),
        ({}, {"fp8_options": {"power_of_two": True}}),
        ({}, {"fp4_options": {"stochastic_rounding": False}}),
        ({"reuse_grad_buf_for_mxfp8_param_ag": False, "fp8_quantizer_factory": "a.b"}, {"fp8_recipe": "custom"}),
        ({"reuse_grad_buf_for_mxfp8_param_ag": False, "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b"}, {"fp8_quantizer_factory": "a.c"}),
    ),
    "reuse_grad_buffer": (({"fp8_param": True}, {"reuse_grad_buf_for_mxfp8_param_ag": False}),),
    "keep_fp32": (({}, {"keep_fp32": ("*norm*",)}),),
    "frozen": (({}, {"frozen": ("embedding.*",)}),),
    "logits": (({}, {"logit_dtype": "fp32"}),),
    "router": (({}, {"moe_router_dtype": "fp32"}), ({}, {"moe_router_dtype": "fp64"})),
    "residual_fp32": (({}, {"fp32_residual_connection": True}), ({}, {"fp32_residual_connection": False})),
    "softmax_fp32": (({}, {"attention_softmax_in_fp32": True}), ({}, {"attention_softmax_in_fp32": False})),
}  # fmt: skip

# what may be stated without an effect on the engine: these need no word where no tensor and no step differs for it
# softmax: in FP32 wherever all is
MAY_HAVE_NO_EFFECT = ("precision_aware", "main_grads", "remainders", "gather", "accumulate", "regions", "softmax_fp32")
AUTOCAST = ("lightning", "transformers")
# (stacks, field, value): what a run there has without a word about it, as read in their sources
OWN_DEFAULTS = {
    ("torchtitan",): {"router": ("fp32",)},
    ("megatron-lm", "megatron-bridge"): {"residual_fp32": (False,), "softmax_fp32": (True, False)},
    ("automodel", "torchtitan", "fsdp2", "accelerate", "deepspeed"): {"residual_fp32": (False,)},
    AUTOCAST: {"residual_fp32": (True, False), "softmax_fp32": (True,)},
}


def test_every_field_of_a_policy_is_changed_here() -> None:
    assert set(CHANGES) == set(PrecisionPolicy.__dataclass_fields__)


def taken(field: str, given: Mapping[str, Any], change: Mapping[str, Any]) -> list[Any]:
    """(recipe, before, after, change) of each recipe that takes a change, where it changes the field."""
    found = []
    for name in recipes:
        try:
            before = get_mixed_precision_config(name).derive(**given)
            after = before.derive(**change)
            one, other = resolve(before), resolve(after)
        except MpbridgeError:
            continue
        if getattr(one.settled(), field) != getattr(other.settled(), field):
            found.append((name, before, after, change))
    return found


def pairs(field: str) -> Iterator[tuple[str, Any]]:
    """Every change with every stack, on one of the recipes that take it, another for each stack and change."""
    seen = 0
    for at, (given, change) in enumerate(CHANGES[field]):
        found = taken(field, given, change)
        for number, stack in enumerate(STACKS):
            seen += len(found)
            if found:
                yield stack, found[(at + number) % len(found)]
    assert seen, "no recipe takes this change: the test would say nothing"


def by_default(stack: str, field: str, after: MixedPrecisionConfig) -> bool:
    policy = resolve(after)
    value = getattr(policy, field)
    if value is True and policy.compute is DType.FP32 and field in ("residual_fp32", "softmax_fp32"):
        return True
    value = getattr(value, "short", value)
    return any(stack in stacks and value in facts.get(field, ()) for stacks, facts in OWN_DEFAULTS.items())


def without_effect(field: str, before: MixedPrecisionConfig, after: MixedPrecisionConfig, engine: str) -> bool:
    one, other = (of_policy(resolve(config), engine=engine) for config in (before, after))
    return field in MAY_HAVE_NO_EFFECT and not differences(one, other)


@pytest.mark.parametrize("field", CHANGES)
def test_a_fact_is_written_told_or_the_stacks_own(field: str) -> None:
    for stack, (name, before, after, change) in pairs(field):
        engine = recipes[name].engine or DEFAULT
        one, other = (export(config, stack, engine=engine) for config in (before, after))
        edges = any(key.startswith(("first_last", "num_layers")) for key in change)
        if edges and any(line.fact.endswith(" quantization") for line in other.lines):
            continue  # nothing is quantized there, the layers at the ends neither
        # a line of one of the two says what of it does not arrive: one text cannot mean both
        told = [{line for line in made.lines if line.fidelity != "exact"} for made in (one, other)]
        if told[0] != told[1] or by_default(stack, field, after) or without_effect(field, before, after, engine):
            continue
        # said in the pieces: and where they can be read back, what was read differs too
        texts = [[piece.text for piece in made.pieces] for made in (one, other)]
        assert texts[0] != texts[1], (name, dict(change), stack)
        first, second = read_back(one, stack), read_back(other, stack)
        if first is not None and len(other.pieces) == len(one.pieces) == 1:
            assert second is not None
            assert (first.fields, first.meaning) != (second.fields, second.meaning), (name, dict(change), stack)


def read_back(one: Export, stack: str) -> Imported | None:
    """What the stack's importer makes of an export; None for Python."""
    if stack not in READ:
        return None
    piece = one.pieces[0]
    if piece.name == "arguments":
        return read_args(piece.text.replace("\\\n", " "), stack=stack)
    return read_text(piece.text, stack=stack, name=piece.name)


READ = ("megatron-lm", "megatron-bridge", "automodel", "torchtitan", "deepspeed")
