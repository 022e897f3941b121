"""The table of every precision field that a policy decides on megatron-core's three configs: its value, why, and what would change it.

A row states the versions of megatron-core in which its field exists. Fields that a policy does not decide are in `megatron_spec.classes`; a test
requires that every precision-looking field of every described version is in exactly one class."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, dtype
from mpbridge.precision.config import FUSED
from mpbridge.precision.megatron_spec.precision_field import (
    KEEP,
    TARGETS,
    Facts,
    FieldValue,
    ModuleRules,
    PrecisionField,
    Target,
)
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017
from mpbridge.precision.policy import Quant, own_main


def _of(low: Literal["fp8", "fp4"], attribute: str, off: Any) -> FieldValue:
    """Attribute of the policy's quantization ("row.core": megatron-core's name for its scaling), or megatron-core's default without one."""
    read = attrgetter(attribute)

    def value(facts: Facts) -> Any:
        quant: Quant | None = getattr(facts.policy, low)
        return off if quant is None else read(quant)

    return value


def _gathers(bits: int) -> FieldValue:
    """Whether weights of that width are gathered: the distributed optimizer quantizes anew what it updated by this switch alone, also what a module's rule stores."""
    # a frozen base is in no buffer: 0.16 lacks FP4's switch and needs none then
    return lambda f: (
        any(quant.bits == bits and quant.stored for quant in f.policy.quants)
        and not (bits == 4 and f.policy.all_frozen)
    )


def _scale(attribute: str) -> FieldValue:
    """A parameter of dynamic loss scaling; without loss scaling megatron-core reads none of them."""
    return lambda facts: KEEP if facts.policy.loss_scale is None else getattr(facts.policy.loss_scale, attribute)


def _edge(side: int) -> FieldValue:
    return lambda facts: 1 if facts.policy.ends is None else facts.policy.ends[side]


def _stated(attribute: str) -> FieldValue:
    def value(facts: Facts) -> Any:
        stated = getattr(facts.policy, attribute)
        return KEEP if stated is None else stated

    return value


def _state(attribute: str) -> FieldValue:
    """An optimizer state's dtype; megatron-core rejects anything but FP32 without its precision-aware optimizer."""

    def value(facts: Facts) -> Any:
        if facts.policy.precision_aware is False:
            return DType.FP32
        stated = getattr(facts.policy, attribute)
        if stated is None:
            return KEEP
        return stated if facts.aware else DType.FP32

    return value


def _router(facts: Facts) -> Any:
    """The strings 'fp32' and 'fp64': megatron-core (moe/router.py) compares with them, and silently ignores a torch dtype."""
    if facts.policy.router is not None:
        return facts.policy.router.short
    own = facts.own("model", "moe_router_dtype", None)
    if own in (None, "fp32", "fp64"):
        return KEEP
    try:
        meant = dtype(own)
    except BadValue:
        return KEEP  # left for megatron-core or the schema to reject
    return meant.short if meant in (DType.FP32, DType.FP64) else None


def _optimizer_scaling(facts: Facts) -> Any:
    """None with FP8 off. Megatron-LM's arguments always set "delayed", which disables nothing and is left alone."""
    if facts.fp8:
        return facts.fp8.row.core
    return KEEP if facts.own("optimizer", "fp8_recipe", None) == "delayed" else None


def _softmax(facts: Facts) -> Any:
    if facts.policy.softmax_fp32 is None:
        return KEEP
    # megatron-core forces it on with query-key layer scaling
    return facts.policy.softmax_fp32 or bool(facts.own("model", "apply_query_key_layer_scaling", False))


def _main_copy(facts: Facts) -> Any:
    """Megatron-FSDP holds FP32 main weights or none; policies that specify neither keep the user's choice."""
    policy = facts.policy
    if not facts.megatron_fsdp or policy.main_params not in (DType.FP32, policy.params):
        return KEEP
    return not own_main(policy)


def _main_copy_dtype(facts: Facts) -> Any:
    """The same for versions in which Megatron-FSDP's main weights have a dtype; None: the parameters are their own main weights."""
    kept = _main_copy(facts)
    return kept if kept is KEEP else DType.FP32 if kept else None


def _under_megatron_fsdp(value: FieldValue) -> FieldValue:
    """A field that only Megatron-FSDP reads."""
    return lambda facts: value(facts) if facts.megatron_fsdp else KEEP


def _accumulated(facts: Facts) -> DType | None:
    """Megatron-FSDP's accumulator; None: the parameters' dtype."""
    wanted = facts.policy.accumulate or facts.policy.reduce
    return None if wanted is facts.policy.params else wanted


