"""resolve(): from what an author wrote to what it means, naming everything that does not fit at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.common.formats import DType, dtype
from mpbridge.precision.config import FUSED, ROWS, MixedPrecisionConfig
from mpbridge.precision.field_values import choice_faults, type_faults
from mpbridge.precision.globs import ADAPTERS
from mpbridge.precision.modules import module_regions
from mpbridge.precision.policy import LossScale, PrecisionPolicy, Region, updates_parameters
from mpbridge.precision.quants import quant_faults, quant_of


def resolve(
    config: MixedPrecisionConfig, *, optimizer: Mapping[str, Any] | object | None = None, layers: int | None = None
) -> PrecisionPolicy:
    """The policy that `config` means.

    optimizer: the optimizer's section or config object; optimizer facts that the config leaves open are then read from it.
    layers: depth of the model; more BF16 edge layers than that is a fault.
    Raises Contradiction naming every fault, BadValue for anything that is not a config."""
    if not isinstance(config, MixedPrecisionConfig):
        raise BadValue(
            f"resolve() got a {type(config).__name__}, expected a MixedPrecisionConfig: get_mixed_precision_config(name) makes one"
        )
    values = config.stored()
    wrong = type_faults(values)
    if wrong:  # with values of the wrong type every check of two of them is meaningless
        others = {name: value for name, value in values.items() if name not in wrong}
        raise Contradiction([*wrong.values(), *choice_faults(others)])
    checks = (choice_faults, _base_faults, quant_faults, _state_faults, _scale_faults)
    faults = [fault for check in checks for fault in check(values)] + _edge_faults(values, layers)
    regions = module_regions(values, base := _base(values), faults)
    if base is DType.FP32:
        rules = dict.fromkeys(f"modules[{region.modules!r}]" for region in regions if region.rules.first)
        low = (*(name for name in ("fp8", "fp4") if values[name]), *rules)
        faults += [f"{name} needs 16-bit compute around it: set bf16=true (or fp16=true)" for name in low]
    if faults:
        raise Contradiction(faults)
    policy = _policy(values, regions)
    return policy if optimizer is None else policy.settled(optimizer)


def _base(values: Mapping[str, Any]) -> DType:
    return DType.BF16 if values["bf16"] else DType.FP16 if values["fp16"] else DType.FP32


def _base_faults(v: Mapping[str, Any]) -> list[str]:
    faults = []
    on = [name for name in ("fp32", "fp16", "bf16") if v[name]]
    if len(on) > 1:
        faults.append(f"{' and '.join(on)} are on together: keep one")
    base = _base(v)
    params, compute = v["params_dtype"], v["compute_dtype"]
    flag = f"{on[0]}=true" if len(on) == 1 else "no flag"
    if len(on) <= 1 and compute not in (None, base):
        faults.append(
            f"compute_dtype={compute.short} but {flag} means {base.short}: set {compute.short}=true or drop compute_dtype"
        )
    # FP32 storage under 16-bit compute is a real recipe (FSDP engines); every other mixture is not
    if len(on) <= 1 and params not in (None, base, DType.FP32):
        faults.append(
            f"params_dtype={params.short} but {flag} means {base.short}: set {params.short}=true or params_dtype={base.short}"
        )
    return faults


def _precision_aware(v: Mapping[str, Any]) -> bool | None:
    """Whether FusedAdam owns the states: as given, else True as soon as a state is narrower than FP32 and the parameters are not their own main copy."""
    if v["use_precision_aware_optimizer"] is not None:
        return bool(v["use_precision_aware_optimizer"])
    given = [v[name] for name in FUSED if v[name] is not None]
    if not given:
        return None
    return not _own_main_copy(v) and any(d is not DType.FP32 for d in given)


def _own_main_copy(v: Mapping[str, Any]) -> bool:
    """Whether an author states main weights that are the parameters themselves; moments of FP32 parameters alone leave that open."""
    stored = bool((v["fp8"] and v["fp8_param"]) or (v["fp4"] and v["fp4_param"]))
    main = v["main_params_dtype"]
    return main is not None and updates_parameters(main, v["params_dtype"] or _base(v), stored=stored)


def _state_faults(v: Mapping[str, Any]) -> list[str]:
    faults = []
    params = v["params_dtype"] or _base(v)
    if v["main_params_dtype"] is DType.BF16 and params is not DType.BF16:
        faults.append(
            f"main_params_dtype=bf16 with params_dtype={params.short}: a main copy is at least as wide as the parameters"
        )
    if v["main_params_dtype"] is DType.FP16 and params is DType.FP32:
        faults.append(
            "main_params_dtype=fp16 with params_dtype=fp32: a main copy is at least as wide as the parameters, and FP32 parameters are their own"
        )
    if v["main_grads_dtype"] not in (None, DType.FP32) and v["grad_reduce_in_fp32"]:
        faults.append(
            f"main_grads_dtype={v['main_grads_dtype'].short} but grad_reduce_in_fp32=true keeps FP32 gradient buffers: set grad_reduce_in_fp32=false"
        )
    if v["use_precision_aware_optimizer"] is False and not _own_main_copy(v):
        low = [f"{name}={v[name].short}" for name in FUSED if v[name] not in (None, DType.FP32)]
        if low:
            faults.append(f"{', '.join(low)} needs use_precision_aware_optimizer=true, or fp32")
    if v["lora_dtype"] not in (None, params, DType.FP32):
        faults.append(
            f"lora_dtype={v['lora_dtype'].short} with params_dtype={params.short}: adapters are stored as the parameters are, or in fp32"
        )
    if v["store_param_remainders"] and params is not DType.BF16:
        faults.append(
            f"store_param_remainders=true extends BF16 parameters by 16 bits; params_dtype is {params.short}: set it to false"
        )
    return faults


def _scale_faults(v: Mapping[str, Any]) -> list[str]:
    # the same limits that megatron-core asserts one by one in optimizer/grad_scaler.py; infinity passes them there and makes every step overflow
    positive = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    faults = [f"{name}={v[name]}: must be above 0, and finite" for name in positive if not 0 < v[name] < math.inf]
    if v["loss_scale"] is not None and not 0 < v["loss_scale"] < math.inf:
        faults.append(f"loss_scale={v['loss_scale']}: must be above 0 and finite, or null for a dynamic scale")
    if v["min_loss_scale"] > v["initial_loss_scale"]:
        faults.append(f"min_loss_scale={v['min_loss_scale']} is above initial_loss_scale={v['initial_loss_scale']}")
    return faults


def _ends(v: Mapping[str, Any]) -> tuple[int, int]:
    first, last = v["num_layers_at_start_in_bf16"], v["num_layers_at_end_in_bf16"]
    return (1 if first is None else first), (1 if last is None else last)


def _edge_faults(v: Mapping[str, Any], layers: int | None) -> list[str]:
    names = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    faults = [f"{name}={v[name]}: must not be negative" for name in names if (v[name] or 0) < 0]
    first, last = _ends(v)
    low = v["fp8"] or v["fp4"] or v["modules"]
    if v["first_last_layers_bf16"] and low and layers is not None and first + last > layers:
        faults.append(
            f"{first} + {last} edge layers stay in {_base(v).short} but the model has {layers}: nothing would be quantized"
        )
    return faults


def _loss_scale(v: Mapping[str, Any]) -> LossScale | None:
    if not v["fp16"] and v["loss_scale"] is None:
        return None
    static = None if v["loss_scale"] is None else float(v["loss_scale"])
    first, least, window = (float(v[name]) for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window"))
    return LossScale(static=static, initial=first, minimum=least, window=window, hysteresis=v["hysteresis"])


def _policy(v: Mapping[str, Any], modules: tuple[Region, ...]) -> PrecisionPolicy:
    base = _base(v)
    params = v["params_dtype"] or base
    quant = quant_of(v)
    edges: tuple[Region, ...] = ()
    if v["first_last_layers_bf16"] and (quant is not None or any(region.quant is not None for region in modules)):
        first, last = _ends(v)
        edges = (Region(first=first, last=last),)
    output = v["output_dtype"] or base
    reduce = DType.FP32 if v["grad_reduce_in_fp32"] else base
    stated: dict[str, Any] = {
        row.fact: dtype(v[name]) if isinstance(v[name], str) else v[name] for name, row in ROWS.items() if row.fact
    }
    return PrecisionPolicy(
        compute=base,
        params=params,
        gather=base if params is not base else None,
        reduce=reduce,
        accumulate=None if v["grad_accumulation_dtype"] is reduce else v["grad_accumulation_dtype"],
        precision_aware=_precision_aware(v),
        pipeline=v["pipeline_dtype"] or output,
        output=output,
        autocast=(v["autocast_dtype"] or base) if v["autocast_enabled"] else None,
        loss_scale=_loss_scale(v),
        regions=(*edges, *modules, Region(quant=quant)),
        keep_fp32=(*(v["keep_fp32"] or ()), *(ADAPTERS if v["lora_dtype"] not in (None, params) else ())),
        frozen=tuple(v["frozen"] or ()),
        **stated,
    )
