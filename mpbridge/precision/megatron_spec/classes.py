"""Precision-looking fields that no policy decides, and why. Together with `megatron_spec.fields.TABLE` they cover every described version, as a test checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

LOOKS_LIKE_PRECISION = re.compile(
    r"fp8|fp4|fp32|fp16|bf16|fp64|half|dtype|autocast|quant|amax|prec|reduced|loss_scale|hysteresis|nan|remainder|kitchen|transpose_cache"
    r"|scal|epsilon|large_grads|first_last"
)
"""Pattern of field names that the completeness test covers."""

USERS_OWN: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (
            "model",
            "activation_func_fp8_input_store",
        ): "stores an activation function's input in FP8 for the backward pass, whether or not GEMMs are quantized",
        ("model", "disable_parameter_transpose_cache"): "trades memory for time in Transformer Engine",
        ("model", "fp8_interval"): "not read anywhere in megatron-core 0.16.1",
        ("model", "tp_only_amax_red"): "which ranks combine FP8 amaxes: a matter of communication",
        ("model", "use_kitchen"): "a different quantization library",
        ("model", "use_kitchen_attention"): "a different quantization library",
        ("model", "kitchen_attention_backend"): "a different quantization library",
        (
            "model",
            "apply_query_key_layer_scaling",
        ): "scales attention scores by the layer number (and forces an FP32 softmax)",
        ("optimizer", "muon_fp32_matmul_prec"): "Muon's own arithmetic",
        (
            "ddp",
            "reduce_scatter_with_fp32_accumulation",
        ): "sums 16-bit gradients locally in FP32, independent of grad_reduce_in_fp32",
        ("ddp", "check_for_large_grads"): "a check, not only of precision",
        ("model", "moe_dispatch_fwd_dtype"): "what one dispatcher (ncclep) sends to the experts",
        ("model", "moe_combine_bwd_dtype"): "what one dispatcher (ncclep) sends back in the backward pass",
        ("model", "moe_single_grouped_weight"): "one weight tensor for all experts of a rank",
        ("model", "mamba_training_ssm_states_dtype"): "states of Mamba layers",
        ("model", "dsa_indexer_k_norm_fp32"): "one norm of sparse attention's indexer",
    }
)
"""(target, field) -> what it does. Left alone; a plan reports it if it is set, and the audit reads it."""

PROCESS_WIDE: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (
            "model",
            "disable_bf16_reduced_precision_matmul",
        ): "sets torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction for the whole process, "
        "also for what runs later; the CPU device layer restores the flag",
    }
)
"""(target, field) -> the process-wide switch that it sets. Left alone and reported."""

NOT_PRECISION: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (
            "model",
            "grad_scale_func",
        ): "a function set by training scripts once the optimizer exists: the loss scale's",
        ("model", "moe_grad_scale_func"): "like grad_scale_func, for the auxiliary losses",
        ("model", "mtp_grad_scale_func"): "like grad_scale_func, for the multi-token prediction loss",
        (
            "model",
            "experimental_attention_variant_loss_scale_func",
        ): "like grad_scale_func, for the loss of an attention variant",
        ("model", "inference_moe_disable_fused_quant_kernels"): "inference only",
        ("model", "dsa_indexer_k_norm_epsilon"): "a norm's formula",
        ("model", "mup_attn_scale_power"): "attention's formula",
        ("model", "moe_router_quantile_balancing_ema"): "the router's formula",
        ("optimizer", "muon_scalar_optimizer"): "which optimizer updates what Muon does not",
        ("model", "layernorm_epsilon"): "the norm's formula",
        ("model", "moe_router_topk_scaling_factor"): "the router's formula",
        ("model", "mscale"): "YaRN's formula",
        ("model", "mscale_all_dim"): "YaRN's formula",
        ("model", "mtp_loss_scaling_factor"): "a loss weight",
        ("model", "rotary_scaling_factor"): "RoPE's formula",
        ("model", "softmax_scale"): "attention's formula",
        ("optimizer", "muon_extra_scale_factor"): "Muon's formula",
        ("optimizer", "muon_scale_mode"): "Muon's formula",
    }
)
"""(target, field) -> what it is instead."""

MARK: Mapping[str, str] = MappingProxyType(
    {"model": "params_dtype", "optimizer": "params_dtype", "ddp": "grad_reduce_in_fp32"}
)
"""Target -> a field that its config has in every version: an object that declares it is megatron-core's config, not a wrapper around it."""

FILLED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": (
            "pipeline_dtype",
            "autocast_dtype",
            "attention_softmax_in_fp32",
            "moe_router_padding_for_quantization",
        ),
        "optimizer": ("store_param_remainders", "use_precision_aware_optimizer_no_fp8_or_ds_fp8"),
        "ddp": (),
    }
)
"""Fields that megatron-core's post-init derives from precision fields: copied from the validated twin, since a live object's post-init has already run."""