def _module_rules(facts: Facts) -> ModuleRules | None:
    policy = facts.policy
    asked = policy.module_regions or any(quant.by_factory for quant in policy.quants)
    return ModuleRules(regions=policy.regions) if asked else None


def _reuse(facts: Facts) -> bool:
    # Megatron-LM's arguments.py also switches it off: Megatron-FSDP has no such shared buffer
    return facts.policy.reuse_grad_buffer and not facts.megatron_fsdp


def _with_fp8(facts: Facts, value: Any) -> bool:
    return facts.policy.fp8 is not None


def _storage_turns(facts: Facts, value: Any) -> bool:
    # the reused gradient buffer needs FP8 storage
    return facts.policy.fp8 is not None and (value is True or not facts.policy.reuse_grad_buffer)


def _with_fp4(facts: Facts, value: Any) -> bool:
    return facts.policy.fp4 is not None


def _gather_turns(bits: int) -> Callable[[Facts, Any], bool]:
    """As the model's own switch, but not to false where a module's rule stores such weights."""
    turns = _storage_turns if bits == 8 else _with_fp4

    def turned(facts: Facts, value: Any) -> bool:
        own = [region.quant for region in facts.policy.module_regions]
        return turns(facts, value) and (value is True or not any(q and q.stored and q.bits == bits for q in own))

    return turned


def _with_stored_mxfp8(facts: Facts, value: Any) -> bool:
    quant = facts.policy.fp8
    return quant is not None and quant.stored and quant.row.stored.through_grads and not facts.megatron_fsdp


def _state_turns(facts: Facts, value: Any) -> bool:
    # a state below FP32 by itself requires the precision-aware optimizer, unless the parameters are their own main copy
    return facts.aware or not own_main(facts.policy)


def _main_turns(facts: Facts, value: Any) -> bool:
    # main weights in the parameters' dtype are the parameters, and no field is written then
    return _state_turns(facts, value) and (facts.aware or value != facts.policy.params)


def _low_states(facts: Facts) -> bool:
    """Whether a state is below FP32, which only a precision-aware optimizer can keep."""
    return any(getattr(facts.policy, state) not in (None, DType.FP32) for state in FUSED.values())


def _row(target: Target, field: str, value: FieldValue, why: str, default: Any, **more: Any) -> PrecisionField:
    return PrecisionField(target=target, field=field, value=value, why=why, default=default, **more)


