"""Every cure that is written as settings cures: the rule is silent afterwards, nothing contradicts, and no new error sends one back."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from mpbridge.common.facts import OptimizerFacts, Parallel
from mpbridge.common.traits import traits
from mpbridge.planning.rules.table import broken, rules
from tests.planning.rules.config_cases import ALLTOALL, MOE
from tests.planning.rules.test_rules import AWARE, LORA, OVERLAP, PP2, SHAPE, TABLE, VPP, case, ids, machine, opt, te

SETTING = re.compile(r"(?:(mixed_precision|model|optimizer|ddp|parallel)\.)?(\w+)=(\S+)")
SIZES = {
    "sequence_parallel": "sequence", "tensor_model_parallel_size": "tensor", "pipeline_model_parallel_size": "pipeline", "virtual_pipeline_model_parallel_size": "virtual_pipeline", "expert_tensor_parallel_size": "expert_tensor",
}  # fmt: skip
SHAPED = {"add_bias_linear": "linear_bias", "share_embeddings_and_output_weights": "tied"}
DECIDES = {
    "grad_reduce_in_fp32": ("reduce",), "grad_accumulation_dtype": ("accumulate",), "params_dtype": ("params", "compute"),
    "use_precision_aware_optimizer": ("precision_aware",), "store_param_remainders": ("remainders",), "main_params_dtype": ("main_params",),
    "main_grads_dtype": ("main_grads",),
}  # fmt: skip
"""Field of a recipe -> the facts of a case's policy that it decides."""


def torchs(name, **more):
    """A case of one of torch's optimizers on shards."""
    return {"engine": "fsdp2", "optimizer": OptimizerFacts(name=name, settings={"optimizer": name}), **more}


