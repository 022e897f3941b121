"""Hybrids with Mamba layers: converts their config.json, whose fields have names of their own, to a model section and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpbridge.settings.huggingface.families import Family
from mpbridge.settings.huggingface.fields import ConfigFields

_KINDS: Mapping[str, tuple[str, ...]] = {
    "M": ("linear_attention", "mamba"), "*": ("full_attention", "attention"), "-": ("mlp",), "E": ("moe",),
}  # fmt: skip
"""Symbol of a pattern -> the kind of layer in transformers' lists, the newer word first."""
_MIXER = "megatron-core's MambaMixer has no other"
_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "conv_kernel": ((4,), _MIXER), "use_conv_bias": ((True,), _MIXER), "mamba_proj_bias": ((False,), _MIXER), "use_bias": ((False,), _MIXER),
    "mamba_hidden_act": (("silu",), _MIXER), "hidden_act": (("silu",), _MIXER), "layer_norm_epsilon": ((1e-5,), "the epsilon of MambaMixer's gated norm"),
    "mlp_hidden_act": (("relu2",), "the activation of nemotron_h's layers"), "mlp_bias": ((False,), "megatron-core's linears have biases everywhere or nowhere"),
    "attention_bias": ((False,), "megatron-core cannot have biases on attention's linears only"),
    "sliding_window": ((None,), "every layer of attention sees the whole sequence"),
    "num_nextn_predict_layers": ((0,), "megatron-core's MambaModel predicts one token: set it to 0 for the model without those layers"),
}  # fmt: skip
"""Fields with one value that can be built -> that value, and why."""
_NO_EFFECT = (
    # how it is computed, what it starts from, and the dtype of its residual, which the recipe decides
    "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap", "time_step_min", "time_step_max",
    "time_step_floor", "time_step_rank", "rescale_prenorm_residual", "residual_in_fp32", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
)  # fmt: skip
_OF_EXPERTS = (
    "n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
)  # fmt: skip
"""Fields that transformers also writes for a model without mixtures of experts."""


def hybrid_section(fields: ConfigFields, family: Family, positions: int) -> dict[str, Any]:
    """The model section of a hybrid, without its experts. positions: the maximum sequence length of a family that has none."""
    for name, (allowed, why) in _FIXED.items():
        fields.must(name, allowed, why)
    for name in _NO_EFFECT:
        fields.raw(name)
    pattern = _pattern(fields)
    for name in () if "E" in pattern else _OF_EXPERTS:
        fields.raw(name)
    _unlimited(fields)
    out: dict[str, Any] = {
        "hybrid_override_pattern": pattern,
        **{name: fields.size(theirs) for name, theirs in family.sizes.items()},
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "gated_linear_unit": False,
        "activation_func": "squared_relu",
        "add_bias_linear": False,
        "hidden_dropout": fields.number("hidden_dropout"),
        "attention_dropout": fields.number("attention_dropout"),
        "init_method_std": fields.number("initializer_range", 0.02),
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings"),
    }
    heads, width, expand = out["mamba_num_heads"], out["mamba_head_dim"], fields.raw("expand")
    if "num_attention_heads" not in out:
        # no layer has attention, but megatron-core's config has heads
        out |= {"num_attention_heads": heads, "kv_channels": width, "max_sequence_length": positions}
        if out["hidden_size"] * expand != heads * width:
            fields.fault(f"hidden_size times expand={expand} is not {heads} heads of {width} channels")
    else:
        fields.must("attention_head_dim", (out["kv_channels"],), "head_dim's older name")
    return out


def _pattern(fields: ConfigFields) -> str:
    """The pattern of layers: as written, from the list of kinds, or Mamba layers alone."""
    listed = next((fields.raw(name) for name in ("layers_block_type", "layer_types") if fields.has(name)), None)
    symbols = {kind: symbol for symbol, kinds in _KINDS.items() for kind in kinds}
    if fields.has("hybrid_override_pattern"):
        pattern = fields.raw("hybrid_override_pattern")
    elif isinstance(listed, list):
        pattern = "".join(symbols.get(str(kind), "?") for kind in listed)
    else:
        pattern = "M" * fields.size("num_hidden_layers")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_KINDS):
        fields.fault(f"layers {str(listed or pattern)[:60]}: expected {', '.join(sorted(symbols))}")
        return "M"
    if fields.raw("num_hidden_layers") not in (None, len(pattern)):
        fields.fault(f"num_hidden_layers={fields.raw('num_hidden_layers')} for {len(pattern)} layers in the pattern")
    return pattern


def _unlimited(fields: ConfigFields) -> None:
    """Step sizes are not limited: from 0 to infinity, which transformers 5 writes as a mapping, because JSON has no such number."""
    given = fields.raw("time_step_limit")
    if given is not None and [one.get("__float__") if isinstance(one, dict) else one for one in given] not in (
        [0.0, math.inf],
        [0.0, "Infinity"],
    ):
        fields.fault(f"time_step_limit={given}: expected [0.0, Infinity]: megatron-core does not limit step sizes")


def hybrid_json(model: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of config.json that hybrids have, from a model section with its defaults filled in."""
    pattern = model["hybrid_override_pattern"]
    inner = (model["mamba_num_heads"] or 2 * model["hidden_size"] // model["mamba_head_dim"]) * model["mamba_head_dim"]
    derived = {
        "mamba_num_heads": inner // model["mamba_head_dim"],
        "num_query_groups": model["num_attention_heads"],
        "kv_channels": model["hidden_size"] // model["num_attention_heads"],
        "ffn_hidden_size": 4 * model["hidden_size"],
    }
    out: dict[str, Any] = {
        **{theirs: model[name] or derived.get(name) for name, theirs in family.sizes.items()},
        "num_hidden_layers": len(pattern),
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": model["layernorm_epsilon"],
        "residual_in_fp32": bool(model.get("fp32_residual_connection")),
    }
    if family.name == "mamba2":
        return out | {"hidden_act": "silu", "expand": inner // model["hidden_size"]}
    out |= {
        "hybrid_override_pattern": pattern, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "mlp_bias": False,
        "attention_bias": False, "attention_dropout": model["attention_dropout"], "hidden_dropout": model["hidden_dropout"],
    }  # fmt: skip
    if "E" not in pattern:
        return out
    return out | {
        "n_routed_experts": model["num_moe_experts"],
        "num_experts_per_tok": model["moe_router_topk"],
        "moe_intermediate_size": model["moe_ffn_hidden_size"] or model["ffn_hidden_size"] or 4 * model["hidden_size"],
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": model["moe_shared_expert_intermediate_size"],
        "moe_latent_size": model["moe_latent_size"],
        "routed_scaling_factor": model["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": model["moe_router_num_groups"] or 1,
        "topk_group": model["moe_router_group_topk"] or 1,
        "norm_topk_prob": True,
    }