_HALVES: tuple[PrecisionField, ...] = (
    _row("model", "bf16", lambda f: f.policy.compute is DType.BF16, "the model computes in BF16", False),
    _row("model", "fp16", lambda f: f.policy.compute is DType.FP16, "the model computes in FP16", False),
    # with bf16 on, megatron-core's optimizer keeps an FP32 copy (Float16Optimizer); off, it updates the parameters themselves (FP32Optimizer)
    _row("optimizer", "bf16", lambda f: f.policy.compute is DType.BF16 and not own_main(f.policy), "main weights separate from BF16 parameters", False),
    _row("optimizer", "fp16", lambda f: f.policy.compute is DType.FP16, "main weights separate from FP16 parameters", False),
    _row("model", "params_dtype", lambda f: f.policy.params, "resident parameters", DType.FP32),
    _row("optimizer", "params_dtype", lambda f: f.policy.params, "resident parameters", DType.FP32),
    _row("model", "pipeline_dtype", lambda f: DType.FP32 if f.wide_stages else f.policy.pipeline, "activations between pipeline stages", None,
         knob="pipeline_dtype", none_derives=True),
    _row("model", "enable_autocast", lambda f: f.policy.autocast is not None, "torch autocast around the model", False, knob="autocast_enabled"),
    _row("model", "autocast_dtype", lambda f: f.policy.autocast or f.policy.params, "follows params_dtype unless autocast is on", None, knob="autocast_dtype",
         turns=lambda f, v: f.policy.autocast is not None, none_derives=True, follows="params_dtype"),
    _row("model", "fp32_residual_connection", _stated("residual_fp32"), "the residual stream", False, knob="fp32_residual_connection"),
    _row("model", "attention_softmax_in_fp32", _softmax, "the softmax of attention", True, knob="attention_softmax_in_fp32"),
    _row("model", "moe_router_dtype", _router, "the router's arithmetic", None, knob="moe_router_dtype", compared_as_text="'fp32' and 'fp64'"),
)  # fmt: skip
_LOW: tuple[PrecisionField, ...] = (
    _row("model", "fp8", _of("fp8", "format", None), "format of GEMM operands", None, knob="fp8", turns=lambda f, v: f.policy.quant is None and f.policy.compute is not DType.FP32 and isinstance(v, str)),
    _row("model", "fp8_recipe", _of("fp8", "row.core", "delayed"), "how FP8 scales are chosen", "delayed"),
    _row("model", "fp8_param", _of("fp8", "stored", False), "weights stored in FP8", False, knob="fp8_param", turns=_storage_turns),
    _row("model", "fp8_quantizer_factory", _of("fp8", "factory", None), "for the custom FP8 recipe only", None),
    _row("model", "fp8_margin", _of("fp8", "margin", 0), "delayed scaling only", 0, knob="fp8_margin", turns=_with_fp8),
    _row("model", "fp8_amax_history_len", _of("fp8", "amax_history", 1), "delayed scaling only", 1, knob="fp8_amax_history_len", turns=_with_fp8),
    _row("model", "fp8_amax_compute_algo", _of("fp8", "amax_algo", "most_recent"), "delayed scaling only", "most_recent", knob="fp8_amax_compute_algo", turns=_with_fp8),
    _row("model", "fp8_wgrad", _of("fp8", "wgrad", True), "delayed scaling only", True, knob="fp8_wgrad", turns=_with_fp8),
    _row("model", "fp8_dot_product_attention", lambda f: f.policy.fp8 is not None and f.policy.fp8.attention != "none", "attention in FP8", False,
         knob="fp8_dot_product_attention", turns=lambda f, v: _with_fp8(f, v) and (v or not f.policy.fp8 or f.policy.fp8.attention != "multi_head")),
    _row("model", "fp8_multi_head_attention", lambda f: f.policy.fp8 is not None and f.policy.fp8.attention == "multi_head", "attention in FP8", False,
         knob="fp8_multi_head_attention", turns=lambda f, v: f.policy.fp8 is not None and f.policy.fp8.attention != "none"),
    _row("model", "fp4", _of("fp4", "format", None), "format of GEMM operands", None),
    _row("model", "fp4_recipe", _of("fp4", "row.core", "nvfp4"), "how FP4 scales are chosen", "nvfp4"),
    _row("model", "fp4_param", _of("fp4", "stored", False), "weights stored in FP4", False, knob="fp4_param", turns=_with_fp4),
    _row("model", "fp4_quantizer_factory", _of("fp4", "factory", None), "for the custom FP4 recipe only", None),
    _row("model", "first_last_layers_bf16", lambda f: f.policy.ends is not None and f.policy.quant is not None, "edge layers excluded from quantization", False, knob="first_last_layers_bf16",
         turns=lambda f, v: f.policy.quant is not None),
    _row("model", "num_layers_at_start_in_bf16", _edge(0), "first layers excluded from quantization", 1, knob="num_layers_at_start_in_bf16",
         turns=lambda f, v: f.policy.ends is not None),
    _row("model", "num_layers_at_end_in_bf16", _edge(1), "last layers excluded from quantization", 1, knob="num_layers_at_end_in_bf16",
         turns=lambda f, v: f.policy.ends is not None),
    _row("model", "fp8_output_proj", lambda f: False, "the output layer is not quantized", False, holds=SINCE_017),
    _row("model", "quant_recipe", _module_rules, "rules for individual modules", None),
    # written even under emulation: it decides who keeps main weights, and needs no Transformer Engine
    _row("optimizer", "fp8_recipe", _optimizer_scaling, "only with FP8 on: otherwise it disables the precision-aware optimizer", None),
    _row("optimizer", "reuse_grad_buf_for_mxfp8_param_ag", _reuse, "MXFP8 parameters gathered through the gradient buffer", False,
         knob="reuse_grad_buf_for_mxfp8_param_ag", turns=_with_stored_mxfp8),
    _row("ddp", "reuse_grad_buf_for_mxfp8_param_ag", _reuse, "MXFP8 parameters gathered through the gradient buffer", False,
         knob="reuse_grad_buf_for_mxfp8_param_ag", turns=_with_stored_mxfp8),
    _row("ddp", "fp8_param_gather", _gathers(8), "parameters all-gathered in FP8", False, knob="fp8_param_gather", turns=_gather_turns(8)),
    _row("ddp", "fp4_param_gather", _gathers(4), "parameters all-gathered in FP4", False, knob="fp4_param_gather", turns=_gather_turns(4), holds=SINCE_017, required=True),
)  # fmt: skip
_STATES: tuple[PrecisionField, ...] = (
    _row("ddp", "grad_reduce_in_fp32", lambda f: f.policy.reduce is DType.FP32, "gradient buffers and their reduction", False, knob="grad_reduce_in_fp32",
         turns=lambda f, v: f.policy.compute is not DType.FP32 and (v is False or f.policy.main_grads in (None, DType.FP32))),
    _row("ddp", "preserve_fp32_weights", _main_copy, "Megatron-FSDP's main weights", True, holds=BEFORE_017),
    _row("ddp", "megatron_fsdp_main_params_dtype", _main_copy_dtype, "Megatron-FSDP's main weights", DType.FP32, holds=SINCE_017),
    # grad_reduce_in_fp32 is read by megatron-core's own wrapper only
    _row("ddp", "megatron_fsdp_main_grads_dtype", _under_megatron_fsdp(_accumulated),
         "Megatron-FSDP's accumulated gradients; none: in the parameters' dtype", None, holds=SINCE_017),
    _row("ddp", "megatron_fsdp_grad_comm_dtype", _under_megatron_fsdp(lambda f: f.policy.reduce if f.policy.accumulate else None),
         "gradients in communication; none: as they are accumulated", None, holds=SINCE_017),
    _row("ddp", "megatron_fsdp_use_decoupled_grad", _under_megatron_fsdp(lambda f: False), "the optimizer reads its gradients from .grad", False, holds=SINCE_017),
    _row("optimizer", "use_precision_aware_optimizer", _stated("precision_aware"), "FusedAdam owns main weights and moments", False,
         knob="use_precision_aware_optimizer", turns=lambda f, v: v is True or not _low_states(f)),
    _row("optimizer", "store_param_remainders", _stated("remainders"), "main weights as 16 more bits of BF16 parameters", True, knob="store_param_remainders",
         turns=lambda f, v: v is False or f.policy.params is DType.BF16),
    _row("optimizer", "main_params_dtype", _state("main_params"), "main weights, as the precision-aware optimizer reads it", DType.FP32, knob="main_params_dtype",
         turns=_main_turns),
    _row("optimizer", "main_grads_dtype", _state("main_grads"), "gradients, as the precision-aware optimizer reads it", DType.FP32, knob="main_grads_dtype",
         turns=lambda f, v: f.aware and f.policy.reduce is not DType.FP32),
    _row("optimizer", "exp_avg_dtype", _state("exp_avg"), "first Adam moment, as the precision-aware optimizer reads it", DType.FP32, knob="exp_avg_dtype",
         turns=_state_turns),
    _row("optimizer", "exp_avg_sq_dtype", _state("exp_avg_sq"), "second Adam moment, as the precision-aware optimizer reads it", DType.FP32, knob="exp_avg_sq_dtype",
         turns=_state_turns),
    _row("optimizer", "loss_scale", lambda f: f.policy.loss_scale and f.policy.loss_scale.static, "none: dynamic under FP16, off otherwise", None,
         knob="loss_scale"),
    _row("optimizer", "initial_loss_scale", _scale("initial"), "dynamic loss scale", 2.0**32, knob="initial_loss_scale"),
    _row("optimizer", "min_loss_scale", _scale("minimum"), "dynamic loss scale", 1.0, knob="min_loss_scale"),
    _row("optimizer", "loss_scale_window", _scale("window"), "dynamic loss scale", 1000.0, knob="loss_scale_window"),
    _row("optimizer", "hysteresis", _scale("hysteresis"), "dynamic loss scale", 2, knob="hysteresis"),
)  # fmt: skip


