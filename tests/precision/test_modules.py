"""`modules`: layers, whole paths, one rule a GEMM, edge layers beside them; and policies written before any of that."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.errors import BadValue, Contradiction, Refused
from mpbridge.common.facts import ModelShape
from mpbridge.planning.memory.names import any_gpt, beyond_the_model, idle, linear_rules, refuse_idle_rules
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.globs import below
from mpbridge.precision.modules import layer_spans
from mpbridge.precision.policy import Gemms, PrecisionPolicy, Quant, Region
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

OLD = json.loads(Path(__file__).with_name("policies_schema_1.json").read_text())["policies"]
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
TENSORWISE, MXFP8, NVFP4 = Quant(format="hybrid", scaling="tensorwise"), Quant(format="e4m3", scaling="mxfp8"), Quant(format="e2m1", scaling="nvfp4")  # fmt: skip
SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, num_query_groups=4, kv_channels=16, vocab_size=64, seq_length=64,
    mtp_layers=1,
)  # fmt: skip


def policy(modules: dict[str, Any], **fields: Any) -> PrecisionPolicy:
    return resolve(MixedPrecisionConfig(bf16=True, modules=modules, **fields))


# --- old data ----------------------------------------------------------------------------------------------------------------------------
def test_a_policy_that_uses_nothing_new_is_written_as_before() -> None:
    for name in OLD:
        config = OLD[name]["config"]
        now = resolve(get_mixed_precision_config(name) if config is None else MixedPrecisionConfig(**config)).settled()
        assert json.loads(json.dumps(now.as_data())) == OLD[name]["data"]
        assert now.fingerprint() == OLD[name]["fingerprint"]
        assert PrecisionPolicy.from_data(OLD[name]["data"]) == now


def test_what_is_new_is_written_as_schema_2_and_read_back() -> None:
    new = policy(
        {"mlp.*": {"layers": "1-2", "fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "bf16"}, "*proj": {**FP8, "fp8_options": {"power_of_two": True}}}
    ).settled()  # fmt: skip
    data = json.loads(json.dumps(new.as_data()))
    assert data["schema"] == 2
    assert PrecisionPolicy.from_data(data) == new
    with pytest.raises(BadValue, match="schema 3: this mpbridge reads schemas 1 to 2"):
        PrecisionPolicy.from_data(data | {"schema": 3})


# --- layers ------------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("said", "covered"), [
    (3, [3]), ("2-4", [2, 3, 4]), ("-1", [7]), (-2, [6]), ("first 2", [0, 1]), ("last 2", [6, 7]),
    ([0, "3-4", "last 1"], [0, 3, 4, 7]), ("0, 5 to -2", [0, 5, 6]),
])  # fmt: skip
def test_layers_are_counted_from_either_end(said: Any, covered: list[int]) -> None:
    region = Region(layers=layer_spans(said))
    assert [layer for layer in range(8) if region.covers("mlp.linear_fc1", layer, 8)] == covered


@pytest.mark.parametrize("said", ["two", "4-2", "-1 to -3", "first 0", "first", [], True, 1.5, "1-2-3"])
def test_layers_that_mean_nothing_are_refused(said: Any) -> None:
    with pytest.raises(Contradiction, match="layers"):
        policy({"mlp.*": {"layers": said, **FP8}})


def test_one_glob_may_have_several_rules() -> None:
    made = policy({"mlp.*": [{"layers": "first 1", "precision": "bf16"}, {"layers": "1-2", **FP8}, "mxfp8"]})
    assert [made.at("mlp.linear_fc1", layer, 4) for layer in range(4)] == [None, TENSORWISE, TENSORWISE, MXFP8]


# --- paths -------------------------------------------------------------------------------------------------------------------------------
def test_a_glob_sees_the_whole_path_too() -> None:
    made = policy({"decoder.layers.3.mlp.*": "mxfp8", "mtp.*": "bf16"}, **FP8)
    assert [made.at("mlp.linear_fc1", layer, 4) for layer in (2, 3)] == [TENSORWISE, MXFP8]
    assert made.of_path("decoder.layers.3.mlp.linear_fc1", 4).fprop == MXFP8
    assert made.of_path("mtp.layers.0.transformer_layer.mlp.linear_fc1", 4).distinct == ()
    assert made.of_path("mtp.layers.0.eh_proj", 4).distinct == ()
    assert made.of_path("output_layer", 4).distinct == ()


def test_multi_token_prediction_has_no_layer_number_and_no_four_bits_of_its_own() -> None:
    path = "mtp.layers.0.transformer_layer.mlp.linear_fc1"
    edges = policy({}, **FP8, first_last_layers_bf16=True)
    assert edges.of_path(path, 4).fprop == TENSORWISE
    assert policy({"mlp.*": {"layers": "last 1", "precision": "bf16"}}, **FP8).of_path(path, 4).fprop == TENSORWISE
    assert policy({"mlp.*": "bf16"}, **FP8).of_path(path, 4).fprop is None
    # megatron-core 0.16.1 opens no FP4 context around these layers
    assert policy({}, fp4="e2m1").of_path(path, 4).fprop is None
    assert policy({"mtp.*": "nvfp4"}, fp4="e2m1").of_path(path, 4).fprop == NVFP4


def test_an_expert_goes_by_the_grouped_name_too() -> None:
    made = policy({"mlp.experts.linear_fc1": "bf16"}, **FP8)
    assert made.at("mlp.experts.local_experts.7.linear_fc1", 0, 4) is None
    assert made.at("mlp.experts.local_experts.7.linear_fc2", 0, 4) == TENSORWISE


@pytest.mark.parametrize("glob", ["*", "*.linear_fc1", "decoder.layers.3.*", "decoder.*.mlp.*", "*3.mlp.linear_f[ab]c1", "mlp.*", "decoder.layers.[!3].*", "dec?der.layers.3.mlp.linear_fc?", "**.mlp*", "*.linear_fc[12]", "*[13].mlp*", "layers.?.*", "*s.13*fc1"])  # fmt: skip
@pytest.mark.parametrize("layer", [3, 13])
def test_what_remains_of_a_glob_below_a_layer_matches_the_same_paths(glob: str, layer: int) -> None:
    stem = f"decoder.layers.{layer}."
    for module in ("mlp.linear_fc1", "self_attention.linear_qkv", "linear_fc1", "mlp.experts.linear_fc1", "3.mlp.linear_fbc1"):  # fmt: skip
        whole = fnmatch.fnmatchcase(stem + module, glob)
        assert any(fnmatch.fnmatchcase(module, rest) for rest in below(glob, stem)) == whole, (glob, module)


# --- GEMMs -------------------------------------------------------------------------------------------------------------------------------
def test_each_gemm_may_have_a_rule_of_its_own() -> None:
    made = policy({"mlp.*": {"fprop": "nvfp4", "dgrad": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "wgrad": "bf16"}})
    assert made.gemms_at("mlp.linear_fc1", 0, 4) == Gemms(fprop=NVFP4, dgrad=MXFP8, wgrad=None)
    assert made.quants == (NVFP4, MXFP8)
    assert made.at("mlp.linear_fc1", 0, 4) == NVFP4
    # three equal rules are one rule
    assert policy({"mlp.*": {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"}}) == policy({"mlp.*": "mxfp8"})


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        pytest.param({"fprop": "mxfp8"}, "names fprop but not dgrad, wgrad", id="one-of-three"),
        pytest.param({"fprop": "mxfp8", "fp8": "e4m3"}, "conflict: keep one of them", id="both-ways"),
        pytest.param({"fprop": "fp16", "dgrad": "bf16", "wgrad": "bf16"}, "stays in bf16", id="another-dtype"),
        pytest.param({"fprop": "delayed", "dgrad": "bf16", "wgrad": "bf16"}, "delayed scaling cannot be chosen per module", id="history"),
        pytest.param(
            {"fprop": {"fp8": "e4m3", "fp8_param": True}, "dgrad": "bf16", "wgrad": "bf16"}, "stored weights", id="storage"
        ),
        pytest.param("mxfp9", "expected 'bf16', a scaling .tensorwise, blockwise", id="no-such-word"),
        pytest.param({"layers": "0", "fp8": "e4m3", "fp8_options": {"powers": True}}, "no option of tensorwise scaling named 'powers'", id="option"),
        pytest.param({"fp8": "e4m3", "fp8_options": {"power_of_two": 1}}, "power_of_two=1: expected one of false, true", id="option-value"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_named_with_their_place(rule: Any, fault: str) -> None:
    with pytest.raises(Contradiction, match=rf"modules\['mlp\.\*'\].*{fault}"):
        policy({"mlp.*": rule})


# --- edge layers ---------------------------------------------------------------------------------------------------------------------------
def test_edge_layers_hold_beside_modules() -> None:
    made = policy({"mlp.*": FP8}, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    assert [made.at("mlp.linear_fc1", layer, 5) for layer in range(5)] == [None, TENSORWISE, TENSORWISE, None, None]
    assert made.ends == (1, 2)
    with pytest.raises(Contradiction, match="edge layers"):
        resolve(MixedPrecisionConfig(bf16=True, modules={"mlp.*": FP8}, first_last_layers_bf16=True), layers=1)


# --- rules that do nothing -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("modules", "dead"),
    [
        pytest.param({"mlp.*": "mxfp8"}, (), id="alive"),
        pytest.param({"decoder.layers.3.mlp.linear_fc1": "mxfp8", "mtp.layers.0.*": "bf16", "eh_proj": "bf16"}, ("eh_proj",), id="paths"),
        pytest.param({"eh_proj": "bf16", "decoder.layers.3.mlp.linear_fc1": "mxfp8", "mtp.layers.0.*": "bf16"}, (), id="paths-in-order"),
        pytest.param({"decoder.layers.4.*": "mxfp8"}, ("decoder.layers.4.*",), id="a-layer-too-many"),
        pytest.param({"mlp.*": {"layers": "4-9", "precision": "mxfp8"}}, ("mlp.* of layers 4-9",), id="layers-too-many"),
        pytest.param({"mlp.experts.*": "mxfp8"}, ("mlp.experts.*",), id="no-experts"),
        pytest.param({"decoder.layers.0.*": {"layers": 1, "precision": "mxfp8"}}, ("decoder.layers.0.* of layer 1",), id="layers-against-path"),
        pytest.param({"mlp.*": "mxfp8", "mlp.linear_fc1": "bf16"}, ("mlp.linear_fc1",), id="shadowed"),
        pytest.param({"mlp.linear_fc1": "bf16", "mlp.*": "mxfp8"}, (), id="narrow-first"),
        pytest.param({"mlp.linear_fc1": "bf16", "mlp.linear_fc2": "bf16", "mlp.*": "mxfp8"}, ("mlp.*",), id="shadowed-by-two"),
        pytest.param({"mlp.*": {"layers": "first 3", "precision": "mxfp8"}, "mlp.linear_fc1": {"layers": "2-3", "precision": "bf16"}}, (), id="shadowed-in-part"),
        pytest.param({"mlp.*": {"layers": "first 3", "precision": "mxfp8"}, "decoder.layers.2.mlp.*": "bf16"}, ("decoder.layers.2.mlp.*",), id="shadowed-layer"),
    ],
)  # fmt: skip
def test_rules_that_decide_nothing_are_found(modules: dict[str, Any], dead: tuple[str, ...]) -> None:
    unnamed, shadowed = idle(policy(modules), SHAPE)
    assert (*unnamed, *(text.split(" never decides")[0] for text in shadowed)) == dead
    # what decides says the same, linear by linear
    made = policy(modules)
    paths = [(name, layer) for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv", "self_attention.linear_proj") for layer in range(4)]  # fmt: skip
    for name, layer in paths:
        first = next(r for r in made.regions if r.covers(name, layer, 4, f"decoder.layers.{layer}.{name}"))
        assert made.gemms_at(name, layer, 4) == first.rules
        assert not any(first.modules == text.partition(" ")[0] and first.layers is None for text in dead)


def test_a_shadowed_rule_is_refused_with_the_rule_that_comes_first_and_the_cure() -> None:
    said = r"mlp\.linear_fc1 never decides: mlp\.\* comes first\..*move the narrower rule above the broader one"
    with pytest.raises(Refused, match=said):
        refuse_idle_rules(policy({"mlp.*": "mxfp8", "mlp.linear_fc1": "bf16"}), SHAPE, depth=4)
    edges = policy({"mlp.*": FP8, "decoder.layers.0.*": "mxfp8"}, first_last_layers_bf16=True)
    first = r"linears of the first and last layers \(first_last_layers_bf16\) comes first"
    with pytest.raises(Refused, match=rf"decoder\.layers\.0\.\* never decides: {first}"):
        refuse_idle_rules(edges, SHAPE, depth=4)


@pytest.mark.parametrize("said", ["2-29", "first 20", "-20 to -1", [1, 99], "last 20", "3-100", "5 to -2"])
def test_layers_outside_of_the_model_are_refused_with_its_depth(said: Any) -> None:
    made = policy({"mlp.*": {"layers": said, "precision": "mxfp8"}})
    depth = 5 if said == "5 to -2" else 8
    with pytest.raises(Refused, match=rf"mlp\.\* of layers .*the model has {depth} layers, 0 to {depth - 1}"):
        refuse_idle_rules(made, *any_gpt(depth), depth=depth)
    assert beyond_the_model(made, 200) == ()
    refuse_idle_rules(made, *any_gpt(), depth=None)  # for no model in particular any number may be there


def test_what_each_linear_gets_is_listed_as_the_first_match_has_it() -> None:
    made = policy({"mlp.*": {"layers": "1-2", "precision": "mxfp8"}, "mlp.linear_fc1": "tensorwise"})
    rows = [row for row in linear_rules(made, *any_gpt(4)) if row[0].startswith(("mlp.linear_fc1", "all"))]
    fc1 = [("layers 0, 3", "e4m3, tensorwise scaling"), ("layers 1-2", "e4m3, mxfp8 scaling")]
    wanted = [(f"mlp.linear_fc1 of {layers}", said) for layers, said in fc1]
    assert rows == [*wanted, ("all other linears", "not quantized")]


def test_a_dead_pattern_is_refused_with_the_names_that_there_are() -> None:
    said = r"matches mlp\.linear_fc3 in `modules` \(linears: .*mlp\.linear_fc1.*mtp\.layers\.0"
    with pytest.raises(Refused, match=said):
        refuse_idle_rules(policy({"mlp.linear_fc3": "mxfp8"}), SHAPE, depth=4)
    # for no model in particular: experts, latent attention and any layer are alive, a misspelled name is not
    alive = policy({"mlp.experts.*": "mxfp8", "*.linear_q_up_proj": "mxfp8", "mlp.*": {"layers": 77, **FP8}})
    refuse_idle_rules(alive, *any_gpt(), depth=None)
    with pytest.raises(Refused, match=r"mlp\.linear_fc3"):
        refuse_idle_rules(policy({"mlp.linear_fc3": "mxfp8"}), *any_gpt(), depth=None)
