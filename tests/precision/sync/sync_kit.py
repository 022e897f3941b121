"""Author's inputs, and the three ways to a config that must agree."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mpbridge.backend.megatron import targets
from mpbridge.backend.megatron.quant_recipe import compile_rules
from mpbridge.common.facts import Versions
from mpbridge.common.machines import Machine, machine
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.precision_field import KEEP, Facts
from mpbridge.precision.megatron_spec.versions import current, nearest
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.apply import commit, spelled
from mpbridge.precision.sync.plan import Plan, Receipt, plan

GPU: Machine = machine("gb200")
HERE = Versions(
    torch="2.13", megatron_core="0.16.1", transformer_engine="2.11", torchao="0.18", cuda="12.9", cublaslt="12.9.1"
)
"""A machine that runs every recipe, so that the spelling of each can be looked at here."""

MODULE_RULES = MixedPrecisionConfig(
    bf16=True, fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True,
    modules={"mlp.linear_fc2": "bf16", "self_attention.*": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}},
)  # fmt: skip
ALL = {name: resolve(get_mixed_precision_config(name)) for name in recipes}
FOREIGN = {name: policy for name, policy in ALL.items() if any(quant.row.core is None for quant in policy.quants)}
"""Policies whose quantization no field of megatron-core says: nothing of it can be applied to somebody else's script."""
POLICIES: dict[str, PrecisionPolicy] = {name: policy for name, policy in ALL.items() if name not in FOREIGN} | {
    "module_rules": resolve(MODULE_RULES),
    "fp16_static": resolve(MixedPrecisionConfig(fp16=True, loss_scale=1024.0)),
    "autocast": resolve(MixedPrecisionConfig(bf16=True, autocast_enabled=True, autocast_dtype="fp16")),
    "states": resolve(
        MixedPrecisionConfig(
            bf16=True, use_precision_aware_optimizer=True, main_params_dtype="fp16", exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16", grad_reduce_in_fp32=False,
            main_grads_dtype="bf16", moe_router_dtype="fp64", fp32_residual_connection=True, attention_softmax_in_fp32=False,
        )
    ),
    "states_off": resolve(MixedPrecisionConfig(bf16=True, use_precision_aware_optimizer=False)),
}  # fmt: skip
UNKEPT = (ALL["fp32_params_bf16_compute"], ALL["full_bf16"])
"""Policies that `apply` refuses for these configs, with their distributed optimizer; their fields are compared all the same."""

_DENSE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "mla": _DENSE | {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "rope_type": "rope"},
    "moe": _DENSE | {"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "add_bias_linear": False},
}
OPTIMIZER = {"lr": 1e-3, "use_distributed_optimizer": True}
DDP = {"use_distributed_optimizer": True, "check_for_nan_in_grad": True}
INPUTS = {name: {"model": model, "optimizer": OPTIMIZER, "ddp": DDP} for name, model in MODELS.items()}
CLASSES = {"model": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}


def class_of(name: str, section: dict[str, Any]) -> type:
    return MLATransformerConfig if section.get("multi_latent_attention") else CLASSES[name]


def fresh(inputs: dict[str, dict[str, Any]], policy: PrecisionPolicy | None) -> types.SimpleNamespace:
    """Configs constructed by hand, with every value of the table spelled out, whether it is megatron-core's default or not."""
    made = {name: class_of(name, section)(**section) for name, section in inputs.items()}
    if policy is not None:
        facts = Facts(policy=policy, fp8=policy.fp8, own=lambda t, field, default: inputs[t].get(field, default), core=nearest(current()))  # fmt: skip
        for name, section in inputs.items():
            known = class_of(name, section).__dataclass_fields__
            values = {row.field: row.value(facts) for row in TABLE if row.target == name and row.field in known}
            rules = values.pop("quant_recipe", None)
            values = {field: spelled(value, None, None) for field, value in values.items() if value is not KEEP}
            made[name] = class_of(name, section)(**(section | values))
            if rules is not None:
                made[name].quant_recipe = compile_rules(rules, made[name])
    return types.SimpleNamespace(**made)


def live(inputs: dict[str, dict[str, Any]]) -> types.SimpleNamespace:
    """Configs as a foreign script has them before any recipe."""
    return fresh(inputs, None)


def planned(objects: Any, policy: PrecisionPolicy | None, after: Receipt | None = None, **more: Any) -> Plan:
    return plan(policy, model=objects.model, optimizer=objects.optimizer, ddp=objects.ddp, after=after, **more)


def applied(objects: Any, policy: PrecisionPolicy | None, after: Receipt | None = None, **more: Any) -> Receipt:
    made = planned(objects, policy, after, **more)
    return commit(made, spell=compile_rules) if policy in UNKEPT else targets.apply(made, machine=GPU, versions=HERE)


def built(inputs: dict[str, dict[str, Any]], policy: PrecisionPolicy | None, **more: Any) -> targets.Targets:
    made = plan(policy, **{name: inputs[name] for name in CLASSES}, **more)
    return targets.build(inputs, made, machine=GPU, versions=HERE)


def facts_of(objects: Any) -> dict[str, Any]:
    """Every attribute of the three configs, in the class's fields or beside them; functions that post-init makes are left out."""
    found = {}
    for name in ("model", "optimizer", "ddp"):
        config = getattr(objects, name)
        names = {field.name for field in dataclasses.fields(config)} | set(vars(config))
        values = {f"{name}.{key}": getattr(config, key) for key in names}
        found |= {key: one for key, one in values.items() if not callable(one) or isinstance(one, torch.dtype)}
    return found