LOW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
CIRCLES = {
    "full 16 bits, overlapped": {"recipe": "full_bf16", "ddp": OVERLAP},
    "full 16 bits, precision-aware": {"recipe": "full_bf16", "config": AWARE, "ddp": OVERLAP},
    "full 16 bits, experts apart": {"recipe": "full_bf16", "parallel": Parallel(world_size=4, expert=2)},
    "full 16 bits, offloaded": {"recipe": "full_bf16", "optimizer": opt(cpu_offload=True)},
    "full 16 bits, in stages": {"recipe": "full_bf16", "optimizer": opt(overlap_param_gather_with_step=True), "ddp": OVERLAP, "parallel": VPP, "global_batch_size": 8},
    "full 16 bits, in two instances": {"recipe": "full_bf16", "ddp": {"num_distributed_optimizer_instances": 2}, "parallel": Parallel(world_size=4)},
    "full 16 bits, plain": {"recipe": "full_bf16", "ddp": OVERLAP, "optimizer": OptimizerFacts()},
    "bf16 main weights beside mxfp8": {
        "recipe": "mxfp8", "machine": machine("b200"), "ddp": OVERLAP,
        "config": {"main_params_dtype": "bf16", "use_precision_aware_optimizer": None, "grad_reduce_in_fp32": False},
    },
    "bf16 main weights, not aware": {"recipe": "mxfp8", "machine": machine("b200"), "ddp": OVERLAP, "policy": {"main_params": "bf16"}},
    "sgd on shards": {"optimizer": OptimizerFacts(distributed=True, name="sgd"), "ddp": OVERLAP},
    "sgd on shards of stored weights": {"recipe": "fp8_ds", "optimizer": OptimizerFacts(distributed=True, name="sgd")},
    "sgd beside stored weights": {"recipe": "fp8_ds", "optimizer": OptimizerFacts(name="sgd")},
    "delayed weight gradients alone": {"model": {"delay_wgrad_compute": True}},
    "mxfp8 for single modules": {"machine": machine("b200"), "config": {"modules": {"mlp.*": "mxfp8"}}, "ddp": OVERLAP},
    "mxfp8 gathers 16 bits": {
        "recipe": "mxfp8", "machine": machine("b200"), "ddp": OVERLAP,
        "config": {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False},
    },
    "offloaded states": {"optimizer": opt(cpu_offload=True)},
    "offloaded states of parameters alone": {"recipe": "full_bf16", "optimizer": OptimizerFacts(cpu_offload=True)},
    "offloaded states of sgd": {"optimizer": OptimizerFacts(cpu_offload=True, name="sgd")},
    "sgd without stored main weights": torchs("sgd"),
    "16-bit moments of sgd": torchs("sgd", config=AWARE | LOW),
    "16-bit moments of sgd, all in 16 bits": torchs("sgd", recipe="full_bf16", config=AWARE),
    "16-bit moments of sgd, stored in fp32": torchs("sgd", recipe="fsdp_adamw", config=AWARE | LOW),
    "16-bit moments of torch's adamw": torchs("torch_adamw", config=AWARE | LOW),
    "16-bit moments of torch's muon": torchs("muon", config=AWARE | LOW),
    "16-bit moments of sgd in a wrapper": {"engine": "megatron_fsdp", "optimizer": OptimizerFacts(distributed=True, name="sgd"), "config": AWARE | LOW},
    "interleaved, overlapped": {"optimizer": opt(overlap_param_gather_with_step=True), "ddp": OVERLAP, "parallel": VPP, "global_batch_size": 5},
    "interleaved in one stage, overlapped": {"optimizer": opt(overlap_param_gather_with_step=True), "ddp": OVERLAP, "parallel": Parallel(virtual_pipeline=2)},
    "interleaved, experts overlapped": {"shape": MOE, "model": {"overlap_moe_expert_parallel_comm": True, **ALLTOALL}, "parallel": Parallel(world_size=4, pipeline=2, virtual_pipeline=2, expert=2), "global_batch_size": 6},
    "fp32 storage in stages": {"recipe": "fsdp_adamw", "parallel": PP2},
    "fp32 storage of stored weights": {"recipe": "fp8_ds", "config": {"params_dtype": "fp32"}},
    "fp32 storage, loss of tokens": {"recipe": "fsdp_adamw", "model": {"calculate_per_token_loss": True}},
    "fp32 storage, fused accumulation": {"recipe": "fsdp_adamw", "model": {"gradient_accumulation_fusion": True}},
    "fp32 storage of an optimizer of megatron-core's": {"recipe": "fsdp_adamw", "optimizer": OptimizerFacts(name="soap")},
    "fp32 storage under pipelines": {"recipe": "fsdp_adamw", "engine": "fsdp2", "optimizer": OptimizerFacts(), "parallel": TABLE["sharded-engines-do-data-parallelism"][0]["parallel"]},
}  # fmt: skip


def applied(one, settings):
    """The case with the settings of a cure."""
    one = {"config": {}, "model": {}, "ddp": {}, **one}
    one |= {name: dict(one[name]) for name in ("config", "model", "ddp")}
    held = one.get("optimizer", OptimizerFacts(distributed=True))
    for section, name, text in settings:
        value = yaml.safe_load(text)
        if section == "mixed_precision":
            one["config"].pop(name.removesuffix("_gather"), None)  # another spelling of the same field
            one["config"][name] = value
            one["policy"] = {k: v for k, v in one.get("policy", {}).items() if k not in DECIDES.get(name, name)}
            one["model"] |= {name: value} if name == "moe_router_dtype" else {}
        elif section == "model":
            one["model"][name] = value
            shaped = {"lora_rank": value, "lora_targets": LORA.lora_targets} if name == "lora_rank" else {}
            shaped |= {SHAPED[name]: value} if name in SHAPED else {}
            one["shape"] = dataclasses.replace(one.get("shape", SHAPE), **shaped)
        elif (section, name) == ("ddp", "use_distributed_optimizer"):
            held = dataclasses.replace(held, distributed=value)
        elif section == "ddp":
            one["ddp"][name] = value
        elif (section, name) == ("optimizer", "optimizer"):
            held = dataclasses.replace(held, name=value, settings={**held.settings, "optimizer": value})
        elif name == "overlap_param_gather_with_optimizer_step":
            held = dataclasses.replace(held, overlap_param_gather_with_step=value)
        elif (section, name) == ("optimizer", "optimizer_cpu_offload"):
            held = dataclasses.replace(held, cpu_offload=value)
        elif section == "optimizer":
            held = dataclasses.replace(held, settings={**held.settings, name: value})
        elif section == "parallel":
            one["parallel"] = dataclasses.replace(one["parallel"], **{SIZES[name]: value})
        elif name == "emulate":
            one["realization"] = "emulated" if value else "native"
        else:
            assert name == "engine", name
            one["engine"] = value
            distributed = traits(value).distributed_optimizer != "never" and held.distributed
            held = dataclasses.replace(held, distributed=distributed)
    return one | {"optimizer": held}


