"""The written table against the installed megatron-core."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from sync_kit import CLASSES, INPUTS, POLICIES, facts_of, fresh

from mpbridge.common.formats import DType, plain
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.classes import LOOKS_LIKE_PRECISION, NOT_PRECISION, PROCESS_WIDE, USERS_OWN
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.precision_field import KEEP, UNSET
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import described
from mpbridge.precision.sync.plan import plan

ROWS = {(row.target, row.field): row for row in TABLE}
CLASSED = {**USERS_OWN, **PROCESS_WIDE, **NOT_PRECISION}


def fields(version: str) -> dict[tuple[str, str], Any]:
    """(target, field) -> default, of the schema that scripts/generate/make_schema.py wrote from that megatron-core."""
    found = {target: records(target, latent=True, version=version) for target in CLASSES}
    return {(target, name): record["default"] for target in found for name, record in found[target].items()}


def installed() -> dict[tuple[str, str], Any]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    found = {("model", field.name): field for field in dataclasses.fields(MLATransformerConfig)}
    for name, config in CLASSES.items():
        found |= {(name, field.name): field for field in dataclasses.fields(config)}
    return found


def test_no_field_stands_in_two_rows_or_two_classes() -> None:
    places = [(row.target, row.field) for row in TABLE] + [*USERS_OWN, *PROCESS_WIDE, *NOT_PRECISION]
    assert len(places) == len(set(places))


def test_every_precision_looking_field_of_the_installed_megatron_core_is_in_one_class() -> None:
    looks = {key for key in installed() if LOOKS_LIKE_PRECISION.search(key[1])}
    assert len(looks) > 60  # the pattern still finds something
    assert looks - {*ROWS, *CLASSED} == set()


@pytest.mark.parametrize("version", described())
def test_every_precision_looking_field_of_a_version_is_in_one_class(version: str) -> None:
    looks = {key for key in fields(version) if LOOKS_LIKE_PRECISION.search(key[1])}
    assert len(looks) > 60
    assert looks - {*ROWS, *CLASSED} == set()


@pytest.mark.parametrize("version", described())
def test_a_row_exists_in_the_versions_that_it_says(version: str) -> None:
    there = {key for key, row in ROWS.items() if row.holds.holds(version)}
    assert there - set(fields(version)) == set()
    assert (set(ROWS) - there) & set(fields(version)) == set()


def test_the_classes_name_no_field_that_is_nowhere() -> None:
    assert set(CLASSED) - set().union(*map(fields, described())) == set()


@pytest.mark.parametrize("version", described())
def test_a_rows_default_is_megatron_cores(version: str) -> None:
    defaults = {key: default for key, default in fields(version).items() if key in ROWS}
    # the schema is JSON: dtypes are words there, tuples are lists
    assert {key: plain(ROWS[key].default) for key in defaults} == defaults


def test_every_knob_is_a_field_of_the_config_and_every_row_says_why() -> None:
    for row in TABLE:
        assert row.knob is None or row.knob in MixedPrecisionConfig.__dataclass_fields__
        assert row.why


def test_each_of_the_neighbours_31_fields_reaches_a_target_or_decides_another() -> None:
    # fp32 decides compute; fp4_param_gather has no field in megatron-core 0.16.1; autocast_enabled is called enable_autocast there
    ours = set(list(MixedPrecisionConfig.__dataclass_fields__)[:31])
    assert ours - {row.field for row in TABLE} == {"fp32", "autocast_enabled"}


@pytest.mark.usefixtures("te_version")
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_not_in_the_table_is_left_alone(name: str) -> None:
    inputs = INPUTS["dense"]
    before, after = facts_of(fresh(inputs, None)), facts_of(fresh(inputs, POLICIES[name]))
    changed = {key for key in before if before[key] != after.get(key)}
    derived = "optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8"  # by megatron-core's post-init: no field
    assert changed - {".".join(key) for key in ROWS} - {derived} == set()


def test_optimizer_fp8_recipe_is_written_only_with_fp8() -> None:
    # copied there with FP8 off it disables the precision-aware optimizer, silently (optimizer_config.py)
    for name, policy in POLICIES.items():
        written = plan(policy, optimizer={}).of("optimizer").get("fp8_recipe")
        assert written == ((policy.fp8.row.core or None) if policy.fp8 else None), name


def test_parameters_that_are_their_own_main_copy_get_the_plain_optimizer() -> None:
    full = plan(POLICIES["full_bf16"], model={}, optimizer={}, ddp={})
    assert full.of("model")["bf16"] is True
    assert "bf16" not in full.of("optimizer")
    assert plan(POLICIES["bf16_mixed"], optimizer={}).of("optimizer")["bf16"] is True


def test_router_dtype_is_a_string_and_a_torch_dtype_there_is_put_right() -> None:
    # megatron-core's router compares with 'fp32' and 'fp64'; torch.float32 does nothing, silently
    def written(name: str, given: Any) -> Any:
        return plan(POLICIES[name], model={"moe_router_dtype": given}).of("model").get("moe_router_dtype", UNSET)

    for given, expected in ((torch.float32, "fp32"), (DType.FP64, "fp64"), (torch.bfloat16, None), ("fp32", UNSET)):
        assert written("bf16_mixed", given) == expected
    assert written("states", "fp32") == "fp64"


@pytest.mark.parametrize(("name", "fsdp", "old", "new"), [
    ("full_bf16", True, False, None), ("full_bf16", False, UNSET, UNSET), ("bf16_megatron_fsdp", True, UNSET, UNSET), ("bf16_mixed", True, UNSET, UNSET),
    ("states", True, UNSET, UNSET),
])  # fmt: skip
def test_megatron_fsdp_drops_its_main_weights_only_where_a_policy_has_none(
    name: str, fsdp: bool, old: Any, new: Any
) -> None:
    def written(field: str, core: str) -> Any:
        return plan(POLICIES[name], ddp={"use_megatron_fsdp": fsdp}, core=core).of("ddp").get(field, UNSET)

    assert written("preserve_fp32_weights", "0.16.1") is old
    assert written("megatron_fsdp_main_params_dtype", "0.20.0") is new
    assert written("preserve_fp32_weights", "0.20.0") is UNSET
    assert written("megatron_fsdp_main_params_dtype", "0.16.1") is UNSET


def test_megatron_fsdp_is_told_of_fp32_gradients_in_the_words_of_its_version() -> None:
    # since 0.17 its wrapper no longer reads grad_reduce_in_fp32
    def ddp(core: str, fsdp: bool) -> dict[str, Any]:
        return plan(POLICIES["bf16_mixed"], ddp={"use_megatron_fsdp": fsdp}, core=core).of("ddp")

    assert ddp("0.16.1", True) == {"grad_reduce_in_fp32": True}
    assert ddp("0.20.0", True) == {"grad_reduce_in_fp32": True, "megatron_fsdp_main_grads_dtype": DType.FP32}
    assert ddp("0.20.0", False) == {"grad_reduce_in_fp32": True}


def test_weights_that_only_a_rule_stores_are_quantized_anew_by_the_optimizer() -> None:
    # core/optimizer/distrib_optimizer.py (d98e8a64): quantize_param_shard runs under ddp_config.fp8_param_gather, quantize_nvfp4_param_shard under fp4_param_gather
    for rule, field in (({"fp8": "hybrid", "fp8_param": True}, "fp8"), ({"fp4": "e2m1", "fp4_param": True}, "fp4")):
        config = MixedPrecisionConfig(bf16=True, modules={"mlp.linear_fc1": rule})
        written = plan(config, model={}, ddp={}, core="0.20.0")
        assert written.of("ddp") == {f"{field}_param_gather": True, "grad_reduce_in_fp32": True}
        assert f"{field}_param" not in written.of("model")
        # nothing but another rule keeps a switch off: the base's own does not decide here
        base = config.derive(**{field: rule[field]})
        (conflict,) = plan(base, ddp={f"{field}_param_gather": False}, core="0.20.0").conflicts
        assert conflict.keep is None
        (conflict,) = plan(
            base.derive(modules=None, **{f"{field}_param": True}), ddp={f"{field}_param_gather": False}, core="0.20.0"
        ).conflicts
        assert conflict.keep == f"mixed_precision.{field}_param_gather=false"


def test_emulation_tells_megatron_cores_model_and_wrapper_of_no_quantization() -> None:
    words = ("fp8", "fp4", "first_last", "num_layers", "quant")
    for name, policy in POLICIES.items():
        written = plan(policy, model={}, optimizer={}, ddp={}, realization="emulated")
        low = [write.name for write in written.writes if any(word in write.field for word in words)]
        # the optimizer is told: it decides by it who keeps main weights
        assert low == (["optimizer.fp8_recipe"] if policy.fp8 and policy.fp8.row.core else []), name


def test_the_marks_survive_a_pickle() -> None:
    assert pickle.loads(pickle.dumps(KEEP)) is KEEP
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET
