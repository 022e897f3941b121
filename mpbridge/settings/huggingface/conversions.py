"""What config.json says in its own way, converted to megatron-core's settings and back: rotary embeddings (rope_parameters, or rope_theta with
rope_scaling), and hybrids with Mamba layers, whose fields have names of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpbridge.settings.huggingface.families import ConfigFields, Family

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's RotaryEmbedding._apply_scaling (0.16.1 to 0.20); Llama 3.1, 3.2 and 3.3 use the same."""
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""transformers' values if YaRN's bounds are omitted, null or 0 (modeling_rope_utils.py)."""
_SCALES = ("mscale", "mscale_all_dim")


def rope_section(fields: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """The model section's settings of rotary embeddings."""
    own, scaling = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    theta = fields.number("rope_theta", 10000.0, least=1.0)
    if own is not None and scaling is not None and _spelled(own) != _spelled(scaling):
        both = f"rope_scaling={scaling!r} and rope_parameters={own!r}"
        fields.fault(f"{both} differ, and transformers uses the first: remove one of them")
    given = own if own is not None else scaling if scaling is not None else {}
    name = "rope_parameters" if own is not None else "rope_scaling"
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        fields.fault(f"{name}: expected one mapping for all layers, of rope_type and its factors")
        return {}
    inner = ConfigFields(given, fields.faults, {}, within=f"{name}.")
    if inner.has("rope_theta"):
        theta = inner.number("rope_theta", theta, least=1.0)
    kind = inner.raw("rope_type") or inner.raw("type") or "default"
    inner.raw("type")  # older files have both
    out: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": theta}
    out |= _scaled(str(kind), inner, latent=latent)
    for place in (fields, inner):
        place.must("partial_rotary_factor", (1.0, 1), "transformers rotates all channels of a head in these models")
    for left in inner.left():
        inner.fault(f"{left}={given[left]!r} is not mapped")
    return out


def _spelled(given: Any) -> Any:
    """A form that is equal for mappings with rope_type and with type, as in older files."""
    if not isinstance(given, dict):
        return given
    plain = {name: value for name, value in given.items() if name not in ("type", "rope_theta")}
    return plain | {"rope_type": given.get("rope_type", given.get("type", "default"))}


def _scaled(kind: str, inner: ConfigFields, *, latent: bool) -> dict[str, Any]:
    if kind == "yarn":
        return _latent_yarn(inner) if latent else _yarn(inner)
    # megatron-core multiplies attention scores by a function of this factor, also in plain latent attention
    plain: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0} if latent else {}
    if kind == "default":
        return plain
    if kind == "linear" and not latent:
        return {"seq_len_interpolation_factor": _factor(inner)}
    if kind == "llama3" and not latent:
        for name, value in _LLAMA3.items():
            found = inner.number(name, value)
            if found != value:
                inner.fault(f"{name}={found:g}: expected {value:g}, which megatron-core's rope_scaling has built in")
        return {"rope_scaling": True, "rope_scaling_factor": _factor(inner)}
    known, why = (
        "default or yarn" if latent else "default, linear, llama3 or yarn",
        "for these layers mpbridge maps no other",
    )
    inner.fault(f"rope_type={kind!r}: expected {known}: {why} scaling to megatron-core's settings")
    for name in inner.left():  # its factors are not reported as separate faults
        inner.raw(name)
    return plain


def _factor(inner: ConfigFields) -> float:
    """The factor by which positions are stretched; transformers has no default for it."""
    if not inner.has("factor"):
        inner.fault("factor is missing")
        return 1.0
    return inner.number("factor", 1.0, least=1.0)


def _bounds(inner: ConfigFields) -> dict[str, float]:
    betas = {name: inner.number(name, value) or value for name, value in _BETAS.items()}
    if betas["beta_fast"] <= betas["beta_slow"]:
        inner.fault(f"beta_fast={betas['beta_fast']:g}: expected more than beta_slow={betas['beta_slow']:g}")
    return betas


def _scales(inner: ConfigFields, factor: float) -> tuple[float, float] | None:
    """mscale and mscale_all_dim if both are set; None: sines and cosines are multiplied by 0.1 ln factor + 1, as in transformers unless both are set."""
    pair = inner.number("mscale"), inner.number("mscale_all_dim")
    usual = 0.1 * math.log(factor) + 1.0
    given = inner.number("attention_factor", usual)
    if given not in (usual, 1.0):
        expected = f"expected 1, or {usual} (0.1 ln factor + 1)"
        inner.fault(f"attention_factor={given}: {expected}: mpbridge maps no other to megatron-core's mscale")
    if inner.has("attention_factor"):  # transformers reads the other two only if it is omitted
        return None if given == usual else (1.0, 1.0)
    return pair if all(pair) else None


def _yarn(inner: ConfigFields) -> dict[str, Any]:
    factor = _factor(inner)
    scales = dict(zip(_SCALES, _scales(inner, factor) or (None, None), strict=True))
    return {f"yarn_{name}": value for name, value in (_bounds(inner) | scales).items()} | {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": inner.size("original_max_position_embeddings"),
        "yarn_correction_range_round_to_int": inner.flag("truncate", True),
    }