def alternatives(cure):
    """The alternatives of a cure that are settings and nothing else, as (section, name, value)."""
    section, found = "", []
    for part in cure.split(", or "):
        words = [SETTING.fullmatch(word) for word in part.split()]
        if all(words):
            settings = []
            for match in words:
                section = match[1] or ("" if match[2] in ("engine", "emulate") else section)
                settings.append((section, match[2], match[3]))
            found.append(settings)
    return found


OFFLOADED = {
    "fp8": {"recipe": "fp8_cs"},
    "fp8 beside 16-bit moments": {"recipe": "fp8_cs", "config": {"exp_avg_dtype": "bf16"}},
    "fp8 stored": {"recipe": "fp8_ds"},
    "fp32": {"recipe": "fp32"},
    "fp16 main weights": {"config": {"main_params_dtype": "fp16"}},
    "bf16 main weights beside fp8": {"recipe": "fp8_cs", "config": {"main_params_dtype": "bf16"}},
    "before remainders": {"versions": te("2.0")},
    "fp8_recipe without fp8": {"settings": {"fp8_recipe": "tensorwise"}},
}
"""Precision-aware runs with optimizer_cpu_offload."""
CURED = [rule.id for rule in rules() if rule.cure_here is not None or alternatives(rule.cure)]
"""Rules with a cure that is settings."""


@pytest.mark.parametrize("name", [*CURED, *CIRCLES])
def test_every_cure_cures(name):
    one = CIRCLES[name] if name in CIRCLES else TABLE[name][0]
    if isinstance(one.get("policy", {}).get("main_params"), str):
        one = one | {"policy": {"main_params": case("bf16")[0].params}}
    before = broken(*case(**one))
    for violation in before:
        if violation.rule == name or (name in CIRCLES and violation.severity == "error"):
            for settings in alternatives(violation.cure):
                after = broken(*case(**applied(one, settings)))
                assert violation.rule not in ids(after), (violation, settings)
                new = [v for v in after if v.severity == "error" and v.rule not in ids(before)]
                assert not new, (str(violation), settings, [str(v) for v in new])


@pytest.mark.parametrize("name", OFFLOADED)
def test_no_cure_for_an_offloaded_optimizer_undoes_what_offload_needs(name):
    one = dict(OFFLOADED[name])
    held = opt(cpu_offload=True, settings=one.pop("settings", {}))
    one |= {"config": AWARE | one.get("config", {}), "optimizer": held}
    before = broken(*case(**one))
    assert before
    for violation in before:
        for settings in alternatives(violation.cure):
            after = broken(*case(**applied(one, settings)))
            assert violation.rule not in ids(after), (str(violation), settings)
            # a rule of FusedAdam's may speak once FusedAdam keeps the states; none of offload may
            new = {rule for rule in ids(after) - ids(before) if rule.startswith("offload-")}
            assert not new, (str(violation), settings, new)
    # what FusedAdam cannot do is no fault of HybridDeviceOptimizer
    beside = {
        "remainders-of-fp8-weights",
        "remainders-need-newer-engine",
        "fp8-recipe-leaks-into-the-optimizer",
        "fused-adam-keeps-no-bf16-main-weights",
        "precision-aware-with-fp8",
    }
    assert not beside & set(ids(before))
