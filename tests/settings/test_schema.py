"""The schema equals the installed megatron-core, and what it says about values is what it should say."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
from pathlib import Path

import pytest

from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.precision.megatron_spec.schema import CLASSES
from mpbridge.precision.megatron_spec.versions import described
from mpbridge.settings import schema
from mpbridge.settings.schema import Setting, checked, fit, settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_schema", ROOT / "scripts" / "generate" / "make_schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schema_file_is_what_the_installed_megatron_core_gives(generator):
    assert generator.PLACE.read_text(encoding="utf-8") == generator.text(), "run scripts/generate/make_schema.py"


def test_every_default_of_a_described_version_is_legal_in_its_own_schema():
    for version in described():
        for section in CLASSES:
            for name, setting in settings(section, latent=True, version=version).items():
                if setting.types != ("activation",):
                    assert fit(setting, setting.default) == setting.default, f"{version} {section}.{name}"


def test_a_choice_among_numbers_and_an_infinite_default_are_read():
    attention = settings("model", version="0.20.0")["flash_attention_version"]
    assert fit(attention, 3) == 3
    with pytest.raises(BadValue, match="one of 2, 3, 4 or null"):
        fit(attention, 5)
    limit = settings("optimizer", version="0.20.0")["grad_norm_skip_threshold"]
    assert limit.default == float("inf")
    assert fit(limit, 2.5) == 2.5
    with pytest.raises(BadValue, match="finite"):
        fit(limit, float("-inf"))


def test_every_upstream_field_is_known_with_its_own_default(generator):
    homes = {"TransformerConfig": ("model", False), "MLATransformerConfig": ("model", True)}
    for cls in generator.CLASSES:
        section, latent = homes.get(cls.__name__, ("optimizer" if cls.__name__ == "OptimizerConfig" else "ddp", False))
        known = settings(section, latent=latent)
        for field in dataclasses.fields(cls):
            if field.name.startswith("_"):
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert fit(known[field.name], default) == known[field.name].default, f"{cls.__name__}.{field.name}"


def test_every_upstream_default_is_legal_in_the_schema_and_own_defaults_too():
    for section in schema.SECTIONS:
        for name, setting in settings(section).items():
            if setting.types != ("activation",):
                assert fit(setting, setting.default) == setting.default, f"{section}.{name}"


def faults_of(section, **values):
    faults: list[str] = []
    return checked(section, values, faults), faults


class Backend(enum.Enum):
    flash = 1


@pytest.mark.parametrize(
    ("section", "name", "value", "plain"),
    [
        pytest.param("model", "params_dtype", "torch.bfloat16", "bf16", id="torch's spelling of a dtype"),
        pytest.param("model", "params_dtype", "bfloat16", "bf16", id="torch's name of a dtype"),
        pytest.param("optimizer", "exp_avg_dtype", "fp8", "uint8", id="Megatron-LM's word for scaled FP8"),
        pytest.param("model", "moe_router_dtype", "float32", "fp32", id="a dtype where upstream wants a word"),
        pytest.param("model", "attention_backend", Backend.flash, "flash", id="an enumeration member"),
        pytest.param("model", "window_size", (128, 0), [128, 0], id="a tuple"),
        pytest.param("model", "moe_layer_freq", [0, 1], [0, 1], id="a list where a number would do"),
        pytest.param("model", "rotary_base", 500000, 500000.0, id="a whole number where a fraction would do"),
        pytest.param("optimizer", "lr", None, None, id="null"),
        pytest.param("optimizer", "hysteresis", 2.0, 2, id="a whole number written as a fraction"),
        pytest.param("ddp", "bucket_size", 1e6, 1000000, id="a whole number in powers of ten"),
        pytest.param("data", "corpus", ["a.txt", "b.txt"], ["a.txt", "b.txt"], id="a list of files"),
    ],
)
def test_values_come_back_in_one_plain_form(section, name, value, plain):
    values, faults = faults_of(section, **{name: value})
    assert not faults
    assert values == {name: plain}
    assert type(values[name]) is type(plain)


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        pytest.param("model", "hiden_size", 1, "nearest: hidden_size", id="misspelled"),
        pytest.param("model", "lr", 1e-3, "it is optimizer.lr", id="another section's"),
        pytest.param("model", "kv_lora_rank", 8, "needs model.multi_latent_attention=true", id="MLA's without MLA"),
        pytest.param("model", "zzzzzzz", 1, "no similar name", id="nothing near"),
        pytest.param("model", "num_layers", "4", "expected a whole number", id="text for a number"),
        pytest.param("model", "num_layers", True, "expected a whole number", id="a truth value is no number"),
        pytest.param("model", "num_layers", 2.5, "expected a whole number", id="a fraction for a whole number"),
        pytest.param("model", "num_layers", 0, "at least 1", id="too small"),
        pytest.param("model", "fp8", "e5m2", "one of e4m3, hybrid or null", id="no such word"),
        pytest.param("model", "params_dtype", "bf17", "expected a dtype", id="no dtype"),
        pytest.param("model", "params_dtype", None, "expected a dtype", id="null where none is"),
        pytest.param("model", "activation_func", "swishglu", "gelu, silu", id="no such activation"),
        pytest.param("model", "activation_func", [1, 2], "gelu, silu", id="a list for an activation"),
        pytest.param(
            "model", "init_method", "normal", "an object given in Python", id="a name for what only Python can give"
        ),
        pytest.param("model", "window_size", [1, "2"], "a list of int", id="a wrong item"),
        pytest.param("optimizer", "lr", float("nan"), "expected a finite number", id="not a number"),
        pytest.param("optimizer", "lr", -1.0, "at least 0", id="negative rate"),
        pytest.param("optimizer", "lr", 1e9, "below 1000", id="a rate of another world"),
        pytest.param("optimizer", "adam_beta1", 2.0, "at least 0 and below 1", id="a memory that grows"),
        pytest.param("optimizer", "adam_beta2", 1.0, "below 1", id="a moment that never moves"),
        pytest.param("optimizer", "adam_eps", 0, "above 0", id="zero over zero"),
        pytest.param("optimizer", "weight_decay", -0.1, "at least 0", id="negative decay"),
        pytest.param("optimizer", "clip_grad", -1.0, "at least 0", id="negative clip"),
        pytest.param("optimizer", "sgd_momentum", -3, "at least 0", id="negative momentum"),
        pytest.param("optimizer", "optimizer", "adamm", "one of adam, torch_adamw, sgd", id="no such optimizer"),
        pytest.param("model", "context_parallel_size", 0, "at least 1", id="a parallel size in the model section"),
        pytest.param("model", "hidden_dropout", 1.0, "below 1", id="all is dropped"),
        pytest.param(
            "model",
            "moe_router_load_balancing_type",
            ["aux_loss", "auxloss"],
            "sinkhorn, none or a list of them",
            id="a wrong word in a list",
        ),
        pytest.param("ddp", "data_parallel_sharding_strategy", "zero3", "optim_grads_params", id="no such sharding"),
        pytest.param("train", "audit", "maybe", "one of stop, warn", id="own choice"),
        pytest.param("train", "train_iters", "10", "expected a whole number or null", id="own number"),
    ],
)
def test_what_cannot_be_is_named_with_what_could(section, name, value, said):
    _, faults = faults_of(section, **{name: value})
    assert len(faults) == 1
    assert f"{section}.{name}" in faults[0]
    assert said in faults[0]


def test_all_faults_of_a_section_come_together():
    _, faults = faults_of("model", hiden_size=1, num_layers="x", fp8="x")
    assert len(faults) == 3


def test_unknown_section_says_the_nearest():
    with pytest.raises(UnknownName, match="nearest: optimizer"):
        settings("optimiser")


def test_fit_says_found_and_expected():
    with pytest.raises(BadValue, match=r"'x': expected one of a, b or null"):
        fit(Setting(types=("choice", "null"), choices=("a", "b")), "x")


def test_functions_go_by_name_only_when_they_are_the_librarys_own():
    import torch

    def gelu(x):
        return x

    assert faults_of("model", activation_func=torch.nn.functional.gelu)[0] == {"activation_func": "gelu"}
    assert faults_of("model", activation_func=torch.nn.functional.silu)[0] == {"activation_func": "silu"}
    assert faults_of("model", activation_func=gelu)[0] == {"activation_func": gelu}
