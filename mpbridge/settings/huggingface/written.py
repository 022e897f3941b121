"""Converts a model section to config.json of the family that has such layers; settings that no family supports are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import Contradiction
from mpbridge.settings.huggingface.conversions import hybrid_json, rope_fields, sigmoid_json
from mpbridge.settings.huggingface.families import FAMILIES, Family
from mpbridge.settings.huggingface.section import section

_FUNCTION = (
    "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "softmax_type", "softmax_scale", "qk_l2_norm", "no_rope_freq",
    "rotary_interleaved", "window_attn_skip_freq", "attention_output_gate", "activation_func_clamp_value", "glu_linear_offset",
    "moe_apply_probs_on_input", "experimental_attention_variant", "multi_latent_attention", "num_moe_experts", "qk_layernorm", "add_qkv_bias",
    "window_size", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "rotary_percent",
    "seq_len_interpolation_factor", "moe_latent_size", "rope_scaling", "mtp_num_layers", "normalization", "gated_linear_unit", "activation_func", "add_bias_linear",
)  # fmt: skip
"""Settings that change what the model computes from its tensors, whether a folder's config.json mentions them or not."""
_TRAINING = frozenset({
        "attention_dropout", "hidden_dropout", "init_method_std", "moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_dtype",
        "moe_token_dispatcher_type", "moe_grouped_gemm", "mtp_loss_scaling_factor", "max_sequence_length", "vocab_size",
})  # fmt: skip
"""Settings of the section that may differ between training and the folder."""
_BUILDERS = {"softmax_type": "vanilla", "rotary_percent": 1.0, "moe_router_score_function": "softmax"}
"""The builder's values for omitted settings that are not null, 0 or false."""


def family_for(model: Mapping[str, Any]) -> Family:
    """The family whose layers a model section describes, the simplest if several do."""
    pattern = model.get("hybrid_override_pattern")
    if pattern:
        return FAMILIES["mamba2" if set(pattern) == {"M"} else "nemotron_h"]
    if model.get("multi_latent_attention"):
        return FAMILIES["deepseek_v3"]
    experts, window = bool(model["num_moe_experts"]), model["window_size"] is not None
    if model["qk_layernorm"]:
        return FAMILIES["qwen3_moe" if experts else "qwen3"]
    if model["add_qkv_bias"]:
        return FAMILIES["qwen2_moe" if experts else "qwen2"]
    return FAMILIES["mixtral" if experts else "mistral" if window else "llama"]


def config_json(model: Mapping[str, Any], *, rows: int, dtype: str) -> dict[str, Any]:
    """config.json of a model section with its defaults filled in. rows: rows of the embedding; dtype: torch's name of the weights' dtype.

    Raises Contradiction with every setting that the family's config.json cannot express.
    """
    family, hidden, heads = family_for(model), model["hidden_size"], model["num_attention_heads"]
    derived = {"num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden}
    if family.hybrid:
        derived["mamba_num_heads"] = 2 * hidden // model["mamba_head_dim"]
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **{theirs: model[name] or derived.get(name, model[name]) for name, theirs in family.sizes.items()},
        **(hybrid_json(model, family) if family.hybrid else _attention(model, family)),
        "vocab_size": rows,
        "initializer_range": model["init_method_std"],
        "tie_word_embeddings": bool(model["share_embeddings_and_output_weights"]),
        "use_cache": True,
        "torch_dtype": dtype,
    }
    refuse_differences(model, out)
    return out


def _attention(model: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of families whose layers all have attention."""
    out: dict[str, Any] = {
        "num_key_value_heads": model["num_query_groups"] or model["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": model["layernorm_epsilon"],
        "attention_dropout": model["attention_dropout"],
        **rope_fields(model, latent=family.latent),
    }
    if family.latent:
        same = {name: model[name] for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")}
        out |= {"qk_nope_head_dim": model["qk_head_dim"], "qk_rope_head_dim": model["qk_pos_emb_head_dim"], **same}
        out["num_nextn_predict_layers"] = model["mtp_num_layers"] or 0
    else:
        out["head_dim"] = model["kv_channels"] or model["hidden_size"] // model["num_attention_heads"]
        window = model["window_size"]
        out["sliding_window"] = None if window is None else window[0] + 1
        if family.window == "use_sliding_window":
            out |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    return out | (_experts(model, family) if family.experts else {})


def _experts(model: Mapping[str, Any], family: Family) -> dict[str, Any]:
    width = model["moe_ffn_hidden_size"] or model["ffn_hidden_size"] or 4 * model["hidden_size"]
    out: dict[str, Any] = {family.experts: model["num_moe_experts"], "num_experts_per_tok": model["moe_router_topk"]}
    out[family.expert_width] = width
    dense = [i for i, has in enumerate(mixtures(model["moe_layer_freq"], model["num_layers"])) if not has]
    loss, shared = model["moe_aux_loss_coeff"], model["moe_shared_expert_intermediate_size"]
    if family.latent:
        return out | sigmoid_json(model) | {
            "first_k_dense_replace": len(dense), "n_shared_experts": (shared or 0) // width, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "aux_loss_alpha": loss if isinstance(loss, (int, float)) else 0.0,
        }  # fmt: skip
    out |= {"router_aux_loss_coef": loss, "output_router_logits": False}
    if family.name != "mixtral":
        normed = not model["moe_router_pre_softmax"]
        out |= {"norm_topk_prob": normed, "mlp_only_layers": dense, "decoder_sparse_step": 1}
    return out | ({"shared_expert_intermediate_size": shared} if family.shared else {})


def refuse_differences(model: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raises Contradiction if config.json `data` describes another model than the section `model` (its defaults filled in)."""
    back = section(data, ahead=model["mtp_num_layers"] or 0)
    names = (name for name in dict.fromkeys((*back, *_FUNCTION)) if name not in _TRAINING and name in model)
    said = {name: back.get(name, _BUILDERS.get(name)) for name in names}
    faults = [
        f"model.{name}={model[name]}: config.json of {data['model_type']} says {value}"
        for name, value in said.items()
        if not _same(name, model[name], value, model)
    ]
    if faults:
        raise Contradiction(faults, subject="the model cannot be expressed in Hugging Face's layout")


def _same(name: str, own: Any, said: Any, model: Mapping[str, Any]) -> bool:
    if name.startswith("moe_") and not model["num_moe_experts"]:
        return True
    if name in ("num_query_groups", "kv_channels", "ffn_hidden_size") and own is None:
        return True  # derived from the other sizes, like the folder's
    if name == "moe_layer_freq":
        return mixtures(own, model["num_layers"]) == mixtures(said, model["num_layers"])
    return bool(own == said) or (not own and not said)


def mixtures(frequency: int | list[int], layers: int) -> list[bool]:
    """Which layers are mixtures of experts: those that a list says, or every layer i with i % frequency == 0 (megatron-core's gpt_layer_specs.py)."""
    return [bool(frequency[i]) if isinstance(frequency, list) else i % frequency == 0 for i in range(layers)]
