"""resolve(): from what an author wrote to what it means, naming everything that does not fit at once. Pure."""

from __future__ import annotations

import fnmatch
import math
import types
from collections.abc import Mapping
from typing import Any

from mpbridge.errors import BadValue, Contradiction
from mpbridge.formats import DType, dtype, say
from mpbridge.precision.config import MixedPrecisionConfig, twin_clashes
from mpbridge.precision.policy import Attention, LossScale, PrecisionPolicy, Quant, Region
from mpbridge.scalings import DEFAULTS, SCALINGS, Scaling, choices, formats

_CHOICES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "fp8": formats(8),
        "fp8_recipe": choices(8),
        "fp8_amax_compute_algo": ("most_recent", "max"),
        "fp4": formats(4),
        "fp4_recipe": choices(4),
    }
)
_BITS: Mapping[str, int] = types.MappingProxyType({"fp8": 8, "fp4": 4})
_QUANT_FIELDS = (
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention",
    "fp8_multi_head_attention", "fp8_param", "fp8_quantizer_factory", "fp4", "fp4_recipe", "fp4_param", "fp4_quantizer_factory",
)  # fmt: skip
_STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_LEGAL_STATES: Mapping[str, tuple[DType, ...]] = types.MappingProxyType(
    {
        # Transformer Engine's FusedAdam, fused_adam.py: masters fp32 or fp16, moments fp32, fp16, bf16 or scaled fp8; bf16 main params: the parameters themselves
        "main_params_dtype": (DType.FP32, DType.FP16, DType.BF16),
        "main_grads_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "exp_avg_dtype": (DType.FP32, DType.FP16, DType.BF16, DType.UINT8),
        "exp_avg_sq_dtype": (DType.FP32, DType.FP16, DType.BF16, DType.UINT8),
        "params_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "compute_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "output_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "pipeline_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "autocast_dtype": (DType.FP32, DType.BF16, DType.FP16),
        "logit_dtype": (DType.FP32, DType.BF16, DType.FP16),
    }
)


def resolve(
    config: MixedPrecisionConfig, *, optimizer: Mapping[str, Any] | object | None = None, layers: int | None = None
) -> PrecisionPolicy:
    """The policy that `config` means.

    optimizer: the optimizer's section or config object; optimizer facts that the config leaves open are then read from it.
    layers: depth of the model; more BF16 edge layers than that is a fault.
    Raises Contradiction naming every fault, BadValue for what is no config.
    """
    if not isinstance(config, MixedPrecisionConfig):
        raise BadValue(
            f"resolve() got a {type(config).__name__}, expected a MixedPrecisionConfig: get_mixed_precision_config(name) makes one"
        )
    values = config.stored()
    wrong = _type_faults(values)
    if wrong:  # values of the wrong type make every question about two of them meaningless
        raise Contradiction(
            [*wrong.values(), *_choice_faults({name: value for name, value in values.items() if name not in wrong})]
        )
    faults = (
        _choice_faults(values)
        + _base_faults(values)
        + _quant_faults(values)
        + _state_faults(values)
        + _scale_faults(values)
        + _edge_faults(values, layers)
    )
    module_regions = _module_regions(values, faults)
    if faults:
        raise Contradiction(faults)
    policy = _policy(values, module_regions)
    return policy if optimizer is None else policy.settled(optimizer)


def _base(values: Mapping[str, Any]) -> DType:
    return DType.BF16 if values["bf16"] else DType.FP16 if values["fp16"] else DType.FP32


def _type_faults(values: Mapping[str, Any]) -> dict[str, str]:
    """field -> what is wrong with its type."""
    fields = MixedPrecisionConfig.__dataclass_fields__
    return {
        name: fault for name, field in fields.items() if (fault := _type_fault(name, values[name], str(field.type)))
    }


def _type_fault(name: str, value: Any, hint: str) -> str | None:
    if hint == "DTypeField":
        legal = _LEGAL_STATES[name]
        if value is None or value in legal:
            return None
        return f"{name}={value.short} is not one of {', '.join(d.short for d in legal)}"
    if name == "moe_router_dtype":
        return _router_fault(value)
    if value is None and hint.endswith("None"):
        return None
    expected = hint.removesuffix(" | None")
    fits = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        "str": isinstance(value, str),
        "tuple[str, ...]": isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value),
        "Mapping[str, Any]": isinstance(value, Mapping) and all(isinstance(pattern, str) for pattern in value),
    }[expected]
    words = {
        "bool": "true or false",
        "tuple[str, ...]": "a list of globs",
        "Mapping[str, Any]": "a mapping from glob (text) to rule",
    }
    return None if fits else f"{name}={value!r}: expected {words.get(expected, expected)}, got {type(value).__name__}"


def _choice_faults(v: Mapping[str, Any]) -> list[str]:
    """Of those fields that are in `v`."""
    faults = []
    for name, legal in _CHOICES.items():
        if name not in v:
            continue
        optional = str(MixedPrecisionConfig.__dataclass_fields__[name].type).endswith("None")
        if v[name] not in legal and not (optional and v[name] is None):
            faults.append(f"{name}={v[name]!r} is not one of {', '.join(legal)}" + (" or null" if optional else ""))
    return faults


def _router_fault(value: Any) -> str | None:
    # megatron-core compares with the strings 'fp32' and 'fp64' (router.py): a torch dtype or 'bf16' there would do nothing, silently
    try:
        if value is None or dtype(value) in (DType.FP32, DType.FP64):
            return None
    except BadValue:
        pass
    return (
        f"moe_router_dtype={say(value)!r} is not one of fp32, fp64 or null (the router then follows the compute dtype)"
    )


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
    if (v["fp8"] or v["fp4"]) and base is DType.FP32 and len(on) <= 1:
        faults.append(f"{'fp8' if v['fp8'] else 'fp4'} needs 16-bit compute around it: set bf16=true (or fp16=true)")
    return faults


def _row(v: Mapping[str, Any], low: str) -> Scaling | None:
    """The scaling that fp8_recipe or fp4_recipe names, or the default one; None for an unknown name, which has a fault of its own."""
    return SCALINGS.get(v.get(f"{low}_recipe") or DEFAULTS[_BITS[low]])


def _quant_faults(v: Mapping[str, Any]) -> list[str]:
    faults = twin_clashes(v)
    if v["fp8"] and v["fp4"]:
        faults.append("fp8 and fp4 are both on: set one of them to null")
    for low in ("fp8", "fp4"):
        if v[f"{low}_param"] and not v[low]:
            faults.append(f"{low}_param=true without {low}: set {low} to a format, or {low}_param=false")
        row = _row(v, low)
        custom, factory = row is not None and row.factory, v[f"{low}_quantizer_factory"]
        if v[low] and custom and not factory:
            faults.append(f"{low}_recipe='custom' needs {low}_quantizer_factory (an import path)")
        if factory and not (v[low] and custom):
            faults.append(f"{low}_quantizer_factory needs {low} on and {low}_recipe='custom'")
        if row is not None and v[low] in formats(_BITS[low]) and v[low] not in row.formats:
            faults.append(
                f"{low}={v[low]!r} with {low}_recipe={row.name!r}: that scaling takes {', '.join(row.formats)}"
            )
    attention = [name for name in ("fp8_dot_product_attention", "fp8_multi_head_attention") if v[name]]
    if attention and not v["fp8"]:
        faults.append(
            f"{' and '.join(attention)} without fp8: attention would stay in 16 bits, so set fp8 to a format or leave attention out"
        )
    if v["fp8_multi_head_attention"] and not v["fp8_dot_product_attention"]:
        faults.append("fp8_multi_head_attention needs fp8_dot_product_attention=true")
    if v["fp8_amax_history_len"] < 1:
        faults.append(f"fp8_amax_history_len={v['fp8_amax_history_len']}: at least 1")
    row = _row(v, "fp8")
    shared = bool(v["fp8"] and v["fp8_param"]) and row is not None and row.stored.through_grads
    if v["reuse_grad_buf_for_mxfp8_param_ag"] and not shared:
        faults.append(
            "reuse_grad_buf_for_mxfp8_param_ag needs fp8 with fp8_recipe='mxfp8' and fp8_param_gather=true: set it to false"
        )
    return faults


def _precision_aware(v: Mapping[str, Any]) -> bool | None:
    """Whether FusedAdam owns the states: as given, else True as soon as a state is narrower than FP32 and the parameters are not their own main copy."""
    if v["use_precision_aware_optimizer"] is not None:
        return bool(v["use_precision_aware_optimizer"])
    given = [v[name] for name in _STATES if v[name] is not None]
    if not given:
        return None
    return not _own_main_copy(v) and any(d is not DType.FP32 for d in given)


def _own_main_copy(v: Mapping[str, Any]) -> bool:
    return v["main_params_dtype"] is not None and v["main_params_dtype"] is (v["params_dtype"] or _base(v))


def _state_faults(v: Mapping[str, Any]) -> list[str]:
    faults = []
    params = v["params_dtype"] or _base(v)
    if v["main_params_dtype"] is DType.BF16 and params is not DType.BF16:
        faults.append(
            f"main_params_dtype=bf16 with params_dtype={params.short}: a main copy is at least as wide as the parameters"
        )
    if v["main_grads_dtype"] not in (None, DType.FP32) and v["grad_reduce_in_fp32"]:
        faults.append(
            f"main_grads_dtype={v['main_grads_dtype'].short} but grad_reduce_in_fp32=true keeps FP32 gradient buffers: set grad_reduce_in_fp32=false"
        )
    if v["use_precision_aware_optimizer"] is False and not _own_main_copy(v):
        low = [f"{name}={v[name].short}" for name in _STATES if v[name] not in (None, DType.FP32)]
        if low:
            faults.append(f"{', '.join(low)} needs use_precision_aware_optimizer=true")
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
    if v["first_last_layers_bf16"] and (v["fp8"] or v["fp4"]) and layers is not None and first + last > layers:
        faults.append(
            f"{first} + {last} edge layers stay in {_base(v).short} but the model has {layers}: nothing would be quantized"
        )
    return faults


def _quant(v: Mapping[str, Any]) -> Quant | None:
    """The Quant of a set of fields (a config's, or a module rule's); fields that are absent have their defaults."""

    def get(name: str, default: Any) -> Any:
        return default if v.get(name) is None else v[name]

    if v.get("fp4"):
        return Quant(
            format=v["fp4"],
            scaling=get("fp4_recipe", DEFAULTS[4]),
            stored=bool(get("fp4_param", False)),
            factory=v.get("fp4_quantizer_factory"),
        )
    if not v.get("fp8"):
        return None
    attention: Attention = (
        "multi_head"
        if get("fp8_multi_head_attention", False)
        else "dot_product"
        if get("fp8_dot_product_attention", False)
        else "none"
    )
    return Quant(
        format=v["fp8"],
        scaling=get("fp8_recipe", DEFAULTS[8]),
        stored=bool(get("fp8_param", False)),
        margin=get("fp8_margin", 0),
        amax_history=get("fp8_amax_history_len", 1),
        amax_algo=get("fp8_amax_compute_algo", "most_recent"),
        wgrad=get("fp8_wgrad", True),
        attention=attention,
        factory=v.get("fp8_quantizer_factory"),
    )


