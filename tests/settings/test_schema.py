"""The schema equals the installed megatron-core, and what it says about values is what it should say."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import itertools
from pathlib import Path

import pytest

from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.precision.megatron_spec.schema import CLASSES
from mpbridge.precision.megatron_spec.versions import described, nearest
from mpbridge.settings import schema
from mpbridge.settings.schema import Setting, checked, fit, settings

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def generator(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "generate" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schema_file_is_what_the_installed_megatron_core_gives():
    """Or that of the release that represents it: 0.16.0 has the classes of 0.16.1."""
    here = generator("make_schema").PLACE.stem
    place = generator("make_schema").PLACE.with_name(f"{nearest(here)}.json")
    made = generator("make_schema").text().replace(f'"megatron_core": "{here}"', f'"megatron_core": "{place.stem}"')
    assert place.read_text(encoding="utf-8") == made, "run scripts/generate/make_schema.py"


def test_every_default_of_a_described_version_is_legal_in_its_own_schema():
    for version in described():
        for section, latent in (
            *itertools.product(CLASSES, (True, False)),
            *((section, False) for section in schema.SECTIONS),
        ):
            for name, setting in settings(section, latent=latent, version=version).items():
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


def test_every_upstream_field_is_known_with_its_own_default():
    homes = {"TransformerConfig": ("model", False), "MLATransformerConfig": ("model", True)}
    for cls in generator("make_schema").CLASSES:
        section, latent = homes.get(cls.__name__, ("optimizer" if cls.__name__ == "OptimizerConfig" else "ddp", False))
        known = settings(section, latent=latent)
        for field in dataclasses.fields(cls):
            if field.name.startswith("_"):
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert fit(known[field.name], default) == known[field.name].default, f"{cls.__name__}.{field.name}"


def faults_of(section, **values):
    faults: list[str] = []
    return checked(section, values, faults), faults


class Backend(enum.Enum):
    flash = 1


@pytest.mark.parametrize(
    ("section", "name", "value", "plain"),
    [
        ("model", "params_dtype", "torch.bfloat16", "bf16"),
        ("model", "params_dtype", "bfloat16", "bf16"),
        ("optimizer", "exp_avg_dtype", "fp8", "uint8"),
        ("model", "moe_router_dtype", "float32", "fp32"),
        ("model", "attention_backend", Backend.flash, "flash"),
        ("model", "window_size", (128, 0), [128, 0]),
        ("model", "moe_layer_freq", [0, 1], [0, 1]),
        ("model", "rotary_base", 500000, 500000.0),
        ("optimizer", "lr", None, None),
        ("optimizer", "hysteresis", 2.0, 2),
        ("ddp", "bucket_size", 1000000.0, 1000000),
        ("data", "corpus", ["a.txt", "b.txt"], ["a.txt", "b.txt"]),
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
        ("model", "hiden_size", 1, "nearest: hidden_size"),
        ("model", "lr", 0.001, "it is optimizer.lr"),
        ("model", "kv_lora_rank", 8, "needs model.multi_latent_attention=true"),
        ("model", "zzzzzzz", 1, "no similar name"),
        ("model", "num_layers", "4", "expected a whole number"),
        ("model", "num_layers", True, "model.num_layers=true"),
        ("model", "num_layers", None, "model.num_layers=null"),
        ("model", "num_layers", 2.5, "expected a whole number"),
        ("model", "num_layers", 0, "at least 1"),
        ("model", "fp8", "e5m2", "one of e4m3, hybrid or null"),
        ("model", "params_dtype", "bf17", "expected a dtype"),
        ("model", "params_dtype", None, "expected a dtype"),
        ("model", "activation_func", "swishglu", "gelu, silu"),
        ("model", "activation_func", [1, 2], "gelu, silu"),
        ("model", "init_method", "normal", "an object given in Python"),
        ("model", "window_size", [1, "2"], "a list of int"),
        ("optimizer", "lr", float("nan"), "expected a finite number"),
        ("optimizer", "lr", -1.0, "at least 0"),
        ("optimizer", "lr", 1000000000.0, "below 1000"),
        ("optimizer", "adam_beta1", 2.0, "at least 0 and below 1"),
        ("optimizer", "adam_beta2", 1.0, "below 1"),
        ("optimizer", "adam_eps", 0, "above 0"),
        ("optimizer", "weight_decay", -0.1, "at least 0"),
        ("optimizer", "clip_grad", -1.0, "at least 0"),
        ("optimizer", "sgd_momentum", -3, "at least 0"),
        ("optimizer", "optimizer", "adamm", "one of adam, torch_adamw, sgd"),
        ("model", "context_parallel_size", 0, "at least 1"),
        ("model", "hidden_dropout", 1.0, "below 1"),
        ("model", "moe_router_load_balancing_type", ["aux_loss", "auxloss"], "sinkhorn, none or a list of them"),
        ("ddp", "data_parallel_sharding_strategy", "zero3", "optim_grads_params"),
        ("train", "audit", "maybe", "one of stop, warn"),
        ("train", "train_iters", "10", "expected a whole number or null"),
    ],
)
def test_what_cannot_be_is_named_with_what_could(section, name, value, said):
    _, faults = faults_of(section, **{name: value})
    assert len(faults) == 1
    assert f"{section}.{name}" in faults[0]
    assert said in faults[0]


def test_all_faults_of_a_section_come_together_and_say_found_and_expected():
    _, faults = faults_of("model", hiden_size=1, num_layers="x", fp8="x")
    assert len(faults) == 3
    with pytest.raises(UnknownName, match="nearest: optimizer"):
        settings("optimiser")
    with pytest.raises(BadValue, match=r"'x': expected one of a, b or null"):
        fit(Setting(types=("choice", "null"), choices=("a", "b")), "x")


def test_functions_go_by_name_only_when_they_are_the_librarys_own():
    import torch

    def gelu(x):
        return x

    assert faults_of("model", activation_func=torch.nn.functional.gelu)[0] == {"activation_func": "gelu"}
    assert faults_of("model", activation_func=torch.nn.functional.silu)[0] == {"activation_func": "silu"}
    assert faults_of("model", activation_func=gelu)[0] == {"activation_func": gelu}
