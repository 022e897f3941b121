"""Megatron Bridge: a recipe as the precision part of its run_config.yaml.

Read at 067f987d: `MixedPrecisionConfig` (training/mixed_precision.py) takes precedence over the same fields of ddp, optimizer and model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Export, Fragment, Line, Request, compared
from mpbridge.interop.stacks.meaning import Meaning, of_policy
from mpbridge.interop.stacks.megatron_modules import costs, in_core, softmax_of
from mpbridge.interop.stacks.sharded_torch import environment
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Region

NAME = "megatron-bridge"
VERSIONS = {"0.6": "main, 067f987d"}
DEFAULT_VERSION = "0.6"
CORE = "0.20.0"
"""The megatron-core that it belongs to."""
TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
FIELDS: dict[str, Any] = {
    "fp32": False, "fp16": False, "bf16": False, "params_dtype": None, "pipeline_dtype": None, "autocast_dtype": None,
    "autocast_enabled": False, "grad_reduce_in_fp32": True, "fp8": None, "fp8_recipe": "tensorwise",
    "first_last_layers_bf16": False, "fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent",
    "fp8_wgrad": True, "fp8_dot_product_attention": False, "fp8_multi_head_attention": False, "fp8_param": None,
    "fp8_param_gather": False, "fp4": None, "fp4_recipe": "nvfp4", "fp4_param": None, "fp4_param_gather": False,
    "loss_scale": None, "initial_loss_scale": 4294967296, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 2,
    "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0, "reuse_grad_buf_for_mxfp8_param_ag": False,
}  # fmt: skip
"""Its fields and their defaults; a script compares them with Bridge's source."""

DIFFERS: dict[str, dict[str, Any]] = {
    "bf16_with_nvfp4_mixed": {"fp4_param_gather": True},
    "nemotron_3_super_bf16_with_nvfp4_mixed": {"fp4_param_gather": True, "modules": None},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {"fp4_param_gather": True},
}
"""Its values of recipes with the same name but different values in mpbridge; scripts/evidence/stacks/bridge_exports.py compares all of them."""


def export(request: Request) -> Export:
    """The mixed_precision section, and what only the model, optimizer and ddp sections can express."""
    import yaml

    policy, fsdp = request.policy, request.main_weights == "wrapper"
    sections: dict[str, Any] = {"mixed_precision": _section(request.config, policy)}
    sections["optimizer"] = _optimizer(policy)
    sections["ddp"] = _ddp(policy, fsdp)
    sections["model"] = _model(policy, softmax_of(request, core=CORE))
    text = yaml.safe_dump({name: values for name, values in sections.items() if values}, sort_keys=False)
    theirs = meaning(request)
    lines = [*_unsayable(request), *compared(request.ours, theirs, costs(request, _COSTS))]
    return Export(
        stack=NAME,
        version=request.version,
        pieces=(Fragment(name="run_config.yaml", text=text.rstrip()), *environment(policy.quants)),
        meaning=theirs,
        lines=tuple(lines),
    )


_COSTS = {
    "autocast": "autocast_enabled has no effect on megatron-core there (its name is enable_autocast)",
    "keep_fp32": "no setting keeps parameters in FP32",
    "modules": "model.quant_recipe is a Python object there: use the precision.yaml of --to megatron-lm with load_quantization_recipe",
    "logits": "an argument of GPTModel that its providers do not set",
    "accumulator": "one field sets both; only ddp.megatron_fsdp_* separate them (--engine megatron_fsdp)",
    "output": "no field",
    "quantization": "fp8_recipe: tensorwise",
}
"""Row -> what a difference costs, or the nearest equivalent there."""


def meaning(request: Request) -> Meaning:
    """The sections' meaning on megatron-core's engines. Facts without a field are as in Bridge, regardless of the recipe."""
    from mpbridge.interop.stacks.megatron_lm import on_megatron

    policy, wrapped = request.policy.settled(), request.main_weights == "wrapper"
    quant = in_core(policy.quant)
    said = dataclasses.replace(
        policy,
        accumulate=policy.accumulate if wrapped else None,
        autocast=None,
        keep_fp32=(),
        output=policy.compute,
        logits=None,
        regions=(*(region for region in policy.regions[:-1] if region.ends and quant), Region(quant=quant)),
    )
    if not wrapped and not policy.precision_aware:
        # its optimizers keep FP32 main weights and moments of 16-bit parameters regardless of the recipe
        said = dataclasses.replace(said, main_params=DType.FP32, main_grads=None, exp_avg=None, exp_avg_sq=None)
    wide = said.params is not said.compute
    said = on_megatron(said) if wide or request.main_weights == "optimizer" else said
    return of_policy(said, engine=DEFAULT if request.main_weights == "optimizer" else request.engine)