def _latent_yarn(inner: ConfigFields) -> dict[str, Any]:
    inner.must("attention_factor", (), "it follows from mscale and mscale_all_dim")
    inner.must("truncate", (True,), "megatron-core rounds the range of corrected frequencies")
    mscale, whole = inner.number("mscale"), inner.number("mscale_all_dim")
    if whole and not mscale:
        why = "megatron-core has no setting that matches transformers here"
        inner.fault(f"mscale_all_dim={whole:g} without mscale: {why}")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": _factor(inner),
        "original_max_position_embeddings": inner.size("original_max_position_embeddings"),
        **_bounds(inner),
        # transformers reads mscale only if mscale_all_dim is set
        "mscale": mscale if whole else 1.0,
        "mscale_all_dim": whole,
    }


def rope_fields(model: Mapping[str, Any], *, latent: bool) -> dict[str, Any]:
    """rope_theta and rope_scaling of config.json from a model section with its defaults filled in."""
    out: dict[str, Any] = {"rope_theta": float(model["rotary_base"]), "rope_scaling": None}
    if latent and model["rope_type"] == "yarn":
        scaling = {name: model[name] for name in ("original_max_position_embeddings", *_BETAS, *_SCALES)}
        out["rope_scaling"] = {"type": "yarn", "factor": float(model["rotary_scaling_factor"]), **scaling}
    elif model["position_embedding_type"] == "yarn":
        own = {name: model[f"yarn_{name}"] for name in ("original_max_position_embeddings", *_BETAS, *_SCALES)}
        unsaid = _SCALES if None in (own[name] for name in _SCALES) else ()
        out["rope_scaling"] = {
            "rope_type": "yarn", "factor": float(model["yarn_rotary_scaling_factor"]),
            **{name: value for name, value in own.items() if name not in unsaid},
            **({} if model["yarn_correction_range_round_to_int"] else {"truncate": False}),
        }  # fmt: skip
    elif model["rope_scaling"]:
        out["rope_scaling"] = {"rope_type": "llama3", "factor": float(model["rope_scaling_factor"]), **_LLAMA3}
    elif model["seq_len_interpolation_factor"] is not None:
        out["rope_scaling"] = {"rope_type": "linear", "factor": float(model["seq_len_interpolation_factor"])}
    return out


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


def hybrid_pattern(fields: ConfigFields) -> str:
    """A hybrid's pattern of layers; what its other fields say of Mamba layers is checked."""
    for name, (allowed, why) in _FIXED.items():
        fields.must(name, allowed, why)
    pattern = _pattern(fields)
    for name in (*_NO_EFFECT, *(() if "E" in pattern else _OF_EXPERTS)):
        fields.raw(name)
    # from 0 to infinity, which transformers 5 writes as a mapping, because JSON has no such number
    given = fields.raw("time_step_limit")
    ends = given if isinstance(given, list) else ()
    sides = [one.get("__float__") if isinstance(one, dict) else one for one in ends]
    if given is not None and sides not in ([0.0, math.inf], [0.0, "Infinity"]):
        fields.fault(f"time_step_limit={given}: expected [0.0, Infinity]: megatron-core does not limit step sizes")
    return pattern


def _pattern(fields: ConfigFields) -> str:
    """As written, from the list of kinds, or Mamba layers alone."""
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


def hybrid_json(model: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of config.json that only hybrids have, from a model section with its defaults filled in."""
    pattern, hidden = model["hybrid_override_pattern"], model["hidden_size"]
    out: dict[str, Any] = {
        "num_hidden_layers": len(pattern), "conv_kernel": 4, "use_conv_bias": True, "use_bias": False,
        "layer_norm_epsilon": model["layernorm_epsilon"], "residual_in_fp32": bool(model.get("fp32_residual_connection")),
    }  # fmt: skip
    if family.name == "mamba2":
        inner = (model["mamba_num_heads"] or 2 * hidden // model["mamba_head_dim"]) * model["mamba_head_dim"]
        return out | {"hidden_act": "silu", "expand": inner // hidden}
    out |= {
        "hybrid_override_pattern": pattern, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "mlp_bias": False,
        "attention_bias": False, "attention_dropout": model["attention_dropout"], "hidden_dropout": model["hidden_dropout"],
    }  # fmt: skip
    if "E" not in pattern:
        return out
    return out | {
        "n_routed_experts": model["num_moe_experts"], "num_experts_per_tok": model["moe_router_topk"], "n_shared_experts": 1,
        "moe_intermediate_size": model["moe_ffn_hidden_size"] or model["ffn_hidden_size"] or 4 * hidden,
        "moe_shared_expert_intermediate_size": model["moe_shared_expert_intermediate_size"], "moe_latent_size": model["moe_latent_size"],
        **sigmoid_json(model),
    }  # fmt: skip


def sigmoid_json(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a router whose scores are sigmoids, as deepseek_v3 and nemotron_h have it."""
    return {
        "routed_scaling_factor": model["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": model["moe_router_num_groups"] or 1,
        "topk_group": model["moe_router_group_topk"] or 1,
        "norm_topk_prob": True,
    }