def _module_regions(v: Mapping[str, Any], faults: list[str]) -> tuple[Region, ...]:
    regions = []
    for pattern, rule in (v["modules"] or {}).items():
        where = f"modules[{pattern!r}]"
        if isinstance(rule, Mapping):
            found = _rule_faults(where, rule)
            faults += found
            if not found:
                regions.append(
                    Region(
                        modules=pattern,
                        quant=_quant({**rule, "fp8_param": rule.get("fp8_param", rule.get("fp8_param_gather"))}),
                    )
                )
            continue
        try:
            if dtype(rule) is not _base(v):
                faults.append(f"{where}={rule!r}: a module that is not quantized stays in {_base(v).short}")
            regions.append(Region(modules=pattern))
        except BadValue:
            faults.append(
                f"{where}={rule!r}: expected {_base(v).short!r} or a mapping such as {{fp8: hybrid, fp8_recipe: tensorwise}}"
            )
    return tuple(regions)


def _rule_faults(where: str, rule: Mapping[str, Any]) -> list[str]:
    unknown = [str(name) for name in rule if name not in _QUANT_FIELDS and name != "fp8_param_gather"]
    if unknown:
        return [f"{where}: {', '.join(unknown)} cannot be set per module (possible: {', '.join(_QUANT_FIELDS)})"]
    try:
        one = MixedPrecisionConfig(bf16=True, **rule)
    except (Contradiction, BadValue) as error:
        return [f"{where}: {error}"]
    values = one.stored()
    faults = list(_type_faults(values).values()) or _choice_faults(values) + _quant_faults(values)
    if not faults and not (one.fp8 or one.fp4):
        faults = ["names no format: give fp8 or fp4, or write 'bf16'"]
    row = _row(values, "fp8" if one.fp8 else "fp4")
    if not faults and row is not None and row.history:
        # Transformer Engine updates delayed scales per autocast context and megatron-core opens one around the whole block
        faults = [f"{row.name} scaling cannot be chosen per module"]
    return [f"{where}: {fault}" for fault in faults]


def _policy(v: Mapping[str, Any], module_regions: tuple[Region, ...]) -> PrecisionPolicy:
    base = _base(v)
    params = v["params_dtype"] or base
    quant = _quant(v)
    edges: tuple[Region, ...] = ()
    if quant is not None and v["first_last_layers_bf16"]:
        first, last = _ends(v)
        edges = (Region(first=first, last=last),)
    scale = None
    if v["fp16"] or v["loss_scale"] is not None:
        scale = LossScale(
            static=None if v["loss_scale"] is None else float(v["loss_scale"]),
            initial=float(v["initial_loss_scale"]),
            minimum=float(v["min_loss_scale"]),
            window=float(v["loss_scale_window"]),
            hysteresis=v["hysteresis"],
        )
    output = v["output_dtype"] or base
    return PrecisionPolicy(
        compute=base,
        params=params,
        gather=base if params is not base else None,
        reduce=DType.FP32 if v["grad_reduce_in_fp32"] else base,
        main_grads=v["main_grads_dtype"],
        main_params=v["main_params_dtype"],
        precision_aware=_precision_aware(v),
        remainders=v["store_param_remainders"],
        exp_avg=v["exp_avg_dtype"],
        exp_avg_sq=v["exp_avg_sq_dtype"],
        pipeline=v["pipeline_dtype"] or output,
        output=output,
        autocast=(v["autocast_dtype"] or base) if v["autocast_enabled"] else None,
        loss_scale=scale,
        regions=(*edges, *module_regions, Region(quant=quant)),
        reuse_grad_buffer=v["reuse_grad_buf_for_mxfp8_param_ag"],
        keep_fp32=tuple(v["keep_fp32"] or ()),
        logits=v["logit_dtype"],
        router=None if v["moe_router_dtype"] is None else dtype(v["moe_router_dtype"]),
        residual_fp32=v["fp32_residual_connection"],
        softmax_fp32=v["attention_softmax_in_fp32"],
    )


def dead_patterns(patterns: Mapping[str, Any] | tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The globs among `patterns` that match none of `names`: an exclusion that excludes nothing is an error, not a no-op."""
    return tuple(pattern for pattern in patterns if not fnmatch.filter(names, pattern))
