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


def _by_target(**tables: Mapping[str, str]) -> Mapping[tuple[str, str], str]:
    return MappingProxyType({(target, name): text for target, table in tables.items() for name, text in table.items()})


USERS_OWN = _by_target(
    model={
        "activation_func_fp8_input_store": "stores an activation function's input in FP8 for the backward pass, whether or not GEMMs are quantized",
        "disable_parameter_transpose_cache": "trades memory for time in Transformer Engine",
        "fp8_interval": "not read anywhere in megatron-core 0.16.1",
        "tp_only_amax_red": "which ranks combine FP8 amaxes: a matter of communication",
        "use_kitchen": "a different quantization library",
        "use_kitchen_attention": "a different quantization library",
        "kitchen_attention_backend": "a different quantization library",
        "apply_query_key_layer_scaling": "scales attention scores by the layer number (and forces an FP32 softmax)",
        "moe_dispatch_fwd_dtype": "what one dispatcher (ncclep) sends to the experts",
        "moe_combine_bwd_dtype": "what one dispatcher (ncclep) sends back in the backward pass",
        "moe_single_grouped_weight": "one weight tensor for all experts of a rank",
        "mamba_training_ssm_states_dtype": "states of Mamba layers",
        "dsa_indexer_k_norm_fp32": "one norm of sparse attention's indexer",
    },
    optimizer={"muon_fp32_matmul_prec": "Muon's own arithmetic"},
    ddp={
        "reduce_scatter_with_fp32_accumulation": "sums 16-bit gradients locally in FP32, independent of grad_reduce_in_fp32",
        "check_for_large_grads": "a check, not only of precision",
    },
)
"""(target, field) -> what it does. Left alone; a plan reports it if it is set, and the audit reads it."""

PROCESS_WIDE = _by_target(
    model={
        "disable_bf16_reduced_precision_matmul": "sets torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction for the whole process, also for what runs later; the CPU device layer restores the flag",
    },
)
"""(target, field) -> the process-wide switch that it sets. Left alone and reported."""

NOT_PRECISION = _by_target(
    model={
        "grad_scale_func": "a function set by training scripts once the optimizer exists: the loss scale's",
        "moe_grad_scale_func": "like grad_scale_func, for the auxiliary losses",
        "mtp_grad_scale_func": "like grad_scale_func, for the multi-token prediction loss",
        "experimental_attention_variant_loss_scale_func": "like grad_scale_func, for the loss of an attention variant",
        "inference_moe_disable_fused_quant_kernels": "inference only",
        "dsa_indexer_k_norm_epsilon": "a norm's formula",
        "mup_attn_scale_power": "attention's formula",
        "moe_router_quantile_balancing_ema": "the router's formula",
        "layernorm_epsilon": "the norm's formula",
        "moe_router_topk_scaling_factor": "the router's formula",
        "mscale": "YaRN's formula",
        "mscale_all_dim": "YaRN's formula",
        "mtp_loss_scaling_factor": "a loss weight",
        "rotary_scaling_factor": "RoPE's formula",
        "softmax_scale": "attention's formula",
    },
    optimizer={
        "muon_scalar_optimizer": "which optimizer updates what Muon does not",
        "muon_extra_scale_factor": "Muon's formula",
        "muon_scale_mode": "Muon's formula",
    },
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
