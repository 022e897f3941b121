"""MixedPrecisionConfig: a function of its values, however it was made, copied or written down."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any, ClassVar

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, recipes, resolve
from mpbridge.common.errors import BadValue, Contradiction, UnknownName
from mpbridge.common.formats import DType
from mpbridge.precision.inert import inert
from tests.light import loaded_by

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "replace": lambda c: dataclasses.replace(c),
    "asdict": lambda c: MixedPrecisionConfig(**{f.name: getattr(c, f.name) for f in dataclasses.fields(c)}),
    "stored": lambda c: MixedPrecisionConfig(**c.stored()),
    "derive": lambda c: c.derive(),
    "yaml": lambda c: MixedPrecisionConfig.from_data(yaml.safe_load(yaml.safe_dump(c.as_data(), sort_keys=False))),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_by_any_way_is_equal_and_means_the_same(way: str) -> None:
    for name in recipes:
        config = get_mixed_precision_config(name)
        other = WAYS[way](config)
        assert other == config
        assert resolve(other) == resolve(config)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_shares_nothing(way: str) -> None:
    config = MixedPrecisionConfig(bf16=True)
    other = WAYS[way](config)
    other.grad_reduce_in_fp32 = False
    other.params_dtype = "fp32"
    assert (config.grad_reduce_in_fp32, config.params_dtype) == (True, None)
    assert other != config


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_shares_no_mapping_or_list_either(way: str) -> None:
    rules, options, globs = (
        {"mlp.*": [{"layers": [0], "precision": "bf16"}, "mxfp8"]},
        {"power_of_two": True},
        ["*norm*"],
    )
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", modules=rules, fp8_options=options, keep_fp32=globs)  # type: ignore[arg-type]
    other, meant = WAYS[way](config), resolve(config).fingerprint()
    for mine in (rules, other.modules):
        mine["mlp.*"][0]["layers"].append(1)
        mine["mlp.*"].pop()
        mine["*"] = "bf16"
    for changed in (options, other.fp8_options):
        changed["power_of_two"] = False
    globs.append("*bias*")
    assert resolve(config).fingerprint() == meant


def test_values_are_kept_in_plain_types() -> None:
    from megatron.core.enums import Fp8Recipe

    rule = {"fp8": "e4m3", "fp8_recipe": Fp8Recipe.mxfp8}
    config = MixedPrecisionConfig(
        bf16=True, fp8="hybrid", fp8_recipe=Fp8Recipe.tensorwise, modules={"mlp.*": rule}, keep_fp32=["*norm*"], moe_router_dtype=torch.float32
    )  # type: ignore[arg-type]  # fmt: skip
    assert yaml.safe_load(yaml.safe_dump(config.as_data())) == {
        "bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "modules": {"mlp.*": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}},
        "keep_fp32": ["*norm*"], "moe_router_dtype": "fp32",
    }  # fmt: skip
    assert MixedPrecisionConfig.from_data(config.as_data()) == config
    assert "Fp8Recipe" not in repr(resolve(config))
    assert resolve(config).router is DType.FP32
    with pytest.raises(Contradiction, match="moe_router_dtype='bf16' is not one of fp32, fp64"):
        resolve(config.derive(moe_router_dtype=torch.bfloat16))


def test_a_subclass_may_have_fields_of_its_own() -> None:
    @dataclasses.dataclass(kw_only=True, eq=False, repr=False)
    class Own(MixedPrecisionConfig):
        extra: int = 0
        kind: ClassVar[str] = "own"

    assert inert(Own(bf16=True, extra=3, hysteresis=4)) == inert(MixedPrecisionConfig(bf16=True, hysteresis=4)) != ()
    assert Own(bf16=True, extra=3).derive(fp16=False).extra == 3


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16, DType.BF16])
def test_a_dtype_goes_in_in_any_spelling_and_comes_out_as_torchs(spelling: Any) -> None:
    assert MixedPrecisionConfig(params_dtype=spelling).params_dtype is torch.bfloat16
    assert MixedPrecisionConfig(params_dtype=spelling) == MixedPrecisionConfig(params_dtype="bf16")


def test_an_unknown_attribute_is_refused_with_the_nearest_name() -> None:
    config = MixedPrecisionConfig()
    for attempt in (
        lambda: setattr(config, "grad_reduce_in_fp23", True),
        lambda: config.grad_reduce_in_fp23,
        lambda: config.derive(grad_reduce_in_fp23=True),
        lambda: MixedPrecisionConfig.from_data({"grad_reduce_in_fp23": True}),
    ):
        with pytest.raises(UnknownName, match="nearest: grad_reduce_in_fp32"):
            attempt()
    with pytest.raises(UnknownName, match="no field of MixedPrecisionConfig named '1'"):
        MixedPrecisionConfig.from_data({1: 2})  # type: ignore[dict-item]
    assert not hasattr(config, "__wrapped__")  # dunders stay Python's


@pytest.mark.parametrize("given", [True, "bf16_mixed", {"bf16": True}])
def test_a_value_without_a_name_is_refused_with_the_way_out(given: Any) -> None:
    said = rf"got {re.escape(repr(given))}, expected .*bf16=True.*get_mixed_precision_config.*MixedPrecisionConfig\.from_data"
    with pytest.raises(BadValue, match=said):
        MixedPrecisionConfig(given)


@pytest.mark.parametrize(("one", "other"), [("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")])
def test_twin_fields_are_one_fact(one: str, other: str) -> None:
    assert getattr(MixedPrecisionConfig(**{one: True}), other) is True
    assert getattr(MixedPrecisionConfig(**{other: False}), one) is False
    with pytest.raises(
        Contradiction,
        match=r"are the same setting.*after dataclasses\.replace, which passes both: assign it",
    ):
        dataclasses.replace(MixedPrecisionConfig(**{one: True}), **{other: False})
    with pytest.raises(Contradiction, match="are the same setting"):
        MixedPrecisionConfig(bf16=True).derive(**{one: True, other: False})
    config = MixedPrecisionConfig(**{one: True})
    setattr(config, other, False)  # a later assignment sets both
    assert getattr(config, one) is False
    assert getattr(config.derive(**{one: True}), other) is True
    with pytest.raises(Contradiction):
        config.derive(**{one: True, other: False})
    assert getattr(config.derive(**{one: True, other: None}), other) is True


def test_comparing_printing_and_dumping_load_no_torch() -> None:
    code = (
        "from mpbridge import MixedPrecisionConfig, get_mixed_precision_config as get, recipes, resolve\n"
        "for name in recipes:\n    c = get(name); repr(c); c.as_data(); assert c == get(name); resolve(c).fingerprint()\n"
    )
    assert loaded_by(code) == []
    assert "torch" in loaded_by(f"{code}c.params_dtype")  # as reading a dtype does


def test_repr_shows_what_differs_from_the_defaults() -> None:
    shown = repr(MixedPrecisionConfig(bf16=True, params_dtype=torch.bfloat16))
    assert shown == "MixedPrecisionConfig(bf16=True, params_dtype=bf16)"


def test_first_last_layers_alone_means_one_layer_at_each_end() -> None:
    # Megatron-LM's meaning; the neighbour's defaults make it zero layers
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", first_last_layers_bf16=True)
    assert resolve(config).ends == (1, 1)
    assert resolve(config.derive(num_layers_at_end_in_bf16=0)).ends == (1, 0)


_VALUES: dict[str, Any] = {
    "bool": st.booleans(), "int": st.integers(0, 9), "float": st.floats(1, 1e6),
    "str": st.sampled_from(["e4m3", "mxfp8", "fp32"]),
}  # fmt: skip


@settings(deadline=None)
@given(data=st.data())
def test_any_config_survives_yaml(data: st.DataObject) -> None:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(MixedPrecisionConfig):
        hint = str(field.type).removesuffix(" | None")
        kind = st.sampled_from([d.short for d in DType]) if hint == "DTypeField" else _VALUES.get(hint)
        if kind is not None and data.draw(st.booleans()):
            values[field.name] = data.draw(kind)
    for twin, other in (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")):
        if twin in values:
            values[other] = values[twin]
    config = MixedPrecisionConfig(**values)
    assert WAYS["yaml"](config) == config
