"""PrecisionPolicy: frozen facts, per layer and module, with a fingerprint that means one thing."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, recipes, resolve
from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType
from mpbridge.precision.policy import PrecisionPolicy, Quant, Region

POLICIES = {name: resolve(get_mixed_precision_config(name)) for name in recipes}
FP8 = Quant(format="hybrid", scaling="tensorwise")


def test_a_policy_is_frozen_hashable_and_survives_json_and_pickle() -> None:
    for name in POLICIES:
        policy = POLICIES[name]
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.compute = DType.FP32  # type: ignore[misc]
        assert PrecisionPolicy.from_data(json.loads(json.dumps(policy.as_data()))) == policy
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert len({policy, pickle.loads(pickle.dumps(policy))}) == 1


def test_fingerprints_tell_policies_apart_and_aliases_together() -> None:
    assert len({policy.fingerprint() for policy in POLICIES.values()}) == len(set(POLICIES.values()))
    assert resolve(get_mixed_precision_config("bf16")).fingerprint() == POLICIES["bf16_mixed"].fingerprint()


def test_a_fingerprint_writes_every_field_and_a_schema() -> None:
    data = POLICIES["fp32"].as_data()
    later = {"accumulate", "frozen"}  # written where it is said, so that older fingerprints stay what they are
    assert set(data) == {"schema", *(field.name for field in dataclasses.fields(PrecisionPolicy))} - later
    apart = dataclasses.replace(POLICIES["bf16_mixed"], accumulate=DType.BF16)
    assert apart.as_data()["accumulate"] == "bf16"
    assert PrecisionPolicy.from_data(json.loads(json.dumps(apart.as_data()))) == apart
    with pytest.raises(BadValue, match="policy schema 99"):
        PrecisionPolicy.from_data(data | {"schema": 99})


def test_two_configs_that_mean_the_same_have_one_fingerprint() -> None:
    short = MixedPrecisionConfig(bf16=True)
    long = MixedPrecisionConfig(bf16=True, params_dtype="bf16", pipeline_dtype="bf16", fp8_recipe="delayed")
    assert short != long
    assert resolve(short).fingerprint() == resolve(long).fingerprint()


@settings(deadline=None)
@given(first=st.integers(0, 4), last=st.integers(0, 4), layers=st.integers(1, 12))
def test_edges_are_counted_over_the_whole_model(first: int, last: int, layers: int) -> None:
    policy = dataclasses.replace(POLICIES["bf16_mixed"], regions=(Region(first=first, last=last), Region(quant=FP8)))
    high = [layer for layer in range(layers) if policy.at("mlp.linear_fc1", layer, layers) is None]
    assert high == list(policy.bf16_layers(layers))
    assert high == sorted(set(range(min(first, layers))) | set(range(max(0, layers - last), layers)))
    assert policy.ends == (first, last)


def test_the_first_region_that_covers_a_module_decides() -> None:
    other = Quant(format="e4m3", scaling="mxfp8")
    regions = (Region(modules="mlp.linear_fc2"), Region(modules="mlp.*", first=1, quant=other), Region(quant=FP8))
    policy = dataclasses.replace(POLICIES["bf16_mixed"], regions=regions)
    linears = (("mlp.linear_fc2", 0), ("mlp.linear_fc1", 0), ("mlp.linear_fc1", 1))
    assert [policy.at(module, layer, 4) for module, layer in linears] == [None, other, FP8]
    assert policy.quants == (other, FP8)
    assert policy.module_regions == regions[:2]


def test_16_bit_parameters_alone_are_one_question_whether_stated_or_resolved() -> None:
    for policy in POLICIES.values():
        stated = policy.main_params in (DType.BF16, DType.FP16) and policy.params is policy.main_params
        assert policy.narrow_alone is stated
    # weights at rest in FP8 have no 16-bit parameters that could be their own main weights: FusedAdam is asked for
    fp8 = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param": True}
    stored = MixedPrecisionConfig(bf16=True, main_params_dtype="bf16", **fp8)
    assert not resolve(stored).narrow_alone
    assert resolve(stored).precision_aware is True
    assert resolve(stored.derive(fp8_param=False)).narrow_alone
    assert resolve(stored.derive(fp8_param=False)).precision_aware is False


def test_settling_fills_what_is_open_and_changes_nothing_that_is_stated() -> None:
    section = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "store_param_remainders": False}
    settled = POLICIES["bf16_mixed"].settled(section)
    assert (settled.precision_aware, settled.exp_avg, settled.remainders) == (True, DType.BF16, False)
    assert settled.settled({"exp_avg_dtype": "fp16"}) == settled
    # megatron-core reads the state dtypes only under a precision-aware optimizer
    assert POLICIES["bf16_mixed"].settled({"exp_avg_dtype": "bf16"}).exp_avg is DType.FP32
    section = {"use_precision_aware_optimizer": False, "exp_avg_dtype": "fp16"}
    stated = POLICIES["bf16_mixed_bf16_moments"].settled(section)
    assert (stated.precision_aware, stated.exp_avg) == (True, DType.BF16)


def test_element_formats() -> None:
    assert (FP8.element(gradient=False), FP8.element(gradient=True), FP8.bits) == ("e4m3", "e5m2", 8)
    four = Quant(format="e2m1", scaling="nvfp4")
    assert (four.element(gradient=True), four.bits) == ("e2m1", 4)