def _dynamic(facts: Facts) -> Any:
    scale = facts.policy.loss_scale
    return False if scale is not None and scale.dynamic else KEEP


def _needs(low: Literal["fp8", "quant"]) -> FieldValue:
    return lambda facts: KEEP if getattr(facts.policy, low) else False


_CLEARED: tuple[PrecisionField, ...] = (
    _row("ddp", "check_for_nan_in_grad", _dynamic, "its fatal check would end the run at the first overflow, which the loss scale is designed to skip", False,
         kind="cleared"),
    _row("ddp", "keep_fp8_transpose_cache", _needs("fp8"), "requires FP8 weights", False, kind="cleared"),
    _row("ddp", "param_name_patterns_for_fp32_local_accumulation", lambda f: () if f.policy.reduce is DType.FP32 else KEEP,
         "FP32 gradients accumulate in FP32 anyway, and megatron-core rejects both", (), kind="cleared", holds=SINCE_017),
    _row("model", "moe_router_padding_for_quantization", _needs("quant"), "megatron-core rejects it without FP8 or FP4, whatever single modules do", False, kind="cleared"),
    _row("model", "moe_router_padding_for_fp8", _needs("quant"), "megatron-core rejects it without FP8 or FP4, whatever single modules do", False, kind="cleared"),
)  # fmt: skip

TABLE: tuple[PrecisionField, ...] = tuple(
    sorted((*_HALVES, *_LOW, *_STATES, *_CLEARED), key=lambda row: TARGETS.index(row.target))
)
"""All rows by target, in the order in which a plan lists them."""