def torch_dtype(dtype: DType) -> dict[str, Any]:
    """A torch dtype as its run_config.yaml writes one."""
    return {"_target_": f"torch.{dtype.value}", "_call_": False}


def _section(config: MixedPrecisionConfig, policy: PrecisionPolicy) -> dict[str, Any]:
    values: dict[str, Any] = {"_target_": TARGET}
    said = config.stored()
    always = _differing(config, policy)
    for name, default in FIELDS.items():
        value = said[name]
        if isinstance(value, DType):
            value = torch_dtype(value)
        if name.startswith("num_layers_at") and config.first_last_layers_bf16:
            value = 1 if value is None else value  # None means one layer here and is not a valid value there
        if value is not None and (value != default or name in always):
            values[name] = value
    quant = in_core(policy.quant)
    if policy.quant is not None and quant is None:
        values = {name: value for name, value in values.items() if not name.startswith(("fp8", "fp4"))}
    if quant is not None:
        # the default differs between stacks, so it is always written
        values[f"fp{quant.bits}_recipe"] = quant.scaling
    values["grad_reduce_in_fp32"] = policy.reduce is DType.FP32
    values["params_dtype"] = torch_dtype(policy.compute)
    values["pipeline_dtype"] = torch_dtype(policy.pipeline)
    values.pop("fp8_param", None)
    values.pop("fp4_param", None)
    return values


def _differing(config: MixedPrecisionConfig, policy: PrecisionPolicy) -> frozenset[str]:
    """Effective fields whose defaults differ between stacks: they are always written."""
    quant = in_core(policy.quant)
    found = {"initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"} if policy.loss_scale else set()
    if quant is not None and config.first_last_layers_bf16:
        found |= {"num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}
    if quant is not None and quant.row.history:
        found |= {"fp8_amax_history_len", "fp8_amax_compute_algo"}
    return frozenset(found)


def _optimizer(policy: PrecisionPolicy) -> dict[str, Any]:
    if not policy.precision_aware:
        return {}
    found: dict[str, Any] = {"use_precision_aware_optimizer": True}
    for name in ("main_params", "main_grads", "exp_avg", "exp_avg_sq"):
        dtype = getattr(policy, name)
        if dtype is not None:
            found[f"{name}_dtype"] = torch_dtype(dtype)
    if policy.remainders is not None:
        found["store_param_remainders"] = policy.remainders
    return found


def _ddp(policy: PrecisionPolicy, fsdp: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"use_distributed_optimizer": True}
    if fsdp:
        reduce, add = torch_dtype(policy.reduce), torch_dtype(policy.accumulate or policy.reduce)
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
        found["megatron_fsdp_main_params_dtype"] = torch_dtype(policy.main_params or DType.FP32)
        found |= {"megatron_fsdp_main_grads_dtype": add, "megatron_fsdp_grad_comm_dtype": reduce}
    return found


def _model(policy: PrecisionPolicy, softmax: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if policy.router is not None:
        found["moe_router_dtype"] = policy.router.short
    if policy.residual_fp32 is not None:
        found["fp32_residual_connection"] = policy.residual_fp32
    found["attention_softmax_in_fp32"] = softmax
    if policy.quant is not None and policy.quant.factory:
        found[f"fp{policy.quant.bits}_quantizer_factory"] = policy.quant.factory
    return found


def _unsayable(request: Request) -> Iterator[Line]:
    policy = request.policy
    own = policy.params is policy.settled().main_params and policy.params is not DType.FP32
    if own and request.main_weights != "wrapper":
        yield Line(
            fidelity="impossible",
            fact="main_params_dtype",
            text="its optimizers always create FP32 main weights for 16-bit parameters; nearest: those, as written here",
        )
    if policy.precision_aware and not policy.quantized:
        # B1 of the trap list: a tensorwise fp8_recipe leaks into the optimizer although FP8 is off
        yield Line(
            fidelity="different",
            fact="main weights",
            text="its setup() copies fp8_recipe to the optimizer though FP8 is off, which moves the FP32 main weights from"
            " FusedAdam (2 bytes as remainders) to megatron-core (4 bytes): set cfg.optimizer.fp8_recipe after setup",
        )
