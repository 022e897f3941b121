"""What a plan says: who had set a field, which line keeps it, what is left alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from typing import Any

import pytest
import torch
from sync_kit import DDP, INPUTS, OPTIMIZER, POLICIES, live, planned

import mpbridge
from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.precision_field import UNSET
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.plan import Write, plan

BF16 = POLICIES["bf16_mixed"]


def write(policy: Any, name: str, **targets: Any) -> Write:
    return next(w for w in plan(policy, **targets).writes if w.name == name)


def test_inputs_that_name_no_field_are_nobodys_and_no_conflict() -> None:
    found = write(BF16, "model.bf16", model={})
    assert (found.before, found.after, found.set_by, found.conflict, found.keep) == (UNSET, True, "nobody", False, None)
    assert str(found) == "model.bf16: not given -> true  (the model computes in BF16)"


def test_inputs_that_agree_are_no_write_in_any_spelling() -> None:
    given = {
        "bf16": True, "params_dtype": "torch.bfloat16", "pipeline_dtype": torch.bfloat16, "autocast_dtype": DType.BF16,
    }  # fmt: skip
    assert plan(BF16, model=given).writes == ()


def test_a_live_value_is_what_it_was_never_what_you_set() -> None:
    inputs = {**INPUTS["dense"], "optimizer": OPTIMIZER | {"initial_loss_scale": 4096.0}}
    found = next(w for w in planned(live(inputs), POLICIES["fp16_mixed"]).conflicts if w.field == "initial_loss_scale")
    assert "was 4096.0, becomes 2**32" in str(found)
    assert "was not the default" in str(found)
    assert "set by" not in str(found)
    assert "you" not in str(found)


def test_what_megatron_core_derived_is_no_conflict() -> None:
    inputs = {**INPUTS["dense"], "model": INPUTS["dense"]["model"] | {"params_dtype": torch.bfloat16}}
    fields = {w.name: w for w in planned(live(inputs), POLICIES["fp16_mixed"]).writes}
    assert fields["model.autocast_dtype"].set_by == "derived"
    assert fields["model.params_dtype"].conflict


WITHOUT_LINE = ("quant_recipe", "preserve_fp32_weights", "fp4_param_gather", "fp4_param")
KEEPERS = [row for row in TABLE if row.knob is not None and row.field not in WITHOUT_LINE]
OTHERS = {
    "fp8": "e4m3",
    "pipeline_dtype": DType.FP32, "autocast_dtype": DType.FP16, "moe_router_dtype": "fp64", "fp8_amax_compute_algo": "max", "loss_scale": 64.0, "main_params_dtype": DType.FP16,
    "main_grads_dtype": DType.BF16, "exp_avg_dtype": DType.FP16, "exp_avg_sq_dtype": DType.FP16, "initial_loss_scale": 2.0**20, "min_loss_scale": 4.0,
    "loss_scale_window": 50.0, "hysteresis": 5, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2, "fp8_margin": 3, "fp8_amax_history_len": 16,
}  # fmt: skip
BASES = {  # a config under which each knob may turn
    "delayed": MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_dot_product_attention=True),
    "edges": get_mixed_precision_config("fp8_cs"), "mxfp8": get_mixed_precision_config("mxfp8"), "fp16": get_mixed_precision_config("fp16"),
    "fp32": get_mixed_precision_config("fp32"), "bf16": MixedPrecisionConfig(bf16=True), "full": get_mixed_precision_config("full_bf16"),
    "aware": MixedPrecisionConfig(bf16=True, use_precision_aware_optimizer=True),
    "states": MixedPrecisionConfig(
        bf16=True, use_precision_aware_optimizer=True, grad_reduce_in_fp32=False, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", main_params_dtype="fp32",
        main_grads_dtype="fp32", store_param_remainders=True,
    ),
    "autocast": MixedPrecisionConfig(bf16=True, autocast_enabled=True),
    "softmax": MixedPrecisionConfig(bf16=True, attention_softmax_in_fp32=True, fp32_residual_connection=True, moe_router_dtype="fp32"),
}  # fmt: skip


@pytest.mark.parametrize("row", KEEPERS, ids=lambda row: f"{row.target}.{row.field}")
def test_the_line_that_would_keep_a_value_keeps_it(row: Any) -> None:
    kept = 0
    for base, section in itertools.product(BASES, (None, {})):
        config = BASES[base]
        current = resolve(config, optimizer=section)
        other = OTHERS.get(row.field)
        if other is None:  # a flag: the other way round from what the recipe says
            now = plan(current, **{row.target: {}}).of(row.target).get(row.field, row.default)
            other = not now
        found = [w for w in plan(current, **{row.target: {row.field: other}}).writes if w.field == row.field]
        if not found or found[0].keep is None:
            continue  # nothing overridden, or only another recipe keeps it
        field, _, value = found[0].keep.removeprefix("mixed_precision.").partition("=")
        read = json.loads(value) if value in ("true", "false", "null") or value[:1].isdigit() else value
        kept_policy = resolve(config.derive(**{field: read}))  # the line contradicts nothing
        written = plan(kept_policy, **{row.target: {row.field: other}}).of(row.target)
        assert row.field not in written, (base, found[0].keep)
        kept += 1
    assert kept


@pytest.mark.parametrize("field", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_a_moment_in_the_dtype_of_the_parameters_has_a_line_that_keeps_it(field: str) -> None:
    author = {field: DType.BF16}
    (write,) = plan(resolve(BASES["bf16"], optimizer=author), optimizer=author).conflicts
    assert write.keep == f"mixed_precision.{field}=bf16"
    kept = BASES["bf16"].derive(**{field: "bf16"})
    assert not plan(resolve(kept, optimizer=author), optimizer=author).conflicts


def test_the_users_own_precision_fields_are_reported_and_left_alone() -> None:
    own = {"model": "disable_bf16_reduced_precision_matmul", "ddp": "reduce_scatter_with_fp32_accumulation"}
    made = plan(BF16, **{target: {field: True} for target, field in own.items()})
    assert {k.target: k.field for k in made.kept} == own
    assert len(made.kept) == 2
    assert "whole process" in str(made)
    assert own["model"] not in made.of("model")


def test_none_without_a_receipt_writes_nothing() -> None:
    assert plan(None, **INPUTS["dense"]).writes == ()
    assert str(plan(None, **INPUTS["dense"])) == "nothing to write"


def test_as_data_is_json_and_holds_policy_and_writes() -> None:
    for policy in (*POLICIES.values(), None):
        data = plan(policy, **INPUTS["dense"]).as_data()
        assert json.loads(json.dumps(data)) == data
    data = plan(BF16, ddp=DDP | {"grad_reduce_in_fp32": False}).as_data()
    assert data["fingerprint"] == BF16.fingerprint()
    assert [w["keep"] for w in data["writes"]] == ["mixed_precision.grad_reduce_in_fp32=false"]


def test_what_is_no_policy_and_no_realization_is_refused() -> None:
    # taken for "not native", a misspelled one would have planned 16 bits without apply() asking whether emulation is attached
    with pytest.raises(BadValue, match="expected 'native' or 'emulated'"):
        plan(POLICIES["bf16_with_fp8_current_scaling_mixed"], model={}, realization="emulate")  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="expected a recipe's name, its config, or the PrecisionPolicy"):
        plan(3, model={})  # type: ignore[arg-type]
    settled = plan(mpbridge.resolve("bf16_mixed"), model={}, ddp={})
    for given in ("bf16", get_mixed_precision_config("bf16_mixed")):
        assert plan(given, model={}, ddp={}) == settled
    with pytest.raises(BadValue, match="expected a MixedPrecisionConfig"):
        resolve("bf16_mixed")  # type: ignore[arg-type]


def test_in_a_bag_without_declarations_none_means_unset() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    bag = types.SimpleNamespace(**dict.fromkeys(field.name for field in dataclasses.fields(TransformerConfig)))
    assert plan(BF16, model=bag).conflicts == ()
    assert plan(BF16, model=bag).of("model")["bf16"] is True
